"""Calls under a condition that leaves out ranks they need: an error that names those ranks, on all that called."""

import time

import pytest

from tests.harness import launch, on_ranks

SCRIPT = """
import sys, time
import smp, torch
from smp import model_state
from tests.stateful import HandMade

smp.init({config})
model = HandMade(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), {{"1": smp.pp_size() - 1}})
save = lambda **kw: smp.save(model_state.local_state_dict(model), "m", **kw)
state_dict = lambda: model_state.full_state_dict(model)
load = lambda: model_state.load_state_dict(model, {{}}, strict=False)
if {guard}:
    {call}
    print("called on", smp.rank(), flush=True)
{otherwise}
"""

TENSOR_DATA = {"tensor_parallel_degree": 2, "ddp": True}
PIPELINE_DATA = {"pipeline_parallel_degree": 2, "ddp": True}


def run(config, guard, call, otherwise="time.sleep(30)", **env):
    begin = time.monotonic()
    script = SCRIPT.format(config=config, guard=guard, call=call, otherwise=otherwise)
    return launch(script, 4, env=env, timeout=60), time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("call", ["state_dict()", "save()"])
def test_a_collective_call_on_rank_0_alone_names_the_missing_ranks_within_20_seconds(call):
    """Guards for the 'main process' around a collective hang for an hour elsewhere."""
    result, seconds = run(TENSOR_DATA, "smp.rank() == 0", call)
    assert result.returncode != 0
    assert "is collective over the ranks [0, 1]: entered by ranks [0], missing ranks [1]" in result.stdout
    assert "if smp.rdp_rank() == 0" in result.stdout
    assert seconds < 20 + 10, "the job should end with the error; starting it takes the rest"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "guard", "call", "missing"),
    [
        (TENSOR_DATA, "smp.dp_rank() == 0", "state_dict()", "missing ranks [1]"),
        (PIPELINE_DATA, "smp.pp_rank() == 0", "save()", "missing ranks [1]"),
        (PIPELINE_DATA, "smp.rdp_rank() == 0", "save(v3=True)", "missing ranks [2, 3]"),
        (PIPELINE_DATA, "smp.rdp_rank() == 0", "load()", "missing ranks [2, 3]"),
        (PIPELINE_DATA, "smp.pp_rank() == 1", "smp.load('m')", "missing ranks [0]"),
    ],
)
def test_guards_outside_the_contract_are_errors(config, guard, call, missing):
    """Each row of the table has guards that leave out ranks; none may hang, none may work by halves."""
    result, _ = run(config, guard, call, SMP_GUARD_TIMEOUT="2")
    assert result.returncode != 0
    assert missing in result.stdout
    assert "called on" not in result.stdout


@pytest.mark.slow
def test_the_error_says_where_the_missing_ranks_are():
    """The line of the other branch is what a user has to change."""
    result, _ = run(TENSOR_DATA, "smp.rank() == 0", "state_dict()", "smp.barrier()", SMP_GUARD_TIMEOUT="5")
    assert result.returncode != 0
    assert "rank 1 in" in result.stdout
    assert "train.py:" in result.stdout


@pytest.mark.slow
def test_ranks_that_have_left_are_named_at_once():
    """There is no need to wait for a rank whose program has ended."""
    result, seconds = run(PIPELINE_DATA, "smp.pp_rank() == 0", "state_dict()", "")
    assert result.returncode != 0
    assert "exited while" in result.stdout
    assert seconds < 14


@on_ranks(4, config=TENSOR_DATA)
def test_slow_ranks_are_waited_for():
    """Ranks of one replica may be seconds apart; only those that never come are an error."""
    from torch import nn

    import smp
    from smp import model_state
    from tests.stateful import HandMade

    model = HandMade(nn.Linear(2, 2), {})
    if smp.rank() == 1:
        time.sleep(1.5)
    assert list(model_state.full_state_dict(model)) == ["weight", "bias"]
