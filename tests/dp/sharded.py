"""What the tests of sharded optimizer state share: a model with parameters of every kind, trained on both sides."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from smp import runtime
from smp.tp.shard import spec_of
from tests.dp.helpers import assert_close
from tests.parity.compare import rows_of

DOUBLE = torch.float64
DP = {"ddp": True, "shard_optimizer_state": True, "microbatches": 2}
GRIDS: dict[str, dict[str, Any]] = {
    "dp": DP,
    "tp": {**DP, "tensor_parallel_degree": 2},
    "pp": {**DP, "pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0},
}
RANKS = {"dp": 2, "tp": 4, "pp": 4}


class Net(nn.Module):
    """An embedding, a chain, a branch that runs when asked to, a weight that never does, a frozen one, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.branch = nn.Linear(8, 8)
        self.never = nn.Linear(8, 3)
        self.frozen = nn.Linear(8, 8)
        self.last = nn.Linear(8, 10)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor, flag: bool = True) -> Tensor:
        x = self.second(torch.tanh(self.first(self.table(ids))))
        x = self.branch(x) * self.scale if flag else x
        return F.cross_entropy(self.last(self.frozen(x)).flatten(0, 1), ids.flatten())


def net(seed: int = 0, dtype: torch.dtype = DOUBLE) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def whole_batch(number: int, rows: int = 2) -> Tensor:
    """`rows` for each of two microbatches and each rank of dp."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 10, (2 * rows * smp.dp_size(), 3), generator=generator)


Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


class Both:
    """The same training under smp and in one plain process, from the same weights.

    `optimizer` is made from the raw module's parameters, as transformers' Trainer does. `sharded=False` trains without
    sharding on the same grid. `half`: "fp16" or "bf16", from float32.
    """

    def __init__(
        self,
        grid: str = "dp",
        optimizer: Optimizer = adam,
        sharded: bool = True,
        seed: int = 0,
        half: str | None = None,
        **options: Any,
    ) -> None:
        runtime.reset()
        smp.init({**GRIDS[grid], "shard_optimizer_state": sharded, **({half: True} if half else {})})
        self.plain, module = net(), net(seed, torch.float32 if half else DOUBLE)
        if smp.tp_size() > 1:
            for child in (module.table, module.first, module.last):
                smp.set_tensor_parallelism(child)
        for path in ("branch", "never", "frozen", "last"):
            smp.set_partition(module.get_submodule(path), 1 if smp.pp_size() > 1 else 0)
        inner = optimizer(module)
        self.model = model = smp.DistributedModel(module, **options)
        self.optimizer = smp.DistributedOptimizer(inner, dynamic_loss_scale=half == "fp16")
        self.plain_optimizer = optimizer(self.plain)

        @smp.step
        def train(ids: Tensor, flag: bool) -> Tensor:
            loss = model(ids, flag)
            model.backward(loss)
            return loss

        self._train = train

    def backward(self, number: int, flag: bool = True) -> Tensor:
        """Gradients on both sides; the loss under smp."""
        whole = whole_batch(number)
        rows = len(whole) // smp.dp_size()
        for part in range(smp.dp_size()):
            for microbatch in rows_of(whole, part * rows, (part + 1) * rows).chunk(2):
                (self.plain(microbatch, flag) / (2 * smp.dp_size())).backward()
        return self._backward_here(number, flag)

    def _backward_here(self, number: int, flag: bool = True) -> Tensor:
        loss: Tensor = self._train(whole_batch(number).chunk(smp.dp_size())[smp.dp_rank()], flag).reduce_mean()
        return loss.detach()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.plain_optimizer.zero_grad()

    def update(self) -> None:
        self.optimizer.step()
        self.plain_optimizer.step()

    def run(self, steps: range) -> list[Tensor]:
        losses = []
        for number in steps:
            self.zero_grad()
            losses.append(self.backward(number))
            self.update()
        return losses

    def run_here(self, steps: range) -> None:
        """The same under smp alone."""
        for number in steps:
            self.optimizer.zero_grad()
            self._backward_here(number)
            self.optimizer.step()

    def assert_same(self) -> None:
        """Parameters are those of one process, and the same bits on all ranks that hold them."""
        whole = dict(self.plain.named_parameters())
        for name, param in self.model.local_named_parameters():
            spec = spec_of(param)
            expected = whole[name].detach()
            assert_close(param.detach(), expected if spec is None else spec.split(expected), name, 1e-9)
        assert_equal_replicas(self.model)

    def assert_same_gradients(self) -> None:
        """The owner has the gradient of one process; nobody else has any."""
        whole = dict(self.plain.named_parameters())
        for name, param in self.model.local_named_parameters():
            if not self.model.ownership.owns(param):
                assert param.grad is None, name
                continue
            spec, expected = spec_of(param), whole[name].grad
            assert_close(param.grad, spec.split(expected) if spec and expected is not None else expected, name, 1e-9)


def assert_equal_replicas(model: Any) -> None:
    """All ranks that hold a parameter hold the same bits."""
    mine = {
        (smp.pp_rank(), name, smp.tp_rank() if spec_of(param) is not None else None): param.detach()
        .double()
        .numpy()
        .tobytes()
        for name, param in model.local_named_parameters()
    }
    seen: dict[Any, bytes] = {}
    for theirs in smp.allgather(mine, smp.WORLD):
        for key, value in theirs.items():
            assert seen.setdefault(key, value) == value, key
