"""Which tied weights live on several stages, and what that means for a stage: pure rules, without processes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import smp
from smp import PartitionError, StepError
from smp.config import resolve
from smp.pp.assignment import _decide_alone
from smp.pp.cost import Costs, ModuleCost
from smp.pp.partition import assign, placed_by_hand
from smp.pp.stages import StageMap
from smp.pp.tied import exchange_bytes, obstacle, owner_of_call, refuse_write, replicable, shared_parameters
from smp.topology import Topology
from tests.logs import log_lines


class Language(nn.Module):
    """Table, body, head; the head's weight is the table."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, **options)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight


def pin(module, stage):
    module.__dict__["_smp_pinned_to_stage"] = stage


def chosen(model, policy, auto=True):
    return replicable(model, policy, placed_by_hand(model, auto))


def test_policies():
    """False keeps together, True does not; "auto" goes by what was placed by hand."""
    model = Language()
    weight = {id(model.table.weight)}
    assert chosen(model, False) == chosen(model, "auto") == set()
    assert chosen(model, True) == weight
    pin(model.head, 1)
    assert chosen(model, "auto") == set()  # the table follows the pin
    pin(model.table, 0)
    assert chosen(model, "auto") == weight
    assert chosen(model, False) == set()
    pin(model.table, 1)
    assert chosen(model, "auto") == set()


def decided(model, policy, costs, microbatches=4):
    """The stages of table and head that rank 0 decides on."""
    config = resolve(
        {"partitions": 2, "microbatches": microbatches, "replicate_tied": policy, "memory_weight": 0.0}, {}
    )
    fake = SimpleNamespace(config=config, topology=Topology(2, 2))
    modules = _decide_alone(model, fake, costs).assignment.modules
    return modules["table"], modules["head"]


def test_auto_takes_what_a_simulated_step_is_faster_with():
    """The trip of hidden states to the table's stage against the sum of the gradient."""

    def costs(hidden_bytes):
        table, body = ModuleCost(0.001, 0.002, output_bytes=hidden_bytes), ModuleCost(1, 2, output_bytes=hidden_bytes)
        own = {"table": table, "body.0": body, "body.1": body, "head": ModuleCost(2, 4)}
        return Costs(tuple(own), own, own)

    slow, fast = costs(10**10), costs(10)
    assert decided(Language(), "auto", slow) == decided(Language(), True, slow) == (0, 1)
    assert decided(Language(), "auto", fast) == decided(Language(), False, slow) == (0, 0)
    assert decided(Language(), "auto", None) == decided(Language(max_norm=1.0), "auto", slow) == (0, 0)
    large = Language()
    large.table.weight = large.head.weight = nn.Parameter(torch.empty(10**6, 10**6, device="meta"))
    assert decided(large, "auto", slow) == (0, 0)  # 4 TB of gradient


def test_a_stored_partition_must_agree_with_the_key(tmp_path):
    """A file made with replication, read where it is turned off or has become impossible."""
    config = {"partitions": 2, "partition_file": str(tmp_path / "file.json"), "replicate_tied": True}

    def decide(model, **more):
        fake = SimpleNamespace(config=resolve({**config, **more}, {}), topology=Topology(2, 2))
        return _decide_alone(model, fake, None).assignment

    stored = decide(Language())
    assert decide(Language(), load_partition=True, replicate_tied="auto") == stored
    with pytest.raises(PartitionError, match=r"takes 'table' and 'head' apart.*but 'replicate_tied' is False"):
        decide(Language(), load_partition=True, replicate_tied=False)
    with pytest.raises(PartitionError, match=r"takes 'table' and 'head' apart.*max_norm"):
        decide(Language(max_norm=1.0), load_partition=True)


def test_the_exchange_is_what_holders_beyond_the_first_add():
    """There and back; frozen weights and those on one stage cost nothing."""
    model = Language()
    places = {"table": 0, "head": 2}
    assert exchange_bytes(model, lambda name: places[name]) == 2 * 10 * 4 * 4
    assert exchange_bytes(model, lambda name: 1) == 0
    model.table.weight.requires_grad_(False)
    assert exchange_bytes(model, lambda name: places[name]) == 0


def test_the_partition_takes_users_apart_only_when_allowed():
    """The pins of both hold then, and the automatic partition places each as if it were alone."""
    model = Language()
    pin(model.table, 0)
    pin(model.head, 2)
    apart = chosen(model, "auto")
    for auto in (True, False):
        got = assign(model, 3, auto, 0, None, replicable=apart)
        assert (got.modules["table"], got.modules["head"]) == (0, 2)
        got = assign(model, 3, auto, 0, None)
        assert got.modules["table"] == got.modules["head"]
    free = Language()
    got = assign(free, 2, True, 0, None, replicable=chosen(free, True))
    assert (got.modules["table"], got.modules["head"]) == (0, 1)


def test_all_names_of_one_module_stay_together():
    """T5's table is one module under three names: it is called on one stage, whatever its weight is."""
    model = nn.Module()
    model.shared = nn.Embedding(10, 4)
    model.encoder, model.decoder = nn.Module(), nn.Module()
    for part in (model.encoder, model.decoder):
        part.table, part.layer = model.shared, nn.Linear(4, 4)
    model.head = nn.Linear(4, 10, bias=False)
    model.head.weight = model.shared.weight
    pin(model.shared, 0)
    pin(model.encoder, 0)
    pin(model.decoder, 1)
    pin(model.head, 2)
    for auto in (True, False):
        got = assign(model, 3, auto, 0, None, replicable=chosen(model, True))
        stages = StageMap(model, got.modules, got.own, 0)
        assert got.modules["shared"] == 0
        assert [holders for _, _, holders in stages.tied_parameters()] == [(0, 2)]


def test_what_cannot_be_kept_equal_is_kept_together_with_a_reason():
    """A table that renormalises itself, and one with sparse gradients."""
    with log_lines() as lines:
        for options, word in (({"max_norm": 1.0}, "max_norm"), ({"sparse": True}, "sparse gradients")):
            model = Language(**options)
            assert word in obstacle(shared_parameters(model)[0])
            assert chosen(model, True) == set()
            assert "'table' and 'head'" in lines[-1] and word in lines[-1]
        assert len(lines) == 2
        assert chosen(Language(max_norm=1.0), "auto") == set() and len(lines) == 2


def stage_map(model, rank, head=1, **more):
    names = {name: 0 for name, _ in model.named_modules()} | {"": None, "head": head}
    return StageMap(model, names | more, dict.fromkeys(names, 0), rank)


def test_holders_keep_their_memory_and_the_first_one_counts():
    """Both names of the weight are on both stages, everything else where it was."""
    for rank in range(3):
        model = Language()
        stages = stage_map(model, rank)
        assert stages.holders["table.weight"] == stages.holders["head.weight"] == (0, 1)
        assert stages.stage_of["head.weight"] == stages.owner_of(model.head.weight) == 0
        assert stages.is_local("head.weight") == stages.is_local("table.weight") == (rank < 2)
        before = model.table.weight.detach().clone()
        stages.free_others()
        assert torch.equal(model.head.weight, before) == (rank < 2)
        assert model.body[0].weight.isnan().all() == (rank != 0)


def test_a_registered_user_holds_the_parameter():
    """smp.register_parameter: the stage of a module that reads a weight without having it."""
    model = Language()
    model.head = nn.Tanh()
    smp.register_parameter(model.head, model.table.weight)
    assert stage_map(model, 0, head=2).holders == {
        "table.weight": (0, 2),
        **{f"body.{i}.{name}": (0,) for i in range(2) for name in ("weight", "bias")},
    }


def test_a_write_inside_the_step_is_noticed():
    """Only the stage that did it would have the new value."""
    model = Language()
    stages = stage_map(model, 1)
    stages.begin_step()
    stages.check_tied()
    stages.begin_step()
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(StepError, match=r"'table.weight' was changed in place inside the step, on stage 1 only"):
        stages.check_tied()
    refuse_write((1,), "here")
    with pytest.raises(StepError, match=r"^here changes a weight in place that the stages \[0, 1\] hold"):
        refuse_write((0, 1), "here")


def test_glue_code_reads_a_tied_weight_where_the_other_operand_lives():
    """The head of a model that writes it as F.linear(hidden, table.weight) needs no trip to the table's stage."""

    def value(owner, numel, order, parameter=None):
        return SimpleNamespace(owner=owner, numel=numel, order=order, parameter=parameter)

    def holders_of(parameter):
        return {"tied": (0, 2), "own": (1,)}.get(parameter, ())

    weight, own = value(0, 100, 3, "tied"), value(1, 50, 4, "own")
    assert owner_of_call([value(2, 9, 1), weight], holders_of) == 2
    assert owner_of_call([value(1, 9, 1), weight], holders_of) == 0
    assert owner_of_call([weight], holders_of) == 0
    assert owner_of_call([value(2, 9, 1), weight, own], holders_of) == 0
    assert owner_of_call([value(1, 200, 1), weight], holders_of) == 1
    assert owner_of_call([value(2, 50, 5), own], holders_of) == 2
