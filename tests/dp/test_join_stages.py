"""Uneven inputs of a model over stages."""

import time

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.errors import UsageError
from tests.harness import on_ranks

CONFIG = {"pipeline_parallel_degree": 2, "ddp": True}


@on_ranks(4, config=CONFIG)
def test_a_replica_that_never_has_a_batch_is_told_on_every_rank():
    """The cut into stages takes every replica: the others must not wait for one that has no reason to come."""
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))

    @smp.step
    def train(x: Tensor) -> Tensor:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    begin = time.monotonic()
    with pytest.raises(UsageError, match="Run one step on all ranks before join"), model.join():
        for _ in range(2 if smp.rdp_rank() == 0 else 0):
            train(torch.randn(2, 4))
    assert time.monotonic() - begin < 20


@on_ranks(4, config=CONFIG)
def test_replicas_of_stages_may_run_out_at_different_times():
    """Also in the steps in which the model is cut, and after one that all have run."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(x: Tensor) -> Tensor:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    for counts in ((1, 3), (2, 0)):
        with model.join():
            for number in range(counts[smp.rdp_rank()]):
                train(torch.randn(2, 4, generator=torch.Generator().manual_seed(number)))
                optimizer.step()
                optimizer.zero_grad()
        for parameter in model.local_parameters():
            mine, other = smp.allgather(parameter.detach(), smp.RDP_GROUP)
            assert torch.equal(mine, other)
