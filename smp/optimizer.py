"""DistributedOptimizer: a torch optimizer over the parameters of this rank's stage."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial as bind
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Adafactor, Muon, Optimizer

from smp import grad_norm, log, runtime
from smp.comm.entry import enter_collective
from smp.dp import optimizer_state
from smp.dp.optimizer_state import Layout
from smp.dp.ownership import Ownership
from smp.dp.reduction import all_reduce
from smp.errors import CheckpointError, StepError, UsageError
from smp.fp16.optimizer import MASTERS_KEY, SCALER_KEY, FP16_Optimizer
from smp.topology import CommGroup
from smp.tp.carry import is_merged
from smp.tp.shard import spec_of

_STATE_DICT_ADVICE = (
    "Call optimizer.state_dict() on all ranks, or under `if smp.rdp_rank() == 0` (without tensor parallelism also "
    "`if smp.dp_rank() == 0`)."
)
_SHARDED_ADVICE = (
    "With shard_optimizer_state every rank has a part of the state: call optimizer.state_dict() on all ranks, under no "
    "condition."
)
_LOCAL_STATE_ADVICE = (
    "With shard_optimizer_state every rank of the stage has a part of it: call optimizer.local_state_dict() on all "
    "ranks, under no condition, or local_state_dict(gather_if_shard=False) for the part that a rank owns."
)
_LOAD_ADVICE = "Call optimizer.load_state_dict() on all ranks, under no condition."


class DistributedOptimizer(FP16_Optimizer):
    """Wraps `optimizer` for a `DistributedModel`; is itself a torch optimizer, so that schedulers take it.

    Before partition the inner optimizer may hold every parameter of the model. At partition those of other stages are
    dropped from it; groups stay, and a rank left without parameters still steps. `param_groups` and `state` are the
    inner optimizer's own objects, never copies.

    With `shard_optimizer_state` the parameters that the ranks of a stage hold alike are divided among them: each rank
    updates what it owns, has optimizer state for that only, and `step` gives every rank the updated parameters. A step
    of any other optimizer on them is a UsageError. Groups hold what the rank owns: within an accumulation window only
    `zero_grad`, or the model's, also drops the gradients that the rank would hand in to other owners.

    Where the configuration says fp16 or bf16, the parameters that it updates are fp32 masters from partition on, and an
    overflow on any rank makes all skip the step; with bf16 overflows are looked for only where a loss scale is asked
    for. Otherwise there are no masters and the loss scale is 1.

    Args:
        optimizer: any torch optimizer whose update is elementwise per parameter (SGD, Adam and their kind), and those
            of `smp.optimizers`. Adafactor and Muon need whole parameters, LBFGS the whole model on a rank.
        static_loss_scale, dynamic_loss_scale, dynamic_loss_args: see `FP16_Optimizer`; no effect in full precision.

    Raises:
        UsageError: here or at partition, on every rank: `optimizer` cannot work on the parts that ranks hold.
    """

    _is_accelerate_prepared = True  # accelerate does not wrap it once more
    # torch's GradScaler, which would let each rank decide for itself, then hands its scale to `step`, which refuses it.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
    ) -> None:
        rt = runtime.get()
        super().__init__(optimizer, static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        self._layout: Layout | None = None
        self._ties_checked = False
        # All parameters the inner optimizer was given, before those of other stages are dropped.
        self._given: list[list[Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
        rt.optimizer = self
        if rt.model is not None and rt.model.partitioned:
            self.take_local(rt.model.local_parameters())

    def _prepare(self) -> bool:
        """Whether gradients may overflow. Masters are made at partition."""
        config, scaler = runtime.get().config, self.loss_scaler
        assert scaler is not None
        if not (config.fp16 or config.bf16):
            self.loss_scaler = None
            if scaler.scales:
                log.warn_once("loss scale", "DistributedOptimizer: loss scaling has no effect without fp16 or bf16")
            return False
        return config.fp16 or scaler.scales

    def _watch(self, params: Iterable[Tensor]) -> None:
        if self._looks_for_overflow:
            super()._watch(params)

    def _on_gradient(self) -> None:
        super()._on_gradient()
        rt = runtime.get()
        if rt.optimizer is not self or rt.model is None or rt.model.applies_loss_scale:
            return
        if self.loss_scaler is not None and self.loss_scaler.scales:
            raise StepError(
                "loss.backward() has computed gradients of parameters without the loss scale, by which the step would "
                "divide them: call model.backward(loss) or optimizer.backward(loss) instead. A penalty on weights may "
                "be added to the loss"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does; its parameters may be of any stage."""
        self._refuse_known(param_group, [param for group in self._given for param in group])
        self.optimizer.add_param_group(param_group)
        self._given.append(list(self.optimizer.param_groups[-1]["params"]))
        self._watch(self._given[-1])
        self._layout, self._ties_checked = None, False
        model = runtime.get().model
        if model is not None and model.partitioned:
            self.take_local(model.local_parameters())

    # ---- training

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops (or zeroes) the gradients of this rank's parameters."""
        super().zero_grad(set_to_none=set_to_none)
        if self._ownership is not None:  # before their reduction those that other ranks own have gradients here too
            for param in self._shared():
                if param.grad is not None and not self._ownership.owns(param):
                    param.grad = None if set_to_none else param.grad.detach().zero_()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's parameters; gradients that a short accumulation window left unreduced are reduced first.

        Collective over the world with fp16 or a loss scale: an overflow on any rank skips the step on all.

        `closure`: computes gradients and returns the loss, as for torch's optimizers. Not with fp16 or a loss scale.

        Raises:
            UsageError: at the first step, on every rank: stages that hold a tied weight would update it differently; or
                a closure that cannot work; or torch's own GradScaler calls.
            StepError: on every rank: step after step is skipped, and the scale cannot fall any more.
        """
        rt = runtime.get()
        if "grad_scale" in self.__dict__:
            raise UsageError(
                "torch's GradScaler would skip steps on some ranks and not on others; use smp.amp.GradScaler, which "
                "has the same interface"
            )
        if self.loss_scaler is not None and rt.optimizer is not self:
            raise UsageError(
                "another DistributedOptimizer has been made since this one; with fp16 or bf16, where masters and the "
                "loss scale are those of the last one, a script has one: give it all parameters, in several groups"
            )
        if not self._ties_checked and rt.model is not None and rt.model.partitioned:
            self._ties_checked = True
            optimizer_state.check_tied_options(rt, self.optimizer, self._given)
        return super().step(closure)

    def _update(self, closure: Callable[[], Any] | None) -> Any:
        if self._ownership is None:
            return super()._update(closure)
        with self._ownership.updating():
            result = super()._update(closure)
        self._ownership.gather(self._shared())
        self._masters.note_versions()
        return result

    @property
    def _ownership(self) -> Ownership | None:
        """With sharded optimizer state: who updates which parameter, once the model is partitioned."""
        return getattr(runtime.get().model, "ownership", None)

    def _shared(self) -> list[Parameter]:
        """Parameters that some rank of this stage updates, if a gradient reaches them; the same on all its ranks."""
        reducer = runtime.get().model.reducer
        return [param for group in self._given for param in group if param.requires_grad or reducer.has_reduced(param)]

    def backward(self, loss: Tensor) -> None:
        """`model.backward(loss)`, which scales the loss."""
        model = runtime.get().model
        if model is None:
            raise UsageError("optimizer.backward() needs the DistributedModel: make it first")
        model.backward(loss)

    def _reduce_gradients(self) -> None:
        grad_norm.flush(runtime.get())

    def _any_rank(self, found: Tensor) -> bool:
        world = runtime.get().group(CommGroup.WORLD)
        return bool(all_reduce(found, dist.ReduceOp.MAX, "agreement on an overflow of gradients", world).item())

    def _device(self) -> torch.device:
        return runtime.get().device

    def _clip(self, max_norm: float, norm_type: float) -> float:
        return grad_norm.clip_grad_norm_(self.master_params, max_norm, norm_type).item()

    def _culprit(self) -> str:
        rt = runtime.get()
        found = rt.transport.all_gather_object(self._first_not_finite(), rt.group(CommGroup.WORLD))
        return next(filter(None, found), "a parameter")

    def _name_of(self, param: Tensor, group: int, place: int) -> str:
        return f"'{self._names()[id(param)]}' (stage {runtime.get().pp_rank})"

    # ---- partition and state

    def take_local(self, local_parameters: Iterable[Tensor]) -> None:
        """From all parameters given to those that the inner optimizer updates on this rank. For the model, once it is
        partitioned.
        """
        _refuse_parts(self.optimizer)
        _cut_first_state(self.optimizer)
        self._drop_foreign(local_parameters)
        ownership = self._ownership
        if ownership is not None:
            optimizer_state.drop_parameters(self.optimizer, lambda param: ownership.owns(self._masters.half_of(param)))
        if self.loss_scaler is not None:
            self._masters.install(self.optimizer)

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
        """This rank's part; `_smp_is_partial` is True in it. Not collective, unless state is sharded and gathered.

        `gather_if_shard`: with sharded optimizer state the part is the whole stage's, as it would be without sharding,
        and all ranks of the stage make the call; False: only what this rank owns. No effect where nothing is sharded.
        """
        rt, names = runtime.get(), self._names()
        gathers = gather_if_shard and self._ownership is not None
        if gathers:
            group = rt.group(CommGroup.DP_GROUP)
            enter_collective(rt, "optimizer.local_state_dict()", group, _LOCAL_STATE_ADVICE)
        with self._masters.as_state(self.optimizer):
            if gathers:
                part = optimizer_state.gather_stage(rt, self.optimizer, names, self._of_stage())
            else:
                part = optimizer_state.partial_state_dict(self.optimizer, names)
            return self._with_precision(part)

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:
        """The whole optimizer's state, on every rank, in host memory; with `gather_to_rank0` ranks other than 0 get {}.

        Collective over the mp group; with sharded optimizer state, over all ranks. Positions are those of the optimizer
        that one process would have, which can load it.
        """
        rt = runtime.get()
        sharded = self._ownership is not None
        group = rt.group(CommGroup.WORLD if sharded else CommGroup.MP_GROUP)
        enter_collective(rt, "optimizer.state_dict()", group, _SHARDED_ADVICE if sharded else _STATE_DICT_ADVICE)
        if any(waiting.of_optimizer for waiting in rt.waiting_loads):
            raise UsageError(
                "optimizer.state_dict() was called between load_state_dict() or resume_from_checkpoint() and the first "
                "step, which applies what was loaded"
            )
        layout = self._whole_layout()
        with self._masters.as_state(self.optimizer):
            state = optimizer_state.gather(rt, self.optimizer, self._names(), layout, gather_to_rank0)
        if gather_to_rank0 and rt.rank != 0:
            return {}
        groups = optimizer_state.full_groups(self.optimizer, layout)
        return self._with_precision({"state": state, "param_groups": groups, optimizer_state.NAMES_KEY: layout})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a full state dict or this rank's partial one; collective over all ranks.

        Before partition it is kept and applied then; the options of the groups are loaded at once, and what is set in
        them afterwards stays.

        Raises:
            CheckpointError: it does not fit; on every rank.
        """
        rt = runtime.get()
        enter_collective(rt, "optimizer.load_state_dict()", rt.group(CommGroup.WORLD), _LOAD_ADVICE)
        if not isinstance(state_dict, Mapping):
            raise UsageError(f"load_state_dict() needs a state dict, got {type(state_dict).__name__}")
        if rt.model is not None and rt.model.partitioned:
            self._load(state_dict)
            return
        optimizer_state.agree(rt, lambda: self.load_options(state_dict["param_groups"]))
        load = bind(self._load, state_dict, keep_options=True)
        rt.load_once_partitioned(load, of_model=False, of_optimizer=True)

    def load_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Gives the groups saved options (the learning rate ..), all but their parameters.

        Raises:
            CheckpointError: other groups, or those of another kind of optimizer.
        """
        if len(groups) != len(self.param_groups):
            raise CheckpointError(
                f"the saved optimizer has {len(groups)} parameter groups, the job's has {len(self.param_groups)}"
            )
        optimizer_state.check_options(self.optimizer, groups)
        for group, saved in zip(self.param_groups, groups):
            group.update(deepcopy(optimizer_state.options_of(saved)))

    def _load(self, state_dict: Mapping[str, Any], keep_options: bool = False) -> None:
        rt, names = runtime.get(), self._names()
        if keep_options:
            groups = zip(state_dict["param_groups"], map(optimizer_state.options_of, self.param_groups))
            state_dict = {**state_dict, "param_groups": [{**saved, **options} for saved, options in groups]}
        state_dict = optimizer_state.masters_into_state(state_dict)
        if optimizer_state.is_partial(rt, state_dict):
            local = optimizer_state.agree(
                rt, lambda: optimizer_state.split_partial(rt, self.optimizer, names, state_dict)
            )
        else:
            layout = self._whole_layout()
            local = optimizer_state.agree(
                rt, lambda: optimizer_state.split_full(self.optimizer, names, layout, state_dict)
            )
        masters = optimizer_state.take_out_masters(local)
        self.optimizer.load_state_dict(local)
        params = self.master_params
        for position, value in masters.items():
            if self._masters.is_master(params[position]):
                self._masters.set(params[position], value)
        if self._ownership is not None and MASTERS_KEY in state_dict:
            everything = [param for group in self._given for param in group]
            self._ownership.gather(everything)  # the others' rounded masters, those of frozen parameters too
            self._masters.note_versions()
        self.load_scaler_state(state_dict.get(SCALER_KEY, {}))

    def _with_precision(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What half precision adds to a state dict: masters, which have come as state, by name; and the loss scale."""
        if self.loss_scaler is None:
            return state_dict
        names = optimizer_state.names_by_position(state_dict)
        masters = {names[position]: value for position, value in optimizer_state.take_out_masters(state_dict).items()}
        return {**state_dict, MASTERS_KEY: masters, SCALER_KEY: self.scaler_state()}

    # ---- masters by name

    def masters_by_name(self) -> dict[str, Tensor]:
        """The fp32 masters that this rank updates, live, by the names of their parameters; none in full precision."""
        names = self._names()
        self._masters.follow()
        return {names[id(master)]: master.detach() for master in self._masters.masters}

    def load_masters(self, values: Mapping[str, Tensor]) -> None:
        """Gives masters the fp32 values of those names, and parameters the rounded ones. Names of parameters without a
        master on this rank are passed over.

        Raises:
            CheckpointError: a value of another shape.
        """
        names = self._names()
        known = {names[id(master)]: master for master in self._masters.masters}
        for name in known.keys() & values.keys():
            if known[name].shape != values[name].shape:
                raise CheckpointError(
                    f"the fp32 master of {name} has shape {list(values[name].shape)}, the parameter's part on this "
                    f"rank has {list(known[name].shape)}"
                )
        for name in known.keys() & values.keys():
            self._masters.set(known[name], values[name])

    def on_loaded(self, param: Tensor, value: Tensor) -> None:
        """The model has loaded `value` into a parameter: its master takes it, unrounded."""
        if self._masters.has_master(param):
            self._masters.take(param, value)

    def _of_stage(self) -> list[list[Parameter]]:
        """By group, the parameters that live on this rank's stage, whoever updates them; before partition all given."""
        model = runtime.get().model
        if model is None or not model.partitioned:
            return self._given
        elsewhere = {id(p) for p in model.module.parameters()} - {id(p) for p in model.local_parameters()}
        return [[param for param in group if id(param) not in elsewhere] for group in self._given]

    def stage_layout(self) -> Layout:
        """By group, the names of the parameters that live on this rank's stage; before partition of all given.

        Their order is that of the positions in `local_state_dict()`.
        """
        names = self._names()
        return [[names[id(param)] for param in group] for group in self._of_stage()]

    def _names(self) -> dict[int, str]:
        """id of each parameter given -> its name in the user's module; those from elsewhere get one by position."""
        model = runtime.get().model
        known = {id(param): name for name, param in model.module.named_parameters()} if model is not None else {}
        names = {
            id(param): known.get(id(param), f"<parameter {position} of group {number}>")
            for number, group in enumerate(self._given)
            for position, param in enumerate(group)
        }
        return names | {id(master): names[id(half)] for half, master in self._masters.pairs()}

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


def _cut_first_state(optimizer: Optimizer) -> None:
    """State that the optimizer made with whole parameters (Adagrad does so when it is made) becomes that of the parts
    which they have become since; on every rank alike, before any drops parameters."""
    for param, state in optimizer.state.items():
        for key, value in state.items() if spec_of(param) is not None and not is_merged(param) else ():
            if isinstance(value, Tensor) and value.dim() == param.dim() and value.shape != param.shape:
                first = value.flatten()[0]
                if not bool((value == first).all()):
                    raise UsageError(
                        f"{type(optimizer).__name__} has state {key!r} of shape {list(value.shape)} for a parameter "
                        f"that tensor parallelism has cut to {list(param.shape)}: it has been trained before. Give it "
                        "its state after DistributedOptimizer is made, with load_state_dict()"
                    )
                state[key] = first.expand(param.shape).clone(memory_format=torch.contiguous_format)


def _refuse_parts(optimizer: Optimizer) -> None:
    """Refuses an optimizer that needs more of the model at once than a rank has; on every rank alike."""
    rt, name = runtime.get(), type(optimizer).__name__
    instead = "Use an optimizer that works element by element (AdamW), or smp.optimizers.FusedLAMB or FusedNovoGrad"
    if isinstance(optimizer, LBFGS) and (rt.mp_size > 1 or getattr(rt.model, "ownership", None) is not None):
        raise UsageError(
            f"{name} takes products over all parameters of the model, of which a rank of this job updates only some. "
            f"{instead}"
        )
    if isinstance(optimizer, Adafactor | Muon):
        cut = next((key for key, p in rt.model.module.named_parameters() if spec_of(p) and p.requires_grad), None)
        if cut is not None:
            raise UsageError(
                f"{name} needs whole parameters, for norms or products of matrices, and '{cut}' is cut over the "
                f"tensor-parallel group. {instead}, or leave such layers whole"
            )
