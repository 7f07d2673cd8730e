"""What would go wrong without a word under half precision is refused."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import Parameter

import smp
from smp.errors import UsageError
from tests.fp16.net import batch, net, train_step
from tests.harness import on_ranks


def sgd(params: Iterator[Parameter]) -> smp.DistributedOptimizer:
    return smp.DistributedOptimizer(torch.optim.SGD(params, lr=0.1))


@on_ranks(1, config={"fp16": True})
def test_clipping_what_masters_have_copied_is_refused() -> None:
    """It would have no effect: the step works on the copies."""
    model = smp.DistributedModel(net())
    optimizer = sgd(model.parameters())
    train_step(model, *batch(0))
    optimizer.update_master_grads()
    for clip in (torch.nn.utils.clip_grad_norm_, smp.clip_grad_norm_):
        with pytest.raises(UsageError, match="clip_master_grads"):
            clip(model.parameters(), 1e-3)
        clip(optimizer.master_params, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    train_step(model, *batch(1))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # masters copy these afterwards
    assert optimizer.clip_master_grads(1.0) == pytest.approx(1e-3, rel=1e-2)


@on_ranks(1, config={"bf16": True})
def test_an_optimizer_whose_place_another_one_took_does_not_step() -> None:
    """The model scales its loss for the last one; the other one would divide by a scale of its own."""
    model = smp.DistributedModel(net())
    params = list(model.parameters())
    first, second = sgd(iter(params[:1])), sgd(iter(params[1:]))
    train_step(model, *batch(0))
    second.step()
    with pytest.raises(UsageError, match="another DistributedOptimizer"):
        first.step()


@on_ranks(1, config={"bf16": True})
def test_a_parameter_that_is_in_a_group_is_in_no_second_one() -> None:
    """Its master is there in its place, so torch's own check does not find it."""
    model = smp.DistributedModel(net())
    optimizer = sgd(model.parameters())
    with pytest.raises(UsageError, match="in a group of this optimizer already"):
        optimizer.add_param_group({"params": [model.module.norm.weight]})
    assert len(optimizer.param_groups) == 1


@on_ranks(1, config={"bf16": True})
def test_masters_by_name_are_those_of_weights_written_since_the_last_step() -> None:
    """A checkpoint of masters from before would bring the old weights back."""
    model = smp.DistributedModel(net())
    optimizer = sgd(model.parameters())
    with torch.no_grad():
        model.module.norm.weight.fill_(3.0)
    assert bool((optimizer.masters_by_name()["norm.weight"] == 3.0).all())
    with torch.no_grad():
        model.module.norm.weight.fill_(4.0)
    assert bool((optimizer.state_dict()["_smp_fp32_masters"]["norm.weight"] == 4.0).all())
