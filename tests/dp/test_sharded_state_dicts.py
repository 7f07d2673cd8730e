"""Sharded optimizer state saved and loaded: owned, gathered for a stage, or whole; sharded or not on either side."""

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp import runtime
from smp.errors import CheckpointError, CommError
from tests.dp.helpers import assert_close, batch
from tests.dp.sharded import DOUBLE, DP, GRIDS, RANKS, Both
from tests.harness import on_ranks
from tests.parity.compare import adam, build, job_batch, sgd
from tests.parity.test_tied import APART, start, stepper
from tests.stateful import shared_directory


def ranks(arguments: dict[str, Any]) -> int:
    return RANKS[arguments["grid"]]


def assert_same_state(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two full optimizer states."""
    assert got["param_groups"] == expected["param_groups"]
    assert got["state"].keys() == expected["state"].keys()
    for position, state in expected["state"].items():
        assert got["state"][position].keys() == state.keys()
        for key, value in state.items():
            assert_close(got["state"][position][key], value, f"{key} of {position}", 1e-9)


@pytest.mark.parametrize("grid", GRIDS)
@on_ranks(ranks)
def test_every_form_of_state_continues_the_run(grid: str) -> None:
    """Owned, gathered and whole state, from a sharded and from an unsharded job, loaded into both, before and after
    partition. A failure means moments that are lost, or that land at another parameter."""
    saved: dict[str, Any] = {}
    for sharded in (True, False):
        both = Both(grid, sharded=sharded)
        both.run(range(3))
        optimizer = both.optimizer
        saved[f"whole, sharded {sharded}"] = copy.deepcopy(optimizer.state_dict())
        assert_same_state(saved[f"whole, sharded {sharded}"], both.plain_optimizer.state_dict())
        saved[f"gathered, sharded {sharded}"] = copy.deepcopy(optimizer.local_state_dict())
        saved[f"owned, sharded {sharded}"] = copy.deepcopy(optimizer.local_state_dict(gather_if_shard=False))
        weights = copy.deepcopy(both.model.state_dict())
    assert len(saved["owned, sharded True"]["state"]) < len(saved["gathered, sharded True"]["state"])
    for key in ("state", "param_groups", "_smp_param_names"):
        of_both = [saved[f"gathered, sharded {sharded}"][key] for sharded in (True, False)]
        assert repr(of_both[0]) == repr(of_both[1]), f"{key}: gathered state is not what an unsharded job has"
    both.run(range(3, 5))
    for sharded in (True, False):
        job = Both(grid, sharded=sharded, seed=1)
        for state in saved.values():
            job.model.load_state_dict(copy.deepcopy(weights))
            job.optimizer.load_state_dict(copy.deepcopy(state))
            job.run_here(range(3, 5))
            job.plain = both.plain
            job.assert_same()
    runtime.reset()


@on_ranks(2)
def test_whole_state_of_alternating_groups_loads_into_plain_adam() -> None:
    """a7-1. A failure means an index built by groups: state mixed up, or missing for what other ranks own."""

    def layers() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).double()

    def optimizer_of(module: nn.Sequential) -> torch.optim.Optimizer:
        even, odd = ([p for layer in list(module)[first::2] for p in layer.parameters()] for first in (0, 1))
        return torch.optim.Adam([{"params": even, "weight_decay": 0.1}, {"params": odd, "lr": 1e-3}], lr=1e-2)

    def train(module: Any, optimizer: Any, steps: range, parts: int) -> None:
        for number in steps:
            optimizer.zero_grad()
            x = batch(number, 4).chunk(parts)[smp.dp_rank() if parts > 1 else 0]
            module(x).pow(2).mean().backward()
            optimizer.step()

    runtime.reset()
    smp.init({**DP, "microbatches": 1})
    module, plain = layers(), layers()
    optimizer = smp.DistributedOptimizer(optimizer_of(module))
    model = smp.DistributedModel(module)
    reference = optimizer_of(plain)
    train(model, optimizer, range(3), 2)
    train(plain, reference, range(3), 1)
    whole = optimizer.state_dict()
    assert sorted(whole["state"]) == list(range(12))
    alone = copy.deepcopy(module)
    continued = optimizer_of(alone)
    continued.load_state_dict(copy.deepcopy(whole))
    train(alone, continued, range(3, 6), 1)
    train(plain, reference, range(3, 6), 1)
    for (name, param), expected in zip(alone.named_parameters(), plain.parameters()):
        assert_close(param.detach(), expected.detach(), name, 1e-9)
    only_first = optimizer.state_dict(gather_to_rank0=True)
    assert only_first == {} if smp.rank() else repr(only_first) == repr(whole)
    runtime.reset()


@pytest.mark.parametrize("grid", GRIDS)
@on_ranks(ranks)
def test_the_way_of_the_trainer_through_files(grid: str) -> None:
    """Each rank writes what it owns; a post-step hook loads it. A failure means that a resumed run starts anew."""
    both = Both(grid)
    both.run(range(2))
    with shared_directory() as directory:
        smp.save(
            both.optimizer.local_state_dict(gather_if_shard=False),
            directory / "optimizer.pt",
            partial=True,
            v3=smp.state.cfg.shard_optimizer_state,
        )
        names = sorted(os.listdir(directory))
        assert len(names) == smp.size()
        assert f"optimizer.pt_{smp.pp_rank()}_{smp.tp_rank()}_{smp.rdp_rank()}" in names
        weights = copy.deepcopy(both.model.state_dict())
        both.run(range(2, 4))
        for sharded in (True, False):
            job = Both(grid, sharded=sharded, seed=1)
            job.model.load_state_dict(copy.deepcopy(weights))
            job.model.register_post_step_hook(
                lambda model, optimizer: optimizer.load_state_dict(smp.load(directory / "optimizer.pt", partial=True))
            )
            job.run_here(range(2, 4))
            job.plain = both.plain
            job.assert_same()
    runtime.reset()


@on_ranks(2)
def test_a_guard_around_sharded_state_names_the_missing_ranks() -> None:
    """A failure means that `if smp.rdp_rank() == 0` around state that is spread over replicas is a hang."""
    os.environ["SMP_GUARD_TIMEOUT"] = "2"
    try:
        both = Both()
        both.run(range(1))
        for call in (both.optimizer.local_state_dict, both.optimizer.state_dict):
            if smp.rdp_rank() == 0:
                with pytest.raises(CommError, match=r"missing ranks \[1\](?s:.*)With shard_optimizer_state"):
                    call()
            smp.barrier()
            if smp.rdp_rank() == 1:  # too late: it hears of it, or finds nobody for another try
                with pytest.raises(CommError, match=r"gave up|missing ranks \[0\]"):
                    call()
            smp.barrier()
    finally:
        del os.environ["SMP_GUARD_TIMEOUT"]
        runtime.reset()


@on_ranks(2)
def test_parts_of_two_saves_are_refused_on_every_replica() -> None:
    """A failure means that a save cut short between the replicas' files resumes with half of the old state."""
    both = Both()
    both.run(range(1))
    with shared_directory() as directory:
        for number in range(2):
            state = both.optimizer.local_state_dict(gather_if_shard=False)
            smp.save(state, directory / f"optimizer{number}", v3=True)
        smp.barrier()
        if smp.rank() == 1:
            os.replace(directory / "optimizer0_0_0_1", directory / "optimizer1_0_0_1")
        smp.barrier()
        with pytest.raises(CheckpointError, match="come from 2 different saves"):
            smp.load(directory / "optimizer1")
        with pytest.raises(CheckpointError, match="optimizer0_0_0_1 does not exist"):
            smp.load(directory / "optimizer0")
    runtime.reset()


@on_ranks(4)
def test_tied_weights_are_updated_alike_on_their_stages() -> None:
    """a2-2. Each stage that holds the weight has an owner of its own for it. A failure means that the copies part, that
    their state does, or that norm, decay or whole state count the weight twice."""
    for make in (sgd, adam):
        model, _ = start(config={"shard_optimizer_state": True, "microbatches": 1})
        optimizer = smp.DistributedOptimizer(make(model.module.parameters()))
        plain = build(APART, DOUBLE)
        reference = make(plain.parameters())
        run = stepper(model)
        for number in range(3):
            optimizer.zero_grad()
            reference.zero_grad()
            run(number)
            plain(**job_batch(APART, 2 * smp.dp_size(), number, DOUBLE)).backward()
            norm = smp.clip_grad_norm_(model.parameters(), 0.1)
            assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), "norm", 1e-9)
            optimizer.step()
            reference.step()
            whole = dict(plain.named_parameters())
            for name, param in model.local_named_parameters():
                assert_close(param.detach(), whole[name].detach(), name, 1e-9)
        gathered = optimizer.local_state_dict()
        names = [name for group in gathered["_smp_param_names"] for name in group]
        of_tied = gathered["state"][names.index("embedding.weight")] if "embedding.weight" in names else None
        held = [state for state in smp.allgather(of_tied, smp.WORLD) if state is not None]
        assert len(held) == smp.size()
        for state in held[1:]:
            assert all(torch.equal(value, held[0][key]) for key, value in state.items() if isinstance(value, Tensor))
        weights = smp.allgather(model.module.get_parameter("embedding.weight").detach(), smp.WORLD)
        assert all(torch.equal(weight, weights[0]) for weight in weights)
        assert_same_state(optimizer.state_dict(), reference.state_dict())
        runtime.reset()


@on_ranks(4)
def test_numbers_of_parameters_are_those_of_the_stage() -> None:
    """A failure means that scripts which translate optimizer state by number take another parameter's."""
    both = Both("tp")
    both.run(range(1))
    names = [name for group in both.optimizer.local_state_dict()["_smp_param_names"] for name in group]
    assert names == [name for name, _ in both.model.virtual_named_parameters()]
    assert smp.state.param_index_to_name_tp_group == [dict(enumerate(names))] * 2
    assert smp.state.param_name_to_index_tp_group[1]["second.weight"] == names.index("second.weight")
    runtime.reset()
