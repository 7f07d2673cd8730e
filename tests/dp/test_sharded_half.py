"""Sharded optimizer state in half precision: masters are sharded with it."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import smp
from smp import runtime
from tests.dp.sharded import RANKS, Both, assert_equal_replicas
from tests.harness import on_ranks


def weights_of(job: Both) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in job.model.local_named_parameters()}


def assert_same_weights(job: Both, expected: dict[str, Tensor]) -> None:
    """Bit for bit: two addends have the same sum in either order."""
    got = weights_of(job)
    assert got.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(got[name], value)] == []
    assert_equal_replicas(job.model)


@pytest.mark.parametrize(("half", "grid"), [("bf16", "tp"), ("fp16", "dp")])
@on_ranks(lambda arguments: RANKS[arguments["grid"]])
def test_masters_are_sharded_and_change_nothing(half: str, grid: str) -> None:
    """fp16 starts at a scale that overflows, which skips the first steps. A failure means that a master is nowhere, or
    on two ranks, that its parameter does not reach the others, or that it is lost on its way through a state dict."""
    steps, more = (range(22), range(22, 24)) if half == "fp16" else (range(3), range(3, 5))
    unsharded = Both(grid, sharded=False, half=half)
    unsharded.run_here(steps)
    expected, norm = weights_of(unsharded), unsharded.optimizer.clip_master_grads(1e9)
    masters = unsharded.optimizer.masters_by_name()

    job = Both(grid, half=half)
    job.run_here(steps)
    assert_same_weights(job, expected)
    assert job.optimizer.loss_scale == unsharded.optimizer.loss_scale
    assert job.optimizer.clip_master_grads(1e9) == pytest.approx(norm, rel=1e-6)
    mine = job.optimizer.masters_by_name()
    assert all(torch.equal(master, masters[name]) for name, master in mine.items())
    places = smp.allgather(list(mine), smp.RDP_GROUP if grid == "tp" else smp.DP_GROUP)
    cut = {name for name, param in job.model.local_named_parameters() if job.model.is_distributed_parameter(param)}
    of_group = [name for names in places for name in names if grid == "dp" or name in cut]
    assert sorted(of_group) == sorted(masters if grid == "dp" else cut)

    optimizer = job.optimizer
    states: list[dict[str, Any]] = [
        copy.deepcopy(state)
        for state in (
            optimizer.state_dict(),
            optimizer.local_state_dict(),
            optimizer.local_state_dict(gather_if_shard=False),
        )
    ]
    assert [len(state["_smp_fp32_masters"]) for state in states] == [len(masters), len(masters), len(mine)]
    weights = copy.deepcopy(job.model.state_dict())
    job.run_here(more)
    expected = weights_of(job)
    for sharded in (True, False):
        resumed = Both(grid, sharded=sharded, seed=1, half=half)
        for state in states:
            resumed.model.load_state_dict(copy.deepcopy(weights))
            resumed.optimizer.load_state_dict(copy.deepcopy(state))
            resumed.run_here(more)
            assert_same_weights(resumed, expected)
    runtime.reset()


@on_ranks(2)
def test_masters_loaded_without_the_model_reach_all_ranks() -> None:
    """Those of frozen parameters too, which no step brings to the others. A failure means that replicas differ."""
    job = Both(half="bf16")
    job.run_here(range(2))
    state, expected = job.optimizer.state_dict(), weights_of(job)
    resumed = Both(half="bf16", seed=1)
    resumed.optimizer.load_state_dict(state)
    assert_same_weights(resumed, expected)
    runtime.reset()
