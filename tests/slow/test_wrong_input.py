"""Wrong input, as a user's script would give it: a clear error, a non-zero status, soon, and nothing left running."""

import re
import time

import pytest

from tests.harness import launch

pytestmark = pytest.mark.slow

PREAMBLE = """
import os, sys, time
import torch
from torch import nn
import smp

def began():
    print(f"began at {time.time()}", flush=True)

def start(**config):
    began()
    smp.init({"pipeline_parallel_degree": 2, "ddp": True, **config})

def make():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])

def step_of(model):
    @smp.step
    def train(x):
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss
    return train
"""

# name -> (script, class of the error, what its message must hold)
CASES: dict[str, tuple[str, str, str]] = {
    "unknown and misspelt keys": (
        'start(tensor_paralell_degree=2, microbatches="4x")',
        "ConfigError",
        r"tensor_paralell_degree.*tensor_parallel_degree(.|\n)*microbatches.*4x",
    ),
    "degrees that do not fit": ("start(pipeline_parallel_degree=3)", "ConfigError", r"pipeline_parallel_degree.*3"),
    "a feature that is still to come": ("start(_match_weights=True)", "ConfigError", r"_match_weights"),
    "a batch that does not divide": (
        "start(microbatches=4)\nstep_of(smp.DistributedModel(make()))(torch.randn(6, 4))",
        "StepError",
        r"'x' has shape \(6, 4\).*4 microbatches",
    ),
    "the model outside a step": (
        "start()\nsmp.DistributedModel(make())(torch.randn(2, 4))",
        "StepError",
        r"outside a step function.*@smp.step",
    ),
    "two models": ("start()\nsmp.DistributedModel(make())\nsmp.DistributedModel(make())", "UsageError", r"already"),
    "a placement out of range": (
        "start(auto_partition=False, default_partition=0)\nsmp.set_partition(nn.Linear(2, 2), 5)",
        "PartitionError",
        r"stage 5.*0 to 1",
    ),
    "a missing partial file": ('start()\nsmp.load("nowhere.pt", partial=True)', "CheckpointError", r"nowhere\.pt"),
    "a rank-dependent step": (
        """
start()
model = smp.DistributedModel(make())
@smp.step
def train(x):
    y = model(x)
    if smp.rank() == 1:
        y = y * 2
    loss = y.pow(2).mean()
    model.backward(loss)
began()
train(torch.randn(2, 4))
""",
        "StepError",
        r"different programs(.|\n)*pp_rank 1: .*mul at .*train\.py",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_input_ends_every_rank_with_one_clear_error(name: str) -> None:
    """A failure means a hang, a half-dead job, or a message that does not say what to do."""
    script, error, message = CASES[name]
    done = launch(PREAMBLE + script, 2, env={"SMP_DEBUG": "1"} if "rank-dependent" in name else None)
    ended = time.time()
    assert done.returncode != 0, done.stdout
    assert re.search(rf"{error}: (.|\n)*{message}", done.stdout), done.stdout
    assert len(set(re.findall(r"^\[rank (\d)\] Traceback", done.stdout, re.M))) == 1, done.stdout
    began = max(float(at) for at in re.findall(r"began at ([\d.]+)", done.stdout))
    assert ended - began < 10, done.stdout


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_an_exception_in_one_ranks_step_ends_all_with_that_traceback(launcher: str) -> None:
    """The other ranks wait for messages that never come; they must learn why, and the user sees one traceback."""
    script = """
start(microbatches=4)
model = smp.DistributedModel(make())
train = step_of(model)
train(torch.randn(4, 4))
@smp.step
def fails(x):
    y = model(x)
    if smp.rank() == 1 and y.shape[0] == 1:
        raise RuntimeError("broken on purpose")
    model.backward(y.sum())
fails(torch.randn(4, 4))
"""
    begin = time.monotonic()
    done = launch(PREAMBLE + script, 2, launcher)
    assert done.returncode != 0 and time.monotonic() - begin < 50, done.stdout
    assert len(re.findall(r"^.*RuntimeError: broken on purpose", done.stdout, re.M)) == 1, done.stdout
    assert "[rank 1] RuntimeError: broken on purpose" in done.stdout, done.stdout
