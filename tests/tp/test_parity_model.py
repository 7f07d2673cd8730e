"""A small transformer, split over tp, pp and rdp together, against the same model in one process."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from smp import runtime
from tests.harness import on_ranks
from tests.parity.compare import Setup, adam, check, sgd
from tests.parity.zoo import Case

VOCABULARY, SIZE, LENGTH = 12, 8, 5


class Attention(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        n, s, _ = x.shape
        q, k, v = (f(x).view(n, s, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        mask = torch.full((s, s), float("-inf"), dtype=x.dtype).triu(1)
        return self.out(((scores + mask).softmax(-1) @ v).transpose(1, 2).reshape(n, s, SIZE))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm1, self.norm2 = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Token and position tables, two blocks, norm, head. `tied`: the head is the token table."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, SIZE, padding_idx=0), nn.Embedding(LENGTH, SIZE)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(SIZE)
        self.head = nn.Linear(SIZE, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).unsqueeze(0)  # a batch of one, whatever the batch
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def tokens(rows: int, generator: torch.Generator) -> dict[str, Any]:
    return {"ids": torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)}


PLACES = [("tokens", 0.0), ("positions", 0.0), ("blocks.0", 0.25), ("blocks.1", 0.5), ("norm", 0.75), ("head", 0.75)]
CASE = Case(Transformer, tokens, PLACES, without_gradient="key.bias")
TIED = Case(
    lambda: Transformer(tied=True),
    tokens,
    [(name, 0.0 if name in ("tokens", "head") else part) for name, part in PLACES],
    without_gradient="key.bias",
)


def world(arguments: dict[str, Any]) -> int:
    return int(arguments["size"])


MODES = pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
GRIDS = pytest.mark.parametrize(
    ("size", "pp", "tp"),
    [(2, 1, 2), (4, 1, 4), (4, 1, 2), (4, 2, 2)],
    ids=["tp2", "tp4", "tp2-rdp2", "pp2-tp2"],
)


@MODES
@GRIDS
@on_ranks(world)
def test_split_transformer_trains_like_one_process(size, pp, tp, prescaled):
    """Losses, gradients, updated parameters; everything is marked, microbatches and accumulation too."""
    for microbatches, passes in [(1, 1), (2, 2)]:
        setup = Setup(
            pp, tp, microbatches=microbatches, passes=passes, steps=2, rows=2, dtype=torch.float64, prescaled=prescaled
        )
        check(CASE, setup, adam, smp.set_tensor_parallelism)


@MODES
@GRIDS
@on_ranks(world)
def test_partly_split_transformer_trains_like_one_process(size, pp, tp, prescaled):
    """Split and whole modules in one model, in float32."""

    def mark(module: nn.Module) -> None:
        smp.set_tensor_parallelism(module.blocks)
        smp.set_tensor_parallelism(module.blocks[1].attention, False)
        smp.set_tensor_parallelism(module.tokens)

    check(CASE, Setup(pp, tp, microbatches=2, prescaled=prescaled), sgd, mark)


@MODES
@GRIDS
@on_ranks(world)
def test_tied_table_and_head_train_like_one_process(size, pp, tp, prescaled):
    """One Parameter, cut along the vocabulary, used by two modules."""
    setup = Setup(pp, tp, microbatches=2, dtype=torch.float64, prescaled=prescaled)
    check(TIED, setup, adam, smp.set_tensor_parallelism)


@on_ranks(4)
def test_automatic_partition_of_a_split_model():
    """The partition sees the twins, on fake tensors."""
    check(CASE, Setup(2, 2, microbatches=2, auto=True), sgd, smp.set_tensor_parallelism)


@pytest.mark.parametrize("pp", [1, 2])
@on_ranks(4)
def test_delayed_model_starts_the_same_on_all_degrees(pp):
    """Made with model_creation: no rank ever holds the whole model, and all agree on what it is."""
    runtime.reset()
    config = {"pipeline_parallel_degree": pp, "tensor_parallel_degree": 2, "ddp": True, "microbatches": 1}
    smp.init(config)
    torch.manual_seed(5 + 100 * smp.rank())
    with smp.model_creation(tensor_parallelism=True, dtype=torch.float64):
        module = Transformer()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(optimizer)

    @smp.step
    def train(ids):
        loss = model(ids)
        model.backward(loss)
        return loss

    train(tokens(2, torch.Generator().manual_seed(smp.dp_rank()))["ids"])
    state = model.state_dict(gather_to_rank0=False)
    torch.manual_seed(5)
    with smp.delay_param_initialization():
        torch.set_default_dtype(torch.float64)
        whole = Transformer()
        torch.set_default_dtype(torch.float32)
    from smp.tp.delayed import materialize

    materialize(whole, seed=5)
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name], value), name
    optimizer.step()
    runtime.reset()


@pytest.mark.parametrize("pp", [1, 2])
@on_ranks(4)
def test_wrong_sampler_arguments_are_reported_by_the_first_step(pp):
    """prescaled_batch with a batch of its own on every rank."""
    runtime.reset()
    smp.init({"pipeline_parallel_degree": pp, "tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True})
    module = Transformer()
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)

    @smp.step
    def train(ids):
        loss = model(ids)
        model.backward(loss)
        return loss

    with pytest.raises(smp.StepError, match=r"smp.rdp_size\(\)"):
        train(tokens(2, torch.Generator().manual_seed(smp.rank()))["ids"])
    runtime.reset()


@MODES
@on_ranks(2, launcher="torchrun", timeout=120)
def test_split_transformer_trains_like_one_process_under_torchrun(prescaled):
    """Over process groups, without MPI."""
    setup = Setup(tp=2, microbatches=2, dtype=torch.float64, prescaled=prescaled)
    check(CASE, setup, adam, smp.set_tensor_parallelism)
    check(TIED, setup, adam, smp.set_tensor_parallelism)
