"""Cutting a sequence of costs into contiguous parts: arithmetic, without modules.

The design splits the children of a node among stages by quotients, recurses, and improves the result at leaf level. The
best cut of the leaves is found exactly and in less time, so that is what is done: among the cuts whose largest load is
within a tolerance of the smallest possible one, the one that is torn least.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Placement = Literal["loop", "v"]


def stage_of_chunk(chunk: int, num_stages: int, placement: Placement) -> int:
    """Where a chunk of the model lies when each stage has several.

    "loop": 0 1 2 0 1 2 ..; "v": 0 1 2 2 1 0 0 1 .., so that the last and the first chunk may share a stage.
    """
    turn, place = divmod(chunk, num_stages)
    return num_stages - 1 - place if placement == "v" and turn % 2 else place


@dataclass(frozen=True)
class Sequel:
    """Items in execution order.

    Attributes:
        costs: of the items.
        penalties: of a cut before each item (the first one's is not used); smaller is better. Whole numbers count torn
            modules, fractions tell apart what tears equally.
    """

    costs: tuple[float, ...]
    penalties: tuple[float, ...]


def contiguous(
    costs: Sequence[float],
    num_parts: int,
    base: Sequence[float] | None = None,
    penalties: Sequence[float] | None = None,
    limit: float = 0.0,
) -> list[int]:
    """The part of each item when the sequence is cut into contiguous parts whose largest load is smallest.

    No part without a load of its own is left empty while there are items enough. Any largest load up
    to `limit` counts as the smallest; among such cuts that with the smallest sum of penalties is taken, then the most
    even one.

    Args:
        costs: of the items, in order.
        num_parts: how many parts.
        base: what each part carries already. None: nothing.
        penalties: of a cut before each item. None: none.
        limit: see above.
    """
    if not costs:
        return []
    problem = _problem(costs, num_parts, base, penalties)
    return problem.solve(max(limit, problem.smallest()))


def _problem(
    costs: Sequence[float], num_parts: int, base: Sequence[float] | None, penalties: Sequence[float] | None
) -> "_Cut":
    loads = [0.0] * min(num_parts, len(costs)) if base is None else list(base)
    return _Cut(costs, loads, penalties or [0.0] * len(costs))


class _Cut:
    """Edges e_0 = 0 <= e_1 <= .. <= e_p = n; part k holds the items from e_k to e_(k+1)."""

    def __init__(self, costs: Sequence[float], base: Sequence[float], penalties: Sequence[float]) -> None:
        self.count = len(costs)
        self.base = list(base)
        self.prefix = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
        self.penalties = np.asarray([*penalties, 0.0], dtype=np.float64)
        empty = [index for index, load in enumerate(base) if not load]
        filled = set(empty[: self.count])  # when items are too few, the earlier parts get one
        self.least = [int(index in filled) for index in range(len(self.base))]

    def smallest(self) -> float:
        """The smallest possible largest load."""
        low = 0.0
        high = float(self.prefix[-1]) + max(self.base)
        while True:
            middle = (low + high) / 2
            if not low < middle < high or high - low <= 1e-13 * high:
                return high
            edges = self._furthest(middle)
            if edges is None:
                low = middle
            else:
                high = min(middle, self._largest(edges))

    def _largest(self, edges: list[int]) -> float:
        return max(float(self.prefix[b] - self.prefix[a]) + load for a, b, load in zip(edges, edges[1:], self.base))

    def _furthest(self, limit: float) -> list[int] | None:
        """The edges when each part, from the first, takes all it can; None when the limit cannot be kept."""
        edges, later = [0], sum(self.least)
        for load, least in zip(self.base, self.least, strict=True):
            later -= least
            begin = edges[-1]
            room = float(self.prefix[begin]) + (limit - load)
            end = int(np.searchsorted(self.prefix, room * (1 + 1e-15) + 1e-300, side="right")) - 1
            end = min(end, self.count - later)
            if limit < load or end < begin + least:
                return None
            edges.append(end)
        return edges if edges[-1] == self.count else None

    def _nearest(self, limit: float) -> list[int]:
        """The edges when each part, from the last, takes all it can."""
        edges, earlier = [self.count], sum(self.least)
        for load, least in zip(reversed(self.base), reversed(self.least), strict=True):
            earlier -= least
            room = float(self.prefix[edges[-1]]) - (limit - load)
            begin = int(np.searchsorted(self.prefix, room * (1 - 1e-15) - 1e-300, side="left"))
            edges.append(max(begin, earlier))
        return edges[::-1]

    def solve(self, limit: float) -> list[int]:
        limit *= 1 + 1e-12
        furthest, nearest = self._furthest(limit), self._nearest(limit)
        assert furthest is not None
        total = float(self.prefix[-1]) + sum(self.base) or 1.0
        begins = np.array([0])
        keys = np.array([0.0])
        steps: list[tuple[np.ndarray, np.ndarray]] = []
        for k, load in enumerate(self.base):
            ends = np.arange(max(nearest[k + 1], 0), furthest[k + 1] + 1)
            best = np.full(len(ends), np.inf)
            chosen = np.zeros(len(ends), dtype=np.int64)
            for index, end in enumerate(ends.tolist()):
                loads = self.prefix[end] - self.prefix[begins] + load
                key = keys + 0.25 * (loads / total) ** 2
                key[(loads > limit) | (begins > end - self.least[k])] = np.inf
                chosen[index] = begins[int(np.argmin(key))]
                best[index] = key.min()
            inner = (ends > 0) & (ends < self.count)
            begins, keys = ends, best + np.where(inner, self.penalties[ends], 0.0)
            steps.append((ends, chosen))
        parts = [0] * self.count
        end = self.count
        for k in range(len(self.base) - 1, -1, -1):
            ends, chosen = steps[k]
            begin = int(chosen[int(np.searchsorted(ends, end))])
            parts[begin:end] = [k] * (end - begin)
            end = begin
        return parts


def balanced(
    sequel: Sequel,
    num_stages: int,
    chunks_per_stage: int = 1,
    base: Sequence[float] | None = None,
    placement: Placement = "loop",
    tolerance: float = 0.01,
) -> list[int]:
    """The chunk of each item; `stage_of_chunk` says on which stage a chunk lies.

    Modules are torn no deeper than is needed to bring the largest load of a stage within `tolerance` of the smallest
    that can be found.

    Args:
        sequel: the items, at least as many as there are chunks, unless `base` fills stages.
        num_stages, chunks_per_stage: how many chunks there are.
        base: what each stage carries already.
        placement: where chunks lie.
        tolerance: relative.
    """
    stages = [stage_of_chunk(c, num_stages, placement) for c in range(num_stages * chunks_per_stage)]
    loads = None if base is None or not any(base) else [base[stage] / chunks_per_stage for stage in stages]
    single = chunks_per_stage == 1
    limit = _problem(sequel.costs, len(stages), loads, None).smallest() * (1 + tolerance) if single else 0.0
    found: list[tuple[float, list[int]]] = []
    for depth in sorted({int(penalty) for penalty in sequel.penalties[1:]} or {0}):
        chunks = _cut_no_deeper(sequel, depth, stages, loads, limit)
        if chunks is not None:
            found.append((max(_stage_loads(sequel.costs, chunks, stages, base, num_stages)), chunks))
    best = min(load for load, _ in found)
    limit = limit or best * (1 + tolerance)
    return next(chunks for load, chunks in found if load <= limit * (1 + 1e-9))


def _cut_no_deeper(
    sequel: Sequel, depth: int, stages: list[int], loads: list[float] | None, limit: float
) -> list[int] | None:
    """The best cut at places that tear at most `depth` modules; None when these are too few."""
    starts = [i for i, penalty in enumerate(sequel.penalties) if i == 0 or int(penalty) <= depth]
    deepest = max((int(penalty) for penalty in sequel.penalties[1:]), default=0)
    if loads is None and len(starts) < len(stages) and depth < deepest:
        return None
    edges = [*starts, len(sequel.costs)]
    sums = [sum(sequel.costs[a:b]) for a, b in zip(edges, edges[1:])]
    merged = contiguous(sums, len(stages), loads, [sequel.penalties[i] for i in starts], limit)
    if not limit:
        _even_out(sums, merged, stages)
    chunks: list[int] = []
    for chunk, a, b in zip(merged, edges, edges[1:]):
        chunks += [chunk] * (b - a)
    return chunks


def _stage_loads(
    costs: Sequence[float], chunks: Sequence[int], stages: Sequence[int], base: Sequence[float] | None, num_stages: int
) -> list[float]:
    loads = list(base) if base is not None else [0.0] * num_stages
    for cost, chunk in zip(costs, chunks, strict=True):
        loads[stages[chunk]] += cost
    return loads


_PAIRS = 4000  # placements of two edges that are tried at once


def _even_out(costs: Sequence[float], chunks: list[int], stages: list[int]) -> None:
    """Moves edges between chunks, one or two neighbours at a time, as long as that evens out the stages, in place.

    Chunks of one size each are not always possible; stages whose chunks add up to one size often are.
    """
    prefix = [0.0, *itertools.accumulate(costs)]
    edges = [0, *(i for i in range(1, len(chunks)) if chunks[i] != chunks[i - 1]), len(chunks)]
    if len(edges) != len(stages) + 1:
        return  # some chunk is empty
    for _ in range(100):
        loads = [0.0] * (max(stages) + 1)
        for stage, a, b in zip(stages, edges, edges[1:]):
            loads[stage] += prefix[b] - prefix[a]
        best = (1e-9 * sum(load * load for load in loads), edges)
        for first in range(1, len(edges) - 1):
            for width in (1, 2):
                if first + width < len(edges):
                    best = min(
                        best, _best_move(prefix, edges, stages, loads, first, width), key=lambda found: -found[0]
                    )
        if best[1] == edges:
            break
        edges = best[1]
    for chunk, (a, b) in enumerate(itertools.pairwise(edges)):
        chunks[a:b] = [chunk] * (b - a)


def _best_move(
    prefix: list[float], edges: list[int], stages: list[int], loads: list[float], first: int, width: int
) -> tuple[float, list[int]]:
    """By how much the sum of squared loads falls at most when `width` edges from `first` on are moved, and the edges
    then."""
    low, high = edges[first - 1], edges[first + width]
    touched = range(first - 1, first + width)
    without = list(loads)
    for chunk in touched:
        without[stages[chunk]] -= prefix[edges[chunk + 1]] - prefix[edges[chunk]]
    before = sum(load * load for load in loads)
    best = (0.0, edges)
    if width == 2 and (high - low) ** 2 > 2 * _PAIRS:
        return best
    for inner in itertools.combinations(range(low + 1, high), width):
        bounds = (low, *inner, high)
        now = list(without)
        for chunk, a, b in zip(touched, bounds, bounds[1:]):
            now[stages[chunk]] += prefix[b] - prefix[a]
        fall = before - sum(load * load for load in now)
        if fall > best[0]:
            best = (fall, [*edges[:first], *inner, *edges[first + width :]])
    return best
