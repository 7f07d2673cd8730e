"""Collectives on tensors: out of place, the group an argument. No autograd here; autograd.py builds on these.

On the CPU under mpirun they go over MPI, which measured faster than gloo for every collective at every size (2 and 4
ranks on 2 cores, microseconds, MPI / gloo):

    bytes    ranks   all_reduce    all_gather     reduce_scatter   all_to_all
    1 KiB    2       6 / 1392      6 / 589        7 / 1760         6 / 326
    256 KiB  2       86 / 559      74 / 1302      119 / 1905       45 / 421
    16 MiB   2       6.4k / 15k    5.4k / 41k     26k / 42k        4.9k / 15k
    1 KiB    4       38 / 5375     23 / 3986      28 / 5945        26 / 2663
    16 MiB   4       17k / 29k     27k / 138k     108k / 215k      19k / 55k

Everywhere else (torchrun, CUDA) they use the torch process group.

`all_gather` and `all_to_all` over MPI are point-to-point messages, as fast as MPI's own collectives from 256 KiB on.
They carry a digest of operation, shape and dtype as their tag, so a rank that calls with another shape, or is in
another of the two, is found out for free; the process-group path exchanges the digest first where the caller asks.

MPI knows no bf16 or fp16: such values are summed in fp32 and rounded once.

A tensor that stands for a shape only (meta, or a fake one: a rank works out the structure of what another rank
computes) is not sent; the result has the right shape and no data.
"""

import os
import warnings
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from smp import runtime
from smp.errors import CommError, StepError
from smp.groups import Group

# The newest torch has new names for these two; the oldest one that is supported does not know them.
_OLD_NAMES = r".*torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)"
warnings.filterwarnings("ignore", _OLD_NAMES, FutureWarning)

Op = Literal["sum", "max", "min"]
_TORCH_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_HALF = (torch.bfloat16, torch.float16)


def is_structure(tensor: Tensor) -> bool:
    """Whether the tensor has a shape but no data."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def all_reduce(tensor: Tensor, group: Group, op: Op = "sum") -> Tensor:
    """[s] on every rank -> [s], the sum, maximum or minimum over the group, equal on every rank."""
    if group.size == 1 or is_structure(tensor):
        return tensor
    comm = _mpi_comm(tensor, group)
    if comm is None:
        out = _dense(tensor).clone()
        with _blocking("all_reduce", group):
            dist.all_reduce(out, _TORCH_OPS[op], group=group.process_group)
        return out
    if tensor.dtype in _HALF:
        if op == "sum":
            return _all_reduce_half(tensor, group)
        return all_reduce(tensor.float(), group, op).to(tensor.dtype)
    source = _dense(tensor)
    out = torch.empty_like(source)
    send, receive = source.numpy(), out.numpy()  # held until the request is complete: mpi4py does not hold them
    _wait(comm.Iallreduce(send, receive, op=_mpi_op(op)), "all_reduce", group)
    return out


def all_gather(tensor: Tensor, group: Group, dim: int = 0, *, checked: bool | str = False) -> Tensor:
    """[.., n, ..] on every rank -> [.., size * n, ..], the ranks' tensors concatenated along `dim`.

    Args:
        checked: the caller cannot know that shapes agree; costs a message where it is not free. A string names the
            caller, and ranks that are in different ones are told.

    Raises:
        StepError: the ranks' shapes differ (always noticed over MPI, elsewhere with `checked`).
    """
    if group.size == 1:
        return tensor
    if is_structure(tensor):
        return torch.cat([tensor] * group.size, dim)
    source = _dense(tensor)
    call = _called("all_gather", checked)
    if _mpi_comm(tensor, group) is not None:
        return _joined(_exchange([source] * group.size, group, call), dim)
    if checked:
        _check_digest(source, group, call)
    out = source.new_empty((group.size, *source.shape))
    with _blocking("all_gather", group):
        dist.all_gather_into_tensor(out.view(-1), source.view(-1), group=group.process_group)
    return _joined(out, dim)


def reduce_scatter(tensor: Tensor, group: Group, dim: int = 0) -> Tensor:
    """[.., size * n, ..] on every rank -> [.., n, ..], this rank's piece along `dim` of the sum over the group.

    Raises:
        CommError: `dim` does not divide by the size of the group.
    """
    if group.size == 1:
        return tensor
    pieces = _pieces(tensor, group, dim, "reduce_scatter")
    if is_structure(tensor):
        return pieces[group.rank]
    comm = _mpi_comm(tensor, group)
    if comm is not None and tensor.dtype in _HALF:
        received = _exchange([_dense(piece) for piece in pieces], group, "reduce_scatter")
        return received.sum(0, dtype=torch.float32).to(tensor.dtype)
    source = torch.stack([_dense(piece) for piece in pieces]) if dim % tensor.dim() else _stacked(tensor, group)
    out = torch.empty_like(source[0])
    if comm is None:
        with _blocking("reduce_scatter", group):
            dist.reduce_scatter_tensor(out.view(-1), source.view(-1), group=group.process_group)
        return out
    send, receive = source.numpy(), out.numpy()
    _wait(comm.Ireduce_scatter_block(send, receive), "reduce_scatter", group)
    return out


def all_to_all(tensor: Tensor, group: Group, split_dim: int, concat_dim: int, *, checked: bool | str = False) -> Tensor:
    """[.., size * a, .., b, ..] -> [.., a, .., size * b, ..]: cuts along `split_dim`, sends piece k to rank k, and
    concatenates what arrives along `concat_dim` in order of rank.

    Args:
        checked: the caller cannot know that shapes agree; costs a message where it is not free. A string names the
            caller, and ranks that are in different ones are told.

    Raises:
        CommError: `split_dim` does not divide by the size of the group.
        StepError: the ranks' shapes differ (always noticed over MPI, elsewhere with `checked`).
    """
    if group.size == 1:
        return tensor
    pieces = _pieces(tensor, group, split_dim, "all_to_all")
    if is_structure(tensor):
        return torch.cat(pieces, concat_dim)
    call = _called("all_to_all", checked)
    if _mpi_comm(tensor, group) is not None:
        return _joined(_exchange([_dense(piece) for piece in pieces], group, call), concat_dim)
    if checked:
        _check_digest(pieces[0], group, call)
    source = torch.stack([_dense(piece) for piece in pieces])
    out = torch.empty_like(source)
    with _blocking("all_to_all", group):
        dist.all_to_all_single(out.view(-1), source.view(-1), group=group.process_group)
    return _joined(out, concat_dim)


def broadcast(tensor: Tensor, group: Group, source: int) -> Tensor:
    """[s] -> [s], the tensor of the rank that has index `source` in the group. On that rank it is the argument itself;
    elsewhere the argument gives shape and dtype."""
    if group.size == 1 or is_structure(tensor):
        return tensor
    out = _dense(tensor) if group.rank == source else tensor.new_empty(tensor.shape)
    comm = _mpi_comm(tensor, group)
    if comm is None:
        with _blocking("broadcast", group):
            dist.broadcast(out, group=group.process_group, group_src=source)
    else:
        memory = _memory(out)
        _wait(comm.Ibcast(memory, root=source), "broadcast", group)
    return tensor if group.rank == source else out


# MPI


def _exchange(pieces: Sequence[Tensor], group: Group, call: str) -> Tensor:
    """`size` contiguous tensors [s], one for each rank -> [size, s], what the ranks sent to this one.

    Raises:
        StepError: on every rank: the ranks' shapes or dtypes differ, or they are in different collectives.
    """
    comm = runtime.get().transport.comm(group)
    out = pieces[0].new_empty((group.size, *pieces[0].shape))
    digest = _digest(call, tuple(pieces[0].shape), pieces[0].dtype)
    # A rank sends first to the one behind it, so that not all send to rank 0 at once.
    others = [(group.rank + step) % group.size for step in range(1, group.size)]
    receives = {other: _Receive(comm, out[other], other) for other in others}
    sends = [comm.Isend(_memory(pieces[other]), other, digest) for other in others]
    out[group.rank].copy_(pieces[group.rank])

    def complete() -> bool:
        arrived = sum(receive.test() for receive in receives.values())
        sent = sum(bool(send.Test()) for send in sends)
        return arrived + sent == 2 * len(others)

    runtime.get().monitor.wait(complete, _name(call, group), group.ranks)
    if any(receive.digest != digest for receive in receives.values()):
        _raise_mismatch(pieces[0], group, call)
    return out


class _Receive:
    """One message of an exchange. Its sender says by the tag what it means it to be."""

    __slots__ = ("request", "status", "digest")

    def __init__(self, comm: Any, buffer: Tensor, source: int) -> None:
        mpi = _mpi()
        self.status = mpi.Status()
        self.digest: int | None = None  # -1: longer than the buffer
        self.request = comm.Irecv(_memory(buffer), source, mpi.ANY_TAG)

    def test(self) -> bool:
        """Whether it has arrived."""
        if self.digest is None:
            try:
                if self.request.Test(self.status):
                    self.digest = self.status.Get_tag()
            except _mpi().Exception:
                self.digest = -1
        return self.digest is not None


def _mpi_comm(tensor: Tensor, group: Group) -> Any:
    """The communicator for this tensor; None where the process group has to do it."""
    return runtime.get().transport.comm(group) if tensor.device.type == "cpu" else None


def _mpi() -> Any:
    return runtime.get().world.mpi


def _mpi_op(op: Op) -> Any:
    return {"sum": _mpi().SUM, "max": _mpi().MAX, "min": _mpi().MIN}[op]


def _memory(tensor: Tensor) -> Any:
    """A contiguous tensor's memory as bytes, for moves of any dtype."""
    mpi = _mpi()
    return [mpi.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size()), mpi.BYTE]


def _wait(request: Any, call: str, group: Group) -> None:
    runtime.get().monitor.wait(request.Test, _name(call, group), group.ranks)


def _all_reduce_half(tensor: Tensor, group: Group) -> Tensor:
    """The sum of a bf16 or fp16 tensor, added up in fp32: each rank sums one piece, then all gather the pieces."""
    flat = tensor.reshape(-1)
    size = -(-flat.numel() // group.size) * group.size
    padded = torch.nn.functional.pad(flat, (0, size - flat.numel()))
    summed = reduce_scatter(padded, group)
    return all_gather(summed, group)[: flat.numel()].view(tensor.shape)


# Common


def _called(operation: str, checked: bool | str) -> str:
    return f"{operation} for {checked}" if isinstance(checked, str) else operation


@lru_cache(maxsize=4096)
def _digest(call: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return zlib.crc32(repr((call, shape, dtype)).encode()) & 0x3FFFFFFF


def _check_digest(piece: Tensor, group: Group, call: str) -> None:
    """Compares what the ranks are about to do, where the collective itself would not notice. On CUDA without MPI only
    with SMP_DEBUG=1: the host would have to wait for the device."""
    digest = _digest(call, tuple(piece.shape), piece.dtype)
    comm = runtime.get().transport.comm(group)
    mine = torch.tensor([digest, -digest])
    if comm is not None:
        largest = torch.empty_like(mine)
        send, receive = mine.numpy(), largest.numpy()
        _wait(comm.Iallreduce(send, receive, op=_mpi_op("max")), call, group)
    elif piece.device.type == "cpu" or os.environ.get("SMP_DEBUG") == "1":
        largest = mine.to(piece.device)
        with _blocking(call, group):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group.process_group)
    else:
        return
    if int(largest[0]) != -int(largest[1]):
        _raise_mismatch(piece, group, call)


def _raise_mismatch(piece: Tensor, group: Group, call: str) -> None:
    """Every rank of the group gets here when any two differ: each of them has met one that is unlike itself."""
    mine = (call, tuple(piece.shape), str(piece.dtype).removeprefix("torch."))
    answers = runtime.get().transport.all_gather_object(mine, group)
    shown = "; ".join(
        f"rank {rank}: {what} of {shape} {dtype}" for rank, (what, shape, dtype) in zip(group.ranks, answers)
    )
    if len({what for what, _, _ in answers}) > 1:
        raise StepError(
            f"the ranks of one {group.kind.name} are in different modules: {shown}. They join their batches in every "
            "split module, so a branch that depends on a tensor's value must go the same way on all of them: let "
            "them agree on it first, or use prescaled_batch"
        )
    raise StepError(
        f"the ranks of one {group.kind.name} joined their batches with different shapes: {shown}. Every tp_rank must "
        "bring a batch of the same shape (pad the last one or drop it, and pad sequences to one length over the group)"
    )


def _pieces(tensor: Tensor, group: Group, dim: int, call: str) -> tuple[Tensor, ...]:
    if tensor.shape[dim] % group.size:
        raise CommError(f"{call}: dimension {dim} of {tuple(tensor.shape)} does not divide by {group.size} ranks")
    return tensor.chunk(group.size, dim) if tensor.shape[dim] else (tensor,) * group.size


def _dense(tensor: Tensor) -> Tensor:
    """The same values out of autograd, in contiguous memory that holds exactly them."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _stacked(tensor: Tensor, group: Group) -> Tensor:
    """[size * n, ..] -> [size, n, ..]."""
    return _dense(tensor).view(group.size, tensor.shape[0] // group.size, *tensor.shape[1:])


def _joined(parts: Tensor, dim: int) -> Tensor:
    """[size, s] -> the parts concatenated along `dim` of s; along the first one without a copy."""
    if dim % (parts.dim() - 1) == 0:
        return parts.flatten(0, 1)
    return torch.cat(parts.unbind(0), dim)


def _name(call: str, group: Group) -> str:
    return f"{call}({group.kind.name})"


def _blocking(call: str, group: Group) -> Any:
    return runtime.get().monitor.blocking(_name(call, group), group.ranks)
