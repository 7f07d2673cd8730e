"""Unmodified models of `transformers` whose head shares the table's weight and lies on another stage."""

from dataclasses import replace

import pytest

from tests.harness import on_ranks
from tests.parity.compare import Setup, sgd
from tests.parity.models import MODELS
from tests.parity.test_tied import DOUBLE, check_apart


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
@on_ranks(4, timeout=180)
def test_models_of_transformers_with_the_head_on_its_own_stage(name):
    """Two replicas of two stages with the automatic partition, and four stages with table and head placed by hand."""
    case = MODELS[name]
    table, head = {
        "gpt2": ("transformer.wte", "lm_head"),
        "bert": ("bert.embeddings.word_embeddings", "cls.predictions.decoder"),
        "t5": ("shared", "lm_head"),
    }[name]
    config = {"replicate_tied": True}
    check_apart(Setup(pp=2, microbatches=2, auto=True, dtype=DOUBLE, config=config), case, expected=None)
    places = [(table, 0.0), *((path, part) for path, part in case.places if path not in (table, head, "cls"))]
    check_apart(Setup(pp=4, microbatches=2), replace(case, places=[*places, (head, 0.9)]), sgd, expected=None)
