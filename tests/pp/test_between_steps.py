"""What is left of a step when it is over: memory, the user's own module, kept tensors; and ranks that differ."""

import copy
import gc
import os
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import smp
from smp import StepError, runtime
from smp.pp import tape
from smp.pp.placed import Placed
from tests.harness import on_ranks
from tests.pp.reference import WIDTH, Net, check, linear, same, start, vectors, wrap

AB = {"a": 0, "b": 1}


def two(forward=lambda net, x: net.b(net.a(x)).sum(), **more):
    return Net(forward, a=linear(seed=1), b=linear(seed=2), **more)


# -- memory ------------------------------------------------------------------------------------------------------------


def live_tensors():
    """All but fake ones: torch keeps some of those of a trace, without data, for a while."""
    gc.collect()
    found = [obj for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor)]
    return sum(1 for tensor in found if not isinstance(tensor, FakeTensor))


@on_ranks(2)
def test_nothing_is_left_from_step_to_step():
    """Live tensors, remembered structures, hooks and threads after step 50 are those after step 3 (a2-1)."""
    start(microbatches=2)

    def forward(net, x):
        h = net.a(x)
        h.register_hook(lambda g: g)
        h = torch.utils.checkpoint.checkpoint(lambda y: y.sin() * 2, h, use_reentrant=False)
        h = torch.utils.checkpoint.checkpoint(net.c, h, use_reentrant=False)
        h = Plus.apply(net.b(h)) + net.position
        h[:, 0] = 0
        net.kept = h  # a placed tensor that outlives its step
        net.count += 1
        return h.sum() * (1 + 0 * h[:, 0].sum().sign().item())

    module = two(forward, c=linear(seed=4), position=nn.Parameter(torch.zeros(WIDTH)), count=torch.zeros(()))
    module.kept = None
    model = wrap(module, {**AB, "c": 1})
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    programs = []

    @smp.step
    def step(x):
        loss = model(x)
        from smp.pp.placed import current

        programs.append(weakref.ref(current.program))
        model.backward(loss)
        return loss

    def state():
        module.kept = None
        return live_tensors(), len(model.engine.structures), threading.active_count()

    after_three = None
    for k in range(50):
        optimizer.zero_grad()
        step(vectors(4, seed=k)["x"].float())
        optimizer.step()
        if k == 2:
            after_three = state()
    assert state() == after_three
    assert not any(program() is not None for program in programs), "programs of past steps are alive"


@on_ranks(2)
def test_remembered_structures_are_bounded():
    """Shapes that change for ever must not fill the memory, and all ranks must forget the same ones."""
    from smp.pp import engine

    usual, engine.MAX_STRUCTURES = engine.MAX_STRUCTURES, 5
    try:
        module = two(lambda net, x: net.b(net.a(x)[x[:, 0] > 0]).pow(2).sum() + net.b(x).sum())
        start(microbatches=1)
        plain = copy.deepcopy(module)
        model = wrap(module, AB)
        step = smp.step(lambda x: model(x))
        for rows in (2, 3, 4, 3, 2, 6, 5, 2):
            x = vectors(rows, seed=rows)["x"].float()
            same(step(x).reduce_mean(), plain(x).detach(), f"{rows} rows", 1e-5)
            assert len(model.engine.structures) <= 5
    finally:
        engine.MAX_STRUCTURES = usual


class Plus(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        return grad


@on_ranks(2)
def test_memory_does_not_grow_with_the_number_of_microbatches():
    """At most `active_microbatches` microbatches' activations are alive at any time (a2-1)."""
    most = []

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor
            alive.add(self)
            peak[0] = max(peak[0], len(alive))

    for count in (4, 16):
        start(microbatches=count, active_microbatches=2)
        model = wrap(two(lambda net, x: net.b(torch.tanh(net.a(x))).sum()), AB)
        step = smp.step(lambda x: model.backward(model(x)))  # noqa: B023
        alive, peak = weakref.WeakSet(), [0]
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            step(vectors(2 * count)["x"].float())
        most.append(peak[0])
        assert len(alive) == 0
    assert 0 < most[0] == most[1]


@on_ranks(2)
def test_results_that_nobody_can_ask_for_are_let_go():
    """A microbatch that waits for its backward holds what autograd has saved, no more; and what user code still has in
    its hands is there after the backward."""
    start(microbatches=3)
    tape.SMALL = 0  # in this process: its tensors are not worth it otherwise
    net = Net(two_steps, a=linear(seed=1), plus=Net(lambda net, x: x + 1), b=linear(seed=2))
    model = wrap(net, AB)
    first, parked = [], []

    def note(module, args, out):
        parked.append(first[0].expired()) if first else first.append(StorageWeakRef(out.untyped_storage()))

    @smp.step
    def train(x):
        h, out = model(x)
        model.backward(out.square().sum())
        return h * 2, out * 2

    for _ in range(2):
        first.clear()
        parked.clear()
        handle = net.a.register_forward_hook(note)  # the sum that comes after it keeps nothing
        batch = vectors(6)["x"].float()
        got = train(batch)
        handle.remove()
        want = 2 * (net.a(batch) + 1) if smp.pp_rank() == 0 else None
        if want is not None:
            same(got[0].concat(), want.detach(), "a result read after the backward", 1e-6)
            assert parked[0]


def two_steps(net, x):
    h = net.plus(net.a(x))
    return h, net.b(h)


@on_ranks(2)
def test_parameters_given_to_the_optimizer_before_are_the_ones_that_train():
    """Trainers build their optimizer from the raw module; freeing must not make new Parameter objects."""
    start(microbatches=2)
    module = two().double()
    plain = copy.deepcopy(module)
    raw = list(module.parameters())
    inner = torch.optim.AdamW(raw, lr=0.1)
    model = wrap(module, AB)
    optimizer = smp.DistributedOptimizer(inner)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    step = smp.step(lambda x: model.backward(model(x)))
    for k in range(3):
        optimizer.zero_grad()
        theirs.zero_grad()
        x = vectors(4, seed=k)["x"]
        step(x)
        (sum(plain(part) for part in x.chunk(2)) / 2).backward()
        optimizer.step()
        theirs.step()
    assert [id(p) for p in module.parameters()] == [id(p) for p in raw]
    for name, parameter in model.local_named_parameters():
        same(parameter.data, dict(plain.named_parameters())[name].data, name, 1e-6)
    foreign = [p for n, p in module.named_parameters() if not model.owned(n)]
    assert foreign and all(p.untyped_storage().nbytes() <= 8 and p.grad is None for p in foreign)
    assert all(p.shape == q.shape and p.device.type == "cpu" for p, q in zip(module.parameters(), plain.parameters()))


# -- between and after steps -------------------------------------------------------------------------------------------


class Picklable(nn.Module):
    """A module of its own class: closures cannot be pickled."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = linear(seed=1), linear(seed=2), nn.Dropout(0.1)

    def forward(self, x):
        return self.b(self.drop(self.a(x))).sum()


@on_ranks(2)
def test_the_module_between_steps_is_the_users_own():
    """It can be copied, pickled and inspected; its attributes hold nothing of the engine."""
    start(microbatches=2)
    module = Picklable()
    keys = {name: set(m.__dict__) for name, m in module.named_modules()}
    model = wrap(module, AB)
    step = smp.step(lambda x: model.backward(model(x)))
    x = vectors(4)["x"].float()
    for _ in range(2):
        step(x)
        twin = copy.deepcopy(model.module)
        again = pickle.loads(pickle.dumps(model.module))
        for other in (twin, again):
            assert type(other) is Picklable
            for name, parameter in model.local_named_parameters():
                assert torch.equal(dict(other.named_parameters())[name], parameter)
        for name, m in module.named_modules():
            added = set(m.__dict__) - keys[name] - {"_smp_pinned_to_stage"}
            assert not added, (name, added)
            assert type(m)._call_impl is nn.Module._call_impl


@on_ranks(2)
def test_placed_tensors_after_their_step_are_refused_by_line():
    """A tensor kept in a list has no data on most ranks; it must not read as garbage."""
    start(microbatches=2)
    kept = []

    def forward(net, x):
        h = net.a(x)
        kept.append(h)
        return net.b(h).sum()

    model = wrap(two(forward), AB)
    step = smp.step(lambda x: model.backward(model(x)))
    step(vectors(4)["x"].float())
    assert isinstance(kept[-1], Placed) and kept[-1].shape == (2, WIDTH) and kept[-1].dtype == torch.float32
    for use in (lambda t: t + 1, lambda t: t.item(), lambda t: t.sum().backward(), torch.relu, lambda t: t.numpy()):
        with pytest.raises(StepError, match=r"step that is over|test_between_steps\.py"):
            use(kept[-1])


@on_ranks(2)
def test_a_value_kept_from_another_microbatch_is_a_constant():
    """An attribute written in one microbatch and read in the next (a running memory)."""

    def forward(net, x):
        h = net.a(x)
        if net.memory is not None:
            h = h + net.memory.sum(0)
        net.memory = h.detach()
        return net.b(h).sum()

    check(two(forward, memory=None), AB, count=3, steps=1)


@on_ranks(2)
def test_a_module_of_another_stage_gives_no_numbers_outside_a_step():
    """It has no data here: not a number, rather than numbers made of nothing."""
    start(microbatches=1)
    model = wrap(two(), AB)
    smp.step(lambda x: model(x))(vectors(2)["x"].float())
    other = model.module.b if smp.pp_rank() == 0 else model.module.a
    assert other(torch.ones(1, WIDTH)).isnan().all(), "plausible numbers from weights that are not there"


# -- ranks that differ -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["extra call", "other shape", "other flag"])
@on_ranks(2)
def test_debug_mode_finds_a_step_that_depends_on_the_rank(how):
    """Without it such a step hangs or trains wrongly; with SMP_DEBUG=1 every rank is told which call differs."""
    os.environ["SMP_DEBUG"] = "1"
    try:
        start(microbatches=1)
        model = wrap(two(), AB)
    finally:
        del os.environ["SMP_DEBUG"]

    @smp.step
    def step(x):
        if smp.pp_rank() == 1 and how == "extra call":
            x = model.module.a(x)
        if how == "other shape":
            x = x[: 1 + smp.pp_rank()]
        if how == "other flag":
            x = F.dropout(x, 0.1 * (1 + smp.pp_rank()))
        return model(x)

    with pytest.raises(StepError) as error:
        step(vectors(2)["x"].float())
    for said in ("run different programs", "pp_rank 0", "pp_rank 1", "test_between_steps.py"):
        assert said in str(error.value), str(error.value)
    runtime.reset()
