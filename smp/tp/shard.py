"""ShardSpec: the one description of a parameter that is split over the tensor-parallel group. Pure arithmetic.

whole tensor, global_shape (12, 8), dim 0            sections (4, 4, 4), num_parts 2

one section                three sections            part 0: rows 0 1  4 5  8 9
+--------+ part 0          +--------+ q  part 0      part 1: rows 2 3  6 7  10 11
|        |                 |        |    part 1
|        | part 1          +--------+ k  part 0      A fused query/key/value weight is cut per section, so that
+--------+                 |        |    part 1      every part holds whole heads of all three.
                           +--------+ v  ...
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ShardSpec:
    """Which part of a whole tensor this rank holds.

    Args:
        global_shape: shape of the whole tensor.
        dim: dimension along which it is cut.
        part: index of this part, the tp_rank.
        num_parts: number of parts, the size of the tensor-parallel group.
        sections: lengths along `dim` of consecutive pieces, each of which is cut into `num_parts` by itself; empty:
            one section, a contiguous cut.
        padded: whether the last parts are filled up with zeros where the length does not divide, so that all parts have
            one shape: a vocabulary of 101 over two ranks is 51 rows, and 50 with one of zeros. The whole tensor has no
            such rows. With one section only.

    Raises:
        ValueError: the sections do not add up to the dimension, or one does not divide by `num_parts`.
    """

    global_shape: tuple[int, ...]
    dim: int
    part: int
    num_parts: int
    sections: tuple[int, ...] = ()
    padded: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", tuple(self.global_shape))
        if not -len(self.global_shape) <= self.dim < len(self.global_shape):
            raise ValueError(f"dim {self.dim} does not exist in a tensor of shape {self.global_shape}")
        object.__setattr__(self, "dim", self.dim % len(self.global_shape))
        if not 0 <= self.part < self.num_parts:
            raise ValueError(f"part {self.part} is not in 0..{self.num_parts - 1}")
        length = self.global_shape[self.dim]
        sections = tuple(self.sections) or (length,)
        object.__setattr__(self, "sections", sections)
        if sum(sections) != length:
            raise ValueError(f"sections {sections} add up to {sum(sections)}, but dimension {self.dim} has {length}")
        uneven = [size for size in sections if size % self.num_parts]
        if uneven and not (self.padded and len(sections) == 1):
            raise ValueError(f"{uneven[0]} does not divide by {self.num_parts} (dimension {self.dim} of {self})")

    def __str__(self) -> str:
        return f"part {self.part} of {self.num_parts} of a tensor of shape {self.global_shape} cut along {self.dim}"

    @property
    def cut(self) -> str:
        """How it is cut: `contiguous` or `sections`."""
        return "contiguous" if len(self.sections) == 1 else "sections"

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of one part; all parts have the same."""
        shape = list(self.global_shape)
        shape[self.dim] = -(-shape[self.dim] // self.num_parts)
        return tuple(shape)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Start and stop along `dim` of what this part holds of the whole tensor, in the order in which it holds it."""
        starts = accumulate(self.sections, initial=0)
        lengths = [-(-size // self.num_parts) for size in self.sections]
        return tuple(
            (start + min(self.part * length, size), start + min((self.part + 1) * length, size))
            for start, size, length in zip(starts, self.sections, lengths)
        )

    def of_part(self, part: int) -> "ShardSpec":
        """The same cut, seen from another part."""
        return replace(self, part=part)

    def split(self, whole: Tensor) -> Tensor:
        """This part of `whole` [global_shape] -> [local_shape], in memory of its own.

        Raises:
            ValueError: `whole` has another shape.
        """
        if tuple(whole.shape) != self.global_shape:
            raise ValueError(f"expected a whole tensor of shape {self.global_shape}, got {tuple(whole.shape)}")
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        if len(pieces) > 1:
            return torch.cat(pieces, self.dim)
        missing = self.local_shape[self.dim] - pieces[0].shape[self.dim]
        if missing:
            return F.pad(pieces[0], [0, 0] * (whole.dim() - 1 - self.dim) + [0, missing])
        return pieces[0].clone(memory_format=torch.contiguous_format)

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """All parts, `num_parts` times [local_shape] in order of part -> the whole tensor [global_shape].

        Raises:
            ValueError: the number of parts, or the shape of one, is not what the cut says.
        """
        if len(parts) != self.num_parts:
            raise ValueError(f"expected {self.num_parts} parts, got {len(parts)}")
        for part, tensor in enumerate(parts):
            if tuple(tensor.shape) != self.local_shape:
                raise ValueError(f"expected parts of shape {self.local_shape}, part {part} has {tuple(tensor.shape)}")
        if len(self.sections) == 1:
            whole = torch.cat(list(parts), self.dim)
            length = self.global_shape[self.dim]
            return whole if whole.shape[self.dim] == length else whole.narrow(self.dim, 0, length).contiguous()
        lengths = [size // self.num_parts for size in self.sections]
        by_part = [tensor.split(lengths, self.dim) for tensor in parts]
        return torch.cat([piece for section in zip(*by_part) for piece in section], self.dim)

    def without_padding(self, part: Tensor) -> Tensor:
        """[local_shape] -> the places of it that are of the whole tensor, a view."""
        length = sum(stop - start for start, stop in self.ranges)
        return part if length == part.shape[self.dim] else part.narrow(self.dim, 0, length)


def spec_of(tensor: Tensor) -> ShardSpec | None:
    """The ShardSpec of a parameter; None when it is whole."""
    return getattr(tensor, "_smp_shard", None)
