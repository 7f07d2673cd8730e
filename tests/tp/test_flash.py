"""FlashAttentionLayer and FusedLayerNorm against what their formulas say."""

import math

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.nn import DistributedAttentionLayer, FlashAttentionLayer, FusedLayerNorm
from smp.tp.positions import alibi_slopes
from tests.harness import on_ranks

N, S, HEADS, SIZE = 2, 5, 3, 4


def written_out(
    qkv: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float = 1.0, alibi: bool = False
) -> Tensor:
    """Attention with every intermediate result."""
    query, key, value = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    scores = query @ key.transpose(-1, -2) * scale
    if alibi:
        distance = (torch.arange(S)[:, None] - torch.arange(S)[None]).abs()
        scores = scores - torch.tensor(alibi_slopes(HEADS), dtype=qkv.dtype).view(HEADS, 1, 1) * distance
    if causal:
        scores = scores + torch.full((S, S), -math.inf, dtype=qkv.dtype).triu(1)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ value


def masks() -> dict[str, Tensor | None]:
    padding = torch.zeros(N, 1, 1, S, dtype=torch.float64)
    padding[0, ..., -2:] = -10000.0
    seen = torch.ones(N, 1, S, S, dtype=torch.bool)
    seen[1, :, 1:, 0] = False
    return {"none": None, "padding": padding, "bool": seen, "float32": padding.float()}


def random_qkv() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(N, S, 3, HEADS, SIZE, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("mask", masks())
def test_attention_equals_the_formula(mask, causal, alibi):
    """Outputs [N, heads, S, d] and gradients, for every kind of mask together with every other one."""
    layer = FlashAttentionLayer(0.0, use_alibi=alibi)
    got, want = random_qkv(), random_qkv()
    out = layer(got, masks()[mask], causal)
    expected = written_out(want, masks()[mask], causal, 1 / math.sqrt(SIZE), alibi)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    for value in (out, expected):
        (value * torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view(value.shape)).sum().backward()
    torch.testing.assert_close(got.grad, want.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 0.5),
        ({"attention_head_size": SIZE}, 0.5),
        ({"scale_attention_scores": False}, 1.0),
        ({"scale_attn_by_layer_idx": True, "layer_idx": 2}, 0.5 / 3),
        ({"scale_attn_by_layer_idx": True, "layer_idx": 0}, 0.5),
        ({"scale_attn_by_layer_idx": True, "layer_idx": 2, "scale_attention_scores": False}, 1 / 3),
        ({"layer_idx": 2}, 0.5),
        ({"scale": 0.3}, 0.3),
        ({"scale": 0.3, "scale_attn_by_layer_idx": True, "layer_idx": 2}, 0.3),
        ({"triton_flash_attention": True}, 0.5),
    ],
)
def test_scores_are_scaled_as_asked(options, scale):
    """By the head size, by the layer's number, by both, or by a given number alone."""
    out = FlashAttentionLayer(0.0, **options)(random_qkv())
    torch.testing.assert_close(out, written_out(random_qkv(), scale=scale), rtol=1e-9, atol=1e-9)


def test_dropout_is_on_probabilities_in_training_only():
    """Its mean over many draws is attention without dropout."""
    layer = FlashAttentionLayer(0.5)
    qkv = random_qkv().detach()
    plain = written_out(qkv, scale=0.5)
    torch.testing.assert_close(layer.eval()(qkv), plain)
    layer.train()
    torch.manual_seed(1)
    draws = torch.stack([layer(qkv) for _ in range(4000)])
    assert not torch.equal(draws[0], draws[1])
    # values are of order 1, so the mean of 4000 draws is within 5 / sqrt(4000) of the truth
    torch.testing.assert_close(draws.mean(0), plain, rtol=0, atol=5 / math.sqrt(4000))


def test_half_precision_attention_rounds_little():
    """bf16 inputs, with distances that bf16 does not have: within a few roundings (2^-8) of the exact result."""
    layer = FlashAttentionLayer(0.0, use_alibi=True)
    qkv = random_qkv().detach().bfloat16()
    want = written_out(qkv.double(), masks()["padding"], True, 0.5, alibi=True)
    got = layer(qkv, masks()["padding"], causal=True)
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).norm() / want.norm() < 4 * 2.0**-8


@on_ranks(1, config={})
def test_alibi_in_half_precision_tells_places_apart():
    """Over 512 places distances count in hundreds; as bf16 numbers, neighbours among those are equal."""
    torch.manual_seed(0)
    layer = DistributedAttentionLayer(
        *(4, 8, 32, 0.0, 0.0), use_alibi=True, causal_mask_size=512, pre_layernorm=True, post_layernorm=False
    )
    layer.dense.weight.data *= 100  # what the attention adds is much more than its input
    x = torch.randn(1, 512, 32).bfloat16()
    layer.bfloat16()
    got = layer((x, None)).double()
    want = layer.double()((x.double(), None))
    assert (got - want).norm() / want.norm() < 4 * 2.0**-8


def test_slopes_are_those_of_the_paper():
    """Eight heads as printed there; for twelve those of eight and every second one of sixteen."""
    eight = [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(8) == eight
    assert alibi_slopes(12) == eight + [2.0 ** (-0.5 * i) for i in (1, 3, 5, 7)]
    assert alibi_slopes(1) == [2.0**-8]
    assert alibi_slopes(2, 4.0) == [0.25, 0.0625]


def test_wrong_arguments_of_attention_are_refused():
    """With what was given."""
    with pytest.raises(smp.SmpError, match="layer_idx"):
        FlashAttentionLayer(scale_attn_by_layer_idx=True)
    with pytest.raises(smp.SmpError, match="attention_dropout_prob is 2"):
        FlashAttentionLayer(2.0)
    with pytest.raises(smp.SmpError, match=r"3, heads, 8\], got \(2, 5, 3, 3, 4\)"):
        FlashAttentionLayer(attention_head_size=8)(random_qkv())
    with pytest.raises(smp.SmpError, match="qkv must be"):
        FlashAttentionLayer()(torch.zeros(2, 5, 4, 3, 4))


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}, {"eps": 0.1}])
def test_fused_layer_norm_is_torchs(options):
    """Bit by bit, with the same state dict."""
    for dtype in (torch.float64, torch.float32):
        fused, plain = FusedLayerNorm((2, 4), **options).to(dtype), nn.LayerNorm((2, 4), **options).to(dtype)
        for param in fused.parameters():
            nn.init.normal_(param)
        plain.load_state_dict(fused.state_dict())
        x = torch.randn(3, 2, 4, dtype=dtype)
        assert torch.equal(fused(x), plain(x))


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
@pytest.mark.parametrize("weights", [torch.float32, None], ids=["float32", "half"])
def test_fused_layer_norm_accumulates_in_float32(dtype, rounding, weights):
    """Sums of 4096 numbers around 100: in half precision alone no digit would be right. Output and gradients keep the
    dtype of what they belong to and are within a few roundings of the exact ones."""
    torch.manual_seed(0)
    norm = FusedLayerNorm(4096).to(weights or dtype)
    x = (torch.randn(2, 4096) + 100).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    scale = torch.randn(2, 4096, dtype=torch.float64)
    out = norm(x)
    reference = nn.LayerNorm(4096, dtype=torch.float64)
    want = reference(exact)
    (out.double() * scale).sum().backward()
    (want * scale).sum().backward()
    assert (out.dtype, x.grad.dtype, norm.weight.grad.dtype) == (dtype, dtype, norm.weight.dtype)
    assert (out - want).norm() / want.norm() < rounding
    assert (x.grad - exact.grad).norm() / exact.grad.norm() < 4 * rounding
    assert (norm.weight.grad - reference.weight.grad).norm() / reference.weight.grad.norm() < 4 * rounding
