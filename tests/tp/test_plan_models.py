"""Models of `transformers` split by the plan in their configuration, against one process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from tests.harness import on_ranks
from tests.parity.compare import Setup, check
from tests.parity.models import loss_of, text
from tests.parity.zoo import Case

transformers = pytest.importorskip("transformers")

VOCABULARY = 38
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}


def model(family: str, config_class: str = "", **options: Any) -> Callable[[], nn.Module]:
    """A tiny causal language model of that family."""

    def build() -> nn.Module:
        config = getattr(transformers, config_class or f"{family}Config")(**{**SIZES, **options})
        config._experts_implementation = "eager"  # the kernel that newer versions prefer knows no float64
        return getattr(transformers, f"{family}ForCausalLM")(config)

    return build


def windows(**options: Any) -> dict[str, Any]:
    return {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 4, **options}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": model("Llama"),
    "llama-biases-tied": model("Llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=8),
    "mistral": model("Mistral", sliding_window=4, head_dim=8),
    "qwen2": model("Qwen2", use_sliding_window=True, max_window_layers=1, sliding_window=4),
    "qwen3": model("Qwen3", head_dim=8),
    "gemma": model("Gemma", head_dim=8),
    "gemma2": model("Gemma2", query_pre_attn_scalar=4, **windows()),
    "gemma3": model("Gemma3", "Gemma3TextConfig", query_pre_attn_scalar=4, **windows()),
    "phi": model("Phi", qk_layernorm=True, partial_rotary_factor=0.5),
    "phi3": model("Phi3"),
    "granite": model("Granite", attention_multiplier=0.3, residual_multiplier=0.5),
    "olmo": model("Olmo", clip_qkv=0.05),
    "olmo2": model("Olmo2"),
    "cohere": model("Cohere", use_qk_norm=True, logit_scale=0.5),
    "starcoder2": model("Starcoder2", residual_dropout=0.0, embedding_dropout=0.0, sliding_window=4),
    "glm": model("Glm", head_dim=4),
    "mixtral": model("Mixtral", num_local_experts=4),
    "qwen3_moe": model(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, head_dim=4, norm_topk_prob=True
    ),
}


@contextmanager
def all_in_float64() -> Iterator[None]:
    """These models compute norms, routers and softmaxes in float32, in which 1e-9 cannot be compared."""
    to, to_float, softmax, zeros = Tensor.to, Tensor.float, F.softmax, torch.zeros

    def wide(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            if function is softmax:
                kwargs.pop("dtype", None)
            widened = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
            return function(*(torch.float64 if value is torch.float32 else value for value in args), **widened)

        return call

    Tensor.to, Tensor.float, F.softmax, torch.zeros = wide(to), Tensor.double, wide(softmax), wide(zeros)
    try:
        yield
    finally:
        Tensor.to, Tensor.float, F.softmax, torch.zeros = to, to_float, softmax, zeros


MORE = {
    "mixtral-balanced": model("Mixtral", num_local_experts=4, output_router_logits=True),
    "mixtral-many-heads": model("Mixtral", num_key_value_heads=4),
    "phi3-many-heads": model("Phi3", num_key_value_heads=4),
}
PLACES = [("model.embed_tokens", 0), ("model.layers.0", 0), ("model.layers.1", 0.5), ("lm_head", 0.5)]


def case(name: str) -> Case:
    build = MORE[name] if name in MORE else MODELS[name]
    return Case(build, text, PLACES, loss_of)


def marked(module: nn.Module) -> None:
    smp.set_tensor_parallelism(module)


def run(name: str, **setup: Any) -> None:
    with all_in_float64():
        check(case(name), Setup(**{"microbatches": 2, "dtype": torch.float64, **setup}), prepare=marked)


@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@pytest.mark.parametrize("name", [*MODELS, "mixtral-balanced"])
@on_ranks(2, timeout=180)
def test_models_train_over_two_parts(name, prescaled):
    """Losses, gradients and weights after two steps."""
    run(name, tp=2, prescaled=prescaled)


@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@pytest.mark.parametrize("name", ["llama", "olmo2", "mixtral-many-heads", "phi3-many-heads"])
@on_ranks(4, timeout=180)
def test_models_train_over_four_parts(name, prescaled):
    """With two heads of keys and values attentions stay whole, MLPs do not."""
    run(name, tp=4, prescaled=prescaled)


@pytest.mark.parametrize("name", ["llama-biases-tied", "gemma2", "qwen3", "mixtral-balanced"])
@on_ranks(4, timeout=180)
def test_models_train_over_two_parts_and_two_stages(name):
    """Placed by hand with joined batches, automatically with a shared one."""
    run(name, tp=2, pp=2)
    run(name, tp=2, pp=2, auto=True, prescaled=True)


def checkpointed(module: Any) -> None:
    marked(module)
    for layer in module.model.layers:
        smp.set_activation_checkpointing(layer)


def checkpointed_by_transformers(module: Any) -> None:
    marked(module)
    module.gradient_checkpointing_enable()


@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@pytest.mark.parametrize("prepare", [checkpointed, checkpointed_by_transformers])
@on_ranks(4, timeout=180)
def test_models_train_with_activation_checkpointing(prepare, prescaled):
    """Layers are run again in backward, with all of their messages."""
    with all_in_float64():
        for pp in (1, 2):
            setup = Setup(tp=2, pp=pp, microbatches=2, dtype=torch.float64, prescaled=prescaled)
            check(case("llama"), setup, prepare=prepare)
