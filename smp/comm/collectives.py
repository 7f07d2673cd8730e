"""Collectives on tensors: out of place, the group an argument. No autograd here; autograd.py builds on these.

On the CPU under mpirun they go over MPI, which measured faster than gloo for every collective at every size (2 and 4
ranks on 2 cores, the tensor's bytes on each rank, median microseconds of alternating runs, MPI / our messages / gloo;
`python -m benchmarks.collectives`):

    bytes    ranks   all_reduce               reduce_scatter             all_gather               all_to_all
    1 KiB    2       16 / 34 / 294            16 / 39 / 497              13 / 31 / 289            14 / 40 / 189
    256 KiB  2       69 / 105 / 457           71 / 91 / 696              68 / 101 / 339           46 / 80 / 191
    4 MiB    2       1.0k / 1.5k / 4.1k       0.9k / 0.5k / 6.0k         1.5k / 1.8k / 4.7k       0.5k / 0.7k / 1.6k
    16 MiB   2       6.1k / 7.3k / 11k        14k / 3.7k / 23k           32k / 32k / 69k          3.1k / 3.5k / 7.4k
    1 KiB    4       46 / 140 / 5.6k          19 / 65 / 6.9k             27 / 143 / 3.8k          31 / 156 / 2.0k
    256 KiB  4       286 / 621 / 5.7k         160 / 399 / 6.1k           351 / 511 / 4.5k         129 / 309 / 0.8k
    16 MiB   4       50k / 247k / 53k         32k / 9.8k / 62k           294k / 272k / 646k       16k / 20k / 54k

So sums are MPI's own, but for large ones (`_MESSAGES_FROM`). They are polled without sleep at first (exchange.py): with
sleeps, MPI's all-reduce of 64 KiB on 2 ranks took 120 us instead of 20, as it goes on only when it is looked at.

Everywhere else (torchrun, CUDA) they use the torch process group.

Where the caller asks for a check, `all_gather` and `all_to_all` over MPI are messages from rank to rank that carry a
digest of operation, shape and dtype (exchange.py); the process-group path exchanges the digest first.

MPI knows no bf16 or fp16: such values are summed in fp32 and rounded once.

A tensor that stands for a shape only (meta, or a fake one: a rank works out the structure of what another rank
computes) is not sent; the result has the right shape and no data.
"""

import math
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from smp import runtime
from smp.comm.exchange import HALF, called, digest_of, exchange, memory, raise_mismatch, start_exchange_sum, wait
from smp.errors import CommError
from smp.groups import Group

# The newest torch has new names for these two; the oldest one that is supported does not know them.
_OLD_NAMES = r".*torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)"
warnings.filterwarnings("ignore", _OLD_NAMES, FutureWarning)

Op = Literal["sum", "max", "min"]
_TORCH_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# From how many bytes on a sum goes by messages from rank to rank and additions of torch's instead of MPI's own, by size
# of the group; never where nothing is said. Reduce-scatter: see the table above. All-reduce of two: messages need one
# round and so end sooner after work in between; in a step of transformer blocks 1 MiB took 0.1 to 0.2 ms less.
_MESSAGES_FROM: dict[str, dict[int, int]] = {
    "all_reduce": {2: 256 << 10},
    "reduce_scatter": {2: 512 << 10, 4: 8 << 20},
}


def is_structure(tensor: Tensor) -> bool:
    """Whether the tensor has a shape but no data."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def all_reduce(tensor: Tensor, group: Group, op: Op = "sum") -> Tensor:
    """[s] on every rank -> [s], the sum, maximum or minimum over the group, equal on every rank."""
    return start_all_reduce(tensor, group, op)()


def start_all_reduce(tensor: Tensor, group: Group, op: Op = "sum") -> Callable[[], Tensor]:
    """As `all_reduce`, which the returned function completes; what is computed in between hides that ranks arrive at
    different times. `tensor` may not be written to before the function has returned."""
    if group.size == 1 or is_structure(tensor):
        return lambda: tensor
    source = _dense(tensor)
    if _mpi_comm(tensor, group) is None:
        return _start_group_all_reduce(source, group, op)
    if op == "sum" and _by_messages("all_reduce", source, group):
        return start_exchange_sum([source] * group.size, group, "all_reduce")
    if tensor.dtype not in HALF:
        return _start_mpi_all_reduce(source, group, op)
    if op == "sum":
        return lambda: _all_reduce_half(source, group)
    finish = _start_mpi_all_reduce(source.float(), group, op)
    return lambda: finish().to(tensor.dtype)


def all_gather(tensor: Tensor, group: Group, dim: int = 0, *, checked: bool | str = False) -> Tensor:
    """[.., n, ..] on every rank -> [.., size * n, ..], the ranks' tensors concatenated along `dim`.

    Args:
        checked: the caller cannot know that shapes agree; costs a message where it is not free. A string names the
            caller, and ranks that are in different ones are told.

    Raises:
        StepError: with `checked`: the ranks' shapes differ, or they are in different collectives.
    """
    if group.size == 1:
        return tensor
    if is_structure(tensor):
        return torch.cat([tensor] * group.size, dim)
    source = _dense(tensor)
    call = _called("all_gather", checked)
    if checked and _mpi_comm(tensor, group) is not None:
        return _joined(exchange([source] * group.size, group, call), dim)
    if checked:
        check_alike(source, group, call)
    return _joined(_gather(source, group)(), dim)


def start_all_gather(tensor: Tensor, group: Group, dim: int = 0) -> Callable[[], Tensor]:
    """As `all_gather` without a check, see `start_all_reduce`."""
    if group.size == 1 or is_structure(tensor):
        return partial(all_gather, tensor, group, dim)
    finish = _gather(_dense(tensor), group)
    return lambda: _joined(finish(), dim)


def reduce_scatter(tensor: Tensor, group: Group, dim: int = 0) -> Tensor:
    """[.., size * n, ..] on every rank -> [.., n, ..], this rank's piece along `dim` of the sum over the group.

    Raises:
        CommError: `dim` does not divide by the size of the group.
    """
    return _reduce_scatter(tensor, group, dim)()


def start_reduce_scatter(tensor: Tensor, group: Group, dim: int = 0) -> Callable[[], Tensor]:
    """As `reduce_scatter`, see `start_all_reduce`."""
    return _reduce_scatter(tensor, group, dim)


def all_to_all(tensor: Tensor, group: Group, split_dim: int, concat_dim: int, *, checked: bool | str = False) -> Tensor:
    """[.., size * a, .., b, ..] -> [.., a, .., size * b, ..]: cuts along `split_dim`, sends piece k to rank k, and
    concatenates what arrives along `concat_dim` in order of rank.

    Args:
        checked: the caller cannot know that shapes agree; costs a message where it is not free. A string names the
            caller, and ranks that are in different ones are told.

    Raises:
        CommError: `split_dim` does not divide by the size of the group.
        StepError: with `checked`: the ranks' shapes differ, or they are in different collectives.
    """
    if group.size == 1:
        return tensor
    pieces = _pieces(tensor, group, split_dim, "all_to_all")
    if is_structure(tensor):
        return torch.cat(pieces, concat_dim)
    call = _called("all_to_all", checked)
    comm = _mpi_comm(tensor, group)
    if comm is not None and checked:
        return _joined(exchange([_dense(piece) for piece in pieces], group, call), concat_dim)
    source = _stacked(pieces)
    out = torch.empty_like(source)
    if comm is not None:
        _wait(comm.Ialltoall(memory(source), memory(out)), call, group)
        return _joined(out, concat_dim)
    if checked:
        check_alike(pieces[0], group, call)
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
        _wait(comm.Ibcast(memory(out), root=source), "broadcast", group)
    return tensor if group.rank == source else out


# MPI


def _mpi_comm(tensor: Tensor, group: Group) -> Any:
    """The communicator for this tensor; None where the process group has to do it."""
    return runtime.get().transport.comm(group) if tensor.device.type == "cpu" else None


def _mpi() -> Any:
    return runtime.get().world.mpi


def _by_messages(operation: str, tensor: Tensor, group: Group) -> bool:
    """Whether a sum goes by messages; the same on every rank."""
    if tensor.dtype in HALF:  # MPI cannot add them; for an all-reduce of more than two see _all_reduce_half
        return operation == "reduce_scatter" or group.size == 2
    return tensor.nbytes >= _MESSAGES_FROM[operation].get(group.size, math.inf)


def _mpi_op(op: Op) -> Any:
    return {"sum": _mpi().SUM, "max": _mpi().MAX, "min": _mpi().MIN}[op]


def _wait(request: Any, call: str, group: Group) -> None:
    wait(request.Test, call, group)


def _start_mpi_all_reduce(source: Tensor, group: Group, op: Op) -> Callable[[], Tensor]:
    out = torch.empty_like(source)
    send, receive = source.numpy(), out.numpy()
    request = runtime.get().transport.comm(group).Iallreduce(send, receive, op=_mpi_op(op))
    return partial(_completed, request, "all_reduce", group, out, send, receive)


def _start_group_all_reduce(source: Tensor, group: Group, op: Op) -> Callable[[], Tensor]:
    out = source.clone()
    work = dist.all_reduce(out, _TORCH_OPS[op], group=group.process_group, async_op=True)
    return partial(_completed, work, "all_reduce", group, out)


def _gather(source: Tensor, group: Group) -> Callable[[], Tensor]:
    """[s] contiguous -> [size, s], once it is complete."""
    out = source.new_empty((group.size, *source.shape))
    comm = _mpi_comm(source, group)
    if comm is not None:
        sent, received = memory(source), memory(out)
        operation = comm.Iallgather(sent, received)
    else:
        operation = dist.all_gather_into_tensor(out.view(-1), source.view(-1), group=group.process_group, async_op=True)
    return partial(_completed, operation, "all_gather", group, out, source)


def _reduce_scatter(tensor: Tensor, group: Group, dim: int) -> Callable[[], Tensor]:
    if group.size == 1:
        return lambda: tensor
    pieces = _pieces(tensor, group, dim, "reduce_scatter")
    if is_structure(tensor):
        return lambda: pieces[group.rank]
    comm = _mpi_comm(tensor, group)
    if comm is not None and _by_messages("reduce_scatter", tensor, group):
        sent = [piece if rank == group.rank else _dense(piece) for rank, piece in enumerate(pieces)]
        return start_exchange_sum(sent, group, "reduce_scatter")
    source = _stacked(pieces)
    out = torch.empty_like(source[0])
    if comm is not None:
        send, receive = source.numpy(), out.numpy()
        operation = comm.Ireduce_scatter_block(send, receive)
        return partial(_completed, operation, "reduce_scatter", group, out, send, receive)
    over = group.process_group
    work = dist.reduce_scatter_tensor(out.view(-1), source.view(-1), group=over, async_op=True)
    return partial(_completed, work, "reduce_scatter", group, out, source)


def _completed(operation: Any, call: str, group: Group, out: Tensor, *held: Any) -> Tensor:
    """`out`, when an MPI request or a torch work is complete. What it reads lives until then (`held`): mpi4py does not
    hold it."""
    if isinstance(operation, dist.Work):
        with _blocking(call, group):
            operation.wait()
    else:
        _wait(operation, call, group)
    return out


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


def check_alike(piece: Tensor, group: Group, call: str) -> None:
    """Compares what the ranks are about to do, with tensors of which shape and dtype, where the collective itself would
    not notice. On CUDA without MPI only with SMP_DEBUG=1: the host would have to wait for the device.

    Raises:
        StepError: on every rank: they are not alike.
    """
    digest = digest_of(piece, call)
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
        raise_mismatch(piece, group, call)


def _pieces(tensor: Tensor, group: Group, dim: int, call: str) -> tuple[Tensor, ...]:
    if tensor.shape[dim] % group.size:
        raise CommError(f"{call}: dimension {dim} of {tuple(tensor.shape)} does not divide by {group.size} ranks")
    return tensor.chunk(group.size, dim) if tensor.shape[dim] else (tensor,) * group.size


def _dense(tensor: Tensor) -> Tensor:
    """The same values out of autograd, in contiguous memory that holds exactly them."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _stacked(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces [s] of one tensor -> [size, s], without a copy where they lie behind one another in memory."""
    first = pieces[0]
    places = [first.data_ptr() + index * first.nbytes for index in range(len(pieces))]
    dense = all(piece.is_contiguous() for piece in pieces) and not (first.is_conj() or first.is_neg())
    if dense and places == [piece.data_ptr() for piece in pieces]:
        return first.detach().as_strided((len(pieces), *first.shape), (first.numel(), *first.stride()))
    return torch.stack([_dense(piece) for piece in pieces])


def _joined(parts: Tensor, dim: int) -> Tensor:
    """[size, s] -> the parts concatenated along `dim` of s; along the first one without a copy."""
    if dim % (parts.dim() - 1) == 0:
        return parts.flatten(0, 1)
    return torch.cat(parts.unbind(0), dim)


def _blocking(call: str, group: Group) -> Any:
    return runtime.get().monitor.blocking(called(call, group), group.ranks)
