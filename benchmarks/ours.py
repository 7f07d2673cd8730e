"""Sides that run smp. Each function builds a training step and returns it with the losses of the first steps."""

from collections.abc import Callable
from typing import Any

import torch

import smp
from benchmarks import models

WARM_UP = 3  # steps, run at building
RATE = 0.05
Built = tuple[Callable[[], Any], list[float]]


def _stage_of_block(index: int, layers: int, stages: int) -> int:
    return index * stages // layers


def _split_by_hand(model: models.GPT, stages: int) -> None:
    """Equal numbers of blocks, the embedding first, the norm and the head last."""
    smp.set_partition(model.embedding, 0)
    for index, block in enumerate(model.blocks):
        smp.set_partition(block, _stage_of_block(index, len(model.blocks), stages))
    smp.set_partition(model.norm, stages - 1)
    smp.set_partition(model.head, stages - 1)


@smp.step
def _train(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = models.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


def _training(model: Any, batches: list[Any]) -> Built:
    """Whole training steps: gradients to None, forward and backward, plain SGD."""
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE))
    number = 0

    def step() -> float:
        nonlocal number
        optimizer.zero_grad()
        loss = _train(model, *batches[number % len(batches)]).reduce_mean()
        optimizer.step()
        number += 1
        return float(loss)

    return step, [step() for _ in range(WARM_UP)]


def pipeline(
    sizes: dict[str, int], batch: int, microbatches: int, stages: int, split: str, config: dict[str, Any]
) -> Built:
    """The GPT over stages; `split` is `hand` or `auto`, `config` goes to smp.init."""
    smp.init({"pipeline_parallel_degree": stages, "microbatches": microbatches, **config})
    model = models.gpt(sizes)
    if split == "hand":
        _split_by_hand(model, stages)
    return _training(smp.DistributedModel(model), [models.text(sizes, batch, i) for i in range(4)])


def data_parallel(sizes: dict[str, int], batch: int, config: dict[str, Any]) -> Built:
    """The GPT on every process, each with `batch` sequences of its own."""
    smp.init({"ddp": True, **config})
    batches = [models.text(sizes, batch, 2 * i + smp.dp_rank()) for i in range(4)]
    return _training(smp.DistributedModel(models.gpt(sizes)), batches)


@smp.step
def _sleep(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).mean()
    model.backward(loss)
    return loss


def sleeping(sizes: dict[str, Any], microbatches: int, config: dict[str, Any]) -> Built:
    """One sleeping module per stage."""
    stages = sizes["stages"]
    smp.init({"pipeline_parallel_degree": stages, "microbatches": microbatches, **config})
    model = models.sleepers(sizes)
    for index, child in enumerate(model):
        smp.set_partition(child, index)
    model = smp.DistributedModel(model)
    x = torch.ones(microbatches, 64)

    def step() -> float:
        model.zero_grad()
        return float(_sleep(model, x).reduce_mean())

    return step, [step() for _ in range(WARM_UP)]
