"""Distributed transformer layers against a layer on whole weights: outputs, gradients of inputs and parameters."""

import pytest
import torch

import smp
from smp import runtime
from tests.harness import on_ranks
from tests.tp.transformer_twin import Twin, assert_equals_twin, setup

SIZES = {"num_attention_heads": 4, "attention_head_size": 6, "hidden_size": 16, "intermediate_size": 20}
NO_DROPOUT = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
PRE = {"pre_layernorm": True, "post_layernorm": False}
N, S = 2, 8

LAYERS = {
    "post": {},
    "pre": PRE,
    "both": {"pre_layernorm": True},
    "causal": {**PRE, "causal_mask_size": 16, "activation": "gelu_new"},
    "gptj": {
        **{**PRE, "causal_mask_size": 16, "parallel_attention": True, "single_pre_layernorm": True},
        **{"rotary_dim": 4, "rotary_interleaved": True, "use_qkv_bias": False, "use_attention_dense_bias": False},
    },
    "neox": {**PRE, "causal_mask_size": 16, "parallel_attention": True, "rotary_dim": 2},
    "llama": {
        **{**PRE, "causal_mask_size": 16, "rotary_dim": 6, "num_key_value_heads": 4, "norm": "rms", "gated_mlp": True},
        **{"activation": "silu", "use_qkv_bias": False, "use_attention_dense_bias": False, "use_mlp_bias": False},
    },
    "no_norm_bias": {**PRE, "norm_bias": False, "activation": "quick_gelu"},
}


def grid(test):
    """Every degree, kind of batch and way to communicate."""
    test = pytest.mark.parametrize("optimize", ["speed", "memory"])(test)
    test = pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])(test)
    return pytest.mark.parametrize("tp", [1, 2, 4])(test)


def on_tp(**options):
    return on_ranks(lambda a: a["tp"], **options)


def padding(generator: torch.Generator, num_keys: int = S) -> torch.Tensor:
    """Additive [N, 1, 1, num_keys], another number of places masked in each row."""
    lengths = torch.randint(num_keys // 2, num_keys + 1, (N, 1, 1, 1), generator=generator)
    return torch.zeros(N, 1, 1, num_keys).masked_fill(torch.arange(num_keys) >= lengths, -10000.0)


def hidden(generator: torch.Generator, length: int = S) -> torch.Tensor:
    return torch.randn(N, length, SIZES["hidden_size"], generator=generator)


@pytest.mark.parametrize("kind", LAYERS)
@grid
@on_tp()
def test_layer_equals_its_twin(tp, prescaled, optimize, kind):
    """With a mask for padding, whose gradient is right too."""
    setup(tp, prescaled, optimize)
    options = {**SIZES, **LAYERS[kind]}
    assert_equals_twin(
        lambda: smp.nn.DistributedTransformerLayer(**options, **NO_DROPOUT),
        lambda g: (hidden(g), padding(g)),
        lambda module, x: module(x)[0],
        lambda w, x: Twin(w, **options).layer(*x),
    )
    runtime.reset()
