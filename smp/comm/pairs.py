"""Tensors between stages over torch process groups: how values move on accelerators (NCCL).

NCCL has no tags and one stream of messages for each communicator, so there is one process group for each ordered
(source, destination) pair, made and used once ("warmed") in the same order on all ranks. Both ends of a pair enqueue
their messages in program order, which the action list makes the same on both. A receive does not block the host: it
makes the device's current stream wait.

Whether an optional gradient exists is known to the host without asking the device; that flag travels over the
transport.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp.comm.transport import Channel, Request, Transport
from smp.topology import CommGroup, Topology

Pair = tuple[int, int]  # world ranks of source and destination

# By pair. They outlive a Runtime, as all process groups do.
_groups: dict[Pair, dist.ProcessGroup] = {}


def make_pair_groups(topology: Topology, rank: int, device: torch.device, timeout: timedelta) -> dict[Pair, Any]:
    """The process groups between this rank and the other stages of its pipeline. Collective over the pipeline."""
    mine = []
    for partner in partners(topology.group(CommGroup.PP_GROUP, rank), rank):
        for pair in ((min(rank, partner), max(rank, partner)), (max(rank, partner), min(rank, partner))):
            if pair not in _groups:
                group = dist.new_group(sorted(set(pair)), timeout=timeout, use_local_synchronization=True)
                assert group is not None
                _groups[pair] = group
                _warm(pair, rank, group, device)
            mine.append(pair)
    return {pair: _groups[pair] for pair in mine}


def partners(ranks: Sequence[int], rank: int) -> list[int]:
    """Whom `rank` meets in each round of a tournament where everybody meets everybody; itself where it has no partner.

    torch names a group by its members and by how many groups a process has, so in every round every rank makes equally
    many. (The circle method: one stands still, the others go round.)
    """
    seats: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    met = []
    for _ in range(len(seats) - 1):
        opposite = seats[len(seats) - 1 - seats.index(rank)]
        met.append(rank if opposite is None else opposite)
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return met


def _warm(pair: Pair, rank: int, group: dist.ProcessGroup, device: torch.device) -> None:
    source, destination = pair
    if source != destination:
        message = torch.zeros(1, device=device)
        if rank == source:
            dist.send(message, destination, group=group)
        else:
            dist.recv(message, source, group=group)


class PairMoves:
    """Sends and receives tensors like a `Transport`; tags only name messages, order is what matches them."""

    in_order = True

    def __init__(self, transport: Transport, groups: Mapping[Pair, Any]) -> None:
        self._transport = transport
        self._groups = groups
        self._rank = transport.rank
        self._sending: list[Any] = []  # a send whose work object is dropped may never happen

    def isend(self, tensor: Tensor, dest: int, tag: int = 0, channel: Channel = Channel.MOVE) -> Request:
        """Starts sending a tensor; the request may be dropped."""
        group = self._groups[self._rank, dest]
        self._sending.append(dist.isend(tensor.detach().contiguous(), dest, group=group))
        return _Done()

    def irecv(self, buffer: Tensor, source: int, tag: int = 0, channel: Channel = Channel.MOVE) -> Request:
        """Starts receiving into `buffer`, which must be contiguous."""
        return _Received(dist.irecv(buffer, source, group=self._groups[source, self._rank]), buffer)

    def isend_optional(
        self, tensor: Tensor | None, dest: int, tag: int = 0, channel: Channel = Channel.MOVE
    ) -> Request:
        """As isend, for a tensor that may be None."""
        self._transport.send_object(tensor is not None, dest, tag, channel)
        return _Done() if tensor is None else self.isend(tensor, dest, tag, channel)

    def irecv_optional(self, buffer: Tensor, source: int, tag: int = 0, channel: Channel = Channel.MOVE) -> Request:
        """As irecv; `.value()` of the request is the buffer or None."""
        present = self._transport.recv_object(source, tag, channel, "smp.step (whether there is a gradient)")
        return self.irecv(buffer, source, tag, channel) if present else _Done()

    def progress(self) -> bool:
        """Forgets sends that are complete (gloo never says so); whether any are left."""
        self._sending = [work for work in self._sending if not work.is_completed()]
        return bool(self._sending)


class _Received(Request):
    """Complete for the host at once; the current stream waits for the data."""

    def __init__(self, work: Any, buffer: Tensor) -> None:
        self._work = work
        self._buffer = buffer

    def test(self) -> bool:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return True

    def value(self) -> Tensor | None:
        return self._buffer


class _Done(Request):
    """A send, which nobody waits for, or the receipt of no tensor."""

    def test(self) -> bool:
        return True

    def value(self) -> Tensor | None:
        return None
