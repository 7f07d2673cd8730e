"""Rules by which any Python model runs over stages: gradients and in-place writes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import smp
from smp import StepError
from smp.pp.placed import Placed
from tests.harness import on_ranks
from tests.pp.reference import WIDTH, Net, check, linear, same, start, vectors, wrap

AB = {"a": 0, "b": 1}


def owner(tensor):
    """The stage a value lives on; None in the plain run, where there are no stages."""
    return tensor.value.owner if isinstance(tensor, Placed) else None


def two(forward, **more):
    return Net(forward, a=linear(seed=1), b=linear(seed=2), **more)


# -- gradients ---------------------------------------------------------------------------------------------------------


class Sometimes(torch.autograd.Function):
    """Its input requires a gradient by structure, and gets None in truth."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Selfish(nn.Module):
    """Takes two inputs and gives a gradient to the first one only."""

    def __init__(self):
        super().__init__()
        self.l = linear(seed=6)

    def forward(self, x, y):
        return Sometimes.apply(self.l(x), y)


@pytest.mark.parametrize("decoupled", [True, False])
@on_ranks(2)
def test_a_none_gradient_stays_none(decoupled):
    """Zero is not the same to AdamW: it would decay a weight that one process leaves alone."""

    def forward(net, x):
        return (
            net.selfish(net.b(x), net.a(x)).sum() + net.unused_output(x).sum() * 0 if net.zero else forward_none(net, x)
        )

    def forward_none(net, x):
        net.unused(x)  # called, result not used
        return net.selfish(net.b(x), net.a(x)).sum()

    module = two(forward, selfish=Selfish(), unused=linear(seed=7), never=linear(seed=8), zero=False).double()
    import copy

    plain = copy.deepcopy(module)
    start(microbatches=2)
    model = wrap(module, {**AB, "selfish": 1, "unused": 1, "never": 0})
    make = torch.optim.AdamW if decoupled else torch.optim.SGD
    ours = smp.DistributedOptimizer(make(model.parameters(), lr=0.1, weight_decay=0.3))
    theirs = make(plain.parameters(), lr=0.1, weight_decay=0.3)

    @smp.step
    def step(x):
        model.backward(model(x))

    for k in range(3):
        x = vectors(4, seed=k)["x"]
        ours.zero_grad()
        theirs.zero_grad()
        step(x)
        for part in x.chunk(2):
            (plain(part) / 2).backward()
        expected = dict(plain.named_parameters())
        assert expected["a.weight"].grad is None
        for name, parameter in model.local_named_parameters():
            same(parameter.grad, expected[name].grad, f"gradient of {name}")
        ours.step()
        theirs.step()
        for name, parameter in model.local_named_parameters():
            same(parameter.data, expected[name].data, name)


@on_ranks(2)
def test_several_losses_and_backward_calls_in_one_step():
    """A GAN's two losses, a list of losses, grad_tensors for vectors: gradients add up as in one process."""
    module = two(lambda net, x: net.b(torch.tanh(net.a(x)))).double()
    import copy

    for pp, kind in [(2, "two"), (2, "list"), (2, "vector"), (2, "placed"), (2, "detached")]:
        plain = copy.deepcopy(module)
        start(pp, microbatches=2)
        model = wrap(copy.deepcopy(module), AB)

        def losses(net, x, kind=kind):
            out = net(x)
            fake = net(out.detach() if kind == "detached" else x * 2)
            return out, fake

        def run(out, fake, backward, kind=kind):
            if kind in ("two", "detached"):
                backward(out.sum())
                backward((fake**2).sum())
            elif kind == "list":
                backward([out.sum(), (fake**2).sum()])
            elif kind == "vector":
                backward([out, fake], [torch.full_like(out, 2.0), torch.ones_like(fake)])
            else:
                backward(out, fake.detach())

        @smp.step
        def step(x):
            out, fake = losses(model, x)  # noqa: B023
            run(out, fake, model.backward)  # noqa: B023
            return out.sum()

        for k in range(2):
            x = vectors(4, seed=k)["x"]
            step(x)
            for part in x.chunk(2):
                out, fake = losses(plain, part)

                def backward(tensors, gradients=None):
                    tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
                    gradients = [gradients] if isinstance(gradients, torch.Tensor) else gradients
                    gradients = gradients or [torch.ones_like(t) for t in tensors]
                    torch.autograd.backward(tensors, [g / 2 for g in gradients])

                run(out, fake, backward)
        for name, parameter in model.local_named_parameters():
            same(parameter.grad, dict(plain.named_parameters())[name].grad, f"{kind}: {name}")


@on_ranks(2)
def test_a_second_backward_through_the_same_graph_is_not_silent():
    """One process raises (the graph is freed); here it must not give a part of a gradient."""
    start(microbatches=1)
    model = wrap(two(lambda net, x: net.b(net.a(x)).sum()).double(), AB)

    @smp.step
    def step(x):
        loss = model(x)
        model.backward(loss)
        model.backward(loss * 2)

    with pytest.raises((StepError, RuntimeError)):
        step(vectors(2)["x"])


@on_ranks(2)
def test_two_backwards_share_a_parameter_of_glue():
    """Parameters are leaves: both losses may use one, also through the one copy that was sent to another stage."""
    import copy

    def losses(net, x):
        return (net.b(x) * net.scale).sum(), (net.b(x * 2) * net.scale).sum() + net.scale.sum()

    module = two(lambda net, x: losses(net, x), scale=nn.Parameter(torch.ones(WIDTH))).double()
    plain = copy.deepcopy(module)
    start(microbatches=2)
    smp.set_partition(module, 0)
    model = wrap(module, AB)

    @smp.step
    def step(x):
        first, second = model(x)
        model.backward(first)
        model.backward(second)

    for k in range(2):
        x = vectors(4, seed=k)["x"]
        step(x)
        for part in x.chunk(2):
            for loss in losses(plain, part):
                (loss / 2).backward()
    for name, parameter in model.local_named_parameters():
        same(parameter.grad, dict(plain.named_parameters())[name].grad, name)
    assert model.stage_of["scale"] == 0


@on_ranks(2)
def test_backward_is_refused_with_a_reason():
    """Without a graph, on a vector without gradients, with gradients of another number, outside a step."""
    start(microbatches=1)
    model = wrap(two(lambda net, x: net.b(net.a(x))).double(), AB)
    x = vectors(2)["x"]

    def attempt(backward):
        with pytest.raises(StepError) as error:
            smp.step(backward)(x)
        return str(error.value)

    assert "needs grad_tensors" in attempt(lambda x: model.backward(model(x)))
    assert "does not depend" in attempt(lambda x: model.backward(x.sum()))
    assert "does not depend" in attempt(lambda x: model.backward(model(x).detach().sum()))
    assert "2 tensors and 1 grad_tensors" in attempt(lambda x: model.backward([model(x).sum()] * 2, [None]))
    with torch.no_grad():
        assert "no_grad" in attempt(lambda x: model.backward(model(x).sum()))
    with pytest.raises(StepError, match="outside a step"):
        model(x)
    with pytest.raises(StepError, match="outside a step"):
        model.backward(torch.ones((), requires_grad=True))
    with pytest.raises(Exception, match="@smp.step"):
        model.module(x) if smp.pp_rank() == 5 else model(x)
    smp.step(lambda x: model.backward(model(x).sum()))(x)  # still usable


@on_ranks(2)
def test_hooks_on_placed_values_fire_once_per_microbatch():
    """They may change the gradient; they do not pile up from step to step (a2-1)."""
    calls = []

    def forward(net, x):
        h = net.a(x)
        h.register_hook(lambda g: (calls.append(h.shape), g * 2)[1])
        removed = h.register_hook(lambda g: g * 100)
        removed.remove()
        return (net.b(h) + net.b(h * 2)).sum()

    steps = 3
    check(two(forward), AB, count=2, steps=steps)
    mine = 2 * steps if smp.pp_rank() == 0 else 0
    assert len(calls) == 2 * steps + mine, calls  # the plain run's own and, on the owner, ours


# -- in-place ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_in_place_first_operations():
    """ReLU(inplace=True) as a node of its own, inside a node, and with a skip connection over it: as in one process."""
    inner = nn.Sequential(nn.ReLU(inplace=True), linear(seed=3))

    def forward(net, x):
        h = net.a(x)
        h = net.relu(h)
        k = net.inner(h * 1.0)
        return net.b(F.relu_(k)).sum()

    check(two(forward, relu=nn.ReLU(inplace=True), inner=inner), {**AB, "inner": 1})

    def skip(net, x):
        h = net.a(x) + 0.0
        return (net.b(net.relu(h)) + h).sum()  # h has been written to: the skip sees the written value

    check(two(skip, relu=nn.ReLU(inplace=True)), AB)
    check(two(skip, relu=nn.Sequential(nn.ReLU(inplace=True), linear(seed=4))), {**AB, "relu": 1})
    check(two(skip, relu=nn.Sequential(nn.ReLU(inplace=True), linear(seed=4))), {**AB, "relu": 0})


@on_ranks(2)
def test_in_place_operations_in_glue_rebind_the_value():
    """`loss /= n`, `h += 1`, `h[:, 0] = 0`, `out=`-free methods with an underscore."""

    def forward(net, x):
        h = net.a(x)
        before = h * 1.0
        h += 1
        h *= net.b(before)
        h.add_(before).clamp_(min=-2)
        h[:, 0] = 0.5
        h[:, 1] = before[:, 2]
        h[h > 1] = 1.0
        loss = h.sum()
        loss /= 2
        loss -= before.mean()
        alias = loss
        loss += 1
        assert alias is loss
        return loss

    check(two(forward), AB)

    def plain_written(net, x):  # a plain tensor that placed values are written into
        out = torch.zeros(x.shape[0], WIDTH, dtype=torch.float64)
        h = net.a(x)
        out[:, :2] = h[:, :2]
        out += net.b(h)
        empty = h.new_zeros(x.shape[0], 2 * WIDTH)
        empty[:, WIDTH:] = net.b(h)
        return (out * h).sum() + empty.sum()

    check(two(plain_written), AB)


@on_ranks(2)
def test_a_write_through_a_view_is_right_or_an_error_that_names_the_line():
    """Other ranks do not know which memory two placed values share: a stale value would be used without a word."""

    def through_slice(net, x):
        h = net.a(x) * 1.0
        view = h[:, 0]
        view.zero_()
        return net.b(h).sum()

    def through_reshape(net, x):
        h = net.a(x) * 1.0
        h.view(-1)[0] = 0.0
        return net.b(h).sum()

    def base_written(net, x):
        h = net.a(x) * 1.0
        view = h.t()
        h.mul_(2)
        return net.b(view.t()).sum()

    def chunked(net, x):
        h = net.b(net.a(x)) * 1.0
        first, second = h.chunk(2, -1)
        first += second
        return net.a(h).sum()

    def of_a_detached_one(net, x):
        h = net.a(x) * 1.0
        h.detach().mul_(2)
        return net.b(h).sum()

    for forward in (through_slice, through_reshape, base_written, chunked, of_a_detached_one):
        first = forward.__code__.co_firstlineno
        try:
            check(two(forward), AB, steps=1)
        except StepError as error:
            lines = [first + i for i in range(6)]
            assert any(f"test_rules_values.py:{line}" in str(error) for line in lines), str(error)  # noqa: PT017


@on_ranks(2)
def test_a_written_value_that_was_moved_before():
    """The copy on another stage is of the old value; whoever uses it afterwards must get the new one."""

    def forward(net, x):
        h = net.a(x) * 1.0
        first = net.b(x) + h  # on stage 1, so h has a copy there (and is not saved for the backward)
        assert owner(first) in (None, 1)
        h += 1
        second = net.b(x) + h
        assert owner(second) in (None, 1)
        h = h.mul(2)
        h.add_(net.b(x))
        return (first * second + h).sum()

    check(two(forward), AB)
