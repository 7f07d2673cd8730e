"""Programs for the planner's tests: chains, virtual stages, random walks; an exhaustive search; blocking ranks."""

import random
from collections.abc import Sequence
from dataclasses import replace

from smp.pp.schedule import Action, ActionKind
from smp.pp.simulate import Message, ProgramCost, Segment

FORWARD, BACKWARD, WEIGHT = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT


def path(
    stages: Sequence[int],
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    trains: bool = True,
) -> ProgramCost:
    """A program that visits `stages` in this order and, if it trains, back again.

    `forward`, `backward` (input gradients) and `weight` are seconds per visit.
    """
    steps = [(stage, FORWARD, forward[i], 0.0) for i, stage in enumerate(stages)]
    if trains:
        steps += [(s, BACKWARD, backward[i] + weight[i], weight[i]) for i, s in reversed(list(enumerate(stages)))]
    segments: list[Segment] = []
    messages: list[Message] = []
    waits: tuple[int, ...] = ()
    for i, (stage, kind, duration, late) in enumerate(steps):
        leaves = i + 1 < len(steps) and steps[i + 1][0] != stage
        sends = ((len(messages), float(duration)),) if leaves else ()
        segments.append(Segment(stage, kind, float(duration), waits, sends, float(late)))
        waits = (len(messages),) if leaves else ()
        if leaves:
            messages.append(Message(stage, steps[i + 1][0], 8))
    return ProgramCost(tuple(segments), tuple(messages))


def chain(
    num_stages: int, forward: float = 1, backward: float = 2, weight: float = 0, trains: bool = True
) -> ProgramCost:
    """Every stage once, each with the same cost."""
    return virtual(num_stages, 1, forward, backward, weight, trains)


def virtual(
    num_stages: int, chunks: int, forward: float = 1, backward: float = 2, weight: float = 0, trains: bool = True
) -> ProgramCost:
    """Chunk c on stage c % num_stages; the costs are a stage's, shared evenly by its chunks."""
    count = num_stages * chunks
    costs = [[cost / chunks] * count for cost in (forward, backward, weight)]
    return path([c % num_stages for c in range(count)], *costs, trains)


def vee(num_stages: int, forward: float = 1, backward: float = 1, weight: float = 1) -> ProgramCost:
    """Two chunks per stage, placed there and back: the last stage holds two neighbours."""
    count = 2 * num_stages
    costs = [[cost / 2] * count for cost in (forward, backward, weight)]
    return path([*range(num_stages), *reversed(range(num_stages))], *costs)


def random_program(rng: random.Random, num_stages: int) -> ProgramCost:
    """A walk over stages, with branches that are joined later, and the same backwards."""
    count = rng.randint(1, 2 * num_stages + 2)
    stages = [rng.randrange(num_stages) for _ in range(count)]
    trains = rng.random() < 0.85
    # Which earlier segments a segment takes values from: the one before, and sometimes a skip connection.
    inputs = [{i - 1} if i else set() for i in range(count)]
    for i in range(2, count):
        if rng.random() < 0.3:
            inputs[i].add(rng.randrange(i - 1))
    needs = [sorted(j for j in inputs[i] if stages[j] != stages[i]) for i in range(count)]
    kinds = [FORWARD] * count
    if trains:
        for i in reversed(range(count)):  # segment 2 * count - 1 - i is the backward of i
            users = [j for j in range(count) if i in inputs[j] and stages[j] != stages[i]]
            needs.append(sorted(2 * count - 1 - j for j in users))
        kinds += [BACKWARD] * count
        stages += stages[::-1]
    return _with_messages(rng, stages, kinds, needs)


def joined(first: ProgramCost, second: ProgramCost) -> ProgramCost:
    """One program after the other in the same microbatch: forwards that come after a backward."""
    shift = len(first.messages)
    moved = [
        replace(
            segment,
            waits=tuple(message + shift for message in segment.waits),
            sends=tuple((message + shift, offset) for message, offset in segment.sends),
        )
        for segment in second.segments
    ]
    return ProgramCost((*first.segments, *moved), first.messages + second.messages)


def _with_messages(
    rng: random.Random, stages: Sequence[int], kinds: Sequence[ActionKind], needs: Sequence[Sequence[int]]
) -> ProgramCost:
    durations = [rng.choice([0.0, 0.5, 1.0, rng.random(), 3.0]) for _ in stages]
    messages: list[Message] = []
    waits: list[tuple[int, ...]] = []
    sends: list[list[tuple[int, float]]] = [[] for _ in stages]
    for i, sources in enumerate(needs):
        ids = []
        for j in sources:
            ids.append(len(messages))
            sends[j].append((len(messages), durations[j] * rng.choice([0.0, 0.5, 1.0])))
            messages.append(Message(stages[j], stages[i], rng.randint(0, 100)))
        waits.append(tuple(ids))
    segments = [
        Segment(
            stages[i],
            kinds[i],
            durations[i],
            waits[i],
            tuple(sends[i]),
            durations[i] * rng.choice([0.0, 0.4]) if kinds[i] is BACKWARD else 0.0,
        )
        for i in range(len(stages))
    ]
    return ProgramCost(tuple(segments), tuple(messages))


# -- the best there is -------------------------------------------------------------------------------------------------


def least_step_time(program: ProgramCost, num_microbatches: int, num_stages: int, active: int) -> float:
    """The least step time over all orders, by exhaustive search (messages take no time, no W).

    Layer by layer over the sets of actions that have run; of two ways to the same set, one that is later in no stage
    and for no message is enough.
    """
    streams: dict[tuple[int, ActionKind, int], int] = {}
    names: list[tuple[int, ActionKind, int]] = []
    counts: dict[tuple[int, ActionKind], int] = {}
    for segment in program.segments:
        number = counts[segment.stage, segment.kind] = counts.get((segment.stage, segment.kind), -1) + 1
        names.append((segment.stage, segment.kind, number))
        streams[names[-1]] = len(streams)
    size = len(names)  # stream i is segment i: microbatches pass it in ascending order
    visits = {s: [i for i in range(size) if names[i][0] == s] for s in range(num_stages)}
    sender = {message: i for i, segment in enumerate(program.segments) for message, _ in segment.sends}

    def allowed(done: tuple[int, ...], i: int) -> bool:
        k = done[i]
        if k == num_microbatches:
            return False
        here = visits[names[i][0]]
        place = here.index(i)
        if place and done[here[place - 1]] <= k:
            return False
        if any(done[sender[message]] <= k for message in program.segments[i].waits):
            return False
        return place > 0 or done[here[0]] - done[here[-1]] < active

    # A state's times: when each stage is free, then when each message of a microbatch that still waits is there.
    layer: dict[tuple[int, ...], list[tuple[dict[object, float], None]]]
    layer = {(0,) * size: [(dict.fromkeys(range(num_stages), 0.0), None)]}
    for _ in range(size * num_microbatches):
        following: dict[tuple[int, ...], list[tuple[dict[object, float], None]]] = {}
        for done, ways in layer.items():
            for i in range(size):
                if not allowed(done, i):
                    continue
                after = (*done[:i], done[i] + 1, *done[i + 1 :])
                for times, _ in ways:
                    new = dict(times)
                    segment = program.segments[i]
                    start = max([new[segment.stage], *(new.pop((m, done[i])) for m in segment.waits)])
                    new[segment.stage] = start + segment.duration
                    for message, offset in segment.sends:
                        new[message, done[i]] = start + offset
                    kept = following.setdefault(after, [])
                    if not any(all(old[key] <= new[key] for key in new) for old, _ in kept):
                        kept[:] = [way for way in kept if not all(new[key] <= way[0][key] for key in new)]
                        kept.append((new, None))
        layer = following
    return min(max(times.values()) for ways in layer.values() for times, _ in ways)


# -- ranks that block --------------------------------------------------------------------------------------------------


def blocking_ranks_finish(
    rng: random.Random, rows: Sequence[Sequence[Action]], programs: Sequence[ProgramCost], tp_size: int
) -> bool:
    """Run the lists of all (stage, tensor-parallel) ranks, each blocking, in a random interleaving.

    An action first receives its messages, then takes part in a collective of its stage's ranks, which returns only when
    all of them are at that very action, then sends. False when all that have not ended wait.
    """
    places = [_places(program) for program in programs]
    ranks = [(stage, part) for stage in range(len(rows)) for part in range(tp_size)]
    position = dict.fromkeys(ranks, 0)
    joined: dict[tuple[int, int], set[int]] = {}  # (stage, position) -> parts in the collective
    sent: set[tuple[int, int, int]] = set()  # (microbatch, message, part)
    done: set[tuple[int, int, int]] = set()  # (microbatch, segment, part)
    waiting: set[tuple[int, int]] = set()
    while len(waiting) < len(ranks):
        stage, part = rank = rng.choice([r for r in ranks if r not in waiting])
        at = position[rank]
        if at == len(rows[stage]):
            waiting.add(rank)
            continue
        kind, k, number = rows[stage][at]
        i = places[k][stage, BACKWARD if kind is WEIGHT else kind, number]
        segment = programs[k].segments[i]
        here = [j for j in range(i) if programs[k].segments[j].stage == stage]
        needed = [i] if kind is WEIGHT else here[-1:]
        ready = all((k, j, part) in done for j in needed)
        if kind is not WEIGHT:
            ready = ready and all((k, message, part) in sent for message in segment.waits)
        if not ready:
            waiting.add(rank)
            continue
        parts = joined.setdefault((stage, at), set())
        if part not in parts:
            parts.add(part)
            waiting -= {(stage, other) for other in parts}
        if len(parts) < tp_size:
            waiting.add(rank)
            continue
        position[rank] += 1
        waiting.clear()
        if kind is not WEIGHT:
            done.add((k, i, part))
            sent |= {(k, message, part) for message, _ in segment.sends}
    return all(position[stage, part] == len(rows[stage]) for stage, part in ranks)


def _places(program: ProgramCost) -> dict[tuple[int, ActionKind, int], int]:
    places: dict[tuple[int, ActionKind, int], int] = {}
    for i, segment in enumerate(program.segments):
        number = sum(s.stage == segment.stage and s.kind is segment.kind for s in program.segments[:i])
        places[segment.stage, segment.kind, number] = i
    return places
