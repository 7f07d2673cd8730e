"""Unmodified models of `transformers`, everything in them marked, against one process."""

import pytest

import smp
from tests.harness import on_ranks
from tests.parity import models
from tests.parity.compare import Setup, check

# Where replicas with batches of their own give one process's result: no statistics, nor losses, over whole batches.
NAMES = ("gpt2", "llama", "bert", "t5", "vit")


@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@pytest.mark.parametrize("name", NAMES)
@on_ranks(2, timeout=180)
def test_transformers_models_train_over_two_parts(name, prescaled):
    """Linears, tables and norms are split wherever they stand, tied ones with both kinds of vocabulary (37 and 38)."""
    for vocabulary in (37, 38):
        models.VOCABULARY = models.SIZES["vocab_size"] = vocabulary
        try:
            setup = Setup(tp=2, microbatches=2, prescaled=prescaled)
            check(models.MODELS[name], setup, prepare=smp.set_tensor_parallelism)
        finally:
            models.VOCABULARY = models.SIZES["vocab_size"] = 37


@pytest.mark.parametrize("name", NAMES)
@on_ranks(4, timeout=180)
def test_transformers_models_train_over_two_parts_and_two_stages(name):
    """tp 2 x pp 2, placed by hand and automatically."""
    for auto in (False, True):
        check(models.MODELS[name], Setup(pp=2, tp=2, microbatches=2, auto=auto), prepare=smp.set_tensor_parallelism)
