"""Activation checkpointing in one process: what is kept, what runs twice, and what a second run leaves alone."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import smp
from smp import UsageError, activation, runtime
from smp.activation import is_checkpointed
from smp.patches.checkpoint import checkpoint, checkpoint_sequential
from smp.pp.placed import current
from tests.harness import on_ranks
from tests.pp.reference import WIDTH, Net, linear, same, vectors


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    runtime.reset()


def plain_model(module: nn.Module) -> Any:
    runtime.reset()
    smp.init({})
    return smp.DistributedModel(module)


class Counting(nn.Module):
    """Counts its runs."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layer = linear(seed=seed)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return torch.tanh(self.layer(x))


# -- what runs twice ---------------------------------------------------------------------------------------------------


def test_only_a_backward_runs_a_module_again() -> None:
    """Evaluation must not pay for checkpointing; training pays once per call."""
    net = Counting()
    smp.set_activation_checkpointing(net)
    model = plain_model(Net(lambda net, x: net.a(net.a(x)).sum(), a=net))
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        model(x)
    assert net.runs == 2
    model.eval()
    model(x)
    assert net.runs == 4
    model.train()
    model(x).backward()
    assert net.runs == 8


def test_one_inside_another_and_one_called_and_marked() -> None:
    """The inner one runs a third time, because the second run keeps nothing of it either; a module that is marked and
    given to `checkpoint` is checkpointed once."""
    inner, other = Counting(1), Counting(2)
    outer = nn.Sequential(inner, linear(seed=3), nn.Tanh())
    smp.set_activation_checkpointing(inner)
    smp.set_activation_checkpointing(other)
    smp.set_activation_checkpointing(outer, strategy="contiguous")
    model = plain_model(Net(lambda net, x: checkpoint(net.c, net.b(x)).sum(), b=outer, c=other))
    model(torch.randn(2, WIDTH)).backward()
    assert (inner.runs, other.runs) == (3, 2)


def test_hooks_run_once() -> None:
    """A second run in the backward is no second call (a2-1)."""
    seen = []
    net = Counting()
    smp.set_activation_checkpointing(net)
    net.register_forward_pre_hook(lambda *_: seen.append("pre"))
    net.register_forward_hook(lambda *_: seen.append("forward"))
    net.register_full_backward_hook(lambda *_: seen.append("backward"))
    model = plain_model(Net(lambda net, x: net.a(x).sum(), a=net))
    model(torch.randn(2, WIDTH, requires_grad=True)).backward()
    assert seen == ["pre", "forward", "backward"] and net.runs == 2


def test_sequences_are_called_as_ever() -> None:
    """By keyword, on a tuple, and wrongly."""
    net = nn.Sequential(Net(lambda net, pair: (net.l(pair[0]), pair[1]), l=linear()), Net(lambda net, pair: pair[0]))
    smp.set_activation_checkpointing(net, strategy="contiguous", pack_args_as_tuple=True)
    model = plain_model(Net(lambda net, x: net.a(input=(x, None)).sum(), a=net))
    model(torch.randn(2, WIDTH)).backward()
    with pytest.raises(TypeError):
        net(1, 2)


# -- what is kept ------------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Bytes of all tensors made while it is active, and still there; not those of `older` tensors and their views."""

    def __init__(self, older: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._older = {tensor.untyped_storage()._cdata for tensor in older}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._older:
                    self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def nbytes(self) -> int:
        return sum(size for reference, size in self._storages.values() if not reference.expired())


ROWS, DEPTH = 64, 6


class Wide(nn.Module):
    """Keeps 8 times its input for its backward: two times four widths."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)).exp())


@pytest.mark.parametrize(
    ("strategy", "inputs"), [("each", DEPTH), ("group_2", DEPTH // 2), ("group_4", 2), ("contiguous", 1), (None, None)]
)
def test_what_is_alive_after_the_forward(strategy: str | None, inputs: int | None) -> None:
    """By arithmetic: one tensor of the width for each group; without checkpointing what the members keep too."""
    body = nn.Sequential(*[Wide() for _ in range(DEPTH)])
    if strategy is not None:
        smp.set_activation_checkpointing(body, strategy=strategy)
    model = plain_model(body)
    x = torch.randn(ROWS, WIDTH)
    model(x).sum().backward()  # the first run of a module still learns whether it writes to its arguments
    with Live([x, *model.parameters()]) as live:
        loss = model(x).sum()
    unit = ROWS * WIDTH * 4
    kept = DEPTH - 1 + 8 * DEPTH if inputs is None else inputs - 1  # x itself was there before
    assert live.nbytes == kept * unit + 4
    loss.backward()


def test_random_state_can_be_left_alone() -> None:
    """`preserve_rng_state=False` draws a new mask in the second run: for those who know that nothing is drawn."""
    for preserve in (True, False):
        runtime.reset()
        net = nn.Sequential(linear(), nn.Dropout(0.5))
        smp.set_activation_checkpointing(net, strategy="contiguous", preserve_rng_state=preserve)
        model = plain_model(Net(lambda net, x: net.a(x), a=net))
        x = torch.ones(64, WIDTH)
        out = model(x)
        out.sum().backward()
        mask = (out != 0).to(x.dtype) * 2
        assert torch.allclose(net[0].bias.grad, mask.sum(0)) is preserve  # type: ignore[arg-type]


# -- what a second run leaves alone ------------------------------------------------------------------------------------


@dataclass
class Given:
    x: Tensor
    scale: Any = None


class Cache:
    """Like a key/value cache: grows with every call."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.calls = {"number": 0}

    def add(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        self.calls["number"] += 1
        return torch.stack(self.seen).sum(0) * self.calls["number"]


def both(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    """`forward(net, x)` with net.a checkpointed and not, three passes: equal results, gradients and buffers."""
    results = []
    for mark in (False, True):
        runtime.reset()
        net = copy.deepcopy(module).double()
        if mark:
            smp.set_activation_checkpointing(net)
        model = plain_model(Net(forward, a=net))
        outputs = []
        for n in range(3):
            loss = model(vectors(3, seed=n)["x"].requires_grad_())
            loss.backward()
            outputs.append(loss.detach())
        results.append((outputs, [p.grad for p in net.parameters()], list(net.buffers())))
    for kind in range(3):
        for a, b in zip(results[1][kind], results[0][kind], strict=True):
            same(a, b, ["losses", "gradients", "buffers"][kind])


def test_nested_arguments_and_results() -> None:
    """Dicts, dataclasses, None, text, and lists that the module adds to."""

    def inner(net: Any, given: Given, *, more: dict[str, Any], log: list[Tensor], kind: str = "no") -> dict[str, Any]:
        assert kind == "sum" and given.scale is None
        h = net.l(given.x) * more["by"][0]
        log.append(h)
        return {"h": h, "none": more["none"], "sides": Given(h.sin(), (h.cos(), len(log)))}

    def forward(net: Any, x: Tensor) -> Tensor:
        log: list[Tensor] = []
        for _ in range(2):
            out = net.a(Given(x), more={"by": [x * 2], "none": None}, log=log, kind="sum")
            x = out["sides"].x + out["sides"].scale[0] * out["sides"].scale[1]
        assert out["none"] is None and len(log) == 2
        return x.square().sum() + log[0].sum()

    both(Net(inner, l=linear()), forward)


def test_objects_that_grow() -> None:
    """A cache that is handed from block to block would hold everything twice in the backward."""

    def forward(net: Any, x: Tensor) -> Tensor:
        cache = Cache()
        out = net.a(net.a(x, cache), cache)
        out = out + cache.add(x)
        assert cache.calls["number"] == 3
        return out.sum()

    both(Net(lambda net, x, cache: cache.add(net.l(x).sin()), l=linear()), forward)


def test_arguments_that_are_written_to() -> None:
    """An in-place first operation; the second run has to see the argument as it was."""

    def inner(net: Any, x: Tensor) -> Tensor:
        return net.l(x.mul_(3).add_(1))

    both(Net(inner, l=linear()), lambda net, x: net.a(net.a(x * 1)).sin().sum())


class Counted(nn.Module):
    """Results depend on a buffer that every call writes, in place and by setting it anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
            self.mean = 0.5 * self.mean + x.mean(0)
        return self.layer(x - self.mean) * self.calls.clone()


@pytest.mark.parametrize("kind", ["counted", "spectral", "norm", "frozen norm"])
def test_buffers(kind: str) -> None:
    """Written buffers: the second run starts from what the first found, and the buffers keep what the first left."""
    layers: dict[str, Callable[[], nn.Module]] = {
        "counted": Counted,
        "spectral": lambda: nn.utils.parametrizations.spectral_norm(linear()),
        "norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(WIDTH, momentum=None)),
        "frozen norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(WIDTH).eval()),
    }
    both(Net(lambda net, x: net.l(x).tanh(), l=layers[kind]()), lambda net, x: net.a(net.a(x)).square().sum())


def test_buffers_that_are_written_later() -> None:
    """The first run of a module, in evaluation, says nothing about what training writes (a2-5)."""
    net = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH))
    smp.set_activation_checkpointing(net, strategy="contiguous")
    model = plain_model(net)
    for training in (False, True):
        model.train(training)
        model(torch.randn(5, WIDTH)).square().sum().backward()
    assert int(net[1].num_batches_tracked) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["after the step", "on another thread"])
@on_ranks(1)
def test_a_backward_elsewhere(where: str) -> None:
    """With results that keep their graph, the second run comes when the step's random streams are gone; on CUDA it runs
    on a thread of autograd's, which has never had them."""
    gradients = []

    def run(loss: Tensor) -> Tensor:
        if where == "on another thread":
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        return loss

    for mark in (False, True):
        runtime.reset()
        smp.init({"microbatches": 2})
        net = nn.Sequential(linear(seed=1), nn.Sequential(nn.Dropout(0.5), linear(seed=2)), nn.Dropout(0.5))
        if mark:
            smp.set_activation_checkpointing(net, strategy="contiguous")
        model = smp.DistributedModel(net)
        step = smp.step(lambda x, model=model: run(model(x).square().sum()), detach_outputs=False)
        torch.manual_seed(1)
        loss = step(torch.randn(8, WIDTH)).reduce_mean()
        torch.rand(3)
        if where == "after the step":
            loss.backward()
        gradients.append([p.grad for p in net.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@on_ranks(1)
def test_masks_of_shared_and_own_data() -> None:
    """Code on data that ranks share draws under another salt; a second run inside it has to find that salt again."""

    def forward(net: Any, x: Tensor) -> Tensor:
        assert current.streams is not None
        with current.streams.salted(7):
            return net.l(x)

    gradients = []
    for mark in (False, True):
        runtime.reset()
        smp.init({})
        net = Net(forward, l=nn.Sequential(nn.Dropout(0.5), linear(seed=2), nn.Sequential(nn.Dropout(0.5))))
        if mark:
            smp.set_activation_checkpointing(net.l, strategy="contiguous")
        model = smp.DistributedModel(net)
        torch.manual_seed(1)
        smp.step(lambda x, model=model: model.backward(model(x).square().sum()))(torch.ones(8, WIDTH))
        gradients.append([p.grad for p in net.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_copies_and_pickles_are_checkpointed_too() -> None:
    """A model is copied for averaging, and saved whole."""
    net = nn.Sequential(Counting(1), Counting(2))
    smp.set_activation_checkpointing(net)
    model = plain_model(net)
    model(torch.randn(2, WIDTH)).sum().backward()
    for other in (copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module))):
        assert all(is_checkpointed(part) for part in other) and other[0].forward.module is other[0]
        other(torch.randn(2, WIDTH)).sum().backward()
        assert [part.runs for part in other] == [4, 4] and [part.runs for part in net] == [2, 2]


# -- wrong input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["none", "group_0", "group_", "group_-1", "group_1.5", "", None, 2])
def test_unknown_strategies(strategy: Any) -> None:
    """A typing error must not turn checkpointing off."""
    net = nn.Sequential(linear())
    with pytest.raises(UsageError, match=r"got strategy .*'each', 'contiguous' and 'group_N'"):
        smp.set_activation_checkpointing(net, strategy=strategy)
    with pytest.raises(UsageError, match="got strategy"):
        checkpoint_sequential(net, torch.randn(1, WIDTH), strategy=strategy)
    assert not is_checkpointed(net[0])


def test_what_cannot_be_checkpointed() -> None:
    """Each is told what was got and what to do."""
    with pytest.raises(UsageError, match=r"takes a torch.nn.Module, got int"):
        smp.set_activation_checkpointing(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a ModuleList, which is never called itself; checkpoint the modules in it"):
        smp.set_activation_checkpointing(nn.ModuleList([linear()]))
    with pytest.raises(UsageError, match="strategy 'group_2' is for an nn.Sequential, got a Linear"):
        smp.set_activation_checkpointing(linear(), strategy="group_2")
    with pytest.raises(UsageError, match="preserve_rng_state is True or False, got 1"):
        smp.set_activation_checkpointing(linear(), preserve_rng_state=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes an nn.Sequential, got Linear"):
        checkpoint_sequential(linear(), torch.randn(1, WIDTH))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes a module, got int"):
        checkpoint(3)  # type: ignore[arg-type]
    model = plain_model(nn.Sequential(linear()))
    with pytest.raises(UsageError, match="this Linear is not part of the model"):
        smp.set_activation_checkpointing(linear())
    smp.set_activation_checkpointing(model)
    assert is_checkpointed(model.module[0])
    with pytest.raises(UsageError, match="inside a step; call it between steps"):
        smp.step(lambda x: smp.set_activation_checkpointing(model))(torch.randn(1))


def test_a_later_strategy_replaces_an_earlier_one() -> None:
    """The cost of a model is asked of modules one by one, so members know that they are in a group."""
    net = nn.Sequential(linear(), linear(), nn.Tanh())
    for strategy, whole in (("each", False), ("contiguous", True), ("group_2", True), ("each", False)):
        smp.set_activation_checkpointing(net, strategy=strategy)
        assert is_checkpointed(net) is whole and all(map(is_checkpointed, net))
        assert (activation.mark_of(net[0]) is None) is whole
