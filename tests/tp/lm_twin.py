"""The undistributed twin of DistributedTransformerLMHead, written from its description, with the same names."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from smp.nn import DistributedTransformerLMHead
from smp.tp.shard import spec_of

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "num_attention_heads": 4,
    "attention_head_size": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "vocab_size": 13,
    "num_positions": 8,
    "attention_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "causal_mask_size": 8,
}
GPT2 = {**SIZES, "pre_layernorm": True, "post_layernorm": False}


class Attention(nn.Module):
    def __init__(self, o: dict[str, Any], cross: bool = False) -> None:
        super().__init__()
        size, inner = o["hidden_size"], o["num_attention_heads"] * o["attention_head_size"]
        self.heads, self.cross, self.causal = o["num_attention_heads"], cross, o["causal_mask_size"] and not cross
        if cross:
            self.query, self.key_value = nn.Linear(size, inner), nn.Linear(size, 2 * inner)
        else:
            self.qkv = nn.Linear(size, 3 * inner)
        self.dense = nn.Linear(inner, size)
        self.pre_layernorm = nn.LayerNorm(size) if o["pre_layernorm"] else None
        self.layernorm = nn.LayerNorm(size) if o["post_layernorm"] else None

    def forward(self, x: Tensor, states: Tensor | None, mask: Tensor | None) -> Tensor:
        normed = self.pre_layernorm(x) if self.pre_layernorm else x
        parts = (
            (self.query(normed), *self.key_value(states).chunk(2, -1)) if self.cross else self.qkv(normed).chunk(3, -1)
        )
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if self.causal:
            scores = scores + torch.full(scores.shape[-2:], -math.inf, dtype=x.dtype).triu(1)
        if mask is not None:
            scores = scores + torch.zeros(mask.shape, dtype=x.dtype).masked_fill(mask == 0, -1e30)[:, None, None, :]
        x = x + self.dense((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.layernorm(x) if self.layernorm else x


class Output(nn.Module):
    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        size, inner = o["hidden_size"], o["intermediate_size"]
        self.dense1, self.dense2 = nn.Linear(size, inner), nn.Linear(inner, size)
        self.pre_layernorm = nn.LayerNorm(size) if o["pre_layernorm"] else None
        self.layernorm = nn.LayerNorm(size) if o["post_layernorm"] else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense2(F.gelu(self.dense1(self.pre_layernorm(x) if self.pre_layernorm else x)))
        return self.layernorm(x) if self.layernorm else x


class Layer(nn.Module):
    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.attention = Attention(o)
        self.cross_attention = Attention(o, cross=True) if o["add_cross_attention"] else None
        self.output = Output(o)

    def forward(self, x: Tensor, states: Tensor | None, mask: Tensor | None, cross_mask: Tensor | None) -> Tensor:
        x = self.attention(x, None, mask)
        if self.cross_attention is not None:
            x = self.cross_attention(x, states, cross_mask)
        return self.output(x)


class Layers(nn.Module):
    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.seq_layers = nn.ModuleList(Layer(o) for _ in range(o["num_layers"]))


class TwinLMHead(nn.Module):
    """Every parameter, norms' and biases' too, starts at random."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        defaults = {"pre_layernorm": False, "post_layernorm": True, "add_cross_attention": False, "num_token_types": 0}
        o = self.o = {**defaults, **options}
        size = o["hidden_size"]
        self.word_embedding = nn.Embedding(o["vocab_size"], size)
        self.position_embedding = nn.Embedding(o["num_positions"], size) if o["num_positions"] else None
        self.token_type_embedding = nn.Embedding(o["num_token_types"], size) if o["num_token_types"] else None
        self.embedding_layernorm = nn.LayerNorm(size) if o.get("embedding_layernorm") else None
        self.transformer = Layers(o)
        self.layernorm = nn.LayerNorm(size) if o.get("final_layernorm", o["pre_layernorm"]) else None
        if o.get("add_lm_head", True):
            self.lm_head = nn.Linear(size, o["vocab_size"], bias=o.get("lm_head_bias", False))
            if o.get("tie_word_embeddings", True):
                self.lm_head.weight = self.word_embedding.weight
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, inputs: Any) -> Any:
        ids, mask, types, positions, *cross, labels = inputs
        states, cross_mask = cross or (None, None)
        x = self.word_embedding(ids)
        if self.position_embedding is not None:
            x = x + self.position_embedding(torch.arange(ids.shape[1])[None] if positions is None else positions)
        if self.token_type_embedding is not None:
            x = x + self.token_type_embedding(torch.zeros_like(ids) if types is None else types)
        if self.embedding_layernorm is not None:
            x = self.embedding_layernorm(x)
        for layer in self.transformer.seq_layers:
            x = layer(x, states, mask, cross_mask)
        if self.layernorm is not None:
            x = self.layernorm(x)
        if not self.o.get("add_lm_head", True):
            return x
        logits = self.lm_head(x)
        if labels is None:
            return logits
        if self.o.get("shift_labels", self.o["causal_mask_size"] is not None):
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def twin_of(options: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float64) -> TwinLMHead:
    torch.manual_seed(seed)
    return TwinLMHead(**options).to(dtype)


def distributed(twin: TwinLMHead, **more: Any) -> DistributedTransformerLMHead:
    """The module with the twin's weights."""
    dtype = next(twin.parameters()).dtype
    module = DistributedTransformerLMHead(**twin.o, **more).to(dtype)
    copy_weights(module, twin)
    return module


@torch.no_grad()
def copy_weights(module: nn.Module, twin: nn.Module) -> None:
    theirs, mine = dict(twin.named_parameters()), dict(module.named_parameters())
    assert set(theirs) == set(mine)
    for name, parameter in mine.items():
        spec = spec_of(parameter)
        parameter.copy_(spec.split(theirs[name]) if spec else theirs[name])


def text(options: dict[str, Any], number: int, rows: int = 2, length: int = 4) -> tuple[Any, ...]:
    """Batch number `number`: (input_ids, attention_mask, token_type_ids, position_ids, [cross,] labels)."""
    generator = torch.Generator().manual_seed(100 + number)

    def ids(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape or (rows, length), generator=generator)

    words = ids(options["vocab_size"])
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, -1] = 0
    types = ids(options["num_token_types"]) if options.get("num_token_types") else None
    cross: tuple[Any, ...] = ()
    if options.get("add_cross_attention"):
        states = torch.randn(rows, 6, options["hidden_size"], generator=generator, dtype=torch.float64)
        cross_mask = torch.ones(rows, 6, dtype=torch.long)
        cross_mask[-1, :2] = 0
        cross = states, cross_mask
    labels = words.clone()
    labels[1, 1] = -100
    return words, mask, types, None, *cross, labels


def gathered(parameter: Tensor) -> Tensor:
    """The whole of a parameter that is cut over the tensor-parallel group."""
    spec = spec_of(parameter)
    return spec.merge(smp.allgather(parameter.detach(), smp.TP_GROUP)) if spec else parameter.detach()
