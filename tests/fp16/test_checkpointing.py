"""Activation checkpointing in half precision: whatever is computed a second time is computed as the first time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp import runtime
from tests.fp16.net import NUM_CLASSES, SIZE, batch, train_step
from tests.fp16.test_parity import DYNAMIC
from tests.harness import on_ranks

STEPS = 7
SCALE = {**DYNAMIC, "dynamic_loss_args": {"init_scale": 2.0**17}}


class Deep(nn.Module):
    """ids [N, S] -> logits [N, S, classes], with dropout, its first and last weight tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CLASSES, SIZE)
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.2), nn.LayerNorm(SIZE)) for _ in range(4))
        )
        self.head = nn.Linear(SIZE, NUM_CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(ids)))


def ends(module: Deep) -> None:
    for part in (module.embedding, module.body[0][0], module.body[3], module.head):
        smp.set_activation_checkpointing(part)


WAYS: dict[str, Callable[[Deep], None]] = {
    "none": lambda module: None,
    "each": lambda module: smp.set_activation_checkpointing(module.body),
    "groups": lambda module: smp.set_activation_checkpointing(module.body, strategy="group_2"),
    "ends": ends,
}


def trained(way: str, config: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor], int]:
    """Losses, scales and norms of all steps, the masters at the end, and how many steps were skipped."""
    runtime.reset()
    smp.init(config)
    torch.manual_seed(3)
    module = Deep()
    for number, part in enumerate([module.embedding, *module.body, module.head]):
        smp.set_partition(part, number // 3 if smp.pp_size() > 1 else 0)
    WAYS[way](module)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), **(SCALE if smp.state.cfg.fp16 else {})
    )
    torch.manual_seed(7)
    seen, skipped = [], 0
    for number in range(STEPS):
        optimizer.zero_grad()
        losses = train_step(model, *batch(number)).stack().tolist()
        seen.append((losses, optimizer.loss_scale, optimizer.clip_master_grads(1.0)))
        optimizer.step()
        skipped += optimizer.overflow
    masters = {name: master.clone() for name, master in optimizer.masters_by_name().items()}
    runtime.reset()
    return seen, masters, skipped


@pytest.mark.parametrize("half", ["fp16", "bf16"])
@pytest.mark.parametrize("pp", [1, 2])
@on_ranks(lambda arguments: arguments["pp"])
def test_it_changes_no_bit(pp: int, half: str) -> None:
    """Steps that are skipped included. A failure means that the second run is cast, scaled or dropped otherwise than
    the first, so its gradients are those of another forward."""
    config = {"pipeline_parallel_degree": pp, "microbatches": 2, "auto_partition": False, "default_partition": 0}
    config |= {half: True, "pipeline": "zero_bubble" if half == "bf16" else "interleaved"}
    seen, masters, skipped = trained("none", config)
    assert half == "bf16" or 1 <= skipped < STEPS - 2
    for way in list(WAYS)[1:]:
        got, got_masters, _ = trained(way, {**config, "offload_activations": way == "groups"})
        assert got == seen, way
        assert all(torch.equal(master, masters[name]) for name, master in got_masters.items()), way
