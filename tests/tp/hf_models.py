"""Encoders of `transformers`, tiny, that differ in the switches of their configurations, and how to compare them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp
from tests.parity.compare import Setup, check
from tests.parity.models import CLASSES, LENGTH, VOCABULARY, images, loss_of, text
from tests.parity.zoo import Case

transformers = pytest.importorskip("transformers")

LAYERS = 2
WIDTH = 16
SIZES = {"num_attention_heads": 2, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": LAYERS}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def check_split(case: Case, setup: Setup) -> None:
    """Training with everything marked, against one process."""
    check(case, setup, prepare=smp.set_tensor_parallelism)


# Both kinds of batches, both ways to communicate.
_TWO = [pytest.param(False, "memory", id="joined-memory"), pytest.param(True, "speed", id="prescaled-speed")]
_OTHERS = [(False, "speed", "joined-speed"), (True, "memory", "prescaled-memory")]
_SLOW = [pytest.param(*mode, id=name, marks=pytest.mark.slow) for *mode, name in _OTHERS]
TWO_MODES = pytest.mark.parametrize(("prescaled", "optimize"), _TWO)
MODES = pytest.mark.parametrize(("prescaled", "optimize"), [*_TWO, *_SLOW])


def setup_of(prescaled: bool, optimize: str, **options: Any) -> Setup:
    config = {"optimize": optimize, **options.pop("config", {})}
    return Setup(**{"tp": 2, "dtype": torch.float64, "prescaled": prescaled, "config": config, **options})


@contextmanager
def dropout_by_value() -> Iterator[None]:
    """Dropout drops by value, so that whole and split models drop the same: what is compared is where it stands, and
    with which probability."""

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        kept = (torch.sin(x.detach().double() * 1e4) + 1) / 2 >= p
        return torch.where(kept, x / (1 - p), 0)

    with patch.object(F, "dropout", dropout):
        yield


# BERT and RoBERTa


def bert_config(kind: str = "Bert", **switches: Any) -> Any:
    sizes = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "num_labels": CLASSES}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **NO_DROPOUT, **switches})
    for name in ("_attn_implementation", "output_attentions"):
        if name in switches:
            setattr(config, name, switches[name])
    return config


def bert(head: str, **switches: Any) -> Callable[[], nn.Module]:
    """A builder of a model; `head` as in `BertForMaskedLM`."""
    kind = "Roberta" if head.startswith("Roberta") else "Bert"
    return lambda: getattr(transformers, head)(bert_config(kind, **switches))


def sentences(rows: int, generator: torch.Generator) -> dict[str, Any]:
    """Some rows are padded at their end, some are not: a mask may be left out where nothing is padded."""
    ids = torch.randint(2, VOCABULARY, (rows, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, CLASSES, (rows,), generator=generator)}


def with_sentence_types(rows: int, generator: torch.Generator) -> dict[str, Any]:
    types = torch.randint(0, 2, (rows, LENGTH), generator=generator)
    return {**sentences(rows, generator), "token_type_ids": types}


def unmasked(rows: int, generator: torch.Generator) -> dict[str, Any]:
    return {name: value for name, value in sentences(rows, generator).items() if name != "attention_mask"}


def translated_text(rows: int, generator: torch.Generator) -> dict[str, Any]:
    """For decoders with cross attention: what an encoder has made of another sentence of another length."""
    states = torch.randn(rows, LENGTH - 1, WIDTH, generator=generator)
    mask = torch.ones(rows, LENGTH - 1, dtype=torch.long)
    mask[0, -1] = 0
    return {
        **text(rows, generator),
        "encoder_hidden_states": states,
        "encoder_attention_mask": mask,
    }


BERT_PLACES = [("bert.encoder.layer.0", 0.0), ("bert.encoder.layer.1", 0.5)]
ROBERTA_PLACES = [("roberta.encoder.layer.0", 0.0), ("roberta.encoder.layer.1", 0.5)]
# The masks that transformers makes for decoders on torch's kernels do not fit into float64.
DECODER = {"is_decoder": True, "use_cache": False, "_attn_implementation": "eager"}
CROSS = {**DECODER, "add_cross_attention": True}
BERTS = {
    "classifier": Case(bert("BertForSequenceClassification"), with_sentence_types, BERT_PLACES, loss_of),
    "masked words": Case(bert("BertForMaskedLM"), text, [*BERT_PLACES, ("cls", 0.0)], loss_of),
    "decoder": Case(bert("BertLMHeadModel", **DECODER), text, [*BERT_PLACES, ("cls", 0)], loss_of),
    "cross attention": Case(bert("BertLMHeadModel", **CROSS), translated_text, [*BERT_PLACES, ("cls", 0)], loss_of),
    "unused cross attention": Case(bert("BertLMHeadModel", **CROSS), text, [*BERT_PLACES, ("cls", 0)], loss_of),
    "no mask": Case(bert("BertForSequenceClassification"), unmasked, BERT_PLACES, loss_of),
    "eager": Case(bert("BertForSequenceClassification", _attn_implementation="eager"), sentences, BERT_PLACES, loss_of),
    "relu, another epsilon": Case(
        bert("BertForSequenceClassification", hidden_act="relu", layer_norm_eps=0.01), sentences, BERT_PLACES, loss_of
    ),
}
ROBERTAS = {
    "classifier": Case(bert("RobertaForSequenceClassification"), sentences, ROBERTA_PLACES, loss_of),
    "masked words": Case(bert("RobertaForMaskedLM"), text, [*ROBERTA_PLACES, ("lm_head", 0.0)], loss_of),
    "tanh approximation": Case(
        bert("RobertaForSequenceClassification", hidden_act="gelu_new"), sentences, ROBERTA_PLACES, loss_of
    ),
}

# ViT


def vit(**switches: Any) -> Callable[[], nn.Module]:
    config = transformers.ViTConfig(
        **{**SIZES, **NO_DROPOUT, "image_size": 8, "patch_size": 4, "num_labels": CLASSES, **switches}
    )
    return lambda: transformers.ViTForImageClassification(config)


VIT_LAYERS = "vit.encoder.layer" if transformers.__version__.startswith("4.") else "vit.layers"
VIT_PLACES = [(f"{VIT_LAYERS}.0", 0.0), (f"{VIT_LAYERS}.1", 0.5), ("classifier", 0.5)]
VITS = {
    "classifier": Case(vit(), images, VIT_PLACES, loss_of),
    "no bias, relu": Case(vit(qkv_bias=False, hidden_act="relu", layer_norm_eps=0.01), images, VIT_PLACES, loss_of),
}

# T5


def t5(kind: str = "T5", **switches: Any) -> Callable[[], nn.Module]:
    """A builder of an encoder and decoder of two blocks each; `kind`: T5, MT5 or UMT5."""
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 4, "d_ff": 32, "num_layers": LAYERS, "num_heads": 2}
    # Few buckets, so that most are used: exact ones, logarithmic ones and the last one.
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 5}
    switches = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False, **switches}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **buckets, **switches})
    return lambda: getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def two_texts(rows: int, generator: torch.Generator) -> dict[str, Any]:
    """A target that is shorter than its source."""
    batch = text(rows, generator)
    return {**batch, "labels": torch.randint(1, VOCABULARY, (rows, LENGTH - 2), generator=generator)}


T5_PLACES = [("encoder.block.0", 0.0), ("encoder.block.1", 0.5), ("decoder.block.0", 0.5), ("decoder.block.1", 0.5)]
T5_INSIDE = [("encoder.block.0", 0.0), ("encoder.block.1", 0.0), ("decoder.block.0", 0.0), ("decoder.block.1", 0.5)]
T5S = {
    "tied": Case(t5(), two_texts, T5_PLACES, loss_of),
    "gated, untied": Case(t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False), two_texts, T5_INSIDE, loss_of),
    "gated silu, wide heads": Case(t5(feed_forward_proj="gated-silu", d_kv=12), two_texts, T5_PLACES, loss_of),
    "mt5": Case(t5("MT5"), two_texts, T5_PLACES, loss_of),
    "umt5": Case(t5("UMT5"), two_texts, T5_PLACES, loss_of),
}
