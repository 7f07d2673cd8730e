"""A small job on any degrees, in the test world's own processes, one after another."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import smp
from smp import runtime
from tests.parity.compare import Setup, build, job_batch, rows_of
from tests.parity.test_tensor_parallel import split_everything
from tests.parity.zoo import ZOO

SHAPE = ZOO["encoder_decoder"]
ROWS = 8  # of the whole job's batch


def grid(pp: int = 1, tp: int = 1, microbatches: int = 2, **config: Any) -> dict[str, Any]:
    return Setup(pp=pp, tp=tp, microbatches=microbatches).smp_config() | config


class Job:
    """A model from random weights, its optimizer (two groups), and steps on batches that any degrees share."""

    def __init__(
        self,
        config: dict[str, Any],
        dtype: torch.dtype | None = torch.float64,
        lr: float = 0.01,
        change: Callable[[nn.Module], None] = lambda module: None,
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        **scale: Any,
    ) -> None:
        runtime.reset()
        smp.init(config)
        self.dtype = dtype
        module = build(SHAPE, dtype, seed=int(torch.randint(1 << 30, ())))
        change(module)
        split_everything(module)
        for path, stage in SHAPE.stages(config["pipeline_parallel_degree"]).items():
            smp.set_partition(module.get_submodule(path), stage)
        self.model = smp.DistributedModel(module)
        named = list(self.model.module.named_parameters())
        groups = [
            {"params": [p for name, p in named if "weight" in name], "weight_decay": 0.1},
            {"params": [p for name, p in named if "weight" not in name], "weight_decay": 0.0, "lr": lr / 2},
        ]
        self.optimizer = smp.DistributedOptimizer(kind(groups, lr=lr), **scale)

        @smp.step
        def train(batch: dict[str, Any]) -> Tensor:
            loss = self.model(**batch)
            self.model.backward(loss)
            return loss

        self._train = train

    def step(self, number: int) -> Tensor:
        """One update; returns the mean loss over the whole job's batch."""
        size = ROWS // smp.dp_size()
        batch = job_batch(SHAPE, ROWS, number, self.dtype or torch.float32)
        self.optimizer.zero_grad()
        loss = self._train(rows_of(batch, size * smp.dp_rank(), size * (smp.dp_rank() + 1))).reduce_mean().detach()
        self.optimizer.step()
        return torch.stack(smp.allgather(loss.double(), smp.DP_GROUP)).mean()

    def steps(self, *numbers: int) -> list[Tensor]:
        return [self.step(number) for number in numbers]

    def save(self, path: Any, tag: str, **options: Any) -> None:
        smp.save_checkpoint(path, tag, model=self.model, optimizer=self.optimizer, **options)


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (got, want)


def assert_close(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-9) -> None:
    assert torch.allclose(torch.stack(got), torch.stack(want), rtol=tolerance, atol=0), (got, want)
