"""What each collective costs, over MPI's own calls, our messages and additions, and gloo. Prints a table.

    python -m benchmarks.collectives                         2 and 4 processes, fp32 and bf16, 4 B to 64 MB
    python -m benchmarks.collectives --ranks 2 --largest 1048576

All ways run in turn in the same processes. Bytes are those of the tensor that the collective is given on each rank;
times are microseconds, least / median. `smp` is what the library chooses.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import smp
from benchmarks.worlds import Side, worlds
from smp import runtime
from smp.comm import collectives
from smp.comm.exchange import exchange, memory, start_exchange_sum, wait
from smp.groups import Group
from smp.topology import CommGroup

SIZES = [4, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
ROUNDS = 15
BLOCK_BYTES = 2 << 20  # a block repeats a small collective until about so much has been sent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Call = Callable[[Tensor], Any]


def _mpi(group: Group, numbers: bool) -> dict[str, Call]:
    """MPI's own collectives, as nonblocking requests; sums only of `numbers` that it knows."""
    comm = runtime.get().transport.comm(group)

    def done(request: Any, *held: Any) -> None:
        wait(request.Test, "benchmark", group)

    def all_reduce(x: Tensor) -> None:
        send, receive = x.numpy(), torch.empty_like(x).numpy()
        done(comm.Iallreduce(send, receive))

    def reduce_scatter(x: Tensor) -> None:
        send, receive = x.numpy(), x.new_empty(x.numel() // group.size).numpy()
        done(comm.Ireduce_scatter_block(send, receive))

    def all_gather(x: Tensor) -> None:
        out = x.new_empty(group.size * x.numel())
        done(comm.Iallgather(memory(x), memory(out)))

    def all_to_all(x: Tensor) -> None:
        out = torch.empty_like(x)
        done(comm.Ialltoall(memory(x), memory(out)))

    def broadcast(x: Tensor) -> None:
        done(comm.Ibcast(memory(x), root=0))

    moves = {"all_gather": all_gather, "all_to_all": all_to_all, "broadcast": broadcast}
    return {**({"all_reduce": all_reduce, "reduce_scatter": reduce_scatter} if numbers else {}), **moves}


def _messages(group: Group) -> dict[str, Call]:
    """Messages from rank to rank, and additions of torch's."""

    def pieces(x: Tensor) -> list[Tensor]:
        return list(x.view(group.size, -1).unbind(0))

    return {
        "all_reduce": lambda x: start_exchange_sum([x] * group.size, group, "benchmark")(),
        "reduce_scatter": lambda x: start_exchange_sum(pieces(x), group, "benchmark")(),
        "all_gather": lambda x: exchange([x] * group.size, group, "benchmark"),
        "all_to_all": lambda x: exchange(pieces(x), group, "benchmark"),
    }


def _gloo(group: Group) -> dict[str, Call]:
    over, size = group.process_group, group.size
    return {
        "all_reduce": lambda x: dist.all_reduce(x.clone(), group=over),
        "reduce_scatter": lambda x: dist.reduce_scatter_tensor(x.new_empty(x.numel() // size), x, group=over),
        "all_gather": lambda x: dist.all_gather_into_tensor(x.new_empty(size * x.numel()), x, group=over),
        "all_to_all": lambda x: dist.all_to_all_single(torch.empty_like(x), x, group=over),
        "broadcast": lambda x: dist.broadcast(x, group=over, group_src=0),
    }


def _smp(group: Group) -> dict[str, Call]:
    return {
        "all_reduce": lambda x: collectives.all_reduce(x, group),
        "reduce_scatter": lambda x: collectives.reduce_scatter(x, group),
        "all_gather": lambda x: collectives.all_gather(x, group),
        "all_to_all": lambda x: collectives.all_to_all(x, group, 0, 0),
        "broadcast": lambda x: collectives.broadcast(x, group, 0),
    }


def _block(call: Call, x: Tensor, repeats: int) -> float:
    smp.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        call(x)
    return (time.perf_counter() - begin) / repeats


def build(ranks: int, dtype: str, sizes: list[int]) -> tuple[Callable[[], None], list[dict[str, Any]]]:
    """Runs everything on this rank; the answer has one entry per size and collective: {way: (least, median)}."""
    smp.init({"tensor_parallel_degree": ranks, "ddp": True})
    group = runtime.get().group(CommGroup.TP_GROUP)
    ways = {"mpi": _mpi(group, dtype == "fp32"), "messages": _messages(group), "gloo": _gloo(group), "smp": _smp(group)}
    found = []
    for size in sizes:
        x = torch.ones(max(ranks, size // DTYPES[dtype].itemsize), dtype=DTYPES[dtype])
        repeats = max(1, min(50, BLOCK_BYTES // size))
        for name in ways["smp"]:
            calls = {way: table[name] for way, table in ways.items() if name in table}
            seconds: dict[str, list[float]] = {way: [] for way in calls}
            for number in range(ROUNDS + 1):  # the first one warms up
                for way in list(calls) if number % 2 else reversed(calls):
                    seconds[way].append(_block(calls[way], x, repeats))
            times = {way: (min(s[1:]), statistics.median(s[1:])) for way, s in seconds.items()}
            found.append({"size": size, "collective": name, "times": times})
    return lambda: None, found


def main() -> None:
    """Prints a table for every number of processes and dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    args = parser.parse_args()
    for ranks in args.ranks:
        for dtype in args.dtypes:
            arguments = {"ranks": ranks, "dtype": dtype, "sizes": [size for size in SIZES if size <= args.largest]}
            with worlds([Side("collectives", "benchmarks.collectives:build", arguments, ranks, "mpi")]) as (world,):
                answer = world.build()[0]
            print(f"\n{ranks} processes, {dtype}: microseconds, least / median")
            for entry in answer:
                shown = ", ".join(f"{way} {1e6 * a:.0f} / {1e6 * b:.0f}" for way, (a, b) in entry["times"].items())
                print(f"  {entry['size']:>9} B  {entry['collective']:15} {shown}", flush=True)


if __name__ == "__main__":
    main()
