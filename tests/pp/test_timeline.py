"""`smp.timeline`: hand-made records become the right events and pictures; real steps are recorded whole."""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

import smp
from smp.errors import UsageError
from smp.pp.record import Recorder, Span, SpanKind, StepRecord
from smp.pp.schedule import from_text
from smp.pp.simulate import Plan, Policy
from smp.pp.timeline import _tracks
from smp.pp.trace_events import MOVES, PLANNED, WAITING, WORK, Track, arrows, label, trace_events
from tests.harness import on_ranks
from tests.pp.reference import Net, linear, start, vectors, wrap

F, B, WAIT, MOVE = SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.WAIT, SpanKind.MOVE
PLAN = Plan(
    Policy.INTERLEAVED,
    (tuple(from_text("F0 B0")), tuple(from_text("F0 B0"))),
    (((0.0, 1.0), (3.0, 4.0)), ((1.0, 2.0), (2.0, 3.0))),
    4.0,
    0.5,
    (0.5, 0.5),
    (1, 1),
)


def two_tracks():
    """Two stages, one microbatch, a second per action: stage 0 sends x and gets its gradient back."""
    first = [
        Span(MOVE, 0, 0, 10.9, 10.95, "x", 1, 400),
        Span(F, 0, 0, 10.0, 11.0),
        Span(WAIT, 0, 0, 11.0, 13.0, "a gradient", 1),
        Span(B, 0, 0, 11.0, 14.0),
    ]
    second = [
        Span(WAIT, 0, 0, 10.0, 11.0, "x", 0),
        Span(F, 0, 0, 10.0, 12.0),
        Span(MOVE, 0, 0, 12.9, 13.0, "a gradient", 0, 400),
        Span(B, 0, 0, 12.0, 13.0),
    ]
    return [Track(0, 0, 0, (StepRecord(tuple(first), PLAN),)), Track(1, 0, 1, (StepRecord(tuple(second), PLAN),))]


# -- hand-made records -------------------------------------------------------------------------------------------------


def test_a_move_meets_the_wait_of_its_message():
    """Arrows would join the wrong ends: the picture would show messages that never were."""
    found = [(a.source, a.sent.name, a.dest, a.awaited.begin) for a in arrows(two_tracks())]
    assert sorted(found) == [(0, "x", 1, 10.0), (1, "a gradient", 0, 11.0)]


def test_messages_of_one_name_are_joined_in_order_and_never_over_microbatches_steps_or_parts():
    """Gradients all have one name."""

    def move(k, at):
        return Span(MOVE, k, 0, at, at, "g", 1)

    def wait(k, at):
        return Span(WAIT, k, 0, at, at, "g", 0)

    sending = (StepRecord((move(1, 1.0), move(0, 2.0), move(0, 3.0))), StepRecord((move(5, 9.0),)))
    waiting = (StepRecord((wait(0, 4.0), wait(1, 5.0), wait(0, 6.0), wait(5, 7.0))), StepRecord(()))
    tracks = [Track(0, part, part, sending) for part in (0, 1)] + [Track(1, part, 2 + part, waiting) for part in (0, 1)]
    found = sorted((a.source, a.sent.begin, a.dest, a.awaited.begin) for a in arrows(tracks))
    assert found == sorted(
        (part, sent, 2 + part, awaited) for part in (0, 1) for sent, awaited in [(2.0, 4.0), (1.0, 5.0), (3.0, 6.0)]
    )


def test_a_wait_that_no_move_answers_has_no_arrow():
    """The end of a send is waited for too; an arrow from a rank to itself means nothing."""
    spans = (Span(WAIT, 0, 0, 1.0, 2.0, "the end of a send", 0), Span(WAIT, 0, 0, 1.0, 2.0, "x", 7))
    assert arrows([Track(0, 0, 0, (StepRecord(spans),))]) == []


def test_events_for_the_trace_viewer():
    """The viewer shows nothing, or the wrong durations: it wants microseconds, named processes and joined flows."""
    events = json.loads(json.dumps(trace_events(two_tracks())))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "stage 0 (rank 0)", 1: "stage 1 (rank 1)"}
    slices = {(e["pid"], e["tid"], e["name"]): (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert slices[1, WORK, "F0"] == pytest.approx((10.0e6, 2.0e6))
    assert slices[1, WAITING, "x"] == pytest.approx((10.0e6, 1.0e6))
    assert slices[0, MOVES, "x"] == pytest.approx((10.9e6, 0.05e6))
    assert slices[1, PLANNED, "B0"] == pytest.approx((12.0e6, 1.0e6))
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    for identity, event in starts.items():  # an arrow is drawn only from inside a slice to inside a slice
        for end, track in ((event, MOVES), (ends[identity], WAITING)):
            assert end["tid"] == track
            assert any(
                pid == end["pid"] and tid == track and ts <= end["ts"] <= ts + duration
                for (pid, tid, _), (ts, duration) in slices.items()
            )


def test_labels_are_those_of_actions():
    """A picture must use the words of the plan that is printed."""
    assert label(Span(F, 3, 0, 0.0, 1.0)) == "F3"
    assert label(Span(SpanKind.WEIGHT, 2, 1, 0.0, 1.0)) == "W2.1"


def test_hosts_are_put_on_one_clock():
    """Clocks of hosts differ by days; ranks of one host share theirs, whenever each of them entered."""
    step = [StepRecord((Span(F, 0, 0, 105.0, 106.0),))]
    far = [StepRecord((Span(F, 0, 0, 9005.0, 9006.0),))]
    tracks = _tracks([("a", 100.0, 1, 0, 0, step), ("a", 100.2, 0, 0, 1, step), ("b", 9000.0, 0, 1, 2, far)])
    assert [(track.stage, track.part, track.steps[0].spans[0].begin) for track in tracks] == [
        *[(0, 0, 5.0), (0, 1, 5.0), (1, 0, 5.0)]
    ]


def test_a_picture_is_drawn_with_and_without_a_plan(tmp_path: Path):
    """A first step has no plan, and a stage may have nothing to do."""
    pytest.importorskip("matplotlib")
    from smp.pp.chart import draw

    without = [Track(t.stage, 0, t.rank, (StepRecord(t.steps[0].spans),)) for t in two_tracks()]
    for number, tracks in enumerate([two_tracks(), without, [*without, Track(2, 0, 2, (StepRecord(()),))]]):
        draw(tracks, str(tmp_path / f"{number}.png"))
        assert (tmp_path / f"{number}.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_step_leaves_no_spans():
    """Half a step would be drawn as a part of the next one."""
    recorder = Recorder()
    recorder.add(F, 0, 0, 0.0, 1.0)
    recorder.drop_step()
    recorder.add(F, 1, 0, 2.0, 3.0)
    recorder.end_step()
    assert [[span.microbatch for span in step.spans] for step in recorder.steps] == [[1]]


# -- real steps --------------------------------------------------------------------------------------------------------


def training():
    """A step function of its own: plans are remembered per function."""

    @smp.step
    def train(model, x):
        loss = model(x)
        model.backward(loss)
        return loss

    return train


def batch(rows):
    return vectors(rows)["x"].float()


def chain(stages):
    parts = {f"part{i}": linear(seed=i) for i in range(stages)}

    def forward(net, x):
        for name in parts:
            x = getattr(net, name)(x)
        return x.square().mean()

    return wrap(Net(forward, **parts), {name: i for i, name in enumerate(parts)})


@on_ranks(2)
@pytest.mark.parametrize("pipeline", ["interleaved", "simple", "zero_bubble"])
def test_every_planned_action_is_recorded_in_order_and_without_overlap(pipeline: str):
    """The timeline would show another order than the one that ran, or work that two threads did at once."""
    start(microbatches=4, pipeline=pipeline)
    train, model, x = training(), chain(2), batch(8)
    train(model, x)  # recorded for the plan
    with smp.timeline() as timeline:
        train(model, x)
        train(model, x)
    assert len(timeline.steps) == 2
    for step in timeline.steps:
        assert step.plan is not None
        planned = [str(action) for action in step.plan.actions[smp.pp_rank()]]
        assert [label(span) for span in step.actions] == planned
        for before, after in zip(step.actions, step.actions[1:]):
            assert before.begin <= before.end <= after.begin <= after.end
        inner = [span for span in step.spans if span.kind in (WAIT, MOVE) and span.peer != smp.pp_rank()]
        assert inner
        for span in inner:  # waits and moves belong to an action
            assert any(a.begin <= span.begin and span.end <= a.end for a in step.actions)
            assert span.peer == 1 - smp.pp_rank()
    train(model, x)
    assert len(timeline.steps) == 2  # it has ended


@on_ranks(2)
def test_a_timeline_is_saved_by_one_rank_with_all_ranks_in_it():
    """The file would lack stages, or be written by two ranks at once."""
    start(microbatches=2)
    train, model, x = training(), chain(2), batch(4)
    folder = smp.allgather(tempfile.mkdtemp(prefix="smp-timeline-") if smp.rank() == 0 else None)[0]
    train(model, x)
    with smp.timeline() as timeline:
        train(model, x)
    timeline.save(Path(folder) / "step.json")
    smp.barrier()
    events = json.loads((Path(folder) / "step.json").read_text())["traceEvents"]
    work = {(e["pid"], e["name"]) for e in events if e["ph"] == "X" and e["tid"] == WORK}
    assert work == {(stage, name) for stage in (0, 1) for name in ("F0", "B0", "F1", "B1")}
    flows = [e for e in events if e["ph"] == "s"]
    assert sorted(e["pid"] for e in flows) == [0, 0, 1, 1]  # an activation there and a gradient back, per microbatch
    assert all(e["ts"] >= 0 for e in events if "ts" in e)
    with pytest.raises(UsageError, match="the timeline was not saved.*No such file"):
        timeline.save(Path(folder) / "missing" / "step.json")
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "matplotlib"}
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    try:
        with pytest.raises(UsageError, match=r"pip install 'smp-runtime\[bench\]'"):
            timeline.save(Path(folder) / "step.png")
    finally:
        del sys.modules["matplotlib"]
        sys.modules.update(hidden)


@on_ranks(2)
def test_saving_on_one_rank_only_names_the_others():
    """`if smp.rank() == 0: timeline.save(...)` must not wait for ever."""
    start(microbatches=2)
    train, model, x = training(), chain(2), batch(4)
    with smp.timeline() as timeline:
        train(model, x)
    if smp.rank() == 0:
        os.environ["SMP_GUARD_TIMEOUT"] = "0.5"
        try:
            with pytest.raises(smp.SmpError, match=r"smp\.timeline\.save.*1"):
                timeline.save("never.json")
        finally:
            del os.environ["SMP_GUARD_TIMEOUT"]
    smp.barrier()


@on_ranks(1, config={"microbatches": 3})
def test_without_stages_forwards_and_backwards_are_recorded():
    """A user who tries a script on one process would see an empty timeline."""
    train, model, x = training(), smp.DistributedModel(Net(lambda net, x: net.a(x).sum(), a=linear(seed=1))), batch(6)
    with smp.timeline() as timeline:
        train(model, x)
    (step,) = timeline.steps
    kinds = [(span.kind, span.microbatch) for span in step.actions if span.segment == 0]
    assert kinds == [(kind, k) for k in range(3) for kind in (F, B)]
    assert all(a.end <= b.begin for a, b in zip(step.actions, step.actions[1:]))


@on_ranks(1, config={"microbatches": 2})
def test_wrong_uses_are_refused():
    """Each would otherwise end in an empty file or an error of Python's."""
    with pytest.raises(UsageError, match="make the smp.DistributedModel first"), smp.timeline():
        pass
    train, model, x = training(), smp.DistributedModel(Net(lambda net, x: net.a(x).sum(), a=linear(seed=1))), batch(4)
    with smp.timeline() as timeline:
        with pytest.raises(UsageError, match="active already"), smp.timeline():
            pass
        with pytest.raises(UsageError, match="recorded no step"):
            timeline.save("step.json")

        @smp.step
        def failing(model, x):
            model(x)
            raise ValueError("on purpose")

        with pytest.raises(ValueError, match="on purpose"):
            failing(model, x)
        train(model, x)
        assert len(timeline.steps) == 1 and len(timeline.steps[0].spans) == 6
    with pytest.raises(UsageError, match=r"\.json or \.png, not as 'step\.svg'"):
        timeline.save("step.svg")


@on_ranks(2, config={"tensor_parallel_degree": 2, "ddp": True, "microbatches": 2})
def test_tensor_parallel_ranks_have_rows_of_their_own():
    """Two ranks of one stage would be drawn over each other, or only one of them be seen."""
    train, model, x = training(), smp.DistributedModel(Net(lambda net, x: net.a(x).sum(), a=linear())), batch(4)
    with smp.timeline() as timeline:
        train(model, x)
    folder = smp.allgather(tempfile.mkdtemp(prefix="smp-timeline-"))[0]
    timeline.save(Path(folder) / "step.json")
    events = json.loads((Path(folder) / "step.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        *["stage 0 (rank 0)", "stage 0, part 1 (rank 1)"]
    ]


@on_ranks(2, config={"ddp": True, "microbatches": 2})
@pytest.mark.parametrize("guarded", [True, False])
def test_the_first_replica_saves_for_all(guarded: bool):
    """Replicas would write the same file at once, or the guard that scripts use would hang."""
    train, model, x = training(), smp.DistributedModel(Net(lambda net, x: net.a(x).sum(), a=linear())), batch(4)
    with smp.timeline() as timeline:
        train(model, x)
    path = Path(tempfile.mkdtemp(prefix="smp-timeline-")) / "step.json"
    if smp.rdp_rank() == 0 or not guarded:
        timeline.save(path)
    assert path.exists() == (smp.rank() == 0)
