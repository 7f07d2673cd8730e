"""Rules by which any Python model runs over stages: gradients, in-place writes, structure, values of placed tensors."""

import contextlib
import io

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


# -- structure on ranks that own nothing of a call ---------------------------------------------------------------------


@on_ranks(2)
def test_structure_follows_flags():
    """train/eval, requires_grad, no_grad, autocast and Python values change a result, and no shape of what goes in."""
    start(microbatches=1)

    def inner(net, x, wide=False, kind="tensor"):
        if not net.training:
            x = x.sum(0)
        h = net.l(x)
        if wide:
            h = torch.cat([h, h], -1)
        return {"out": h} if kind == "dict" else (h, None) if kind == "tuple" else h

    module = two(
        lambda net, x, wide, kind: net.inner(net.a(x), wide=wide, kind=kind), inner=Net(inner, l=linear(seed=3))
    )
    model = wrap(module, {**AB, "inner": 1})
    seen = []

    def body(x, wide, kind):
        out = model(x, wide=wide, kind=kind)
        out = out["out"] if kind == "dict" else out[0] if kind == "tuple" else out
        seen.append((tuple(out.shape), out.dtype, out.requires_grad))
        if out.requires_grad:
            model.backward(out.sum())
        return out

    step = smp.step(body)
    x = vectors(2)["x"].float()

    def expect(shape, dtype=torch.float32, requires_grad=True, wide=False, kind="tensor"):
        for _ in range(2):  # the first time and from memory
            (got,) = step(x, wide, kind).outputs
            assert seen[-1] == (shape, dtype, requires_grad)
            assert tuple(got.shape) == shape and got.dtype == dtype

    expect((2, 4))
    expect((2, 8), wide=True)
    expect((2, 4), kind="dict")
    expect((2, 4), kind="tuple")
    model.eval()
    expect((4,))
    with torch.no_grad():
        expect((4,), requires_grad=False)
    model.train()
    with torch.no_grad():
        expect((2, 4), requires_grad=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expect((2, 4), torch.bfloat16)
    expect((2, 4))
    with torch.inference_mode():
        expect((2, 4), requires_grad=False)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    expect((2, 4), requires_grad=False)
    for parameter in module.inner.parameters():
        parameter.requires_grad_(True)
    model.zero_grad()
    expect((2, 4))
    assert all(p.grad is None for p in module.a.parameters())
    module.inner.eval()  # one module alone
    expect((4,))
    module.inner.train()
    expect((2, 4))


class Cache:
    """An opaque object that grows: never part of a signature by identity."""

    def __init__(self):
        self.items = []


@on_ranks(2)
def test_opaque_objects_pass_through():
    """A cache made in glue, given to modules of one stage, and one that a module returns."""

    def put(net, x, cache):
        cache.items.append(x.detach())
        return net.l(x), cache

    def forward(net, x):
        cache = Cache()
        h, same_cache = net.first(net.a(x), cache)
        assert same_cache is cache
        h, again = net.second(h, same_cache)
        assert again is cache
        return net.b(h).sum()

    first, second = Net(put, l=linear(seed=3)), Net(put, l=linear(seed=4))
    check(two(forward, first=first, second=second), {**AB, "first": 1, "second": 1})

    def made_inside(net, x, cache=None):
        cache = cache or Cache()
        cache.items.append(x.detach())
        return net.l(x) * len(cache.items), cache

    def forward_inside(net, x):
        h, cache = net.first(net.a(x))
        h, _ = net.second(h, cache)
        return net.b(h).sum()

    first, second = Net(made_inside, l=linear(seed=3)), Net(made_inside, l=linear(seed=4))
    check(two(forward_inside, first=first, second=second), {**AB, "first": 1, "second": 1})

    def read_elsewhere(net, x):
        h, cache = net.first(net.a(x))
        return net.b(h).sum() + len(cache.items)

    module = Net(read_elsewhere, a=linear(seed=1), b=linear(seed=2), first=Net(made_inside, l=linear(seed=3)))
    del module


@on_ranks(2)
def test_shapes_that_depend_on_data_in_glue():
    """Boolean indexing, nonzero, masked_select, unique: every rank must know the shape that only the owner can see."""

    def forward(net, x):
        h = net.a(x)
        positive = h[h[:, 0] > 0]
        rows = (h.sum(-1) > 0).nonzero()[:, 0]
        chosen = net.b(h[rows])
        flat = torch.masked_select(h, h > 0)
        (where,) = torch.where(h[:, 1] > 0)
        values = torch.unique(h.detach().round())
        count = positive.shape[0] + rows.numel() + len(values) + where.shape[0]
        empty = h[h[:, 0] > 1e9]
        assert empty.shape == (0, WIDTH)
        return positive.sum() + chosen.sum() + flat.sum() * count + net.b(empty).sum() + h[where].sum()

    check(two(forward), AB, count=2, steps=3)


class Routed(nn.Module):
    """A mixture of experts: which rows an expert gets depends on the data; what goes in and out does not."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([linear(seed=20 + k) for k in range(3)])

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == k)
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


@pytest.mark.parametrize("spread", [False, True])
@on_ranks(2)
def test_routing(spread):
    """Mixture of experts within one stage, and with its experts on both: an expert without rows gets no gradient."""
    module = two(lambda net, x: net.b(net.moe(net.a(x))).sum(), moe=Routed())
    places = (
        {**AB, "moe": 1}
        if not spread
        else {**AB, "moe.gate": 0, "moe.experts.0": 0, "moe.experts.1": 1, "moe.experts.2": 1}
    )
    check(module, places, count=2, steps=3)


# -- values of placed tensors ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_values_of_placed_tensors_are_known_on_every_rank():
    """item, bool, float, int, print, format, tolist, numpy: a branch on one must be the same branch everywhere."""
    seen = []

    def forward(net, x):
        h = net.a(x)
        total = net.b(h).sum()
        values = [
            *[total.item(), bool(total > 0), float(total), int(total), f"{total.item():.6f}"],
            *[h.tolist(), h.detach().numpy().tolist(), total.detach().cpu().numpy().item()],
            *[
                (h > 0).any().item(),
                h.argmax().item(),
                torch.isnan(total).item(),
                torch.equal(h, h),
                torch.allclose(h, h),
            ],
            *[[row.sum().item() for row in h], max(h[0]).item(), total.item() in (1, 2), h.shape, len(h)],
        ]
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            print(total.detach())
        values += [f"{total.detach():.3f}", repr(h.detach()), str(total.detach()), out.getvalue()]
        seen.append(values)
        return total * 2 if total > 0 else total * 3

    check(two(forward), AB)
    half = len(seen) // 2  # ours, then the plain ones, per step of two microbatches
    ours = [seen[i] for i in (0, 1, 4, 5)]
    plain = [seen[i] for i in (2, 3, 6, 7)]
    assert half == 4
    for mine, theirs in zip(ours, plain):
        for a, b in zip(mine, theirs, strict=True):
            if isinstance(a, float):
                assert abs(a - b) < 1e-9
            elif isinstance(a, str):
                assert a.replace("Placed", "tensor").split("grad_fn")[0] == b.split("grad_fn")[0]
            else:
                assert a == b or torch.allclose(torch.tensor(a), torch.tensor(b)), (a, b)


@on_ranks(3)
def test_numbers_become_arguments_and_control_loops():
    """A number read from a tensor and used again, a loop that ends on a value: the same on all of three ranks."""

    def forward(net, x):
        h = net.a(x)
        turns = 0
        while h.norm() > 0.5 and turns < 10:
            h = net.b(h) * 0.3
            turns += 1
        h = net.c(h)
        scale = h.abs().max().item()
        return (h / scale).sum() + h[: int(h.argmax()) % 2 + 1].sum() + turns

    module = Net(forward, a=linear(seed=1), b=linear(seed=2), c=linear(seed=3))
    check(module, {"a": 0, "b": 2, "c": 1}, pp=3)


@on_ranks(2)
def test_placed_tensors_look_like_tensors():
    """isinstance, shape, dtype, device, requires_grad, is_leaf, grad_fn, len, iteration, comparison."""

    def forward(net, x):
        h = net.a(x)
        assert isinstance(h, torch.Tensor) and torch.is_tensor(h) and h.shape == (x.shape[0], WIDTH)
        assert h.dtype == torch.float64 and h.device.type == "cpu" and h.dim() == 2 and h.ndim == 2
        assert h.requires_grad and not h.is_leaf and h.grad_fn is not None and h.is_floating_point()
        assert not h.detach().requires_grad and h.detach().grad_fn is None
        assert h.size(-1) == WIDTH and len(h) == x.shape[0] and h.numel() == h.nelement()
        first, *rest = h
        assert len(rest) == x.shape[0] - 1
        a, b = h.split(2, -1)
        c, d = h.unbind(0)[:2]
        assert a.shape == b.shape and c.shape == d.shape == (WIDTH,)
        assert h.T.shape == h.t().shape == (WIDTH, x.shape[0]) and h.mT.shape == h.T.shape
        assert h.to(torch.float32).dtype == torch.float32 and h.float().double().dtype == torch.float64
        assert h.type(torch.float32).dtype == torch.float32 and h.type_as(x).dtype == x.dtype
        assert h.new_zeros(3).shape == (3,) and torch.zeros_like(h).shape == h.shape
        assert hash(h) == hash(h) and h in {h}
        values, indices = h.max(-1)
        named = h.topk(2)
        assert named.values.shape == (x.shape[0], 2) and indices.dtype == torch.int64
        assert h.is_contiguous() and h.stride() == (WIDTH, 1) and h.is_cuda is False and h.layout == torch.strided
        assert (h == h).all() and torch.where(h > 0, h, -h).shape == h.shape
        assert torch.result_type(h, 1) == torch.float64 and h.data.shape == h.shape
        out = torch.einsum("ij,kj->ik", h, net.b(h)) @ h
        out = out + F.pad(h, (0, 0)) + F.dropout(h, 0.0) + torch.stack(list(h)) + 1 - (2 - h) / 3.0
        return (
            out.sum() + values.sum() + named.values.sum() + a.sum() + (c * d).sum() + first.sum() + h[..., None].sum()
        )

    check(two(forward), AB)
    assert Placed.__name__
