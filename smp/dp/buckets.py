"""Which parameters share a flat bucket: pure arithmetic, no tensors, no processes.

A bucket holds gradients of one kind (reduction group, dtype, device), so that one collective of one type serves it.
Buckets are numbered in the order in which they are expected to become complete:

    order of completion      g9 g8 g7 g6 g5 g4 ...          (reverse execution order)
    buckets                  [g9 g8] [g7 g6 g5] [g4 ...     each closed before it would exceed the cap
    launched                       0          1             strictly by number, on every rank
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """One parameter as far as buckets care."""

    kind: Hashable  # parameters share a bucket only if their kinds are equal
    numel: int
    itemsize: int  # bytes of an element while it is reduced


@dataclass(frozen=True)
class Bucket:
    """Parameters `members` (indices into the list of parameters), laid out one after another from `offsets` on."""

    kind: Hashable
    members: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int


def assign(items: Sequence[Item], order: Sequence[int], cap: int, first_cap: int | None = None) -> tuple[Bucket, ...]:
    """Cuts the parameters named by `order` into buckets of at most `cap` bytes, one parameter at least in each.

    `order` lists indices into `items` by the time at which their gradients are complete; indices left out get no
    bucket. `first_cap` bounds the first bucket of each kind instead, so that the first reduction starts early.
    Buckets come back in the order in which their last member completes.
    """
    cuts: list[list[int]] = []
    open_cut: dict[Hashable, list[int]] = {}
    size: dict[Hashable, int] = {}
    limit: dict[Hashable, int] = {}
    for index in order:
        item = items[index]
        num_bytes = item.numel * item.itemsize
        members = open_cut.get(item.kind)
        if members is None or (size[item.kind] > 0 and size[item.kind] + num_bytes > limit[item.kind]):
            limit[item.kind] = min(cap, first_cap) if members is None and first_cap is not None else cap
            members = open_cut[item.kind] = []
            size[item.kind] = 0
            cuts.append(members)
        members.append(index)
        size[item.kind] += num_bytes
    place = {index: position for position, index in enumerate(order)}
    cuts.sort(key=lambda members: place[members[-1]])
    return tuple(_lay_out(items, members) for members in cuts)


def _lay_out(items: Sequence[Item], members: Sequence[int]) -> Bucket:
    offsets = [0]
    for index in members:
        offsets.append(offsets[-1] + items[index].numel)
    return Bucket(items[members[0]].kind, tuple(members), tuple(offsets[:-1]), offsets[-1])


def completion_order(finished: Sequence[int], num_items: int) -> list[int]:
    """All indices below `num_items`: those of `finished` as they come, then the others, last one first.

    An index that `finished` lacks never became complete before the end of the pass; behind all others it holds
    nobody up.
    """
    seen = set(finished)
    return [*finished, *(index for index in reversed(range(num_items)) if index not in seen)]
