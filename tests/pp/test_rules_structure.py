"""Rules by which any Python model runs over stages: structure on ranks that own nothing, values of placed tensors."""

import contextlib
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import smp
from smp.pp.placed import Placed
from tests.harness import on_ranks
from tests.pp.reference import WIDTH, Net, check, linear, start, vectors, wrap

AB = {"a": 0, "b": 1}


def owner(tensor):
    """The stage a value lives on; None in the plain run, where there are no stages."""
    return tensor.value.owner if isinstance(tensor, Placed) else None


def two(forward, **more):
    return Net(forward, a=linear(seed=1), b=linear(seed=2), **more)


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
