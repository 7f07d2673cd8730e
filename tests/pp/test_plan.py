"""Steps run by a plan: what is planned is what runs, and what cannot be planned is still right."""

import contextlib
import copy
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import smp
from smp import StepError, runtime
from smp.pp.executor import Turns, Worker
from smp.pp.forecast import forecast, with_seconds
from smp.pp.journal import Edge, EdgeKind, Work
from smp.pp.plan import keeps_order
from smp.pp.schedule import ActionKind, from_text, to_text
from smp.pp.segments import cut
from smp.pp.simulate import Policy, replay, simulate
from smp.pp.weights import Late
from smp.rng import Streams
from tests.harness import on_ranks
from tests.pp.reference import Net, check, linear, same, start, vectors, wrap

CHAIN = {"a": 0, "b": 1}


def chain(forward=lambda net, x: net.b(net.a(x)).pow(2).mean(), **more):
    return Net(forward, a=linear(seed=1), b=linear(seed=2), **more)


def plan_of(model):
    return model.engine.last_plan


# -- cutting a journal -------------------------------------------------------------------------------------------------


def test_a_chain_is_cut_where_stages_wait() -> None:
    """A segment too many is a turn too many; one too few makes a stage wait in the middle of its turn."""
    journal = [
        Work(0, 1.0),
        Edge(EdgeKind.MOVE, 0, 1, 8),
        Work(1, 2.0),
        Edge(EdgeKind.BACKWARD),
        Work(1, 4.0, 2.0),
        Edge(EdgeKind.GRADIENT, 1, 0, 8),
        Work(0, 2.0, 1.0),
    ]
    result = cut(journal, 2)
    drawn = [(s.stage, s.kind.value, s.duration, s.waits, s.sends, s.weight) for s in result.cost.segments]
    assert drawn == [
        (0, "F", 1.0, (), ((0, 1.0),), 0.0),
        (1, "F", 2.0, (0,), (), 0.0),
        (1, "B", 4.0, (), ((1, 4.0),), 2.0),
        (0, "B", 2.0, (1,), (), 1.0),
    ]
    assert result.stops == ((1,), (1,))


def test_a_stage_that_only_follows_has_one_turn() -> None:
    """A stage without work still has to run the program to its end, once."""
    journal = [Work(0, 1.0), Edge(EdgeKind.MOVE, 0, 1), Work(1, 1.0), Edge(EdgeKind.BACKWARD), Work(1, 1.0)]
    result = cut(journal, 3)
    assert [s.stage for s in result.cost.segments].count(2) == 1
    assert result.stops[2] == () and result.stops[0] == ()


def test_what_everybody_waits_for_reaches_everybody() -> None:
    """A number read from a placed value is a message to each stage: without it a plan could deadlock."""
    journal = [Work(1, 1.0), Edge(EdgeKind.STRUCTURE, 1), Work(0, 1.0), Work(2, 1.0)]
    result = cut(journal, 3)
    waits = {s.stage: s.waits for s in result.cost.segments}
    assert waits[0] == (0,) and waits[2] == (1,) and waits[1] == ()
    assert [(m.source, m.dest) for m in result.cost.messages] == [(1, 0), (1, 2)]


def program(*journal):
    return cut(list(journal), 2)


FORTH, BACK = Edge(EdgeKind.MOVE, 0, 1), Edge(EdgeKind.GRADIENT, 1, 0)


def test_a_plan_for_messages_without_tags_keeps_their_order() -> None:
    """NCCL matches messages by order alone: one received before its turn is another one's data."""
    simple = program(Work(0, 1.0), FORTH, Work(1, 1.0), Edge(EdgeKind.BACKWARD), Work(1, 2.0), BACK, Work(0, 2.0))
    plan = simulate([simple.cost] * 4, 2, 4, Policy.INTERLEAVED)
    assert keeps_order(plan, [simple] * 4)
    twice = program(Work(0, 1.0), FORTH, Work(1, 1.0), Edge(EdgeKind.MOVE, 1, 0), Work(0, 1.0), FORTH, Work(1, 1.0))
    rows = (from_text("F0 F0.1 F1 F1.1"), from_text("F0 F1 F0.1 F1.1"))
    plan = replay(rows, [twice.cost] * 2, 2)
    assert not keeps_order(plan, [twice] * 2)


def test_a_forecast_replays_the_plan_with_measured_times() -> None:
    """A forecast that keeps nominal times says nothing about the step."""
    cost = program(
        Work(0, 1.0), FORTH, Work(1, 1.0), Edge(EdgeKind.BACKWARD), Work(1, 2.0, 1.0), BACK, Work(0, 2.0, 1.0)
    ).cost
    seconds = [
        {(ActionKind.FORWARD, 0, 0): 3.0, (ActionKind.BACKWARD, 0, 0): 4.0, (ActionKind.WEIGHT, 0, 0): 2.0},
        {(ActionKind.FORWARD, 0, 0): 5.0, (ActionKind.BACKWARD, 0, 0): 6.0},
    ]
    measured = with_seconds(cost, 0, seconds)
    drawn = [(s.stage, s.duration, s.weight, [offset for _, offset in s.sends]) for s in measured.segments]
    assert drawn == [(0, 3.0, 0.0, [3.0]), (1, 5.0, 0.0, []), (1, 6.0, 0.0, [6.0]), (0, 6.0, 2.0, [])]
    rows = (from_text("F0 B0 W0"), from_text("F0 B0"))
    assert replay(rows, [measured], 2).step_time == 3 + 5 + 6 + 6


@on_ranks(2)
def test_a_planned_step_can_be_forecast():
    """Every action of the plan is measured on its stage, and the forecast is of the step that ran."""
    model = check(chain(), CHAIN, count=4, steps=3)
    rt = runtime.get()
    ran = [m.action for m in model.engine.last_measured]
    assert ran == list(plan_of(model).actions[smp.pp_rank()])
    expected = forecast(rt, model.engine)
    assert expected is not None and expected.actions == plan_of(model).actions
    work = sum(m.seconds for m in model.engine.last_measured)
    assert expected.step_time >= work * 0.999


# -- running -----------------------------------------------------------------------------------------------------------


def recorded(monkeypatch):
    """The actions that this rank ran, step by step."""
    ran = []
    run = Turns.run

    def recording(self):
        outputs = run(self)
        ran.append(to_text(m.action for m in self.measured))
        return outputs

    monkeypatch.setattr(Turns, "run", recording)
    return ran


DRAWN = {
    "interleaved": ("F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"),
    "simple": ("F0 F1 F2 F3 B0 B1 B2 B3",) * 2,
}


@on_ranks(2)
@pytest.mark.parametrize("pipeline", list(DRAWN))
def test_what_is_planned_is_what_runs(pipeline):
    """A failure means that the plan is for show, or that arrival decides the order."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        ran = recorded(monkeypatch)
        model = check(chain(), CHAIN, count=4, steps=3, pipeline=pipeline)
    assert ran[0] == "F0 F1 F2 F3 B0 B1 B2 B3"  # until there is a plan
    assert ran[1] == ran[2] == DRAWN[pipeline][smp.pp_rank()] == to_text(plan_of(model).actions[smp.pp_rank()])


@on_ranks(2)
@pytest.mark.parametrize("active", [1, 2, 3])
def test_no_more_microbatches_are_in_flight_than_allowed(active):
    """A failure means that memory grows beyond what the user has set."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        ran = recorded(monkeypatch)
        check(chain(), CHAIN, count=6, steps=3, pipeline="simple", active_microbatches=active)
    for text in ran:
        in_flight = most = 0
        for word in text.split():
            in_flight += 1 if word[0] == "F" else -1
            most = max(most, in_flight)
        assert most == active, text


@on_ranks(2)
def test_a_model_that_goes_back_and_forth_is_planned():
    """More than one visit to a stage is more than one segment there."""
    model = check(
        Net(lambda net, x: (net.a(net.b(net.a(x))) + net.b(x)).pow(2).mean(), a=linear(seed=1), b=linear(seed=2)),
        CHAIN,
        count=4,
        steps=3,
    )
    kinds = [action.kind for action in plan_of(model).actions[0] if action.microbatch == 0]
    assert kinds.count(ActionKind.FORWARD) > 1


@on_ranks(2)
def test_a_buffer_written_between_modules_keeps_the_phase_order():
    """The same for buffers, whose owner changes with the write."""

    def forward(net, x):
        y = net.a(x)
        net.total += y.detach().sum(0)
        return (net.b(y) + net.total).pow(2).mean()

    model = check(chain(forward, total=torch.zeros(4)), CHAIN, count=3, steps=3)
    assert plan_of(model) is None


@on_ranks(3)
@pytest.mark.parametrize("period", [2, 7])
def test_a_program_that_changes_leaves_the_plan(period):
    """A branch that a plan does not know must end the step neither in a hang nor in a wrong gradient."""
    calls = [0]

    def forward(net, x, call):
        y = net.c(net.b(net.a(x)))
        if call % period == 0:
            y = net.a(net.c(y)) + net.b(y)
        return y.pow(2).mean()

    start(3, microbatches=4)
    plain = Net(forward, a=linear(seed=1), b=linear(seed=2), c=linear(seed=3)).double()
    module = copy.deepcopy(plain)
    model = wrap(module, {"a": 0, "b": 1, "c": 2})

    @smp.step
    def train(x):
        calls[0] += 1
        loss = model(x, calls[0])
        model.backward(loss)
        return loss

    for step in range(6):
        x = vectors(8, seed=step)["x"]
        calls[0] = 10 * step
        train(x)
        for k in range(4):
            (plain(x.chunk(4)[k], 10 * step + k + 1) / 4).backward()
        for name, parameter in model.local_named_parameters():
            same(parameter.grad, dict(plain.named_parameters())[name].grad, f"step {step}: {name}")


@on_ranks(2)
def test_a_branch_on_a_value_leaves_the_plan_and_stays_right():
    """Which microbatch takes which branch changes with the data, from step to step."""

    def forward(net, x):
        y = net.a(x)
        if y.sum() > 0:
            y = net.b(y)
        return net.b(net.a(y)).pow(2).mean()

    check(chain(forward), CHAIN, count=4, steps=6)


@on_ranks(2)
def test_other_shapes_are_planned_anew():
    """A plan for one batch must not be held against another one."""
    start(2, microbatches=2)
    module = chain().double()
    plain = copy.deepcopy(module)
    model = wrap(module, CHAIN)

    @smp.step
    def train(x):
        loss = model(x)
        model.backward(loss)
        return loss

    for step, number in enumerate([4, 4, 6, 6, 4, 6]):
        x = vectors(number, seed=step)["x"]
        train(x)
        for part in x.chunk(2):
            (plain(part) / 2).backward()
        assert (plan_of(model) is None) == (step in (0, 2))
    for name, parameter in model.local_named_parameters():
        same(parameter.grad, dict(plain.named_parameters())[name].grad, name)


@on_ranks(2)
def test_random_numbers_between_modules_do_not_depend_on_the_order():
    """Turns pass in the middle of a stream: what glue code draws must not shift."""

    def forward(net, x):
        y = net.b(F.dropout(net.a(x), 0.5))
        y = net.a(y + torch.rand(4, dtype=y.dtype))
        return net.b(F.dropout(y, 0.5)).pow(2).mean()

    losses = []
    for pipeline in ("interleaved", "simple"):
        start(2, microbatches=4, pipeline=pipeline)
        model = wrap(chain(forward).double(), CHAIN)

        @smp.step
        def train(x, model=model):
            loss = model(x)
            model.backward(loss)
            return loss

        torch.manual_seed(3)
        losses.append([train(vectors(8)["x"]).stack() for _ in range(3)])
        assert plan_of(model) is not None
    for a, b in zip(*losses, strict=True):
        assert torch.equal(a, b)


@on_ranks(2)
def test_a_tensor_of_another_microbatch_is_refused_when_the_plan_would_mix_them():
    """Silently its gradient would be lost, or depend on the schedule."""
    kept = {}

    def forward(net, x):
        y = net.b(net.a(x))
        if kept.get("on"):
            kept.setdefault("y", y)
            y = y + kept["y"]
        return net.a(y).pow(2).mean()

    start(2, microbatches=3)
    model = wrap(chain(forward).double(), CHAIN)

    @smp.step
    def train(x):
        loss = model(x)
        model.backward(loss)
        return loss

    train(vectors(6)["x"])
    kept["on"] = True
    with pytest.raises(StepError, match="another microbatch has computed"):
        train(vectors(6)["x"])


@on_ranks(2)
def test_an_error_in_a_planned_step_reaches_the_caller():
    """A failure means a hang in a thread that waits for its turn."""
    fail = []

    def forward(net, x):
        y = net.b(net.a(x))
        if fail:
            raise ValueError("on purpose")
        return y.pow(2).mean()

    start(2, microbatches=4)
    model = wrap(chain(forward).double(), CHAIN)

    @smp.step
    def train(x):
        loss = model(x)
        model.backward(loss)
        return loss

    for _ in range(2):
        train(vectors(8)["x"])
    fail.append(True)
    with pytest.raises(ValueError, match="on purpose"):
        train(vectors(8)["x"])


class Scripted:
    """Stands for a microbatch's program."""

    def __init__(self, index, step):
        self.index, self.step, self.mode = index, step, contextlib.nullcontext()

    def start(self):
        pass

    end = leave_plan = start


def test_an_interrupted_step_leaves_no_thread_behind():
    """Ctrl-C raises in the main thread while a microbatch runs: a failure means that the process cannot end."""
    step = SimpleNamespace(streams=Streams(), waited=0.0, recorder=None)
    programs = [Scripted(k, step) for k in range(3)]
    ended = []

    def body(k):
        try:
            turns.pause(programs[k])
            signal.raise_signal(signal.SIGALRM)
            time.sleep(0.2)
            turns.pause(programs[k])
        finally:
            ended.append(k)

    def on_alarm(number, frame):
        raise KeyboardInterrupt

    turns = Turns(programs, body, from_text("F0 F1 F2 F0.1 F1.1 F2.1 F0.2 F1.2 F2.2"), lambda position: None)
    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        with pytest.raises(KeyboardInterrupt):
            turns.run()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert sorted(ended) == [0, 1, 2]
    idle = len(Worker._idle)
    turns = Turns(programs, lambda k: None, from_text("F0 F1 F2"), lambda position: None)
    turns.run()
    assert len(Worker._idle) == idle >= 3  # all are free again


# -- weight gradients put off ------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Large enough for its weight gradients to be worth putting off, in every form that linear layers come in."""

    def __init__(self, seed, bias=True):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up = nn.Linear(4, 64, bias=bias)
        self.middle = nn.Linear(64, 64)
        self.down = nn.Linear(64, 4, bias=bias)
        self.scale = nn.Parameter(torch.ones(64))
        self.mixed = nn.Parameter(torch.empty(64, 64))  # as transformers' Conv1D keeps it
        self.shift = nn.Parameter(torch.zeros(64))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x):
        h = torch.tanh(self.up(x)) * self.scale
        h = torch.addmm(self.shift, h, self.mixed)
        return x + self.down(torch.relu(self.middle(h)))


def put_off(model):
    """How many actions of this rank's plan are weight gradients."""
    return sum(a.kind is ActionKind.WEIGHT for a in plan_of(model).actions[smp.pp_rank()])


@contextlib.contextmanager
def counting_late():
    """How many layers had the gradients of their weights computed after the others, in a list of one."""
    count = [0]
    plain = Late.accumulate

    def accumulate(late):
        count[0] += 1
        plain(late)

    Late.accumulate = accumulate
    try:
        yield count
    finally:
        Late.accumulate = plain


@on_ranks(3)
@pytest.mark.parametrize("shape", ["plain", "frozen", "twice", "penalty", "checkpoint", "several backwards"])
def test_weight_gradients_may_come_later(shape):
    """A failure means a lost, doubled or wrong gradient under the zero-bubble schedule."""

    def forward(net, x):
        y = net.c(net.b(net.a(x)))
        if shape == "twice":
            y = net.c(net.a(y))
        return y.pow(2).mean()

    class Penalised(Wide):
        def forward(self, x):
            y = super().forward(x)
            if torch.is_grad_enabled():
                (slope,) = torch.autograd.grad(torch.tanh(y).mean(), self.middle.weight, create_graph=True)
                y = y + slope.pow(2).mean()
            return y

    b = Penalised(2) if shape == "penalty" else Wide(2, bias=False)
    net = Net(forward, a=Wide(1), b=b, c=Wide(3))
    if shape == "frozen":
        net.b.middle.requires_grad_(False)
        net.a.up.bias.requires_grad_(False)
    if shape == "checkpoint":
        smp.set_activation_checkpointing(net.b)

    def loss_of(model, x):
        loss = model(x)
        if shape == "several backwards":
            more = model(x + 1)
            model.backward(more) if isinstance(model, smp.DistributedModel) else (more / 6).backward()
        return loss

    with counting_late() as late:
        model = check(net, {"a": 0, "b": 1, "c": 2}, loss_of=loss_of, pp=3, count=6, steps=4, pipeline="zero_bubble")
    assert put_off(model) or smp.pp_rank() == 0  # nothing waits for what stage 0 computes
    assert late[0] or not put_off(model), "planned, and not done"


@on_ranks(2)
def test_hooks_of_weights_see_their_gradients_under_every_schedule():
    """A failure means that a hook runs without a gradient, on a part of one, or twice."""

    def hooked(net):
        def double(parameter):
            parameter.grad.mul_(2)

        for module in (net.a, net.b):
            module.up.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            module.down.weight.register_post_accumulate_grad_hook(double)

    start(2, microbatches=4, pipeline="zero_bubble")
    net = Net(lambda net, x: net.b(net.a(x)).pow(2).mean(), a=Wide(1), b=Wide(2)).double()
    plain = copy.deepcopy(net)
    hooked(plain)
    model = wrap(net, CHAIN)
    hooked(net)

    @smp.step
    def train(x):
        loss = model(x)
        model.backward(loss)
        return loss

    for step in range(3):
        x = vectors(8, seed=step)["x"]
        train(x)
        for part in x.chunk(4):
            (plain(part) / 4).backward()
        for name, parameter in model.local_named_parameters():
            same(parameter.grad, dict(plain.named_parameters())[name].grad, f"step {step}: {name}")


@on_ranks(4)
def test_parts_of_layers_may_put_their_gradients_off():
    """The reducer scales what arrives at a part of a weight by a hook: a failure means that it met no gradient."""
    start(2, microbatches=4, pipeline="zero_bubble", tensor_parallel_degree=2)
    net = Net(lambda net, x: net.b(net.a(x)).pow(2).mean(), a=Wide(1), b=Wide(2)).double()
    plain = copy.deepcopy(net)
    for module in (net.a.middle, net.b.middle):
        smp.set_tensor_parallelism(module)
    model = wrap(net, CHAIN)

    @smp.step
    def train(x):
        loss = model(x)
        model.backward(loss)
        return loss

    x = vectors(16)["x"]
    for _ in range(3):
        model.zero_grad()
        plain.zero_grad()
        train(x.chunk(2)[smp.tp_rank()])
        plain(x).backward()
        for name, parameter in model.local_named_parameters():
            want = dict(plain.named_parameters())[name].grad
            if parameter.shape == want.shape:
                same(parameter.grad, want, name)
    assert put_off(model) or smp.pp_rank() == 0


@on_ranks(4)
def test_replicas_reduce_gradients_that_come_later():
    """A bucket must not be reduced before the last of its gradients is there."""
    x = vectors(16)["x"]
    start(2, microbatches=4, pipeline="zero_bubble")
    net = Net(lambda net, x: net.b(net.a(x)).pow(2).mean(), a=Wide(1), b=Wide(2)).double()
    plain = copy.deepcopy(net)
    model = wrap(net, CHAIN)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)

    @smp.step
    def train(x):
        loss = model(x)
        model.backward(loss)
        return loss

    for _ in range(4):
        optimizer.zero_grad()
        theirs.zero_grad()
        with counting_late() as late:
            train(x.chunk(2)[smp.rdp_rank()])
        plain(x).backward()
        optimizer.step()
        theirs.step()
        for name, parameter in model.local_named_parameters():
            same(parameter.grad, dict(plain.named_parameters())[name].grad, name)
    assert put_off(model) or smp.pp_rank() == 0
    assert late[0]


@on_ranks(2)
@pytest.mark.parametrize("pipeline", ["auto", "zero_bubble", "interleaved"])
@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_chunks_and_schedules_compute_the_same(pipeline, virtual_stages):
    """Several visits to a stage, by every schedule, through the automatic partition."""
    layers = {f"l{k}": Wide(k) for k in range(8)}

    def forward(net, x):
        for k in range(8):
            x = getattr(net, f"l{k}")(x)
        return x.pow(2).mean()

    check(Net(forward, **layers), {}, count=4, steps=3, pipeline=pipeline, virtual_stages=virtual_stages)
