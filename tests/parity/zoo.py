"""Small models of every shape that a pipeline has to carry, each with its batches and a placement by hand.

A model takes its batch as keyword arguments and returns the loss, or what `loss_of` makes one from. `places` says where
its modules go when they are placed by hand: (path, fraction), the stage being the fraction of the number of stages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 8
VOCABULARY = 13


@dataclass(frozen=True)
class Case:
    """A model to compare. `batch(rows, generator)` gives keyword arguments: tensors split on axis 0, plain values.

    `without_gradient`: ends of the names of parameters whose gradient is zero in truth, as that of a bias that softmax
    does not see.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], dict[str, Any]]
    places: Sequence[tuple[str, float]] = ()
    loss_of: Callable[[Any], Tensor] = field(default=lambda output: output)
    without_gradient: str | tuple[str, ...] = ()

    def stages(self, num_stages: int) -> dict[str, int]:
        return {path: min(int(part * num_stages), num_stages - 1) for path, part in self.places}


def vectors(rows: int, generator: torch.Generator) -> dict[str, Any]:
    return {"x": torch.randn(rows, WIDTH, generator=generator), "y": torch.randn(rows, WIDTH, generator=generator)}


def tokens(rows: int, generator: torch.Generator, length: int = 5) -> dict[str, Any]:
    return {"ids": torch.randint(0, VOCABULARY, (rows, length), generator=generator)}


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Chain(nn.Module):
    """One module after another, in an `nn.Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), Block(), nn.ReLU(inplace=True), Block(), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), y)


class Skip(nn.Module):
    """The first output is used again at the end, over all stages; added in place in glue code too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = torch.sin(self.a(x))
        second = self.c(self.b(first))
        second += 0.5 * first
        return F.mse_loss(self.d(torch.cat([second[:, ::2], first[:, 1::2]], dim=1)) + x, y)


class Twice(nn.Module):
    """One module called twice, with another one between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.other, self.head = Block(), Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.shared(self.other(self.shared(x)))), y)


class Tied(nn.Module):
    """Embedding and head share their weight; the blocks between may lie elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(5, WIDTH) * 0.1)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids) + self.position * 1.0
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden) * self.scale
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


class TiedInGlue(nn.Module):
    """The weight of the embedding is used as a plain tensor in glue code."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(VOCABULARY, WIDTH), Block()
        self.last = Block()

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.last(self.block(self.embedding(ids)))
        return F.cross_entropy(F.linear(hidden, self.embedding.weight).flatten(0, 1), ids.flatten())


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # no bias for keys: softmax does not see it, so its gradient would be rounding alone
        self.q, self.kv, self.block = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False), Block()

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        k, v = self.kv(memory).chunk(2, dim=-1)
        return self.block(x + F.scaled_dot_product_attention(self.q(x), k, v, attn_mask=mask))


class EncoderDecoder(nn.Module):
    """Every decoder layer reads what the encoder, stages before, produced."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList([Attend(), Attend()])
        self.decoder = nn.ModuleList([Attend(), Attend()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.embedding(ids)
        for layer in self.encoder:
            memory = layer(memory, memory)
        hidden = self.embedding(ids.flip(1))
        for layer in self.decoder:
            hidden = layer(hidden, memory)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


class Pair(NamedTuple):
    hidden: Tensor
    extra: Any


class DictBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.side = Block(), nn.Linear(WIDTH, 3)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        hidden = self.block(state["hidden"])
        pair = Pair(hidden.mean(), {"name": "side", "none": None})
        return {"hidden": hidden, "sides": [*state["sides"], self.side(hidden)], "pair": pair}


class Dicts(nn.Module):
    """Modules that take and return dicts, with lists, named tuples, None and strings in them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = DictBlock(), DictBlock(), DictBlock()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {"hidden": x, "sides": []}
        for block in (self.first, self.second, self.third):
            state = block(state)
        loss = F.mse_loss(state["hidden"], y) + sum(side.square().mean() for side in state["sides"])
        assert state["pair"].extra["none"] is None
        return {"loss": loss + state["pair"].hidden, "kind": "dicts"}


class KeywordBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, gate: Tensor | None = None, scale: float = 1.0, flip: bool = False) -> Tensor:
        out = self.linear(x) * scale
        out = out.flip(1) if flip else out
        return out if gate is None else out * torch.sigmoid(gate)


class Keywords(nn.Module):
    """Keyword arguments, None, floats, bools; and a flag of the caller that decides which modules run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: KeywordBlock() for name in ("a", "b", "c", "skipped")})

    def forward(self, x: Tensor, y: Tensor, flag: bool = False) -> Tensor:
        first = self.blocks["a"](x, gate=None, scale=0.5)
        second = self.blocks["b"](first, gate=first, flip=True)
        third = self.blocks["c"](x=second, gate=x) if flag else second
        return F.mse_loss(third, y)


class ValueBranch(nn.Module):
    """Which module runs depends on a tensor's value, so it differs between microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.positive, self.negative, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = self.positive(hidden) if hidden.sum() > 0 else self.negative(hidden)
        return F.mse_loss(self.last(hidden) * (1.0 + hidden.detach().mean().item()), y)


class Bare(nn.Module):
    """One stage holds modules without parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.middle, self.b = (
            nn.Linear(WIDTH, WIDTH),
            nn.Sequential(nn.GELU(), nn.Flatten()),
            nn.Linear(WIDTH, WIDTH),
        )
        self.end = nn.Softplus()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.end(self.b(self.middle(self.a(x)))), y)


class Listed(nn.Module):
    """Modules in lists of lists, reached by indexing; a frozen one; one whose output nobody uses; one never called."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.ModuleList([Block(), Block()]) for _ in range(2)])
        self.frozen, self.unread, self.uncalled = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        outputs = []
        for tower in self.towers:
            hidden = self.frozen(x)
            for k in range(len(tower)):
                hidden = tower[k](hidden)
            self.unread(hidden)
            outputs.append(hidden)
        with torch.no_grad():
            target = self.towers[0][0](y)
        return F.mse_loss(torch.stack(outputs).mean(0), target)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x * grad  # on purpose not the derivative: shows that this function ran


class Bypass(nn.Module):
    """What `__torch_function__` does not see: an own autograd function and checkpointing, in glue code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), Block()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = Double.apply(self.a(x))
        hidden = checkpoint(self.b, hidden, use_reentrant=False)
        return F.mse_loss(self.c(hidden), y)


class Recurrent(nn.Module):
    """A recurrent network: nested tuple outputs, and a loop in glue code over its time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn, self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        outputs, (hidden, _) = self.rnn(self.embedding(ids))
        state = hidden[-1]
        for step in outputs.unbind(1):
            state = self.cell(step, state)
        return F.cross_entropy(self.head(state), ids[:, 0])


class Norms(nn.Module):
    """Batch norm on two stages: buffers that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b, self.m = nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.m(self.b(torch.relu(self.n(self.a(x))))), y[:, :4])


class Experts(nn.Module):
    """Which rows an expert on another stage sees, and how many, depends on values: also none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.last = nn.Linear(WIDTH, 3), nn.ModuleList([Block() for _ in range(3)]), Block()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        chosen = shares.argmax(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero().squeeze(1)
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * shares[rows, k : k + 1])
        positive = out[out.sum(1) > 0]
        return F.mse_loss(self.last(out), y) + 0.1 * positive.sum()


class Recycled(nn.Module):
    """A value of one step is kept and used in the next; a buffer is written by glue code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.a(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
                self.count += 1
        return F.mse_loss(self.b(hidden - self.mean), y)


def batch_with_flag(rows: int, generator: torch.Generator) -> dict[str, Any]:
    return {**vectors(rows, generator), "flag": True}


ZOO: dict[str, Case] = {
    "chain": Case(Chain, vectors, [("body.0", 0), ("body.2", 0.3), ("body.4", 0.6), ("body.5", 0.9)]),
    "skip": Case(Skip, vectors, [("a", 0), ("b", 0.4), ("c", 0.6), ("d", 0.9)]),
    "twice": Case(Twice, vectors, [("shared", 0.3), ("other", 0.9), ("head", 0)]),
    "tied": Case(
        Tied,
        tokens,
        [("embedding", 0), ("head", 0), ("blocks.0", 0.3), ("blocks.1", 0.6), ("blocks.2", 0.9), ("blocks.3", 0.9)],
    ),
    "tied_in_glue": Case(TiedInGlue, tokens, [("embedding", 0), ("block", 0.5), ("last", 0.9)]),
    "encoder_decoder": Case(
        EncoderDecoder,
        tokens,
        [("embedding", 0), ("encoder.0", 0), ("encoder.1", 0.3), ("decoder.0", 0.6), ("decoder.1", 0.9), ("head", 0.9)],
    ),
    "dicts": Case(Dicts, vectors, [("first", 0), ("second", 0.6), ("third", 0.9)], lambda out: out["loss"]),
    "keywords": Case(
        Keywords, vectors, [("blocks.a", 0), ("blocks.b", 0.5), ("blocks.c", 0.9), ("blocks.skipped", 0.9)]
    ),
    "flag": Case(
        Keywords, batch_with_flag, [("blocks.a", 0), ("blocks.b", 0.5), ("blocks.c", 0.9), ("blocks.skipped", 0)]
    ),
    "value_branch": Case(ValueBranch, vectors, [("first", 0), ("positive", 0.5), ("negative", 0.9), ("last", 0.3)]),
    "bare": Case(Bare, vectors, [("a", 0), ("middle", 0.4), ("b", 0), ("end", 0.9)]),
    "listed": Case(
        Listed,
        vectors,
        [
            ("towers.0", 0.3),
            ("towers.1.0", 0.6),
            ("towers.1.1", 0.9),
            ("frozen", 0),
            ("unread", 0.9),
            ("uncalled", 0.5),
        ],
    ),
    "bypass": Case(Bypass, vectors, [("a", 0), ("b", 0.5), ("c", 0.9)]),
    "recurrent": Case(Recurrent, tokens, [("embedding", 0), ("rnn", 0.4), ("cell", 0.6), ("head", 0.9)]),
    "experts": Case(
        Experts, vectors, [("gate", 0), ("experts.0", 0), ("experts.1", 0.3), ("experts.2", 0.6), ("last", 0.9)]
    ),
    "recycled": Case(Recycled, vectors, [("a", 0), ("b", 0.9)]),
    "norms": Case(Norms, vectors, [("a", 0), ("n", 0), ("b", 0.9), ("m", 0.9)]),
}
