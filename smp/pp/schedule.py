"""The order in which ranks work on microbatches, as lists of typed actions with a text form.

An action gives the turn to one microbatch's program until it stands at its next pause:

    F k     microbatch k's work on this stage up to its next pause, forward        (F k.1: the second such turn)
    B k     the same, backward
    W k     the weight gradients that `B k` left for later

Without a plan, ranks use the phase order: all forwards of a window in order, then all their backwards in order. Every
rank of the pipeline group runs the same list, so no two ranks can wait for each other.

    active = 2, 4 microbatches:   F0 F1 B0 B1 F2 F3 B2 B3

With a plan every stage has a list of its own, cut from the segments of a recorded program (`ProgramCost`). Such lists
are safe when some order of the whole group's actions exists in which every message is sent before it is awaited:
`linearize` finds one or names the circle, `validate_plan` checks everything else too.
"""

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from smp.errors import StepError

if TYPE_CHECKING:
    from smp.pp.simulate import Plan


class ActionKind(enum.Enum):
    """What the turn is given for."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"


class Action(NamedTuple):
    """One turn: `F3` runs microbatch 3 forward to its next pause, `F3.1` from there to the one after.

    `segment` counts the turns of this kind that this microbatch gets on this stage; a `W` has the number of its `B`.
    """

    kind: ActionKind
    microbatch: int
    segment: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}" + (f".{self.segment}" if self.segment else "")


def phase_order(num_microbatches: int, active_microbatches: int) -> list[Action]:
    """All forwards, then all backwards, in windows of at most `active_microbatches` microbatches."""
    actions: list[Action] = []
    for start in range(0, num_microbatches, active_microbatches):
        window = range(start, min(start + active_microbatches, num_microbatches))
        actions += [Action(ActionKind.FORWARD, k) for k in window]
        actions += [Action(ActionKind.BACKWARD, k) for k in window]
    return actions


def to_text(actions: Iterable[Action]) -> str:
    """`F0 F1 B0 F2.1 W0`."""
    return " ".join(str(action) for action in actions)


def from_text(text: str) -> list[Action]:
    """The inverse of `to_text`. Raises `StepError` on anything that is no action."""
    actions = []
    for word in text.split():
        match = re.fullmatch(r"([FBW])(\d+)(?:\.([1-9]\d*))?", word)
        if match is None:
            raise StepError(
                f"'{word}' is no action; an action is F, B or W, a microbatch number, and after a dot its segment "
                "where that is not 0, such as F0, B3 or W2.1."
            )
        actions.append(Action(ActionKind(match[1]), int(match[2]), int(match[3] or 0)))
    return actions


def validate(actions: Sequence[Action], num_microbatches: int, active_microbatches: int) -> None:
    """Check that each microbatch runs forward once and then backward once, with at most `active_microbatches` in
    flight.

    Raises `StepError` with the action list and a mark under the action that is wrong.
    """
    started: set[int] = set()
    ended: set[int] = set()
    for position, (kind, microbatch, segment) in enumerate(actions):
        problem = ""
        if microbatch >= num_microbatches:
            problem = f"there are {num_microbatches} microbatches"
        elif kind is ActionKind.WEIGHT or segment:
            problem = "without a plan there are only whole forwards and backwards"
        elif kind is ActionKind.FORWARD and microbatch in started:
            problem = "this forward has run already"
        elif kind is ActionKind.BACKWARD and (microbatch not in started or microbatch in ended):
            problem = "no forward of this microbatch is waiting for its backward"
        (started if kind is ActionKind.FORWARD else ended).add(microbatch)
        if not problem and len(started - ended) > active_microbatches:
            problem = f"more than {active_microbatches} microbatches would be in flight"
        if problem:
            raise StepError(f"the schedule is wrong: {problem}\n  {_marked(actions, position)}")
    if len(ended) != num_microbatches:
        missing = sorted(set(range(num_microbatches)) - ended)
        raise StepError(f"the schedule is wrong: microbatches {missing} never end\n  {to_text(actions)}")


def _marked(actions: Sequence[Action], position: int) -> str:
    before = to_text(actions[:position])
    indent = len(before) + (1 if before else 0) + 2
    return f"{to_text(actions)}\n{' ' * indent}{'^' * len(str(actions[position]))}"


# -- what a plan is made of --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """A microbatch's work on one stage between two pauses.

    Args:
        stage: who does it.
        kind: FORWARD or BACKWARD.
        duration: seconds, without waiting.
        waits: ids of the messages that must have arrived before it starts.
        sends: (message id, seconds after the segment's start at which it leaves).
        weight: the part of a backward's `duration` that is weight gradients and may be done later, as a W action.
    """

    stage: int
    kind: ActionKind
    duration: float
    waits: tuple[int, ...] = ()
    sends: tuple[tuple[int, float], ...] = ()
    weight: float = 0.0


@dataclass(frozen=True)
class Message:
    """One transfer between two stages: `nbytes` from `source` to `dest`."""

    source: int
    dest: int
    nbytes: int


@dataclass(frozen=True)
class ProgramCost:
    """One microbatch's program: its segments in program order over all stages, and its messages (ids are indices).

    A stage runs its segments of one microbatch in this order. A segment waits only for messages of earlier segments.
    """

    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]


class Index:
    """What follows from a `ProgramCost` alone: who needs what, and the actions' names of segments.

    numbers: segment -> its number among those of its kind on its stage (`Action.segment`).
    lookup: (stage, kind, number) -> segment.
    visits: stage -> its segments in program order.
    previous: segment -> the one before it on its stage, or -1.
    needs: segment -> the segments that must have run or at least sent before it starts.
    waiters: segment -> for each of its sends, the segments that wait for that message.
    """

    def __init__(self, program: ProgramCost) -> None:
        self.segments = program.segments
        self.numbers: list[int] = []
        self.lookup: dict[tuple[int, ActionKind, int], int] = {}
        self.visits: dict[int, list[int]] = {}
        self.previous: list[int] = []
        self.needs: list[list[int]] = []
        self.waiters: list[list[list[int]]] = []
        counts: dict[tuple[int, ActionKind], int] = {}
        sent: dict[int, tuple[int, list[int]]] = {}
        for i, segment in enumerate(program.segments):
            key = (segment.stage, segment.kind)
            number = counts[key] = counts.get(key, -1) + 1
            self.numbers.append(number)
            self.lookup[(*key, number)] = i
            visits = self.visits.setdefault(segment.stage, [])
            needs = visits[-1:]
            self.previous.append(visits[-1] if visits else -1)
            visits.append(i)
            for message in segment.waits:
                assert message in sent, f"segment {i} waits for message {message}, which no earlier segment sends"
                assert program.messages[message].dest == segment.stage
                sender, waiting = sent[message]
                waiting.append(i)
                needs.append(sender)
            self.needs.append(needs)
            self.waiters.append([[] for _ in segment.sends])
            for (message, _), waiting in zip(segment.sends, self.waiters[-1]):
                assert message not in sent and program.messages[message].source == segment.stage
                sent[message] = (i, waiting)

    def find(self, stage: int, action: Action) -> int:
        """The segment that `action` runs, for a W that of its B. -1 when there is none."""
        kind = ActionKind.BACKWARD if action.kind is ActionKind.WEIGHT else action.kind
        return self.lookup.get((stage, kind, action.segment), -1)


def index_programs(programs: Sequence[ProgramCost]) -> list[Index]:
    """One `Index` per microbatch; microbatches that share a program share it."""
    known: dict[int, Index] = {}
    return [known.setdefault(id(p), known.get(id(p)) or Index(p)) for p in programs]


# -- a whole group's lists ---------------------------------------------------------------------------------------------


def validate_plan(
    actions: Sequence[Sequence[Action]], programs: Sequence[ProgramCost], active_microbatches: int
) -> None:
    """Check the action lists of a whole pipeline group, one per stage, against the programs of its microbatches.

    Every segment runs exactly once, in program order within a stage and a microbatch; microbatches follow in ascending
    order for one kind and segment number (gradients are summed in a fixed order); a W follows its B, and a B without
    a W runs whole; at most `active_microbatches` are in flight on a stage, from the start of their first action there
    to the end of their last; and the lists cannot wait for each other in a circle.

    Raises `StepError` with the grid of lists and a mark under each cell that is wrong.
    """
    indices = index_programs(programs)
    for stage, row in enumerate(actions):
        problem, position = _check_row(stage, row, indices, active_microbatches)
        if problem:
            raise StepError(f"the schedule is wrong: stage {stage}: {problem}\n{draw_rows(actions, {stage: position})}")
    linearize(actions, programs)


def _check_row(stage: int, row: Sequence[Action], indices: Sequence[Index], active: int) -> tuple[str, int]:
    """(what is wrong, at which position), or ("", 0)."""
    last = {action.microbatch: position for position, action in enumerate(row)}
    visited = dict.fromkeys(range(len(indices)), 0)
    newest: dict[tuple[ActionKind, int], int] = {}
    seen: set[Action] = set()
    flying: set[int] = set()
    for position, action in enumerate(row):
        kind, k, number = action
        if not 0 <= k < len(indices):
            return f"there are {len(indices)} microbatches", position
        if action in seen:
            return f"{action} has run already", position
        index = indices[k]
        segment = index.find(stage, action)
        if segment < 0:
            return f"microbatch {k} has no such segment here", position
        if kind is ActionKind.WEIGHT:
            if Action(ActionKind.BACKWARD, k, number) not in seen:
                return f"{action} comes before its backward", position
        else:
            due = index.visits[stage][visited[k]]
            if segment != due:
                expected = Action(index.segments[due].kind, k, index.numbers[due])
                return f"microbatch {k} must run {expected} first", position
            visited[k] += 1
        if newest.get((kind, number), -1) > k:
            return f"microbatch {newest[kind, number]} has run before {k}; gradients must add in order", position
        newest[kind, number] = k
        seen.add(action)
        flying.add(k)
        if len(flying) > active:
            return f"more than {active} microbatches would be in flight", position
        if position == last[k]:
            flying.remove(k)
    for k, index in enumerate(indices):
        if visited[k] < len(index.visits.get(stage, ())):
            due = index.visits[stage][visited[k]]
            return f"{Action(index.segments[due].kind, k, index.numbers[due])} never runs", len(row)
    return "", 0


def linearize(actions: Sequence[Sequence[Action]], programs: Sequence[ProgramCost]) -> list[tuple[int, int]]:
    """An order of all actions, as (stage, position), in which every action comes after all it needs.

    Raises `StepError` that names the circle when there is none: ranks that run these lists would wait for ever.
    """
    indices = index_programs(programs)
    done = [bytearray(len(index.segments)) for index in indices]
    heads = [0] * len(actions)
    blocked: dict[tuple[int, int], list[int]] = {}
    order: list[tuple[int, int]] = []
    stages = list(range(len(actions)))[::-1]
    while stages:
        stage = stages.pop()
        row = actions[stage]
        while heads[stage] < len(row):
            action = row[heads[stage]]
            k = action.microbatch
            index = indices[k]
            segment = index.find(stage, action)
            if segment < 0:
                mark = draw_rows(actions, {stage: heads[stage]})
                raise StepError(f"the schedule is wrong: stage {stage} has no segment {action}\n{mark}")
            weight = action.kind is ActionKind.WEIGHT
            needs = [segment] if weight else index.needs[segment]
            missing = next((i for i in needs if not done[k][i]), None)
            if missing is not None:
                blocked.setdefault((k, missing), []).append(stage)
                break
            order.append((stage, heads[stage]))
            heads[stage] += 1
            if not weight:
                done[k][segment] = 1
                stages += blocked.pop((k, segment), [])
    if blocked:
        raise StepError(_describe_circle(actions, indices, heads, blocked))
    return order


def _describe_circle(
    actions: Sequence[Sequence[Action]],
    indices: Sequence[Index],
    heads: Sequence[int],
    blocked: Mapping[tuple[int, int], Sequence[int]],
) -> str:
    awaited = {stage: need for need, stages in blocked.items() for stage in stages}
    path: list[int] = [min(awaited)]
    texts: list[str] = []
    while True:
        stage = path[-1]
        k, segment = awaited[stage]
        index = indices[k]
        other = index.segments[segment].stage
        need = Action(index.segments[segment].kind, k, index.numbers[segment])
        where = "itself" if other == stage else f"stage {other}"
        texts.append(f"stage {stage} at {actions[stage][heads[stage]]} waits for {need} of {where}")
        if other not in awaited:  # that stage has run all its list
            texts.append(f"stage {other} never runs {need}")
            marks = {s: heads[s] for s in path}
            break
        if other in path:
            begin = path.index(other)
            texts = texts[begin:]
            marks = {s: heads[s] for s in path[begin:]}
            break
        path.append(other)
    chain = ",\n    ".join(texts)
    return f"the schedule is wrong: it can never end:\n    {chain}\n{draw_rows(actions, marks)}"


def draw_rows(actions: Sequence[Sequence[Action]], marks: Mapping[int, int]) -> str:
    """The grid stages x positions, with `^` under position `marks[stage]` of a stage."""
    length = max((len(row) for row in actions), default=0)
    widths = [max(len(str(row[i])) for row in actions if i < len(row)) for i in range(length)]
    name = len(f"stage {len(actions) - 1}")
    lines = []
    for stage, row in enumerate(actions):
        cells = [str(action).ljust(width) for action, width in zip(row, widths)]
        lines.append(f"  {f'stage {stage}':{name}} | " + " ".join(cells).rstrip())
        if stage in marks:
            position = marks[stage]
            indent = sum(widths[:position]) + position + name + 5
            lines.append(" " * indent + "^" * (len(str(row[position])) if position < len(row) else 1))
    return "\n".join(lines)


def grid(plan: "Plan", columns: int = 100) -> str:
    """A drawing of `plan`: one line per stage, time to the right over about `columns` characters.

    An action is as wide as it lasts (`F0==`), idle time is `.`. Where names do not fit they are cut.
    """
    scale = columns / plan.step_time if plan.step_time else 0.0
    name = len(f"stage {len(plan.actions) - 1}")
    lines = []
    for stage, (row, times) in enumerate(zip(plan.actions, plan.times)):
        line = ""
        for action, (start, end) in zip(row, times):
            begin, stop = round(start * scale), round(end * scale)
            line = line.ljust(begin, ".")
            line += str(action)[: max(stop - begin, 0)].ljust(stop - begin, "=")
        lines.append(f"{f'stage {stage}':{name}} |{line.ljust(columns, '.')}|")
    return "\n".join(lines)
