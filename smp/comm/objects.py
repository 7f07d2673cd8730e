"""Messages that scripts send: any picklable object, tensors included."""

from typing import Any

from smp import runtime
from smp.comm.transport import Channel
from smp.topology import CommGroup, RankType

WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP

WORLD_RANK = RankType.WORLD_RANK
MP_RANK = RankType.MP_RANK
DP_RANK = RankType.DP_RANK
PP_RANK = RankType.PP_RANK
TP_RANK = RankType.TP_RANK
RDP_RANK = RankType.RDP_RANK


def send(obj: Any, dest_rank: int, rank_type: RankType = WORLD_RANK) -> None:
    """Sends a picklable object to the member `dest_rank` of this rank's own group of that kind. The object is copied at
    once; the call does not wait for the receiver, so two ranks may send to each other first and receive then.

    Raises:
        UsageError: the group has no such member.
    """
    current = runtime.get()
    current.transport.send_object(obj, current.world_rank(dest_rank, RankType(rank_type)), 0, Channel.USER)


def recv_from(src_rank: int, rank_type: RankType = WORLD_RANK) -> Any:
    """Waits for an object that the member `src_rank` of this rank's own group of that kind sent or broadcast.

    Raises:
        UsageError: the group has no such member.
        CommError: nothing arrived within SMP_TIMEOUT seconds, or that rank failed or left.
    """
    current = runtime.get()
    kind = RankType(rank_type)
    source = current.world_rank(src_rank, kind)
    return current.transport.recv_object(source, 0, Channel.USER, f"smp.recv_from({src_rank}, {kind.name})")


def broadcast(obj: Any, group: CommGroup = WORLD) -> None:
    """Sends a picklable object to the other members of this rank's group; they call `recv_from` with this rank."""
    current = runtime.get()
    for rank in current.group(CommGroup(group)).ranks:
        if rank != current.rank:
            current.transport.send_object(obj, rank, 0, Channel.USER)


def allgather(obj: Any, group: CommGroup = WORLD) -> list[Any]:
    """The objects of all members of this rank's group, by their rank in it. Every member calls it.

    Raises:
        CommError: a member did not call it within SMP_TIMEOUT seconds (the error names it), failed or left.
    """
    current = runtime.get()
    kind = CommGroup(group)
    return current.transport.all_gather_object(obj, current.group(kind), f"smp.allgather({kind.name})")


def barrier(group: CommGroup = WORLD) -> None:
    """Returns when every member of this rank's group has called it.

    Raises:
        CommError: a member did not call it within SMP_TIMEOUT seconds (the error names it), failed or left.
    """
    current = runtime.get()
    kind = CommGroup(group)
    current.transport.barrier(current.group(kind), f"smp.barrier({kind.name})")


def dp_barrier() -> None:
    """barrier(DP_GROUP)"""
    barrier(DP_GROUP)


def mp_barrier() -> None:
    """barrier(MP_GROUP)"""
    barrier(MP_GROUP)


def pp_barrier() -> None:
    """barrier(PP_GROUP)"""
    barrier(PP_GROUP)


def tp_barrier() -> None:
    """barrier(TP_GROUP)"""
    barrier(TP_GROUP)


def rdp_barrier() -> None:
    """barrier(RDP_GROUP)"""
    barrier(RDP_GROUP)
