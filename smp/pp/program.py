"""One microbatch's program on this rank: it runs every call where its data lives and moves values between stages.

Every rank of the pipeline group runs the same program; only the owner of a call computes it. A call goes like this:

    1. find the owner: the module's stage, or where the largest placed operand lives (ties: the one made last)
    2. move operands that live elsewhere, straight from their owners
    3. owner: run on plain tensors, keep the autograd graph in a CallNode
       others: take the remembered structure, or wait for the owner to send it (first time, or data-dependent)
    4. give back placed tensors; an input changed in place gets a new value
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from smp.errors import StepError
from smp.nested import flatten, unflatten
from smp.pp import placed as glue
from smp.pp.call import Call
from smp.pp.course import Course
from smp.pp.engine import Engine, StepContext
from smp.pp.journal import EdgeKind, Work
from smp.pp.observe import Observers, note_picked, picking
from smp.pp.placed import GlueMode, Placed, Storage, Value, user_line
from smp.pp.segments import Cut
from smp.pp.special import SPECIAL, refuse
from smp.pp.structure import SameObject, Structure, TensorInfo, agrees, describe
from smp.pp.tape import CallNode, MoveNode, Node, Tape, saving_copies_of
from smp.pp.tied import owner_of_call, refuse_write, replica_values
from smp.pp.weights import PutOff
from smp.tp.shard import spec_of
from smp.tp.watch import refuse_part

# Tags of one microbatch: two for each move (there and back) or structure. 2**13 microbatches of 2**15 messages.
_TAGS_PER_MICROBATCH = 1 << 16
_MAX_MICROBATCHES = 1 << 13

# How many numbers these take depends on their operands, so a stream goes on anew after them.
_DRAWS_BY_VALUE = frozenset(("poisson", "binomial", "_standard_gamma", "_sample_dirichlet"))


class Program:
    """See the module's docstring. `index` is the microbatch; `step` what all microbatches of the step share."""

    def __init__(self, index: int, engine: Engine, step: StepContext) -> None:
        self.index = index
        self.engine = engine
        self.step = step
        self.rank = engine.rank
        self.device = engine.device
        self.in_node = ""  # the name of the call being run on plain tensors, if any
        self.mode = GlueMode(self)
        self.observers: Observers = {}
        self.joins_calls = True  # of one stage, into one backward; else each call's parameters are done when it is
        self.num_backwards = 0
        self.called_after_backward = False
        self.course = Course(self)
        self.weights = PutOff(step.reach.release)
        self.tape = Tape(engine.rank, self.weights.release)
        self._order = 0
        self._next_tag = (step.first + index) % _MAX_MICROBATCHES * _TAGS_PER_MICROBATCH
        self._last_tag = self._next_tag + _TAGS_PER_MICROBATCH - 2
        self._known: dict[int, tuple[torch.Tensor, Value]] = {}  # parameters and adopted tensors by id

    @property
    def had_one_backward(self) -> bool:
        """Whether it has begun its backward, the only one so far, and run no forward after that."""
        return self.num_backwards == 1 and not self.called_after_backward

    def next_order(self) -> int:
        self._order += 1
        return self._order

    # -- glue functions ------------------------------------------------------------------------------------------------

    def glue_function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A torch function called by glue code: plain when no operand is placed."""
        if glue.is_plain_query(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        special = SPECIAL.get(func)
        if special is not None:
            return special(self, func, args, kwargs)
        name = getattr(func, "__name__", str(func))
        call = self._open(func, name, func, args, kwargs, None, is_function=True)
        if call is None:
            return func(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return refuse(self, func, args, kwargs)  # within torch.func: it would not see what runs on plain tensors
        seed = self.step.streams.current()
        result = self._call(call)
        if name in _DRAWS_BY_VALUE:
            self.step.streams.leave(seed)
        return result

    def call_module(
        self, name: str, owner: int | None, forward: Callable[..., Any], key: Any, args: Any, kwargs: Any
    ) -> Any:
        """A module that lives on one stage (`owner` None: wherever its operands live), as one node.

        `forward` runs it, in a random stream of its own if it may draw. A module without an owner and without placed
        operands runs on every rank.
        """
        observed = self.engine.observed(key, self.observers) if self.observers else []
        if observed:
            seen = [m for _, m in observed]
            forward = picking(forward, seen, self.observers)
            key = key._replace(variant=f"observed {[(i, len(self.observers[id(m)])) for i, m in observed]}")
            result, picked = self._call_module(name, owner, forward, key, args, kwargs)
            note_picked(seen, self.observers, picked)
            return result
        return self._call_module(name, owner, forward, key, args, kwargs)

    def _call_module(
        self, name: str, owner: int | None, forward: Callable[..., Any], key: Any, args: Any, kwargs: Any
    ) -> Any:
        call = self._open(key, name, forward, args, kwargs, owner, is_function=False)
        if call is None:
            return forward(*args, **kwargs)
        seed = self.step.streams.current()
        result = self.on_plain_tensors(name, self._call, (call,), {})  # to glue, parameters would be placed values
        if not key.deterministic:  # the rank that runs it has split its stream here; the others do so now
            self.step.streams.leave(seed)
        return result

    def call_callable(self, name: str, function: Callable[..., Any], key: Any, args: Any, kwargs: Any) -> Any:
        """An opaque piece of code (a checkpointed function, an autograd Function) as one node."""
        call = self._open(key, name, function, args, kwargs, None, is_function=False)
        if call is None:
            return function(*args, **kwargs)
        return self.on_plain_tensors(name, self._call, (call,), {})

    def _open(
        self,
        key: Any,
        name: str,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        owner: int | None,
        is_function: bool,
    ) -> Call | None:
        """The call taken apart; None when it has neither an owner nor placed operands."""
        leaves, spec = flatten((args, kwargs))
        values = [self._value_of(leaf) for leaf in leaves]
        if owner is None:
            operands = [value for value in values if value is not None]
            if not operands:
                return None
            owner = owner_of_call(operands, self.engine.holders_of)
        return Call(key, name, function, leaves, spec, values, owner, is_function)

    def start(self) -> None:
        """The first thing a program does on its thread."""
        self.step.streams.seed(self.step.root_seed(self.index))

    def end(self) -> None:
        """The step function has returned."""
        if self.course.journal is not None:
            self.step.watch_state(self.index, True)
        if self.engine.debug is not None:
            self.engine.debug.compare(self, "the end of the step function", ())

    # -- turns ---------------------------------------------------------------------------------------------------------

    def follow(self, cut: Cut, late: bool) -> None:
        """Stop where `cut` says; `late`: linear layers put the gradients of their weights off."""
        self.course.follow(cut)
        self.weights.active = late

    def leave_plan(self) -> None:
        """Run on without stops."""
        self.course.leave_plan()
        self.weights.end_turn(-1)
        self.run_deferred(-1)
        self.weights.active = False

    def end_backward_turn(self, segment: int, deferred: bool) -> None:
        """A turn of the backward is over; `deferred`: a turn for its weights' gradients is to come."""
        self.weights.end_turn(segment)
        if not deferred:
            self.run_deferred(segment)

    def run_deferred(self, segment: int) -> None:
        """Compute the gradients of weights that the backward of that segment has put off."""
        running = glue.current.program or self  # whoever hands over the turn
        running.on_plain_tensors("backward", self.weights.run, (segment,), {})

    def known_value(self, leaf: Any) -> Value | None:
        """The value behind a result of the step function: also of a parameter, and of a tensor that was written to."""
        return self._value_of(leaf)

    def forget(self) -> None:
        """Let go of the tensors that the program has met."""
        self._known.clear()

    def _value_of(self, leaf: Any) -> Value | None:
        if type(leaf) is Placed:
            value = leaf.value
            if value.program is not self:
                value = self._foreign(value)
                leaf.hold(value)
            return value
        if not isinstance(leaf, torch.Tensor):
            return None
        known = self._known.get(id(leaf))
        if known is not None:
            return known[1]
        owner = self.engine.owner_of(leaf)
        if owner is None:
            writer = self.step.writer_of(leaf)
            if writer is not None:
                return self._constant_of(leaf, writer)
            if isinstance(leaf, nn.Parameter) and leaf.requires_grad and not self.engine.is_own_buffer(leaf):
                self._reject_unknown_parameter(leaf)
            return None
        if spec_of(leaf) is not None:
            refuse_part(leaf, user_line())
        local = leaf if owner == self.rank else None
        requires_grad = leaf.requires_grad and torch.is_grad_enabled()
        assert self.engine.stages is not None
        stride = self.engine.stages.stride_of(leaf)
        value = Value(owner, self, tuple(leaf.shape), stride, leaf.dtype, requires_grad, local)
        value.parameter = leaf
        value.copies = replica_values(value, self.engine.holders_of(leaf), self.rank)
        value.storage.of_buffer = not isinstance(leaf, nn.Parameter)
        if requires_grad or not leaf.requires_grad:
            self._known[id(leaf)] = (leaf, value)
        return value

    def _constant_of(self, leaf: torch.Tensor, owner: int) -> Value:
        """A plain tensor that another microbatch wrote a placed value into."""
        with torch._C.DisableTorchFunction():
            local = leaf.detach() if owner == self.rank else None
        value = Value(owner, self, tuple(leaf.shape), leaf.stride(), leaf.dtype, False, local)
        self._known[id(leaf)] = (leaf, value)
        return value

    def _foreign(self, value: Value) -> Value:
        """A value of another microbatch (kept in an attribute): its data, as a constant."""
        if self.course.planned:
            raise StepError(
                f"{user_line()} uses a tensor that another microbatch has computed. It was kept in an attribute or a "
                "global variable, and microbatches take turns at every move between stages: pass the tensor on as an "
                "argument or a result, or set pipeline_parallel_degree to 1."
            )
        self.step.entangle("a microbatch reads what another one has computed")
        local = None if value.local is None else value.local.detach()
        return Value(value.owner, self, value.shape, value.stride, value.dtype, False, local)

    def _reject_unknown_parameter(self, parameter: nn.Parameter) -> None:
        raise StepError(
            f"a parameter of shape {tuple(parameter.shape)} that requires a gradient is used at {user_line()} but "
            "belongs to no DistributedModel, so only one stage would see its gradient. Make it part of the module "
            "given to smp.DistributedModel, or call requires_grad_(False) on it."
        )

    # -- one call ------------------------------------------------------------------------------------------------------

    def _call(self, call: Call) -> Any:
        call.check()
        signature = call.signature(self.device.type)
        if self.engine.debug is not None:
            self.engine.debug.compare(self, call.name, signature)
        call.arrived = [None if value is None else self.move(value, call.owner, call.name) for value in call.values]
        call.run = self.tape.open_run(call.owner)
        known = self.engine.structures.get(signature)
        if self.course.journal is not None:
            self.course.called(call.owner, call.estimate(self.engine.costs).forward)
        if self.rank == call.owner:
            return self._run(call, signature, known)
        if known is None or known.dynamic:
            known = self._receive_structure(call)
            self.engine.remember(signature, known)
        if known.draws:  # take the same random numbers from the glue stream as the owner does
            args, kwargs = call.arguments(call.dummies(self.device))
            with torch.no_grad():
                self.on_plain_tensors("replay", call.function, args, kwargs)
        return self._finish(call, known, None, None)

    def _run(self, call: Call, signature: Any, known: Structure | None) -> Any:
        inputs = call.inputs(shielded=known is None or bool(known.written))
        versions = [_version(x) for x in inputs]
        args, kwargs = call.arguments(inputs)
        before = self.step.streams.snapshot() if known is None and call.is_function else None
        buffers = self.engine.buffer_versions(call.key) if known is None else {}
        guarded = [v.local for v in call.arrived if v is not None and v.storage.of_buffer and v.local is not None]
        guarded += self.engine.buffers_at_risk(call.key, known)
        with saving_copies_of(guarded) if guarded and torch.is_grad_enabled() else nullcontext():
            result = self.on_plain_tensors(call.name, call.function, args, kwargs)
        written = tuple(i for i, x in enumerate(inputs) if _version(x) != versions[i])
        if known is None or known.dynamic:
            draws = known.draws if known is not None else before is not None and self.step.streams.moved_since(before)
            if known is None:
                call.warn_if_changed(args, kwargs)
            changed = known.buffers if known is not None else self.engine.buffers_written(call.key, buffers)
            function_name = call.name if call.is_function else None
            known, results = describe(result, inputs, written, function_name, draws, changed)
            self.course.meet(EdgeKind.STRUCTURE, self.rank)  # before it is remembered: other ranks may park here, too
            self.engine.remember(signature, known)
            self._send_structure(known)
        else:
            results, _ = flatten(result)
            if written != known.written or not agrees(known, results):
                raise call.unstable()
        return self._finish(call, known, inputs, results)

    def on_plain_tensors(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        mode_on_top = torch.overrides._get_current_function_mode() is self.mode
        if mode_on_top:  # not so within a function's handler, nor under a mode of the user's
            self.mode.__exit__(None, None, None)
        outer, self.in_node = self.in_node, name
        try:
            return function(*args, **kwargs)
        finally:
            self.in_node = outer
            if mode_on_top:
                self.mode.__enter__()

    def _finish(self, call: Call, structure: Structure, inputs: list[Any] | None, results: list[Any] | None) -> Any:
        """Step 4, on every rank: new values, the tape's node, in-place changes, the nested result.

        `inputs` and `results` are the plain tensors on the owner, None elsewhere.
        """
        outputs: list[tuple[Value, torch.Tensor | None]] = []  # those that get gradients
        renewed: dict[int, Value] = {}
        for i, info in zip(structure.written, structure.written_info, strict=True):
            tensor = None if inputs is None else inputs[i]
            renewed[i] = self._renew(call, i, info, tensor)
            if info.requires_grad and renewed[i].parameter is None:
                outputs.append((renewed[i], tensor))
        given: list[Any] = []
        made: dict[int, Value] = {}
        for index, info in enumerate(structure.leaves):
            if isinstance(info, SameObject):
                given.append(call.leaves[info.input])
            elif not isinstance(info, TensorInfo):
                given.append(info if results is None else results[index])
            elif info.same_as is not None:
                given.append(call.leaves[info.same_as])  # the caller's own object, where it is
            else:
                tensor = None if results is None else results[index]
                storage = _shared_storage(info, call.arrived, renewed, made)
                made[index] = self._new_value(info, tensor, call.owner, storage)
                given.append(Placed(made[index]))
                if info.requires_grad:
                    outputs.append((made[index], tensor))
        if structure.dynamic:
            self.course.structure_sent(call.owner)
        if outputs:
            self._record(self._node(call, outputs))
        for buffer in structure.buffers:
            if self.engine.moves_buffer(buffer, call.owner):
                self.step.entangle(f"buffer '{buffer}' is written on one stage and read on another")
            for stale in self.engine.adopt_written(buffer, call.owner):
                self._known.pop(stale, None)
        self.engine.moves.progress()
        return unflatten(structure.spec, given)

    def _node(self, call: Call, outputs: list[tuple[Value, torch.Tensor | None]]) -> CallNode:
        inputs = [value for value in call.arrived if value is not None and value.requires_grad]
        parameters = [value.parameter for value in inputs if value.parameter is not None]
        real = None
        if self.rank == call.owner:
            parameters += self.engine.parameters_of(call.key)
            real = [_with_graph(tensor) for _, tensor in outputs if tensor is not None]
        held = None if real is None else list[Any](real)
        node = CallNode(call.name, call.owner, inputs, [value for value, _ in outputs], held, parameters)
        node.open = self.joins_calls
        if call.run is not None and self.joins_calls:
            node.run = call.run
        if real is not None:
            for value, tensor in zip(node.outputs, real, strict=True):
                value.graph, value.run = tensor, node.run
        if self.course.journal is not None:
            estimate = call.estimate(self.engine.costs)
            self.course.will_run_backward(node, Work(call.owner, estimate.backward, estimate.weight))
        return node

    def _new_value(self, info: TensorInfo, tensor: torch.Tensor | None, owner: int, storage: Storage | None) -> Value:
        local = None
        if tensor is not None:
            local = tensor.detach()
            if info.requires_grad:
                local.requires_grad_()
        return Value(owner, self, info.shape, info.stride, info.dtype, info.requires_grad, local, storage)

    def _renew(self, call: Call, index: int, info: TensorInfo, written: torch.Tensor | None) -> Value:
        """The value of an input after it was changed in place."""
        leaf, value = call.leaves[index], call.values[index]
        if value is None:
            return self._adopt(leaf, info, call.owner)
        arrived = call.arrived[index]
        assert arrived is not None
        if tuple(info.shape) != value.shape:
            raise StepError(f"{user_line()} changes the shape of a tensor in place, which cannot work across stages.")
        if value.parameter is not None:
            refuse_write(self.engine.holders_of(value.parameter), user_line())
            if arrived is not value:
                raise StepError(
                    f"{user_line()} changes a parameter or buffer of stage {value.owner} in place on stage "
                    f"{call.owner}. "
                    "Do it in a module of its own stage."
                )
            value.copies.clear()
            return value
        for storage in {value.storage, arrived.storage}:
            storage.version += 1
            storage.writer = user_line()
        new = self._new_value(info, written, call.owner, arrived.storage)
        if type(leaf) is Placed:
            leaf.hold(new)
        else:
            self._known[id(leaf)] = (leaf, new)
            self.step.note_written(leaf, new)
        return new

    def _adopt(self, leaf: torch.Tensor, info: TensorInfo, owner: int) -> Value:
        """A plain tensor that a placed value was written into: from now on it lives where it was written."""
        local = leaf if owner == self.rank else None
        if self.engine.adopt_buffer(leaf, owner):
            self.step.entangle("a buffer is written outside the modules")
            value = Value(owner, self, info.shape, info.stride, info.dtype, False, local, Storage(of_buffer=True))
            value.parameter = leaf
        else:
            value = self._new_value(info, local, owner, None)
            self.step.note_written(leaf, value)
        self._known[id(leaf)] = (leaf, value)
        return value

    def _record(self, node: Node) -> None:
        if self.num_backwards:
            self.called_after_backward = True
        self.step.reach.add(node)
        self.tape.add(node)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _tag(self) -> int:
        self._next_tag += 2
        if self._next_tag > self._last_tag:
            raise StepError(
                "a microbatch has more than 32768 moves between stages; place more of the model on one stage."
            )
        return self._next_tag

    def _send_structure(self, structure: Structure) -> None:
        tag = self._tag()
        for stage in range(self.engine.num_stages):
            if stage != self.rank:
                self.step.send_object(structure, stage, tag)

    def _receive_structure(self, call: Call) -> Structure:
        self.course.meet(EdgeKind.STRUCTURE, call.owner)
        what = f"the result's structure of '{call.name}'"
        structure: Structure = self.step.receive_object(call.owner, self._tag(), what)
        return structure

    def move(self, value: Value, stage: int, reader: str = "") -> Value:
        """The value on `stage`: itself, or its one copy there."""
        if value.owner == stage:
            return value
        copy = value.copies.get(stage)
        if copy is None or copy.version != copy.storage.version:
            self.course.meet(EdgeKind.MOVE, value.owner, stage, value.numel * value.dtype.itemsize)
            tag = self._tag()
            local = None
            if self.rank == value.owner:
                assert value.local is not None
                self.step.send(value.local.detach(), stage, tag, f"an input of '{reader}'")
            elif self.rank == stage:
                local = self.step.receive(value.shape, value.dtype, value.owner, tag, f"an input of '{reader}'")
                local.requires_grad_(value.requires_grad)
            copy = Value(
                stage, self, value.shape, contiguous_stride(value.shape), value.dtype, value.requires_grad, local
            )
            value.copies[stage] = copy
            if value.requires_grad:
                parameters = [value.parameter] if value.parameter is not None and self.rank == value.owner else []
                self._record(MoveNode(value, copy, tag, parameters))
        return copy

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(self, tensors: list[Any], gradients: list[Any], scale: float) -> None:
        """Gradients of `tensors` times `scale`, summed into the parameters of every stage.

        `gradients` are None (ones, for one-element tensors), plain tensors, or placed ones.
        """
        seeds: list[tuple[Value, torch.Tensor | None]] = []
        for tensor, gradient in zip(tensors, gradients, strict=True):
            value = self._value_of(tensor) if isinstance(tensor, torch.Tensor) else None
            if value is None or not value.requires_grad:
                raise StepError(
                    f"backward at {user_line()}: the loss does not depend on any parameter that requires a gradient, "
                    "or was computed under torch.no_grad()."
                )
            value.check_fresh()
            if gradient is None and value.numel != 1:
                raise StepError(
                    f"backward at {user_line()}: a tensor of shape {value.shape} needs grad_tensors; only a "
                    "one-element loss has an implied gradient of 1."
                )
            seeds.append((value, self._seed(value, gradient, scale)))
        self.num_backwards += 1
        seed = self.step.streams.current()
        if self.num_backwards == 1:
            self.on_plain_tensors("backward", self.tape.forget_data, (), {})
            self.course.meet(EdgeKind.BACKWARD)
        with self.weights.in_backward():
            self.on_plain_tensors("backward", self.tape.backward, (seeds, self), {})
        self.step.streams.leave(seed)

    def _seed(self, value: Value, gradient: Any, scale: float) -> torch.Tensor | None:
        if type(gradient) is Placed:
            gradient = self.move(self._value_of(gradient), value.owner, "backward").local  # type: ignore[arg-type]
        if self.rank != value.owner:
            return None
        if gradient is None:
            return torch.full(value.shape, scale, dtype=value.dtype, device=self.device)
        return gradient.detach() * scale

    # What the tape asks for on its way back.

    def meets(self, node: MoveNode) -> None:
        """The gradient of a move goes back, on whichever stages."""
        value = node.copy
        self.course.meet(EdgeKind.GRADIENT, value.owner, node.source.owner, value.numel * value.dtype.itemsize)

    def runs(self, node: CallNode) -> None:
        """The backward of a call runs on its stage."""
        self.course.runs_backward(node, node.owner)

    def send(self, node: MoveNode, gradient: torch.Tensor | None) -> None:
        """The gradient of a moved value goes back to where it came from."""
        self.step.send_gradient(gradient, node.source.owner, node.tag + 1)

    def receive(self, node: MoveNode) -> torch.Tensor | None:
        """Wait for it there."""
        return self.step.receive_gradient(node.source.shape, node.source.dtype, node.copy.owner, node.tag + 1)


def _with_graph(tensor: torch.Tensor) -> torch.Tensor:
    """A result that later calls of the run can take: not a leaf, such as a parameter that a module returns."""
    if tensor.grad_fn is not None:
        return tensor
    with torch._C.DisableTorchFunction():
        return tensor.view_as(tensor)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of that shape."""
    stride, count = [], 1
    for length in reversed(shape):
        stride.append(count)
        count *= max(length, 1)
    return tuple(reversed(stride))


def _shared_storage(
    info: TensorInfo, arrived: list[Value | None], renewed: dict[int, Value], made: dict[int, Value]
) -> Storage | None:
    if info.shares is None:
        return None
    kind, index = info.shares
    if kind == "out":
        return made[index].storage if index in made else None
    source = renewed.get(index) or arrived[index]
    return None if source is None else source.storage


def _version(leaf: Any) -> int:
    """Counts in-place changes of a tensor; 0 for anything that cannot be asked."""
    try:
        return leaf._version
    except (AttributeError, RuntimeError):  # no tensor, or one of inference mode
        return 0
