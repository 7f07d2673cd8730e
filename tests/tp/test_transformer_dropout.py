"""Random numbers of distributed transformer layers: equal where ranks hold the same, different where they do not."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import smp
from smp import runtime
from smp.comm import collectives
from tests.harness import on_ranks
from tests.tp.transformer_twin import Twin, close, loss_of, randomise, setup, whole_weights
from tests.tp.twins import tp_group

N, S, H = 2, 8, 16
SIZES = {"num_attention_heads": 4, "attention_head_size": 6, "hidden_size": H, "intermediate_size": 20}
PRE = {"pre_layernorm": True, "post_layernorm": False}
DROPOUT = {"attention_dropout_prob": 0.5, "hidden_dropout_prob": 0.5}
MODES = [("speed", False), ("speed", True), ("memory", False), ("memory", True)]


@contextmanager
def recorded() -> Iterator[list[tuple[str, Tensor]]]:
    """The masks that are drawn, in order: "hidden", and "attention" out of a kernel written in plain operations."""
    masks: list[tuple[str, Tensor]] = []
    plain, kernel = F.dropout, F.scaled_dot_product_attention

    def drawn(x: Tensor, p: float) -> Tensor:
        return torch.empty_like(x.detach()).bernoulli_(1 - p) / (1 - p)

    def dropout(x: Tensor, p: float) -> Tensor:
        masks.append(("hidden", drawn(x, p)))
        return x * masks[-1][1]

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, p: float = 0.0, **options: Any) -> Tensor:
        if p == 0.0:
            return kernel(q, k, v, mask, **options)
        probabilities = torch.softmax(q @ k.transpose(-1, -2) * options["scale"], -1)
        masks.append(("attention", drawn(probabilities, p)))
        return (probabilities * masks[-1][1]) @ v

    F.dropout, F.scaled_dot_product_attention = dropout, attention  # type: ignore[assignment]
    try:
        yield masks
    finally:
        F.dropout, F.scaled_dot_product_attention = plain, kernel


def of_all(mask: Tensor, kind: str, optimize: str, prescaled: bool) -> Tensor:
    """The masks of all ranks as one of the whole joined batch."""
    if kind == "attention":
        return collectives.all_gather(mask, tp_group(), 1)
    if optimize == "speed":
        return mask
    return collectives.all_gather(mask, tp_group(), 1 if prescaled else 0)


class Replaying(Twin):
    """The twin, with masks that were recorded."""

    def __init__(self, w: dict[str, Tensor], masks: list[tuple[str, Tensor]], **options: Any) -> None:
        super().__init__(w, **options)
        self.masks = masks

    def around(self, x: Tensor, name: str, change: Any) -> Tensor:
        return super().around(x, name, lambda t: self._dropped(change(t), "hidden"))

    def attention(self, x: Tensor, mask: Any, name: str = "", cross: Any = None, ids: Any = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.d)).transpose(1, 2) for t in self.linear(x, f"{name}qkv").chunk(3, -1))
        probabilities = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(self.d), -1)
        context = self._dropped(probabilities, "attention") @ v
        return self.linear(context.transpose(1, 2).flatten(2), f"{name}dense")

    def layer(self, x: Tensor, mask: Any, name: str = "", *others: Any, **ids: Any) -> Tensor:
        if not self.o.get("parallel_attention"):
            return super().layer(x, mask, name)
        first, second = (self.norm(x, f"{name}{half}.pre_layernorm") for half in ("attention", "output"))
        change = self._dropped(self.attention(first, mask, f"{name}attention."), "hidden")
        return x + change + self._dropped(self.mlp(second, f"{name}output."), "hidden")

    def _dropped(self, x: Tensor, kind: str) -> Tensor:
        drawn, mask = self.masks.pop(0)
        assert drawn == kind
        return x * mask


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
@on_ranks(lambda a: a["tp"])
def test_recorded_masks_replayed_give_the_same_gradients(tp, in_step, parallel):
    """Every mask counts once and in its place, in each mode."""
    torch.set_default_dtype(torch.float64)
    try:
        for optimize, prescaled in MODES:
            setup(tp, prescaled, optimize)
            options = {**SIZES, **PRE, "parallel_attention": parallel}
            module = smp.nn.DistributedTransformer(2, **options, **DROPOUT)
            randomise(module)
            weights = whole_weights(module)
            model = smp.DistributedModel(module)
            generator = torch.Generator().manual_seed(4)
            parts = [torch.randn(N, S, H, generator=generator) for _ in range(1 if prescaled else tp)]
            own = 0 if prescaled else tp_group().rank
            torch.manual_seed(9)
            with recorded() as masks:
                out = run(model, parts[own], own, in_step)
            twin = Replaying(
                weights, [(kind, of_all(mask, kind, optimize, prescaled)) for kind, mask in masks], **options
            )
            want = torch.cat(parts)
            for index in range(2):
                want = twin.layer(want, None, f"seq_layers.{index}.")
            assert twin.masks == []
            wanted = want.chunk(len(parts))
            torch.stack([loss_of(each, index) for index, each in enumerate(wanted)]).mean().backward()
            close(out, wanted[own], 1e-9, "output")
            for name, param in module.named_parameters():
                spec, grad = getattr(param, "_smp_shard", None), weights[name].grad
                assert grad is not None
                close(param.grad, spec.split(grad) if spec else grad, 1e-9, name)
    finally:
        torch.set_default_dtype(torch.float32)
        runtime.reset()


def run(model: Any, x: Tensor, part: int, in_step: bool) -> Tensor:
    """Forward and backward; the output."""
    if not in_step:
        out = model((x, None))[0]
        loss_of(out, part).backward()
        return out.detach()

    @smp.step
    def train(x: Tensor) -> Tensor:
        out = model((x, None))[0]
        model.backward(loss_of(out, part))
        return out

    return train(x).concat().detach()


@pytest.mark.parametrize("in_step", [False, True])
@on_ranks(2)
def test_masks_differ_exactly_where_data_differ(in_step):
    """PITFALLS a1-1: on what all ranks hold they are equal, on heads and parts of their own different; also when
    tp_rank 0 alone draws between steps. Every step draws anew."""
    for optimize, prescaled in MODES:
        setup(2, prescaled, optimize)
        model = smp.DistributedModel(smp.nn.DistributedTransformer(1, **SIZES, **PRE, **DROPOUT))
        torch.manual_seed(5)
        seen = []
        for _ in range(2):
            with recorded() as masks:
                run(model, torch.randn(N, S, H, generator=torch.Generator().manual_seed(1)), 0, in_step)
            if tp_group().rank == 0:
                torch.rand(7)
            for kind, mask in masks:
                first, second = collectives.all_gather(mask.unsqueeze(0), tp_group())
                assert torch.equal(first, second) == (kind == "hidden" and optimize == "speed")
            seen.append(masks)
        assert len(seen[0]) == len(seen[1]) == 3
        for (_, first), (_, second) in zip(*seen):
            assert not torch.equal(first, second)
    runtime.reset()


@pytest.mark.parametrize("in_step", [False, True])
@on_ranks(2)
def test_checkpointed_layers_draw_their_masks_again(in_step):
    """The gradient is that of the masks of the first run."""
    for optimize, prescaled in MODES:
        for options in ({}, {"parallel_attention": True}):
            gradients = []
            for checkpointed in (False, True):
                setup(2, prescaled, optimize)
                module = smp.nn.DistributedTransformer(2, **SIZES, **PRE, **DROPOUT, **options)
                randomise(module)
                if checkpointed:
                    for layer in module.seq_layers:
                        smp.set_activation_checkpointing(layer)
                model = smp.DistributedModel(module)
                torch.manual_seed(5)
                run(model, torch.randn(N, S, H, generator=torch.Generator().manual_seed(1)), 0, in_step)
                gradients.append([param.grad for param in module.parameters()])
            for kept, again in zip(*gradients):
                assert torch.equal(kept, again)
    runtime.reset()


@on_ranks(2)
def test_evaluation_draws_nothing():
    """Neither a mask nor a seed: a script's own random numbers go on as they were."""
    for optimize, prescaled in MODES:
        setup(2, prescaled, optimize)
        module = smp.nn.DistributedTransformer(1, **SIZES, **DROPOUT).eval()
        x = torch.randn(N, S, H, generator=torch.Generator().manual_seed(1))
        before = torch.get_rng_state()
        first, second = module((x, None))[0], module((x, None))[0]
        assert torch.equal(before, torch.get_rng_state())
        assert torch.equal(first, second)
    runtime.reset()
