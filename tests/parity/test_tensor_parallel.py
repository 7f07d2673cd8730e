"""Tensor parallelism, alone and together with stages and replicas, against one process on the batches of all ranks."""

import pytest
import torch
from torch import nn

import smp
from smp.errors import StepError
from tests.harness import on_ranks
from tests.parity.compare import Setup, adam, check, smp_run
from tests.parity.zoo import ZOO

SPLITTABLE = nn.Linear | nn.Embedding | nn.LayerNorm


def split_everything(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, SPLITTABLE):
            smp.set_tensor_parallelism(child)


def split_some(module: nn.Module) -> None:
    """Every second one, so that whole and distributed parameters are mixed."""
    for child in [child for child in module.modules() if isinstance(child, SPLITTABLE)][::2]:
        smp.set_tensor_parallelism(child)


def nothing_split(module: nn.Module) -> None:
    """Tensor-parallel ranks without a distributed module are data-parallel ranks."""


SHAPES = ["chain", "skip", "twice", "tied", "encoder_decoder", "dicts", "flag", "listed", "bypass"]
PREPARATIONS = {"all": split_everything, "some": split_some, "nothing": nothing_split}


@pytest.mark.parametrize("which", PREPARATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@on_ranks(2)
def test_two_parts_train_as_one_process(shape, which):
    """Each rank has its own batch, or all the same one: gradients, also of parameters left whole, are those of one."""
    prepare = PREPARATIONS[which]
    check(ZOO[shape], Setup(tp=2, microbatches=2, passes=2), prepare=prepare)
    check(ZOO[shape], Setup(tp=2, microbatches=3, prescaled=True), prepare=prepare)


@pytest.mark.parametrize("shape", SHAPES)
@on_ranks(4)
def test_parts_stages_and_replicas_train_as_one_process(shape):
    """Every pair of kinds of parallelism, from the public calls alone."""
    check(ZOO[shape], Setup(pp=2, tp=2, microbatches=2), prepare=split_everything)
    check(ZOO[shape], Setup(pp=2, tp=2, microbatches=2, prescaled=True, auto=True), prepare=split_some)
    check(ZOO[shape], Setup(tp=2, microbatches=2, passes=2), prepare=split_everything)
    check(ZOO[shape], Setup(tp=2, prescaled=True), prepare=split_some)


@pytest.mark.parametrize("shape", ["chain", "skip", "encoder_decoder"])
@on_ranks(4)
def test_four_parts_train_as_one_process(shape):
    """Sums of four terms, and in double precision the optimizer that scales by the gradient."""
    check(ZOO[shape], Setup(tp=4, microbatches=2), prepare=split_everything)
    check(ZOO[shape], Setup(tp=4, microbatches=2, dtype=torch.float64), adam, split_some)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain", "tied", "encoder_decoder"])
@on_ranks(8, timeout=200)
def test_all_three_kinds_on_eight_processes(shape):
    """Two stages of two parts, twice."""
    check(ZOO[shape], Setup(pp=2, tp=2, microbatches=2), prepare=split_everything)
    check(ZOO[shape], Setup(pp=4, tp=2, microbatches=2, auto=True), prepare=split_everything)


@pytest.mark.parametrize("shape", ["tied", "encoder_decoder", "value_branch"])
@on_ranks(4, launcher="torchrun")
def test_training_does_not_depend_on_the_launcher(shape):
    """Under torchrun messages go over gloo instead of MPI."""
    check(ZOO[shape], Setup(pp=2, microbatches=2, passes=2))
    if shape != "value_branch":
        check(ZOO[shape], Setup(pp=2, tp=2, microbatches=2), prepare=split_everything)


@on_ranks(4)
def test_ranks_that_branch_apart_are_told():
    """With a batch per rank a branch on a value may differ in a group: data of different modules would be joined."""
    with pytest.raises(StepError, match="in different modules, or .*positive.*negative|negative.*positive"):
        smp_run(ZOO["value_branch"], Setup(tp=2, microbatches=4, steps=3), prepare=split_everything)
