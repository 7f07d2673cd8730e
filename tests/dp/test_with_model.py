"""Data parallelism through the public calls, with and without a pipeline, against one process."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.dp.helpers import assert_close, batch
from tests.harness import on_ranks

DP = {"ddp": True, "microbatches": 2}
GRID = {**DP, "pipeline_parallel_degree": 2}
CONFIGS = pytest.mark.parametrize("config", [DP, GRID])


def ranks(arguments: dict[str, Any]) -> int:
    return 2 * arguments["config"].get("pipeline_parallel_degree", 1)


def config_of(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments["config"]


class Net(nn.Module):
    """Blocks of which `uses` says which run; ends in a batch norm when asked for."""

    def __init__(self, num_blocks: int = 4, norm: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_blocks))
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, x: Tensor, uses: Sequence[int]) -> Tensor:
        for number in uses:
            x = self.blocks[number](x).tanh()
        return self.norm(x)


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).double()


def train_step(model: Any) -> Any:
    @smp.step
    def train(x: Tensor, uses: Sequence[int] = (0, 1, 2, 3)) -> Tensor:
        loss = model(x, uses).pow(2).mean()
        model.backward(loss)
        return loss

    return train


def plain_step(module: nn.Module, x: Tensor, uses: Sequence[int] = (0, 1, 2, 3), replicas: int = 2) -> None:
    for part in x.chunk(2):  # microbatches
        (module(part, uses).pow(2).mean() / (2 * replicas)).backward()


def assert_equal_run(model: Any, reference: nn.Module) -> None:
    """This rank's parameters, gradients and buffers are those of the reference."""
    parameters = dict(reference.named_parameters())
    for name, param in model.local_named_parameters():
        assert_close(param.detach(), parameters[name].detach(), name, 1e-9)
        assert_close(param.grad, parameters[name].grad, f"gradient of {name}", 1e-9)
    buffers = dict(reference.named_buffers())
    for name, buffer in model.local_named_buffers():
        assert_close(buffer, buffers[name], name, 1e-9)


@CONFIGS
@pytest.mark.parametrize("views", [False, True])
@on_ranks(ranks, config=config_of)
def test_branches_that_change_by_pass_and_by_replica(config: dict[str, Any], views: bool) -> None:
    """a3-2. A failure means gradients that only one replica has, or has had, stay local."""
    module, reference = net(), net()
    model = smp.DistributedModel(module, backward_passes_per_step=2, gradient_as_bucket_view=views, bucket_cap_mb=1e-4)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.5))
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    train = train_step(model)
    for window in range(3):
        first, second = ([0], [[1], [1, 2]]) if window != 1 else ([2, 0], [[0, 1, 2], [2]])
        optimizer.zero_grad()
        plain.zero_grad()
        for number, uses in enumerate(([first, first], second)):
            parts = [batch(10 * window + 2 * number + replica, 4) for replica in range(2)]
            for part, blocks in zip(parts, uses):
                plain_step(reference, part, blocks)
            train(parts[smp.rdp_rank()], uses[smp.rdp_rank()])
        optimizer.step()
        plain.step()
        assert_equal_run(model, reference)


@CONFIGS
@on_ranks(ranks, config=config_of)
def test_step_functions_with_one_and_with_two_backwards_take_turns(config: dict[str, Any]) -> None:
    """What one step function has taught about when gradients are final does not hold for another one."""
    module, reference = net(), net()
    model = smp.DistributedModel(module, bucket_cap_mb=1e-4)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.5))
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    once = train_step(model)

    @smp.step
    def twice(x: Tensor) -> None:
        for uses in ([0, 1, 2, 3], [3, 1]):
            model.backward(model(x, uses).pow(2).mean())

    for number, function in enumerate([once, once, twice, twice, once, twice]):
        optimizer.zero_grad()
        plain.zero_grad()
        parts = [batch(2 * number + replica, 4) for replica in range(2)]
        for part in parts:
            plain_step(reference, part)
            if function is twice:
                plain_step(reference, part, [3, 1])
        function(parts[smp.rdp_rank()])
        optimizer.step()
        plain.step()
        assert_equal_run(model, reference)


@CONFIGS
@pytest.mark.parametrize("clip", ["torch", "smp", "optimizer"])
@on_ranks(ranks, config=config_of)
def test_clipping_after_windows_whole_and_short(config: dict[str, Any], clip: str) -> None:
    """A failure means that what a script clips by depends on how its model is spread."""
    module, reference = net(), net()
    model = smp.DistributedModel(module, backward_passes_per_step=3)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(module.parameters(), lr=0.01))
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    train = train_step(model)
    for window, passes in enumerate((3, 2, 3)):
        optimizer.zero_grad()
        plain.zero_grad()
        for number in range(passes):
            parts = [batch(10 * window + 2 * number + replica, 4) for replica in range(2)]
            for part in parts:
                plain_step(reference, part)
            train(parts[smp.rdp_rank()])
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
        if clip == "optimizer":
            norm = torch.tensor(optimizer.clip_master_grads(1e-3), dtype=torch.float64)
        else:
            norm = (nn.utils if clip == "torch" else smp).clip_grad_norm_(model.parameters(), 1e-3)
        assert_close(norm, expected, "norm", 1e-9)
        optimizer.step()
        plain.step()
        assert_equal_run(model, reference)


@CONFIGS
@on_ranks(ranks, config=config_of)
def test_replicas_continue_with_the_first_ones_statistics(config: dict[str, Any]) -> None:
    """A failure means batch norms that differ between replicas, so that evaluation depends on the rank."""
    module, reference = net(norm=True), net(norm=True)
    model = smp.DistributedModel(module)
    train = train_step(model)
    other = copy.deepcopy(reference)
    for step in range(3):
        model.zero_grad()
        reference.zero_grad()
        parts = [batch(10 * step + replica, 8) for replica in range(2)]
        other.load_state_dict(reference.state_dict())  # the second replica starts with the first one's buffers
        other.zero_grad()
        for replica, part in zip((reference, other), parts):
            plain_step(replica, part)
        for param, more in zip(reference.parameters(), other.parameters()):
            param.grad += more.grad
        train(parts[smp.rdp_rank()])
        if smp.rdp_rank() == 0:
            assert_equal_run(model, reference)
        else:
            buffers = dict(other.named_buffers())
            for name, buffer in model.local_named_buffers():
                assert_close(buffer, buffers[name], name, 1e-9)


@on_ranks(4, config=GRID)
def test_uneven_batches_with_a_pipeline() -> None:
    """A failure means that one replica's stages hang, or are left behind, when its batches run out."""
    module, reference = net(), net()
    model = smp.DistributedModel(module, bucket_cap_mb=1e-4)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.5))
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    train = train_step(model)
    counts = (2, 4)
    with model.join():
        for step in range(counts[smp.rdp_rank()]):
            optimizer.zero_grad()
            train(batch(10 * step + smp.rdp_rank(), 4))
            optimizer.step()
    for step in range(max(counts)):
        plain.zero_grad()
        for replica in range(2):
            if step < counts[replica]:
                plain_step(reference, batch(10 * step + replica, 4))
        plain.step()
    for name, param in model.local_named_parameters():
        assert_close(param.detach(), dict(reference.named_parameters())[name].detach(), name, 1e-9)


@pytest.mark.parametrize("kind", ["full", "partial"])
@on_ranks(4, config=GRID)
def test_optimizer_state_is_saved_and_loaded_before_partition(kind: str) -> None:
    """A failure means that a resumed run differs from the unbroken one."""
    module, reference = net(), net()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(module.parameters(), lr=0.01))
    plain = torch.optim.Adam(reference.parameters(), lr=0.01)
    train = train_step(model)

    def run(steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            plain.zero_grad()
            parts = [batch(10 * step + replica, 4) for replica in range(2)]
            for part in parts:
                plain_step(reference, part)
            train(parts[smp.rdp_rank()])
            optimizer.step()
            plain.step()

    run(range(3))
    weights = copy.deepcopy(model.state_dict() if kind == "full" else model.local_state_dict())
    state = copy.deepcopy(optimizer.state_dict() if kind == "full" else optimizer.local_state_dict())
    if kind == "full":
        expected = plain.state_dict()
        assert state["param_groups"] == expected["param_groups"]
        for position, entry in expected["state"].items():
            for key in entry:
                assert_close(state["state"][position][key], entry[key], f"{key} of {position}", 1e-9)
    smp.runtime.reset()
    smp.init(GRID)
    module = net()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(module.parameters(), lr=7.0))
    weights["_smp_is_partial"] = kind == "partial"
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train = train_step(model)
    run(range(3, 5))
    assert_equal_run(model, reference)


class Bare(nn.Module):
    """Its second stage has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Tanh()

    def forward(self, x: Tensor, uses: Sequence[int]) -> Tensor:
        return self.second(self.first(x))


@on_ranks(2, config={"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
def test_an_optimizer_made_after_partition_from_an_empty_stage() -> None:
    """A failure means that torch's check for empty parameter lists ends the run on some ranks."""
    torch.manual_seed(0)
    module = Bare().double()
    reference = copy.deepcopy(module)
    smp.set_partition(module.second, 1)
    model = smp.DistributedModel(module)
    train = train_step(model)
    train(batch(0, 4))
    model.zero_grad()
    assert len(list(model.parameters())) == (2 if smp.pp_rank() == 0 else 0)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    plain = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        train(batch(step, 4))
        plain_step(reference, batch(step, 4), replicas=1)
        optimizer.step()
        plain.step()
    assert_equal_run(model, reference)
    state = optimizer.state_dict()
    plain.load_state_dict(state)
    assert sorted(state["state"]) == [0, 1]
    if smp.pp_rank() == 0:
        with pytest.raises(ValueError, match="empty parameter list"):
            torch.optim.SGD([], lr=0.1)
