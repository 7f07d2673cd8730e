"""Declared families of another library: tables of names read both ways, and modules replaced by them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smp
from smp import runtime
from smp.errors import CheckpointError, UsageError
from smp.nn import DistributedLinear, DistributedModule
from smp.tp import families
from smp.tp.carry import is_merged
from smp.tp.convert import convert
from smp.tp.delayed import materialize
from smp.tp.families import Family, Place, Replacement, Rule, inside, weight_and_bias
from smp.tp.layouts import FUSED_QKV, TRANSPOSED, HeadMajor
from tests.harness import on_ranks
from tests.logs import log_lines
from tests.tp.twins import config, tp_group

# A library of one block and one model


class Settings:
    num_heads = 2
    size = 4
    limit = None


class Conv1D(nn.Module):
    """A linear whose weight lies the other way round, as GPT-2 has it."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def reset_parameters(self):
        nn.init.normal_(self.weight)
        nn.init.normal_(self.bias)

    def forward(self, x):
        return x @ self.weight + self.bias


class Block(nn.Module):
    def __init__(self, settings, size: int = 4) -> None:
        super().__init__()
        self.settings = settings
        self.q, self.k, self.v = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, size)
        self.out = Conv1D(size, 3 * size)

    def forward(self, x, past=None):
        return x + self.out(torch.cat([self.q(x), self.k(x), self.v(x)], -1)), past


class Model(nn.Module):
    def __init__(self, settings=None, size: int = 4) -> None:
        super().__init__()
        settings = settings or Settings()
        self.table = nn.Embedding(10, size)
        self.h = nn.ModuleList([Block(settings, size) for _ in range(2)])
        self.head = nn.Linear(size, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for block in self.h:
            x, _ = block(x)
        return self.head(x)


class Twin(DistributedModule):
    def __init__(self, size: int, use_alibi: bool = False) -> None:
        super().__init__()
        self.use_alibi = use_alibi
        self.qkv = DistributedLinear(size, 3 * size, split="out")
        self.out = DistributedLinear(3 * size, size, split="in")

    def forward(self, x):
        return x + self.out(self.qkv(x))


def arguments(block):
    if block.settings.limit is not None:
        raise smp.PartitionError(f"limit {block.settings.limit}: blocks without a limit can be split")
    return (block.q.in_features,), {}


BLOCK = (
    Rule(("q.weight", "k.weight", "v.weight"), "qkv.weight", FUSED_QKV),
    Rule(("q.bias", "k.bias", "v.bias"), "qkv.bias", FUSED_QKV),
    *weight_and_bias("out", "out", TRANSPOSED),
    Rule("mask", None),
)
MODEL = (
    Rule("table.weight", "words.weight"),
    *inside("h.{n}.", "layers.{n}.", BLOCK),
    Rule("head.weight", "head.weight", tied_to="table.weight"),
)
FAMILY = Family(
    "toy",
    ("toy",),
    (
        Replacement(
            f"{__name__}.Block",
            Twin,
            arguments,
            BLOCK,
            config=lambda block: block.settings,
            forward_hook=lambda x, past=None: ((x,), {}),
            return_hook=lambda out: (out, None),
            attributes=("settings",),
        ),
    ),
    (Place("", "", MODEL), Place("h.{n}.", "h.{n}.", BLOCK)),
)


@pytest.fixture
def no_model():
    families.forget_places()


def declare() -> None:
    families._DECLARED_IN[__name__] = __name__


# Names


def test_names_go_over_and_back(no_model):
    """Every key, bit by bit; a tied weight is one tensor under two names."""
    theirs = dict(Model().state_dict())
    theirs["h.1.mask"] = torch.ones(3)
    before = dict(theirs)
    ours = FAMILY.hf_to_smp(theirs)
    assert list(theirs) == list(before)
    parts = ["qkv.weight", "qkv.bias", "out.weight", "out.bias"]
    assert list(ours) == ["words.weight", *[f"layers.{n}.{part}" for n in (0, 1) for part in parts], "head.weight"]
    assert ours["head.weight"] is ours["words.weight"]
    assert ours["layers.1.out.weight"].shape == (4, 12)
    back = FAMILY.smp_to_hf(ours)
    assert set(back) == set(Model().state_dict())
    assert all(torch.equal(back[name], theirs[name]) for name in back)
    assert back["head.weight"] is back["table.weight"]
    assert set(FAMILY.smp_to_hf(ours, max_seq_len=5)) == set(back)
    del theirs["head.weight"]  # nobody said that it is tied
    assert "head.weight" not in FAMILY.hf_to_smp(theirs)


def test_untied_head_and_unknown_names_stay(no_model):
    """What no rule knows belongs to modules that are not replaced; a head with values of its own is kept."""
    model = Model()
    model.head.weight = nn.Parameter(torch.randn(10, 4))
    theirs = {**model.state_dict(), "classifier.weight": torch.ones(2), "step": 3}
    ours = FAMILY.hf_to_smp(theirs)
    assert {"head.weight", "classifier.weight", "step"} <= set(ours)
    back = FAMILY.smp_to_hf(ours)
    assert set(back) == set(theirs)
    assert torch.equal(back["head.weight"], model.head.weight)
    with pytest.raises(CheckpointError, match=r"h\.0\.k\.bias.*layers\.0\.qkv\.bias"):
        FAMILY.hf_to_smp({name: value for name, value in theirs.items() if name != "h.0.k.bias"})


def test_translation_holds_one_copy(no_model):
    """Views where nothing is fused; with `consume` the old entries go as the new ones come, ready to be written."""
    theirs = dict(Model().state_dict())
    ours = FAMILY.hf_to_smp(theirs)
    assert ours["layers.0.out.weight"].data_ptr() == theirs["h.0.out.weight"].data_ptr()
    back = FAMILY.smp_to_hf(ours)
    assert back["h.0.k.weight"].untyped_storage().data_ptr() == ours["layers.0.qkv.weight"].untyped_storage().data_ptr()
    kept = dict(theirs)
    ours = FAMILY.hf_to_smp(theirs, consume=True)
    assert theirs == {}
    back = FAMILY.smp_to_hf(ours, consume=True)
    assert ours == {}
    assert all(torch.equal(back[name], kept[name]) for name in kept)
    assert all(value.is_contiguous() for value in back.values())
    storages = [value.untyped_storage().data_ptr() for name, value in back.items() if name != "head.weight"]
    assert len(set(storages)) == len(storages)


def test_head_by_head_rows_need_the_number_of_heads(no_model):
    """[heads, 3, size] <-> [3, heads, size]; not guessed."""
    layout = HeadMajor(3, "num_heads")
    theirs = torch.arange(24.0).view(12, 2)
    ours = layout.merge([theirs], Settings)
    assert ours[:, 0].tolist() == [0, 2, 12, 14, 4, 6, 16, 18, 8, 10, 20, 22]
    assert torch.equal(layout.split(ours, Settings)[0], theirs)
    with pytest.raises(UsageError, match="config="):
        layout.merge([theirs], None)


def test_no_family_is_loaded_before_it_is_needed():
    """`import smp` must not import transformers, and a name nobody declared is no family."""
    assert families.replacement_of(nn.Linear) is None


# Modules


@pytest.mark.parametrize("prescaled", [False, True])
@on_ranks(2, config=lambda a: config(2, a["prescaled"]))
def test_declared_modules_are_replaced(prescaled):
    """Values carried over, also to fused parameters; hooks, attributes, options; the same result as before."""
    declare()
    torch.manual_seed(1)
    model = Model().double()
    whole = copy.deepcopy(model)
    held = list(model.parameters())
    smp.set_tensor_parallelism(model, use_alibi=True)
    convert(model, runtime.get())
    block = model.h[0]
    assert type(block) is Twin
    assert block.use_alibi
    assert isinstance(block.settings, Settings)
    assert block.qkv.weight.shape == (6, 4)
    params = list(model.parameters())
    assert all(any(param is other for other in held) for param in params)
    assert sum(is_merged(param) for param in held) == 8
    generator = torch.Generator().manual_seed(0 if prescaled else tp_group().rank)
    ids = torch.randint(10, (3, 5), generator=generator)
    torch.testing.assert_close(model(ids), whole(ids))
    [(to_hf, to_smp)] = smp.state.module_manager.translate_functions
    assert set(to_smp(whole.state_dict())) == set(model.state_dict())
    assert set(to_hf(model.state_dict())) == set(whole.state_dict())


@on_ranks(1, config=config(1, False))
def test_declared_modules_are_replaced_on_degree_one():
    """Scripts rely on the twin's structure there too; torch's own modules stay as they are."""
    declare()
    model = Model()
    whole = copy.deepcopy(model)
    smp.set_tensor_parallelism(model)
    convert(model, runtime.get())
    assert type(model.h[0]) is Twin
    assert type(model.table) is nn.Embedding
    ids = torch.randint(10, (3, 5))
    torch.testing.assert_close(model(ids), whole(ids))
    convert(Model(), runtime.get())
    assert smp.state.module_manager.translate_functions == []


@on_ranks(2, config=config(2, False))
def test_what_a_twin_cannot_do_is_left_whole():
    """With one warning: switches it does not know, parts put in afterwards, parameters that differ."""
    declare()
    settings = Settings()
    settings.limit = 3
    frozen, adapted, pruned = Model(), Model(), Model()
    frozen.h[0].q.weight.requires_grad_(False)
    adapted.h[0].adapter = nn.Linear(4, 4)
    pruned.h[0].out = Conv1D(4, 8)
    for model, says in {
        Model(settings): "h.0, h.1 whole: limit 3",
        frozen: "h.0 whole: q.weight, k.weight, v.weight become one parameter, but differ in requires_grad",
        adapted: "h.0 whole: its twin has no counterpart for adapter.bias, adapter.weight",
        pruned: "h.0 whole: out.weight would become out.weight of shape",
    }.items():
        smp.set_tensor_parallelism(model)
        with log_lines() as lines:
            convert(model, runtime.get())
        assert type(model.h[0]) is Block
        assert tp_group().rank != 0 or any(says in line for line in lines), lines


@pytest.mark.parametrize("tp", [1, 2])
@on_ranks(lambda a: a["tp"], config=lambda a: config(a["tp"], False))
def test_delayed_parameters_start_as_they_do_unsplit(tp):
    """Fused and transposed ones are made from what the old modules initialise."""
    declare()
    with smp.delay_param_initialization():
        torch.manual_seed(1)
        whole, model = Model(), Model()
    materialize(whole, seed=5)
    smp.set_tensor_parallelism(model)
    convert(model, runtime.get())
    assert model.h[0].qkv.weight.is_meta
    materialize(model, seed=5)
    ids = torch.randint(10, (3, 5))
    torch.testing.assert_close(model(ids), whole(ids))
    assert float(model.h[0].out.weight.std()) > 0.5


@on_ranks(2, config={"tensor_parallel_degree": 2, "ddp": True})
def test_an_optimizer_made_before_keeps_what_trains():
    """q's object is the fused parameter; k and v are let go of."""
    declare()
    torch.manual_seed(1)
    module = Model()
    optimizer = torch.optim.Adam(module.parameters())
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(optimizer)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert {id(param) for param in held} == {id(param) for param in model.parameters()}
    F.cross_entropy(model(torch.randint(10, (3, 5))).flatten(0, 1), torch.randint(10, (15,))).backward()
    optimizer.step()
    assert len(optimizer.state_dict()["param_groups"][0]["params"]) == len(held)
