"""What a user is told while a job starts, loads and saves."""

import contextlib
import io
import re
from typing import Any

import torch
from torch import Tensor, nn

import smp
from smp import log
from tests.harness import on_ranks
from tests.pp.reference import start

PHASES = ["trace", "partition", "the first step", "gathering the model's state", "loading the model's state"]
PHASES += ["smp.save", "smp.load"]


def trained(num_layers: int, num_steps: int) -> Any:
    start(2, microbatches=4)
    model = smp.DistributedModel(nn.Sequential(*[nn.Linear(8, 8) for _ in range(num_layers)]))

    @smp.step
    def train(x: Tensor) -> Tensor:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    for _ in range(num_steps):
        train(torch.randn(8, 8))
    return model


@on_ranks(2)
def test_every_phase_that_takes_long_says_when_it_ended_on_rank_0(tmp_path):
    """a10-3: a user who sees nothing cannot tell waiting from hanging. Here every phase counts as long."""
    usual, log.LONG = log.LONG, 0.0
    try:
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            model = trained(4, 4)
            model.load_state_dict(model.state_dict())
            smp.save(model.local_state_dict(), str(tmp_path / "part"), partial=True)
            smp.load(str(tmp_path / "part"), partial=True)
    finally:
        log.LONG = usual
    said = stderr.getvalue()
    for phase in PHASES:
        ended = re.findall(rf"rank 0\] {re.escape(phase)}: ended after [\d.]+ s", said)
        assert bool(ended) == (smp.rank() == 0), f"{phase}: {said}"
    if smp.rank() == 0:
        assert len(re.findall("the first step: ended", said)) == 1, "only the first step is announced"
        assert re.search(r"the first step took [\d.]+ s, -?[\d.]+ s more than the third", said)


@on_ranks(2)
def test_the_first_step_of_two_hundred_layers_costs_little_beyond_the_third():
    """a10-3: trace, partition and plan of a deep model, all of the first step, under 20 s more than the third."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        trained(200, 3)
    if smp.rank() == 0:
        found = re.search(r"first step took ([\d.]+) s, (-?[\d.]+) s more than the third", stderr.getvalue())
        assert found is not None and float(found[2]) < 20, stderr.getvalue()
