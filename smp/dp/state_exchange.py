"""Optimizer state from the ranks that have it to those that need it, one parameter at a time."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from smp.comm.transport import Channel, group_tag
from smp.groups import Group
from smp.runtime import Runtime

# A parameter's name and, where each tensor-parallel rank has a part of its own, the tp_rank.
Key = tuple[str, int | None]


def exchange(
    rt: Runtime, group: Group, offers: Mapping[Key, Mapping[str, Any]], wants: Sequence[Key] | None
) -> Iterator[tuple[Key, Mapping[str, Any]]]:
    """Yields what this rank wants (None: all there is) of what the ranks of `group` offer, in the order of the keys.

    Collective over `group`; the iterator must be used up. A key that several ranks offer comes from the first of them,
    one that nobody offers does not come at all. What comes from elsewhere lies in host memory; nobody holds more on its
    way than one key's state.
    """
    mine = None if wants is None else list(wants)
    tables = [(list(offers), mine)]
    if group.size > 1:
        tables = rt.transport.all_gather_object((list(offers), mine), group)
    source: dict[Key, int] = {}
    for rank, (offered, _) in zip(group.ranks, tables):
        for key in offered:
            source.setdefault(key, rank)
    takers: dict[Key, list[int]] = {}
    for rank, (_, wanted) in zip(group.ranks, tables):
        for key in source if wanted is None else wanted:
            takers.setdefault(key, []).append(rank)
    tag = group_tag(group.ranks, 1)
    for key in sorted(source.keys() & takers.keys(), key=lambda key: (key[0], -1 if key[1] is None else key[1])):
        others = [rank for rank in takers[key] if rank != source[key]]
        if rt.rank == source[key]:
            message = _in_host_memory(offers[key]) if others else {}
            for rank in others:
                rt.transport.send_object(message, rank, tag, Channel.CONTROL)
        if rt.rank in takers[key]:
            is_here = rt.rank == source[key]
            yield key, offers[key] if is_here else rt.transport.recv_object(source[key], tag, Channel.CONTROL, _CALL)
        if others:
            rt.transport.barrier(group, _CALL)  # or the sources would run ahead and leave everything in flight


_CALL = "exchange of optimizer state"


def _in_host_memory(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.detach().cpu() if isinstance(value, Tensor) else value for key, value in state.items()}
