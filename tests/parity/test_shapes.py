"""Models of every shape train as on one process, on 1 to 4 stages, alone and with data parallelism."""

import pytest
import torch

from tests.harness import on_ranks
from tests.parity.compare import Setup, adam, check
from tests.parity.zoo import ZOO

SHAPES = sorted(ZOO)
TWO_MODULES = ("bare",)  # the automatic partition refuses more stages than modules


@pytest.mark.parametrize("shape", SHAPES)
@on_ranks(1)
def test_one_process_trains_as_plain_pytorch(shape):
    """With every degree 1 smp must add nothing but the microbatches."""
    for setup in (Setup(), Setup(microbatches=5, passes=2)):
        check(ZOO[shape], setup)


@pytest.mark.parametrize("shape", SHAPES)
@on_ranks(2)
def test_two_stages_train_as_one_process(shape):
    """A gradient lost, doubled or mixed up between microbatches at a stage boundary shows here."""
    for auto in (False, True):
        check(ZOO[shape], Setup(pp=2, microbatches=5, auto=auto))
    check(ZOO[shape], Setup(pp=2, microbatches=2, passes=2, dtype=torch.float64), adam)


@pytest.mark.parametrize("shape", SHAPES)
@on_ranks(3)
def test_three_stages_train_as_one_process(shape):
    """A value that passes over a stage, or comes back to an earlier one."""
    check(ZOO[shape], Setup(pp=3, microbatches=2))
    check(ZOO[shape], Setup(pp=3, microbatches=1, auto=shape not in TWO_MODULES))


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in ("norms", "recycled")])
@on_ranks(4)
def test_four_stages_and_two_replicas_train_as_one_process(shape):
    """Reduction over replicas together with stages; statistics that each replica has of its own batches are apart."""
    check(ZOO[shape], Setup(pp=4, microbatches=5, auto=shape not in TWO_MODULES))
    check(ZOO[shape], Setup(pp=4, microbatches=1))
    check(ZOO[shape], Setup(pp=2, microbatches=2, passes=2))


@pytest.mark.parametrize("shape", ["chain", "tied", "listed", "flag", "value_branch"])
@on_ranks(2)
def test_two_replicas_train_as_one_process(shape):
    """Data parallelism without a pipeline: unused, frozen and tied parameters, branches that differ between ranks."""
    check(ZOO[shape], Setup(microbatches=2, passes=2))
    check(ZOO[shape], Setup(microbatches=1, dtype=torch.float64), adam)
