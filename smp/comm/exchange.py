"""Point-to-point messages among the ranks of a group, over MPI: exchanges, and sums made from them.

Each message carries a digest of operation, shape and dtype as its tag, so that a rank which calls with another shape,
or is in another operation, is found out for free.
"""

import os
import time
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from smp import runtime
from smp.errors import StepError
from smp.groups import Group

HALF = (torch.bfloat16, torch.float16)
# Seconds in which a collective polls without sleep. Its ranks reach it at about the same time, and a sleep ends 60 us
# late: an all-reduce of 1 MiB takes 130 us without and 270 us with one.
SPIN = 1e-3
_offer_processor: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


def exchange(pieces: Sequence[Tensor], group: Group, call: str) -> Tensor:
    """`size` contiguous tensors [s], one for each rank -> [size, s], what the ranks sent to this one.

    Raises:
        StepError: on every rank: the ranks' shapes or dtypes differ, or they are in different collectives.
    """
    out = pieces[0].new_empty((group.size, *pieces[0].shape))
    finish = _swap(pieces, out.unbind(0), group, call)
    out[group.rank].copy_(pieces[group.rank])
    finish()
    return out


def start_exchange_sum(pieces: Sequence[Tensor], group: Group, call: str) -> Callable[[], Tensor]:
    """`size` tensors [s], one for each rank -> a function that waits and returns [s], the sum over the ranks of what
    they sent to this one.

    All but this rank's own piece have to be contiguous, and none may be written to before the function has returned.
    The terms are added in order of rank, so that ranks which are sent the same get the same. bf16 and fp16 are added in
    fp32 and rounded once.

    Raises:
        StepError: by the function, as in `exchange`.
    """
    own = pieces[group.rank]
    received = torch.empty((group.size - 1, *own.shape), dtype=own.dtype)
    places: list[Tensor] = list(received.unbind(0))
    places.insert(group.rank, own)
    finish = _swap(pieces, places, group, call)

    def total() -> Tensor:
        finish()
        if group.size == 2:  # one addition is rounded once in any dtype
            return received[0].add_(own)
        if own.dtype in HALF:
            return torch.stack(places).sum(0, dtype=torch.float32).to(own.dtype)
        out = places[0] + places[1]
        for place in places[2:]:
            out += place
        return out

    return total


def _swap(pieces: Sequence[Tensor], places: Sequence[Tensor], group: Group, call: str) -> Callable[[], None]:
    """Sends `pieces[k]` to every other rank k and receives what it sends into `places[k]`; the function waits."""
    comm = runtime.get().transport.comm(group)
    digest = _digest(call, pieces[0].shape, pieces[0].dtype)
    # A rank sends first to the one behind it, so that not all send to rank 0 at once.
    others = [(group.rank + step) % group.size for step in range(1, group.size)]
    pending: list[Any] = [_Receive(comm, places[other], other) for other in others]
    receives = pending.copy()
    pending += [comm.Isend(memory(pieces[other]), other, digest) for other in others]

    def complete() -> bool:
        while pending:
            if not pending[0].Test():
                return False
            del pending[0]
        return True

    def finish() -> None:
        wait(complete, call, group)
        if any(receive.digest != digest for receive in receives):
            raise_mismatch(pieces[0], group, call)

    return finish


class _Receive:
    """One message of an exchange. Its sender says by the tag what it means it to be."""

    __slots__ = ("request", "status", "digest")

    def __init__(self, comm: Any, buffer: Tensor, source: int) -> None:
        mpi = runtime.get().world.mpi
        self.status = mpi.Status()
        self.digest: int | None = None  # -1: longer than the buffer
        self.request = comm.Irecv(memory(buffer), source, mpi.ANY_TAG)

    def Test(self) -> bool:
        """Whether it has arrived; named as in MPI's requests."""
        try:
            if self.request.Test(self.status):
                self.digest = self.status.Get_tag()
        except runtime.get().world.mpi.Exception:
            self.digest = -1
        return self.digest is not None


def wait(test: Callable[[], bool], call: str, group: Group) -> None:
    """Returns when `test()` is true. Polls without sleep at first, offering the processor to others between looks."""
    end = time.perf_counter() + SPIN
    while time.perf_counter() < end:
        for _ in range(4):
            if test():
                return
        _offer_processor()
    runtime.get().monitor.wait(test, called(call, group), group.ranks)


def memory(tensor: Tensor) -> list[Any]:
    """A contiguous tensor's memory as bytes, for moves of any dtype."""
    mpi = runtime.get().world.mpi
    return [mpi.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size()), mpi.BYTE]


def called(call: str, group: Group) -> str:
    """A collective as users know it."""
    return f"{call}({group.kind.name})"


@lru_cache(maxsize=4096)
def _digest(call: str, shape: torch.Size, dtype: torch.dtype) -> int:
    return zlib.crc32(repr((call, tuple(shape), dtype)).encode()) & 0x3FFFFFFF


def digest_of(piece: Tensor, call: str) -> int:
    """What tells apart calls with different shapes, dtypes or operations."""
    return _digest(call, piece.shape, piece.dtype)


def raise_mismatch(piece: Tensor, group: Group, call: str) -> None:
    """Every rank of the group gets here when any two differ: each of them has met one that is unlike itself."""
    mine = (call, tuple(piece.shape), str(piece.dtype).removeprefix("torch."))
    answers = runtime.get().transport.all_gather_object(mine, group)
    shown = "; ".join(
        f"rank {rank}: {what} of {shape} {dtype}" for rank, (what, shape, dtype) in zip(group.ranks, answers)
    )
    if len({what for what, _, _ in answers}) > 1:
        raise StepError(
            f"the ranks of one {group.kind.name} are in different modules, or were given different arguments: {shown}. "
            "They join their batches in every split module, so a branch that depends on a tensor's value must go the "
            "same way on all of them, and what one of them is given all must be given: let them agree on it first, or "
            "use prescaled_batch"
        )
    raise StepError(
        f"the ranks of one {group.kind.name} joined their batches with different shapes: {shown}. Every tp_rank must "
        "bring a batch of the same shape (pad the last one or drop it, and pad sequences to one length over the group)"
    )
