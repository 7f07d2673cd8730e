"""Errors that only one stage can see: the job ends on every rank, soon, with that stage's message."""

import pytest

from tests.harness import launch

pytestmark = pytest.mark.slow

SCRIPT = """
import torch
from torch import nn

import smp

smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), Inner()

    def forward(self, x):
        return FORWARD


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.held = []

    def forward(self, x):
        return INNER


torch.manual_seed(0)
net = Net()
smp.set_partition(net.a, 0)
smp.set_partition(net.b, 1)
model = smp.DistributedModel(net)
net.b.other = [net.a]


@smp.step
def train(batch):
    loss = model(batch["x"])
    model.backward(loss)


for step in range(3):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
    train(BATCH)
print("trained", flush=True)
"""


def run(forward: str, inner: str = "self.l(x)", batch: str = "{'x': x}") -> str:
    script = SCRIPT.replace("FORWARD", forward).replace("INNER", inner).replace("BATCH", batch)
    done = launch(script, 2, timeout=90)
    assert done.returncode != 0, done.stdout
    assert "trained" not in done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"forward": "self.b(self.a(x)).sum()", "inner": "self.l(x)[x[:, 0] > 0]"}, "another structure than before"),
        (
            {
                "forward": "[self.b.held.append(self.a(x) * 1), self.b(self.a(x)).sum()][1]",
                "inner": "self.held[-1] + x",
            },
            "uses a tensor that it was not given as an argument",
        ),
        ({"forward": "self.b(self.a(x)).sum()", "inner": "self.other[0](self.l(x))"}, "Place both on one stage"),
        (
            {"forward": "self.b(self.a(x)).sum()", "batch": "{'x': x, **({'y': x} if smp.pp_rank() else {})}"},
            "arguments of the same structure",
        ),
        (
            {
                "forward": "self.b(self.a(x)).sum() + sum(self.b.held)",
                "inner": "[self.held.append(self.l(x).sum()), self.l(x)][1]",
            },
            "kept by a hook or an attribute",
        ),
    ],
    ids=["unstable result", "hidden tensor", "module of another stage", "other arguments", "kept tensor"],
)
def test_an_error_of_one_stage_ends_the_job_with_its_reason(arguments: dict[str, str], said: str) -> None:
    """The other stages would wait for messages that never come, and the user would not learn why."""
    output = run(**arguments)
    assert said in output
    assert "StepError" in output
