"""One microbatch's program on this rank: it runs every call where its data lives and moves values between stages.

Every rank of the pipeline group runs the same program; only the owner of a call computes it. A call goes like this:

    1. find the owner: the module's stage, or where the largest placed operand lives (ties: the one made last)
    2. move operands that live elsewhere, straight from their owners
    3. owner: run on plain tensors, keep the autograd graph in a CallNode
       others: take the remembered structure, or wait for the owner to send it (first time, or data-dependent)
    4. give back placed tensors; an input changed in place gets a new value
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smp.errors import StepError
from smp.nested import Spec, flatten, unflatten
from smp.pp import placed as glue
from smp.pp.engine import Engine, StepContext
from smp.pp.placed import GlueMode, Placed, Storage, Value, user_line
from smp.pp.special import SPECIAL, refuse
from smp.pp.structure import SameObject, Structure, TensorInfo, agrees, describe, signature_of, value_signature
from smp.pp.tape import CallNode, MoveNode, Node, Tape

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
        self.tape = Tape(engine.rank, step.reach.release)
        self.in_node = ""  # the name of the call being run on plain tensors, if any
        self.mode = GlueMode(self)
        self.num_backwards = 0
        self.called_after_backward = False
        self._order = 0
        self._next_tag = index % _MAX_MICROBATCHES * _TAGS_PER_MICROBATCH
        self._last_tag = self._next_tag + _TAGS_PER_MICROBATCH - 2
        self._known: dict[int, tuple[torch.Tensor, Value]] = {}  # parameters and adopted tensors by id

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
        leaves, spec = flatten((args, kwargs))
        values = [self._value_of(leaf) for leaf in leaves]
        if not any(value is not None for value in values):
            return func(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return refuse(self, func, args, kwargs)  # within torch.func: it would not see what runs on plain tensors
        name = getattr(func, "__name__", str(func))
        seed = self.step.streams.current()
        result = self._call(func, name, func, leaves, spec, values, None, is_function=True)
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
        leaves, spec = flatten((args, kwargs))
        values = [self._value_of(leaf) for leaf in leaves]
        if owner is None and not any(value is not None for value in values):
            return forward(*args, **kwargs)
        seed = self.step.streams.current()
        result = self._call(key, name, forward, leaves, spec, values, owner, is_function=False)
        if not key.deterministic:  # the rank that runs it has split its stream here; the others do so now
            self.step.streams.leave(seed)
        return result

    def call_callable(
        self, name: str, owner: int | None, function: Callable[..., Any], key: Any, args: Any, kwargs: Any
    ) -> Any:
        """An opaque piece of code (a checkpointed function, an autograd Function) as one node."""
        leaves, spec = flatten((args, kwargs))
        values = [self._value_of(leaf) for leaf in leaves]
        if owner is None and not any(value is not None for value in values):
            return function(*args, **kwargs)
        return self._call(key, name, function, leaves, spec, values, owner, is_function=False)

    def start(self) -> None:
        """The first thing a program does on its thread."""
        self.step.streams.seed(self.step.root_seed(self.index))

    def end(self) -> None:
        """The step function has returned."""
        if self.engine.debug is not None:
            self.engine.debug.compare(self, "the end of the step function", ())

    def _value_of(self, leaf: Any) -> Value | None:
        if type(leaf) is Placed:
            value = leaf.value
            if value.program is not self:
                value = leaf.value = self._foreign(value)
            return value
        if not isinstance(leaf, torch.Tensor):
            return None
        known = self._known.get(id(leaf))
        if known is not None:
            return known[1]
        owner = self.engine.owner_of(leaf)
        if owner is None:
            if isinstance(leaf, nn.Parameter) and leaf.requires_grad and not self.engine.is_own_buffer(leaf):
                self._reject_unknown_parameter(leaf)
            return None
        local = leaf if owner == self.rank else None
        requires_grad = leaf.requires_grad and torch.is_grad_enabled()
        assert self.engine.stages is not None
        stride = self.engine.stages.stride_of(leaf)
        value = Value(owner, self, tuple(leaf.shape), stride, leaf.dtype, requires_grad, local)
        value.parameter = leaf
        if requires_grad or not leaf.requires_grad:
            self._known[id(leaf)] = (leaf, value)
        return value

    def _foreign(self, value: Value) -> Value:
        """A value of another microbatch (kept in an attribute): its data, as a constant."""
        local = None if value.local is None else value.local.detach()
        return Value(value.owner, self, value.shape, value.stride, value.dtype, False, local)

    def _reject_unknown_parameter(self, parameter: nn.Parameter) -> None:
        raise StepError(
            f"a parameter of shape {tuple(parameter.shape)} that requires a gradient is used at {user_line()} but "
            "belongs to no DistributedModel, so only one stage would see its gradient. Make it part of the module "
            "given to smp.DistributedModel, or call requires_grad_(False) on it."
        )

    # -- one call ------------------------------------------------------------------------------------------------------

    def _call(
        self,
        key: Any,
        name: str,
        function: Callable[..., Any],
        leaves: list[Any],
        spec: Spec,
        values: list[Value | None],
        owner: int | None,
        is_function: bool,
    ) -> Any:
        if owner is None:
            operands = [value for value in values if value is not None]
            owner = max(operands, key=lambda value: (value.numel, value.order)).owner
        for index, value in enumerate(values):
            if value is not None:
                value.check_fresh()
            elif hides_placed(leaves[index]):
                raise self._hidden(name, spec, leaves, index)
        signature = (
            key,
            spec,
            tuple([signature_of(x) if v is None else value_signature(v) for x, v in zip(leaves, values, strict=True)]),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(self.device.type),
        )
        if self.engine.debug is not None:
            self.engine.debug.compare(self, name, signature)
        arrived = [None if value is None else self.move(value, owner, name) for value in values]
        known = self.engine.structures.get(signature)
        if self.rank == owner:
            return self._run(signature, known, name, function, leaves, spec, values, arrived, owner, is_function)
        if known is None or known.dynamic:
            known = self._receive_structure(owner, name)
            self.engine.remember(signature, known)
        if known.draws:
            self._replay_draws(function, leaves, spec, arrived)
        return self._finish(key, name, known, None, None, leaves, values, arrived, owner)

    def _run(
        self,
        signature: Any,
        known: Structure | None,
        name: str,
        function: Callable[..., Any],
        leaves: list[Any],
        spec: Spec,
        values: list[Value | None],
        arrived: list[Value | None],
        owner: int,
        is_function: bool,
    ) -> Any:
        shielded = known is None or bool(known.written)
        inputs = [
            x if v is None else _as_input(v, shielded or v.requires_grad is False)
            for x, v in zip(leaves, arrived, strict=True)
        ]
        versions = [x._version if isinstance(x, torch.Tensor) and not x.is_inference() else 0 for x in inputs]
        args, kwargs = unflatten(spec, inputs)
        before = self.step.streams.snapshot() if known is None and is_function else None
        result = self.on_plain_tensors(name, function, args, kwargs)
        written = tuple(
            i
            for i, x in enumerate(inputs)
            if isinstance(x, torch.Tensor) and not x.is_inference() and x._version != versions[i]
        )
        if known is None or known.dynamic or written != known.written:
            if known is not None and not known.dynamic:
                raise self._unstable(name)
            draws = before is not None and self.step.streams.moved_since(before)
            draws = draws or (known is not None and known.draws)
            known, results = describe(result, inputs, written, name if is_function else None, draws)
            self.engine.remember(signature, known)
            self._send_structure(known)
        else:
            results, _ = flatten(result)
            if not agrees(known, results):
                raise self._unstable(name)
        return self._finish(signature[0], name, known, inputs, results, leaves, values, arrived, owner)

    def on_plain_tensors(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        mode_on_top = torch.overrides._get_current_function_mode() is self.mode
        if mode_on_top:  # not so within a function's handler, nor under a mode of the user's
            self.mode.__exit__(None, None, None)
        self.in_node = name
        try:
            return function(*args, **kwargs)
        finally:
            self.in_node = ""
            if mode_on_top:
                self.mode.__enter__()

    def _finish(
        self,
        key: Any,
        name: str,
        structure: Structure,
        inputs: list[Any] | None,
        results: list[Any] | None,
        leaves: list[Any],
        values: list[Value | None],
        arrived: list[Value | None],
        owner: int,
    ) -> Any:
        """Step 4, on every rank: new values, the tape's node, in-place changes, the nested result."""
        outputs: list[Value] = []
        real: list[torch.Tensor] = []
        renewed: dict[int, Value] = {}
        for i, info in zip(structure.written, structure.written_info, strict=True):
            renewed[i] = self._renew(
                leaves[i], values[i], arrived[i], info, None if inputs is None else inputs[i], owner
            )
            if info.requires_grad and renewed[i].parameter is None:
                outputs.append(renewed[i])
                if inputs is not None:
                    real.append(inputs[i])
        given: list[Any] = []
        made: dict[int, Value] = {}
        for index, info in enumerate(structure.leaves):
            if isinstance(info, SameObject):
                given.append(leaves[info.input])
                continue
            if not isinstance(info, TensorInfo):
                given.append(info if results is None else results[index])
                continue
            if info.same_as is not None:
                given.append(leaves[info.same_as])  # the caller's own object, where it is
                continue
            tensor = None if results is None else results[index]
            value = self._new_value(info, tensor, owner, self._shared_storage(info, arrived, renewed, made))
            made[index] = value
            given.append(Placed(value))
            if info.requires_grad:
                outputs.append(value)
                if tensor is not None:
                    real.append(tensor)
        if outputs:
            gradient_inputs = [v for v in arrived if v is not None and v.requires_grad]
            parameters = [v.parameter for v in gradient_inputs if v.parameter is not None]
            parameters += self.engine.parameters_of(key) if inputs is not None else []
            self._record(CallNode(name, gradient_inputs, outputs, None if inputs is None else real, parameters))
        self.engine.moves.progress()
        return unflatten(structure.spec, given)

    def _new_value(self, info: TensorInfo, tensor: torch.Tensor | None, owner: int, storage: Storage | None) -> Value:
        local = None
        if tensor is not None:
            local = tensor.detach()
            if info.requires_grad:
                local.requires_grad_()
        return Value(owner, self, info.shape, info.stride, info.dtype, info.requires_grad, local, storage)

    def _renew(
        self, leaf: Any, value: Value | None, arrived: Value | None, info: TensorInfo, written: Any, owner: int
    ) -> Value:
        """The value of an input after it was changed in place."""
        if value is None:
            return self._adopt(leaf, info, owner)
        assert arrived is not None
        if tuple(info.shape) != value.shape:
            raise StepError(f"{user_line()} changes the shape of a tensor in place, which cannot work across stages.")
        if value.parameter is not None:
            if arrived is not value:
                raise StepError(
                    f"{user_line()} changes a parameter or buffer of stage {value.owner} in place on stage {owner}. "
                    "Do it in a module of its own stage."
                )
            return value
        for storage in {value.storage, arrived.storage}:
            storage.version += 1
            storage.writer = user_line()
        new = self._new_value(info, written, owner, arrived.storage)
        if type(leaf) is Placed:
            leaf.value = new
        else:
            self._known[id(leaf)] = (leaf, new)
        return new

    def _adopt(self, leaf: torch.Tensor, info: TensorInfo, owner: int) -> Value:
        """A plain tensor that a placed value was written into: from now on it lives where it was written."""
        local = leaf if owner == self.rank else None
        if self.engine.adopt_buffer(leaf, owner):
            value = Value(owner, self, info.shape, info.stride, info.dtype, False, local)
            value.parameter = leaf
        else:
            value = self._new_value(info, local, owner, None)
        self._known[id(leaf)] = (leaf, value)
        return value

    @staticmethod
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

    def _record(self, node: Node) -> None:
        if self.num_backwards:
            self.called_after_backward = True
        self.step.reach.add(node)
        self.tape.add(node)

    def _unstable(self, name: str) -> StepError:
        return StepError(
            f"'{name}' gave a result of another structure than before for arguments of the same shapes: the shape, "
            "dtype or gradient of what it returns depends on data. Let the module return tensors of a fixed shape, "
            "or place the code that produces and uses the varying tensor on one stage (smp.set_partition)."
        )

    @staticmethod
    def _hidden(name: str, spec: Spec, leaves: list[Any], index: int) -> StepError:
        args, kwargs = unflatten(spec, list(range(len(leaves))))
        named = {**{str(position): arg for position, arg in enumerate(args)}, **kwargs}
        argument = next(label for label, arg in named.items() if index in flatten(arg)[0])
        return StepError(
            f"argument '{argument}' of '{name}' at {user_line()} is a {type(leaves[index]).__qualname__} that holds a "
            "tensor of another call in an attribute; such a tensor cannot be moved between stages. Pass tensors "
            "themselves, or in a list, tuple, dict, mapping or dataclass."
        )

    def _replay_draws(self, function: Any, leaves: list[Any], spec: Spec, arrived: list[Value | None]) -> None:
        """Take the same random numbers from the glue stream as the owner's call does.

        The operands are ones, which are weights and probabilities; their strides decide how generators fill a tensor.
        """
        dummies = [
            x if v is None else torch.empty_strided(v.shape, v.stride, dtype=v.dtype, device=self.device).fill_(1)
            for x, v in zip(leaves, arrived, strict=True)
        ]
        args, kwargs = unflatten(spec, dummies)
        with torch.no_grad():
            self.on_plain_tensors("replay", function, args, kwargs)

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

    def _receive_structure(self, owner: int, name: str) -> Structure:
        structure: Structure = self.step.receive_object(owner, self._tag(), f"the result's structure of '{name}'")
        return structure

    def move(self, value: Value, stage: int, reader: str = "") -> Value:
        """The value on `stage`: itself, or its one copy there."""
        if value.owner == stage:
            return value
        copy = value.copies.get(stage)
        if copy is None or copy.version != copy.storage.version:
            tag = self._tag()
            local = None
            if self.rank == value.owner:
                assert value.local is not None
                self.step.send(value.local.detach(), stage, tag)
            elif self.rank == stage:
                local = self.step.receive(value.shape, value.dtype, value.owner, tag, f"an input of '{reader}'")
                local.requires_grad_(value.requires_grad)
            copy = Value(
                stage, self, value.shape, _contiguous_stride(value.shape), value.dtype, value.requires_grad, local
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
            self.step.pause(self)
        self.on_plain_tensors("backward", self.tape.backward, (seeds, self._send_gradient, self._receive_gradient), {})
        self.step.streams.leave(seed)

    def _seed(self, value: Value, gradient: Any, scale: float) -> torch.Tensor | None:
        if type(gradient) is Placed:
            gradient = self.move(self._value_of(gradient), value.owner, "backward").local  # type: ignore[arg-type]
        if self.rank != value.owner:
            return None
        if gradient is None:
            return torch.full(value.shape, scale, dtype=value.dtype, device=self.device)
        return gradient.detach() * scale

    def _send_gradient(self, node: MoveNode, gradient: torch.Tensor | None) -> None:
        self.step.send_gradient(gradient, node.source.owner, node.tag + 1)

    def _receive_gradient(self, node: MoveNode) -> torch.Tensor | None:
        return self.step.receive_gradient(node.source.shape, node.source.dtype, node.copy.owner, node.tag + 1)


def _as_input(value: Value, shielded: bool) -> torch.Tensor:
    """The tensor a call is given. Behind an identity where the call may write to it: a leaf could not be written to."""
    assert value.local is not None
    if value.parameter is not None:
        return value.local
    if not shielded or not torch.is_grad_enabled() or not value.requires_grad:
        return value.local if not value.requires_grad or torch.is_grad_enabled() else value.local.detach()
    return _Identity.apply(value.local)


class _Identity(torch.autograd.Function):
    """Shares memory and version counter with its input; neither a leaf nor a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # no gradient is not a gradient of zero
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def hides_placed(leaf: Any) -> bool:
    """Whether an object that is no container holds a placed tensor in an attribute."""
    attributes = getattr(leaf, "__dict__", None)
    if not attributes or isinstance(leaf, torch.Tensor | nn.Module | type):
        return False
    return any(type(x) is Placed for x in attributes.values())


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, count = [], 1
    for length in reversed(shape):
        stride.append(count)
        count *= max(length, 1)
    return tuple(reversed(stride))
