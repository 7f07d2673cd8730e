"""Torch process groups for the grid of ranks, made once per tuple of ranks."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from smp.topology import CommGroup, Topology

# Process groups by their world ranks. They outlive a Runtime: making one is collective and costs milliseconds.
_cache: dict[tuple[int, ...], dist.ProcessGroup] = {}
_extra: dict[tuple[int, ...], dist.ProcessGroup] = {}  # those of `group_of`, on members and all others


@dataclass(frozen=True)
class Group:
    """The group of one kind that this rank is in.

    Attributes:
        kind: which kind.
        ranks: world ranks, ascending.
        rank: this rank's index in `ranks`.
        process_group: the torch process group of these ranks.
    """

    kind: CommGroup
    ranks: tuple[int, ...]
    rank: int
    process_group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


def make_groups(topology: Topology, rank: int, timeout: timedelta) -> dict[CommGroup, Group]:
    """This rank's group of every kind. Collective over the world; every rank makes all groups in the same order."""
    _even_out(rank, topology.world_size)
    for kind in CommGroup:
        for ranks in topology.groups(kind):
            if ranks not in _cache:
                _make(ranks, rank, topology.world_size, timeout)
    groups = {}
    for kind in CommGroup:
        mine = topology.group(kind, rank)
        groups[kind] = Group(kind, mine, topology.rank_in(kind, rank), _cache[mine])
    return groups


def _even_out(rank: int, world_size: int) -> None:
    """Puts every rank into as many groups as the others: torch names a group that only its members make after that
    number, and where names differ they wait for each other forever. A script's own groups, and `group_of`'s, are of
    some ranks only.
    """
    counts: list[Any] = [None] * world_size
    dist.all_gather_object(counts, len(dist.distributed_c10d._world.pg_names))
    for _ in range(max(counts) - counts[rank]):
        dist.new_group([rank], backend="gloo", use_local_synchronization=True)


def _make(ranks: tuple[int, ...], rank: int, world_size: int, timeout: timedelta) -> None:
    if len(ranks) == world_size and dist.group.WORLD is not None:
        _cache[ranks] = dist.group.WORLD
        return
    # With local synchronization only members take part, so that groups of one, of which there are many, cost nothing.
    if rank in ranks:
        group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        assert group is not None
        _cache[ranks] = group


def group_of(
    topology: Topology, ranks: tuple[int, ...], kind: CommGroup, rank: int, timeout: timedelta
) -> Group | None:
    """A group of any `ranks`, ascending. Collective over the world: every rank makes the same calls in the same order,
    also those that are no members, which get None.
    """
    is_member = rank in ranks
    if ranks not in _extra and not any(ranks in topology.groups(known) for known in CommGroup):
        made = dist.new_group(list(ranks), timeout=timeout)
        assert made is not None
        _extra[ranks] = made
    if not is_member:
        return None
    return Group(kind, ranks, ranks.index(rank), _extra.get(ranks) or _cache[ranks])
