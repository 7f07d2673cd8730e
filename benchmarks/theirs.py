"""Sides that run torch alone, as its documentation says. Same models, batches, optimizer and losses as ours.py."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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


class _Separate(nn.Module):
    """models.Block with query, key and value as linears of their own: what `parallelize_module` can cut as it is, each
    along its rows, that is, along heads."""

    def __init__(self, block: models.Block) -> None:
        super().__init__()
        self.norm1, self.norm2, self.out = block.norm1, block.norm2, block.out
        self.up, self.down = block.up, block.down
        width = block.qkv.in_features
        self.size = width // block.heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        with torch.no_grad():
            for name, parameter in block.qkv.named_parameters():
                for linear, part in zip((self.q, self.k, self.v), parameter.chunk(3)):
                    linear.get_parameter(name).copy_(part)

    def queries_keys_values(self, x: Tensor) -> Any:
        """[batch, length, width] -> three times [batch, own heads, length, size]."""
        return (f(x).unflatten(2, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width], or own part of the length -> the same shape."""
        q, k, v = self.queries_keys_values(self.norm1(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class _Fused(_Separate):
    """One linear for all three, its rows reordered by head, so that a cut along rows is one along heads."""

    def __init__(self, block: models.Block) -> None:
        super().__init__(block)
        del self.q, self.k, self.v
        self.qkv = block.qkv
        with torch.no_grad():
            for parameter in self.qkv.parameters():
                by_head = parameter.unflatten(0, (3, block.heads, -1)).transpose(0, 1)
                parameter.copy_(by_head.reshape(parameter.shape).clone())

    def queries_keys_values(self, x: Tensor) -> Any:
        """As above."""
        return self.qkv(x).unflatten(2, (-1, 3, self.size)).transpose(1, 3).unbind(1)


def _parallelize(model: nn.Module, mesh: Any, sequence: bool) -> None:
    """As the tensor-parallel tutorial of torch does."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    along, whole = Shard(1), Replicate()
    columns, rows, norm = ColwiseParallel(), RowwiseParallel(), None
    if sequence:
        columns, rows = ColwiseParallel(input_layouts=along), RowwiseParallel(output_layouts=along)
        norm = SequenceParallel()
        entry = PrepareModuleInput(input_layouts=whole, desired_input_layouts=along, use_local_output=True)
        parallelize_module(model, mesh, entry)
        parallelize_module(model, mesh, PrepareModuleOutput(output_layouts=along, desired_output_layouts=whole))
    styles = {"norm1": norm, "norm2": norm, "out": rows, "down": rows}
    plan: dict[str, Any] = {name: style for name, style in styles.items() if style is not None}
    plan |= dict.fromkeys(("q", "k", "v", "qkv", "up"), columns)
    for block in model.children():
        parallelize_module(block, mesh, {name: style for name, style in plan.items() if hasattr(block, name)})


def tensor_parallel(sizes: dict[str, int], batch: int, sequence: bool, fused: bool) -> Built:
    """Blocks of attention and perceptron as DTensors, which share one batch.

    `sequence`: norms on parts of it. `fused`: query, key and value are one linear whose rows were reordered for this.
    """
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    kind = _Fused if fused else _Separate
    model = nn.Sequential(*(kind(block) for block in models.blocks(sizes)))  # type: ignore[arg-type]
    _parallelize(model, mesh, sequence)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    batches = [models.states(sizes, batch, i) for i in range(4)]
    number = 0

    def step() -> float:
        nonlocal number
        x, target = batches[number % len(batches)]
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
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
