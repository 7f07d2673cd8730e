"""Tied weights that live on several stages: counted, saved, loaded and updated as the one weight that they are."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp import StepError, UsageError, runtime
from tests.harness import on_ranks
from tests.parity.compare import assert_close, build
from tests.parity.test_tied import APART, DOUBLE, TWO_STAGES, assert_equal_copies, log_lines, start, stepper
from tests.parity.zoo import Case, Tied, tokens
from tests.stateful import shared_directory

# -- counted once ------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_norms_count_a_tied_weight_once():
    """a5-3: a norm that counts the head on both stages clips too much. Split table, whole blocks, two stages."""
    for prepare in (lambda module: None, smp.set_tensor_parallelism):
        runtime.reset()
        smp.init({**TWO_STAGES, "tensor_parallel_degree": 2})
        module = build(APART, DOUBLE)
        elements = sum(p.numel() for p in module.parameters())
        prepare(module)
        for path, stage in APART.stages(2).items():
            smp.set_partition(module.get_submodule(path), stage)
        model = smp.DistributedModel(module)
        stepper(model)(0)
        assert_equal_copies(model)
        for norm_type, want in ((2.0, elements**0.5), (1.0, float(elements)), (float("inf"), 1.0)):
            for clip in (smp.clip_grad_norm_, nn.utils.clip_grad_norm_):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                assert clip(model.parameters(), 1e9, norm_type).item() == pytest.approx(want, rel=1e-12)
        assert sum(p.numel() for p in model.module.parameters()) <= elements
    runtime.reset()


@on_ranks(2)
def test_the_partition_table_counts_a_tied_weight_once():
    """The sum of the printed numbers of parameters is that of the model."""
    with log_lines() as lines:
        model, _ = start()
        stepper(model)(0)
    if smp.rank() == 0:
        text = next(line for line in lines if "Partition assignments" in line)
        assert "embedding.weight is held by the stages 0, 1 and counted on 0" in text
        counts = [int(number.replace(",", "")) for number in re.findall(r"^ +\d  +([\d,]+)  ", text, re.MULTILINE)]
        assert sum(counts) == sum(p.numel() for p in build(APART).parameters())
    runtime.reset()


# -- state -------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_holders_start_equal():
    """Stages seeded differently start from the first holder's weight; a delayed one is initialised once."""
    for delayed in (False, True):
        runtime.reset()
        smp.init(TWO_STAGES)
        torch.manual_seed(7 + smp.rank())
        with smp.delay_param_initialization(delayed):
            module = Tied()
        before = None if delayed else module.embedding.weight.detach().clone()
        smp.set_partition(module.embedding, 0)
        smp.set_partition(module.head, 1)
        model = smp.DistributedModel(module)
        ids = torch.arange(10).view(2, 5)
        assert smp.step(model.forward)(ids).reduce_mean().isfinite()
        assert_equal_copies(model)
        if before is not None and smp.rank() == 0:
            assert torch.equal(model.module.head.weight, before)
    runtime.reset()


@on_ranks(2)
def test_state_is_whole_on_every_holder_and_gathered_once():
    """Full and partial state dicts of model and optimizer, saved with the weight on two stages or on one, loaded into
    either: training goes on as if nothing had happened."""
    smp.init(TWO_STAGES)
    with shared_directory() as path:
        saved: dict[bool, tuple[Any, Any]] = {}
        for apart in (True, False):
            model, optimizer = start(config={"replicate_tied": "auto" if apart else False})
            train = stepper(model)
            for number in range(2):
                optimizer.zero_grad()
                train(number)
                optimizer.step()
            full = model.state_dict()
            assert torch.equal(full["head.weight"], full["embedding.weight"])
            assert list(full) == list(build(APART).state_dict())
            local = model.local_state_dict()
            names = {"embedding.weight", "head.weight"} & set(local)
            assert len(names) == (2 if apart or smp.pp_rank() == 0 else 0)
            whole = optimizer.state_dict()
            assert len(whole["state"]) == len(list(model.module.parameters()))
            smp.save({"model": local, "optimizer": optimizer.local_state_dict()}, f"{path}/{apart}.pt")
            smp.barrier()
            saved[apart] = (full, whole)
            optimizer.zero_grad()
            train(2)
            optimizer.step()
            goal = model.state_dict()
        for before in (True, False):
            for after in (True, False):
                for partial in (True, False):
                    model, optimizer = start(config={"replicate_tied": "auto" if after else False}, seed=9)
                    part = smp.load(f"{path}/{before}.pt") if partial else None
                    model.load_state_dict(part["model"] if part else saved[before][0])
                    optimizer.load_state_dict(part["optimizer"] if part else copy.deepcopy(saved[before][1]))
                    stepper(model)(2)
                    assert_equal_copies(model, int(after))
                    optimizer.step()
                    got = model.state_dict()
                    for name, value in goal.items():
                        assert_close(got[name], value, 1e-9, f"{before} {after} {partial} {name}")
    runtime.reset()


# -- refused -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_groups_that_would_update_the_copies_differently_are_refused():
    """Decay for the head and none for the table: one weight cannot have both."""
    model, _ = start()
    train = stepper(model)
    train(0)
    on_table, others = [], []
    for name, parameter in model.local_named_parameters():
        (on_table if name == "embedding.weight" and smp.pp_rank() == 0 else others).append(parameter)
    groups = [{"params": others}, {"params": on_table, "weight_decay": 0.0}]
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1))
    with pytest.raises(UsageError, match=r"the stages 0 and 1 hold the tied weight 'embedding.weight' and would"):
        optimizer.step()
    runtime.reset()


class Written(Tied):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.mul_(0.5)
        return super().forward(ids)


@on_ranks(2)
def test_a_weight_written_inside_the_step_is_refused():
    """One stage would see the change, the others not, and nothing would say so."""
    model, _ = start(Case(Written, tokens, APART.places))
    with pytest.raises(StepError, match=r"changes a weight in place that the stages \[0, 1\] hold"):
        stepper(model)(0)
    runtime.reset()
