"""Half precision over several ranks: overflows, norms, masters after every way of loading, and what is refused."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp import runtime
from smp.errors import StepError, UsageError
from smp.fp16 import FP16_Optimizer
from tests.fp16.net import NUM_CLASSES, SIZE, batch, net, placed, train_step
from tests.fp16.test_parity import DYNAMIC, GRID
from tests.harness import on_ranks
from tests.logs import log_lines

FP16, BF16 = {**GRID, "fp16": True}, {**GRID, "bf16": True}
FP16_DP = {"ddp": True, "fp16": True}


def started(seed: int = 0, config: dict[str, Any] = FP16, **scale: Any) -> tuple[Any, smp.DistributedOptimizer]:
    """A new model and optimizer; the one before is forgotten."""
    runtime.reset()
    smp.init(config)
    model = smp.DistributedModel(placed(net(seed)))
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), **scale)


def train(model: Any, optimizer: smp.DistributedOptimizer, steps: range) -> list[float]:
    """Losses of these steps."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(train_step(model, *batch(step)).reduce_mean().item())
        optimizer.step()
    return losses


def assert_rounded(model: Any, optimizer: smp.DistributedOptimizer) -> None:
    """Masters are there for all local parameters, and these are the rounded masters."""
    masters = optimizer.masters_by_name()
    local = dict(model.local_named_parameters())
    assert set(masters) == set(local)
    for name, param in local.items():
        assert masters[name].dtype == torch.float32 and torch.equal(masters[name].to(param.dtype), param), name


@on_ranks(4)
def test_a_permanent_nan_is_named_and_ends_the_run_when_the_scale_cannot_fall() -> None:
    """a5-1. A run that skips every step must not look like training; an honest start at a high scale must not end."""
    model, optimizer = started(**DYNAMIC, dynamic_loss_args={"init_scale": 2.0**22})
    train(model, optimizer, range(1))
    broken = model.module.norm.bias
    if model.owned("norm.bias"):
        broken.register_hook(lambda grad: grad * math.nan)
    scales = []
    with log_lines() as lines, pytest.raises(StepError, match=r"'norm.bias' \(stage 1\).*cannot fall any more"):
        for step in range(1, 40):
            scales.append(optimizer.loss_scale)
            train(model, optimizer, range(step, step + 1))
            assert optimizer.step_was_skipped
    # One skip came before the NaN. At scale 1 the second skip in a row is one too many.
    assert scales == [2.0 ** max(power, 0) for power in range(21, -2, -1)]
    said = [line for line in lines if "'norm.bias' (stage 1)" in line]
    assert len(said) == (1 if smp.rank() == 0 else 0), lines
    if said:
        assert said[0].startswith("20 steps in a row were skipped")
    runtime.reset()


@on_ranks(4)
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    """A failure means that ranks part: some update, some do not; or that they go on with different scales."""
    model, optimizer = started(**DYNAMIC, dynamic_loss_args={"init_scale": 2.0**8})
    train(model, optimizer, range(2))
    for rank in range(4):
        before = copy.deepcopy((optimizer.masters_by_name(), optimizer.optimizer.state_dict()["state"]))
        scale = optimizer.loss_scale
        optimizer.zero_grad()
        train_step(model, *batch(5))
        if smp.rank() == rank:
            param = next(p for p in model.local_parameters() if p.grad is not None)
            param.grad.view(-1)[0] = math.inf
        if rank % 2:
            assert optimizer.clip_master_grads(1.0) == -1.0
        optimizer.step()
        assert optimizer.overflow and optimizer.step_was_skipped and optimizer.loss_scale == scale / 2
        after = (optimizer.masters_by_name(), optimizer.optimizer.state_dict()["state"])
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    runtime.reset()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@on_ranks(4)
def test_every_element_counts_once_in_the_norm_of_masters(norm_type: float) -> None:
    """a5-3: a tied head on two stages, norms, a layer that is cut and one that is whole, each unscaled gradient 1."""
    model, optimizer = started(static_loss_scale=16.0)
    train(model, optimizer, range(1))
    optimizer.zero_grad()
    for param in model.local_parameters():
        param.grad = torch.full_like(param, 16.0)
    norm = optimizer.clip_master_grads(1e9, norm_type)
    num_elements = NUM_CLASSES * SIZE + (2 * SIZE) * (SIZE + 1) + SIZE * (2 * SIZE + 1) + 2 * SIZE
    assert norm == (1.0 if norm_type == math.inf else pytest.approx(math.sqrt(num_elements), rel=1e-7))
    assert smp.allgather(norm, smp.WORLD) == [norm] * 4 and optimizer._global_grad_norm == norm
    runtime.reset()


@on_ranks(4)
def test_norm_weights_of_one_move_in_bf16() -> None:
    """a5-4. An update below half a bfloat16 step at 1.0 must add up in the master as in full precision."""
    moved = {}
    for config in (GRID, BF16):
        runtime.reset()
        smp.init(config)
        model = smp.DistributedModel(placed(net()))
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-4))
        train(model, optimizer, range(50))
        weight = model.module.norm.weight
        if model.owned("norm.weight"):
            kept = optimizer.masters_by_name()["norm.weight"] if config is BF16 else weight.detach()
            moved[config is BF16] = kept - 1.0
            if config is BF16:
                assert_rounded(model, optimizer)
    if moved:
        assert moved[False].abs().min() > 1e-3
        assert (moved[True] - moved[False]).norm() < 0.05 * moved[False].norm()
    runtime.reset()


@on_ranks(4)
def test_masters_follow_every_way_of_loading() -> None:
    """a5-4: full and partial state dicts of the model, of the optimizer, and torch's own loading into the module,
    before and after partition. float32 values arrive in the masters unrounded; a step of no length changes nothing."""
    model, optimizer = started()
    train(model, optimizer, range(2))
    values = {name: whole.float() + 1e-4 for name, whole in model.state_dict().items()}
    saved = {"full": values, "partial": model.local_state_dict()}
    states = {"full": optimizer.state_dict(), "partial": optimizer.local_state_dict()}
    masters = {name: master.clone() for name, master in optimizer.masters_by_name().items()}
    for kind in ("full", "partial"):
        for early in (True, False):
            model, optimizer = started(seed=1)
            if not early:
                train(model, optimizer, range(1))
            model.load_state_dict(saved[kind])
            if early:
                train(model, frozen(optimizer), range(1))
            assert_rounded(model, optimizer)
            train(model, frozen(optimizer), range(1))
            assert_rounded(model, optimizer)
            if kind == "full":
                for name, master in optimizer.masters_by_name().items():
                    spec = getattr(model.get_parameter(name), "_smp_shard", None)
                    assert torch.equal(master, values[name] if spec is None else spec.split(values[name])), name
    for kind in ("full", "partial"):
        model, optimizer = started(seed=1)
        train(model, optimizer, range(1))
        optimizer.load_state_dict(states[kind])
        for name, master in optimizer.masters_by_name().items():
            assert torch.equal(master, masters[name]), name
        assert_rounded(model, optimizer)
    if model.owned("whole.weight"):
        zeros = {name: torch.zeros_like(value) for name, value in model.module.whole.state_dict().items()}
        model.module.whole.load_state_dict(zeros)
    train(model, frozen(optimizer), range(1))
    if model.owned("whole.weight"):
        assert optimizer.masters_by_name()["whole.weight"].abs().max() == 0.0
    runtime.reset()


def frozen(optimizer: smp.DistributedOptimizer) -> smp.DistributedOptimizer:
    """Steps change nothing from now on."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


@pytest.mark.parametrize("kind", ["full", "partial"])
@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(4)
def test_a_resumed_run_continues_bit_for_bit(kind: str, sharded: bool) -> None:
    """Loaded before partition: losses, scale and masters are those of the run that was not interrupted."""
    config = {**FP16, "shard_optimizer_state": sharded}
    arguments = {**DYNAMIC, "dynamic_loss_args": {"init_scale": 2.0**18, "scale_window": 5}}
    model, optimizer = started(0, config, **arguments)
    train(model, optimizer, range(12))
    full = kind == "full"
    saved = copy.deepcopy(
        (model.state_dict(), optimizer.state_dict())
        if full
        else (model.local_state_dict(), optimizer.local_state_dict(gather_if_shard=False))
    )
    expected = train(model, optimizer, range(12, 18)), optimizer.loss_scale
    masters = {name: master.clone() for name, master in optimizer.masters_by_name().items()}
    model, optimizer = started(1, config, **arguments)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert (train(model, optimizer, range(12, 18)), optimizer.loss_scale) == expected
    for name, master in optimizer.masters_by_name().items():
        assert torch.equal(master, masters[name]), name
    runtime.reset()


@on_ranks(4, config=FP16)
def test_a_plain_optimizer_state_loads_into_half_precision_and_the_other_way() -> None:
    """Moments of a float32 run go to the masters; a plain optimizer takes ours, as far as it knows it."""
    reference = net()
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for param in reference.parameters():
        param.grad = torch.ones_like(param)
    plain.step()
    model = smp.DistributedModel(placed(net()))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    optimizer.load_state_dict(plain.state_dict())
    train(model, frozen(optimizer), range(1))
    for state in optimizer.state.values():
        assert state["step"] == 2 and state["exp_avg"].dtype == torch.float32
    other = net()
    taken = torch.optim.AdamW(other.parameters(), lr=1.0)
    taken.load_state_dict(optimizer.state_dict())
    assert all(taken.state[param]["step"] == 2 for param in other.parameters())
    for param in other.parameters():
        param.grad = torch.ones_like(param)
    taken.step()


@pytest.mark.parametrize("grid", ["pp", "dp"])
@on_ranks(4)
def test_a_backward_on_parameters_alone_is_refused_under_a_loss_scale(grid: str) -> None:
    """A penalty on weights outside of a step, on any rank, before partition and after it: the step would divide it by a
    scale that it never had. What only looks at gradients passes, and training can go on."""
    model, optimizer = started(config=FP16 if grid == "pp" else FP16_DP, static_loss_scale=2.0**6)

    def penalty() -> Tensor:
        return torch.stack([param.float().square().sum() for param in model.parameters()]).sum()

    for step in range(2):
        torch.autograd.grad(penalty(), list(model.parameters()))
        with pytest.raises(StepError, match=r"without the loss scale.*call model.backward\(loss\)"):
            penalty().backward()
        train(model, optimizer, range(step, step + 1))
    assert_rounded(model, optimizer)


@on_ranks(4, config=FP16)
def test_clipping_gradients_that_are_scaled_is_refused() -> None:
    """Their norm is not that of the loss's gradients. Those of the masters may be clipped by anybody."""
    model = smp.DistributedModel(placed(net()))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), static_loss_scale=2.0**6)
    train_step(model, *batch(0))
    for clip in (nn.utils.clip_grad_norm_, smp.clip_grad_norm_):
        with pytest.raises(UsageError, match=r"optimizer.clip_master_grads\(max_norm\)"):
            clip(model.parameters(), 1.0)
    optimizer.update_master_grads()
    norms = [clip(optimizer.master_params, 1e9).item() for clip in (nn.utils.clip_grad_norm_, smp.clip_grad_norm_)]
    assert norms == [optimizer.clip_master_grads(0.1)] * 2
    assert optimizer.clip_master_grads(1e9) == pytest.approx(0.1, rel=1e-4)  # user-driven: it stays clipped
    optimizer.step()


@on_ranks(4, config=BF16)
def test_under_bf16_clipping_by_hand_is_clipping_of_masters() -> None:
    """There is no scale, and masters share the gradients, each of which counts once."""
    model = smp.DistributedModel(placed(net()))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    train_step(model, *batch(0))
    by_hand = [nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()]
    optimizer.update_master_grads()
    by_hand += [clip(model.parameters(), 1e9).item() for clip in (nn.utils.clip_grad_norm_, smp.clip_grad_norm_)]
    by_hand += [nn.utils.clip_grad_norm_(optimizer.master_params, 1e9).item()]
    assert by_hand == [optimizer.clip_master_grads(1e9)] * 4
    optimizer.step()
    assert all(param.grad is None or param.grad.dtype == torch.float32 for param in model.local_parameters())


@on_ranks(1, config={"fp16": True})
def test_without_a_pipeline_a_loss_backward_is_scaled_or_refused() -> None:
    """In a step loss.backward() is model.backward(loss); outside of one nobody could scale it."""
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=2.0**6)
    assert isinstance(optimizer, FP16_Optimizer) and isinstance(optimizer, torch.optim.Optimizer)

    def gradient(backward: Any) -> Tensor:
        optimizer.zero_grad()
        backward(model(batch(0)[0]).square().mean())
        optimizer.update_master_grads()
        return optimizer.master_params[0].grad.clone()  # type: ignore[union-attr]

    expected = gradient(model.backward)
    assert torch.equal(gradient(optimizer.backward), expected)
    with pytest.raises(StepError, match=r"call model.backward\(loss\) or optimizer.backward\(loss\)"):
        gradient(lambda loss: loss.backward())
    optimizer.zero_grad()
    torch.autograd.grad(model(batch(0)[0]).square().mean(), list(model.parameters()))

    @smp.step
    def step(model: Any, ids: Tensor) -> None:
        model(ids).square().mean().backward()

    step(model, batch(0)[0])
    optimizer.update_master_grads()
    assert torch.equal(optimizer.master_params[0].grad, expected)


@on_ranks(2, config=FP16_DP)
def test_gradients_after_the_masters_have_taken_theirs_count_on_every_rank() -> None:
    """Also where only one rank's loss depends on what the optimizer updates: the ranks would take each other's messages
    for something else."""
    model = smp.DistributedModel(net())
    part = model.module.whole
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=0.1))
    ids, _ = batch(0)
    model(ids).square().mean().backward()
    optimizer.update_master_grads()
    before = part.weight.grad.float()
    output = model(ids)
    (output if smp.rank() == 0 else model.module.norm.weight.float()).square().mean().backward()
    optimizer.step()
    assert torch.equal(part.weight.grad.float(), optimizer.master_params[0].grad)
    assert not torch.equal(part.weight.grad.float(), before)
    grads = smp.allgather(part.weight.grad, smp.WORLD)
    assert torch.equal(grads[0], grads[1])


@on_ranks(4, config={**FP16, "fp16_params": True})
def test_distributed_modules_are_created_in_half_precision() -> None:
    """`fp16_params`: no full precision copy of a large layer exists, not even for a moment on the device."""
    linear = smp.nn.DistributedLinear(SIZE, 2 * SIZE)
    assert {param.dtype for param in linear.parameters()} == {torch.float16}
    with smp.model_creation(dtype=torch.float16):
        module = nn.Sequential(nn.Linear(SIZE, SIZE), smp.nn.DistributedLinear(SIZE, SIZE))
    assert {(param.dtype, param.is_meta) for param in module.parameters()} == {(torch.float16, True)}
    smp.set_partition(module[0], 0)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    assert step(model, torch.ones(2, SIZE)).reduce_mean().dtype == torch.float32
    optimizer.step()
    assert_rounded(model, optimizer)
    assert all(bool(param.isfinite().all()) for param in model.local_parameters())
