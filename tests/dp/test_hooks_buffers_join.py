"""Communication hooks, buffers of replicas, and inputs that run out early."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from smp import runtime
from smp.dp.buffer_sync import BufferSync
from smp.errors import StepError, UsageError
from smp.topology import CommGroup
from tests.dp.helpers import (
    KILOBYTE,
    all_gather,
    assert_close,
    assert_same_gradients,
    batch,
    chain,
    loss_of,
    make_reducer,
    my_part,
)
from tests.harness import on_ranks

DDP = {"ddp": True}


@pytest.mark.parametrize("cap", [KILOBYTE, 25])
@on_ranks(2, config=DDP)
def test_hooks_written_for_torch_work(cap: float) -> None:
    """A failure means that `torch.distributed.algorithms.ddp_comm_hooks` cannot be used with us."""
    group = runtime.get().group(CommGroup.DP_GROUP).process_group
    for hook, tolerance in ((default_hooks.allreduce_hook, 1e-12), (default_hooks.fp16_compress_hook, 5e-3)):
        model = chain()
        reference = copy.deepcopy(model)
        reducer = make_reducer(model, bucket_cap_mb=cap)
        reducer.register_comm_hook(group, hook)
        for step in range(3):
            model.zero_grad()
            reference.zero_grad()
            loss_of(model, my_part(batch(step, 4))).backward()
            loss_of(reference, batch(step, 4)).backward()
            for (name, param), expected in zip(model.named_parameters(), reference.parameters()):
                assert_close(param.grad, expected.grad, name, tolerance)


@on_ranks(2, config=DDP)
def test_a_hook_sees_every_bucket_once_and_its_result_is_the_gradient() -> None:
    """A failure means that a hook is called with other things than torch would, or that its result is changed."""
    model = nn.ModuleList([chain(), nn.Linear(8, 8).double()])  # the last one is never used
    reducer = make_reducer(model, bucket_cap_mb=KILOBYTE)
    seen: list[Any] = []

    def hook(state: str, bucket: Any) -> "torch.futures.Future[torch.Tensor]":
        assert state == "mine"
        seen.append((bucket.index(), bucket.is_last()))
        assert sum(gradient.numel() for gradient in bucket.gradients()) == bucket.buffer().numel()
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 7.0))
        return future

    reducer.register_comm_hook("mine", hook)
    with pytest.raises(UsageError, match="only one"):
        reducer.register_comm_hook("other", hook)
    for _ in range(2):
        seen.clear()
        model.zero_grad()
        loss_of(model[0], my_part(batch(0, 4))).backward()
        count = len(reducer._buckets)
        assert seen == [(index, index == count - 1) for index in range(count)]
        assert all((param.grad == 7.0).all() for param in model[0].parameters())
        assert all(param.grad is None for param in model[1].parameters())


def make_sync(module: nn.Module, reducer: Any) -> BufferSync:
    rt = runtime.get()
    return BufferSync(module.named_buffers, rt.group(CommGroup.DP_GROUP), rt.group(CommGroup.RDP_GROUP), reducer.uneven)


@on_ranks(2, config=DDP)
def test_buffers_come_from_the_first_replica() -> None:
    """A failure means that running statistics part between replicas."""
    rt = runtime.get()
    model = nn.Sequential(nn.BatchNorm1d(8)).double()
    model.register_buffer("mask", torch.ones(3, 3).bool())
    sync = make_sync(model, make_reducer(model))
    for step in range(3):
        sync.before_forward()
        model(my_part(batch(step, 8)))
        mean = model[0].running_mean.clone()
        first, second = all_gather(mean)
        assert not torch.equal(first, second)
    sync.before_forward()
    assert torch.equal(*all_gather(model[0].running_mean.clone()))
    if rt.dp_rank == 0:
        assert torch.equal(model[0].running_mean, mean)
    assert int(model[0].num_batches_tracked) == 3


@on_ranks(2, config=DDP)
def test_constant_masks_travel_once() -> None:
    """A failure means that constant masks are sent at every step."""
    model = nn.Sequential(nn.BatchNorm1d(8)).double()
    model.register_buffer("mask", torch.ones(30, 30).bool())
    sync = make_sync(model, make_reducer(model))
    sizes: list[int] = []
    original = dist.broadcast
    dist.broadcast = lambda tensor, *args, **kwargs: (sizes.append(tensor.numel()), original(tensor, *args, **kwargs))[
        1
    ]
    try:
        sync.before_forward()
        assert 900 in sizes
        sizes.clear()
        sync.before_forward()
        assert sizes == [16]
        if runtime.get().rank == 1:  # changed on one rank only: all must still agree to send it
            model.mask.zero_()
        sync.before_forward()
        assert 900 in sizes
    finally:
        dist.broadcast = original
    assert model.mask.all()


def train(
    model: nn.Module, reducer: Any, sync: BufferSync, batches: list[torch.Tensor], passes: int, **join: Any
) -> None:
    """Plain SGD by hand over this rank's batches, in windows of `passes`, inside a join."""
    with reducer.uneven.join(**join):
        for number, data in enumerate(batches, 1):
            if (number - 1) % passes == 0:
                sync.before_forward()
            loss_of(model, data).backward()
            if number % passes == 0:
                update(model)


def update(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.5 * param.grad
            param.grad = None


Windows = list[list[list[int]]]  # by window, by rank: numbers of batches


def expect(model: nn.Module, windows: Windows, divide_by_all: bool) -> None:
    """Trains `model` as one process would that plays all ranks."""
    for window, following in zip(windows, [*windows[1:], windows[-1]]):
        active = [rank for rank, numbers in enumerate(window) if numbers]
        leader = next(rank for rank, numbers in enumerate(following) if numbers)
        start = {name: buffer.clone() for name, buffer in model.named_buffers()}
        after: dict[int, dict[str, torch.Tensor]] = {}
        for rank in active:
            for name, buffer in model.named_buffers():
                buffer.copy_(start[name])
            for number in window[rank]:
                (loss_of(model, batch(number, 4)) / (2 if divide_by_all else len(active))).backward()
            after[rank] = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for name, buffer in model.named_buffers():  # all replicas continue with those of the first that goes on
            buffer.copy_(after[leader][name])
        update(model)


@pytest.mark.parametrize(
    ("passes", "windows"),
    [
        (1, [[[0], [10]], [[1], [11]], [[2], []], [[3], []]]),
        (1, [[[0], [10]], [[], [11]], [[], [12]]]),
        (2, [[[0, 1], [10, 11]], [[2, 3], [12]], [[4, 5], []]]),
    ],
)
@pytest.mark.parametrize("divide_by_all", [True, False])
@on_ranks(2, config=DDP)
def test_ranks_without_batches_follow_the_others(passes: int, windows: Windows, divide_by_all: bool) -> None:
    """A failure means a hang at the end of an uneven epoch, or ranks that leave it with different weights."""
    if not divide_by_all and passes == 2:
        return  # a window that a rank could not finish counts, but no rank is there to be divided by
    model = nn.Sequential(*chain(), nn.BatchNorm1d(8).double())
    reference = copy.deepcopy(model)
    reducer = make_reducer(model, backward_passes_per_step=passes, bucket_cap_mb=KILOBYTE)
    mine = [batch(number, 4) for window in windows for number in window[runtime.get().dp_rank]]
    train(model, reducer, make_sync(model, reducer), mine, passes, divide_by_initial_world_size=divide_by_all)
    expect(reference, windows, divide_by_all)
    for (name, value), expected in zip(model.state_dict().items(), reference.state_dict().values()):
        assert_close(value, expected, name)


@on_ranks(2, config=DDP)
def test_a_rank_that_never_had_a_batch_ends_with_the_trained_weights() -> None:
    """A failure means that an empty shard of the data leaves a rank with stale weights."""
    rt = runtime.get()
    model = chain()
    before = copy.deepcopy(model)
    reducer = make_reducer(model)
    train(model, reducer, make_sync(model, reducer), [batch(0, 4)] if rt.rank == 1 else [], 1)
    assert not torch.equal(model[0].weight, before[0].weight)
    assert torch.equal(*all_gather(model[0].weight.detach()))


@on_ranks(2, config=DDP)
def test_early_termination_is_raised_on_all_ranks() -> None:
    """A failure means that `throw_on_early_termination` does nothing."""
    rt = runtime.get()
    model = chain()
    reducer = make_reducer(model)
    data = [batch(number, 4) for number in range(2 if rt.rank == 0 else 1)]
    with pytest.raises(StepError, match="run out"):
        train(model, reducer, make_sync(model, reducer), data, 1, throw_on_early_termination=True)


@on_ranks(2, config=DDP)
def test_join_turned_off_sends_nothing() -> None:
    """A failure means that `enable=False` still costs messages."""
    model = chain()
    reference = copy.deepcopy(model)
    reducer = make_reducer(model)
    with reducer.uneven.join(enable=False):
        loss_of(model, my_part(batch(0, 4))).backward()
    loss_of(reference, batch(0, 4)).backward()
    assert_same_gradients(model, reference)
