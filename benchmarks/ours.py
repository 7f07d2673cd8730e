"""Sides that run smp. Each function builds a training step and returns it with the losses of the first steps."""

from collections.abc import Callable
from typing import Any

import torch

import smp
from benchmarks import models
from smp.tp.shard import spec_of

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


def _training(model: Any, batches: list[Any], train: Any = _train) -> Built:
    """Whole training steps: gradients to None, forward and backward, plain SGD."""
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE))
    number = 0

    def step() -> float:
        nonlocal number
        optimizer.zero_grad()
        loss = train(model, *batches[number % len(batches)]).reduce_mean()
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


# Where a block of models.py has what a distributed layer has.
NAMES = {
    "attention.pre_layernorm": "norm1",
    "attention.qkv": "qkv",
    "attention.dense": "out",
    "output.pre_layernorm": "norm2",
    "output.dense1": "up",
    "output.dense2": "down",
}


@torch.no_grad()
def _take_weights(transformer: Any, blocks: Any) -> None:
    """Gives a distributed transformer this rank's part of the blocks' weights."""
    for layer, block in zip(transformer.seq_layers, blocks, strict=True):
        for name, parameter in layer.named_parameters():
            path, _, leaf = name.rpartition(".")
            whole = block.get_parameter(f"{NAMES[path]}.{leaf}")
            spec = spec_of(parameter)
            parameter.copy_(whole if spec is None else spec.split(whole))


@smp.step
def _fit(model: Any, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = (model((x, None))[0] - target).square().mean()
    model.backward(loss)
    return loss


def tensor_parallel(sizes: dict[str, int], batch: int, config: dict[str, Any]) -> Built:
    """Blocks of attention and perceptron, split over all processes, which share one batch."""
    degree = sizes["degree"]
    smp.init({"tensor_parallel_degree": degree, "ddp": True, "prescaled_batch": True, "optimize": "speed", **config})
    width = sizes["width"]
    module = smp.nn.DistributedTransformer(
        num_layers=sizes["layers"],
        num_attention_heads=width // 64,
        attention_head_size=64,
        hidden_size=width,
        intermediate_size=4 * width,
        attention_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        causal_mask_size=sizes["length"],
        pre_layernorm=True,
        post_layernorm=False,
    )
    _take_weights(module, models.blocks(sizes))
    return _training(smp.DistributedModel(module), [models.states(sizes, batch, i) for i in range(4)], _fit)


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
