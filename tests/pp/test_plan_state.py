"""What microbatches share beside the model's parameters: state that code keeps, generators, what ranks are given."""

import copy
import random
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import smp
from smp.pp.plan import StateWatch
from tests.harness import on_ranks
from tests.pp.reference import WIDTH, Net, check, linear, same, start, vectors, wrap
from tests.pp.test_plan import CHAIN, chain, plan_of

CONTEXT = {}
_current = None


def set_current(mask):
    global _current
    _current = mask


KEPT = {
    "global": (lambda net, m: set_current(m), lambda net: _current),
    "in a global": (lambda net, m: CONTEXT.update(m=m), lambda net: CONTEXT["m"]),
    "attribute": (lambda net, m: setattr(net, "kept", m), lambda net: net.kept),
    "list": (lambda net, m: net._kept.__setitem__(0, m), lambda net: net._kept[0]),
    "dict": (lambda net, m: net.inner["deep"].update(m=m), lambda net: net.inner["deep"]["m"]),
    "object": (lambda net, m: setattr(net.context, "m", m), lambda net: net.context.m),
    "module": (lambda net, m: setattr(net.a, "m", m), lambda net: net.a.m),
}


@on_ranks(2)
@pytest.mark.parametrize("where", list(KEPT))
def test_state_kept_between_modules_keeps_the_phase_order(where):
    """Its forward must not be interrupted: another microbatch would overwrite what it keeps, here a plain mask, so
    that nothing would tell."""
    keep, kept = KEPT[where]

    def forward(net, x, mask):
        keep(net, mask)
        y = net.a(net.b(net.a(x)))
        return net.b(y * kept(net)[:, None]).pow(2).mean()

    state = {"_kept": [None], "inner": {"deep": {}}, "context": SimpleNamespace()}
    model = check(chain(forward, **state), CHAIN, vectors(8, mask=torch.arange(8)), count=4, steps=3)
    assert plan_of(model) is None


@on_ranks(2)
def test_state_that_stays_as_it_is_does_not_matter():
    """A model with a configuration, counters of its parts and lists of its own must not lose its plan."""

    class Counting(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.inner, self.calls, self.shapes = linear(seed=seed), 0, []

        def forward(self, x):
            self.calls += 1
            self.shapes.append(x.shape)
            return self.inner(x)

    def forward(net, x):
        y = net.b(net.a(net.b(net.a(x))))
        if net.config.kind is None:  # as classifiers of transformers do
            net.config.kind = "regression"
        return y.pow(2).mean()

    config = SimpleNamespace(sizes=[1, 2], names={"a": 1}, kind=None)
    model = check(Net(forward, a=Counting(1), b=Counting(2), config=config), CHAIN, count=4, steps=3)
    assert plan_of(model) is not None


@on_ranks(2)
def test_state_is_looked_for_once_in_a_step():
    """At every edge, it would take the first step of a large model minutes: all modules, and what they hold."""
    start(2, microbatches=4)
    model = wrap(chain().double(), CHAIN)

    @smp.step
    def train(x):
        loss = model(x)
        model.backward(loss)
        return loss

    with mock.patch("smp.pp.step.StateWatch", wraps=StateWatch) as made:
        train(vectors(8)["x"])
    assert made.call_count == 1  # when the first microbatch hands over to the second


@on_ranks(2)
def test_ranks_may_differ_in_flags_and_objects():
    """A step that one rank takes for a known one and another for a new one would be recorded by one of them only,
    and hang. `names` are new in every batch: they must not cost the plan."""
    start(2, microbatches=2)
    model = wrap(chain().double(), CHAIN)

    @smp.step
    def train(batch, verbose=False, logger=None):
        loss = model(batch["x"])
        model.backward(loss)
        return loss

    for step in range(6):
        batch = {**vectors(4), "names": [f"sample {step}", "other"]}
        mine = smp.rank() == 0 and step % 2 == 0
        train(batch, verbose=mine, logger=object() if mine else None)
        assert (plan_of(model) is None) == (step < 2)


@on_ranks(2)
@pytest.mark.parametrize("source", ["python", "numpy"])
def test_random_numbers_of_python_and_numpy_are_drawn_in_the_order_of_microbatches(source):
    """They have one generator for all microbatches: under a plan every rank would draw in an order of its own."""

    def forward(net, x):
        number = random.random() if source == "python" else float(np.random.rand())
        y = net.a(net.b(net.a(x))) * torch.full((WIDTH,), number, dtype=x.dtype)
        return net.b(y).pow(2).mean()

    start(2, microbatches=4)
    net = chain(forward).double()
    plain = copy.deepcopy(net)
    model = wrap(net, CHAIN)

    @smp.step
    def train(x):
        loss = model(x)
        model.backward(loss)
        return loss

    def seed(number):
        random.seed(number)
        np.random.seed(number)

    for step in range(3):
        x = vectors(8, seed=step)["x"]
        seed(step)
        losses = train(x).outputs
        seed(step)
        for k, part in enumerate(x.chunk(4)):
            same(losses[k], plain(part).detach(), f"step {step}, microbatch {k}")
    assert plan_of(model) is None


@on_ranks(2)
def test_stages_know_the_same_after_a_step_that_failed():
    """Stage 1 has left the plan in microbatch 0 when microbatch 1 fails, stage 0 has not got there: if only one of them
    forgets what calls return, the next step hangs. A new model must not meet the old one's messages, also where not
    all stages have seen it fail."""
    fail = []

    def forward(net, x, index):
        y = net.b(net.a(x))
        if fail and int(index[0]) == 1:
            raise ValueError("on purpose")
        return y.pow(2).mean()

    for _ in range(2):
        start(2, microbatches=4)
        net = chain(forward).double()
        plain = copy.deepcopy(net)
        model = wrap(net, CHAIN)
        if smp.pp_rank() == 1:
            model._step_failed()  # as where the loader of one stage raises

        @smp.step
        def train(x, index):
            loss = model(x, index)  # noqa: B023
            model.backward(loss)  # noqa: B023
            return loss * 2 if fail else loss

        for step in range(5):
            x, index = vectors(8, seed=step)["x"], torch.arange(8) // 2
            fail[:] = [True] if step in (2, 4) else []
            if fail:
                with pytest.raises(ValueError, match="on purpose"):
                    train(x, index)
                continue
            losses = train(x, index).outputs
            for k, part in enumerate(x.chunk(4)):
                same(losses[k], plain(part, index).detach(), f"step {step}, microbatch {k}")


@on_ranks(2)
def test_messages_of_a_step_that_failed_are_not_taken_for_later_ones():
    """Under a plan one stage has sent gradients that the other does not wait for any more when both fail."""
    fail = []

    def forward(net, x, index):
        y = net.b(net.a(x))
        if fail and int(index[0]) == 2:
            raise ValueError("on purpose")
        return y.pow(2).mean()

    start(2, microbatches=4)
    net = chain(forward).double()
    plain = copy.deepcopy(net)
    model = wrap(net, CHAIN)

    @smp.step
    def train(x, index):
        loss = model(x, index)
        model.backward(loss)
        return loss

    for step in range(6):
        x, index = vectors(8, seed=step)["x"], torch.arange(8) // 2
        model.zero_grad()
        plain.zero_grad()
        fail[:] = [True] if step in (2, 4) else []
        if fail:
            with pytest.raises(ValueError, match="on purpose"):
                train(x, index)
            continue
        train(x, index)
        for part in x.chunk(4):
            (plain(part, index) / 4).backward()
        for name, parameter in model.local_named_parameters():
            same(parameter.grad, dict(plain.named_parameters())[name].grad, f"step {step}: {name}")


@on_ranks(4)
def test_a_tensor_rank_that_leaves_the_plan_does_not_leave_the_others_behind():
    """Its pipeline plans the next step anew, which is a collective of all tensor ranks."""

    def forward(net, x, again):
        y = net.b(net.a(x))
        return (net.b(net.a(y)) if again[0] else y).pow(2).mean()

    start(2, tensor_parallel_degree=2, microbatches=4)
    model = wrap(chain(forward).double(), CHAIN)

    @smp.step
    def train(x, again):
        loss = model(x, again)
        model.backward(loss)
        return loss

    first, planned = smp.tp_rank() == 0, []
    for step in range(8):
        model.zero_grad()
        rows = 8 if step not in (5, 6) or first else 4  # new to one of them, so new to all
        train(vectors(rows, seed=smp.rank())["x"], torch.full((rows,), step == 2 and not first))
        planned.append(plan_of(model) is not None)
    assert planned == [False, True, first, False, True, False, True, True]
