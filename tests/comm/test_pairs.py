"""Moves over one process group for each ordered pair: the way of accelerators, shown here on gloo."""

from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn

import smp
from smp import runtime
from smp.comm.pairs import PairMoves, make_pair_groups, partners
from tests.harness import on_ranks


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_everybody_meets_everybody_once_and_rounds_agree(count: int) -> None:
    """A round in which two ranks expect different partners is a deadlock."""
    ranks = [10 + 3 * i for i in range(count)]
    rounds = list(zip(*(partners(ranks, rank) for rank in ranks), strict=True))
    for row in rounds:
        assert all(row[ranks.index(partner)] == rank for rank, partner in zip(ranks, row, strict=True))
    for index, rank in enumerate(ranks):
        assert sorted({row[index] for row in rounds} - {rank}) == [other for other in ranks if other != rank]


def use_pairs() -> None:
    rt = runtime.get()
    rt.moves = PairMoves(rt.transport, make_pair_groups(rt.topology, rt.rank, rt.device, timedelta(seconds=30)))


@on_ranks(4, config={"pipeline_parallel_degree": 4, "microbatches": 3})
def test_a_pipeline_over_pair_groups_equals_one_process() -> None:
    """Messages have no tags there: ends that enqueue in different orders would mix up tensors or hang."""
    use_pairs()
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            first = self.layers[0](x)
            second = self.layers[1](torch.tanh(first))
            return self.layers[0](self.layers[3](torch.tanh(self.layers[2](second) + first)))  # back to stage 0

    module, x = Net().double(), torch.randn(6, 5, dtype=torch.float64)
    reference = Net().double()
    reference.load_state_dict(module.state_dict())
    model = smp.DistributedModel(module)

    @smp.step
    def train(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss

    for _ in range(2):
        loss = train(x).reduce_mean()
        expected = reference(x).pow(2).mean()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-12)


@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_a_gradient_that_is_none_arrives_as_none() -> None:
    """Zero is not the same as None to an optimizer with weight decay."""
    use_pairs()
    moves, other = runtime.get().moves, 1 - smp.rank()
    if smp.rank() == 0:
        moves.isend_optional(None, other, 2)
        moves.isend_optional(torch.arange(3.0), other, 4)
    else:
        for tag, expected in ((2, None), (4, torch.arange(3.0))):
            request = moves.irecv_optional(torch.empty(3), other, tag)
            assert request.test()
            value = request.value()
            assert (value is None) == (expected is None)
            assert value is None or torch.equal(value, torch.arange(3.0))
    smp.barrier()
