"""Distributed language models and transformers, made as scripts make them, with stages, replicas, schedules and
activation checkpointing, against one plain process: losses, gradients, updated weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp import runtime
from tests.harness import on_ranks
from tests.parity.compare import TOLERANCE, Setup, assert_same, batch_parts, plain_run, sgd, smp_run
from tests.parity.zoo import Case
from tests.tp.lm_twin import GPT2, TwinLMHead, distributed

MODES = [("speed", False), ("memory", True), ("speed", True), ("memory", False)]
HALVES = pytest.mark.parametrize("modes", [MODES[:2], pytest.param(MODES[2:], marks=pytest.mark.slow)], ids=["1", "2"])
LENGTH = 4
UNTIED = {**GPT2, "num_layers": 4, "tie_word_embeddings": False, "lm_head_bias": True, "num_token_types": 2}
TIED = {**GPT2, "num_layers": 4}
CROSS = {**UNTIED, "num_layers": 2, "add_cross_attention": True}


class Program(nn.Module):
    """Calls the model from outside: a script's own module around it."""

    def __init__(self, lm: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.lm = lm
        self.cross = bool(options.get("add_cross_attention"))

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor | None, states: Tensor) -> Tensor:
        cross = (states, None) if self.cross else ()
        return self.lm((ids, mask, types, None, *cross, ids))


def batch_of(options: dict[str, Any]) -> Callable[[int, torch.Generator], dict[str, Any]]:
    """Text with padding at the end of some rows."""

    def batch(rows: int, generator: torch.Generator) -> dict[str, Any]:
        ids, types = (torch.randint(n, (rows, LENGTH), generator=generator) for n in (options["vocab_size"], 2))
        lengths = torch.randint(2, LENGTH + 1, (rows, 1), generator=generator)
        mask = (torch.arange(LENGTH) < lengths).long()
        states = torch.randn(rows, 6, options["hidden_size"], generator=generator)
        return {"ids": ids, "mask": mask, "types": types if options.get("num_token_types") else None, "states": states}

    return batch


def places(options: dict[str, Any]) -> list[tuple[str, float]]:
    """A stage boundary inside of the sequence of layers; a tied head beside its table."""
    count = options["num_layers"]
    layers = [(f"lm.transformer.seq_layers.{index}", index / count) for index in range(count)]
    tables = [(f"lm.{name}_embedding", 0.0) for name in ("word", "position", "token_type")]
    tied = options.get("tie_word_embeddings", True)
    return [
        *(tables if options.get("num_token_types") else tables[:2]),
        *layers,
        ("lm.layernorm", 0.99),
        ("lm.lm_head", 0.0 if tied else 0.99),
    ]


def check(options: dict[str, Any], setup: Setup, prepare: Callable[[nn.Module], None] = lambda module: None) -> Any:
    """Both runs and the comparison; the model."""
    batch, where = batch_of(options), places(options)
    plain = Case(lambda: Program(TwinLMHead(**options), options), batch, where)
    split = Case(lambda: Program(distributed(TwinLMHead(**options)), options), batch, where)
    runtime.reset()
    try:
        got, model = smp_run(split, setup, sgd, prepare)
        want = plain_run(plain, setup, sgd, *batch_parts(setup))
        assert_same(got, want, model, TOLERANCE[setup.dtype], f"{setup}:")
        return model
    finally:
        runtime.reset()


def setups(modes: list[tuple[str, bool]] = MODES, **options: Any) -> list[Setup]:
    """One for each way to communicate and kind of batch."""
    settings = options.pop("config", {})
    both: dict[str, Any] = {"dtype": torch.float64, **options}
    return [Setup(prescaled=shared, config={**settings, "optimize": mode}, **both) for mode, shared in modes]


def checkpointed(*paths: str, **options: Any) -> Callable[[nn.Module], None]:
    def prepare(module: nn.Module) -> None:
        for path in paths:
            smp.set_activation_checkpointing(module.get_submodule(path), **options)

    return prepare


@HALVES
@pytest.mark.parametrize("options", [TIED, UNTIED, CROSS], ids=["tied", "untied", "cross"])
@on_ranks(4)
def test_parts_and_stages_train_as_one_process(options, modes):
    """Cut by hand and by cost, with a boundary between two layers; an encoder's states reach both stages."""
    for each in setups(modes, tp=2, pp=2, microbatches=2):
        check(options, each)
    for each in setups(modes[:1], tp=2, pp=2, microbatches=2, auto=True):
        check(options, each)


@on_ranks(4)
def test_the_boundary_lies_between_two_layers():
    """Or the test above shows nothing."""
    for auto in (False, True):
        for each in setups(MODES[:2], tp=2, pp=2, microbatches=2, auto=auto, steps=1):
            batch = batch_of(UNTIED)
            case = Case(lambda: Program(distributed(TwinLMHead(**UNTIED)), UNTIED), batch, places(UNTIED))
            runtime.reset()
            _, model = smp_run(case, each)
            here = [model.owned(f"lm.transformer.seq_layers.{index}.output.dense2.weight") for index in range(4)]
            assert True in here and False in here
    runtime.reset()


@HALVES
@pytest.mark.parametrize("options", [TIED, UNTIED], ids=["tied", "untied"])
@on_ranks(4)
def test_parts_and_replicas_train_as_one_process(options, modes):
    """Parts are averaged over the replicas, whole parameters over all ranks; gradients are accumulated."""
    for each in setups(modes, tp=2, microbatches=2, passes=2):
        check(options, each)


@HALVES
@on_ranks(4)
def test_four_parts_train_as_one_process(modes):
    """13 words over four ranks: parts of the vocabulary of different lengths."""
    for each in setups(modes, tp=4, microbatches=2):
        check(UNTIED, each)


@on_ranks(4)
def test_stages_and_replicas_without_parts_train_as_one_process():
    """The same classes with tensor_parallel_degree 1."""
    for each in setups(MODES[:1], pp=2, microbatches=2):
        check(TIED, each)
        check(UNTIED, each)


@pytest.mark.parametrize("config", [{"pipeline": "zero_bubble"}, {"virtual_stages": 2}], ids=["zero-bubble", "chunks"])
@on_ranks(4)
def test_other_orders_of_work_train_as_one_process(config):
    """Gradients of weights put off, and two chunks of layers on each stage; collectives stay in one order on all tp
    ranks, or this test hangs."""
    for each in setups(MODES[2:], tp=2, pp=2, microbatches=4, steps=3, auto=True, config=config):
        check(UNTIED, each)


@HALVES
@pytest.mark.parametrize("strategy", ["each", "contiguous", "group_2"])
@pytest.mark.parametrize("pp", [1, 2])
@on_ranks(lambda a: 2 * a["pp"])
def test_a_checkpointed_sequence_of_layers_trains_as_one_process(pp, strategy, modes):
    """Collectives run again in the backward, on all tp ranks alike."""
    prepare = checkpointed("lm.transformer.seq_layers", strategy=strategy)
    for each in setups(modes, tp=2, pp=pp, microbatches=2, auto=True):
        check(UNTIED, each, prepare)


@HALVES
@pytest.mark.parametrize("pp", [1, 2])
@on_ranks(lambda a: 2 * a["pp"])
def test_single_checkpointed_parts_train_as_one_process(pp, modes):
    """One layer, half of another one, and the head with its loss."""
    paths = ("lm.transformer.seq_layers.1", "lm.transformer.seq_layers.2.attention", "lm.lm_head")
    for each in setups(modes, tp=2, pp=pp, microbatches=2):
        check(UNTIED, each, checkpointed(*paths))


@on_ranks(4)
def test_checkpointing_with_other_orders_of_work_trains_as_one_process():
    """A recomputation between two chunks, and one whose weights' gradients are put off."""
    prepare = checkpointed("lm.transformer.seq_layers")
    for config in ({"virtual_stages": 2}, {"pipeline": "zero_bubble"}):
        for each in setups(MODES[:2], tp=2, pp=2, microbatches=4, auto=True, config=config):
            check(UNTIED, each, prepare)


@pytest.mark.slow
@on_ranks(8, timeout=200)
def test_parts_stages_and_replicas_train_as_one_process():
    """All three together."""
    for each in setups(tp=2, pp=2, microbatches=2, auto=True):
        check(TIED, each)
        check(UNTIED, each, checkpointed("lm.transformer.seq_layers"))
