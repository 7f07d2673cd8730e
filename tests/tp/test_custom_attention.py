"""A user's own attention block, and one of another library, replaced by distributed attention."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from smp import runtime
from smp.tp.shard import spec_of
from tests.harness import on_ranks
from tests.tp.transformer_twin import close, loss_of, setup
from tests.tp.twins import tp_group

N, S, H = 2, 6, 8


class OwnAttention(smp.nn.DistributedAttentionLayer):
    """Takes weights from a block that has other names, and three linears in place of one."""

    def carry_over(self, module: nn.Module) -> None:
        with torch.no_grad():
            for kind in ("weight", "bias"):
                parts = [getattr(module, name).get_parameter(kind) for name in ("query", "key", "value")]
                self.adopt(f"qkv.{kind}", nn.Parameter(torch.cat(list(parts))))
                self.adopt(f"dense.{kind}", module.out.get_parameter(kind))  # type: ignore[union-attr]
                self.adopt(f"layernorm.{kind}", module.norm.get_parameter(kind))  # type: ignore[union-attr]


class Attention(nn.Module):
    """Post-norm attention with keyword arguments, a mask of ones and zeros, and a dict as its result."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> dict[str, Tensor]:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mask = None if keep is None else keep[:, None, None, :].bool()
        context = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        return {"hidden": self.norm(x + self.out(context))}


class LibraryAttention(Attention):
    """The same, as if it were another library's: it does not know of us."""


def init_hook(width: int, heads: int, dropout: float = 0.0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    sizes = {"num_attention_heads": heads, "attention_head_size": width // heads, "hidden_size": width}
    return (), {**sizes, "attention_dropout_prob": dropout, "hidden_dropout_prob": dropout}


def forward_hook(x: Tensor, keep: Tensor | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((x, None if keep is None else keep[:, None, None, :].bool()),), {}


def return_hook(hidden: Tensor) -> dict[str, Tensor]:
    return {"hidden": hidden}


OwnedAttention = smp.tp_register(OwnAttention, init_hook, forward_hook, return_hook)(
    type("OwnedAttention", (Attention,), {})
)
smp.tp_register_with_module(LibraryAttention, OwnAttention, init_hook, forward_hook, return_hook)


class Net(nn.Module):
    def __init__(self, cls: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = cls(H, 4), cls(H, heads=2)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.second(self.first(x, keep=keep)["hidden"])["hidden"]


@pytest.mark.parametrize("cls", [OwnedAttention, LibraryAttention])
@pytest.mark.parametrize("optimize", ["speed", "memory"])
@on_ranks(2)
def test_registered_attention_computes_what_the_block_computes(optimize, cls):
    """Through all three hooks, with the block's weights, in fused order; gradients reach what was fused."""
    torch.set_default_dtype(torch.float64)
    try:
        for prescaled in (False, True):
            setup(2, prescaled, optimize)
            torch.manual_seed(2)
            with smp.tensor_parallelism(attention_in_fp32=False):
                module = Net(cls)
            torch.manual_seed(2)
            whole = Net(cls)
            model = smp.DistributedModel(module)
            assert type(model.module.first) is OwnAttention
            generator = torch.Generator().manual_seed(3)
            parts = [torch.randn(N, S, H, generator=generator) for _ in range(2)]
            if prescaled:
                parts = parts[:1]
            keep = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
            own = 0 if prescaled else tp_group().rank
            out = model(parts[own], keep)
            loss_of(out, own).backward()
            outputs = [whole(part, keep) for part in parts]
            torch.stack([loss_of(each, index) for index, each in enumerate(outputs)]).mean().backward()
            close(out, outputs[own], 1e-9, "output")
            for mine, theirs in ((model.module.first, whole.first), (model.module.second, whole.second)):
                fused = torch.cat([theirs.query.weight.grad, theirs.key.weight.grad, theirs.value.weight.grad])
                spec = spec_of(mine.qkv.weight)
                close(mine.qkv.weight.grad, spec.split(fused), 1e-9, "gradient of q, k, v")
                close(mine.layernorm.bias.grad, theirs.norm.bias.grad, 1e-9, "gradient of the norm")
    finally:
        torch.set_default_dtype(torch.float32)
        runtime.reset()
