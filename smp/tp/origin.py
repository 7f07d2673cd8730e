"""Origins: where the values of a tensor in the running model lie in the tensors of the user's module.

A replaced module has other names than the user's, tensors that were fused, turned or reordered, and a part of each:

    user's module              twin, whole              tp_rank 0 of 2        its Origin
    q.weight  [4, 4]  --+                                +--------+           q.weight rows 0 1  at row 0
    k.weight  [4, 4]  --+-->   qkv.weight [12, 4] -->    |        |   ---->   k.weight rows 0 1  at row 2
    v.weight  [4, 4]  --+                                +--------+           v.weight rows 0 1  at row 4
              ^                                                               |
              +------------------------ canonical names, which no degree changes

So what was stored on some degrees is found again on any other: stored blocks and wanted blocks meet in the tensors of
the user's module. Pure values; recorded by `convert`, needed by checkpoints.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from smp.tp.shard import ShardSpec, spec_of

_ORIGIN = "_smp_origin"
_NAMES = "_smp_canonical_names"
_SOURCES = "_smp_sources"
Names = Mapping[int, tuple[str, ...]]  # by id of a parameter its names in the user's module


@dataclass(frozen=True)
class Block:
    """A box of a source tensor that lies in a local tensor.

    Attributes:
        source: its name in the user's module as it was given to DistributedModel: its canonical name. Of a tensor with
            several names (tied weights) the first one.
        start: where the box begins in the source tensor, a number for each of its dimensions.
        size: its lengths there.
        at: where the box begins in the local tensor, a number for each dimension of that.
        transposed: whether the last two dimensions of source and local tensor are swapped.
    """

    source: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    at: tuple[int, ...]
    transposed: bool = False

    @property
    def local_size(self) -> tuple[int, ...]:
        """Lengths of the box in the local tensor."""
        return _swapped(self.size) if self.transposed else self.size

    def in_source(self, source: Tensor) -> Tensor:
        """The box in the source tensor, a view as it lies in the local one."""
        box = source[tuple(slice(start, start + size) for start, size in zip(self.start, self.size))]
        return box.transpose(-1, -2) if self.transposed else box

    def in_local(self, local: Tensor) -> Tensor:
        """The box in the local tensor, a view."""
        return local[tuple(slice(at, at + size) for at, size in zip(self.at, self.local_size))]

    def narrowed(self, dim: int, start: int, stop: int, to: int) -> "Block | None":
        """What of it lies in `start` to `stop` along a dimension of the local tensor, when those places move to begin
        at `to`; None: nothing."""
        first = max(self.at[dim], start)
        length = min(self.at[dim] + self.local_size[dim], stop) - first
        if length <= 0:
            return None
        swapped = self.transposed and dim >= len(self.size) - 2
        there = 2 * len(self.size) - 3 - dim if swapped else dim
        return replace(
            self,
            start=_with(self.start, there, self.start[there] + first - self.at[dim]),
            size=_with(self.size, there, length),
            at=_with(self.at, dim, to + first - start),
        )


@dataclass(frozen=True)
class Origin:
    """Where the values of a local tensor come from.

    Attributes:
        blocks: together they cover the local tensor, but for padding; none overlaps another.
        shapes: whole shape of each source.
    """

    blocks: tuple[Block, ...]
    shapes: Mapping[str, tuple[int, ...]]

    @staticmethod
    def whole(source: str, shape: tuple[int, ...]) -> "Origin":
        """Of a tensor that is one of the user's module, unchanged."""
        zeros = (0,) * len(shape)
        return Origin((Block(source, zeros, tuple(shape), zeros),), {source: tuple(shape)})

    def part(self, spec: ShardSpec) -> "Origin":
        """Of one part of the tensor whose origin this is."""
        blocks: list[Block] = []
        offset = 0
        for start, stop in spec.ranges:
            narrowed = (block.narrowed(spec.dim, start, stop, offset) for block in self.blocks)
            blocks.extend(block for block in narrowed if block is not None)
            offset += stop - start
        return Origin(tuple(blocks), self.shapes)


def _swapped(values: tuple[int, ...]) -> tuple[int, ...]:
    return (*values[:-2], values[-1], values[-2])


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def names_of(module: nn.Module) -> Names:
    """By id of each parameter its names, the canonical one first, in a module that nothing was replaced in yet."""
    names: dict[int, tuple[str, ...]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names[id(param)] = (*names.get(id(param), ()), name)
    return names


def remember(param: nn.Parameter, origin: Origin) -> None:
    """Leaves on a Parameter object where its values, before they were cut into parts, come from."""
    setattr(param, _ORIGIN, origin)


def remember_names(module: nn.Module, names: Names) -> None:
    """Does so for the parameters of a model that have other names in it now than in the user's module."""
    for name, param in module.named_parameters():
        known = names.get(id(param), (name,))
        if len(known) > 1:
            setattr(param, _NAMES, known)
        if known[0] != name and not hasattr(param, _ORIGIN):
            remember(param, Origin.whole(known[0], _whole_shape(param)))


def _whole_shape(tensor: Tensor) -> tuple[int, ...]:
    spec = spec_of(tensor)
    return tuple(spec.global_shape if spec is not None else tensor.shape)


def whole_origin(name: str, tensor: Tensor) -> Origin:
    """Of a parameter or buffer before it was cut into parts; `name` is its first name in the model."""
    known: Origin | None = getattr(tensor, _ORIGIN, None)
    return known if known is not None else Origin.whole(name, _whole_shape(tensor))


def boxes_by_source(param: Tensor) -> tuple[tuple[Block, ...], ...]:
    """Where, in this rank's part of a parameter that was put together from several of the user's, the values of each of
    these lie: in an order that all ranks share, nowhere for some on some ranks. Empty for any other parameter.
    """
    whole: Origin | None = getattr(param, _ORIGIN, None)
    if whole is None or len(whole.shapes) == 1:
        return ()
    known, boxes = getattr(param, _SOURCES, (None, ()))
    if known is not whole:
        blocks = origin_of("", param).blocks
        boxes = tuple(tuple(block for block in blocks if block.source == source) for source in whole.shapes)
        setattr(param, _SOURCES, (whole, boxes))  # optimizers ask in every step
    return boxes


def origin_of(name: str, tensor: Tensor) -> Origin:
    """Of this rank's part of a parameter or buffer; `name` is its first name in the model."""
    spec = spec_of(tensor)
    whole = whole_origin(name, tensor)
    return whole.part(spec) if spec is not None else whole


def origins(module: nn.Module, whole: bool = False) -> dict[str, Origin]:
    """Of every parameter and persistent buffer of a model, after `convert`, by its name there.

    Names that stand for one tensor have one origin. What lives on another stage has the shape it has there.

    Args:
        whole: of whole tensors, as in a full state dict, instead of this rank's parts.
    """
    result: dict[str, Origin] = {}
    for names, tensor in _tensors(module):
        origin = whole_origin(names[0], tensor) if whole else origin_of(names[0], tensor)
        result.update(dict.fromkeys(names, origin))
    return result


def source_shapes(found: Iterable[Origin]) -> dict[str, tuple[int, ...]]:
    """Whole shapes of the user's tensors that some origins are of, by canonical name."""
    return {source: shape for origin in found for source, shape in origin.shapes.items()}


def tied_names(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names in the user's module that stand for one tensor, the canonical one first; for each such tensor."""
    names = (getattr(tensor, _NAMES, names) for names, tensor in _tensors(module))
    return tuple(known for known in names if len(known) > 1)


def is_extra(name: str, value: Any) -> bool:
    """Whether an entry of a state dict is what a module's `get_extra_state` gave: a value, also when it is a tensor."""
    return not isinstance(value, Tensor) or name.rpartition(".")[2] == "_extra_state"


def extra_names(module: nn.Module) -> list[str]:
    """Names of the extra state in a module's state dict."""
    return [name for name, value in module.state_dict(keep_vars=True).items() if is_extra(name, value)]


def _tensors(module: nn.Module) -> list[tuple[tuple[str, ...], Tensor]]:
    """The tensors in a model's state dict, with all names of each."""
    found: dict[int, tuple[tuple[str, ...], Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not is_extra(name, tensor):
            names, _ = found.get(id(tensor), ((), tensor))
            found[id(tensor)] = (*names, name), tensor
    return list(found.values())
