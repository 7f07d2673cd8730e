"""DistributedOptimizer: one optimizer per rank that together are the one of a single process."""

import copy
import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import smp
from smp import runtime
from smp.errors import CheckpointError, CommError, UsageError
from tests.dp.helpers import assert_close, assert_same_gradients, batch, chain, loss_of, make_reducer, my_part
from tests.harness import on_ranks
from tests.standin import free, install_model, layers, shard

STAGES = [["0.weight", "0.bias", "1.weight", "1.bias"], ["2.weight", "2.bias", "3.weight", "3.bias"]]
CUT = {"0.weight": 0, "2.weight": 1, "2.bias": 0}
PP_TP = {"ddp": True, "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Weights last to first with decay, biases without: an order that is not the module's."""
    named = list(module.named_parameters())
    return [
        {"params": [p for n, p in reversed(named) if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0, "lr": 2e-2},
    ]


def fill_gradients(module: nn.Module, step: int) -> None:
    """The same gradients for the same names, whole or this rank's part of them."""
    for number, param in enumerate(module.parameters()):
        spec = getattr(param, "_smp_shard", None)
        if param.untyped_storage().nbytes() == 0:
            continue
        generator = torch.Generator().manual_seed(100 * step + number)
        whole = torch.randn(spec.global_shape if spec else param.shape, generator=generator, dtype=torch.float64)
        param.grad = spec.split(whole) if spec else whole


def partition(model: Any, stages: list[list[str]], cut: dict[str, int]) -> None:
    """What DistributedModel does: frees what other stages own, cuts, then tells the optimizer."""
    rt = runtime.get()
    mine = stages[rt.pp_rank]
    for name, param in model.module.named_parameters():
        if name not in mine:
            free(param)
        elif name in cut:
            shard(param, cut[name])
    model.local_parameters = lambda: [param for name, param in model.module.named_parameters() if name in mine]
    model.partitioned = True
    if rt.optimizer is not None:
        rt.optimizer.take_local(model.local_parameters())
    rt.run_waiting_loads()


def trained(module: nn.Module, steps: range, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        fill_gradients(module, step)
        optimizer.step()


def assert_same_parameters(module: nn.Module, reference: nn.Module) -> None:
    for (name, param), whole in zip(module.named_parameters(), reference.parameters()):
        if param.untyped_storage().nbytes():
            spec = getattr(param, "_smp_shard", None)
            assert_close(param.detach(), spec.split(whole.detach()) if spec else whole.detach(), name)


def assert_same_state(got: Any, expected: Any, path: str = "state") -> None:
    if isinstance(expected, torch.Tensor):
        assert_close(got, expected, path)
    elif isinstance(expected, dict):
        assert set(got) == set(expected), path
        for key in expected:
            assert_same_state(got[key], expected[key], f"{path}[{key}]")
    elif isinstance(expected, list):
        assert len(got) == len(expected), path
        for number, item in enumerate(expected):
            assert_same_state(got[number], item, f"{path}[{number}]")
    else:
        assert got == expected, path


def reference_run(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = layers()
    optimizer = torch.optim.AdamW(groups_of(module), lr=1e-2)
    trained(module, range(steps), optimizer)
    return module, optimizer


def distributed_run(steps: int, when: str = "before") -> tuple[Any, smp.DistributedOptimizer]:
    """The same training, the optimizer made `before` partition, or after it from `local` or from `raw` parameters."""
    model = install_model(layers(), partitioned=False)
    if when != "before":
        partition(model, STAGES, CUT)
    groups = groups_of(model.module)
    if when == "local":
        local = {id(param) for param in model.local_parameters()}
        groups = [{**group, "params": [p for p in group["params"] if id(p) in local]} for group in groups]
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups, lr=1e-2))
    if when == "before":
        partition(model, STAGES, CUT)
    trained(model.module, range(steps), optimizer)
    return model, optimizer


def without_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A full state dict says besides which position is whose, which plain optimizers pass over."""
    return {key: value for key, value in state_dict.items() if key != "_smp_param_names"}


@pytest.mark.parametrize("when", ["before", "raw"])
@on_ranks(4, config=PP_TP)
def test_full_state_is_that_of_one_process(when: str) -> None:
    """A failure means that a plain optimizer cannot load what we saved, or continues from another state."""
    reference_module, reference = reference_run(3)
    model, optimizer = distributed_run(3, when)
    assert_same_parameters(model.module, reference_module)
    state_dict = optimizer.state_dict()
    assert_same_state(without_names(state_dict), reference.state_dict())
    # a plain optimizer of one process continues from it
    single = copy.deepcopy(reference_module)
    plain = torch.optim.AdamW(groups_of(single), lr=5.0)
    plain.load_state_dict(state_dict)
    trained(single, range(3, 5), plain)
    trained(reference_module, range(3, 5), reference)
    assert_same_parameters(single, reference_module)


@on_ranks(4, config=PP_TP)
def test_full_state_of_optimizers_made_from_local_parameters_follows_the_module() -> None:
    """A failure means that positions depend on how the model was partitioned."""
    _, optimizer = distributed_run(2, "local")
    module = layers()
    named = list(module.named_parameters())
    in_order = [[p for n, p in named if n.endswith(kind)] for kind in ("weight", "bias")]
    reference = torch.optim.AdamW(
        [{**group, "params": params} for group, params in zip(groups_of(module), in_order)], lr=1e-2
    )
    trained(module, range(2), reference)
    assert_same_state(without_names(optimizer.state_dict()), reference.state_dict())


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("kind", ["full", "plain", "partial"])
@on_ranks(4, config=PP_TP)
def test_training_continues_from_loaded_state(kind: str, deferred: bool) -> None:
    """A failure means that moments, steps or options are lost, or land at another parameter."""
    reference_module, reference = reference_run(3)
    saved = reference.state_dict()
    if kind != "plain":
        optimizer = distributed_run(3)[1]
        saved = optimizer.state_dict() if kind == "full" else optimizer.local_state_dict()
    saved = copy.deepcopy(saved)
    model = install_model(copy.deepcopy(reference_module), partitioned=False)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups_of(model.module), lr=5.0))
    if deferred:
        optimizer.load_state_dict(saved)
        partition(model, STAGES, CUT)
    else:
        partition(model, STAGES, CUT)
        optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 2e-2]
    trained(model.module, range(3, 5), optimizer)
    trained(reference_module, range(3, 5), reference)
    assert_same_parameters(model.module, reference_module)


@on_ranks(4, config=PP_TP)
def test_partial_state_follows_parameters_to_another_stage() -> None:
    """A failure means that a better partition makes a checkpoint unreadable."""
    reference_module, reference = reference_run(3)
    saved = copy.deepcopy(distributed_run(3)[1].local_state_dict())
    assert saved["_smp_is_partial"] is True
    model = install_model(copy.deepcopy(reference_module), partitioned=False)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups_of(model.module), lr=5.0))
    partition(model, [STAGES[0][:2], STAGES[0][2:] + STAGES[1]], CUT)
    optimizer.load_state_dict(saved)
    trained(model.module, range(3, 5), optimizer)
    trained(reference_module, range(3, 5), reference)
    assert_same_parameters(model.module, reference_module)


@on_ranks(4, config=PP_TP)
def test_state_of_another_model_is_refused_by_every_rank() -> None:
    """A failure means moments loaded into the wrong parameters, or one rank raising while others wait."""
    _, optimizer = distributed_run(1)
    other = layers(3)
    plain = torch.optim.AdamW(groups_of(other))
    trained(other, range(1), plain)
    with pytest.raises(CheckpointError, match="another model"):
        optimizer.load_state_dict(plain.state_dict())
    partial = copy.deepcopy(optimizer.local_state_dict())
    if runtime.get().rank == 2:  # one stage's file is damaged: nobody else has this part of a distributed parameter
        assert partial["_smp_param_names"][0][1] == "2.weight"
        partial["_smp_param_names"][0][1] = "elsewhere"
    with pytest.raises(CheckpointError, match="has nothing about"):
        optimizer.load_state_dict(partial)
    with pytest.raises(CheckpointError, match="load a partial optimizer state, the others"):
        optimizer.load_state_dict({} if runtime.get().rank == 1 else partial)
    with pytest.raises(CheckpointError, match="not an optimizer's state dict"):
        optimizer.load_state_dict({})


@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_full_state_asked_for_on_some_ranks_only_names_the_missing() -> None:
    """A failure means that a guard around state_dict() is a hang."""

    os.environ["SMP_GUARD_TIMEOUT"] = "2"
    try:
        model = install_model(layers(), STAGES[runtime.get().pp_rank])
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.module.parameters(), lr=0.1))
        if runtime.get().rank == 0:
            with pytest.raises(CommError, match=r"missing ranks \[1\]"):
                optimizer.state_dict()
        smp.barrier()
        if runtime.get().rank == 1:  # too late: it hears of it, or finds nobody for another try
            with pytest.raises(CommError, match=r"gave up|missing ranks \[0\]"):
                optimizer.state_dict()
    finally:
        del os.environ["SMP_GUARD_TIMEOUT"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_a_rank_without_parameters_still_steps(kind: type[torch.optim.Optimizer]) -> None:
    """A failure means that a stage without parameters cannot train at all."""
    rt = runtime.get()
    model = install_model(layers(), partitioned=False)
    optimizer = smp.DistributedOptimizer(kind(model.module.parameters(), lr=0.1))
    partition(model, [[n for n, _ in model.module.named_parameters()], []], {})
    assert [len(group["params"]) for group in optimizer.param_groups] == [8 if rt.pp_rank == 0 else 0]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(2):
        optimizer.zero_grad()
        fill_gradients(model.module, step)
        assert optimizer.step(lambda: 3.0) == 3.0
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.025
    assert len(optimizer.state_dict()["param_groups"][0]["params"]) == 8


@on_ranks(1, config={})
def test_it_shares_groups_and_state_with_the_inner_optimizer() -> None:
    """a7-2. A failure means that changed learning rates, or a scheduler, do not reach the update."""
    model = install_model(layers())
    inner = torch.optim.Adam(groups_of(model.module), lr=1e-2)
    optimizer = smp.DistributedOptimizer(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    optimizer.param_groups[0]["lr"] = 7.0
    assert inner.param_groups[0]["lr"] == 7.0
    assert runtime.get().optimizer is optimizer
    assert optimizer.optimizer is inner
    assert (optimizer._is_accelerate_prepared, optimizer.step_was_skipped, optimizer.overflow) == (True, False, False)
    assert optimizer.loss_scale == 1.0
    assert [id(p) for p in optimizer.master_params] == [id(p) for g in inner.param_groups for p in g["params"]]
    with pytest.raises(UsageError, match="wraps a plain torch optimizer"):
        smp.DistributedOptimizer(optimizer)


@pytest.mark.parametrize("scheduled", ["wrapper", "inner"])
@on_ranks(1, config={})
def test_schedulers_take_the_wrapper_and_the_inner_optimizer(scheduled: str) -> None:
    """A failure means wrong learning rates, or torch's warning that the order of calls is wrong."""
    model = install_model(layers())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(groups_of(model.module), lr=1e-2))
    target = optimizer if scheduled == "wrapper" else optimizer.optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = torch.optim.lr_scheduler.LambdaLR(target, lambda step: 0.5**step)
        for step in range(3):
            fill_gradients(model.module, step)
            optimizer.step()
            schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2 / 8, 2e-2 / 8]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 3.0})
    assert optimizer.optimizer.param_groups[2]["lr"] == 3.0


@on_ranks(1, config={})
def test_zero_grad_drops_or_zeroes() -> None:
    """A failure means gradients of the step before in the next one."""
    model = install_model(layers())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.module.parameters(), lr=0.1))
    fill_gradients(model.module, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all((param.grad == 0).all() for param in model.module.parameters())
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.module.parameters())


@pytest.mark.parametrize("with_closure", [False, True])
@on_ranks(2, config={"ddp": True})
def test_the_step_ends_a_short_accumulation_window(with_closure: bool) -> None:
    """A failure means replicas that step with their own gradients, and windows out of step afterwards."""
    model = chain()
    reference = copy.deepcopy(model)
    reducer = make_reducer(model, backward_passes_per_step=2)
    install_model(model).reducer = reducer
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    step = 0
    for passes in (1, 2, 1):
        optimizer.zero_grad()
        plain.zero_grad()
        for _ in range(passes - 1):
            loss_of(model, my_part(batch(step, 4))).backward()
            loss_of(reference, batch(step, 4)).backward()
            step += 1

        def closure(step: int = step) -> torch.Tensor:
            loss = loss_of(model, my_part(batch(step, 4)))
            loss.backward()
            return loss

        if with_closure:
            assert optimizer.step(closure) is not None
        else:
            closure()
            optimizer.step()
        loss_of(reference, batch(step, 4)).backward()
        step += 1
        assert_same_gradients(model, reference)
        plain.step()
        assert_same_parameters(model, reference)


@on_ranks(4, config=PP_TP)
def test_clip_master_grads_is_global() -> None:
    """A failure means that stages scale their gradients by different factors."""
    reference_module, _ = reference_run(1)
    fill_gradients(reference_module, 9)
    expected = nn.utils.clip_grad_norm_(reference_module.parameters(), 0.5)
    model, optimizer = distributed_run(1)
    fill_gradients(model.module, 9)
    norm = optimizer.clip_master_grads(0.5)
    assert isinstance(norm, float)
    assert norm == pytest.approx(float(expected), rel=1e-12)
    assert optimizer._global_grad_norm == norm
    for (name, param), whole in zip(model.module.named_parameters(), reference_module.parameters()):
        if param.grad is not None:
            spec = getattr(param, "_smp_shard", None)
            assert_close(param.grad, spec.split(whole.grad) if spec else whole.grad, name)
