"""Random programs of module calls and glue code, with modules on random stages, train as on one process."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.harness import on_ranks
from tests.parity.compare import Setup, check
from tests.parity.test_tensor_parallel import split_everything, split_some
from tests.parity.zoo import WIDTH, Block, Case, Double, vectors

NUM_OPERATIONS = 14


class Both(nn.Module):
    """Takes and returns nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), Block()

    def forward(self, pair: dict[str, Tensor], *, swap: bool) -> tuple[Tensor, list[Tensor]]:
        a, b = (pair["b"], pair["a"]) if swap else (pair["a"], pair["b"])
        return self.left(a), [self.right(b), a]


class InPlace(nn.Module):
    """Writes to its input, after a copy or, as `ReLU(inplace=True)` does, without one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mul_(0.5).tanh_()


class Table(nn.Module):
    """Its weight is also used by glue code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


# Each operation (net, x, y, choice in 0..3) makes a new value from two old ones.


def _module(net: Any, x: Tensor, y: Tensor, choice: int) -> Tensor:
    return net.plain[choice](x)


def _both(net: Any, x: Tensor, y: Tensor, choice: int) -> Tensor:
    first, (second, third) = net.both[choice % 2]({"a": x, "b": y}, swap=choice > 1)
    return first * 0.5 + second if choice % 2 else third - first


def _slices(net: Any, x: Tensor, y: Tensor, choice: int) -> Tensor:
    left, right = x.chunk(2, dim=1)
    return torch.cat([right.flip(1), left + y[:, choice : choice + WIDTH // 2]], dim=1)


def _rebind(net: Any, x: Tensor, y: Tensor, choice: int) -> Tensor:
    result = torch.sin(x)
    result += y
    result *= 0.5
    if choice > 1:
        result[:, choice] = y[:, 0]
    return result


def _select(net: Any, x: Tensor, y: Tensor, choice: int) -> Tensor:
    return torch.where(x > 0, x * 0.7, y.detach() if choice == 0 else y)


def _borrow(net: Any, x: Tensor, y: Tensor, choice: int) -> Tensor:
    if choice == 0:
        return net.table(x) + net.shift
    return F.linear(x, net.table.weight) * net.scale + net.shift


def _branch(net: Any, x: Tensor, y: Tensor, choice: int) -> Tensor:
    if choice == 0 and x[:, :3].sum().item() > 0:  # not of all columns: after a layer norm that is rounding alone
        return x * 0.9
    with torch.no_grad():
        constant = net.plain[choice](y).mean(0)
    return x + 0.1 * constant * net.scale


def _checkpointed(net: Any, x: Tensor, y: Tensor, choice: int) -> Tensor:
    if choice == 0:
        return 0.1 * Double.apply(torch.tanh(x))
    return checkpoint(lambda a, b: net.plain[choice](a) * torch.sigmoid(b), x, y, use_reentrant=False)


def _gather(net: Any, x: Tensor, y: Tensor, choice: int) -> Tensor:
    order = y.sum(1).argsort()
    return x[order] + net.constant[: x.shape[0] % 3 + 1].mean()


def _inplace_module(net: Any, x: Tensor, y: Tensor, choice: int) -> Tensor:
    return F.relu(net.inplace(x) + 0.2 * y, inplace=True) + 0.1 * y


OPERATIONS = [
    _module,
    _module,
    _module,
    _both,
    _slices,
    _rebind,
    _select,
    _borrow,
    _branch,
    _checkpointed,
    _gather,
    _inplace_module,
]


class RandomNet(nn.Module):
    """A program of `NUM_OPERATIONS` operations drawn from `seed`; each makes a value of shape [rows, WIDTH]."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.plain = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)])
        self.both = nn.ModuleList([Both(), Both()])
        self.inplace, self.table = InPlace(), Table()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("constant", torch.linspace(0, 1, 3))
        if draw.random() < 0.3:
            self.plain[2].requires_grad_(False)
        self.program = []
        for number in range(NUM_OPERATIONS):
            operands = [draw.randrange(max(0, number - 4), number + 1), draw.randrange(number + 1)]
            self.program.append((draw.choice(OPERATIONS), operands, draw.randrange(4)))
        self.kept = draw.sample(range(1, NUM_OPERATIONS), 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        values = [x]
        for run, (a, b), choice in self.program:
            values.append(run(self, values[a], values[b], choice))
        return F.mse_loss(values[-1], y) + sum(values[k].square().mean() for k in self.kept)


def case_of(seed: int) -> Case:
    draw = random.Random(1000 + seed)
    paths = [*(f"plain.{k}" for k in range(4)), "both.0", "both.1", "inplace", "table"]
    return Case(lambda: RandomNet(seed), vectors, [(path, draw.random()) for path in paths])


@pytest.mark.parametrize("first", [0, 8, 16])
@on_ranks(2, timeout=120)
def test_random_programs_on_two_stages(first):
    """Combinations that nobody thought of: operations of glue code between values of different stages."""
    for seed in range(first, first + 8):
        check(case_of(seed), Setup(pp=2, microbatches=2, rows=3))


@pytest.mark.parametrize("first", [100, 104, 108])
@on_ranks(4, timeout=120)
def test_random_programs_on_four_stages(first):
    """The same on more stages, where values pass by ranks that have no part in them."""
    for seed in range(first, first + 4):
        check(case_of(seed), Setup(pp=4, microbatches=2, rows=3, passes=2))
        check(case_of(seed), Setup(pp=2, microbatches=3, rows=3, auto=True))


@pytest.mark.parametrize("first", [200, 204])
@on_ranks(4, timeout=120)
def test_random_programs_on_two_stages_of_two_parts(first):
    """Every rank of a tensor-parallel group sees the same batch, so that branches on values agree."""
    for seed in range(first, first + 4):
        prepare = split_everything if seed % 2 else split_some
        check(case_of(seed), Setup(pp=2, tp=2, microbatches=2, rows=3, prescaled=True), prepare=prepare)
