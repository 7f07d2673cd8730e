"""Calls under a condition that leaves out ranks they need: an error that names those ranks, on all that called."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.errors import CommError
from tests.harness import launch, on_ranks
from tests.stateful import shared_directory

TENSOR_DATA = {"tensor_parallel_degree": 2, "ddp": True}
PIPELINE_DATA = {"pipeline_parallel_degree": 2, "ddp": True}

GUARDS: dict[str, Callable[[], bool]] = {
    "none": lambda: True,
    "rank": lambda: smp.rank() == 0,
    "rdp_rank": lambda: smp.rdp_rank() == 0,
    "dp_rank": lambda: smp.dp_rank() == 0,
    "pp_rank": lambda: smp.pp_rank() == 0,
    "tp_rank": lambda: smp.tp_rank() == 0,
}


def trained() -> tuple[Any, Any]:
    """Model and optimizer after one step."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    smp.set_partition(module[1], smp.pp_size() - 1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))

    @smp.step
    def train(x: Tensor) -> Tensor:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    train(torch.full((2, 2), float(smp.rank())))
    optimizer.step()
    return model, optimizer


def check_guards(calls: dict[str, Callable[[], Any]], table: dict[tuple[str, str], set[int] | None]) -> None:
    """For each (call, guard): it works (None), or each rank that calls is told which of the set it lacks."""
    for (call, guard), missing in table.items():
        if GUARDS[guard]():
            error = None
            try:
                calls[call]()
            except CommError as caught:
                error = str(caught)
            if missing is None:
                assert error is None, f"{call} under {guard}: {error}"
            else:
                assert error is not None, f"{call} under {guard} worked on rank {smp.rank()}"
                named = re.search(r"missing ranks \[([\d, ]+)\]", error)
                assert named is not None, error
                assert {int(rank) for rank in named[1].split(", ")} <= missing, error
        smp.barrier()


@on_ranks(4, config=TENSOR_DATA)
def test_guards_with_tensor_parallelism():
    """Ranks 0 1 are one replica, 2 3 the other: a guard that takes one of a pair is an error that names its twin."""
    model, optimizer = trained()
    with shared_directory() as directory, short_wait():
        calls = calls_of(model, optimizer, directory)
        table: dict[tuple[str, str], set[int] | None] = {}
        for call in ("state_dict", "optimizer_state_dict", "save"):
            table |= {(call, guard): None for guard in ("none", "rdp_rank")}
            table |= {(call, guard): {1, 3} for guard in ("rank", "dp_rank", "tp_rank")}
        for call in ("load_state_dict", "load_optimizer", "save_checkpoint", "resume"):
            table |= {(call, "none"): None, (call, "rdp_rank"): {2, 3}, (call, "rank"): {1, 2, 3}}
        table |= {("local_state_dict", guard): None for guard in GUARDS}
        table |= {("whole", guard): None for guard in GUARDS}
        check_guards(calls, table)


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
@on_ranks(4, config=PIPELINE_DATA, launcher=lambda arguments: arguments["launcher"])
def test_guards_with_a_pipeline(launcher):
    """Ranks 0 1 are one replica, 2 3 the other; without tensor parallelism `dp_rank() == 0` is a whole replica."""
    model, optimizer = trained()
    with shared_directory() as directory, short_wait():
        calls = calls_of(model, optimizer, directory)
        table: dict[tuple[str, str], set[int] | None] = {}
        for call in ("state_dict", "save"):
            table |= {(call, guard): None for guard in ("none", "rdp_rank", "dp_rank")}
            table |= {(call, guard): {1, 3} for guard in ("rank", "pp_rank")}
        for call in ("save_v3", "load_state_dict"):
            table |= {(call, "none"): None, (call, "rdp_rank"): {2, 3}, (call, "pp_rank"): {1, 3}}
        check_guards(calls, table)


@on_ranks(4, config={**TENSOR_DATA, "shard_optimizer_state": True})
def test_guards_with_sharded_optimizer_state():
    """What is gathered from the owners needs all of them; what one rank has does not, nor do the model's weights."""
    model, optimizer = trained()
    with shared_directory() as directory, short_wait():
        calls = calls_of(model, optimizer, directory)
        table: dict[tuple[str, str], set[int] | None] = {("state_dict", "rdp_rank"): None}
        for call in ("optimizer_state_dict", "local_optimizer", "save_v3"):
            table |= {(call, "none"): None, (call, "rdp_rank"): {2, 3}, (call, "rank"): {1, 2, 3}}
        table |= {("owned", guard): None for guard in GUARDS}
        check_guards(calls, table)


def calls_of(model: Any, optimizer: Any, directory: Any) -> dict[str, Callable[[], Any]]:
    return {
        "state_dict": model.state_dict,
        "local_state_dict": model.local_state_dict,
        "load_state_dict": lambda: model.load_state_dict(model.local_state_dict()),
        "optimizer_state_dict": optimizer.state_dict,
        "local_optimizer": optimizer.local_state_dict,
        "owned": lambda: optimizer.local_state_dict(gather_if_shard=False),
        "load_optimizer": lambda: optimizer.load_state_dict(optimizer.local_state_dict()),
        "save_checkpoint": lambda: smp.save_checkpoint(directory, "c", model=model, optimizer=optimizer),
        "resume": lambda: smp.resume_from_checkpoint(directory),
        "save": lambda: smp.save(model.local_state_dict(), directory / "m"),
        "save_v3": lambda: smp.save(optimizer.local_state_dict(gather_if_shard=False), directory / "o", v3=True),
        "whole": lambda: smp.save([1], directory / "w", partial=False),
    }


class short_wait:
    """Inside, missing ranks are given up after a second."""

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("SMP_GUARD_TIMEOUT", "1")

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


@on_ranks(4, config=TENSOR_DATA)
def test_slow_ranks_are_waited_for():
    """Ranks of one replica may be seconds apart; only those that never come are an error."""
    model, _ = trained()
    if smp.rank() == 1:
        time.sleep(1.5)
    assert "1.weight" in model.state_dict()


SCRIPT = """
import time
import smp, torch

smp.init({"tensor_parallel_degree": 2, "ddp": True})
model = smp.DistributedModel(torch.nn.Linear(2, 2))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
smp.barrier()
if smp.rank() == 0:
    begin = time.monotonic()
    try:
        CALL
    except smp.CommError:
        print("seconds:", time.monotonic() - begin, flush=True)
        raise
OTHERWISE
"""


def run(call: str, otherwise: str, **env: str) -> str:
    """Rank 0 of 4 makes the call alone; the job's output."""
    result = launch(SCRIPT.replace("CALL", call).replace("OTHERWISE", otherwise), 4, env=env, timeout=150)
    assert result.returncode != 0
    return result.stdout


def seconds_in(output):
    """How long the call took, as the script has printed it."""
    seconds = re.search(r"seconds: ([\d.]+)", output)
    assert seconds is not None
    return float(seconds[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    ["model.state_dict()", "optimizer.state_dict()", "smp.save(model.local_state_dict(), 'm')"],
)
def test_a_collective_call_on_rank_0_alone_names_the_missing_ranks_within_20_seconds(call):
    """Guards for the 'main process' around a collective hang for an hour elsewhere."""
    output = run(call, "time.sleep(100)")
    assert "is collective over the ranks [0, 1]: entered by ranks [0], missing ranks [1]" in output
    assert "if smp.rdp_rank() == 0" in output
    assert seconds_in(output) < 20


@pytest.mark.slow
@pytest.mark.parametrize("call", ["smp.save_checkpoint('c', 't', model=model)", "smp.resume_from_checkpoint('c')"])
def test_a_checkpoint_on_rank_0_alone_names_the_missing_ranks_within_20_seconds(call):
    """All ranks have a part in it; scripts that knew one file per job guard it."""
    output = run(call, "time.sleep(100)")
    assert "collective over the ranks [0, 1, 2, 3]: entered by ranks [0], missing ranks [1, 2, 3]" in output
    assert "on all ranks, under no condition" in output
    assert seconds_in(output) < 20


@pytest.mark.slow
def test_the_error_says_where_the_missing_ranks_are():
    """The line of the other branch is what a user has to change."""
    output = run("model.state_dict()", "smp.barrier()", SMP_GUARD_TIMEOUT="6")
    assert "rank 1 in" in output
    assert "train.py:" in output


@pytest.mark.slow
def test_ranks_that_have_left_are_named_at_once():
    """There is no need to wait for a rank whose program has ended."""
    output = run("model.state_dict()", "", SMP_GUARD_TIMEOUT="60")
    assert "exited while" in output
    assert seconds_in(output) < 20
