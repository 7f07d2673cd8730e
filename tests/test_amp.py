"""The gradient scaler of a model spread over ranks, against torch's in one process."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp
from smp.errors import UsageError
from tests.harness import on_ranks
from tests.parity.compare import assert_close, owned_parameters, shard_of

WIDTH, ROWS, MICROBATCHES = 8, 4, 2
BASE = {"ddp": True, "auto_partition": False, "default_partition": 0, "microbatches": MICROBATCHES}
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "pp": {"pipeline_parallel_degree": 2},
    "pp, empty stage": {"pipeline_parallel_degree": 2},
    "tp": {"tensor_parallel_degree": 2},
    "tp and pp": {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2},
    "zero bubble": {"pipeline_parallel_degree": 2, "pipeline": "zero_bubble"},
    "chunks": {"pipeline_parallel_degree": 2, "virtual_stages": 2, "auto_partition": True},
    "pp and sharded": {"pipeline_parallel_degree": 2, "shard_optimizer_state": True},
}
# From 2**18 on to 2**28, which overflows; 2**-10 on the way back.
OPTIONS = {"init_scale": 2.0**8, "growth_factor": 2.0**10, "backoff_factor": 2.0**-10, "growth_interval": 2}


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    return BASE | LAYOUTS[case["layout"]]


def network(layout: str) -> nn.Sequential:
    torch.manual_seed(3)
    layers = ([nn.Linear(WIDTH, WIDTH), nn.Tanh()] for _ in range(4 if layout == "chunks" else 2))
    return nn.Sequential(*(part for layer in layers for part in layer))


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return F.mse_loss(model(x).float(), y)


def batch(step: int, parts: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(50 + step)
    return tuple(torch.randn(2, parts * MICROBATCHES * ROWS, WIDTH, generator=generator))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)  # which would unscale gradients itself


class OneProcess:
    """torch's scaler on the batches of all ranks, in the same microbatches."""

    def __init__(self, layout: str, parts: int) -> None:
        self.parts, self.module = parts, network(layout)
        self.optimizer = sgd(self.module.parameters())
        self.scaler = torch.amp.GradScaler("cpu", **OPTIONS)

    def step(self, number: int, spoil: bool) -> None:
        self.optimizer.zero_grad()
        count = self.parts * MICROBATCHES
        for x, y in zip(*(tensor.chunk(count) for tensor in batch(number, self.parts))):
            self.scaler.scale(loss_of(self.module, x, y) / count).backward()
        if spoil:
            self.module[2].weight.grad[0, 0] = math.inf
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()


@pytest.mark.parametrize("spoiled", [[], [1, 4]])
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(lambda case: 4 if " and " in case["layout"] else 2, config=config_of)
def test_training_is_that_of_one_process(layout: str, spoiled: list[int]) -> None:
    """A failure means that an overflow on one rank was not seen on another: their weights part for ever."""
    module = network(layout)
    if layout != "chunks":
        smp.set_partition(module[3 if layout == "pp, empty stage" else 2], smp.state.cfg.pipeline_parallel_degree - 1)
    smp.set_tensor_parallelism(module, smp.tp_size() > 1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()))
    scaler = smp.amp.GradScaler(**OPTIONS)
    reference = OneProcess(layout, smp.dp_size())

    @smp.step
    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        model.backward(scaler.scale(loss))
        return loss

    scales = []
    for number in range(8):
        optimizer.zero_grad()
        train(*(tensor.chunk(smp.dp_size())[smp.dp_rank()] for tensor in batch(number, smp.dp_size())))
        mine = [param for param in model.local_parameters() if param.grad is not None]
        # On one rank only: the last that has a parameter.
        if number in spoiled and smp.rank() == (0 if layout == "pp, empty stage" else smp.size() - 1):
            mine[0].grad.view(-1)[0] = math.inf
        before = [param.detach().clone() for param in mine]
        scaler.unscale_(optimizer)
        smp.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        reference.step(number, number in spoiled)
        scales.append(scaler.get_scale())
        assert scaler.state_dict() == reference.scaler.state_dict(), f"step {number}"
        skipped = number > 0 and scales[-1] < scales[-2]
        assert all(torch.equal(a, b) == skipped for a, b in zip(before, mine)), f"step {number}"
    if not spoiled:
        assert 2.0**28 in scales[:-1], f"no overflow by itself: {scales}"
    # Gradients have an error of 2**-11 each time they are rounded to float16; eight steps of size 0.05 at most.
    expected = dict(reference.module.named_parameters())
    for name, param in owned_parameters(model):
        assert_close(param.detach(), shard_of(param, expected[name]), 1e-3, name)


@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_everything_a_step_returns_can_be_scaled() -> None:
    """Scripts scale losses outside of the step function too, for their reports."""
    scaler = smp.amp.GradScaler(init_scale=4.0)
    output = smp.StepOutput([torch.ones(()), torch.full((), 2.0)])
    scaled = scaler.scale((output, [torch.ones(2)]))
    assert isinstance(scaled, tuple)
    assert [float(value) for value in scaled[0].outputs] == [4.0, 8.0]
    assert scaled[1][0].tolist() == [4.0, 4.0]
    assert smp.amp.GradScaler(enabled=False).scale(output) is output


@on_ranks(2, config={"ddp": True})
def test_its_state_is_torchs() -> None:
    """A failure means that a checkpoint of the scaler does not continue, here or under torch."""
    first = smp.amp.GradScaler(**OPTIONS)
    first.load_state_dict(first.state_dict() | {"scale": 32.0, "_growth_tracker": 1})
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(copy.deepcopy(first).state_dict())
    assert other.state_dict() == first.state_dict() and other.get_scale() == 32.0


@on_ranks(2, config={"ddp": True})
def test_a_scaler_that_would_let_ranks_drift_apart_is_refused() -> None:
    """torch's scaler decides on each rank for itself: a failure means that weights part for ever, silently."""
    module = nn.Linear(2, 2)
    model = smp.DistributedModel(module)
    for fused in (False, True):
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused))
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        with pytest.raises(UsageError, match=r"use smp\.amp\.GradScaler"):
            scaler.step(optimizer)


@pytest.mark.parametrize("key", ["fp16", "bf16"])
@on_ranks(1, config=lambda case: {case["key"]: True})
def test_beside_half_precision_parameters_it_is_refused(key: str) -> None:
    """Their masters get no gradients until `step`: a failure means that gradients are never unscaled."""
    with pytest.raises(UsageError, match=f"'{key}': True parameters are in half precision"):
        smp.amp.GradScaler()
    assert not smp.amp.GradScaler(enabled=not smp.state.cfg.fp16 and not smp.state.cfg.bf16).is_enabled()
