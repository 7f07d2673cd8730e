"""Distributed attention against attention on whole weights: heads, masks, positions, dropout."""

import math

import pytest
import torch
from torch import nn

import smp
from smp import runtime
from smp.errors import PartitionError, StepError, UsageError
from smp.tp.positions import alibi_slopes
from tests.harness import on_ranks
from tests.tp.test_transformer import NO_DROPOUT, PRE, N, S, grid, hidden, on_tp, padding
from tests.tp.transformer_twin import Twin, assert_equals_twin, loss_of, randomise, setup, whole_weights
from tests.tp.twins import tp_group

SMALLEST = torch.finfo(torch.float64).min
SIZES = {"num_attention_heads": 4, "attention_head_size": 6, "hidden_size": 16}
ATTENTION_ONLY = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}

KINDS = {
    "causal": {"causal_mask_size": S},
    "rotary_halves": {"rotary_dim": 6, "causal_mask_size": 16},
    "rotary_pairs": {"rotary_dim": 4, "rotary_interleaved": True, "rotary_base": 100.0},
    "grouped": {"num_key_value_heads": 4, "num_attention_heads": 8, "causal_mask_size": 16},
    "alibi": {"use_alibi": True},
    "alibi_causal": {"use_alibi": True, "alibi_bias_max": 4, "causal_mask_size": 16},
    "window": {"causal_mask_size": 16, "attention_window": 3},
    "window_wider": {"causal_mask_size": 16, "attention_window": 64},
    "by_layer": {"scale_attn_by_layer_idx": True, "layer_idx": 2},
    "unscaled": {"scale_attention_scores": False, "use_qkv_bias": False},
    "accepted": {
        **{"fused_softmax": False, "fused_bias_gelu": True, "fused_dropout": True, "flash_attention": False},
        **{"attention_in_fp32": True, "query_key_layer_scaling": True, "fp32_residual_addition": True},
    },
}
MASKS = ["none", "padding", "bool", "square", "one_row", "by_heads"]


def make_mask(kind: str, generator: torch.Generator, num_heads: int) -> torch.Tensor | None:
    """A mask of one rank's batch; floating ones get gradients."""
    if kind == "none":
        return None
    if kind == "padding":
        return padding(generator)
    if kind == "bool":
        return padding(generator) == 0
    if kind == "square":
        return torch.randn(N, 1, S, S, generator=generator)
    if kind == "one_row":
        return torch.randn(1, 1, 1, S, generator=generator)
    return torch.randn(N, num_heads, S, S, generator=generator)


@pytest.mark.parametrize("kind", KINDS)
@grid
@on_tp()
def test_attention_equals_its_twin(tp, prescaled, optimize, kind):
    """Without a mask, where the kernel's own causal mask may be used, and with one for padding."""
    options = {**SIZES, **PRE, **KINDS[kind]}
    for mask in ("none", "padding"):
        setup(tp, prescaled, optimize)
        assert_equals_twin(
            lambda: smp.nn.DistributedAttentionLayer(**options, **ATTENTION_ONLY),
            lambda g, mask=mask: (hidden(g), make_mask(mask, g, options["num_attention_heads"])),
            lambda module, x: module(x),
            lambda w, x: run_twin(w, options, *x),
        )
    runtime.reset()


def run_twin(w, options, x, mask, ids=None):
    twin = Twin(w, **options)
    return twin.around(x, "", lambda t: twin.attention(t, mask, ids=ids))


@grid
@on_tp()
def test_masks_of_every_shape_reach_all_heads(tp, prescaled, optimize):
    """Values and gradients: of one row for all, of every pair of places, of every head; under the causal mask too."""
    for kind, causal in [(kind, causal) for kind in MASKS for causal in (None, 16)]:
        setup(tp, prescaled, optimize)
        options = {**SIZES, "causal_mask_size": causal}
        assert_equals_twin(
            lambda options=options: smp.nn.DistributedAttentionLayer(**options, **ATTENTION_ONLY),
            lambda g, kind=kind: (hidden(g), make_mask(kind, g, 4)),
            lambda module, x: module(x),
            lambda w, x, options=options: run_twin(w, options, *x),
        )
    runtime.reset()


@grid
@on_tp()
def test_positions_of_each_row_turn_its_vectors(tp, prescaled, optimize):
    """Rotary angles by position_ids, other ones in each row and on each rank."""
    setup(tp, prescaled, optimize)
    options = {**SIZES, "rotary_dim": 4, "causal_mask_size": 16}
    assert_equals_twin(
        lambda: smp.nn.DistributedAttentionLayer(**options, **ATTENTION_ONLY),
        lambda g: (hidden(g), torch.randint(0, 50, (N, S), generator=g)),
        lambda module, x: module((x[0], None), x[1]),
        lambda w, x: run_twin(w, options, x[0], None, x[1]),
    )
    runtime.reset()


@grid
@on_tp()
def test_cross_attention_equals_its_twin(tp, prescaled, optimize):
    """States of another length, which need not divide; their gradient is right."""
    for length in (8, 5):
        setup(tp, prescaled, optimize)
        options = {**SIZES, "cross_attention": True}

        def twin(w, x, options=options):
            layer = Twin(w, **options)
            return layer.around(x[0], "", lambda t: layer.attention(t, x[2], cross=x[1]))

        assert_equals_twin(
            lambda options=options: smp.nn.DistributedAttentionLayer(**options, **ATTENTION_ONLY),
            lambda g, length=length: (hidden(g), hidden(g, length), padding(g, length)),
            lambda module, x: module(x),
            twin,
        )
    runtime.reset()


@pytest.mark.parametrize("kv_heads", [1, 2])
@on_ranks(4)
def test_heads_that_do_not_divide_are_refused_by_name(kv_heads):
    """PITFALLS a1-3: never half a head; nothing is allocated before."""
    setup(4, False, "speed")
    made = []
    before = nn.Module.register_parameter
    try:
        nn.Module.register_parameter = lambda self, name, param: (made.append(name), before(self, name, param))[1]
        with pytest.raises(PartitionError, match=f"num_key_value_heads {kv_heads}: .* tensor_parallel_degree 4"):
            smp.nn.DistributedAttentionLayer(8, 8, 16, num_key_value_heads=kv_heads)
        with pytest.raises(PartitionError, match="num_attention_heads 6"):
            smp.nn.DistributedTransformerLayer(6, 8, 16, 20)
        with pytest.raises(PartitionError, match="intermediate_size 22"):
            smp.nn.DistributedTransformerOutputLayer(16, 22)
    finally:
        nn.Module.register_parameter = before
    assert made == []
    runtime.reset()


@pytest.mark.parametrize("kv_heads", [2, 4])
@on_ranks(2)
def test_grouped_heads_have_the_gradients_of_one_process(kv_heads):
    """PITFALLS a1-4: q, k and v, weights and biases, with one key head on each rank and with two."""
    for prescaled in (False, True):
        for optimize in ("speed", "memory"):
            setup(2, prescaled, optimize)
            options = {**SIZES, "num_key_value_heads": kv_heads, "causal_mask_size": 16}
            assert_equals_twin(
                lambda options=options: smp.nn.DistributedAttentionLayer(**options, **ATTENTION_ONLY),
                lambda g: (hidden(g), padding(g)),
                lambda module, x: module(x),
                lambda w, x, options=options: run_twin(w, options, *x),
            )
    runtime.reset()


@pytest.mark.parametrize("prescaled", [False, True])
@on_ranks(2)
def test_fifty_steps_of_grouped_heads_have_the_losses_of_one_process(prescaled):
    """PITFALLS a1-4: ranks that agree can agree on a wrong value, which shows after some steps."""
    setup(2, prescaled, "memory")
    options = {**SIZES, "num_key_value_heads": 2, "causal_mask_size": 16}
    layer = smp.nn.DistributedAttentionLayer(**options, **ATTENTION_ONLY).double()
    randomise(layer)
    weights = whole_weights(layer)
    model, own = smp.DistributedModel(layer), 0 if prescaled else tp_group().rank
    optimizers = [torch.optim.SGD(params, lr=0.05) for params in (model.parameters(), weights.values())]
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randn(N, S, 16, generator=generator, dtype=torch.float64) for _ in range(1 if prescaled else 2)]
    first = None
    for step in range(50):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model((batches[own], None)), own)
        loss.backward()
        losses = [loss_of(run_twin(weights, options, x, None), part) for part, x in enumerate(batches)]
        torch.stack(losses).mean().backward()
        assert float(loss) == pytest.approx(float(losses[own]), rel=1e-7), step
        first = first or float(loss)
        for optimizer in optimizers:
            optimizer.step()
    assert float(loss) < 0.9 * first
    runtime.reset()


@on_ranks(1)
def test_mistakes_are_refused_with_what_to_change():
    """Every rank alike, before any message."""
    setup(1, False, "speed")
    make = smp.nn.DistributedAttentionLayer
    for options, message in [
        ({"attention_window": 3}, "needs the causal mask"),
        ({"attention_window": 0, "causal_mask_size": 4}, "positive"),
        ({"rotary_dim": 3}, "even"),
        ({"rotary_dim": 64}, "more than attention_head_size"),
        ({"rotary_dims": 4}, "did you mean 'rotary_dim'"),
        ({"norm": "batch"}, "'layer' or 'rms'"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"pre_layernorm": False, "post_layernorm": False}, "at least one"),
        ({"scale_attn_by_layer_idx": True}, "needs layer_idx"),
        ({"single_pre_layernorm": True}, "needs parallel_attention"),
    ]:
        with pytest.raises(UsageError, match=message):
            make(4, 8, 16, **options)
    x = torch.zeros(2, 6, 16)
    layer = make(4, 8, 16, causal_mask_size=4)
    for given, message in [
        (x, "takes one tuple"),
        ((x, None, None), "3 elements"),
        ((x[0], None), "hidden states"),
        ((x, None), "longer than causal_mask_size 4"),
        ((x, torch.ones(2, 6)), "takes masks"),
        ((x, torch.ones(2, 1, 1, 6, dtype=torch.long)), "takes masks"),
        ((x, torch.ones(3, 1, 1, 6)), "mask of 3 rows"),
    ]:
        with pytest.raises(StepError, match=message):
            layer(given)
    runtime.reset()


def test_slopes_of_heads_are_those_of_the_paper():
    """A power of two, the paper's example of eight heads, and six: every second one of eight first."""
    assert alibi_slopes(8) == [2.0**-k for k in range(1, 9)]
    assert alibi_slopes(2, 4) == [2.0**-2, 2.0**-4]
    assert alibi_slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert alibi_slopes(1) == [2.0**-8]


@pytest.mark.parametrize("optimize", ["speed", "memory"])
@pytest.mark.parametrize("prescaled", [False, True])
@on_ranks(2)
def test_rows_that_see_only_masked_places_stay_finite(prescaled, optimize):
    """A row of padding alone must not turn the weights' gradients to NaN; half precision has other limits."""
    for dtype, use_alibi in [
        (torch.float32, False),
        (torch.bfloat16, True),
        (torch.float16, False),
        (torch.float16, True),
    ]:
        setup(2, prescaled, optimize)
        layer = smp.nn.DistributedAttentionLayer(**SIZES, **NO_DROPOUT, causal_mask_size=16, use_alibi=use_alibi)
        layer.to(dtype)
        for mask in (
            torch.full((N, 1, 1, S), torch.finfo(torch.float32).min),
            torch.full((N, 1, 1, S), -torch.inf),
            torch.zeros(N, 1, 1, S, dtype=torch.bool),
        ):
            layer.zero_grad()
            out = layer((torch.randn(N, S, 16, dtype=dtype), mask))
            out.float().square().sum().backward()
            assert out.isfinite().all()
            assert all(param.grad.isfinite().all() for param in layer.parameters())
    assert tp_group().size == 2
    runtime.reset()


def hiding(kind: str) -> torch.Tensor:
    """Masks under which some query of the second sentence sees nothing that is not hidden."""
    mask = torch.zeros(N, 1, 1 if kind != "one query" else S, S, dtype=torch.float64)
    mask[1, :, 1 if kind == "one query" else 0] = {"infinite": -math.inf, "milliard": -1e9}.get(kind, SMALLEST)
    if kind == "start":
        mask[1, ..., 2:] = 0
    return mask == 0 if kind == "bool" else mask


@pytest.mark.parametrize("causal", [None, 16])
@pytest.mark.parametrize("kind", ["infinite", "smallest", "milliard", "one query", "start"])
@on_ranks(2)
def test_gradients_are_right_where_a_mask_hides_everything(kind, causal):
    """A query weighs all the places that it would see alike, forward and backward; kernels get the latter wrong."""
    options, mask = {**SIZES, **PRE, "causal_mask_size": causal}, hiding(kind)
    setup(2, False, "memory")
    assert_equals_twin(
        lambda: smp.nn.DistributedAttentionLayer(**options, **ATTENTION_ONLY),
        lambda g: (hidden(g),),
        lambda module, x: module((*x, mask)),
        lambda w, x: run_twin(w, options, *x, mask.clamp(min=SMALLEST)),
    )
    runtime.reset()


@pytest.mark.parametrize("kind", ["bool", "infinite", "smallest", "one query", "start"])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("causal", [None, 16])
@on_ranks(1)
def test_the_kernel_and_the_definition_agree_where_a_mask_hides_everything(kind, alibi, causal):
    results = []
    for kernel in (True, False):
        setup(1, False, "speed")
        torch.manual_seed(0)
        options = {**SIZES, **ATTENTION_ONLY, "use_alibi": alibi, "causal_mask_size": causal}
        layer = smp.nn.DistributedAttentionLayer(**options, flash_attention=kernel).double()
        x = torch.randn(N, S, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
        out = layer((x, hiding(kind)))
        (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
        results.append([out.detach(), x.grad, *(param.grad for param in layer.parameters())])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    runtime.reset()


@pytest.mark.parametrize("kind", ["infinite", "smallest", "one query", "start"])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_has_the_gradients_of_masks_that_hide_everything(kind, causal):
    """Against the same layer with a mask that has a gradient, for which torch takes plain operations."""
    mask, results = hiding(kind), []
    for given in (mask, mask.clamp(min=SMALLEST).requires_grad_()):
        qkv = torch.randn(N, S, 3, 2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        out = smp.nn.FlashAttentionLayer(0.0)(qkv.requires_grad_(), given, causal)
        (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
        results.append((out.detach(), qkv.grad))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
