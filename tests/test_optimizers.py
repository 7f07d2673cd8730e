"""Layer-wise optimizers: against their formulas, and spread over ranks against one process."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp import runtime
from smp.errors import UsageError
from smp.optimizers import FusedLAMB, FusedNovoGrad, layers_of, whole_norms
from smp.tp.origin import Block, Origin, remember
from smp.tp.shard import ShardSpec
from tests.checkpoint import jobs
from tests.checkpoint.small import Job, grid
from tests.harness import on_ranks
from tests.parity.compare import (
    Setup,
    assert_close,
    batch_parts,
    build,
    check,
    job_batch,
    owned_parameters,
    plain_run,
    shard_of,
    smp_run,
)
from tests.parity.test_tensor_parallel import split_everything, split_some
from tests.parity.zoo import ZOO
from tests.standin import install_model
from tests.stateful import shared_directory
from tests.tp.hf_models import BERTS, T5S

F64 = torch.float64


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(4, 3), (4,), (2, 2, 2), (3,)]
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=F64)) for shape in shapes]


def groups_of(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups: the second has no decay, another rate, and a parameter that gets no gradient in the first step."""
    return [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0, "lr": 0.02}, {"params": []}]


def gradients(step: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(10 + step)
    grads: list[Tensor | None] = [torch.randn(p.shape, generator=generator, dtype=F64) * 3 for p in weights()]
    return [*grads[:3], None if step == 1 else grads[3]]


class Formulas:
    """One parameter's state in the textbook's letters."""

    def __init__(self, param: Tensor) -> None:
        self.p, self.m, self.v, self.n = param.detach().clone(), torch.zeros_like(param), torch.zeros_like(param), None

    def lamb(
        self, g: Tensor, t: int, lr: float, decay: float, total: Tensor, bias_correction: bool = True,
        adam_w_mode: bool = True, grad_averaging: bool = True, max_grad_norm: float = 1.0, use_nvlamb: bool = False,
    ) -> None:  # fmt: skip
        if max_grad_norm > 0 and total > max_grad_norm:
            g = g * max_grad_norm / total
        if not adam_w_mode:
            g = g + decay * self.p
        self.m = 0.9 * self.m + (0.1 if grad_averaging else 1.0) * g
        self.v = 0.99 * self.v + 0.01 * g * g
        c1, c2 = (1 - 0.9**t, 1 - 0.99**t) if bias_correction else (1.0, 1.0)
        u = (self.m / c1) / ((self.v / c2).sqrt() + 1e-6)
        if adam_w_mode:
            u = u + decay * self.p
        ratio = float(self.p.norm() / u.norm()) if (decay != 0 or use_nvlamb) and self.p.norm() * u.norm() > 0 else 1.0
        self.p = self.p - lr * ratio * u

    def novograd(
        self, g: Tensor, t: int, lr: float, decay: float, total: Tensor, bias_correction: bool = True,
        reg_inside_moment: bool = False, grad_averaging: bool = True, norm_type: int = 2, init_zero: bool = False,
    ) -> None:  # fmt: skip
        size = g.norm() if norm_type == 2 else g.abs().max()
        n = self.n if self.n is not None else torch.zeros((), dtype=F64) if init_zero else size
        self.n = (0.99 * n * n + 0.01 * size * size).sqrt() if norm_type == 2 else 0.99 * n + 0.01 * size
        c1, c2 = (1 - 0.9**t, math.sqrt(1 - 0.99**t)) if bias_correction else (1.0, 1.0)
        d = self.n / c2 + 1e-6
        if reg_inside_moment:
            g = g / d + decay * self.p
        self.m = 0.9 * self.m + (0.1 if grad_averaging else 1.0) * g
        self.p = self.p - lr * (self.m / c1 if reg_inside_moment else self.m / c1 / d + decay * self.p)


LAMB: list[dict[str, Any]] = [
    *[{}, {"bias_correction": False}, {"adam_w_mode": False}, {"grad_averaging": False}, {"use_nvlamb": True}],
    *[{"max_grad_norm": 0.0}, {"max_grad_norm": 1e6}, {"weight_decay": 0.0}],
]
NOVOGRAD: list[dict[str, Any]] = [
    *[{}, {"bias_correction": False}, {"reg_inside_moment": True}, {"grad_averaging": False}, {"norm_type": 0}],
    *[{"init_zero": True}, {"weight_decay": 0.0}, {"norm_type": 0, "init_zero": True, "reg_inside_moment": True}],
]
KINDS = [(FusedLAMB, "lamb", options) for options in LAMB] + [(FusedNovoGrad, "novograd", o) for o in NOVOGRAD]


@pytest.mark.parametrize(("kind", "formula", "options"), KINDS)
def test_steps_are_those_of_the_formulas(kind: Any, formula: str, options: dict[str, Any]) -> None:
    """A failure means another optimizer under a known name; also after its state went through a checkpoint."""
    params, expected = weights(), [Formulas(param) for param in weights()]
    settings = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, **options}
    optimizer = kind(groups_of(params), **settings)
    formula_options = {key: value for key, value in options.items() if key != "weight_decay"}
    for t in range(1, 5):
        if t == 3:
            state = optimizer.state_dict()
            optimizer = kind(groups_of(params), **settings)
            optimizer.load_state_dict(state)
        grads = gradients(t)
        for param, grad in zip(params, grads):
            param.grad = grad
        optimizer.step()
        total = torch.cat([grad.flatten() for grad in grads if grad is not None]).norm()
        for number, (one, grad) in enumerate(zip(expected, grads)):
            lr, decay = (0.05, settings["weight_decay"]) if number < 2 else (0.02, 0.0)
            if grad is not None:
                getattr(one, formula)(grad, t, lr, decay, total, **formula_options)
        for param, one in zip(params, expected):
            torch.testing.assert_close(param.detach(), one.p, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad])
def test_zero_layers_and_zero_gradients_stay_finite(kind: Any) -> None:
    """A failure means NaN weights from a ratio of zeros: a layer that starts from zero, a gradient that is zero."""
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0))]
    optimizer = kind(params, weight_decay=0.1)
    for grads in ((torch.ones(3), torch.zeros(3), torch.ones(0)), (torch.zeros(3), torch.ones(3), torch.ones(0))):
        for param, grad in zip(params, grads):
            param.grad = grad
        optimizer.step()
    assert all(bool(param.isfinite().all()) for param in params)
    assert bool((params[0] != 0).all())


def test_arguments_are_apexs_and_wrong_ones_are_named() -> None:
    """Scripts pass them by position."""
    params = [nn.Parameter(torch.ones(2))]
    lamb = FusedLAMB(params, 0.1, False, (0.8, 0.9), 1e-5, 0.2, False, False, False, False, 2.0, True)
    novograd = FusedNovoGrad(params, 0.1, False, (0.8, 0.9), 1e-5, 0.2, False, True, False, 0, True, False)
    for optimizer in (lamb, novograd):
        group = optimizer.param_groups[0]
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.1, (0.8, 0.9), 1e-5, 0.2)
        params[0].grad = torch.ones(2)
        optimizer.zero_grad()
        assert params[0].grad is not None and not params[0].grad.any()  # set_grad_none=False
    for kind, wrong, named in (
        (FusedLAMB, {"amsgrad": True}, "amsgrad"),
        (FusedLAMB, {"lr": -1.0}, "lr got -1.0"),
        (FusedNovoGrad, {"betas": (0.9, 1.0)}, r"betas got \(0.9, 1.0\)"),
        (FusedNovoGrad, {"norm_type": 1}, "norm_type got 1"),
    ):
        with pytest.raises(UsageError, match=named):
            kind(params, **wrong)


def lamb(parameters: Any) -> torch.optim.Optimizer:
    return FusedLAMB(parameters, lr=0.02, weight_decay=0.1, max_grad_norm=0.3)


def novograd(parameters: Any) -> torch.optim.Optimizer:
    return FusedNovoGrad(parameters, lr=0.02, weight_decay=0.1)


def novograd_maximum(parameters: Any) -> torch.optim.Optimizer:
    return FusedNovoGrad(parameters, lr=0.02, weight_decay=0.1, norm_type=0)


OPTIMIZERS = {"lamb": lamb, "novograd": novograd, "novograd_maximum": novograd_maximum}
# Vocabularies of 13 are cut with padding.
PARTS = [Setup(tp=2, microbatches=2, dtype=F64, steps=3), Setup(tp=2, dtype=F64, prescaled=True)]
STAGES = [Setup(pp=2, tp=2, microbatches=2, dtype=F64), Setup(tp=2, dtype=F64)]
FUSED = {"bert": BERTS["masked words"], "t5": T5S["gated, untied"]}
SHARDED = Setup(tp=2, dtype=F64, steps=3, config={"shard_optimizer_state": True})


@pytest.mark.parametrize("which", OPTIMIZERS)
@on_ranks(2, timeout=200)
def test_norms_are_of_whole_parameters_not_of_parts(which: str) -> None:
    """A failure means that layers take other steps the more ranks they are cut over."""
    for shape in ("chain", "tied"):
        for setup in PARTS:
            check(ZOO[shape], setup, OPTIMIZERS[which], split_everything if setup.prescaled else split_some)


@pytest.mark.parametrize("which", OPTIMIZERS)
@on_ranks(4, timeout=200)
def test_parts_stages_replicas_and_shared_state_train_as_one_process(which: str) -> None:
    """A failure means that some rank's norm lacks a part, or counts one twice: LAMB's global norm most of all."""
    for shape, setup in (("tied", STAGES[0]), ("encoder_decoder", STAGES[1])):
        check(ZOO[shape], setup, OPTIMIZERS[which], split_some)
    case = ZOO["chain"]
    got, model = smp_run(case, SHARDED, OPTIMIZERS[which], split_some)
    want = plain_run(case, SHARDED, OPTIMIZERS[which], *batch_parts(SHARDED))
    tensors = dict(model.module.state_dict(keep_vars=True))
    for name, value in got.state.items():
        assert_close(value, shard_of(tensors[name], want.state[name]), 1e-9, name)


@pytest.mark.parametrize("which", OPTIMIZERS)
@pytest.mark.parametrize("family", FUSED)
@on_ranks(2, timeout=200)
def test_what_tensor_parallelism_puts_together_keeps_norms_of_its_own(family: str, which: str) -> None:
    """Query, key and value are three layers in one process: one norm for all of them would make other steps."""
    for setup in (replace(PARTS[0], microbatches=1), PARTS[1]):
        check(FUSED[family], setup, OPTIMIZERS[which], smp.set_tensor_parallelism)


@pytest.mark.parametrize("half", ["", "bf16"])
@on_ranks(2, config={"ddp": True}, timeout=200)
def test_norms_of_what_was_put_together_resume_on_other_degrees(half: str) -> None:
    """Query, key and value have a number each in one process, and a tensor with all three where they are split."""
    with shared_directory() as directory:
        for saved, resumed, partial in ((2, 2, True), (2, 1, True), (1, 2, True), (2, 1, False), (1, 2, False)):
            job = jobs.Job("bert", jobs.Grid(tp=saved, half=half), make=novograd)
            job.step(), job.step()
            job.save(directory, f"{saved} {resumed}", partial=partial)
            expected = [job.step()[0], job.step()[0]]
            job = jobs.Job("bert", jobs.Grid(tp=resumed, half=half), make=novograd, seed=1)
            job.resume(directory, tag=f"{saved} {resumed}", partial=partial)
            got = [job.step()[0], job.step()[0]]
            tolerance = 0.0 if saved == resumed else 1e-2 if half else 1e-9
            assert got == pytest.approx(expected, rel=tolerance, abs=0)


@on_ranks(4, config={"ddp": True, "tensor_parallel_degree": 4})
def test_parts_that_lie_on_several_ranks_count_once() -> None:
    """Key and value heads, fewer than ranks: a failure means norms that are too large by the square root of 2."""
    rt = runtime.get()
    install_model(nn.Linear(1, 1))
    whole = torch.arange(1.0, 9.0, dtype=F64).view(4, 2)
    param, other = nn.Parameter(torch.zeros(2, 2, dtype=F64)), nn.Parameter(torch.zeros(4, 2, dtype=F64))
    spec = ShardSpec((4, 2), 0, rt.tp_rank // 2, 2)
    param._smp_shard = spec  # type: ignore[attr-defined]
    for order in (2.0, math.inf):
        values = [[whole, spec.split(whole)], [whole, 3 * spec.split(whole)]]
        both = whole_norms(layers_of([other, param]), values, order)
        norm = torch.linalg.vector_norm(whole, order)
        torch.testing.assert_close(torch.stack(both), torch.stack([norm, norm, norm, 3 * norm]).view(2, 2))


@on_ranks(2, config={"ddp": True, "tensor_parallel_degree": 2})
def test_a_rank_may_hold_nothing_of_a_layer() -> None:
    """Two of the user's weights, put together and cut between them: each rank has the norms of both."""
    install_model(nn.Linear(1, 1))
    whole = torch.arange(1.0, 9.0, dtype=F64).view(4, 2)
    spec = ShardSpec((4, 2), 0, smp.tp_rank(), 2)
    param = nn.Parameter(spec.split(whole))
    param._smp_shard = spec  # type: ignore[attr-defined]
    blocks = [Block(name, (0, 0), (2, 2), (row, 0)) for name, row in (("a", 0), ("b", 2))]
    remember(param, Origin(tuple(blocks), {"a": (2, 2), "b": (2, 2)}))
    (norms,) = whole_norms(layers_of([param]), [[param.detach()]])
    torch.testing.assert_close(norms, torch.stack([whole[:2].norm(), whole[2:].norm()]))


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad])
@on_ranks(4, config={"ddp": True, "tensor_parallel_degree": 2, "bf16": True}, timeout=200)
def test_norms_of_masters_are_whole_too(kind: Any) -> None:
    """A failure means that half precision changes the rule: masters forgot how their parameters are cut."""
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.LayerNorm(4))
    reference = [nn.Parameter(param.detach().bfloat16().float()) for param in module.parameters()]
    smp.set_tensor_parallelism(module[0], True)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(kind(model.parameters(), lr=0.02, weight_decay=0.1))
    single = kind(reference, lr=0.02, weight_decay=0.1)
    for _ in range(3):
        for (_, param), expected in zip(owned_parameters(model), reference):
            expected.grad = torch.randn(expected.shape)
            param.grad = shard_of(param, expected.grad).clone()
        optimizer.step()
        single.step()
    masters = optimizer.masters_by_name()
    for (name, param), expected in zip(owned_parameters(model), reference):
        assert_close(masters[name], shard_of(param, expected.detach()), 1e-5, name)


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad])
@on_ranks(2, config=grid(tp=2), timeout=200)
def test_they_resume_on_other_degrees(kind: Any) -> None:
    """A failure means that steps counted by group, or norms kept per layer, do not get into a checkpoint."""
    with shared_directory() as directory:
        job = Job(grid(tp=2), kind=kind)
        job.steps(0, 1)
        job.save(directory, "two")
        expected = job.steps(2, 3)
        for config in (grid(tp=2), grid(pp=2), grid(shard_optimizer_state=True)):
            job = Job(config, kind=kind)
            smp.resume_from_checkpoint(directory)
            torch.testing.assert_close(job.steps(2, 3), expected, rtol=1e-9, atol=0)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.01)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.01)


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01)


@pytest.mark.parametrize(
    ("optimizer", "setup"),
    [
        (adafactor, Setup(tp=2)),
        (muon, Setup(tp=2)),
        (lbfgs, Setup(pp=2)),
        (lbfgs, Setup(config={"shard_optimizer_state": True})),
    ],
)
@on_ranks(2, timeout=200)
def test_optimizers_that_need_more_than_a_rank_has_are_refused(optimizer: Any, setup: Setup) -> None:
    """torch's others that take norms or products: a failure means that ranks update by norms of their parts."""
    with pytest.raises(UsageError, match="^(Adafactor|Muon|LBFGS) (needs whole parameters|takes products over all)"):
        smp_run(ZOO["chain"], setup, optimizer, prepare=split_everything)


@on_ranks(2, timeout=200)
def test_optimizers_that_need_whole_parameters_work_over_stages() -> None:
    """A failure means that a right use is refused."""
    check(ZOO["chain"], Setup(pp=2, microbatches=2, dtype=F64), adafactor)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1)


@on_ranks(2, timeout=200)
def test_state_made_with_whole_parameters_becomes_that_of_their_parts() -> None:
    """Made before the model, as transformers' Trainer does; a failure means a step that torch refuses."""
    runtime.reset()
    smp.init(Setup(tp=2, prescaled=True).smp_config())
    module = build(ZOO["chain"], F64)
    plain = copy.deepcopy(module)
    split_everything(module)
    inner = adagrad(module.parameters())
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(inner)
    plain_optimizer = adagrad(plain.parameters())
    batch = job_batch(ZOO["chain"], 2, 0, F64)
    for _ in range(2):
        for loss, each in ((model(**batch), optimizer), (plain(**batch), plain_optimizer)):
            each.zero_grad()
            loss.backward()
            each.step()
    for (_, param), expected in zip(owned_parameters(model), plain.parameters(), strict=True):
        assert_close(param.detach(), shard_of(param, expected.detach()), 1e-9, "a parameter")
    trained = torch.optim.AdamW(plain.parameters())
    trained.step()
    runtime.reset()
    smp.init(Setup(tp=2).smp_config())
    split_everything(plain)
    smp.DistributedModel(plain)
    with pytest.raises(UsageError, match="state 'exp_avg' of shape .* has cut to .*it has been trained before"):
        smp.DistributedOptimizer(trained)
    runtime.reset()


@on_ranks(4, timeout=200)
def test_state_made_with_whole_parameters_is_cut_at_partition_too() -> None:
    """With stages parameters are cut in the first step, when any optimizer is there already."""
    check(ZOO["chain"], Setup(pp=2, tp=2, microbatches=2, dtype=F64), adagrad, split_some)
