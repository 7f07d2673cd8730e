"""List scheduling: the actions of a step as a graph, and a greedy execution of it.

    programs -> Graph (nodes = actions, edges = order on a stage and messages) -> execute(graph, Rule) -> Outcome

Every stage runs one action at a time. An action is ready when the previous one of its microbatch on that stage has
ended and all its messages have arrived. Of what is ready and admitted, a stage takes what the rule prefers.

**It never gets stuck.** A stage admits microbatches (lets them start their first action there) in ascending order,
and only while fewer than its limit are in flight there. This suffices for any programs: suppose that nothing runs,
nothing is under way, and k is the lowest microbatch that has not ended. All lower ones have ended, so they hold no slot
anywhere. Take k's first segment in program order that has not run, on stage s. What it waits for was sent by earlier
segments of k, which have run, so it is ready. If it is k's first on s: only microbatches below k were admitted on s
before it, so none is in flight there, k is next in line, and it is admitted, for limits are at least 1. If it is not,
it needs no slot. It is next among its kind and number, which run in ascending order. So it would run. The same holds
for k's W actions, which wait for their B alone.

With `forwards_first`, backwards of a window of microbatches are held back until the forwards that lead its programs
(those before the first backward) have all run on that stage; but only where every program comes to every stage first
with a leading forward, and no forward that leads follows, in its number's order, one that does not. Let k be the lowest
microbatch of the lowest window with such a forward left, and take the first one that has not run, on stage s. Nothing
before it is a backward, so it is ready. Lower microbatches of the window have run theirs, so those that visit s are
admitted there, and k is next in line, also for this number; the limit is the window, so it is admitted. Once none is
left, nothing of the window is held back, and the proof above holds again.

`ahead` changes nothing: below k none has a forward or backward left. Where W alone fill a stage, they run.

A rule that waits (`patience`, `dice`) waits only for something that is under way.
"""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from smp.pp.schedule import Action, ActionKind, Index, Message, ProgramCost, Segment, index_programs

FORWARD, BACKWARD, WEIGHT = range(3)
_CODES = {ActionKind.FORWARD: FORWARD, ActionKind.BACKWARD: BACKWARD, ActionKind.WEIGHT: WEIGHT}


@dataclass(frozen=True)
class Network:
    """What messages and actions cost beside the work itself.

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


def leaves_after(offset: float, segment: Segment, duration: float) -> float:
    """When a message leaves a segment that lasts only `duration`, its weight gradients left out: in proportion."""
    if duration == segment.duration:
        return offset
    return offset * duration / segment.duration


@dataclass(frozen=True)
class Rule:
    """How a greedy execution chooses.

    limits: per stage, the most microbatches in flight.
    window: microbatches that go through one segment before the next one has its turn.
    patience: a stage rather idles than starts a W when something better arrives within this share of the W's duration.
    ahead: per stage, the most microbatches in flight that have a forward or backward left there; () for the limits.
    debts: per stage, how many W may be outstanding before one comes ahead of forwards; () for any number.
    alternate: after a backward a forward comes first, else a ready backward always does.
    forwards_first: all forwards of a window of `limits[0]` microbatches (the same on every stage), then their
        backwards.
    dice: a seed, 0 for none: now and then take the other kind first, or wait for what is under way.
    """

    limits: tuple[int, ...]
    window: int = 1
    patience: float = 0.0
    ahead: tuple[int, ...] = ()
    debts: tuple[int, ...] = ()
    alternate: bool = False
    forwards_first: bool = False
    dice: int = 0


@dataclass(frozen=True)
class Outcome:
    """What came of a greedy execution: node numbers per stage in order, their starts, and the most in flight."""

    rows: list[list[int]]
    starts: list[float]
    step_time: float
    in_flight: list[int]

    def better_than(self, other: "Outcome") -> bool:
        """Whether it ends earlier, or at the same time with fewer microbatches in flight."""
        if abs(self.step_time - other.step_time) > 1e-6 * self.step_time:
            return self.step_time < other.step_time
        return (max(self.in_flight), sum(self.in_flight)) < (max(other.in_flight), sum(other.in_flight))


class Graph:
    """All actions of a step. A node is an index into the lists below; seconds include the overhead of an action.

    stages, kinds, microbatches, numbers: what the node is.
    durations: seconds.
    needs: how many messages, and whether a previous action, it waits for.
    sends: per node, (node, seconds from the start until it may start).
    follow: per node, those that wait for its end: the next segment on the stage, its W.
    after: the node of the same kind and number of the next microbatch on the stage, or -1.
    has_weight: whether it is a backward whose weight gradients are a W of their own.
    first, last: whether it is its microbatch's first, its last (but for W) on its stage.
    lead: whether it is a forward before its program's first backward.
    """

    def __init__(
        self, programs: Sequence[ProgramCost], num_stages: int, network: Network, split_weights: bool = False
    ) -> None:
        self.num_stages = num_stages
        self.num_microbatches = len(programs)
        self.network = network
        self.split_weights = split_weights
        self.stages: list[int] = []
        self.kinds: list[int] = []
        self.microbatches: list[int] = []
        self.numbers: list[int] = []
        self.durations: list[float] = []
        self.needs: list[int] = []
        self.sends: list[list[tuple[int, float]]] = []
        self.follow: list[list[int]] = []
        self.has_weight: list[bool] = []
        self.first: list[bool] = []
        self.last: list[bool] = []
        self.lead: list[bool] = []
        self.visitors: list[list[int]] = [[] for _ in range(num_stages)]  # microbatches that come to a stage
        self.left: list[list[int]] = [[0] * len(programs) for _ in range(num_stages)]  # actions there, by microbatch
        self.chunks = 1  # the most forward segments of a microbatch on one stage
        for k, index in enumerate(index_programs(programs)):
            self._add(k, index, programs[k])
        self.after = [-1] * len(self.stages)
        newest: dict[tuple[int, int, int], int] = {}
        self.heads: list[int] = []  # nodes with no lower microbatch before them
        for i, stage in enumerate(self.stages):
            key = (stage, self.kinds[i], self.numbers[i])
            if key in newest:
                self.after[newest[key]] = i
            else:
                self.heads.append(i)
            newest[key] = i

    def _add(self, k: int, index: Index, program: ProgramCost) -> None:
        base = len(self.stages)
        segments = program.segments
        overhead = self.network.overhead
        first_backward = next((i for i, s in enumerate(segments) if s.kind is ActionKind.BACKWARD), len(segments))
        split = [self.split_weights and s.kind is ActionKind.BACKWARD and s.weight > 0 for s in segments]
        for i, segment in enumerate(segments):
            duration = segment.duration - (segment.weight if split[i] else 0.0)
            sends = []
            for (message, offset), waiters in zip(segment.sends, index.waiters[i]):
                late = leaves_after(offset, segment, duration) + self.network.seconds(program.messages[message])
                sends += [(base + j, overhead + late) for j in waiters]
            previous = index.previous[i]
            if previous >= 0:
                self.follow[base + previous].append(base + i)
            needs = len(segment.waits) + (previous >= 0)
            self._append(segment.stage, _CODES[segment.kind], k, index.numbers[i], duration + overhead, needs, sends)
            self.first[-1] = previous < 0
            self.last[-1] = index.visits[segment.stage][-1] == i
            self.lead[-1] = i < first_backward
            if segment.kind is ActionKind.FORWARD:
                self.chunks = max(self.chunks, index.numbers[i] + 1)
        for i, segment in enumerate(segments):
            if split[i]:
                self.has_weight[base + i] = True
                self.follow[base + i].append(len(self.stages))
                self._append(segment.stage, WEIGHT, k, index.numbers[i], segment.weight + overhead, 1, [])
        for stage in index.visits:
            self.visitors[stage].append(k)

    def _append(
        self, stage: int, kind: int, k: int, number: int, duration: float, needs: int, sends: list[tuple[int, float]]
    ) -> None:
        self.stages.append(stage)
        self.kinds.append(kind)
        self.microbatches.append(k)
        self.numbers.append(number)
        self.durations.append(duration)
        self.needs.append(needs)
        self.sends.append(sends)
        self.follow.append([])
        self.has_weight.append(False)
        self.first.append(False)
        self.last.append(False)
        self.lead.append(False)
        self.left[stage][k] += 1

    def leads_alike(self) -> bool:
        """Whether backwards may be held back until the leading forwards of a window have run (see above)."""
        return all(
            (self.lead[i] or not self.first[i]) and (self.lead[i] or later < 0 or not self.lead[later])
            for i, later in enumerate(self.after)
        )

    def actions(self, outcome: Outcome) -> list[list[Action]]:
        """The action lists of `outcome`, one per stage."""
        kinds = list(_CODES)
        return [
            [Action(kinds[self.kinds[i]], self.microbatches[i], self.numbers[i]) for i in row] for row in outcome.rows
        ]

    def distances(self) -> tuple[list[float], list[float]]:
        """Per node, the least seconds from the start of the step to its start, and from its end to the end of its
        microbatch, were stages not shared with other microbatches."""
        count = len(self.stages)
        before = [0.0] * count
        behind = [0.0] * count
        for i in range(count):  # the order of nodes within a microbatch is one of the graph
            for j in self.follow[i]:
                before[j] = max(before[j], before[i] + self.durations[i])
            for j, late in self.sends[i]:
                before[j] = max(before[j], before[i] + late)
        for i in reversed(range(count)):
            for j in self.follow[i]:
                behind[i] = max(behind[i], self.durations[j] + behind[j])
            for j, late in self.sends[i]:
                behind[i] = max(behind[i], late - self.durations[i] + self.durations[j] + behind[j])
        return before, behind

    def bound(self) -> float:
        """No schedule takes fewer seconds: a stage's work, what must come before its first action, and what must
        come after its last; and the longest path of one microbatch."""
        before, behind = self.distances()
        work = [0.0] * self.num_stages
        head = [math.inf] * self.num_stages
        tail = [math.inf] * self.num_stages
        longest = 0.0
        for i, stage in enumerate(self.stages):
            work[stage] += self.durations[i]
            head[stage] = min(head[stage], before[i])
            tail[stage] = min(tail[stage], behind[i])
            longest = max(longest, before[i] + self.durations[i] + behind[i])
        return max([longest, *(h + w + t for h, w, t in zip(head, work, tail) if w)])

    def needed_limits(self) -> list[int]:
        """How many microbatches must be in flight per stage so that the busiest stage need not wait (Little's law):
        the time that one alone spends between its first action there and the end of its last backward, over the
        busiest stage's time per microbatch, W left out."""
        before, _ = self.distances()
        enter = [math.inf] * self.num_stages
        leave = [0.0] * self.num_stages
        busy = [0.0] * self.num_stages
        for i, stage in enumerate(self.stages):
            if self.kinds[i] != WEIGHT:
                busy[stage] += self.durations[i] / self.num_microbatches
                enter[stage] = min(enter[stage], before[i])
                leave[stage] = max(leave[stage], before[i] + self.durations[i])
        most = max(busy)
        if not most:
            return [1] * self.num_stages
        return [max(1, math.ceil((b - a) / most - 1e-6)) if b > a else 1 for a, b in zip(enter, leave)]


def execute(graph: Graph, rule: Rule) -> Outcome:
    """Run all actions of `graph` greedily by `rule`."""
    return _Execution(graph, rule).run()


class _Execution:
    """The state of a greedy execution.

    missing, ready: per node, how much it still waits for, and when what has been sent will be there.
    arrived, turn: per node, whether all it waits for is there, and whether lower microbatches have run the same.
    choices: per stage and kind, what may run (arrived and its turn), best first; `entering`: what also needs a slot.
    """

    def __init__(self, graph: Graph, rule: Rule) -> None:
        self.graph = graph
        self.rule = rule
        count, stages = len(graph.stages), graph.num_stages
        self.missing = list(graph.needs)
        self.ready = [0.0] * count
        self.arrived = bytearray(count)
        self.turn = bytearray(count)
        self.choices: list[list[list[tuple[int, int, int, int]]]] = [[[], [], []] for _ in range(stages)]
        self.entering: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
        self.coming: list[list[tuple[float, int]]] = [[] for _ in range(stages)]  # (when it is ready, F or B)
        self.free = [0.0] * stages
        self.admitted = [0] * stages
        self.flying = [0] * stages
        self.most = [0] * stages
        self.left = [list(row) for row in graph.left]
        self.open = [0] * stages  # of those in flight, the ones with a forward or backward left
        self.ahead = rule.ahead or rule.limits
        self.newest = [FORWARD] * stages  # the kind of the last F or B
        self.owed = [0] * stages  # W whose B has run
        self.rows: list[list[int]] = [[] for _ in range(stages)]
        self.starts = [0.0] * count
        self.events: list[tuple[float, int, int]] = []  # (time, stage, node that is ready or -1)
        self.same = 1e-9 * sum(graph.durations)  # times that differ by rounding alone are the same
        self.dice = random.Random(rule.dice) if rule.dice else None
        self.size = rule.limits[0]
        self.leading: dict[tuple[int, int], int] = {}  # (stage, window) -> leading forwards that have not run
        if rule.forwards_first and graph.leads_alike():
            for i, lead in enumerate(graph.lead):
                if lead:
                    key = (graph.stages[i], graph.microbatches[i] // self.size)
                    self.leading[key] = self.leading.get(key, 0) + 1

    def run(self) -> Outcome:
        graph, events = self.graph, self.events
        for i in graph.heads:
            self.turn[i] = 1
        for i, needs in enumerate(graph.needs):
            if not needs:
                heapq.heappush(events, (0.0, graph.stages[i], i))
        while events:
            begin = events[0][0]
            now = begin + self.same
            due = set()
            while events and events[0][0] <= now:
                _, stage, i = heapq.heappop(events)
                due.add(stage)
                if i >= 0:
                    self.arrived[i] = 1
                    self._offer(i)
            for stage in sorted(due):
                if self.free[stage] <= now:
                    chosen = self._choose(stage, now)
                    if chosen >= 0:
                        self._start(chosen, begin)
        assert sum(map(len, self.rows)) == len(graph.stages), "list scheduling got stuck"
        return Outcome(self.rows, self.starts, max(self.free), self.most)

    def _offer(self, i: int) -> None:
        """Node i may have become one to choose."""
        if self.arrived[i] and self.turn[i]:
            graph = self.graph
            stage, k, number = graph.stages[i], graph.microbatches[i], graph.numbers[i]
            if graph.first[i]:
                heapq.heappush(self.entering[stage], (k, i))
            else:
                late = self.dice.randrange(3) if self.dice is not None else 0
                key = ((k + late) // self.rule.window, number, k, i)
                heapq.heappush(self.choices[stage][graph.kinds[i]], key)

    def _choose(self, stage: int, now: float) -> int:
        """Take out what `stage` runs now; -1 when it rather idles."""
        rule = self.rule
        weights = self.choices[stage][WEIGHT]
        in_debt = bool(weights and rule.debts) and self.owed[stage] > rule.debts[stage]
        prefer_forward = rule.forwards_first or (rule.alternate and self.newest[stage] == BACKWARD)
        if self.dice is not None:
            prefer_forward ^= self.dice.random() < 0.2
            if self.dice.random() < 0.1 and self._arrives_within(stage, now, math.inf):
                return -1
        for kind in (FORWARD, BACKWARD) if prefer_forward else (BACKWARD, FORWARD):
            if in_debt and kind == FORWARD:
                return heapq.heappop(weights)[3]
            chosen = self._take(stage, kind)
            if chosen >= 0:
                return chosen
        if not weights:
            return -1
        if rule.patience and self._arrives_within(stage, now, rule.patience * self.graph.durations[weights[0][3]]):
            return -1
        return heapq.heappop(weights)[3]

    def _take(self, stage: int, kind: int) -> int:
        """Take out the best forward or backward that may run on `stage`, or -1."""
        choices, entering = self.choices[stage][kind], self.entering[stage]
        if kind == BACKWARD and choices and self.leading.get((stage, choices[0][2] // self.size)):
            return -1
        if entering and self.graph.kinds[entering[0][1]] == kind and self._admits(stage, entering[0][0]):
            k, i = entering[0]
            if not choices or (k // self.rule.window, self.graph.numbers[i], k, i) < choices[0]:
                return heapq.heappop(entering)[1]
        return heapq.heappop(choices)[3] if choices else -1

    def _admits(self, stage: int, k: int) -> bool:
        visitors, admitted, flying = self.graph.visitors[stage], self.admitted[stage], self.flying[stage]
        if visitors[admitted] != k or flying >= self.rule.limits[stage] or self.open[stage] >= self.ahead[stage]:
            return False
        if self.rule.forwards_first and flying:
            return visitors[admitted - 1] // self.size == k // self.size
        return True

    def _arrives_within(self, stage: int, now: float, seconds: float) -> bool:
        """Whether a forward or backward that may then run is known to be ready within `seconds`."""
        coming = self.coming[stage]
        while coming and coming[0][0] <= now:
            heapq.heappop(coming)
        if not coming or coming[0][0] >= now + seconds:
            return False
        i = coming[0][1]
        return bool(self.turn[i]) and (not self.graph.first[i] or self._admits(stage, self.graph.microbatches[i]))

    def _start(self, i: int, now: float) -> None:
        """Run node i as soon as it and its stage are free, not before `now`: the stage may have waited."""
        graph = self.graph
        stage, k, kind = graph.stages[i], graph.microbatches[i], graph.kinds[i]
        start = self.starts[i] = max(now, self.free[stage], self.ready[i])
        end = self.free[stage] = start + graph.durations[i]
        self.rows[stage].append(i)
        heapq.heappush(self.events, (end, stage, -1))
        if kind == WEIGHT:
            self.owed[stage] -= 1
        else:
            self.newest[stage] = kind
            self.owed[stage] += self.graph.has_weight[i]
        if graph.first[i]:
            self.admitted[stage] += 1
            self.flying[stage] += 1
            self.open[stage] += 1
            self.most[stage] = max(self.most[stage], self.flying[stage])
        self.left[stage][k] -= 1
        if graph.last[i]:
            self.open[stage] -= 1
        if not self.left[stage][k]:
            self.flying[stage] -= 1  # the stage chooses again only when this node has ended
        if self.leading and graph.lead[i]:
            self.leading[stage, k // self.size] -= 1
        later = graph.after[i]
        if later >= 0:
            self.turn[later] = 1
            self._offer(later)
        for j in graph.follow[i]:
            self._send(j, end)
        for j, late in graph.sends[i]:
            self._send(j, start + late)

    def _send(self, j: int, when: float) -> None:
        """Something that node j waits for will be there at `when`."""
        self.ready[j] = max(self.ready[j], when)
        self.missing[j] -= 1
        if not self.missing[j]:
            stage = self.graph.stages[j]
            heapq.heappush(self.events, (self.ready[j], stage, j))
            if (self.rule.patience or self.dice) and self.graph.kinds[j] != WEIGHT:
                heapq.heappush(self.coming[stage], (self.ready[j], j))
