"""The small public modules and `smp.state`, as scripts use them."""

import pytest
import torch
from torch import nn

import smp
from smp.tp.shard import ShardSpec
from tests.harness import on_ranks


def test_distribution_axis_is_the_split_dimension() -> None:
    """Checkpoint scripts gather along it, and take None for a whole parameter."""
    from smdistributed.modelparallel.torch.utils import get_distribution_axis

    parameter = nn.Parameter(torch.zeros(4, 2))
    assert get_distribution_axis(parameter) is None
    parameter._smp_shard = ShardSpec((4, 4), 1, part=0, num_parts=2)  # type: ignore[attr-defined]
    assert get_distribution_axis(parameter) == 1


def test_state_before_init_says_what_to_do() -> None:
    """An attribute error from inside would tell the user nothing."""
    assert smp.state.initialized is False
    with pytest.raises(smp.UsageError, match=r"call smp\.init\(\) first"):
        _ = smp.state.cfg


@on_ranks(2, config={"microbatches": 3, "ddp": True})
def test_state_shows_the_resolved_configuration() -> None:
    """transformers reads smp.state.cfg by attribute; client code imports the object by its module."""
    from smdistributed.modelparallel.torch.state_mod import state

    assert state is smp.state and state.initialized
    assert (state.cfg.microbatches, state.cfg.fp16, state.cfg.partitions) == (3, False, 1)
    assert state.model is None and state.optimizer is None
    assert state.module_manager.translate_functions == []


@on_ranks(2, config={"ddp": True})
def test_state_numbers_parameters_as_the_optimizer_does() -> None:
    """Clients turn the optimizer state's numbers into names with these tables, one for each tp_rank."""
    model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False)))
    weights = [p for p in model.parameters() if p.dim() == 2]
    smp.DistributedOptimizer(torch.optim.SGD([{"params": weights[1:]}, {"params": weights[:1]}], lr=0.1))
    assert smp.state.param_index_to_name_tp_group == [{0: "1.weight", 1: "0.weight"}]
    assert smp.state.param_name_to_index_tp_group == [{"1.weight": 0, "0.weight": 1}]
