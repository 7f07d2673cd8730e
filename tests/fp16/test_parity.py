"""fp16 and bf16 over tensor-parallel ranks and stages train as one process with masters and a scaler kept by hand."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.fp16.scaler import make_scaler
from tests.fp16.net import batch, loss_of, net, placed, train_step
from tests.harness import on_ranks

STEPS = 50
MAX_NORM = 1.0
GRID: dict[str, Any] = {
    "pipeline_parallel_degree": 2,
    "tensor_parallel_degree": 2,
    "ddp": True,
    "microbatches": 2,
    "auto_partition": False,
    "default_partition": 1,
}
DYNAMIC: dict[str, Any] = {"static_loss_scale": None, "dynamic_loss_scale": True}


@dataclass
class Run:
    """What a run showed, step by step, and its masters at the end."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    masters: dict[str, Tensor] = field(default_factory=dict)


def by_hand(dtype: torch.dtype, rows: int, init_scale: float = 2.0**32) -> Run:
    """Masters, unscaling, clipping and skipping as plain code; gradients add up in float32 under bf16."""
    module, run = net().to(dtype), Run()
    params = dict(module.named_parameters())
    masters = {name: param.detach().float().requires_grad_() for name, param in params.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2)
    scaler = make_scaler(None, dtype == torch.float16, {"init_scale": init_scale})
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    for step in range(STEPS):
        sums = {name: torch.zeros_like(param, dtype=wide) for name, param in params.items()}
        losses = []
        for ids, classes in zip(*(part.chunk(2) for part in batch(step, rows)), strict=True):
            loss = loss_of(module(ids).float(), classes)
            grads = torch.autograd.grad(loss * (scaler.loss_scale / 2), list(params.values()))
            for total, grad in zip(sums.values(), grads):
                total += grad
            losses.append(loss.item())
        for name, master in masters.items():
            master.grad = sums[name].float() / scaler.loss_scale
        overflow = not all(bool(total.isfinite().all()) for total in sums.values())
        run.losses.append(sum(losses) / 2)
        run.scales.append(scaler.loss_scale)
        norm = nn.utils.clip_grad_norm_(masters.values(), MAX_NORM).item()
        run.norms.append(-1.0 if overflow else norm)
        scaler.update(overflow)
        if not overflow:
            optimizer.step()
            with torch.no_grad():
                for param, master in zip(params.values(), masters.values()):
                    param.copy_(master)
    run.masters = {name: master.detach() for name, master in masters.items()}
    return run


def under_smp(scale: dict[str, Any], rows: int) -> tuple[Run, Any, smp.DistributedOptimizer]:
    """The same with smp; each rank gets its rows of the batch."""
    model = smp.DistributedModel(placed(net()))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), **scale)
    run = Run()
    for step in range(STEPS):
        ids, classes = batch(step, rows)
        prescaled = smp.state.cfg.prescaled_batch
        parts, number = (smp.rdp_size(), smp.rdp_rank()) if prescaled else (smp.dp_size(), smp.dp_rank())
        ids, classes = (whole.chunk(parts)[number] for whole in (ids, classes))
        optimizer.zero_grad()
        run.scales.append(optimizer.loss_scale)
        loss = train_step(model, ids, classes).reduce_mean().detach()
        mean = sum(smp.allgather(loss.item(), smp.DP_GROUP)) / smp.dp_size()
        run.losses.append(mean)
        run.norms.append(optimizer.clip_master_grads(MAX_NORM))
        optimizer.step()
        assert optimizer.step_was_skipped == optimizer.overflow == (run.norms[-1] == -1.0)
    return run, model, optimizer


# One rounding of a gradient is 2**-11 of it in float16 and 2**-8 in bfloat16. A layer that is cut adds its parts in
# another order, so gradients differ by a few roundings; AdamW turns a relative change e of a gradient into a change of
# lr * e of a weight, the small ones more, in each of 50 steps. Losses agree to a few roundings.
TOLERANCE = {"fp16": 8 * 2.0**-11, "bf16": 4 * 2.0**-8}


def assert_alike(got: Run, expected: Run, tolerance: float) -> None:
    assert got.losses == pytest.approx(expected.losses, rel=tolerance)
    skipped = [norm == -1.0 for norm in expected.norms]
    assert [norm == -1.0 for norm in got.norms] == skipped
    assert got.norms == pytest.approx(expected.norms, rel=5 * tolerance)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@on_ranks(4, config=lambda case: {**GRID, case["kind"]: True, "prescaled_batch": True}, timeout=120)
def test_fifty_steps_on_one_batch(kind: str) -> None:
    """Tensor-parallel ranks share the batch. fp16 starts at 2**32, overflows first, and finds the same scale; all ranks
    agree on losses, scales and norms, and the weights are the rounded masters."""
    expected = by_hand(torch.float16 if kind == "fp16" else torch.bfloat16, 4)
    got, model, optimizer = under_smp(DYNAMIC if kind == "fp16" else {}, 4)
    assert all(run == got for run in smp.allgather(got, smp.WORLD))
    assert_alike(got, expected, TOLERANCE[kind])
    assert got.scales == expected.scales
    assert got.losses[-1] < 0.7 * got.losses[0]
    if kind == "fp16":
        assert got.scales[0] == 2.0**32 and 10 <= got.norms.count(-1.0) <= 25
    for name, master in optimizer.masters_by_name().items():
        param = model.get_parameter(name)
        spec = getattr(param, "_smp_shard", None)
        whole = expected.masters[name]
        wanted = whole if spec is None else spec.split(whole)
        assert (master - wanted).norm() <= 0.05 * wanted.norm(), name
        assert torch.equal(param, master.to(param.dtype))


REPLICAS = {**GRID, "pipeline_parallel_degree": 1, "default_partition": 0, "prescaled_batch": True}
CASES = {"ranks": GRID, "replicas": {**REPLICAS, "shard_optimizer_state": True}}


@pytest.mark.parametrize("of", ["ranks", pytest.param("replicas", marks=pytest.mark.slow)])
@on_ranks(4, config=lambda case: {**CASES[case["of"]], "fp16": True}, timeout=120)
def test_fifty_steps_with_several_batches(of: str) -> None:
    """One for each rank, or for each replica of tensor-parallel ranks, which also shard the optimizer's state.

    Gradients of a rank's own batch, and sums over the joined ones, are larger than those of their mean, so a scale
    that falls may settle one step lower than in one process. This one starts where neither overflows."""
    expected = by_hand(torch.float16, 8, 2.0**14)
    got, _, _ = under_smp({**DYNAMIC, "dynamic_loss_args": {"init_scale": 2.0**14}}, 8)
    assert all(run == got for run in smp.allgather(got, smp.WORLD))
    assert_alike(got, expected, TOLERANCE["fp16"])
    assert got.scales == expected.scales
