"""Where the pieces of a wanted tensor lie in stored ones: arithmetic on boxes, no tensors, no files.

Stored and wanted tensors say which boxes of the user's tensors (the sources) they hold, and where: `Block`s. In the
coordinates of a source they meet:

    source "fc.weight" (8, 6)      stored, tp 2                    wanted, tp 4, part 1
    +------------+ row 0           file 0: rows 0..3
    |            |                 file 1: rows 4..7               rows 2..3  ->  copy rows 2..3 of file 0
    +------------+ row 8

What an earlier stored block has given is not taken from a later one, so nothing is read twice.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from smp.tp.origin import Block

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A box of a tensor: first place and length along each dimension."""

    start: Shape
    size: Shape

    @property
    def empty(self) -> bool:
        """Whether it holds no place; a box without dimensions holds one."""
        return 0 in self.size

    @property
    def numel(self) -> int:
        """Number of places."""
        return math.prod(self.size)

    def overlap(self, other: "Box") -> "Box":
        """What both hold; an empty box when that is nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = map(min, _stop(self), _stop(other))
        return Box(start, tuple(max(0, end - begin) for begin, end in zip(start, stop)))

    def without(self, hole: "Box") -> list["Box"]:
        """What is left of this box when `hole`, which lies in it, is cut out: boxes that do not overlap."""
        left, start, size = [], list(self.start), list(self.size)
        for dim, (begin, length) in enumerate(zip(hole.start, hole.size)):
            before, after = begin - start[dim], start[dim] + size[dim] - begin - length
            if before:
                left.append(Box(tuple(start), (*size[:dim], before, *size[dim + 1 :])))
            if after:
                behind = (*start[:dim], begin + length, *start[dim + 1 :])
                left.append(Box(behind, (*size[:dim], after, *size[dim + 1 :])))
            start[dim], size[dim] = begin, length
        return left


def _stop(box: Box) -> Shape:
    return tuple(begin + length for begin, length in zip(box.start, box.size))


@dataclass(frozen=True)
class Copy:
    """One piece to be copied: `wanted[write] = stored[read]`, its last two dimensions swapped when `transposed`.

    `stored` is what the caller gave with the block: it says which tensor to read from.
    """

    stored: Any
    read: tuple[slice, ...]
    write: tuple[slice, ...]
    transposed: bool

    @property
    def numel(self) -> int:
        """Number of places."""
        return math.prod(part.stop - part.start for part in self.write)

    def apply(self, stored: Tensor, wanted: Tensor) -> int:
        """Copies the piece; returns the number of bytes read."""
        piece = stored[self.read]
        wanted[self.write].copy_(piece.transpose(-1, -2) if self.transposed else piece)
        return piece.numel() * piece.element_size()


def local_region(block: Block, box: Box) -> tuple[slice, ...]:
    """Where `box`, a part of the block in the source's coordinates, lies in the tensor that holds the block."""
    offset, size = [begin - first for begin, first in zip(box.start, block.start)], list(box.size)
    if block.transposed:
        offset[-1], offset[-2] = offset[-2], offset[-1]
        size[-1], size[-2] = size[-2], size[-1]
    return tuple(slice(at + skip, at + skip + length) for at, skip, length in zip(block.at, offset, size))


def plan_copies(
    wanted: Iterable[Block], stored_of: Callable[[str], Sequence[tuple[Block, Any]]]
) -> tuple[list[Copy], list[tuple[str, Box]]]:
    """How to fill the wanted blocks from stored ones, and which boxes of which sources no stored block has.

    `stored_of`: a source's name -> its stored blocks, each with what tells its tensor, the preferred ones first.
    """
    copies: list[Copy] = []
    missing: list[tuple[str, Box]] = []
    for block in wanted:
        left = [Box(block.start, block.size)]
        for stored, handle in stored_of(block.source):
            left = _take(block, stored, handle, left, copies)
            if not left:
                break
        missing.extend((block.source, box) for box in left if not box.empty)
    return copies, missing


def _take(wanted: Block, stored: Block, handle: Any, left: list[Box], copies: list[Copy]) -> list[Box]:
    """Copies what `stored` has of the boxes `left`; returns the boxes that are still to be found."""
    rest: list[Box] = []
    for box in left:
        common = box.overlap(Box(stored.start, stored.size))
        if common.empty:
            rest.append(box)
            continue
        read, write = local_region(stored, common), local_region(wanted, common)
        copies.append(Copy(handle, read, write, stored.transposed != wanted.transposed))
        rest.extend(box.without(common))
    return rest
