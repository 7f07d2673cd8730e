"""Offloaded activations, through the hooks that they go through on any device."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import smp
from smp import activation, runtime
from smp.bootstrap import HostCopies
from smp.offload import Offload
from smp.pp import tape
from smp.pp.placed import current
from smp.pp.schedule import ActionKind
from tests.harness import on_ranks
from tests.logs import log_lines
from tests.pp.reference import WIDTH, Net, linear, start
from tests.pp.test_between_steps import live_tensors

DEPTH = 6


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    runtime.reset()


class Recorded(HostCopies):
    """Numbers the copies to the host, and writes down when which one comes back and is used."""

    def __init__(self) -> None:
        self.count = 0
        self.events: list[str] = []

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        self.count += 1
        return tensor.clone(), self.count - 1

    def to_device(self, host: Tensor, ready: Any) -> tuple[Tensor, Any]:
        self.events.append(f"load {ready}")
        return host.clone(), ready

    def wait(self, tensor: Tensor, ready: Any) -> None:
        self.events.append(f"use {ready}")


def recorded(horizon: int) -> tuple[Offload, Recorded]:
    offload = Offload(torch.device("cpu"), horizon)
    copies = offload._copies = Recorded()
    return offload, copies


def regions(offload: Offload, number: int, x: Tensor) -> Tensor:
    """So many multiplications, each of which saves one tensor of a parcel of its own."""
    for _ in range(number):
        with offload.saving():
            x = x.sin()
    return x


def test_parcels_come_back_ahead_of_their_use() -> None:
    """Else the backward waits for every copy; and further ahead than asked would fill the memory again."""
    offload, copies = recorded(2)
    regions(offload, 5, torch.ones(2, requires_grad=True)).sum().backward()
    assert copies.events == [
        *["load 4", "use 4", "load 3", "load 2", "use 3", "load 1", "use 2", "load 0", "use 1", "use 0"]
    ]


def test_a_pipeline_brings_back_what_it_will_use() -> None:
    """Only of the microbatches that it names, once, last parcel first."""
    offload, copies = recorded(1)
    now = [0]
    offload._microbatch = lambda: now[0]
    outputs = []
    for now[0] in range(3):
        outputs.append(regions(offload, 2, torch.ones(2, requires_grad=True)))
    offload.prefetch([1, 0])
    offload.prefetch([1])
    offload.prefetch([7])
    assert copies.events == ["load 3", "load 2", "load 1", "load 0"]
    outputs[1].sum().backward()
    assert copies.events[4:] == ["use 3", "use 2"]
    outputs[2].sum().backward()
    assert copies.events[6:] == ["load 5", "use 5", "load 4", "use 4"]


def test_what_several_regions_keep_is_copied_once() -> None:
    """A mask goes through every layer. When it has changed in between it is another one."""
    offload, copies = recorded(1)
    x, mask = torch.ones(2, requires_grad=True), torch.ones(2)
    y = x
    for change in (False, False, True):
        if change:
            mask.mul_(3)
        with offload.saving():
            y = y * mask
    assert copies.count == 2
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3, 3]
    del y
    with offload.saving():
        (x * mask).sum()
    assert copies.count == 3  # the copy went away with the graph


def test_nothing_is_left_of_a_backward() -> None:
    """Copies on the host go away with the graph, and the list of them does not grow from step to step."""
    offload, _ = recorded(3)
    for _ in range(3):
        out = regions(offload, 4, torch.ones(2, requires_grad=True))
        out.sum().backward()
        assert sum(ref() is not None for ref in offload._parcels[0]) == 0
        regions(offload, 4, torch.ones(2, requires_grad=True))  # without a backward
        assert len(offload._parcels[0]) <= 5


def model(**config: Any) -> tuple[Any, list[StorageWeakRef]]:
    """A chain of checkpointed layers, and references to what they return."""
    runtime.reset()
    smp.init(config)
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(linear(seed=k), nn.Tanh()) for k in range(DEPTH)])
    smp.set_activation_checkpointing(net)
    made: list[StorageWeakRef] = []
    for layer in net:
        layer.register_forward_hook(lambda module, args, out: made.append(StorageWeakRef(out.untyped_storage())))
    return smp.DistributedModel(net), made


@pytest.mark.parametrize("offloaded", [False, True])
def test_what_a_checkpoint_keeps_leaves_the_device(offloaded: bool) -> None:
    """The original memory is given back; only the last result, which the caller holds, is still there."""
    wrapped, made = model(offload_activations=offloaded)
    x = torch.randn(3, WIDTH)
    wrapped(x).sum().backward()  # the first run of a module learns whether it writes to its arguments
    made.clear()
    out = wrapped(x)
    assert [ref.expired() for ref in made] == [offloaded] * (DEPTH - 1) + [False]
    out.sum().backward()


@pytest.mark.parametrize("offloaded", [False, True])
@on_ranks(2)
def test_a_parked_microbatch_of_a_pipeline(offloaded: bool) -> None:
    """Stage 0 runs several forwards ahead: what its modules return in glue must not stay because of the engine."""
    start(2, microbatches=3, auto_partition=False, default_partition=0, offload_activations=offloaded)
    tape.SMALL = 0  # in this process: its tensors are not worth it otherwise
    net = Net(in_turn, blocks=nn.ModuleList([nn.Sequential(linear(seed=k), nn.Tanh()) for k in range(2 * DEPTH)]))
    made: dict[int, list[StorageWeakRef]] = {}
    parked: list[bool] = []

    def note(module: nn.Module, args: Any, out: Tensor) -> None:
        assert current.program is not None
        k = current.program.index
        if k and not parked:
            parked.extend(ref.expired() for ref in made[0])
        made.setdefault(k, []).append(StorageWeakRef(out.untyped_storage()))

    for k, block in enumerate(net.blocks):
        smp.set_activation_checkpointing(block, strategy="contiguous")
        block.register_forward_hook(note)
        smp.set_partition(block, k // DEPTH)
    wrapped = smp.DistributedModel(net)

    @smp.step
    def train(x: Tensor) -> None:
        wrapped.backward(wrapped(x).sum())

    left = []
    for _ in range(5):
        made.clear()
        parked.clear()
        train(torch.randn(6, WIDTH))
        left.append(live_tensors())
    assert left[-1] == left[2]  # nothing piles up from step to step
    if smp.pp_rank() == 0:
        # The last one is on its way to stage 1.
        assert len(parked) == DEPTH and parked[:-1] == [offloaded] * (DEPTH - 1)


@pytest.mark.parametrize("horizon", [1, 2, 6])
@on_ranks(2)
def test_a_pipeline_loads_so_many_turns_ahead(horizon: int) -> None:
    """Later would make the backward wait, earlier would hold what is not needed yet: every copy comes back when its
    microbatch's backward is among the next turns of the stage, and not before."""
    start(2, microbatches=4, offload_activations=True, activation_loading_horizon=horizon)
    net = Net(in_turn, blocks=nn.ModuleList([nn.Sequential(linear(seed=k), nn.Tanh()) for k in range(4)]))
    for k, block in enumerate(net.blocks):
        smp.set_activation_checkpointing(block, strategy="contiguous")
        smp.set_partition(block, k // 2)
    wrapped = smp.DistributedModel(net)
    offload = activation.current_offload()
    assert offload is not None
    copies = offload._copies = Recorded()
    owners: list[int] = []
    turns: dict[int, set[int]] = {}  # microbatch -> the turns in which copies came back
    now, prefetch = [-1], offload.prefetch

    class ToHost(Recorded):
        def to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
            owners.append(offload._microbatch())
            return super().to_host(tensor)

        def to_device(self, host: Tensor, ready: Any) -> tuple[Tensor, Any]:
            turns.setdefault(owners[ready], set()).add(now[0])
            return super().to_device(host, ready)

    def counted(microbatches: Any) -> None:
        now[0] += 1
        prefetch(microbatches)

    offload.prefetch = counted  # type: ignore[method-assign]

    @smp.step
    def train(x: Tensor) -> None:
        wrapped.backward(wrapped(x).sum())

    for _ in range(3):  # the last time by a plan
        copies = offload._copies = ToHost()
        owners.clear()
        turns.clear()
        now[0] = -1
        train(torch.randn(8, WIDTH))
    assert wrapped.engine.last_plan is not None and copies.events
    actions = [(action.kind, action.microbatch) for action in wrapped.engine.last_plan.actions[smp.pp_rank()]]
    for k in range(4):
        forward, backward = actions.index((ActionKind.FORWARD, k)), actions.index((ActionKind.BACKWARD, k))
        assert turns[k] == {max(forward + 1, backward - horizon)}, (turns, actions)


def test_offloading_without_checkpoints_says_so() -> None:
    """Once, after the first step; not to those who checkpoint by other means."""
    for by_hand in (False, True):
        runtime.reset()
        smp.init({"offload_activations": True})
        net = linear()
        wrapped = smp.DistributedModel(
            Net(lambda net, x, hand=by_hand: checkpoint(net.a, x, use_reentrant=False) if hand else net.a(x), a=net)
        )

        @smp.step
        def train(x: Tensor, wrapped: Any = wrapped) -> None:
            wrapped.backward(wrapped(x).sum())

        with log_lines() as warnings:
            train(torch.randn(2, WIDTH))
            train(torch.randn(2, WIDTH))
        assert sum("offload_activations=True has no effect" in text for text in warnings) == (not by_hand)


def in_turn(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return x


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("offloaded", [False, True])
def test_on_a_device(offloaded: bool) -> None:
    """Through pinned memory, on a stream of its own; masks too, drawn again on autograd's thread."""
    runtime.reset()
    smp.init({"offload_activations": offloaded})
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.3), nn.Tanh()) for _ in range(8)])
    gradients = []
    for mark in (False, True):
        if mark:
            smp.set_activation_checkpointing(net, strategy="each")
        wrapped = runtime.get().model or smp.DistributedModel(net)
        torch.manual_seed(1)
        wrapped.zero_grad()
        smp.step(lambda x: wrapped.backward(wrapped(x).square().mean()))(torch.ones(256, 512, device="cuda"))  # noqa: B023
        gradients.append([p.grad.clone() for p in wrapped.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_the_horizon_is_that_of_the_configuration() -> None:
    """Counted in checkpointed modules where there is no pipeline."""
    wrapped, _ = model(offload_activations=True, activation_loading_horizon=3)
    offload = activation.current_offload()
    assert offload is not None and offload is activation.current_offload()
    copies = offload._copies = Recorded()
    wrapped(torch.randn(3, WIDTH)).sum().backward()
    first = copies.events.index(f"use {DEPTH - 1}")
    assert copies.events[first:][:5] == [
        f"use {DEPTH - 1}",
        *(f"load {DEPTH - k}" for k in (2, 3, 4)),
        f"use {DEPTH - 2}",
    ]
    runtime.reset()
    assert activation.current_offload() is None
    activation.prefetch([0])
