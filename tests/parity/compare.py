"""Train a model under smp and in plain PyTorch from the same weights and batches, and compare everything.

Both runs happen in every process: the plain one needs no others. It computes what the whole job does: the mean over the
data-parallel ranks of the mean over microbatches, accumulated over passes as a sum.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import smp
from smp import runtime
from smp.tp.shard import spec_of
from tests.parity.zoo import Case

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


@dataclass(frozen=True)
class Setup:
    """One combination to compare. `rows` per microbatch; `auto`: automatic partition, not the case's placement."""

    pp: int = 1
    tp: int = 1
    microbatches: int = 1
    passes: int = 1
    steps: int = 2
    rows: int = 2
    auto: bool = False
    dtype: torch.dtype = torch.float32
    prescaled: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of DistributedModel

    def smp_config(self) -> dict[str, Any]:
        return {
            "pipeline_parallel_degree": self.pp,
            "tensor_parallel_degree": self.tp,
            "microbatches": self.microbatches,
            "auto_partition": self.auto,
            "prescaled_batch": self.prescaled,
            "ddp": True,
            **({} if self.auto else {"default_partition": 0}),
            **self.config,
        }


@dataclass
class Result:
    """What a run left: a loss per pass, gradients before the last update, parameters and buffers after it."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]


Optimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def build(case: Case, dtype: torch.dtype | None = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return case.build().to(dtype)


def job_batch(case: Case, rows: int, number: int, dtype: torch.dtype) -> dict[str, Any]:
    """The batch of the whole job in pass `number`."""
    batch = case.batch(rows, torch.Generator().manual_seed(1000 + number))
    floating = {k: v.to(dtype) for k, v in batch.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return {**batch, **floating}


def rows_of(batch: Any, begin: int, end: int) -> Any:
    """The rows of every tensor in nested dicts."""
    if isinstance(batch, dict):
        return {key: rows_of(value, begin, end) for key, value in batch.items()}
    return batch[begin:end] if isinstance(batch, Tensor) else batch


def plain_run(case: Case, setup: Setup, optimizer: Optimizer = sgd, batches_over: int = 1, number: int = 0) -> Result:
    """One plain process; `batches_over` parts of the job's batch, of which part `number` gives the losses returned."""
    model = build(case, setup.dtype)
    opt = optimizer(model.parameters())
    size = setup.rows * setup.microbatches
    losses: list[Tensor] = []
    for step in range(setup.steps):
        opt.zero_grad()
        for n in range(setup.passes):
            whole = job_batch(case, size * batches_over, step * setup.passes + n, setup.dtype)
            for part in range(batches_over):
                own = rows_of(whole, part * size, (part + 1) * size)
                each = []
                for m in range(setup.microbatches):
                    loss = case.loss_of(model(**rows_of(own, m * setup.rows, (m + 1) * setup.rows)))
                    (loss / (setup.microbatches * batches_over)).backward()
                    each.append(loss.detach())
                if part == number:
                    losses.append(torch.stack(each).mean())
        gradients = {name: p.grad for name, p in model.named_parameters()}
        gradients = {name: None if g is None else g.clone() for name, g in gradients.items()}
        opt.step()
    return Result(losses, gradients, {k: v.detach().clone() for k, v in model.state_dict().items()})


def smp_run(
    case: Case, setup: Setup, optimizer: Optimizer = sgd, prepare: Callable[[nn.Module], None] = lambda module: None
) -> tuple[Result, Any]:
    """The same under smp, and the model. `prepare` sees the module before it is wrapped (to mark parts of it)."""
    smp.init(setup.smp_config())
    module = build(case, setup.dtype)
    prepare(module)
    if not setup.auto:
        for path, stage in case.stages(setup.pp).items():
            smp.set_partition(module.get_submodule(path), stage)
    model = smp.DistributedModel(module, backward_passes_per_step=setup.passes, **setup.options)
    opt = smp.DistributedOptimizer(optimizer(model.parameters()))

    @smp.step
    def train(batch: dict[str, Any]) -> Tensor:
        loss = case.loss_of(model(**batch))
        model.backward(loss)
        return loss

    size = setup.rows * setup.microbatches
    parts, number = batch_parts(setup)
    losses: list[Tensor] = []
    gradients: dict[str, Tensor | None] = {}
    for step in range(setup.steps):
        opt.zero_grad()
        for n in range(setup.passes):
            whole = job_batch(case, size * parts, step * setup.passes + n, setup.dtype)
            losses.append(train(rows_of(whole, number * size, (number + 1) * size)).reduce_mean().detach())
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in owned_parameters(model)}
        opt.step()
    state = {
        name: value.detach().clone() for name, value in model.local_state_dict().items() if isinstance(value, Tensor)
    }
    return Result(losses, gradients, state), model


def batch_parts(setup: Setup) -> tuple[int, int]:
    """(number of different batches in the job, the one of this rank)."""
    if setup.prescaled:
        return smp.rdp_size(), smp.rdp_rank()
    return smp.dp_size(), smp.dp_rank()


def owned_parameters(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Names as in the user's module."""
    return ((name, p) for name, p in model.module.named_parameters() if model.owned(name))


def shard_of(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor that stands where `parameter` stands."""
    spec = spec_of(parameter)
    return whole if spec is None else spec.split(whole)


def difference(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30)) if want.norm() > 0 else float(got.norm())


def assert_close(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, one process has {tuple(want.shape)}"
    apart = difference(got, want) if want.is_floating_point() else float((got != want).sum())
    assert apart <= tolerance, f"{what}: {apart:.1e} apart from one process, allowed {tolerance:.0e}"


def under_our_names(want: Result) -> Result:
    """What one process has, under the names that modules have which replace those of a family of models."""
    for _, to_ours in smp.state.module_manager.translate_functions:
        state = to_ours(want.state)
        gradients = to_ours({name: value for name, value in want.gradients.items() if value is not None})
        want = Result(want.losses, {name: gradients.get(name) for name in state}, state)
    return want


def assert_same(
    got: Result,
    want: Result,
    model: Any,
    tolerance: float,
    what: str = "",
    without_gradient: str | tuple[str, ...] = (),
) -> None:
    """Losses, gradients (None included) and state of this rank against those of one process.

    `without_gradient`: ends of the names whose gradient is zero in truth, so that only rounding could be compared.
    """
    want = under_our_names(want)
    assert len(got.losses) == len(want.losses)
    for n, (a, b) in enumerate(zip(got.losses, want.losses)):
        assert_close(a.cpu(), b, tolerance, f"{what} loss {n}")

    def compare(name: str, a: Tensor, b: Tensor, where: str) -> None:
        if without_gradient and name.endswith(without_gradient):
            assert float((a - b).norm()) < 1e-6, f"{where}: {a} instead of {b}"
        else:
            assert_close(a, b, tolerance, where)

    tensors = dict(model.module.state_dict(keep_vars=True))
    compared = set().union(*smp.allgather((*got.gradients, *got.state), smp.MP_GROUP))
    assert compared == {*want.gradients, *want.state}, "not every tensor of the model was compared"
    for name, gradient in got.gradients.items():
        expected = want.gradients[name]
        assert (gradient is None) == (expected is None), (
            f"{what} {name}: gradient {gradient}, one process has {expected}"
        )
        if gradient is not None and expected is not None:
            compare(name, gradient.cpu(), shard_of(tensors[name], expected), f"{what} gradient of {name}")
    for name, value in got.state.items():
        compare(name, value.cpu(), shard_of(tensors[name], want.state[name]), f"{what} {name}")


def check(
    case: Case, setup: Setup, optimizer: Optimizer = sgd, prepare: Callable[[nn.Module], None] = lambda module: None
) -> None:
    """Both runs and the comparison; the world is as before afterwards."""
    runtime.reset()
    try:
        got, model = smp_run(case, setup, optimizer, prepare)
        want = plain_run(case, setup, optimizer, *batch_parts(setup))
        assert_same(got, want, model, TOLERANCE[setup.dtype], f"{setup}:", case.without_gradient)
    finally:
        runtime.reset()
