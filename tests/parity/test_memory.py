"""What a step holds while it runs, and what it leaves behind."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp
from smp import runtime
from tests.harness import on_ranks
from tests.parity.zoo import WIDTH, Block


class Deep(nn.Module):
    """Two blocks on each stage, and a value that skips the middle."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = x
        for block in self.blocks:
            hidden = block(hidden)
        return F.mse_loss(hidden + x, y)


class Saved:
    """A tensor that autograd keeps for a backward; counts how many there are."""

    live = peak = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        Saved.live += 1
        Saved.peak = max(Saved.peak, Saved.live)

    def __del__(self) -> None:
        Saved.live -= 1


def placed_model(pp: int, **config: Any) -> Any:
    runtime.reset()
    smp.init({"pipeline_parallel_degree": pp, "auto_partition": False, "default_partition": 0, **config})
    torch.manual_seed(0)
    module = Deep()
    for index, block in enumerate(module.blocks):
        smp.set_partition(block, index * pp // len(module.blocks))
    return smp.DistributedModel(module)


def step_of(model: Any) -> Any:
    @smp.step
    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        model.backward(loss)
        return loss

    return train


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def peak_of_saved(microbatches: int, **config: Any) -> int:
    """The most tensors that autograd keeps at one moment on this rank, in a step after the first."""
    model = placed_model(2, microbatches=microbatches, **config)
    train = step_of(model)
    for number in range(3):
        gc.collect()
        Saved.live = Saved.peak = 0
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            train(*batch(2 * microbatches, number))
    gc.collect()
    assert Saved.live == 0, "the step's graph is kept after it"
    return Saved.peak


@on_ranks(2)
def test_memory_does_not_rise_with_the_number_of_microbatches():
    """Only so many microbatches are under way on a stage as its schedule needs: more of them only take longer."""
    few, many = peak_of_saved(8), peak_of_saved(32)
    assert 0 < many <= few
    one = peak_of_saved(1)
    assert many <= 4 * one, "active_microbatches is partitions + 2"
    assert peak_of_saved(16, active_microbatches=2) <= 2 * one
    assert peak_of_saved(16, active_microbatches=1) <= one


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
@on_ranks(2)
def test_nothing_is_left_behind_by_a_step(pipeline):
    """What grows by a tensor a step ends a long run; the loss list of a user is not ours."""
    model = placed_model(2, microbatches=4, pipeline=pipeline)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    train = step_of(model)
    counts = {}
    for number in range(1, 51):
        train(*batch(8, number)).reduce_mean()
        optimizer.step()
        optimizer.zero_grad()
        if number in (3, 20, 50):
            counts[number] = live_tensors()
    assert counts[50] == counts[20] == counts[3], counts


@on_ranks(2)
def test_hooks_on_a_stages_input_fire_once_per_microbatch_and_step():
    """A hook that piles up from step to step would scale gradients more and more."""
    model = placed_model(2, microbatches=4)
    fired = {"input": 0, "glue": 0, "module": 0, "forward": 0}

    def count(what: str) -> Any:
        def hook(*_: Any) -> None:
            fired[what] += 1

        return hook

    def watch_input(module: nn.Module, args: Any) -> None:
        if type(args[0]) is Tensor and args[0].requires_grad:
            args[0].register_hook(count("input"))

    entered = model.module.blocks[2]  # the first of stage 1
    entered.register_forward_pre_hook(watch_input)
    entered.register_forward_hook(count("forward"))
    entered.register_full_backward_hook(count("module"))

    @smp.step
    def train(x: Tensor, y: Tensor) -> Tensor:
        first, second, third, fourth = model.module.blocks
        hidden = second(first(x))
        hidden.register_hook(count("glue"))
        loss = F.mse_loss(fourth(third(hidden)), y)
        model.backward(loss)
        return loss

    for number in range(1, 4):
        train(*batch(8, number))
        here = smp.pp_rank() == 1
        own = 4 * number if here else 0
        assert (fired["input"], fired["module"], fired["forward"]) == (own, own, own)
        assert fired["glue"] in (0, 4 * number)
    assert sum(smp.allgather(fired["glue"], smp.PP_GROUP)) == 12
