"""DistributedOptimizer: a torch optimizer over the parameters of this rank's stage."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from smp import grad_norm, log, runtime
from smp.comm.entry import enter_collective
from smp.dp import optimizer_state
from smp.dp.optimizer_state import Layout
from smp.dp.ownership import Ownership
from smp.errors import UsageError
from smp.topology import CommGroup
from smp.tp.carry import is_merged

_STATE_DICT_ADVICE = (
    "Call optimizer.state_dict() on all ranks, or under `if smp.rdp_rank() == 0` (without tensor parallelism also "
    "`if smp.dp_rank() == 0`)."
)
_LOAD_ADVICE = "Call optimizer.load_state_dict() on all ranks, under no condition."


class DistributedOptimizer(Optimizer):
    """Wraps `optimizer` for a `DistributedModel`; is itself a torch optimizer, so that schedulers take it.

    Before partition the inner optimizer may hold every parameter of the model. At partition those of other stages are
    dropped from it; groups stay, and a rank left without parameters still steps. `param_groups` and `state` are the
    inner optimizer's own objects, never copies.

    Args:
        optimizer: any torch optimizer whose update is elementwise per parameter (SGD, Adam and their kind).
        static_loss_scale, dynamic_loss_scale, dynamic_loss_args: have no effect without fp16.
    """

    _is_accelerate_prepared = True  # accelerate does not wrap it once more
    loss_scaler = None
    first_closure_call_this_step = True

    def __init__(
        self,
        optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
    ) -> None:
        # The base class's constructor is left out on purpose: it would make a second set of groups.
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise UsageError(f"DistributedOptimizer wraps a plain torch optimizer, got {type(optimizer).__name__}")
        rt = runtime.get()
        self.optimizer = optimizer
        self._global_grad_norm: float | None = None
        self._pending_state: Mapping[str, Any] | None = None
        self._layout: Layout | None = None
        self._ties_checked = False
        # All parameters the inner optimizer was given, before those of other stages are dropped.
        self._given: list[list[Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
        if static_loss_scale != 1.0 or dynamic_loss_scale or dynamic_loss_args:
            log.warn_once("loss scale", "DistributedOptimizer: loss scaling has no effect without fp16")
        rt.optimizer = self
        if rt.model is not None and rt.model.partitioned:
            self._on_partition(rt.model.local_parameters())

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
        return f"DistributedOptimizer({self.optimizer!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does; its parameters may be of any stage."""
        self.optimizer.add_param_group(param_group)
        self._given.append(list(self.optimizer.param_groups[-1]["params"]))
        self._layout, self._ties_checked = None, False
        model = runtime.get().model
        if model is not None and model.partitioned:
            self._take_local(model.local_parameters())

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_post_hook(hook)

    # ---- training

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops (or zeroes) the gradients of this rank's parameters."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if self._ownership is not None:  # before their reduction those that other ranks own have gradients here too
            for param in self._shared():
                if param.grad is not None and not self._ownership.owns(param):
                    param.grad = None if set_to_none else param.grad.detach().zero_()
            runtime.get().model.reducer.forget_aside()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's parameters; gradients that a short accumulation window left unreduced are reduced first.

        `closure`: computes gradients and returns the loss, as for torch's optimizers.

        Raises:
            UsageError: at the first step, on every rank: stages that hold a tied weight would update it differently.
        """
        rt = runtime.get()
        if not self._ties_checked and rt.model is not None and rt.model.partitioned:
            self._ties_checked = True
            optimizer_state.check_tied_options(rt, self.optimizer, self._given)
        if closure is None:
            grad_norm.flush(rt)
            return self._update(None)

        def reduced_closure() -> Any:
            loss = closure()
            grad_norm.flush(rt)
            return loss

        return self._update(reduced_closure)

    def _update(self, closure: Callable[[], Any] | None) -> Any:
        """One update of what this rank's inner optimizer holds; gradients are reduced."""
        result = self.optimizer.step(closure)
        if self._ownership is not None:
            self._ownership.gather(self._shared())
        return result

    @property
    def _ownership(self) -> Ownership | None:
        """With sharded optimizer state: who updates which parameter, once the model is partitioned."""
        return getattr(runtime.get().model, "ownership", None)

    def _shared(self) -> list[Parameter]:
        """Parameters that some rank of this stage updates, if a gradient reaches them; the same on all its ranks."""
        reducer = runtime.get().model.reducer
        return [param for group in self._given for param in group if param.requires_grad or reducer.reduces(param)]

    def backward(self, loss: Tensor) -> None:
        """`model.backward(loss)`."""
        model = runtime.get().model
        if model is None:
            raise UsageError("optimizer.backward() needs the DistributedModel: make it first")
        model.backward(loss)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clips this optimizer's gradients by their norm over the whole model; returns the norm before clipping."""
        params = [param for group in self.param_groups for param in group["params"]]
        self._global_grad_norm = grad_norm.clip_grad_norm_(params, max_norm, norm_type).item()
        return self._global_grad_norm

    # ---- half precision: nothing to do without it

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing because of an overflow."""
        return False

    @property
    def overflow(self) -> bool:
        return False

    @property
    def loss_scale(self) -> float:
        return 1.0

    @property
    def master_params(self) -> list[Parameter]:
        """The parameters that the update works on: without half precision, those of the model."""
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def fp16_groups(self) -> list[list[Parameter]]:
        return []

    @property
    def fp32_from_fp16_groups(self) -> list[list[Parameter]]:
        return []

    @property
    def fp32_from_fp32_groups(self) -> list[list[Parameter]]:
        return [list(group["params"]) for group in self.param_groups]

    def master_is_distributed(self, param: Tensor) -> bool:
        """Whether `param`, one of `master_params`, is a part of a distributed parameter."""
        return getattr(param, "_smp_shard", None) is not None

    def init_master_params(self) -> None:
        """Without half precision there are no masters."""

    def reload_model_params(self) -> None:
        """Without half precision there are no masters to refresh from the model."""

    def update_master_grads(self) -> None:
        """Makes the gradients final."""
        grad_norm.flush(runtime.get())

    # ---- partition and state

    def _on_partition(self, local_parameters: Iterable[Tensor]) -> None:
        """Called on every rank once it is known which parameters this rank holds."""
        self._take_local(local_parameters)
        pending, self._pending_state = self._pending_state, None
        if pending is not None:
            self._load(pending)

    def _take_local(self, local_parameters: Iterable[Tensor]) -> None:
        """From all parameters given to those that the inner optimizer updates on this rank."""
        self._drop_foreign(local_parameters)
        if self._ownership is not None:
            optimizer_state.drop_parameters(self.optimizer, self._ownership.owns)

    def _drop_foreign(self, local_parameters: Iterable[Tensor]) -> None:
        local = {id(param) for param in local_parameters}
        elsewhere = {id(param) for param in runtime.get().model.module.parameters()} - local
        self._given = [[param for param in group if not is_merged(param)] for group in self._given]
        optimizer_state.drop_parameters(
            self.optimizer, lambda param: id(param) not in elsewhere and not is_merged(param)
        )

    def orig_state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict, by its own positions."""
        return self.optimizer.state_dict()

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """This rank's part; `_smp_is_partial` is True in it. Not collective.

        `gather_if_shard` has no effect on state that is not sharded over replicas.
        """
        return optimizer_state.partial_state_dict(self.optimizer, self._names())

    def state_dict(self) -> dict[str, Any]:
        """The whole optimizer's state, on every rank, in host memory; collective over the mp group.

        Positions are those of the optimizer that one process would have, which can load it.
        """
        rt = runtime.get()
        enter_collective(rt, "optimizer.state_dict()", rt.group(CommGroup.MP_GROUP), _STATE_DICT_ADVICE)
        if self._pending_state is not None:
            raise UsageError(
                "optimizer.state_dict() was called between load_state_dict() and the first step, which applies what "
                "was loaded"
            )
        layout = self._whole_layout()
        state = optimizer_state.gather(rt, self.optimizer, self._names(), layout)
        groups = optimizer_state.full_groups(self.optimizer, layout)
        return {"state": state, "param_groups": groups, optimizer_state.NAMES_KEY: layout}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a full state dict or this rank's partial one; collective over all ranks.

        Before partition it is kept and applied then.

        Raises:
            CheckpointError: it does not fit; on every rank.
        """
        rt = runtime.get()
        enter_collective(rt, "optimizer.load_state_dict()", rt.group(CommGroup.WORLD), _LOAD_ADVICE)
        if not isinstance(state_dict, Mapping):
            raise UsageError(f"load_state_dict() needs a state dict, got {type(state_dict).__name__}")
        if rt.model is None or not rt.model.partitioned:
            self._pending_state = state_dict
        else:
            self._load(state_dict)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        rt, names = runtime.get(), self._names()
        if optimizer_state.is_partial(rt, state_dict):
            local = optimizer_state.agree(
                rt, lambda: optimizer_state.split_partial(rt, self.optimizer, names, state_dict)
            )
        else:
            layout = self._whole_layout()
            local = optimizer_state.agree(
                rt, lambda: optimizer_state.split_full(self.optimizer, names, layout, state_dict)
            )
        self.optimizer.load_state_dict(local)

    def _names(self) -> dict[int, str]:
        """id of each parameter given -> its name in the user's module; those from elsewhere get one by position."""
        model = runtime.get().model
        known = {id(param): name for name, param in model.module.named_parameters()} if model is not None else {}
        return {
            id(param): known.get(id(param), f"<parameter {position} of group {number}>")
            for number, group in enumerate(self._given)
            for position, param in enumerate(group)
        }

    def _whole_layout(self) -> Layout:
        """The layout of the whole model's optimizer; collective over the mp group at its first use."""
        if self._layout is None:
            rt, names = runtime.get(), self._names()
            mine = [[names[id(param)] for param in group] for group in self._given]
            group = rt.group(CommGroup.MP_GROUP)
            layouts = rt.transport.all_gather_object(mine, group) if group.size > 1 else [mine]
            order = [name for name, _ in rt.model.module.named_parameters()] if rt.model is not None else []
            self._layout = optimizer_state.merge_layouts(layouts, order)
        return self._layout
