"""Masks of every kind on the way to other stages, and objects that cannot travel."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp
from smp import runtime
from smp.errors import StepError
from tests.harness import on_ranks
from tests.parity.compare import Setup, check
from tests.parity.zoo import VOCABULARY, WIDTH, Block, Case

LENGTH = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.block = nn.Linear(WIDTH, 3 * WIDTH), Block()

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        if isinstance(mask, dict):
            mask = mask["attention"]["full"]
        if mask is not None and mask.dtype == torch.int64:
            mask = mask.bool()
        q, k, v = (t[:, None] for t in self.qkv(x).chunk(3, dim=-1))
        return self.block(x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0])


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])

    def forward(self, ids: Tensor, mask: Any = None) -> Tensor:
        hidden = self.embedding(ids)
        if isinstance(mask, Tensor) and mask.is_floating_point():
            mask = mask * 1.0  # an operation of glue code on it
        for layer in self.layers:
            hidden = layer(hidden, mask=mask)
        return F.cross_entropy(F.linear(hidden, self.embedding.weight).flatten(0, 1), ids.flatten())


class Renamed(Masked):
    """The same under another name: no class may be treated by its name."""


PLACES = [("embedding", 0), ("layers.0", 0), ("layers.1", 0.6), ("layers.2", 0.9)]


def visible(rows: int) -> Tensor:
    """[rows, 1, LENGTH, LENGTH] bool: padding at the front, different per row."""
    start = torch.arange(rows) % 3
    padding = torch.arange(LENGTH)[None, :] >= start[:, None]
    return (padding[:, None, None, :] | torch.eye(LENGTH, dtype=torch.bool)).contiguous()


KINDS = {
    "bool": visible,
    "int64": lambda rows: visible(rows).long(),
    "additive": lambda rows: torch.zeros(rows, 1, LENGTH, LENGTH).masked_fill(~visible(rows), -1e9),
    "none": lambda rows: None,
    "dict": lambda rows: {"attention": {"full": visible(rows), "window": None}, "length": LENGTH},
}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_masks_of_every_kind_reach_every_stage(kind):
    """The loss and gradients of one process; and the class's name plays no part."""

    def batch(rows: int, generator: torch.Generator) -> dict[str, Any]:
        ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
        return {"ids": ids, "mask": KINDS[kind](rows)}

    for cls in (Masked, Renamed):
        check(Case(cls, batch, PLACES), Setup(pp=2, microbatches=3, passes=1))


class Opaque:
    """Holds a tensor where nobody looks for one."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask


class TakesOpaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Opaque) -> Tensor:
        return self.linear(x) * mask.mask


class MakesOpaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), TakesOpaque()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden, mask=Opaque(hidden.sigmoid())).sum()


@on_ranks(2, config={"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0})
def test_an_object_with_a_hidden_tensor_is_refused_by_name():
    """Its tensor lies on one stage and cannot be found to be sent: the user must hear which argument that is."""
    module = MakesOpaque()
    smp.set_partition(module.second, 1)
    model = smp.DistributedModel(module)

    @smp.step
    def train(x: Tensor) -> Tensor:
        loss = model(x)
        model.backward(loss)
        return loss

    with pytest.raises(StepError, match="mask") as caught:
        train(torch.randn(2, WIDTH))
    assert "Opaque" in str(caught.value)


@pytest.mark.parametrize("stages", [1, 2])
@on_ranks(2, config=None)
def test_an_object_that_hides_a_batch_is_refused_at_the_first_call(stages):
    """Every microbatch would get the whole of it: the user must hear which argument that is, on every rank alike."""
    runtime.reset()
    smp.init({"pipeline_parallel_degree": stages, "microbatches": 2, "ddp": True})
    model = smp.DistributedModel(nn.Sequential(Scaled(), nn.Linear(WIDTH, WIDTH)))

    def body(x: Tensor, settings: Any) -> Tensor:
        loss = model((x, settings[0].mask)).sum()
        model.backward(loss)
        return loss

    x, mask = torch.randn(4, WIDTH), torch.rand(4, 1)
    with pytest.raises(StepError, match=r"argument 'settings' .* Opaque .*'mask' .*\(4, 1\)"):
        smp.step(body)(x, [Opaque(mask)])
    train = smp.step(body, non_split_inputs=["settings"])
    train(x, [Opaque(torch.rand(1, 1))])
    smp.step(body)(x, [Opaque(torch.rand(1, 1))])  # nothing as long as the batch


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        x, mask = both
        return super().forward(x) * mask
