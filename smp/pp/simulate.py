"""Plans a step: which stage runs which segment of which microbatch when, without running anything.

    programs (segments, messages, seconds)  ->  simulate  ->  Plan: an action list per stage, times, bubble, memory

A plan is a simulated execution of the whole pipeline group by list scheduling: each stage runs one action at a time; a
segment is ready when the previous segment of its microbatch on that stage has ended and all messages it waits for have
arrived (start of the sender + offset + latency + bytes / bandwidth). Of what is ready and admitted, a stage takes what
its policy prefers. Pure and deterministic.

**It never gets stuck.** A stage admits microbatches (lets them start their first segment there) in ascending order
and only while fewer than its limit are in flight there. Proof that this suffices for any programs: suppose that
nothing runs, nothing will arrive, and k is the lowest microbatch that has not ended. All lower ones have ended, so they
hold no slot anywhere. Take k's first segment in program order that has not run, on stage s. All it waits for was sent
by earlier segments of k, which have run, so it is ready. If it is k's first on s: only microbatches below k were
admitted on s before it, none is in flight, and k is next in line, so it is admitted (limits are at least 1). If it is
not, it needs no slot. It is also next among its kind and number, which run in ascending order. So it would run. The
same holds for k's W actions, which wait for their B alone. SIMPLE holds backwards back until the forwards that lead
programs (those before the first backward) of a window of microbatches have run on that stage: the lowest microbatch
with such a forward left is never held back by that rule, for nothing before that forward is a backward; and the
window's microbatches are all admitted, for the limit is the window; once none is left, the proof above holds.

Greedy choices are not the best ones, so several variants (limits per stage, order among forwards) are tried and the
one with the least step time, then the fewest microbatches in flight, is kept. What that reaches, f, b, w being a
stage's seconds per microbatch forward, backward for inputs and for weights, m microbatches on p stages:
see `Policy`.
"""

import enum
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from smp.errors import StepError
from smp.pp.schedule import (
    Action,
    ActionKind,
    Index,
    Message,
    ProgramCost,
    Segment,
    index_programs,
    linearize,
)

__all__ = ["Message", "Plan", "Policy", "ProgramCost", "Segment", "replay", "simulate"]


class Policy(enum.Enum):
    """What a stage prefers.

    INTERLEAVED: ready backwards first. On a chain this is 1F1B, (m + p - 1) (f + b + w), with at most p - s
        microbatches in flight on stage s.
    SIMPLE: all forwards of a window of `active_microbatches` first, then their backwards.
    FORWARD_ONLY: programs without backwards.
    ZERO_BUBBLE: a backward runs its input gradients; weight gradients run as W actions where the stage would idle.
    """

    INTERLEAVED = "interleaved"
    SIMPLE = "simple"
    FORWARD_ONLY = "_only_forward"
    ZERO_BUBBLE = "zero_bubble"


@dataclass(frozen=True)
class Plan:
    """A step as planned.

    Args:
        policy: what it was planned by.
        actions: per stage, what it runs, in order.
        times: per stage, (start, end) of each action, in seconds from the start of the step.
        step_time: when the last action ends, in seconds.
        bubble: the share of `step_time` in which the busiest stage idles.
        idle: per stage, the share of `step_time` in which it idles.
        in_flight: per stage, the most microbatches at one time between the start of their first action there and the
            end of their last.
    """

    policy: Policy
    actions: tuple[tuple[Action, ...], ...]
    times: tuple[tuple[tuple[float, float], ...], ...]
    step_time: float
    bubble: float
    idle: tuple[float, ...]
    in_flight: tuple[int, ...]


@dataclass(frozen=True)
class Network:
    """What a message and an action cost beside the work itself.

    Args:
        latency: seconds that every message takes.
        bandwidth: bytes per second.
        overhead: seconds that every action takes before its work starts.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    overhead: float = 0.0

    def seconds(self, message: Message) -> float:
        """How long `message` is under way."""
        return self.latency + message.nbytes / self.bandwidth


def simulate(
    programs: Sequence[ProgramCost],
    num_stages: int,
    active_microbatches: int,
    policy: Policy,
    latency: float = 0.0,
    bandwidth: float = math.inf,
    overhead: float = 0.0,
) -> Plan:
    """Plan the step whose microbatches run `programs` (one per microbatch, usually the same object).

    At most `active_microbatches` are in flight on a stage at a time. `latency` is in seconds per message, `bandwidth`
    in bytes per second, `overhead` in seconds per action.

    Raises `StepError` when FORWARD_ONLY meets a backward.
    """
    assert active_microbatches >= 1 and num_stages >= 1
    backward = any(s.kind is ActionKind.BACKWARD for program in programs for s in program.segments)
    if policy is Policy.FORWARD_ONLY and backward:
        raise StepError(
            'the step calls model.backward, but "pipeline" is "_only_forward"; choose "interleaved" or "simple", or '
            "leave the backward out."
        )
    network = Network(latency, bandwidth, overhead)
    work = _Work(programs, num_stages, policy, network)
    best: _Outcome | None = None
    for variant in _variants(work, active_microbatches):
        outcome = _run(work, variant)
        if best is None or outcome.better_than(best):
            best = outcome
    assert best is not None
    return replay(best.actions(), programs, num_stages, latency, bandwidth, overhead, policy=policy)


def replay(
    actions: Sequence[Sequence[Action]],
    programs: Sequence[ProgramCost],
    num_stages: int,
    latency: float = 0.0,
    bandwidth: float = math.inf,
    overhead: float = 0.0,
    policy: Policy = Policy.INTERLEAVED,
) -> Plan:
    """The times of given lists, one per stage, under the durations of `programs` (one per microbatch).

    A backward whose W is listed runs without its weight part, any other one whole.

    Raises `StepError` that names the circle when the lists wait for each other.
    """
    assert len(actions) == num_stages
    network = Network(latency, bandwidth, overhead)
    indices = index_programs(programs)
    split = [{(a.microbatch, a.segment) for a in row if a.kind is ActionKind.WEIGHT} for row in actions]
    arrived: list[dict[int, float]] = [{} for _ in programs]
    free = [0.0] * num_stages
    times: list[list[tuple[float, float]]] = [[] for _ in actions]
    for stage, position in linearize(actions, programs):
        action = actions[stage][position]
        k = action.microbatch
        segment = programs[k].segments[indices[k].find(stage, action)]
        start = free[stage]
        if action.kind is ActionKind.WEIGHT:
            duration = segment.weight
        else:
            whole = segment.kind is ActionKind.FORWARD or (k, action.segment) not in split[stage]
            duration = segment.duration - (0.0 if whole else segment.weight)
            start = max([start, *(arrived[k][message] for message in segment.waits)])
            begin = start + network.overhead
            for message, offset in segment.sends:
                leaves = begin + _scaled(offset, segment, duration)
                arrived[k][message] = leaves + network.seconds(programs[k].messages[message])
        free[stage] = start + network.overhead + duration
        times[stage].append((start, free[stage]))
    return _plan(policy, actions, times, network)


def _scaled(offset: float, segment: Segment, duration: float) -> float:
    """When a message leaves a segment that lasts `duration`: weight gradients left out come evenly over a backward."""
    if duration == segment.duration:
        return offset
    return offset * duration / segment.duration if segment.duration else 0.0


def _plan(
    policy: Policy,
    actions: Sequence[Sequence[Action]],
    times: Sequence[Sequence[tuple[float, float]]],
    network: Network,
) -> Plan:
    step_time = max((row[-1][1] for row in times if row), default=0.0)
    idle = [1.0 - sum(end - start for start, end in row) / step_time if step_time else 0.0 for row in times]
    return Plan(
        policy,
        tuple(tuple(row) for row in actions),
        tuple(tuple(row) for row in times),
        step_time,
        min(idle),
        tuple(idle),
        tuple(_most_in_flight(row) for row in actions),
    )


def _most_in_flight(row: Sequence[Action]) -> int:
    last = {action.microbatch: position for position, action in enumerate(row)}
    flying: set[int] = set()
    most = 0
    for position, action in enumerate(row):
        flying.add(action.microbatch)
        most = max(most, len(flying))
        if position == last[action.microbatch]:
            flying.remove(action.microbatch)
    return most


# -- list scheduling ---------------------------------------------------------------------------------------------------


@dataclass
class _Node:
    """One action to be placed, with what of it does not depend on the variant."""

    action: Action
    stage: int
    duration: float
    lead: bool = False  # a forward before the program's first backward
    first: bool = False  # its microbatch's first on this stage
    needs: int = 0  # how many other actions or messages it waits for
    sends: list[tuple[int, float]] = field(default_factory=list)  # (node, seconds after the start)
    follow: list[int] = field(default_factory=list)  # nodes that wait for its end


class _Work:
    """All actions of the step as a graph. `streams[stage]` are the lists of nodes of one kind and segment number."""

    def __init__(self, programs: Sequence[ProgramCost], num_stages: int, policy: Policy, network: Network) -> None:
        self.programs = programs
        self.num_stages = num_stages
        self.policy = policy
        self.network = network
        self.nodes: list[_Node] = []
        streams: list[dict[tuple[ActionKind, int], list[int]]] = [{} for _ in range(num_stages)]
        self.visitors: list[list[int]] = [[] for _ in range(num_stages)]  # microbatches in order
        self.left: list[list[int]] = [[0] * len(programs) for _ in range(num_stages)]  # actions per microbatch
        for k, index in enumerate(index_programs(programs)):
            begin = len(self.nodes)
            self._add(k, index, programs[k])
            for i in range(begin, len(self.nodes)):
                node = self.nodes[i]
                streams[node.stage].setdefault((node.action.kind, node.action.segment), []).append(i)
                self.left[node.stage][k] += 1
            for stage in index.visits:
                self.visitors[stage].append(k)
        self.streams = [list(named.values()) for named in streams]

    def _add(self, k: int, index: Index, program: ProgramCost) -> None:
        base = len(self.nodes)
        segments = program.segments
        backwards = [i for i, s in enumerate(segments) if s.kind is ActionKind.BACKWARD]
        first_backward = backwards[0] if backwards else len(segments)
        weights: list[_Node] = []
        for i, segment in enumerate(segments):
            split = self.policy is Policy.ZERO_BUBBLE and segment.kind is ActionKind.BACKWARD and segment.weight > 0
            duration = segment.duration - (segment.weight if split else 0.0)
            visits = index.visits[segment.stage]
            node = _Node(
                Action(segment.kind, k, index.numbers[i]),
                segment.stage,
                duration + self.network.overhead,
                lead=i < first_backward,
                first=visits[0] == i,
                needs=len(segment.waits) + (visits[0] != i),
            )
            for (message, offset), waiters in zip(segment.sends, index.waiters[i]):
                late = _scaled(offset, segment, duration) + self.network.seconds(program.messages[message])
                node.sends += [(base + j, self.network.overhead + late) for j in waiters]
            if visits[0] != i:
                self.nodes[base + visits[visits.index(i) - 1]].follow.append(base + i)
            if split:
                node.follow.append(base + len(segments) + len(weights))
                action = Action(ActionKind.WEIGHT, k, index.numbers[i])
                weights.append(_Node(action, segment.stage, segment.weight + self.network.overhead, needs=1))
            self.nodes.append(node)
        self.nodes += weights


@dataclass(frozen=True)
class _Variant:
    """One way of choosing.

    limits: per stage, the most microbatches in flight.
    window: microbatches that go through one segment of a kind before the next segment has its turn.
    patience: a stage rather waits for what will be ready within this share of the duration of what it could run.
    alternate: after a backward a forward comes first.
    """

    limits: tuple[int, ...]
    window: int = 1
    patience: float = 0.0
    alternate: bool = False


@dataclass
class _Outcome:
    work: _Work
    rows: list[list[int]]
    step_time: float
    in_flight: list[int]

    def better_than(self, other: "_Outcome") -> bool:
        if abs(self.step_time - other.step_time) > 1e-6 * other.step_time:
            return self.step_time < other.step_time
        return (max(self.in_flight), sum(self.in_flight)) < (max(other.in_flight), sum(other.in_flight))

    def actions(self) -> list[list[Action]]:
        return [[self.work.nodes[i].action for i in row] for row in self.rows]


def _variants(work: _Work, active: int) -> Iterator[_Variant]:
    count = len(work.programs)
    active = max(1, min(active, count))
    everywhere = (active,) * work.num_stages
    if work.policy in (Policy.SIMPLE, Policy.FORWARD_ONLY):
        yield _Variant(everywhere)
        return
    visits = max((len(row) for row in work.streams), default=1)
    windows = [1, work.num_stages, count] if visits > 3 else [1]
    base = _needed_limits(work)
    seen = set()
    for extra in (0, 1, 2, work.num_stages, count):
        limits = tuple(min(active, limit + extra) for limit in base)
        for window in windows:
            for patience in (0.0, 0.5) if work.policy is Policy.ZERO_BUBBLE else (0.0,):
                for alternate in (False, True):
                    variant = _Variant(limits, window, patience, alternate)
                    if variant not in seen:
                        seen.add(variant)
                        yield variant


def _needed_limits(work: _Work) -> list[int]:
    """How many microbatches must be in flight per stage for the busiest stage never to wait: the time that one alone
    spends between its first and last action there, over the busiest stage's time per microbatch."""
    alone = _Work(work.programs[:1], work.num_stages, Policy.INTERLEAVED, work.network)
    first = [math.inf] * work.num_stages
    last = [0.0] * work.num_stages
    busy = [0.0] * work.num_stages
    starts: list[float] = []
    _run(alone, _Variant((1,) * work.num_stages), starts)
    for node, start in zip(alone.nodes, starts):
        first[node.stage] = min(first[node.stage], start)
        last[node.stage] = max(last[node.stage], start + node.duration)
        busy[node.stage] += node.duration
    most = max(busy)
    return [max(1, math.ceil((b - a) / most - 1e-6)) if most and b > a else 1 for a, b in zip(first, last)]


def _run(work: _Work, variant: _Variant, starts: list[float] | None = None) -> _Outcome:
    """One greedy execution. `starts` receives the start of every node."""
    return _Execution(work, variant).run(starts)


class _Execution:
    """The state of one greedy execution."""

    def __init__(self, work: _Work, variant: _Variant) -> None:
        self.work = work
        self.variant = variant
        nodes = work.nodes
        stages = range(work.num_stages)
        self.missing = [node.needs for node in nodes]
        self.ready = [0.0] * len(nodes)
        self.free = [0.0] * work.num_stages
        self.heads = [[0] * len(row) for row in work.streams]
        self.admitted = [0] * work.num_stages
        self.flying = [0] * work.num_stages
        self.most = [0] * work.num_stages
        self.left = [list(row) for row in work.left]
        self.after_backward = [False] * work.num_stages
        self.rows: list[list[int]] = [[] for _ in stages]
        self.events: list[tuple[float, int]] = [(0.0, stage) for stage in stages]
        # Two times that differ by rounding alone are the same time.
        self.same = 1e-9 * sum(node.duration for node in nodes)
        self.size = variant.limits[0] if work.policy is Policy.SIMPLE else 1
        self.leading: dict[tuple[int, int], int] = {}
        if work.policy is Policy.SIMPLE:
            for node in nodes:
                if node.lead:
                    key = (node.stage, node.action.microbatch // self.size)
                    self.leading[key] = self.leading.get(key, 0) + 1

    def run(self, starts: list[float] | None) -> _Outcome:
        if starts is not None:
            starts[:] = [0.0] * len(self.work.nodes)
        events = self.events
        while events:
            now = events[0][0]
            due = set()
            while events and events[0][0] <= now + self.same:
                due.add(heapq.heappop(events)[1])
            for stage in sorted(due):
                if self.free[stage] <= now + self.same:
                    chosen = self._choose(stage, now)
                    if chosen >= 0:
                        start = self._start(chosen)
                        if starts is not None:
                            starts[chosen] = start
        assert sum(map(len, self.rows)) == len(self.work.nodes)
        return _Outcome(self.work, self.rows, max(self.free), self.most)

    def _choose(self, stage: int, now: float) -> int:
        """The node that `stage` runs now, or -1."""
        nodes, heads = self.work.nodes, self.heads[stage]
        best, best_key = -1, (math.inf,)
        soonest = math.inf
        for stream, rows in enumerate(self.work.streams[stage]):
            if heads[stream] == len(rows):
                continue
            i = rows[heads[stream]]
            node = nodes[i]
            if self.missing[i] or not self._admissible(node):
                continue
            if self.ready[i] > now + self.same:
                if node.action.kind is not ActionKind.WEIGHT:
                    soonest = min(soonest, self.ready[i])
                continue
            key = self._key(node)
            if key < best_key:
                best, best_key = i, key
        if best >= 0 and self.variant.patience and nodes[best].action.kind is ActionKind.WEIGHT:
            if soonest < now + self.variant.patience * nodes[best].duration:
                return -1
        return best

    def _admissible(self, node: _Node) -> bool:
        stage, k = node.stage, node.action.microbatch
        if node.first:
            visitors = self.work.visitors[stage]
            if visitors[self.admitted[stage]] != k:
                return False
            if self.work.policy is Policy.SIMPLE and self.flying[stage]:
                if visitors[self.admitted[stage] - 1] // self.size != k // self.size:
                    return False
            return self.flying[stage] < self.variant.limits[stage]
        if self.work.policy is Policy.SIMPLE and node.action.kind is ActionKind.BACKWARD:
            return not self.leading.get((stage, k // self.size))
        return True

    def _key(self, node: _Node) -> tuple[float, ...]:
        kind, k, number = node.action
        if kind is ActionKind.WEIGHT:
            return (3, k, number)
        forward = kind is ActionKind.FORWARD
        if self.work.policy is Policy.SIMPLE:
            rank = 0 if forward else 1
        elif self.variant.alternate and self.after_backward[node.stage]:
            rank = 0 if forward else 1
        else:
            rank = 2 if forward else 1
        return (rank, k // self.variant.window, number, k)

    def _start(self, i: int) -> float:
        """Run node i as soon as it and its stage are free."""
        node = self.work.nodes[i]
        stage, (kind, k, _) = node.stage, node.action
        start = max(self.free[stage], self.ready[i])
        end = self.free[stage] = start + node.duration
        self.rows[stage].append(i)
        if kind is not ActionKind.WEIGHT:
            self.after_backward[stage] = kind is ActionKind.BACKWARD
        for stream, rows in enumerate(self.work.streams[stage]):
            if self.heads[stage][stream] < len(rows) and rows[self.heads[stage][stream]] == i:
                self.heads[stage][stream] += 1
        if node.first:
            self.admitted[stage] += 1
            self.flying[stage] += 1
            self.most[stage] = max(self.most[stage], self.flying[stage])
        self.left[stage][k] -= 1
        if not self.left[stage][k]:
            self.flying[stage] -= 1  # the stage chooses again only when this node has ended
        if node.lead and self.work.policy is Policy.SIMPLE:
            self.leading[stage, k // self.size] -= 1
        heapq.heappush(self.events, (end, stage))
        for j in node.follow:
            self._arrive(j, end)
        for j, late in node.sends:
            self._arrive(j, start + late)
        return start

    def _arrive(self, j: int, when: float) -> None:
        self.ready[j] = max(self.ready[j], when)
        self.missing[j] -= 1
        if not self.missing[j]:
            heapq.heappush(self.events, (self.ready[j], self.work.nodes[j].stage))
