"""Who is who after smp.init: ranks, sizes and groups for several placements, and what a second init does."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import smp
from smp import groups, runtime
from smp.bootstrap import Identity, identify
from smp.errors import CommError, ConfigError, UsageError
from tests.harness import on_ranks

QUERIES = ["rank", "size", "local_rank", "local_size"] + [
    f"{kind}_{what}" for kind in ("tp", "pp", "rdp", "dp", "mp") for what in ("rank", "size")
]
KINDS = ["world", "tp", "pp", "rdp", "dp", "mp"]

# Four ranks as tp 2 x pp 2: (pp, tp) by world rank. As pp 2 x rdp 2: (rdp, pp).
TWO_BY_TWO: dict[str, tuple[dict[str, Any], dict[str, list[int]]]] = {
    "cluster, tp fastest": (
        {"tensor_parallel_degree": 2, "placement_strategy": "cluster"},
        {"pp_rank": [0, 0, 1, 1], "tp_rank": [0, 1, 0, 1], "rdp_rank": [0] * 4, "mp_rank": [0, 1, 2, 3]},
    ),
    "spread, pp faster than tp": (
        {"tensor_parallel_degree": 2, "placement_strategy": "spread"},
        {"pp_rank": [0, 1, 0, 1], "tp_rank": [0, 0, 1, 1], "rdp_rank": [0] * 4, "mp_rank": [0, 1, 2, 3]},
    ),
    "cluster without tp": (
        {"placement_strategy": "cluster"},
        {"pp_rank": [0, 1, 0, 1], "rdp_rank": [0, 0, 1, 1], "dp_rank": [0, 0, 1, 1], "mp_rank": [0, 1, 0, 1]},
    ),
    "spread without tp": (
        {"placement_strategy": "spread"},
        {"pp_rank": [0, 0, 1, 1], "rdp_rank": [0, 1, 0, 1], "dp_rank": [0, 1, 0, 1], "mp_rank": [0, 0, 1, 1]},
    ),
}


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
@pytest.mark.parametrize("case", list(TWO_BY_TWO))
@on_ranks(4, launcher=lambda arguments: arguments["launcher"])
def test_ranks_and_groups_follow_the_placement(case: str, launcher: str) -> None:
    """A failure means that ranks exchange data with the wrong peers."""
    settings, expected = TWO_BY_TWO[case]
    smp.init({"pipeline_parallel_degree": 2, "ddp": True, **settings})
    me = int(runtime.get().world.rank)
    assert (smp.rank(), smp.size(), smp.local_rank(), smp.local_size()) == (me, 4, me, 4)
    for query, values in expected.items():
        assert getattr(smp, query)() == values[me], query
    for kind in KINDS:
        ranks = getattr(smp, f"get_{kind}_group")()
        group = getattr(smp, f"get_{kind}_process_group")()
        assert ranks == sorted(ranks) and me in ranks
        assert dist.get_process_group_ranks(group) == ranks
        total = torch.tensor([me])
        dist.all_reduce(total, group=group)
        assert int(total) == sum(ranks)
        if kind != "world":
            assert getattr(smp, f"{kind}_size")() == len(ranks)
            assert getattr(smp, f"{kind}_rank")() == ranks.index(me)
    assert smp.dp_size() == smp.rdp_size() * smp.tp_size() and smp.mp_size() == smp.pp_size() * smp.tp_size()


@on_ranks(1)
def test_nothing_is_known_before_init() -> None:
    """A failure means that a script which forgot smp.init computes with a made-up rank."""
    assert not smp.is_initialized()
    for query in [*QUERIES, *[f"get_{kind}_group" for kind in KINDS], "barrier"]:
        with pytest.raises(UsageError, match=r"call smp\.init\(\) first"):
            getattr(smp, query)()
    with pytest.raises(UsageError, match=r"call smp\.init\(\) first"):
        smp.send(1, 0)


@on_ranks(2)
def test_a_second_init_changes_nothing_or_raises() -> None:
    """A failure means that transformers, which calls smp.init() at import, breaks scripts or is broken by them."""
    smp.init({"microbatches": 2, "ddp": True})
    before = runtime.get()
    smp.init()
    smp.init({"ddp": True, "microbatches": 2})
    smp.init({"ddp": True, "microbatches": 2, "pipeline_parallel_degree": 1})
    assert runtime.get() is before and smp.is_initialized()
    with pytest.raises(ConfigError, match="microbatches is 2, now 4"):
        smp.init({"ddp": True, "microbatches": 4})
    with pytest.raises(ConfigError, match="microbatchs"):
        smp.init({"ddp": True, "microbatchs": 2})
    assert runtime.get() is before
    smp.barrier()


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
@on_ranks(2, launcher=lambda arguments: arguments["launcher"])
def test_a_configuration_error_is_raised_by_every_rank_and_leaves_the_world_usable(launcher: str) -> None:
    """A failure means that one rank goes on alone, or that a corrected configuration cannot be tried."""
    world = runtime._world
    rank = world.rank if world is not None else identify().rank
    with pytest.raises(ConfigError, match="(?s)on rank 1: .*microbatches"):
        smp.init({"ddp": True, "microbatches": 0 if rank == 1 else 2})
    with pytest.raises(ConfigError, match="microbatches is 2 on rank 0 and 3 on rank 1"):
        smp.init({"ddp": True, "microbatches": 2 + rank})
    with pytest.raises(ConfigError, match="2 processes"):
        smp.init({"pipeline_parallel_degree": 3, "ddp": True})
    assert not smp.is_initialized()
    smp.init({"ddp": True})
    assert smp.allgather(smp.rank()) == [0, 1]


@on_ranks(2, config={"ddp": True})
def test_the_same_processes_take_another_configuration_after_a_reset() -> None:
    """A failure means that the tests of this suite, which share worlds, disturb each other."""
    transport = runtime.get().transport
    for settings in ({"pipeline_parallel_degree": 2}, {"tensor_parallel_degree": 2, "ddp": True}, {"ddp": True}):
        smp.barrier()
        runtime.reset()
        assert not smp.is_initialized()
        smp.init(settings)
        assert runtime.get().transport is transport
        assert smp.allgather(smp.rank()) == [0, 1]


MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@on_ranks(4, config={"ddp": True}, timeout=20)
def test_a_group_that_the_script_made_of_some_ranks_keeps_no_rank_waiting() -> None:
    """torch names groups after how many a process is in: ranks that disagree about that wait for each other forever."""
    dist.new_group([0, 1])
    runtime.reset()
    groups._cache.clear()
    smp.init({"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True})
    for group in (smp.get_tp_process_group(), smp.get_pp_process_group()):
        total = torch.tensor([1])
        dist.all_reduce(total, group=group)
        assert total == 2


def test_rank_and_size_come_from_the_launcher() -> None:
    """A failure means that every process believes to be alone, or that ranks are those of another launcher."""
    assert identify({}) == Identity("single", 0, 1, 0, 1)
    assert identify(MPIRUN) == Identity("mpi", 5, 8, 1, 4)
    assert identify(TORCHRUN) == Identity("torchrun", 3, 4, 1, 2)
    assert identify({"RANK": "1", "WORLD_SIZE": "2"}) == Identity("torchrun", 1, 2, 1, 2)
    assert identify(MPIRUN | TORCHRUN) == Identity("mpi", 5, 8, 1, 4)
    inside = TORCHRUN | MPIRUN | {"TORCHELASTIC_RUN_ID": "x"}
    assert identify(inside) == Identity("torchrun", 3, 4, 1, 2), "torchrun that was itself started by mpirun"
    assert identify({key: "0" if "RANK" in key else "1" for key in MPIRUN}) == Identity("single", 0, 1, 0, 1)


def test_errors_of_messages_are_smp_errors() -> None:
    """A failure means that `except smp.SmpError` misses some."""
    assert issubclass(CommError, smp.SmpError) and issubclass(UsageError, smp.SmpError)


def test_importing_smp_starts_nothing() -> None:
    """A failure means that `import smp` in a tool or a test initialises MPI or costs seconds."""
    import subprocess
    import sys

    code = "import smp, sys; assert not [m for m in ('torch', 'mpi4py', 'pydantic') if m in sys.modules]"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
