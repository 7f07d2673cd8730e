"""Models of `transformers`, tiny, and a convolutional net, each with its batches and a placement by hand.

None of them is changed: `use_cache` is left on, labels go in where the model takes them. A placement cuts inside the
encoder and the decoder, where there are such.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.zoo import Case

transformers = pytest.importorskip("transformers")

VOCABULARY = 37
LENGTH = 7
CLASSES = 3
SIZES = {"vocab_size": VOCABULARY, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=4, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=4, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config)


def qwen2() -> nn.Module:
    """Takes its masks in a dict, by the kind of attention."""
    config = transformers.Qwen2Config(**SIZES, num_hidden_layers=4, num_key_value_heads=1)
    return transformers.Qwen2ForCausalLM(config)


def mixtral() -> nn.Module:
    """Each token goes to two of four experts; the loss holds the routers' balance."""
    config = transformers.MixtralConfig(
        **SIZES,
        num_hidden_layers=4,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )
    config._experts_implementation = "eager"  # the kernel that newer versions prefer knows no float64
    return transformers.MixtralForCausalLM(config)


def bert_config() -> Any:
    return transformers.BertConfig(
        **SIZES,
        num_hidden_layers=4,
        max_position_embeddings=16,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        num_labels=CLASSES,
    )


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(bert_config())


def bert_pretraining() -> nn.Module:
    """Two heads, two losses: masked words and the next sentence."""
    return transformers.BertForPreTraining(bert_config())


def bert_classifier() -> nn.Module:
    return transformers.BertForSequenceClassification(bert_config())


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    config = transformers.ViTConfig(
        **sizes,
        num_hidden_layers=4,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        num_labels=CLASSES,
    )
    return transformers.ViTForImageClassification(config)


class Bottleneck(nn.Module):
    """A residual block; where its size changes, the shortcut is a convolution of its own."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += shortcut
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(Bottleneck(8, 8, 1), Bottleneck(8, 8, 1))
        self.layer2 = nn.Sequential(Bottleneck(8, 16, 2), Bottleneck(16, 16, 1))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        hidden = self.layer2(self.layer1(self.stem(pixel_values)))
        return F.cross_entropy(self.head(torch.flatten(self.pool(hidden), 1)), labels)


def text(rows: int, generator: torch.Generator) -> dict[str, Any]:
    ids = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def unlabelled(rows: int, generator: torch.Generator) -> dict[str, Any]:
    return {name: value for name, value in text(rows, generator).items() if name != "labels"}


def sentences(rows: int, generator: torch.Generator) -> dict[str, Any]:
    return {
        **text(rows, generator),
        "token_type_ids": torch.randint(0, 2, (rows, LENGTH), generator=generator),
        "next_sentence_label": torch.randint(0, 2, (rows,), generator=generator),
    }


def classified(rows: int, generator: torch.Generator) -> dict[str, Any]:
    return {**unlabelled(rows, generator), "labels": torch.randint(0, CLASSES, (rows,), generator=generator)}


def images(rows: int, generator: torch.Generator) -> dict[str, Any]:
    pixels = torch.randn(rows, 3, 8, 8, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (rows,), generator=generator)}


def spread(pattern: str, count: int) -> list[tuple[str, float]]:
    return [(pattern.format(k), k / count) for k in range(count)]


def loss_of(output: Any) -> Tensor:
    return output.loss


def loss_outside(output: Any) -> Tensor:
    """In the step function: each place should tell its own token."""
    scores = output.logits.flatten(0, -2)
    wanted = torch.arange(scores.shape[0], device=scores.device) % VOCABULARY
    return F.cross_entropy(scores, wanted)


def layers_of(module: nn.Module) -> str:
    """Where a model keeps its layers, as a pattern: newer versions have other names."""
    return next(name for name, part in module.named_modules() if isinstance(part, nn.ModuleList)) + ".{}"


GPT2_PLACES = [("transformer.wte", 0), *spread("transformer.h.{}", 4), ("transformer.ln_f", 0.9)]
LLAMA_PLACES = [*spread("model.layers.{}", 4), ("model.norm", 0.9), ("lm_head", 0.9)]
BERT_PLACES = spread("bert.encoder.layer.{}", 4)
T5_PLACES = [("encoder.block.0", 0), ("encoder.block.1", 0.3), ("decoder.block.0", 0.6), ("decoder.block.1", 0.9)]
NO_SOFTMAX = ("key.bias", "k_proj.bias")  # the same for every key, so softmax takes it away again

TEXT_MODELS = {
    "gpt2": Case(gpt2, text, GPT2_PLACES, loss_of),
    "llama": Case(llama, text, LLAMA_PLACES, loss_of),
    "bert": Case(bert, text, [*BERT_PLACES, ("cls", 0)], loss_of, NO_SOFTMAX),
    "t5": Case(t5, text, T5_PLACES, loss_of),
}
MODELS = {
    **TEXT_MODELS,
    "gpt2_loss_outside": Case(gpt2, unlabelled, GPT2_PLACES, loss_outside),
    "mixtral": Case(mixtral, text, LLAMA_PLACES, loss_of),
    "bert_pretraining": Case(bert_pretraining, sentences, BERT_PLACES, loss_of, NO_SOFTMAX),
    "bert_classifier": Case(bert_classifier, classified, [*BERT_PLACES, ("classifier", 0.9)], loss_of, NO_SOFTMAX),
    "vit": Case(vit, images, [*spread(layers_of(vit()), 4), ("classifier", 0.9)], loss_of, NO_SOFTMAX),
    "resnet": Case(
        ResNet,
        images,
        [("stem", 0), ("layer1.0", 0), ("layer1.1.conv2", 0.3), ("layer2.0.conv1", 0.6), ("layer2.1", 0.9)],
    ),
}
