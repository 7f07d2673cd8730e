"""Tensors from elsewhere in glue code, and what models keep on the side."""

from typing import Any

import pytest
import torch
from torch import Tensor

import smp
from smp.errors import StepError
from tests.harness import on_ranks
from tests.pp.reference import Net, linear, start, vectors, wrap


@on_ranks(2)
def test_a_tensor_with_a_history_of_its_own_is_refused():
    """Its gradient would be lost without a word; detached, it is a constant, the same on every rank."""
    outside = torch.ones(1, requires_grad=True, dtype=torch.float64) * 2
    start(2)
    net = Net(lambda net, x, more: net.b(net.a(x)).sum() + more[0], a=linear(), b=linear(seed=1)).double()
    model = wrap(net, {"a": 0, "b": 1})

    @smp.step
    def train(batch: dict[str, Any], more: list[Any]) -> Tensor:
        loss = model(batch["x"], [held() for held in more])
        model.backward(loss.sum())
        return loss

    with pytest.raises(StepError, match="its gradient would be lost"):
        train(vectors(2), [lambda: outside])
    train(vectors(2), [lambda: outside.detach()])
