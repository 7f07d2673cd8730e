"""FP16_Module and FP16_Optimizer alone, in one process, against masters kept by hand."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.errors import UsageError
from smp.fp16 import FP16_Module, FP16_Optimizer

HALVES = [torch.float16, torch.bfloat16]

# Every optimizer of torch.optim whose update needs nothing but a parameter and its gradient. Where the update of a
# whole layer is one rule (Adafactor, Muon), one process has whole layers.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.01),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


def inputs(step: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(step))


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    params = list(module.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02}]


def make(
    dtype: torch.dtype, kind: str = "AdamW", **scale: Any
) -> tuple[FP16_Module, FP16_Optimizer, Callable[[int], Tensor]]:
    """A module, its optimizer, and what computes the gradients of one step and gives the loss."""
    module = FP16_Module(layers(), dtype)
    optimizer = FP16_Optimizer(OPTIMIZERS[kind](groups_of(module)), **scale)

    def compute(step: int) -> Tensor:
        loss = module(inputs(step)).square().mean()
        optimizer.backward(loss)
        return loss.detach()

    return module, optimizer, compute


def train(steps: range, optimizer: FP16_Optimizer, compute: Callable[[int], Tensor]) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(compute(step).item())
        optimizer.step()
    return losses


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_updates_masters_with_unscaled_gradients(kind: str) -> None:
    """Any torch optimizer works as on float32 parameters; the model holds the rounded masters. The scale is a power of
    two and the gradients are far from the ends of float16, so both ways give the same bits."""
    module, optimizer, compute = make(torch.float16, kind, static_loss_scale=2.0**7)
    reference = layers().half()
    masters = [param.detach().float().requires_grad_() for param in reference.parameters()]
    plain = OPTIMIZERS[kind]([{"params": masters[::2]}, {"params": masters[1::2], "lr": 0.02}])
    train(range(5), optimizer, compute)
    for step in range(5):
        reference.zero_grad()
        (reference(inputs(step).half()).float().square().mean() * 2.0**7).backward()
        for master, param in zip(masters, reference.parameters()):
            assert param.grad is not None
            master.grad = param.grad.float() / 2.0**7
        plain.step()
        with torch.no_grad():
            for master, param in zip(masters, reference.parameters()):
                param.copy_(master)
    for group, expected in zip(optimizer.fp32_from_fp16_groups, [masters[::2], masters[1::2]]):
        for master, value in zip(group, expected, strict=True):
            assert master.dtype == torch.float32 and torch.equal(master, value)
    for param, expected_param in zip(module.parameters(), reference.parameters()):
        assert param.dtype == torch.float16 and torch.equal(param, expected_param)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_module_takes_and_gives_full_precision(dtype: torch.dtype) -> None:
    """Nested floating inputs are cast, others stay; objects without any are passed as they are."""

    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("table", torch.ones(2))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x: dict[str, Any], *, notes: list[str]) -> Any:
            seen.append((x["a"].dtype, x["b"][0].dtype, x["c"].dtype, notes))
            return {"y": x["a"] * self.weight + self.table, "c": x["c"]}

    seen: list[Any] = []
    notes = ["kept"]
    module = FP16_Module(Probe(), dtype)
    out = module(
        {"a": torch.ones(2), "b": [torch.ones(2).double()], "c": torch.ones(2, dtype=torch.int64)}, notes=notes
    )
    assert seen[0][:3] == (dtype, dtype, torch.int64) and seen[0][3] is notes
    assert out["y"].dtype == torch.float32 and out["c"].dtype == torch.int64
    assert module.module.table.dtype == dtype and module.module.count.dtype == torch.int64
    assert set(module.state_dict()) == {"weight", "table", "count"}


def test_rotary_angles_stay_exact() -> None:
    """A frequency in bfloat16 would be off by a radian at position 4096."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=64, num_attention_heads=1)
    rotary = LlamaRotaryEmbedding(config)
    exact = torch.arange(0, 64, 2).double().div(-64).mul(torch.tensor(10000.0).double().log()).exp()
    cosines, _ = FP16_Module(rotary, torch.bfloat16).module(torch.zeros(1), torch.tensor([[4096]]))
    assert (cosines[0, 0, :32] - (4096 * exact).cos()).abs().max() < 1e-3


def test_an_overflow_changes_nothing_but_the_scale() -> None:
    """Weights, masters, moments and step counters stay; the next good step goes on from them."""
    module, optimizer, compute = make(torch.float16, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**8})
    train(range(2), optimizer, compute)
    before = copy.deepcopy((module.state_dict(), optimizer.optimizer.state_dict(), optimizer.master_params))
    optimizer.zero_grad()
    compute(2)
    next(module.parameters()).grad[0, 0] = torch.inf  # type: ignore[index]
    assert optimizer.clip_master_grads(1.0) == -1.0 and optimizer._global_grad_norm == -1.0
    assert optimizer.step() is None
    assert optimizer.overflow and optimizer.step_was_skipped and optimizer.loss_scale == 2.0**7
    after = (module.state_dict(), optimizer.optimizer.state_dict(), optimizer.master_params)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    train(range(3, 4), optimizer, compute)
    assert not optimizer.overflow and not optimizer.step_was_skipped
    assert not torch.equal(optimizer.master_params[0], before[2][0])


def test_bf16_without_a_scale_looks_for_no_overflow() -> None:
    """As torch does in full precision: nothing is multiplied, so nothing overflows because of that."""
    _, optimizer, compute = make(torch.bfloat16)
    train(range(1), optimizer, compute)
    assert optimizer.loss_scale == 1.0 and not optimizer.overflow and not optimizer.step_was_skipped


def test_one_overflow_does_not_last() -> None:
    """From 2**16 with a window of 4, one bad step: the scale is 2**16 again after four good ones."""
    module, optimizer, compute = make(
        torch.float16, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**16, "scale_window": 4}
    )
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        compute(step)
        for param in module.parameters():
            assert param.grad is not None
            param.grad.fill_(torch.nan if step == 0 else 1.0)
        optimizer.step()
        scales.append(optimizer.loss_scale)
    assert scales == [2.0**15, 2.0**15, 2.0**15, 2.0**15, 2.0**16]


@pytest.mark.parametrize("wide", [False, True], ids=["half gradients", "float32 gradients"])
def test_gradients_of_several_passes_add_up_at_any_scale(wide: bool) -> None:
    """A pass before a step that changed the scale, or before `update_master_grads`, counts as much as one after it."""
    module, optimizer, compute = make(
        torch.float16, "SGD", dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**8, "scale_window": 1}
    )
    if wide:
        for param in module.parameters():
            param.grad_dtype = torch.float32
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # all gradients are of the same weights
        group["weight_decay"] = 0.0
    compute(0)
    optimizer.step()
    assert optimizer.loss_scale == 2.0**9
    compute(1)
    optimizer.update_master_grads()
    optimizer.update_master_grads()  # twice does no harm
    compute(2)
    optimizer.update_master_grads()
    reference = layers().half()
    for step in range(3):
        reference(inputs(step).half()).float().square().mean().backward()
    got = [param.grad for group in optimizer.fp32_from_fp16_groups for param in group]
    expected = [param.grad.float() for group in groups_of(reference) for param in group["params"]]
    torch.testing.assert_close(got, expected, rtol=5e-3, atol=1e-5)


def test_masters_follow_weights_that_somebody_else_has_written() -> None:
    """A checkpoint loaded into the module must not be undone by the next step; where the rounded master is what was
    written, as when weights are swapped out and in again, the master keeps its digits."""
    module, optimizer, compute = make(torch.bfloat16, "SGD")
    train(range(2), optimizer, compute)
    digits = optimizer.master_params[0].detach().clone()
    saved = copy.deepcopy(module.state_dict())
    module.load_state_dict({name: torch.full_like(value, 3.0) for name, value in saved.items()})
    module.load_state_dict(saved)
    bias = module.module[3].bias
    with torch.no_grad():
        bias.fill_(2.0)
    optimizer.zero_grad()
    optimizer.update_master_grads()
    assert torch.equal(optimizer.master_params[0], digits) and not torch.equal(digits, digits.bfloat16().float())
    master = next(m for m in optimizer.master_params if optimizer._masters.half_of(m) is bias)
    assert torch.equal(master, torch.full((3,), 2.0))
    bias.data.fill_(1.0)  # this torch does not show
    optimizer.reload_model_params()
    assert torch.equal(master, torch.full((3,), 1.0))


def test_it_continues_bit_for_bit_from_its_state() -> None:
    """Masters and the scale are part of the state: half precision weights alone would lose digits."""
    arguments: dict[str, Any] = {
        "dynamic_loss_scale": True,
        "dynamic_loss_args": {"init_scale": 2.0**24, "scale_window": 3},
    }
    module, optimizer, compute = make(torch.float16, **arguments)
    train(range(12), optimizer, compute)
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    losses = train(range(12, 20), optimizer, compute)
    other, resumed, compute_other = make(torch.float16, **arguments)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert train(range(12, 20), resumed, compute_other) == losses
    assert resumed.loss_scale == optimizer.loss_scale
    torch.testing.assert_close(resumed.master_params, optimizer.master_params, rtol=0, atol=0)


def test_state_of_the_inner_optimizer_survives_the_wrapping() -> None:
    """An optimizer that was resumed before it is wrapped keeps its moments, for the masters."""
    module = FP16_Module(layers(), torch.bfloat16)
    inner = torch.optim.AdamW(module.parameters(), lr=0.01)
    module(inputs(0)).mean().backward()
    inner.step()
    expected = [inner.state[param]["exp_avg"].float() for param in module.parameters()]
    optimizer = FP16_Optimizer(inner)
    got = [optimizer.state[master]["exp_avg"] for master in optimizer.master_params]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert len(optimizer.state) == len(expected)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("by_torch", [False, True])
def test_the_step_works_on_clipped_gradients(dtype: torch.dtype, by_torch: bool) -> None:
    """Also where masters have copies of the gradients and no overflow is looked for: making the copies anew in step()
    would undo the clipping without a word."""
    module, optimizer, compute = make(dtype, "SGD")
    for group in optimizer.param_groups:
        group.update(lr=1.0, momentum=0.0, weight_decay=0.0)
    before = [param.detach().clone() for param in optimizer.master_params]
    compute(0)
    if by_torch:
        optimizer.update_master_grads()
        torch.nn.utils.clip_grad_norm_(optimizer.master_params, 1e-3)
    else:
        assert optimizer.clip_master_grads(1e-3) > 1e-2
    optimizer.step()
    moved = torch.stack([(a - b).norm() for a, b in zip(before, optimizer.master_params, strict=True)]).norm()
    torch.testing.assert_close(moved.item(), 1e-3, rtol=2e-2, atol=0)


def test_gradients_from_before_the_optimizer_are_not_divided_by_its_scale() -> None:
    """Nobody can have multiplied them; the first step would do nothing."""
    module = FP16_Module(layers(), torch.float16)
    module(inputs(0)).square().mean().backward()
    expected = [param.grad.float() for param in module.parameters()]
    optimizer = FP16_Optimizer(torch.optim.SGD(module.parameters(), lr=0.1), dynamic_loss_scale=True)
    optimizer.update_master_grads()
    torch.testing.assert_close([param.grad for param in optimizer.master_params], expected, rtol=0, atol=0)


def test_a_parameter_has_one_master() -> None:
    """A second one would write over the first one's updates."""
    module, optimizer, _ = make(torch.bfloat16)
    with pytest.raises(UsageError, match="in a group of this optimizer already"):
        optimizer.add_param_group({"params": iter([module.module[0].weight])})
    assert len(optimizer.master_params) == len(list(module.parameters()))


def test_a_state_dict_has_weights_that_were_written_since_the_last_step() -> None:
    """Saved with masters from before, the weights would jump back when it is loaded."""
    module, optimizer, _ = make(torch.bfloat16)
    with torch.no_grad():
        module.module[0].weight.fill_(3.0)
    assert torch.equal(optimizer.state_dict()["_smp_fp32_masters"][0], torch.full((8, 4), 3.0))


def test_what_scripts_ask_for() -> None:
    """Groups of both precisions side by side; all are cleared together."""
    module = FP16_Module(layers(), torch.float16)
    module.module[1].float()
    optimizer = FP16_Optimizer(torch.optim.SGD(module.module.parameters(), lr=0.1), static_loss_scale=8.0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float16))], "lr": 0.5})
    assert [[p.dtype for p in group] for group in optimizer.fp16_groups] == [[torch.float16] * 4, [torch.float16]]
    assert [len(group) for group in optimizer.fp32_from_fp16_groups] == [4, 1]
    assert [len(group) for group in optimizer.fp32_from_fp32_groups] == [2, 0]
    assert optimizer.fp32_from_fp32_groups[0][0] is module.module[1].weight
    assert all(param.dtype == torch.float32 for param in optimizer.master_params)
    for param in module.module.parameters():
        param.grad = torch.full_like(param, 8.0)
    assert optimizer.clip_master_grads(1e9) == pytest.approx(sum(p.numel() for p in module.parameters()) ** 0.5)
    optimizer.zero_grad()
    assert all(param.grad is None for param in [*module.parameters(), *optimizer.master_params])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1.0 / (step + 1))
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.25]


class Plain(torch.optim.Optimizer):
    """As a script may write one: its step takes no closure."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=self.param_groups[0]["lr"])


def test_an_optimizer_whose_step_takes_no_closure_works() -> None:
    """A failure means that an optimizer of the script's own works without the wrapper only."""
    module = FP16_Module(layers(), torch.bfloat16)
    optimizer = FP16_Optimizer(Plain(module.parameters()))
    optimizer.backward(module(inputs(0)).sum())
    wanted = [param.float() - 0.1 * param.grad.float() for param in module.parameters() if param.grad is not None]
    optimizer.step()
    for master, want in zip(optimizer.master_params, wanted, strict=True):
        assert torch.allclose(master, want)


def test_closures_work_where_no_overflow_has_to_be_known() -> None:
    """LBFGS calls its closure again and again within a step; each time the module has to hold the newest masters."""
    module = FP16_Module(layers(), torch.bfloat16)
    optimizer = FP16_Optimizer(torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=5))
    losses: list[float] = []
    firsts: list[bool] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        firsts.append(optimizer.first_closure_call_this_step)
        loss = (module(inputs(0)) - 1).square().mean()
        optimizer.backward(loss)
        losses.append(loss.item())
        return loss

    optimizer.step(closure)
    assert firsts == [True] + [False] * (len(losses) - 1) and len(losses) > 3
    assert losses[-1] < 0.7 * losses[0]
    for master, param in zip(optimizer.master_params, module.parameters(), strict=True):
        assert torch.equal(master.bfloat16(), param)


def test_a_closure_under_a_loss_scale_is_refused() -> None:
    """The update could not be skipped any more when its closure overflows."""
    _, optimizer, compute = make(torch.float16)
    with pytest.raises(UsageError, match=r"model.backward\(loss\), and call step\(\)"):
        optimizer.step(lambda: compute(0))


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_after_the_masters_have_taken_theirs_count(dtype: torch.dtype) -> None:
    """A second loss.backward() between `update_master_grads` and `step` must not be lost. Clipping starts anew."""
    module, optimizer, _ = make(dtype, "SGD")
    reference, expected, _ = make(dtype, "SGD")
    for step in range(2):
        reference(inputs(step)).square().mean().backward()
        module(inputs(step)).square().mean().backward()
        if step == 0:
            optimizer.update_master_grads()
    for each in (optimizer, expected):
        each.step()
    torch.testing.assert_close(optimizer.master_params, expected.master_params, rtol=0, atol=0)


def test_a_frozen_parameter_stays_frozen_and_counts_when_it_is_thawed() -> None:
    """A failure means that watching gradients needs parameters that are trained from the start."""
    module = FP16_Module(layers(), torch.float16)
    weight = module.module[0].weight.requires_grad_(False)
    optimizer = FP16_Optimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    assert not weight.requires_grad
    module(inputs(0)).sum().backward()
    optimizer.update_master_grads()
    weight.requires_grad_()
    weight.float().sum().backward()
    optimizer.clip_master_grads(1e9)
    assert torch.equal(optimizer.master_params[0].grad, torch.ones_like(weight))  # type: ignore[arg-type]


def test_zero_grad_of_the_inner_optimizer_is_that_of_the_wrapper() -> None:
    """It holds the masters; gradients that the module's parameters keep would come back with the next step."""
    module, optimizer, compute = make(torch.float16)
    compute(0)
    optimizer.update_master_grads()
    optimizer.optimizer.zero_grad()
    assert all(param.grad is None for param in [*module.parameters(), *optimizer.master_params])


def test_copying_is_refused() -> None:
    """Masters of a copy would update the parameters of this module, or nobody's."""
    _, optimizer, _ = make(torch.float16)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match=r"FP16_Optimizer cannot be copied or pickled.*state_dict\(\)"):
            copied(optimizer)


def test_parameters_keep_no_optimizer_alive() -> None:
    """A model that gets one optimizer after another would hold masters of all."""
    module, optimizer, _ = make(torch.float16)
    master = weakref.ref(optimizer.master_params[0])
    del optimizer, _
    gc.collect()
    assert master() is None
    module(inputs(0)).sum().backward()


def test_only_a_plain_optimizer_can_be_wrapped() -> None:
    """Two wrappers would scale twice."""
    _, optimizer, _ = make(torch.float16)
    with pytest.raises(UsageError, match="wraps a plain torch optimizer, got FP16_Optimizer"):
        FP16_Optimizer(optimizer)
    with pytest.raises(UsageError, match="float32"):
        FP16_Module(layers(), torch.float32)
