"""The models that both sides of a comparison run. Plain torch."""

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """Token and position embeddings, added."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)

    def forward(self, text: Tensor) -> Tensor:
        """[batch, length] of integers -> [batch, length, width]."""
        return self.tokens(text) + self.positions.weight[: text.shape[1]]


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each after a layer norm and added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> the same shape."""
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def blocks(sizes: dict[str, Any]) -> nn.Sequential:
    """Blocks alone, with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(sizes["width"]) for _ in range(sizes["layers"])))


def states(sizes: dict[str, Any], batch: int, number: int = 0) -> tuple[Tensor, Tensor]:
    """Batch number `number` of hidden states, and what should come out: [batch, length, width] each."""
    generator = torch.Generator().manual_seed(2000 + number)
    x, target = (torch.randn(batch, sizes["length"], sizes["width"], generator=generator) for _ in range(2))
    return x, target


class GPT(nn.Module):
    """A decoder-only transformer with an untied head."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """[batch, length] of integers -> logits [batch, length, vocabulary]."""
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(sizes: dict[str, Any]) -> GPT:
    """The GPT of these sizes, with the same weights in every process."""
    torch.manual_seed(0)
    return GPT(sizes["vocabulary"], sizes["length"], sizes["width"], sizes["layers"])


def text(sizes: dict[str, Any], batch: int, number: int = 0) -> tuple[Tensor, Tensor]:
    """Batch number `number`: inputs and targets, [batch, length]."""
    generator = torch.Generator().manual_seed(1000 + number)
    tokens = torch.randint(sizes["vocabulary"], (batch, sizes["length"] + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.backward_seconds)
        return gradients[0], None, None


class Sleeper(nn.Module):
    """Takes its time, and no processor: stages of exactly known cost on a machine of any size."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = forward, backward
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        return _Sleep.apply(x * self.scale, *self.seconds)


def sleepers(sizes: dict[str, Any]) -> nn.Sequential:
    """One sleeping module per stage."""
    return nn.Sequential(*(Sleeper(sizes["forward"], sizes["backward"]) for _ in range(sizes["stages"])))
