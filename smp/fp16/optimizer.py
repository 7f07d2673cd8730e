"""An optimizer over half precision parameters: fp32 masters, loss scale, steps that an overflow skips.

backward(loss)         loss * scale, in fp32
update_master_grads    gradients into the masters, / scale; is any of them infinite or NaN?
clip_master_grads      by the norm of the unscaled gradients          (optional; updates them first)
step                   no overflow: masters updated, parameters = rounded masters
                       overflow: nothing but the scale changes
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from smp import log
from smp.dp.optimizer_state import MASTERS_KEY
from smp.errors import StepError, UsageError
from smp.fp16.gradients import HALF
from smp.fp16.master import Masters
from smp.fp16.scaler import WARN_AFTER, LossScaler, make_scaler
from smp.pp.weights import TAKES_NONE

SCALER_KEY = "_smp_loss_scaler"


class FP16_Optimizer(Optimizer):
    """Wraps a torch optimizer; parameters in half precision are updated through fp32 masters.

    Usable alone, in one process. `smp.DistributedOptimizer` is one for a model spread over ranks. `param_groups`
    and `state` are the inner optimizer's own objects, never copies; their parameters are the masters.

    Args:
        optimizer: any torch optimizer. Its `zero_grad` is the wrapper's from now on.
        static_loss_scale: the loss scale when it is not dynamic; None is 1.
        dynamic_loss_scale: whether the scale follows overflows.
        dynamic_loss_args: `init_scale` (2**32), `scale_factor` (2), `scale_window` (1000), `min_scale` (1),
            `delayed_shift` (1), `consecutive_hysteresis` (False), see `LossScaler`.

    Attributes:
        optimizer: the inner optimizer; learning rate schedulers take it, or the wrapper.
        loss_scaler: the scaler; None where there is no half precision.
        overflow: whether the last gradients had an infinite or NaN element somewhere.
        step_was_skipped: whether the last step changed nothing because of that.
        first_closure_call_this_step: False while a closure is called again within one step.

    Raises:
        UsageError: `optimizer` is no plain torch optimizer, or the loss scale's arguments cannot work.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
    ) -> None:
        # The base class's constructor is left out on purpose: it would make a second set of groups.
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, FP16_Optimizer):
            raise UsageError(f"{type(self).__name__} wraps a plain torch optimizer, got {type(optimizer).__name__}")
        self.optimizer = optimizer
        self.loss_scaler: LossScaler | None = make_scaler(static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        self.overflow = False
        self.step_was_skipped = False
        self.first_closure_call_this_step = True
        self._masters = Masters()
        self._global_grad_norm: float | None = None
        self._grads_are_ready = False  # those of the masters are final and unscaled
        # By what parameters' gradients are multiplied: those that masters copy, those that masters share. None: nothing
        # is known about any.
        given = [param for group in optimizer.param_groups for param in group["params"]]
        has_gradients = any(param.grad is not None for param in given)
        self._scale_of_copied = self._scale_of_shared = 1.0 if has_gradients else None  # nobody can have scaled those
        self._looks_for_overflow = self._prepare()
        self._watch(given)
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]  # its own cannot know where gradients are

    def _prepare(self) -> bool:
        """Makes masters; returns whether gradients may overflow."""
        assert self.loss_scaler is not None
        self._masters.install(self.optimizer)
        return self.loss_scaler.scales or any(half.dtype == torch.float16 for half in self._masters.halves)

    def _watch(self, params: Iterable[Tensor]) -> None:
        """Lets `_on_gradient` be called when a gradient has reached one of these parameters of the model."""
        method = weakref.WeakMethod(self._on_gradient)  # parameters do not keep an optimizer, and its masters, alive

        def on_gradient(_: Tensor) -> None:
            if (call := method()) is not None:
                call()

        setattr(on_gradient, TAKES_NONE, True)
        for param in params:
            if param.is_floating_point():
                is_trained = param.requires_grad
                param.requires_grad_().register_post_accumulate_grad_hook(on_gradient)
                param.requires_grad_(is_trained)  # a frozen one may be thawed

    def _on_gradient(self) -> None:
        """A gradient has reached a parameter."""
        self.gradients_change()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"{type(self).__name__} cannot be copied or pickled: it updates these very parameters. Use state_dict(), "
            "and load_state_dict() of the optimizer that belongs to the other parameters"
        )

    # ---- the inner optimizer's own things

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does; half precision parameters get masters."""
        self._refuse_known(param_group, self._masters.halves)
        self.optimizer.add_param_group(param_group)
        self._watch(self.param_groups[-1]["params"])
        self._masters.install(self.optimizer)

    def _refuse_known(self, param_group: dict[str, Any], known: Iterable[Tensor]) -> None:
        """torch itself finds a parameter that is in a group already, but not when its master is there in its place."""
        params = param_group["params"]
        param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
        ids = {id(param) for param in known}
        if any(id(param) in ids for param in param_group["params"]):
            raise UsageError("add_param_group: some parameters are in a group of this optimizer already")

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_post_hook(hook)

    # ---- what there is

    @property
    def loss_scale(self) -> float:
        """By what the next loss is multiplied; 1 without half precision."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.loss_scale

    @property
    def master_params(self) -> list[Parameter]:
        """What the update works on: masters, and parameters that are in full precision anyway."""
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """By group, the half precision parameters (float16 or bfloat16)."""
        of = self._masters
        return [[of.half_of(p) for p in group["params"] if of.is_master(p)] for group in self.param_groups]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Parameter]]:
        """By group, their masters."""
        return [[p for p in group["params"] if self._masters.is_master(p)] for group in self.param_groups]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Parameter]]:
        """By group, the parameters that have no master."""
        return [[p for p in group["params"] if not self._masters.is_master(p)] for group in self.param_groups]

    def master_is_distributed(self, param: Tensor) -> bool:
        """Whether `param`, one of `master_params`, is a part of a distributed parameter."""
        return getattr(param, "_smp_shard", None) is not None

    def has_copied_gradient(self, half: Tensor) -> bool:
        """Whether the next step works on a copy of this gradient of a half precision parameter."""
        if half.grad is None or half.dtype not in HALF or not self._grads_are_ready:
            return False
        master = self._masters.master_of(half)
        return master is not None and master.grad is not half.grad

    def init_master_params(self) -> None:
        """Masters take the values of the model's parameters."""
        self._masters.reload()

    def reload_model_params(self) -> None:
        """The same: call it when weights have been changed behind the optimizer's back, through `.data`."""
        self._masters.reload()

    # ---- training

    def backward(self, loss: Tensor) -> None:
        """Gradients of `loss` times the loss scale."""
        self.before_backward()
        (loss.float() * self.loss_scale).backward()

    def before_backward(self) -> None:
        """Gradients that are there, from a pass at another scale or unscaled since, are brought to this scale: those to
        come are added to them."""
        scale, copied, shared = self.loss_scale, self._scale_of_copied, self._scale_of_shared
        if copied is not None and shared is not None and (copied, shared) != (scale, scale):
            self._rescale(scale / copied, scale / shared)
        self._scale_of_copied = self._scale_of_shared = scale

    def gradients_change(self) -> None:
        """Call when parameters' gradients have changed, or will: what masters have taken is not all any more."""
        self._grads_are_ready = False

    @torch.no_grad()
    def _rescale(self, copied: float, shared: float) -> None:
        """Multiplies parameters' gradients: those of which masters take copies, and those that masters share."""
        with torch._C.DisableTorchFunction():  # in a step's glue code parameters are placed values
            for param in self.master_params:
                half = self._masters.half_of(param)
                if half.grad is not None:
                    half.grad.mul_(shared if self._is_shared(param, half.grad) else copied)

    def _is_shared(self, param: Tensor, grad: Tensor) -> bool:
        """Whether `grad`, of the model's parameter, is the very gradient that the update works on."""
        return not self._masters.is_master(param) or grad.dtype == torch.float32

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops (or zeroes) the gradients of parameters and masters."""
        type(self.optimizer).zero_grad(self.optimizer, set_to_none=set_to_none)
        for half in self._masters.halves:
            if set_to_none:
                half.grad = None
            elif half.grad is not None:
                half.grad.zero_()
        self._scale_of_copied = self._scale_of_shared = None
        self._grads_are_ready = False

    def update_master_grads(self) -> None:
        """Makes the masters' gradients: reduced over ranks, in fp32, unscaled; sets `overflow`.

        `step` and `clip_master_grads` do it where the script has not.
        """
        self._reduce_gradients()
        self._masters.follow()
        has_copies = self._masters.take_gradients()
        # Else they are made anew, which costs nothing and loses nothing: a clipped gradient is the parameter's own.
        self._grads_are_ready = self._looks_for_overflow or has_copies
        if self._looks_for_overflow:
            self.overflow = self._any_rank(self._unscale())

    def _reduce_gradients(self) -> None:
        """Makes the parameters' gradients final."""

    def _any_rank(self, found: Tensor) -> bool:
        """Whether `found`, a number, is not zero on any rank."""
        return bool(found.item())

    def _unscale(self) -> Tensor:
        """Divides all gradients by the loss scale; returns 1 where an element of one is infinite or NaN, else 0."""
        found = torch.zeros(1, device=self._device())
        grads: dict[tuple[float, torch.device], list[Tensor]] = {}
        for param in self.master_params:
            if param.grad is not None:
                grad = self._masters.half_of(param).grad
                shared = grad is not None and self._is_shared(param, grad)
                scale = self._scale_of_shared if shared else self._scale_of_copied
                values = param.grad._values() if param.grad.layout is torch.sparse_coo else param.grad
                grads.setdefault((scale or self.loss_scale, values.device), []).append(values)
        for (scale, device), members in grads.items():
            flag = torch.zeros(1, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(members, flag, torch.full_like(flag, 1.0 / scale))
            found = torch.maximum(found, flag.to(found.device))
        self._scale_of_shared = 1.0
        self._scale_of_copied = self._scale_of_copied or self.loss_scale
        return found

    def _device(self) -> torch.device:
        return next((param.device for param in self.master_params), torch.device("cpu"))

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clips the unscaled gradients by their norm over the whole model.

        Returns:
            The norm before clipping, the same on every rank; -1 after an overflow, when the step will be skipped.
        """
        if not self._grads_are_ready:
            self.update_master_grads()
        self._global_grad_norm = -1.0 if self.overflow else self._clip(max_norm, norm_type)
        return self._global_grad_norm

    def _clip(self, max_norm: float, norm_type: float) -> float:
        return torch.nn.utils.clip_grad_norm_(self.master_params, max_norm, norm_type).item()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters, or skips the update when gradients overflowed on any rank.

        `closure`: computes gradients and returns the loss, as for torch's optimizers. Not with fp16 or a loss scale.

        Raises:
            UsageError: a closure that cannot work.
            StepError: on every rank: step after step is skipped, and the scale cannot fall any more.
        """
        if closure is not None:
            return self._update(self._with_masters(closure))
        if not self._grads_are_ready:
            self.update_master_grads()
        self._grads_are_ready = False
        if self._looks_for_overflow and self._settle_scale():
            self._masters.release_shared_gradients()
            return None
        return self._update(None)

    def _update(self, closure: Callable[[], Any] | None) -> Any:
        """One update of what the inner optimizer holds, with gradients that are final."""
        result = self.optimizer.step() if closure is None else self.optimizer.step(closure)  # some take no closure
        self._masters.write()
        self._masters.release_shared_gradients()
        return result

    def _with_masters(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """`closure` for the inner optimizer: it sees the masters' values and computes the masters' gradients."""
        if self._looks_for_overflow:
            raise UsageError(
                "step(closure): with fp16 or a loss scale an overflow must be known before the update, which a closure "
                "inside of it cannot give. Compute the gradients first, with model.backward(loss), and call step() "
                "without a closure; an optimizer that needs one (LBFGS) works with bf16 and in full precision"
            )
        self.first_closure_call_this_step = True

        def with_masters() -> Any:
            if not self.first_closure_call_this_step:
                self._masters.write()
            loss = closure()
            self.update_master_grads()
            self.first_closure_call_this_step = False
            return loss

        return with_masters

    # ---- overflow

    def _settle_scale(self) -> bool:
        """Tells the scaler how the gradients are; returns whether the step is skipped."""
        assert self.loss_scaler is not None
        scale = self.loss_scaler.loss_scale
        self.loss_scaler.update(self.overflow)
        self.step_was_skipped = self.overflow
        is_stuck, skips = self.loss_scaler.is_stuck, self.loss_scaler.skips
        if is_stuck or skips == WARN_AFTER:
            what = f"{skips} steps in a row were skipped: the gradient of {self._culprit()} is infinite or NaN"
            if is_stuck:
                raise StepError(
                    f"{what} at loss scale {scale:g}, which cannot fall any more. Look for what makes the loss or its "
                    "gradients infinite (a division by zero, the logarithm of zero, wrong data, a learning rate that "
                    "is too high), or train with bf16"
                )
            log.warn_rank0("%s; the loss scale is %g now", what, self.loss_scaler.loss_scale)
        return self.overflow

    def _culprit(self) -> str:
        """A parameter whose gradient is not finite."""
        return self._first_not_finite() or "a parameter"

    def _first_not_finite(self) -> str | None:
        for number, group in enumerate(self.param_groups):
            for place, param in enumerate(group["params"]):
                if param.grad is not None and not bool(param.grad.isfinite().all()):
                    return self._name_of(param, number, place)
        return None

    def _name_of(self, param: Tensor, group: int, place: int) -> str:
        return f"parameter {place} of group {group}"

    # ---- state

    def scaler_state(self) -> dict[str, Any]:
        """The loss scaler's state, plain numbers; empty without half precision."""
        return {} if self.loss_scaler is None else self.loss_scaler.state_dict()

    def load_scaler_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a `scaler_state()`; one that is empty changes nothing, nor does any without half precision."""
        if state and self.loss_scaler is not None:
            self.loss_scaler.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict, the masters by position, and the loss scaler's state."""
        self._masters.follow()
        positions = {id(param): place for place, param in enumerate(self.master_params)}
        masters = {positions[id(master)]: master.detach() for master in self._masters.masters}
        return {**self.optimizer.state_dict(), MASTERS_KEY: masters, SCALER_KEY: self.scaler_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` gave, or a plain optimizer's, which leaves masters and scale as they are."""
        inner = {key: value for key, value in state_dict.items() if key not in (MASTERS_KEY, SCALER_KEY)}
        self.optimizer.load_state_dict(inner)
        params = self.master_params
        for place, value in state_dict.get(MASTERS_KEY, {}).items():
            self._masters.set(params[place], value)
        self.load_scaler_state(state_dict.get(SCALER_KEY, {}))
