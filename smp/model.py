"""`smp.DistributedModel`: the user's module, spread over the ranks.

CREATED  --- pipeline degree 1: at once; otherwise: first call of the model in a step --->  PARTITIONED
  the whole module on every rank                      1. tensor-parallel replacement
                                                      2. stages assigned, other stages' memory freed
                                                      3. weights of rdp_rank 0 everywhere
                                                      4. reducer made, optimizer told
                                                      5. what was loaded before is applied, post-partition hooks run
"""

import enum
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from smp import grad_norm, log, model_state, runtime
from smp.dp.broadcast import broadcast_coalesced
from smp.dp.buffer_sync import BufferSync
from smp.dp.optimizer_state import accept_empty_stages
from smp.dp.ownership import Ownership
from smp.dp.reducer import Reducer
from smp.dp.tied import TiedGroup, share_initial_values, tied_groups
from smp.dp.uneven import UnevenInputs
from smp.errors import StepError, UsageError
from smp.fp16.gradients import widen
from smp.fp16.module import cast_arguments, cast_module, cast_nested, half_dtype
from smp.model_views import ModelViews
from smp.nested import flatten
from smp.pp import checkpointing
from smp.pp import stages as stages_mod
from smp.pp.assignment import decide, table
from smp.pp.debug import Comparison, debug_enabled
from smp.pp.engine import Engine, Reach
from smp.pp.intercept import plain_backward
from smp.pp.partition import Assignment
from smp.pp.placed import current, user_line
from smp.pp.simulate import Policy
from smp.pp.stages import StageMap
from smp.pp.weights import late_weights
from smp.runtime import Runtime
from smp.topology import CommGroup
from smp.tp.batches import BatchCheck
from smp.tp.convert import convert
from smp.tp.delayed import hollow, materialize


class State(enum.Enum):
    """Where a model stands; see the drawing above."""

    CREATED = enum.auto()
    PARTITIONED = enum.auto()


class DistributedModel(ModelViews):
    """Wraps the module to be trained. One per script.

    Where the configuration says fp16 or bf16, floating-point parameters, buffers and inputs are cast to that type, in
    place and at partition, and outputs to float32; a loss computed from these is float32. `model.backward` applies the
    loss scale; without a pipeline `loss.backward()` does so in a step, and is refused outside of one.

    Args:
        module: the module, whole, on any device.
        trace_device: "gpu" or "cpu"; fake tensors need neither, so it has no effect.
        trace_execution_times, trace_memory_usage: one microbatch is run module by module on the first stage's ranks
            before the model is cut, and its times, or the bytes kept for the backward, decide; else they are computed.
        overlapping_allreduce: reduce gradients while the backward still runs; False reduces at its end.
        backward_passes_per_step: passes whose gradients add up before they are reduced (gradient accumulation).
            Gradients are not divided by it.
        average_grads_across_microbatches: gradients are the mean over microbatches; False: the sum.
        bucket_cap_mb: size of the flat buckets in which gradients are reduced, in MiB.
        broadcast_buffers: replicas take the buffers of the first one before each training pass.
        gradient_as_bucket_view: gradients live in the buckets, which saves one copy of them.

    Raises:
        UsageError: there is a DistributedModel already, or `module` is no module.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        rt = runtime.get()
        _check_arguments(rt, module, trace_device, backward_passes_per_step, bucket_cap_mb)
        super().__init__()
        self._rt = rt
        self.module = module
        self.engine = Engine(rt, self._partition_untraced, self._manages)
        self.engine.backward = self._backward_tensors
        if debug_enabled() and rt.topology.pp_size > 1:
            self.engine.debug = Comparison(rt)
        self._measured = (trace_execution_times, trace_memory_usage)
        self.reducer: Reducer | None = None
        self.ownership: Ownership | None = None  # with sharded optimizer state, once partitioned
        self._reducer_options: dict[str, Any] = {
            "overlap": overlapping_allreduce,
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "backward_passes_per_step": backward_passes_per_step,
        }
        self._half = half_dtype(rt.config)
        self._average = average_grads_across_microbatches
        self._broadcast_buffers = broadcast_buffers
        self._uneven = UnevenInputs(rt.group(CommGroup.DP_GROUP), rt.group(CommGroup.RDP_GROUP))
        self._buffer_sync: BufferSync | None = None
        self._tied: dict[int, TiedGroup] = {}
        self.check_batch = BatchCheck(rt)
        self._state = State.CREATED
        self._comm_hook: tuple[Any, Any] | None = None
        self._no_sync = False
        self._num_microbatches = 1
        self._in_pass = False
        self._had_backward = False
        self._in_backward = False  # ours, seen by autograd's threads too
        self._calls_replaced: ExitStack | None = None
        self._post_partition_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._post_step_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._first_step_done = False
        self.forward = self._wrap_forward(module.forward)
        rt.model = self
        grad_norm.intercept_torch()  # a per-rank norm would let replicas drift apart silently
        if rt.topology.pp_size == 1:
            self._partition(None)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What `isinstance` asks besides the type: the wrapper is also what it wraps, unless that is torch's own class.

        Clients look for a `PreTrainedModel`; torch's containers have methods that attributes cannot stand in for.
        """
        wrapped = type(self.__dict__.get("_modules", {}).get("module"))
        return DistributedModel if wrapped.__module__.split(".")[0] in ("torch", "builtins") else wrapped

    def _get_name(self) -> str:
        return "DistributedModel"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "DistributedModel cannot be copied or pickled: it belongs to this job's processes. To save it call "
            "smp.save_checkpoint(); to keep an average of the weights (EMA), keep tensors of your own beside "
            "model.local_named_parameters() instead of torch.optim.swa_utils.AveragedModel(model)"
        )

    # -- calling -------------------------------------------------------------------------------------------------------

    def _wrap_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return self._forward(args, kwargs)

        return wrapped

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._half is not None:
            args, kwargs = cast_arguments(args, kwargs, self._half)
        if self._rt.topology.pp_size > 1:
            if current.program is None:
                raise StepError(
                    "the model was called outside a step function. With pipeline_parallel_degree > 1 call it, and "
                    "model.backward, inside a function decorated with @smp.step."
                )
            if not self.partitioned:
                self._partition_in_step(args, kwargs)
            return self._run(args, kwargs)
        in_step = current.streams is not None
        assert self.reducer is not None
        if not in_step and torch.is_grad_enabled():
            self.reducer.refresh()
            self._sync_buffers()
        output = self._run(args, kwargs)
        if torch.is_grad_enabled():
            leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
            self.reducer.watch(leaves)
            if self._rt.config.pipeline == "_only_forward" and not in_step:
                for leaf in leaves:
                    if leaf.requires_grad:
                        leaf.register_hook(_refuse_backward)  # loss.backward() comes past none of our calls
        return output

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output, in full precision."""
        output = self.module(*args, **kwargs)
        return output if self._half is None else cast_nested(output, torch.float32)

    def backward(
        self, tensors: Tensor | Sequence[Tensor], grad_tensors: Tensor | Sequence[Tensor] | None = None
    ) -> None:
        """Gradients of `tensors` with respect to all parameters, on every stage; only inside a step function when the
        model is pipelined. With fp16 or bf16 they are multiplied by the optimizer's loss scale.

        Args:
            tensors: the loss, or several tensors.
            grad_tensors: their gradients, of the same shapes; needed for tensors of more than one element.

        Raises:
            StepError: outside a step, or when a tensor does not depend on the model.
        """
        many = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if grad_tensors is None or isinstance(grad_tensors, Tensor):
            gradients: list[Any] = [grad_tensors] * len(many)
        else:
            gradients = list(grad_tensors)
        if len(gradients) != len(many):
            raise StepError(f"model.backward got {len(many)} tensors and {len(gradients)} grad_tensors.")
        self._backward_tensors(many, gradients)

    def _backward_tensors(self, tensors: list[Any], gradients: list[Any]) -> None:
        if self._rt.config.pipeline == "_only_forward":
            _refuse_backward()
        in_step = current.streams is not None
        scale = 1.0 / self._num_microbatches if self._average and in_step else 1.0
        if self._half is not None:
            tensors, gradients = cast_nested(
                (tensors, gradients), torch.float32
            )  # a scaled seed does not fit into fp16
            if self._rt.optimizer is not None:
                self._rt.optimizer.before_backward()
                scale *= self._rt.optimizer.loss_scale
        self._had_backward = True
        if self._rt.topology.pp_size == 1:
            self._plain_backward(tensors, gradients, scale)
            return
        program = current.program
        if program is None:
            raise StepError(
                "model.backward was called outside a step function; call it inside one decorated with @smp.step."
            )
        if not self.partitioned:
            raise StepError(
                f"backward at {user_line()}: the loss does not depend on any parameter that requires a gradient: the "
                "model has not been called."
            )
        self._begin_pass()
        program.backward(tensors, gradients, scale)

    def _plain_backward(self, tensors: list[Tensor], gradients: list[Tensor | None], scale: float) -> None:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                raise StepError(
                    "backward: the loss does not depend on any parameter that requires a gradient, or was computed "
                    "under torch.no_grad()."
                )
            if gradient is None and tensor.numel() != 1:
                raise StepError(
                    f"backward: a tensor of shape {tuple(tensor.shape)} needs grad_tensors; only a one-element loss "
                    "has an implied gradient of 1."
                )
        assert self.reducer is not None
        streams = current.streams
        in_step = streams is not None
        if in_step:
            self.reducer.backward_starts()
        seeds = [torch.full_like(t, scale) if g is None else g * scale for t, g in zip(tensors, gradients, strict=True)]
        seed = streams.current() if streams is not None else 0
        recorder = self.engine.recorder if in_step else None
        if recorder is not None:
            recorder.begin_backward()
        current.in_backward = self._in_backward = True
        try:
            plain_backward(tensors, seeds)
        finally:
            current.in_backward = self._in_backward = False
        if recorder is not None:
            recorder.end_backward()
        if streams is not None:
            streams.leave(seed)

    @property
    def applies_loss_scale(self) -> bool:
        """Whether gradients that arrive now, on any thread, are those of `backward`."""
        return self._in_backward or self._in_pass

    # -- partition -----------------------------------------------------------------------------------------------------

    @property
    def partitioned(self) -> bool:
        """Whether modules are on their stages and other stages' parameters are freed."""
        return self._state is State.PARTITIONED

    def owns_module(self, module: nn.Module) -> bool:
        """Whether `module` is part of this model."""
        return any(module is m for m in self.module.modules())

    def checkpointing_changed(self) -> None:
        """Modules were marked for activation checkpointing (smp.set_activation_checkpointing)."""
        if current.streams is not None:
            raise UsageError("smp.set_activation_checkpointing was called inside a step; call it between steps.")
        if self.partitioned:
            checkpointing.install(self.module, self.engine.stages)

    def _manages(self, tensor: Any) -> bool:
        return any(tensor is p for p in self.module.parameters())

    def _partition_untraced(self) -> StageMap:
        """A parameter is used before the model's first call: there is nothing to trace."""
        if self._rt.tp_size > 1:
            raise StepError(
                f"{user_line()} uses a part of the model before the model itself is called for the first time. With "
                "tensor parallelism its layers are split then, which must not happen while one of them runs: call the "
                "model first."
            )
        self._partition_in_step(None, {})
        assert self.engine.stages is not None
        return self.engine.stages

    def _partition_in_step(self, args: tuple[Any, ...] | None, kwargs: dict[str, Any]) -> None:
        program = current.program
        assert program is not None
        self._uneven.before_partition()
        program.on_plain_tensors("partition", self._partition, (None if args is None else (args, kwargs),), {})
        assert self.engine.stages is not None
        program.on_plain_tensors("partition", self.engine.stages.begin_step, (), {})
        self._replace_calls()

    @log.long_phase("partition")
    def _partition(self, call: tuple[tuple[Any, ...], dict[str, Any]] | None) -> None:
        rt = self._rt
        with torch.no_grad():
            self.module = convert(self.module, rt)
            if self._half is not None:
                cast_module(self.module, self._half)
            stages = self._assign_stages(call)
            checkpointing.install(self.module, stages)
            stages.free_others()
            self.engine.stages = stages
            materialize(self.module, owned=stages.is_local, device=rt.device)
            self._move_to_device(stages)
            self._take_weights_of_first_replica(stages)
            self._tied = tied_groups(rt, stages)
            share_initial_values(list(self.module.parameters()), self._tied)
        self._state = State.PARTITIONED
        widen(self.local_parameters(), rt.config)
        self._make_reducer()
        if rt.topology.pp_size > 1:
            accept_empty_stages()
        if rt.optimizer is not None:
            rt.optimizer.take_local(list(self.parameters()))
        rt.run_waiting_loads()
        if rt.topology.pp_size > 1:
            log.info_rank0(
                "%s", table(self.module, stages, rt.topology.pp_size, self.engine.costs, self.engine.forecast)
            )
        for hook in list(self._post_partition_hooks.values()):
            hook(self, rt.optimizer)

    def _assign_stages(self, call: tuple[tuple[Any, ...], dict[str, Any]] | None) -> StageMap:
        rt = self._rt
        num_stages = rt.topology.pp_size
        if num_stages == 1:
            names = [name for name, _ in self.module.named_modules(remove_duplicate=False)]
            assignment = Assignment(dict.fromkeys(names, 0), {})
        else:
            decision = decide(self.module, rt, call, *self._measured)
            assignment, self.engine.costs = decision.assignment, decision.costs
            self.engine.policy, self.engine.forecast = decision.policy, decision.forecast
        return StageMap(self.module, assignment.modules, assignment.own, rt.pp_rank)

    def _move_to_device(self, stages: StageMap) -> None:
        device = self._rt.device
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            if tensor.device != device and not tensor.is_meta:
                if stages.is_local(name) or not isinstance(tensor, Parameter):
                    tensor.data = tensor.data.to(device)
                else:
                    tensor.data = hollow(tensor, device)

    def _take_weights_of_first_replica(self, stages: StageMap) -> None:
        group = self._rt.group(CommGroup.RDP_GROUP)
        if group.size == 1:
            return
        tensors = [*(p.data for p in self.local_parameters()), *self.local_buffers()]
        broadcast_coalesced(tensors, group, 0, "smp.DistributedModel (initial weights)")

    def _make_reducer(self) -> None:
        rt = self._rt
        if rt.config.shard_optimizer_state and rt.dp_size > 1:
            self.ownership = Ownership(rt, self.local_parameters())
        elif rt.config.shard_optimizer_state:
            log.warn_once("sharded alone", "shard_optimizer_state has no effect: no two ranks hold the same parameter")
        self.reducer = Reducer(
            list(self.local_named_parameters()),
            dp=rt.group(CommGroup.DP_GROUP),
            rdp=rt.group(CommGroup.RDP_GROUP),
            prescaled_batch=rt.config.prescaled_batch,
            uneven=self._uneven,
            tied=self._tied,
            ownership=self.ownership,
            on_pass=self._pass_begins,
            **self._reducer_options,
        )
        if rt.topology.pp_size == 1:
            self.reducer.attach()
        if self._comm_hook is not None:
            self.reducer.register_comm_hook(*self._comm_hook)
        if self._broadcast_buffers:
            self._buffer_sync = BufferSync(
                lambda: list(self.local_named_buffers()),
                rt.group(CommGroup.DP_GROUP),
                rt.group(CommGroup.RDP_GROUP),
                self._uneven,
            )

    # -- steps (called by smp.step) ------------------------------------------------------------------------------------

    def _begin_step(self, function: Any, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches
        self._had_backward = self._in_pass = False
        if self.reducer is not None and torch.is_grad_enabled():
            self.reducer.refresh()
            self._sync_buffers()
            if self._rt.topology.pp_size == 1:
                self.reducer.open_step(function)

    def _sync_buffers(self) -> None:
        if (
            self._buffer_sync is not None
            and self.module.training
            and self.reducer is not None
            and not self.reducer.pending
        ):
            self._buffer_sync.before_forward()

    def _begin_microbatch(self, index: int) -> None:
        if index == self._num_microbatches - 1 and self.reducer is not None and torch.is_grad_enabled():
            self.reducer.last_microbatch()

    def _replace_calls(self) -> None:
        """Let the engine take calls of placed modules until the step ends."""
        if self._calls_replaced is not None and self.engine.stages is not None:
            stages = self.engine.stages
            if self.engine.policy is Policy.ZERO_BUBBLE:  # in every step alike, so that all round the same way
                self._calls_replaced.enter_context(late_weights())
            self._calls_replaced.enter_context(stages_mod.replaced_calls(stages.replacements()))
            self._calls_replaced.enter_context(stages_mod.replaced_calls(stages.recording(), "forward"))

    def _begin_pass(self) -> None:
        if not self._in_pass:
            self._in_pass = True
            assert self.reducer is not None
            self.reducer.begin(False if self._no_sync else None)

    def _pass_begins(self) -> None:
        if self._rt.optimizer is not None:
            self._rt.optimizer.gradients_change()

    def _parameter_done(self, parameter: Tensor) -> None:
        assert self.reducer is not None
        self.reducer.mark_done(parameter)  # type: ignore[arg-type]

    def _seal(self, reach: Reach) -> None:
        """No forward is to come in this step: parameters may be reduced as soon as nothing can reach them."""
        with torch._C.DisableTorchFunction():  # in glue code, where setting a `grad` would be an operation of the plan
            self._begin_pass()
            reach.seal([p for p in self.local_parameters() if p.requires_grad])

    def _end_step(self) -> None:
        if self._rt.topology.pp_size == 1:
            if self.reducer is not None and torch.is_grad_enabled():
                self.reducer.close_step()
        elif self._in_pass:
            assert self.reducer is not None
            self.reducer.finish()
        self._in_pass = False
        self._calls_replaced = None

    def _step_failed(self) -> None:
        self._calls_replaced = None
        self._in_pass = False
        self.engine.step_failed()
        if self.reducer is not None:
            self.reducer.abort()

    def _after_step(self) -> None:
        if self._had_backward and not self._first_step_done:
            self._first_step_done = True
            checkpointing.warn_if_unused(self.module)
            for hook in list(self._post_step_hooks.values()):
                hook(self, self._rt.optimizer)

    # -- gradients -----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Passes inside only accumulate gradients; the first one after it reduces them all."""
        before, self._no_sync = self._no_sync, True
        try:
            with self.reducer.no_sync() if self.reducer is not None else ExitStack():
                yield
        finally:
            self._no_sync = before

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """For uneven inputs: ranks that run out of batches take part in the others' reductions. Needs `ddp`."""
        if not self._rt.config.ddp:
            raise UsageError("DistributedModel.join needs the configuration 'ddp': True.")
        if self._rt.tp_size > 1 and enable:
            raise UsageError(
                f"DistributedModel.join cannot be used with tensor_parallel_degree {self._rt.tp_size}: the ranks of a "
                "tensor-parallel group compute every batch together, so none can run out before the others. Give all "
                "ranks the same number of batches (drop or repeat the last ones)."
            )
        if self._rt.config.shard_optimizer_state and enable:
            raise UsageError(
                "DistributedModel.join cannot be used with shard_optimizer_state: a rank without batches would still "
                "have to update the parameters whose optimizer state it keeps, in every step of the others. Give all "
                "ranks the same number of batches (drop or repeat the last ones)."
            )
        return self._uneven.join(divide_by_initial_world_size, enable, throw_on_early_termination)

    @property
    def joining(self) -> bool:
        """Whether the script is inside `join`."""
        return self._uneven.enabled

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let `hook(state, bucket) -> Future` reduce the gradient buckets, as in torch's DistributedDataParallel.

        Not those of distributed parameters, nor those of tied weights that several stages hold (a warning names these).
        """
        if not callable(hook):
            raise UsageError(f"register_comm_hook: the hook must be callable as hook(state, bucket), got {hook!r}")
        if self._comm_hook is not None:
            raise UsageError("register_comm_hook: a hook is registered already; only one is possible")
        self._comm_hook = (state, hook)
        if self.reducer is not None:
            self.reducer.register_comm_hook(state, hook)

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def stage_of(self) -> Mapping[str, int]:
        """Name of a parameter or buffer -> its stage."""
        assert self.engine.stages is not None
        return self.engine.stages.stage_of

    def owned(self, name: str) -> bool:
        """Whether the parameter or buffer of that name lives on this rank's stage."""
        return self._is_local(name)

    def runs_module(self, name: str) -> bool:
        """Whether the module of that name runs on this rank's stage."""
        stages = self.engine.stages
        return stages is None or stages.of_module(name) == stages.rank

    def holders(self, name: str) -> tuple[int, ...]:
        """The stages on which the parameter or buffer of that name lives: several for a replicated tied weight."""
        assert self.engine.stages is not None
        return self.engine.stages.holders.get(name, (self.stage_of[name],))

    def local_state_dict(self, cast_to_cpu: bool = True) -> "OrderedDict[str, Any]":
        """What lives on this rank, with `_smp_is_partial` True in it. See `smp.model_state.local_state_dict`."""
        return model_state.local_state_dict(self, cast_to_cpu)

    def state_dict(  # type: ignore[override]
        self, *args: Any, gather_to_rank0: bool = False, cast_to_cpu: bool = True, **kwargs: Any
    ) -> "OrderedDict[str, Any]":
        """The whole model under its original names; collective over the mp group.

        With `gather_to_rank0` ranks other than 0 get an empty dict. See `smp.model_state.full_state_dict`.
        """
        return model_state.full_state_dict(self, gather_to_rank0, cast_to_cpu)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False
    ) -> Any:
        """Load a partial or a full state dict; before partition it is kept and applied then.

        See `smp.model_state.load_state_dict` for errors.
        """
        return model_state.load_state_dict(self, state_dict, strict, same_partition_load)

    # -- hooks and the rest --------------------------------------------------------------------------------------------

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call `hook(model, optimizer)` once the model is partitioned; at once if it is already."""
        handle = RemovableHandle(self._post_partition_hooks)
        self._post_partition_hooks[handle.id] = hook
        if self.partitioned:
            hook(self, self._rt.optimizer)
        return handle

    def register_post_step_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call `hook(model, optimizer)` once, after the first step's forward and backward. `optimizer` may be None."""
        handle = RemovableHandle(self._post_step_hooks)
        self._post_step_hooks[handle.id] = hook
        return handle

    def cpu(self) -> "DistributedModel":
        """Move this rank's parameters and buffers to host memory."""
        for tensor in [*self.parameters(), *self.buffers()]:
            tensor.data = tensor.data.cpu()
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def _refuse_backward(*_: Any) -> None:
    raise StepError("backward was called, but the configuration says pipeline '_only_forward'.")


def _check_arguments(rt: Runtime, module: Any, trace_device: str, passes: int, bucket_cap_mb: float) -> None:
    if rt.model is not None:
        raise UsageError("there is a DistributedModel already; a script can have one. Put both models into one module.")
    if not isinstance(module, nn.Module):
        raise UsageError(f"smp.DistributedModel takes a torch.nn.Module, got {type(module).__name__}.")
    if isinstance(module, DistributedModel):
        raise UsageError("smp.DistributedModel was given a DistributedModel.")
    if trace_device not in ("gpu", "cpu"):
        raise UsageError(f"trace_device is {trace_device!r}; it must be 'gpu' or 'cpu'.")
    if not isinstance(passes, int) or passes < 1:
        raise UsageError(f"backward_passes_per_step is {passes!r}; it must be a whole number from 1.")
    if not bucket_cap_mb > 0:
        raise UsageError(f"bucket_cap_mb is {bucket_cap_mb!r}; it must be above 0.")
