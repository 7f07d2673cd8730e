"""A step over stages: its batch and outputs, random numbers, threads and exceptions."""

import contextvars
import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import smp
from smp import StepError
from smp.pp.executor import Worker
from tests.harness import on_ranks
from tests.pp.reference import WIDTH, Net, check, linear, same, start, vectors, wrap

AB = {"a": 0, "b": 1}


def two(forward=lambda net, x: net.b(net.a(x)).sum(), **more):
    return Net(forward, a=linear(seed=1), b=linear(seed=2), **more)


def gathered(obj):
    """The object of every rank."""
    return smp.allgather(obj, smp.WORLD)


# -- batch and outputs -------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_batch_of_pp_rank_0_is_the_batch():
    """Other ranks may pass other data, other lengths, other dtypes and devices: only their structure counts."""
    start(microbatches=2)
    module = two(lambda net, x, scale: net.b(net.a(x) * scale)).double()
    plain = copy.deepcopy(module)
    model = wrap(module, AB)

    @smp.step
    def step(batch, labels, weight, flag, scale=1.0):
        out = model(batch["x"], scale)
        loss = ((out - labels[0]) * weight).sum() + labels[1].sum()
        model.backward(loss)
        return {"loss": loss, "labels": labels[1], "out": (out, flag), "weight": weight}

    first = smp.pp_rank() == 0
    x = vectors(4)["x"]
    floats, integers, weight = x * 0.5, torch.arange(4), torch.tensor(0.25, dtype=torch.float64)
    if first:
        got = step({"x": x}, [floats, integers], weight, "flag")
    else:
        got = step({"x": torch.full((6, 1), torch.nan)}, [torch.zeros(2), torch.zeros(6, 3)], torch.tensor(9.0), "flag")
    losses = []
    for part, f, i in zip(x.chunk(2), floats.chunk(2), integers.chunk(2)):
        loss = ((plain(part, 1.0) - f) * weight).sum() + i.sum()
        (loss / 2).backward()
        losses.append(loss.detach())
    for a, b in zip(got["loss"].outputs, losses):
        same(a, b, "loss")
    assert torch.equal(got["labels"].concat(), integers)
    same(got["out"][0].concat(), plain(x, 1.0).detach(), "output")
    assert got["out"][1] == ["flag", "flag"]
    assert got["weight"].reduce_mean() == weight
    for name, parameter in model.local_named_parameters():
        same(parameter.grad, dict(plain.named_parameters())[name].grad, name)


@on_ranks(3)
def test_outputs_reach_every_rank():
    """Placed, replicated, shared, empty and boolean outputs; they are plain tensors that take no part in autograd."""
    start(3, microbatches=2)
    module = Net(lambda net, x: (net.a(x), net.c(net.b(x))), a=linear(seed=1), b=linear(seed=2), c=linear(seed=3))
    plain = copy.deepcopy(module)
    model = wrap(module, {"a": 0, "b": 1, "c": 2})

    @smp.step
    def step(x, ids):
        first, second = model(x)
        model.backward(first.sum() + second.sum())
        return {
            "first": first, "again": first, "view": second[:, 0], "bool": second > 0, "empty": first[:0], "ids": ids,
            "none": None, "number": ids.sum().item(), "x": x, "list": [first.argmax(-1), (second.sum(),)],
        }  # fmt: skip

    x, ids = vectors(4)["x"].float(), torch.arange(4)
    got = step(x, ids)
    first, second = (t.detach() for t in plain(x))
    same(got["first"].concat(), first, "first", 1e-6)
    same(got["again"].concat(), first, "again", 1e-6)
    same(got["view"].concat(), second[:, 0], "view", 1e-6)
    assert torch.equal(got["bool"].concat(), second > 0)
    assert got["empty"].concat().shape == (0, WIDTH)
    assert torch.equal(got["ids"].concat(), ids) and torch.equal(got["x"].concat(), x)
    assert got["none"] == [None, None] and got["number"] == [1, 5]
    assert torch.equal(got["list"][0].concat(), first.argmax(-1))
    for output in (got["first"], got["x"], got["list"][1][0]):
        assert all(type(t) is torch.Tensor and not t.requires_grad for t in output.outputs)
    everywhere = gathered(got["list"][1][0].stack())
    assert all(torch.equal(t, everywhere[0]) for t in everywhere)


@on_ranks(2)
def test_a_batch_that_does_not_divide_is_refused_on_every_rank():
    """Also when only pp_rank 0, whose batch counts, has the wrong one."""
    start(microbatches=2)
    model = wrap(two(), AB)
    step = smp.step(lambda x: model(x))
    x = vectors(4)["x"].float()
    with pytest.raises(StepError, match=r"'x' has shape \(3, 4\)"):
        step(x[:3] if smp.pp_rank() == 0 else x)
    got = step(x if smp.pp_rank() == 0 else x[:3])  # the world is as good as before
    assert len(got.outputs) == 2


@on_ranks(2)
def test_gradients_of_inputs_that_require_them():
    """An input that requires a gradient gets one on pp_rank 0, whose tensor it is."""
    start(microbatches=2)
    model = wrap(two().double(), AB)
    plain = copy.deepcopy(model.module)
    x = vectors(4)["x"].requires_grad_()

    @smp.step
    def step(x):
        assert x.requires_grad
        model.backward(model(x) + (x**2).sum())

    reference = x.detach().clone().requires_grad_()
    (sum(plain(part) + (part**2).sum() for part in reference.chunk(2)) / 2).backward()
    step(x)
    if smp.pp_rank() == 0:
        same(x.grad, reference.grad, "gradient of the batch")


@pytest.mark.parametrize("active", [1, 2, 4])
@on_ranks(2)
def test_microbatches_and_how_many_are_in_flight_change_nothing(active):
    """1, 2 or 5 microbatches with 1, 2 or all in flight: losses, gradients and the order of outputs are the same."""
    for count in (1, 2, 5):
        module = two(norm=nn.BatchNorm1d(WIDTH))
        module.code = lambda net, x: net.b(net.norm(net.a(x)) + net.a(x)).pow(2).sum()
        check(module, {**AB, "norm": 1}, vectors(2 * count), count=count, active_microbatches=active)


@on_ranks(2)
def test_steps_without_backward_and_with_it_may_alternate():
    """Evaluation steps, steps where some microbatches skip the backward, and a step that does not call the model."""
    start(microbatches=2)
    module = two().double()
    plain = copy.deepcopy(module)
    model = wrap(module, AB)
    calls = []

    @smp.step
    def step(x, mode):
        calls.append(len(calls))
        if mode == "nothing":
            return x.sum()
        loss = model(x)
        if mode == "train" or (mode == "half" and calls[-1] % 2 == 0):
            model.backward(loss)
        return loss

    x = vectors(4)["x"]
    want = [plain(part) for part in x.chunk(2)]
    (want[0] / 2 * 3 + want[1]).backward()
    for mode in ("eval", "nothing", "train", "half", "eval", "train", "nothing"):
        got = step(x, mode)
        if mode != "nothing":
            for a, b in zip(got.outputs, want):
                same(a, b.detach(), mode)
        assert got.outputs[0].shape == ()
    for name, parameter in model.local_named_parameters():
        same(parameter.grad, dict(plain.named_parameters())[name].grad, name)


# -- random numbers ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_random_numbers_of_glue_are_equal_on_all_ranks():
    """rand, randperm, multinomial, poisson, functions on placed tensors: else a branch on them splits the ranks."""
    start(microbatches=2)
    torch.manual_seed(smp.rank())  # ranks seeded differently
    seen = []

    def forward(net, x):
        h = net.drop(net.a(x))
        plain = [
            torch.rand(2),
            torch.randn(()),
            torch.randperm(5),
            torch.empty(2).uniform_(),
            torch.rand_like(torch.ones(3)),
        ]
        h = F.dropout(h, 0.5) + torch.randn_like(h)
        plain.append(torch.bernoulli(torch.full((3,), 0.5)))
        h = net.b(h)
        drawn = torch.multinomial(h.softmax(-1), 1)
        plain += [torch.rand(1), drawn.flatten().tolist(), h.new_empty(3).normal_().tolist(), torch.rand(1)]
        plain += [torch.poisson(h.detach().exp() * 5).sum().item(), torch.rand(1)]
        if torch.rand(()) > 0.5:
            h = net.a(h)
        seen.append([t.tolist() if isinstance(t, torch.Tensor) else t for t in plain])
        return h.sum()

    model = wrap(two(forward, drop=nn.Dropout(0.5)), AB)

    @smp.step
    def step(x):
        loss = model(x)
        model.backward(loss)
        return loss, torch.rand(1)

    step(vectors(4)["x"].float())
    seen.clear()  # the trace has left its own values there
    for k in range(3):
        step(vectors(4, seed=k)["x"].float())
    zero, one = gathered(seen)
    assert zero == one
    assert len({str(values) for values in zero}) == 6, "steps or microbatches drew the same"


@on_ranks(2)
def test_the_users_stream_after_a_step_does_not_depend_on_the_model():
    """Shuffling after a step must be the same whether and where the model has dropout."""
    after = []
    for rate in (0.0, 0.5):
        start(microbatches=2)
        model = wrap(two(lambda net, x: net.b(net.drop(net.a(x))).sum(), drop=nn.Dropout(rate)), AB)
        step = smp.step(lambda x: model.backward(model(x)))  # noqa: B023
        torch.manual_seed(5)
        step(vectors(4)["x"].float())
        step(vectors(4)["x"].float())
        after.append((torch.rand(3).tolist(), torch.initial_seed()))
    assert after[0] == after[1]
    assert gathered(after)[0] == gathered(after)[1]


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_checkpointing_restores_masks(reentrant):
    """The recomputed forward must drop what the first one dropped: gradients equal those without checkpointing."""
    results = []
    for checkpointed in (False, True):
        start(microbatches=2)

        def forward(net, x, checkpointed=checkpointed):
            def run(function, *args):
                if not checkpointed:
                    return function(*args)
                return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=reentrant)

            h = run(net.first, net.a(x))
            h = net.drop(h)
            h = run(net.second, h)
            h = net.holder(h)
            return net.b(h).sum()

        def inside(net, x, checkpointed=checkpointed):
            if not checkpointed:
                return net.inner(x)
            return torch.utils.checkpoint.checkpoint(net.inner, x, use_reentrant=reentrant)

        noisy = [nn.Sequential(nn.Dropout(0.4), linear(seed=k), nn.Dropout(0.3)) for k in (3, 4, 5)]
        holder = Net(inside, inner=noisy[2])
        module = two(forward, first=noisy[0], second=noisy[1], drop=nn.Dropout(0.5), holder=holder).double()
        model = wrap(module, {**AB, "first": 0, "second": 1, "holder": 1})
        torch.manual_seed(3)

        @smp.step
        def step(x):
            loss = model(x)  # noqa: B023
            model.backward(loss)  # noqa: B023
            return loss

        losses = [step(vectors(4, seed=k)["x"]).stack() for k in range(2)]
        results.append((losses, {name: p.grad.clone() for name, p in model.local_named_parameters()}))
    (losses, gradients), (again, recomputed) = results
    for a, b in zip(again, losses):
        same(a, b, "loss")
    for name, gradient in gradients.items():
        same(recomputed[name], gradient, name)


# -- threads -----------------------------------------------------------------------------------------------------------

_context = contextvars.ContextVar("context", default="outside")


@on_ranks(2)
def test_microbatch_threads_inherit_the_callers_state():
    """Autocast, grad and inference mode, default device and dtype, context variables, saved-tensor hooks, modes."""
    start(microbatches=2)
    model = wrap(two(lambda net, x: net.b(net.a(x))), AB)
    seen = []

    class Counting(torch.overrides.TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Counting.count += 1
            return func(*args, **(kwargs or {}))

    @smp.step
    def step(x):
        out = model(x)
        seen.append(
            {
                "grad": torch.is_grad_enabled(),
                "inference": torch.is_inference_mode_enabled(),
                "autocast": torch.is_autocast_enabled("cpu"),
                "dtype": out.dtype,
                "requires_grad": out.requires_grad,
                "context": _context.get(),
                "device": torch.empty(1).device.type,
                "default": torch.empty(1).dtype,
            }
        )
        _context.set("inside a microbatch")
        return out

    x = vectors(4)["x"].float()

    def run():
        seen.clear()
        step(x)
        assert len(seen) == 2 and seen[0] == seen[1]
        return seen[0]

    token = _context.set("set by the caller")
    usual = {
        "grad": True, "inference": False, "autocast": False, "dtype": torch.float32, "requires_grad": True,
        "context": "set by the caller", "device": "cpu", "default": torch.float32,
    }  # fmt: skip
    assert run() == usual
    with torch.no_grad():
        assert run() == usual | {"grad": False, "requires_grad": False}
    with torch.inference_mode():
        assert run() == usual | {"grad": False, "inference": True, "requires_grad": False}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run() == usual | {"autocast": True, "dtype": torch.bfloat16}
    with torch.device("meta"):
        assert run() == usual | {"device": "meta"}
    with Counting():
        assert run() == usual
    assert Counting.count > 0
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(1), t)[1], lambda t: t):
        assert run() == usual
    assert packed, "saved-tensor hooks of the caller were not used"
    torch.set_default_dtype(torch.float64)
    try:
        assert run() == usual | {"default": torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)
    assert _context.get() == "set by the caller"
    _context.reset(token)
    assert run() == usual | {"context": "outside"}


@on_ranks(2)
def test_modes_may_change_inside_a_step():
    """no_grad, autocast and enable_grad around parts of glue code, also around calls of stages."""

    def forward(net, x):
        with torch.no_grad():
            target = net.b(net.a(x))
            assert not target.requires_grad
        assert torch.is_grad_enabled()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = net.a(x)
            assert low.dtype == torch.bfloat16
            low = net.b(low)
        with torch.no_grad(), torch.enable_grad():
            third = net.b(net.a(x))
        with torch.autocast("cpu", enabled=False):
            return (target * third).sum() + low.float().sum()

    start(microbatches=2)
    module = two(forward)
    plain = copy.deepcopy(module)
    model = wrap(module, AB)
    x = vectors(4)["x"].float()

    @smp.step
    def step(x):
        loss = model(x)
        model.backward(loss)
        return loss

    for with_outer in (False, True):
        model.zero_grad()
        plain.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=with_outer):
            got = step(x)
            losses = [plain(part) for part in x.chunk(2)]
        for a, loss in zip(got.outputs, losses):
            (loss / 2).backward()
            same(a, loss.detach(), "loss", 1e-5)
        for name, parameter in model.local_named_parameters():
            same(parameter.grad, dict(plain.named_parameters())[name].grad, name, 2e-2)


def microbatch_threads():
    """Those that are in the middle of one: the others are kept for the next step."""
    names = [t.name for t in threading.enumerate() if t.name.startswith("smp-microbatches")]
    return names[len(Worker._idle) :]


@on_ranks(2)
def test_an_exception_in_one_microbatch_unwinds_the_others():
    """No thread stays behind, `finally` blocks run, the exception is the user's own, and the next step works."""
    start(microbatches=3)
    module = two().double()
    plain = copy.deepcopy(module)
    model = wrap(module, AB)
    begun, left = [], []

    class Mine(Exception):
        pass

    @smp.step
    def step(x, fail_at, where):
        k = len(begun)
        begun.append(k)
        try:
            loss = model(x)
            if where == "forward" and k == fail_at:
                raise Mine("of the user")
            model.backward(loss)
            if where == "backward" and k == fail_at:
                raise Mine("of the user")
            return loss
        finally:
            left.append(k)

    x = vectors(6)["x"]
    for fail_at, where in [(0, "forward"), (2, "forward"), (0, "backward")]:
        begun.clear()
        left.clear()
        with pytest.raises(Mine, match="of the user") as error:
            step(x, fail_at, where)
        names = [entry.name for entry in error.traceback]
        assert "step" in names, "the traceback does not show the user's line"
        assert microbatch_threads() == []
        assert sorted(begun) == sorted(left), "a microbatch was not unwound"
        model.zero_grad()
    step(x, -1, "")
    (sum(plain(part) for part in x.chunk(3)) / 3).backward()
    for name, parameter in model.local_named_parameters():
        same(parameter.grad, dict(plain.named_parameters())[name].grad, name)
    assert microbatch_threads() == []
    assert torch.is_grad_enabled() and torch.nn.Linear(1, 1)(torch.ones(1)).shape == (1,)
