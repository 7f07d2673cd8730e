"""Recorded steps as events of Chrome's trace viewer (chrome://tracing, ui.perfetto.dev). Pure.

One process per rank with four tracks, one below the other; an arrow leads from each move to the wait that met it:

    stage 0   work       F0  F1  B0  F2 ...
              waiting             ..
              moves         >   >
              planned    F0  F1  B0  F2 ...

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from smp.pp.record import Span, SpanKind, StepRecord
from smp.pp.schedule import Action, ActionKind

WORK, WAITING, MOVES, PLANNED = range(4)  # the tracks
_TRACK_NAMES = {WORK: "work", WAITING: "waiting", MOVES: "moves", PLANNED: "planned"}
# Names of colours that the viewer knows.
_COLOURS = {
    SpanKind.FORWARD: "thread_state_running",
    SpanKind.BACKWARD: "thread_state_iowait",
    SpanKind.WEIGHT: "thread_state_runnable",
    SpanKind.WAIT: "grey",
    SpanKind.MOVE: "yellow",
}
LETTERS = {
    SpanKind.FORWARD: ActionKind.FORWARD,
    SpanKind.BACKWARD: ActionKind.BACKWARD,
    SpanKind.WEIGHT: ActionKind.WEIGHT,
}
KINDS = {letter: kind for kind, letter in LETTERS.items()}


@dataclass(frozen=True)
class Track:
    """What one rank recorded. Times of spans are seconds since the timeline began, on one clock for all ranks."""

    stage: int
    part: int  # tensor-parallel part
    rank: int  # in the world
    steps: tuple[StepRecord, ...]

    @property
    def name(self) -> str:
        """`stage 1 (rank 3)`."""
        return f"stage {self.stage}" + (f", part {self.part}" if self.part else "") + f" (rank {self.rank})"


class Arrow(NamedTuple):
    """A message: posted as `sent` on track number `source`, awaited as `awaited` on track number `dest`."""

    source: int
    sent: Span
    dest: int
    awaited: Span


def label(span: Span) -> str:
    """`F3`, `B0.1`, or what was moved or waited for."""
    if span.kind in LETTERS:
        return str(Action(LETTERS[span.kind], span.microbatch, span.segment))
    return span.name or span.kind.value


def arrows(tracks: Sequence[Track]) -> list[Arrow]:
    """Joins each move with its wait: the k-th of the same ranks, step, microbatch and name with the k-th."""
    where = {(track.stage, track.part): number for number, track in enumerate(tracks)}
    found: list[Arrow] = []
    for step in range(max((len(track.steps) for track in tracks), default=0)):
        sent: dict[Any, list[Span]] = {}
        for number, track in enumerate(tracks):
            for span in _of_kind(track, step, SpanKind.MOVE):
                dest = where.get((span.peer, track.part))
                sent.setdefault((number, dest, span.microbatch, span.name), []).append(span)
        for number, track in enumerate(tracks):
            for span in _of_kind(track, step, SpanKind.WAIT):
                source = where.get((span.peer, track.part))
                queue = sent.get((source, number, span.microbatch, span.name))
                if queue and source is not None and source != number:
                    found.append(Arrow(source, queue.pop(0), number, span))
    return found


def _of_kind(track: Track, step: int, kind: SpanKind) -> Iterator[Span]:
    if step < len(track.steps):
        yield from (span for span in track.steps[step].spans if span.kind is kind)


def begin_of(tracks: Sequence[Track], step: int) -> float:
    """When the first rank began with that step, in seconds."""
    return min(
        (span.begin for track in tracks if step < len(track.steps) for span in track.steps[step].spans), default=0.0
    )


def planned_spans(track: Track, step: int, begin: float) -> list[Span]:
    """The actions that a rank was to run in that step, as if the plan had started at `begin`; none without a plan."""
    plan = track.steps[step].plan
    if plan is None:
        return []
    return [
        Span(KINDS[action.kind], action.microbatch, action.segment, begin + start, begin + end)
        for action, (start, end) in zip(plan.actions[track.stage], plan.times[track.stage], strict=True)
    ]


def trace_events(tracks: Sequence[Track]) -> dict[str, Any]:
    """The content of a file for the trace viewer."""
    events: list[dict[str, Any]] = []
    for number, track in enumerate(tracks):
        events.append(_named("process_name", number, 0, track.name))
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
        )
        events += [_named("thread_name", number, tid, name) for tid, name in _TRACK_NAMES.items()]
        for step, record in enumerate(track.steps):
            events += [_slice(number, _track_of(span.kind), span, step) for span in record.spans]
            planned = planned_spans(track, step, begin_of(tracks, step))
            events += [_slice(number, PLANNED, span, step) for span in planned]
    for identity, arrow in enumerate(arrows(tracks)):
        flow = {"cat": "move", "name": arrow.sent.name or "move", "id": identity}
        events.append({**flow, "ph": "s", "pid": arrow.source, "tid": MOVES, "ts": _middle(arrow.sent)})
        events.append({**flow, "ph": "f", "bp": "e", "pid": arrow.dest, "tid": WAITING, "ts": _middle(arrow.awaited)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _track_of(kind: SpanKind) -> int:
    return {SpanKind.WAIT: WAITING, SpanKind.MOVE: MOVES}.get(kind, WORK)


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(pid: int, tid: int, span: Span, step: int) -> dict[str, Any]:
    details: dict[str, Any] = {"step": step, "microbatch": span.microbatch}
    if span.peer >= 0:
        details |= {"peer stage": span.peer}
    if span.nbytes:
        details |= {"bytes": span.nbytes}
    return {
        "ph": "X",
        "cat": "planned" if tid == PLANNED else span.kind.value,
        "name": label(span),
        "cname": _COLOURS[span.kind],
        "pid": pid,
        "tid": tid,
        "ts": 1e6 * span.begin,
        "dur": 1e6 * (span.end - span.begin),
        "args": details,
    }


def _middle(span: Span) -> float:
    return 5e5 * (span.begin + span.end)
