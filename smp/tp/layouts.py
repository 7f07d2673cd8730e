"""Layouts: how tensors of another library's module become one tensor of its distributed twin, and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from smp.errors import UsageError
from smp.tp.origin import Block

Shapes = Sequence[tuple[int, ...]]


class Layout(Protocol):
    """How tensors of one or several names of theirs become one tensor of ours, and back. Views where possible."""

    def merge(self, theirs: Sequence[Tensor], config: Any) -> Tensor: ...

    def split(self, ours: Tensor, config: Any) -> Sequence[Tensor]: ...

    def blocks(self, names: Sequence[str], shapes: Shapes, config: Any) -> Sequence[Block]:
        """Where `merge` puts tensors of these shapes, which are called so."""
        ...


class _Same:
    def merge(self, theirs: Sequence[Tensor], config: Any) -> Tensor:
        return theirs[0]

    def split(self, ours: Tensor, config: Any) -> Sequence[Tensor]:
        return (ours,)

    def blocks(self, names: Sequence[str], shapes: Shapes, config: Any) -> Sequence[Block]:
        zeros = (0,) * len(shapes[0])
        return (Block(names[0], zeros, shapes[0], zeros),)


class _Transposed:
    """Theirs is [in, out], as in GPT-2."""

    def merge(self, theirs: Sequence[Tensor], config: Any) -> Tensor:
        return theirs[0].t()

    def split(self, ours: Tensor, config: Any) -> Sequence[Tensor]:
        return (ours.t(),)

    def blocks(self, names: Sequence[str], shapes: Shapes, config: Any) -> Sequence[Block]:
        return (Block(names[0], (0, 0), shapes[0], (0, 0), transposed=True),)


@dataclass(frozen=True)
class Fused:
    """Ours is theirs one below the other: query, key and value, each [rows, in] or [rows].

    Args:
        shares: how many rows each of theirs has, in parts of the whole.
    """

    shares: tuple[int, ...]

    def merge(self, theirs: Sequence[Tensor], config: Any) -> Tensor:
        return torch.cat(list(theirs))

    def split(self, ours: Tensor, config: Any) -> Sequence[Tensor]:
        unit = ours.shape[0] // sum(self.shares)
        return ours.split([unit * share for share in self.shares])

    def blocks(self, names: Sequence[str], shapes: Shapes, config: Any) -> Sequence[Block]:
        rows, blocks = 0, []
        for name, shape in zip(names, shapes):
            zeros = (0,) * len(shape)
            blocks.append(Block(name, zeros, shape, (rows, *zeros[1:])))
            rows += shape[0]
        return blocks


@dataclass(frozen=True)
class HeadMajor:
    """Theirs has one head after the other, [heads, pieces, head size, ..]; ours one piece after the other, [pieces,
    heads, head size, ..]."""

    pieces: int
    heads: str  # attribute of the configuration

    def merge(self, theirs: Sequence[Tensor], config: Any) -> Tensor:
        return self._swap(theirs[0], self._heads(config), self.pieces)

    def split(self, ours: Tensor, config: Any) -> Sequence[Tensor]:
        return (self._swap(ours, self.pieces, self._heads(config)),)

    def blocks(self, names: Sequence[str], shapes: Shapes, config: Any) -> Sequence[Block]:
        heads, (rows, *rest) = self._heads(config), shapes[0]
        size, zeros = rows // (heads * self.pieces), (0,) * len(rest)
        return [
            Block(names[0], ((h * self.pieces + p) * size, *zeros), (size, *rest), ((p * heads + h) * size, *zeros))
            for p in range(self.pieces)
            for h in range(heads)
        ]

    def _swap(self, tensor: Tensor, outer: int, inner: int) -> Tensor:
        blocks = tensor.reshape(outer, inner, tensor.shape[0] // (outer * inner), *tensor.shape[1:])
        return blocks.transpose(0, 1).reshape(tensor.shape)

    def _heads(self, config: Any) -> int:
        if config is None:
            raise UsageError(
                f"the rows of query, key and value lie head by head, so translating them takes {self.heads}: translate "
                "while the DistributedModel exists, or pass the model's configuration as config="
            )
        return int(getattr(config, self.heads))


SAME = _Same()
TRANSPOSED = _Transposed()
FUSED_QKV = Fused((1, 1, 1))
FUSED_KV = Fused((1, 1))
