"""Activation checkpointing where modules live on stages, and where tensor parallelism replaces them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp import PartitionError
from smp.activation import is_checkpointed
from smp.patches.checkpoint import checkpoint
from tests.harness import on_ranks
from tests.logs import log_lines
from tests.pp.reference import WIDTH, Net, linear, start, vectors, wrap

# -- stages ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_groups_end_where_stages_do() -> None:
    """Modules that run as one node have to live on one stage. Members without parameters go with those before them."""
    for strategy, want in (
        ("contiguous", [(0, 3), (3, 5), (5, 6)]),
        ("group_2", [(0, 2), (2, 3), (3, 5), (5, 6)]),
        ("each", []),
    ):
        start(2, auto_partition=False, default_partition=0)
        body = nn.Sequential(linear(seed=1), nn.Tanh(), linear(seed=2), linear(seed=3), nn.Tanh(), linear(seed=4))
        smp.set_activation_checkpointing(body, strategy=strategy)
        model = wrap(Net(lambda net, x: net.body(x).sum(), body=body), {"body.3": 1})

        @smp.step
        def train(x: Tensor, model: Any = model) -> None:
            model.backward(model(x))

        train(vectors(2)["x"].float())
        groups = model.engine.stages._groups
        assert sorted(groups.values()) == sorted(tuple(f"body.{k}" for k in range(*ends)) for ends in want)


@on_ranks(2)
def test_a_module_split_by_hand_is_refused() -> None:
    """No stage could run it again alone. Before any work, on every rank, with the module's name and the stages."""
    message = r"module 'body' is to be checkpointed, .* \(stage 0: 0; stage 1: 1\)\. Place all of it on one stage"
    for auto in (False, True):
        for early in (True, False):
            start(2, auto_partition=auto, default_partition=0)
            body = nn.ModuleDict({"body": Pair()})
            net = Net(lambda net, x: net.body(x).sum(), body=body["body"])
            if early:
                smp.set_activation_checkpointing(net.body)
            model = wrap(net, {"body.0": 0, "body.1": 1})

            @smp.step
            def train(x: Tensor, model: Any = model) -> None:
                model.backward(model(x))

            if early:
                with pytest.raises(PartitionError, match=message):
                    train(vectors(2)["x"].float())
            else:
                train(vectors(2)["x"].float())
                with pytest.raises(PartitionError, match=message):
                    smp.set_activation_checkpointing(net.body)
                assert not is_checkpointed(net.body)
                smp.set_activation_checkpointing(net.body[0])
                train(vectors(2)["x"].float())


class Pair(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__([linear(seed=1), linear(seed=2)])

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x))


@on_ranks(2)
def test_a_module_split_by_the_partition_is_left_alone_with_a_warning() -> None:
    """Nobody chose that split, so it is no error; the result is the same."""
    start(2)
    body = Pair()
    smp.set_activation_checkpointing(body)
    model = smp.DistributedModel(Net(lambda net, x: checkpoint(net.body, net.body(x)).sum(), body=body))

    @smp.step
    def train(x: Tensor) -> None:
        model.backward(model(x))

    with log_lines() as warnings:
        train(vectors(2)["x"].float())
    found = [text for text in warnings if "'body' is not checkpointed, because the partition has split it" in text]
    assert len(found) == 1


# -- tensor parallelism ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class DistributedBlock(smp.nn.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = smp.nn.DistributedLinear(WIDTH, WIDTH)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.inner(x)


@on_ranks(2, config={"tensor_parallel_degree": 2, "ddp": True})
def test_marks_on_modules_that_are_split() -> None:
    """A mark moves to the module that takes the place of another one; those inside it are lost with a warning. A call
    of `checkpoint` ahead of all that leaves no trace."""
    smp.tp_register_with_module(Block, DistributedBlock)
    net = nn.Sequential(Block(), Block(), linear())
    checkpoint(net[0], torch.randn(2, WIDTH)).sum().backward()
    assert "forward" not in net[0].__dict__
    smp.set_tensor_parallelism(net[0])
    smp.set_tensor_parallelism(net[1])
    smp.set_activation_checkpointing(net[0])
    smp.set_activation_checkpointing(net[1].inner)  # type: ignore[arg-type]
    with log_lines() as warnings:
        model = smp.DistributedModel(net)
    assert [type(part) for part in net[:2]] == [DistributedBlock, DistributedBlock]
    assert [is_checkpointed(part) for part in net] == [True, False, False]
    assert sum("inner of '1' was marked for activation checkpointing" in text for text in warnings) == 1
    model(torch.randn(2, WIDTH)).sum().backward()
    assert [net[0].runs, net[1].runs] == [2, 1]
    smp.set_activation_checkpointing(net[1])  # once the model is made
    model(torch.randn(2, WIDTH)).sum().backward()
    assert [net[0].runs, net[1].runs] == [4, 3]
