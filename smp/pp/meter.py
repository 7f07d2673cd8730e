"""What each operation of a fake run costs, and which module is charged for it.

A module with parameters of its own and no module with parameters inside is a leaf. What a leaf's call does is charged
to the leaf. What the code around leaves does (residual additions, activations, the loss) is done on the stage where its
operands live, so it is charged to the leaf that ran last, or to the owner of the parameter that it reads.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves, tree_leaves
from torch.utils.flop_counter import flop_registry

from smp.pp.cost import ModuleCost, nominal_bytes_seconds, nominal_seconds, parameter_bytes
from smp.pp.tree import ancestors, has_parameters

_aten = torch.ops.aten

# A weight's gradient is written once, then read and added to the sum of earlier microbatches.
_ACCUMULATION = 3
# An attention kernel recomputes the scores in its backward: five products where the forward has two.
_ATTENTION_BACKWARD = 2.5
_GATHERS = frozenset([_aten.embedding, _aten.index_select, _aten.gather, _aten.index, _aten.nll_loss_forward])
_FREE = frozenset([_aten._unsafe_view.default, _aten.detach.default, _aten.lift_fresh.default])
_CASTS = frozenset([_aten._to_copy, _aten.clone, _aten.contiguous])


def _attention_flops(query: Any, key: Any, value: Any, *args: Any) -> int:
    """Two products of every query with every key: 2 N H S_q S_k (d + d_v), H heads of the queries. A causal mask skips
    nothing here. Shapes: query [N, H, S_q, d], key [N, ., S_k, d], value [N, ., S_k, d_v]."""
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])


def _recurrent_flops(inputs: Any, w_input: Any, w_hidden: Any, *args: Any) -> int:
    """A product with both matrices for each step and sample. Shapes: inputs [steps, samples, features]."""
    return 2 * math.prod(inputs[:2]) * (math.prod(w_input) + math.prod(w_hidden))


_RECURRENT = _aten.mkldnn_rnn_layer
# What torch counts nothing for: attention and LSTM layers on the CPU.
_FORMULAS = {_aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops, _RECURRENT: _recurrent_flops}


def _flops(packet: Any, args: Any, kwargs: Any, out: Any) -> int:
    if packet in _FORMULAS:
        return _FORMULAS[packet](*(tuple(x.shape) if isinstance(x, Tensor) else x for x in args))
    if packet not in flop_registry:
        return 0
    try:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    except (AssertionError, IndexError, TypeError, ValueError):  # a call that torch's formula does not know
        return 0


@dataclass(slots=True)
class _Sum:
    """A `ModuleCost` in the making."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    activation_bytes: int = 0
    output_bytes: int = 0
    flops: int = 0
    calls: int = 0

    def frozen(self, nbytes: int) -> ModuleCost:
        return ModuleCost(
            self.forward,
            self.backward,
            self.weight,
            nbytes,
            self.activation_bytes,
            self.output_bytes,
            self.flops,
            self.calls,
        )


@dataclass(slots=True)
class _Modules:
    """What does not change while the model runs."""

    with_parameters: frozenset[str]
    leaves: frozenset[str]
    sizes: dict[str, int]  # bytes of the parameters, inclusive
    own_sizes: dict[str, int]  # of a module's own ones, each parameter counted at its first module
    owners: dict[int, str]  # key of a parameter's memory -> name of the first module that has it


@dataclass(slots=True)
class Ledger:
    """Who is running, and what everybody has spent."""

    modules: _Modules
    device: str
    recomputed: Callable[[str], bool]
    order: dict[str, None] = field(default_factory=dict)
    own: dict[str, _Sum] = field(default_factory=dict)
    charged: dict[str, _Sum] = field(default_factory=dict)
    near: dict[str, str] = field(default_factory=dict)
    reads: set[tuple[str, str]] = field(default_factory=set)  # code of a module read a parameter of another one
    opaque: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)
    saved: dict[int, Tensor] = field(default_factory=dict)  # held, or another tensor would get the same key
    last: str | None = None
    recomputing: int = 0
    _pending: _Sum = field(default_factory=_Sum)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def enter(self, name: str, inputs: Any) -> None:
        self.order.setdefault(name)
        self.stack.append(name)
        if name in self.modules.leaves:
            self._arrive(name)
        if self.recomputed(name):
            self._begin_recomputed(inputs)

    def leave(self, name: str, output: Any, depth: int) -> None:
        """`depth` is the length of the stack before the call was entered."""
        if self.recomputed(name):
            self.recomputing -= 1
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        entry = self.own.setdefault(name, _Sum())
        entry.calls += 1
        entry.output_bytes += sum(map(nbytes, tensors))
        self.shapes.setdefault(name, tuple(tuple(t.shape) for t in tensors))
        del self.stack[depth:]

    def _begin_recomputed(self, inputs: Any) -> None:
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, Tensor):
                self.save(leaf)
        self.recomputing += 1

    def checkpoint(self, run: Callable[[], Any], inputs: Any) -> Any:
        """A call of torch.utils.checkpoint: what `run` does is done again in the backward."""
        self._begin_recomputed(inputs)
        try:
            return run()
        finally:
            self.recomputing -= 1

    def _arrive(self, leaf: str) -> None:
        self.last = leaf
        if self._pending.forward or self._pending.activation_bytes:
            self._add(self.charged.setdefault(leaf, _Sum()), self._pending)
            self._pending = _Sum()

    @property
    def here(self) -> str:
        """The innermost running module with parameters: those without belong to their parent."""
        return next((name for name in reversed(self.stack) if name in self.modules.with_parameters), "")

    # -- costs ---------------------------------------------------------------------------------------------------------

    def reads_parameter(self, owner: str) -> None:
        """Running code uses a parameter of `owner` itself, not through a call of `owner`."""
        here = self.here
        if here in self.modules.leaves:
            return
        if owner != here:
            self.reads.add((here, owner))
            self._arrive(owner)
        elif self.last is not None and any(above == owner for above in ancestors(self.last)):
            self.near.setdefault(owner, self.last)

    def spend(self, cost: _Sum) -> None:
        """Adds what an operation costs."""
        if self.recomputing:
            cost.backward += cost.forward
        here = self.here
        self._add(self.own.setdefault(here, _Sum()), cost)
        target = here if here in self.modules.leaves else self.last
        self._add(self.charged.setdefault(target, _Sum()) if target is not None else self._pending, cost)

    def save(self, tensor: Tensor) -> Tensor:
        """The backward will need this tensor. Memory that is kept already, and parameters, cost nothing more."""
        key = storage_key(tensor)
        if not self.recomputing and key not in self.saved and key not in self.modules.owners:
            self.saved[key] = tensor
            self.spend(_Sum(activation_bytes=tensor.untyped_storage().nbytes()))
        return tensor

    def cannot_see(self, name: str, reason: str) -> None:
        """A module could not be looked into."""
        self.opaque.setdefault(name, reason)

    @staticmethod
    def _add(to: _Sum, cost: _Sum) -> None:
        to.forward += cost.forward
        to.backward += cost.backward
        to.weight += cost.weight
        to.activation_bytes += cost.activation_bytes
        to.flops += cost.flops

    def finish(self, output: Any) -> None:
        """The model has returned. A loss is computed from its output outside, where no trace can look."""
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if tensors and all(t.numel() > 1 for t in tensors):
            size = sum(map(nbytes, tensors))
            passes = nominal_bytes_seconds(3 * size, self.device)
            self.spend(_Sum(forward=passes, backward=passes, activation_bytes=size))
        if self.last is not None:
            self._arrive(self.last)
        self.saved.clear()

    def frozen(self) -> tuple[dict[str, ModuleCost], dict[str, ModuleCost]]:
        """`own` and `charged` of `Costs`."""
        sizes = self.modules.own_sizes
        tables = []
        for table in (self.own, self.charged):
            names = dict.fromkeys([*table, *(name for name, size in sizes.items() if size)])
            tables.append({name: table.get(name, _Sum()).frozen(sizes.get(name, 0)) for name in names})
        return tables[0], tables[1]


def survey(root: nn.Module) -> _Modules:
    """The modules of a tree as the ledger needs them. Every module and parameter counts under its first name."""
    own: dict[str, int] = {}
    owners: dict[int, str] = {}
    with_parameters, leaves = set(), set()
    sizes = {}
    for name, module in root.named_modules():
        fresh = [p for p in module._parameters.values() if p is not None and storage_key(p) not in owners]
        own[name] = parameter_bytes(fresh)
        owners.update({storage_key(p): name for p in fresh})
        if has_parameters(module):
            with_parameters.add(name)
            sizes[name] = parameter_bytes(module.parameters())
            if not any(has_parameters(child) for child in module.children()):
                leaves.add(name)
    return _Modules(frozenset(with_parameters), frozenset(leaves), sizes, own, owners)


class Meter(TorchDispatchMode):
    """Lets operations on fake tensors run and enters what they would cost.

    What depends on data is assumed: a branch on a tensor's value is taken as if it were true, a number read from a
    tensor is 1, and half of a mask's elements are true.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self._derived: dict[int, tuple[str, Tensor]] = {}  # casts of parameters; held, or their keys could come again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].dtype.is_floating_point else 1)
        try:
            out = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            out = self._assume(func, args, kwargs)
        if func.namespace != "prim" and func not in _FREE:
            self._enter_cost(func, args, kwargs, out)
        return out

    def _enter_cost(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        inputs = [x for x in arg_tree_leaves(*args, **kwargs) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if not outputs or self._is_view(func, inputs, outputs):
            return
        packet = func._overloadpacket
        flops = _flops(packet, args, kwargs, out)
        written = sum(map(nbytes, outputs))
        read = written if packet in _GATHERS else sum(map(nbytes, inputs))
        dtype = next((t.dtype for t in inputs if t.is_floating_point()), torch.float32)
        cost = _Sum(forward=nominal_seconds(flops, read + written, dtype, self.ledger.device), flops=flops)
        owners = {id(t): self._owner(t) for t in inputs}
        for owner in owners.values():
            if owner is not None:
                self.ledger.reads_parameter(owner)
        if torch.is_grad_enabled() and any(t.is_floating_point() or t.is_complex() for t in outputs):
            self._enter_backward(packet, inputs, outputs, owners, cost)
        self.ledger.spend(cost)

    def _is_view(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
        if func._schema.is_mutable:
            return False
        known = {storage_key(t) for t in inputs}
        return all(storage_key(t) in known for t in outputs)

    def _enter_backward(
        self, packet: Any, inputs: list[Tensor], outputs: list[Tensor], owners: Mapping[int, str | None], cost: _Sum
    ) -> None:
        """A product costs as much again for each operand that needs a gradient, any other operation twice as much."""
        needing = [t for t in inputs if t.requires_grad]
        if not needing:
            return
        weights = [t for t in needing if owners[id(t)] is not None]
        if weights and len(weights) == len(needing) and packet in _CASTS:  # the same weights in another precision
            for t in outputs:
                self._derived[storage_key(t)] = (owners[id(weights[0])] or "", t)
        accumulation = nominal_bytes_seconds(_ACCUMULATION * sum(map(nbytes, weights)), self.ledger.device)
        if packet in _GATHERS and weights:  # a gradient of the whole table, zero but for a few rows
            cost.weight = cost.forward + nominal_bytes_seconds(sum(map(nbytes, weights)), self.ledger.device)
        elif cost.flops and "attention" in str(packet):
            cost.backward = _ATTENTION_BACKWARD * cost.forward
        elif packet is _RECURRENT:
            cost.weight = cost.forward if weights else 0.0
            cost.backward = cost.forward
        elif cost.flops:
            cost.weight = cost.forward * sum(t.dim() > 1 for t in weights)
            cost.backward = cost.forward * sum(t.dim() > 1 for t in needing if owners[id(t)] is None)
        elif len(weights) == len(needing):
            cost.weight = cost.forward
        else:
            cost.backward = 2 * cost.forward
        cost.weight += accumulation
        cost.backward += cost.weight

    def _owner(self, tensor: Tensor) -> str | None:
        key = storage_key(tensor)
        owner = self.ledger.modules.owners.get(key)
        return owner if owner is not None or key not in self._derived else self._derived[key][0]

    # -- shapes that depend on data ------------------------------------------------------------------------------------

    def _assume(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation whose shape depends on data, in an assumed size."""
        ledger = self.ledger
        here = ledger.here
        if here not in ledger.modules.leaves and 2 * ledger.modules.sizes.get(here, 0) <= ledger.modules.sizes[""]:
            ledger.cannot_see(here, f"the shape of {func._overloadpacket.__name__} depends on data")
        packet = func._overloadpacket
        if packet is _aten.nonzero:
            return _positions(args[0]).new_empty((_half(args[0]), args[0].dim()), dtype=torch.int64)
        if packet is _aten.masked_select:
            return args[0].new_empty((_half(args[1]),))
        if packet in (_aten.index, _aten.index_put, _aten.index_put_):
            return func(args[0], _without_masks(args[1]), *args[2:], **kwargs)
        if packet is _aten.repeat_interleave:
            return args[0].new_empty(args[0].shape)
        raise RuntimeError(f"the shape of the result of {func} depends on data")


def _half(mask: Tensor) -> int:
    return (mask.numel() + 1) // 2


def _positions(mask: Tensor) -> Tensor:
    return mask.new_empty((_half(mask),), dtype=torch.int64)


def _without_masks(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Boolean masks replaced by as many index tensors as they have dimensions."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += [_positions(index) for _ in range(index.dim())]
        else:
            found.append(index)
    return found


def nbytes(tensor: Tensor) -> int:
    """Size of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()


def storage_key(tensor: Tensor) -> int:
    """Identifies a tensor's memory as long as the tensor lives."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse tensors and wrappers have none
        return id(tensor)
