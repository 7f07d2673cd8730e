"""Sides that run torch alone, as its documentation says. Same models, batches, optimizer and losses as ours.py."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn.parallel import DistributedDataParallel

from benchmarks import models

WARM_UP = 3  # steps, run at building
RATE = 0.05
Built = tuple[Callable[[], Any], list[float]]

# Which stages each rank has when there are two per rank.
LOOPED, V = "looped", "v"
STYLES = {
    "ScheduleInterleaved1F1B": LOOPED,
    "ScheduleInterleavedZeroBubble": LOOPED,
    "ScheduleZBVZeroBubble": V,
    "ScheduleDualPipeV": V,
}


class _Stage(nn.Module):
    """The part of a GPT from block `first` up to block `last`, with the embedding or the head where it has them."""

    def __init__(self, model: models.GPT, first: int, last: int) -> None:
        super().__init__()
        self.embedding = model.embedding if first == 0 else None
        self.blocks = nn.ModuleList(list(model.blocks)[first:last])
        is_end = last == len(model.blocks)
        self.norm = model.norm if is_end else None
        self.head = model.head if is_end else None

    def forward(self, x: Tensor) -> Tensor:
        """Text or hidden states -> hidden states or logits."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def _stages_of(rank: int, world: int, schedule: str) -> list[int]:
    if schedule not in STYLES:
        return [rank]
    return [rank, 2 * world - 1 - rank] if STYLES[schedule] == V else [rank, world + rank]


def _scheduled(
    modules: list[nn.Module], indices: list[int], count: int, schedule: str, microbatches: int, loss: Any
) -> Any:
    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(module, i, count, device) for module, i in zip(modules, indices)]
    cls = getattr(pipelining, schedule, None) or getattr(pipelining.schedules, schedule)
    return cls(stages if schedule in STYLES else stages[0], microbatches, loss_fn=loss)


def _trained(modules: list[nn.Module], indices: list[int], count: int, schedule: Any, batches: list[Any]) -> Built:
    """Whole training steps: gradients to None, forward and backward, plain SGD."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    has_first, has_last = 0 in indices, count - 1 in indices
    number = 0

    def step() -> float:
        nonlocal number
        x, y = batches[number % len(batches)]
        optimizer.zero_grad()
        losses: list[Tensor] = []
        arguments: dict[str, Any] = {"target": y, "losses": losses} if has_last else {}
        schedule.step(*([x] if has_first else []), **arguments, return_outputs=False)
        optimizer.step()
        number += 1
        return float(torch.stack(losses).mean()) if losses else float("nan")

    return step, [step() for _ in range(WARM_UP)]


def pipeline(sizes: dict[str, int], batch: int, microbatches: int, schedule: str) -> Built:
    """The GPT over the world's processes under one of torch's schedules."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    indices = _stages_of(rank, world, schedule)
    count = world * len(indices)
    model, layers = models.gpt(sizes), sizes["layers"]
    modules: list[nn.Module] = [_Stage(model, i * layers // count, (i + 1) * layers // count) for i in indices]
    runner = _scheduled(modules, indices, count, schedule, microbatches, models.cross_entropy)
    return _trained(modules, indices, count, runner, [models.text(sizes, batch, i) for i in range(4)])


def data_parallel(sizes: dict[str, int], batch: int) -> Built:
    """The GPT under DistributedDataParallel with its defaults."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(models.gpt(sizes))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    batches = [models.text(sizes, batch, 2 * i + dist.get_rank()) for i in range(4)]
    number = 0

    def step() -> float:
        nonlocal number
        x, y = batches[number % len(batches)]
        optimizer.zero_grad()
        loss = models.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        number += 1
        return float(loss)

    return step, [step() for _ in range(WARM_UP)]


def _mean(x: Tensor, target: Tensor) -> Tensor:
    return x.mean()


def sleeping(sizes: dict[str, Any], microbatches: int, schedule: str) -> Built:
    """One sleeping module per stage."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    modules: list[nn.Module] = [models.sleepers(sizes)[rank]]
    runner = _scheduled(modules, [rank], world, schedule, microbatches, _mean)
    x = torch.ones(microbatches, 64)
    return _trained(modules, [rank], world, runner, [(x, x)])
