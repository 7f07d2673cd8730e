"""Models that are written in uncommon ways."""

import copy
import enum
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import smp
from smp import log
from tests.harness import on_ranks
from tests.pp.reference import WIDTH, Net, check, linear, same, start, vectors, wrap

AB = {"a": 0, "b": 1}


def two(forward=lambda net, x: net.b(net.a(x)).sum(), **more):
    return Net(forward, a=linear(seed=1), b=linear(seed=2), **more)


@on_ranks(2)
def test_buffers_written_inside_a_stage_are_read_in_glue():
    """Running statistics and codebooks: other stages hold the value from before training."""

    def forward(net, x):
        h = net.norm(net.a(x))
        h = h - net.norm.running_mean + net.norm.num_batches_tracked
        h, _ = net.book(h)
        before = net.book.mean * 1.0
        h, _ = net.book(h)
        h = h * net.book.rows[0] + net.book.mean - before + net.book.total
        return net.b(h).sum() + net.a(net.book.mean).sum()

    def write(net, x):
        with torch.no_grad():
            net.mean.mul_(0.5).add_(x.mean(0))
            net.total = net.total + x.sum()
            net.rows[0] = x[0]
        return x + net.mean + net.total, net.total

    for stage in (1, 0):
        buffers = {"mean": torch.zeros(WIDTH), "total": torch.zeros(()), "rows": torch.ones(2, WIDTH)}
        module = two(forward, norm=nn.BatchNorm1d(WIDTH), book=Net(write, l=linear(), **buffers))
        check(module, {**AB, "norm": 1, "book": stage}, vectors(6), count=3)


@on_ranks(2)
def test_plain_tensors_that_placed_values_are_added_to_outlive_the_step():
    """A running loss kept by the script: it must be the same number on every rank after the step."""
    start(microbatches=2)
    module = two().double()
    plain = copy.deepcopy(module)
    model = wrap(module, AB)
    running, want = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    branches = []

    @smp.step
    def step(x):
        loss = model(x)
        running.add_(loss.detach())
        branches.append(bool(running > 0))
        model.backward(loss)

    for k in range(2):
        x = vectors(4, seed=k)["x"]
        step(x)
        for part in x.chunk(2):
            want += plain(part).detach()
        same(running * 1.0, want, "running loss")


@on_ranks(2)
def test_written_tensors_and_parameters_may_be_returned():
    """On the stages that do not own them they hold nothing."""
    start(microbatches=2)
    module = two(lambda net, x: net.a(x)).double()
    plain = copy.deepcopy(module)
    model = wrap(module, AB)

    @smp.step
    def step(x):
        h = model(x)
        out = torch.zeros(x.shape[0], 2, dtype=torch.float64)
        out[:, 1] = h[:, 1]
        model.backward(h.sum())
        return out, model.module.a.weight, model.module.b.bias

    x = vectors(4)["x"]
    out, weight, bias = step(x)
    same(out.concat()[:, 1], plain(x).detach()[:, 1], "a written tensor")
    assert torch.equal(weight.outputs[0], plain.a.weight.detach()) and torch.equal(
        bias.outputs[1], plain.b.bias.detach()
    )


@on_ranks(2)
def test_parameters_are_arguments_of_modules():
    """A parameter of glue, or of another stage, given to a module: moved like any value, its gradient comes back."""

    def forward(net, x):
        h = net.a(x) + net.b(net.position) + net.a(net.position)
        return net.b(h).sum() + net.b(net.a.weight).sum() + net.a(input=net.b.bias).sum()

    check(two(forward, position=nn.Parameter(torch.ones(WIDTH))), AB)


@on_ranks(4)
def test_the_number_of_backwards_may_change_from_step_to_step():
    """What is reduced early because the last step had one backward must not miss the second one's gradients."""
    start(2, microbatches=2)
    module = two(lambda net, x: net.b(torch.tanh(net.a(x))).pow(2).sum()).double()
    plain = copy.deepcopy(module)
    model = wrap(module, AB, overlapping_allreduce=False)  # with overlap, such a step is an error that says so

    @smp.step
    def step(x, times):
        for k in range(times):
            model.backward(model(x + k))

    for index, times in enumerate((1, 1, 2, 1, 3, 1)):
        model.zero_grad()
        plain.zero_grad()
        batches = [vectors(4, seed=10 * index + replica)["x"] for replica in range(2)]
        step(batches[smp.rdp_rank()], times)
        for batch in batches:
            for part in batch.chunk(2):
                for k in range(times):
                    (plain(part + k) / 4).backward()
        for name, parameter in model.local_named_parameters():
            same(parameter.grad, dict(plain.named_parameters())[name].grad, f"step {index} with {times}: {name}")


@on_ranks(4)
def test_a_flag_may_change_the_number_of_backwards():
    """Steps of two kinds take turns: what was reduced early in the one must not be taken for done in the other."""
    start(2, microbatches=2)
    module = two(lambda net, x: net.b(torch.tanh(net.a(x))).pow(2).sum()).double()
    plain = copy.deepcopy(module)
    model = wrap(module, AB)

    @smp.step
    def step(x, again=False):
        model.backward(model(x))
        if again:
            model.backward(model(x + 1))

    for index, again in enumerate((False, False, True, True, False, True)):
        model.zero_grad()
        plain.zero_grad()
        batches = [vectors(4, seed=10 * index + replica)["x"] for replica in range(2)]
        step(batches[smp.rdp_rank()], again=again)
        for part in [part for batch in batches for part in batch.chunk(2)]:
            for shift in range(1 + again):
                (plain(part + shift) / 4).backward()
        for name, parameter in model.local_named_parameters():
            same(parameter.grad, dict(plain.named_parameters())[name].grad, f"step {index}: {name}")


class Point(NamedTuple):
    left: torch.Tensor
    right: object


@dataclass
class Result:
    tensor: torch.Tensor
    name: str = ""
    inner: object = None


class Kind(enum.Enum):
    ONE = 1


@on_ranks(2)
def test_results_of_every_kind():
    """Named tuples, dataclasses, the parameter itself, the input itself, one tensor twice, views, expanded, complex."""

    def many(net, x):
        h = net.l(x)
        return {
            "point": Point(h, Kind.ONE),
            "result": Result(h * 2, "name", [h.sum(0), None]),
            "weight": net.l.weight,
            "input": x,
            "twice": (h, h),
            "view": h[:, :2],
            "expanded": h[:1].expand(5, -1),
            "complex": torch.complex(h, h),
            "low": h.to(torch.bfloat16),
            "flag": h > 0,
            "shape": h.shape,
            "type": torch.float32,
            "size": x.shape[0],
            "empty": [],
        }

    def forward(net, x):
        out = net.many(net.a(x))
        assert isinstance(out["point"], Point) and out["point"].right is Kind.ONE
        assert isinstance(out["result"], Result) and out["result"].name == "name" and out["result"].inner[1] is None
        assert out["shape"] == (x.shape[0], WIDTH) and out["type"] is torch.float32 and out["size"] == x.shape[0]
        assert out["empty"] == []
        total = out["point"].left.sum() + out["result"].tensor.mean() + out["result"].inner[0].sum()
        total = total + (out["weight"] * 2).sum() + out["twice"][0].sum() * out["twice"][1].mean()
        total = (
            total + net.b(out["input"]).sum() + out["view"].sum() + out["expanded"].sum() + net.b(out["expanded"]).sum()
        )
        total = (
            total + out["complex"].abs().sum() + out["low"].float().sum().double() + net.b(out["flag"].double()).sum()
        )
        return total + net.b(out["complex"].imag).sum()

    for stage in (0, 1):
        check(two(forward, many=Net(many, l=linear(seed=3))), {**AB, "many": stage}, tolerance=1e-6)


@on_ranks(2)
def test_plain_results_that_depend_on_data():
    """Numbers, strings and arrays that a module makes from its data: the other stages must not keep the first ones."""
    seen = []

    def measure(net, x):
        h = net.l(x)
        biggest = h.detach().abs().max().item()
        return h, biggest, f"{biggest:.6f}", numpy.array([biggest, 2.0]), {"rows": [int(h.argmax())]}

    def forward(net, x):
        h, number, text, array, more = net.measure(net.a(x))
        if not smp.is_tracing():
            seen.append((number, text, array.tolist(), more))
        return net.b(h * number).sum() * array[0]

    check(two(forward, measure=Net(measure, l=linear(seed=3))), {**AB, "measure": 1}, count=2, steps=2)
    assert smp.allgather([s[1:] for s in seen], smp.WORLD)[0] == [s[1:] for s in seen]


@on_ranks(2)
def test_arguments_of_every_kind_decide_the_structure():
    """Arrays, ranges, slices, numpy numbers, enums and dtypes as arguments: another one means another result."""

    def cut(net, x, rows, how, columns, number, kind):
        h = net.l(x)[list(rows)]
        h = h[:, how] if how is not None else h
        h = h[:, :number].to(kind)
        return h[:, : len(columns)]

    def forward(net, x):
        h = net.a(x)
        total = 0
        for rows, how, columns, number, kind in (
            (range(2), None, numpy.zeros(3), numpy.int64(4), torch.float64),
            (range(1), None, numpy.zeros(2), numpy.int64(4), torch.float64),
            (range(2), slice(0, 3), numpy.zeros(2), numpy.int64(1), torch.float64),
            (range(2), slice(1, None), numpy.zeros(4), numpy.int64(2), torch.float32),
        ):
            out = net.cut(h, rows, how, columns, number, kind)
            total = total + (out.double() * out.shape[1]).sum()
        return net.b(h).sum() + total

    check(two(forward, cut=Net(cut, l=linear(seed=3))), {**AB, "cut": 1}, tolerance=1e-6)


@on_ranks(2)
def test_models_at_the_edges():
    """A single layer placed on one of two stages, one without parameters, and nothing at all."""
    single = Net(lambda net, x: net.l(x).sum(), l=linear())
    check(single, {"l": 0})
    start(microbatches=2)
    model = wrap(nn.Linear(WIDTH, 1), {"": 1})
    step = smp.step(lambda x: model.backward(model(x).sum()))
    step(vectors(4)["x"].float())
    assert len(list(model.parameters())) in (0, 2)
    start(microbatches=2)
    nothing = wrap(nn.Sequential(nn.ReLU(), nn.Dropout(0.0)), {})
    got = smp.step(lambda x: nothing(x).sum())(vectors(4)["x"])
    same(got.reduce_sum(), vectors(4)["x"].relu().sum(), "a model without parameters")


@on_ranks(2)
def test_parametrizations_and_recurrences():
    """weight_norm and spectral_norm compute weights from parameters on the way; read in glue code as well."""

    def forward(net, x):
        h = net.normed(net.a(x))
        h = net.spectral(net.b(h))
        return F.linear(h, net.normed.weight).sum()

    normed = nn.utils.parametrizations.weight_norm(linear(seed=3))
    spectral = nn.utils.parametrizations.spectral_norm(linear(seed=4))
    check(two(forward, normed=normed, spectral=spectral), {**AB, "normed": 1, "spectral": 0})


@on_ranks(2)
def test_attention_layers_of_torch():
    """MultiheadAttention and the transformer layers, with masks made in glue; also in evaluation (their fast path)."""
    encoder = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
    decoder = nn.TransformerDecoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(net, x):
        h = net.a(x)[None]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[0], dtype=x.dtype)
        h = net.encoder(h, src_mask=mask, is_causal=True)
        h, weights = net.attention(h, h, h, attn_mask=mask)
        h = net.decoder(h, net.encoder(h), tgt_mask=mask)
        return net.b(h).sum() + weights.sum()

    module = two(forward, encoder=encoder, decoder=decoder, attention=attention)
    places = {**AB, "encoder": 0, "decoder": 1, "attention": 1}
    plain = copy.deepcopy(module).double().eval()
    model = check(module, places)
    model.eval()
    plain.load_state_dict(model.state_dict())
    x = vectors(4)["x"]
    with torch.no_grad():
        got = smp.step(lambda x: model(x))(x)
        for a, part in zip(got.outputs, x.chunk(2)):
            same(a, plain(part), "evaluation")


@on_ranks(2)
def test_sparse_gradients_and_indices():
    """nn.Embedding(sparse=True), F.embedding with a glue weight, gather, scatter, index_add with replicated indices."""

    def forward(net, x):
        ids = torch.arange(x.shape[0])
        h = net.a(x) + net.table(ids) + F.embedding(ids, net.rows)
        h = h.index_add(0, ids, net.b(h)).gather(1, ids[:, None].expand(-1, WIDTH) % WIDTH)
        out = torch.zeros_like(h).scatter_(1, ids[:, None] % WIDTH, net.b(h)[:, :1])
        return (out + h[ids.flip(0)]).sum() + h[0, 1] * h[-1, ids[0]]

    module = two(forward, table=nn.Embedding(4, WIDTH, sparse=False), rows=nn.Parameter(torch.ones(4, WIDTH)))
    check(module, {**AB, "table": 1})


@on_ranks(2)
def test_a_changed_list_argument_is_warned_of():
    """The caller's own list does not see what a module of one stage adds to it; that must not pass without a word."""
    start(microbatches=1)
    warnings = []

    def collect(net, x, states):
        h = net.l(x)
        states.append(h)
        return h

    def forward(net, x):
        states = [net.a(x)]
        return net.b(net.collect(states[0], states)).sum()

    model = wrap(two(forward, collect=Net(collect, l=linear(seed=3))), {**AB, "collect": 1})
    usual, log.get_logger().warning = log.get_logger().warning, lambda text, *args: warnings.append(text % args)
    try:
        smp.step(lambda x: model(x))(vectors(2)["x"].float())
    finally:
        log.get_logger().warning = usual
    assert any("'collect' adds to" in text for text in warnings) == (smp.pp_rank() == 1)


@on_ranks(2)
def test_moved_values_of_every_layout():
    """Transposed, sliced, expanded, zero-dim, empty, boolean, integer, half and complex values over the boundary."""

    def forward(net, x):
        h = net.a(x)
        far = net.b(x)
        values = [
            h.t().t(),
            h.t()[:, :2].t(),
            h[:, ::2].repeat(1, 2),
            h[:1].expand(x.shape[0], -1),
            h.sum(),
            h[:0].sum(),
        ]
        total = far.sum()
        for value in values:
            total = total + (far * value).sum()
        total = total + far[(h > 0)[:, 0]].sum() + far.gather(1, h.argsort(-1)).sum()
        total = total + (far * h.to(torch.bfloat16)).sum() * 1e-3 + (far * torch.complex(h, h)).real.sum()
        return total + net.b(h[:0]).sum()

    check(two(forward), AB, tolerance=1e-6)


@on_ranks(2)
def test_no_sync_and_accumulation_over_steps():
    """Gradients add up over steps until zero_grad; a model in evaluation adds none."""
    start(microbatches=2)
    module = two().double()
    plain = copy.deepcopy(module)
    model = wrap(module, AB)
    step = smp.step(lambda x: model.backward(model(x)))
    for k in range(3):
        x = vectors(4, seed=k)["x"]
        if k == 1:
            with model.no_sync():
                step(x)
        else:
            step(x)
        (sum(plain(part) for part in x.chunk(2)) / 2).backward()
    for name, parameter in model.local_named_parameters():
        same(parameter.grad, dict(plain.named_parameters())[name].grad, name)
    with pytest.raises(smp.StepError):
        smp.step(lambda x: model.backward(model(x).detach()))(x)
