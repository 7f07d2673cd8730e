"""What is made of the times of a comparison. Pure.

Both sides run block by block in turn. A round gives one ratio, ours / theirs, of blocks that ran right after one
another, so that what slows the whole machine for a while cancels out.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DRAWS = 2000


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios, and the interval in which it lies with 95 % confidence."""

    value: float
    low: float
    high: float

    def reaches(self, limit: float) -> bool:
        """Whether the measurement is compatible with a ratio of at most `limit`."""
        return self.low <= limit

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """`ours[i] / theirs[i]` over all rounds: the median and its bootstrap interval (always the same draws)."""
    assert len(ours) == len(theirs) and ours
    ratios = [a / b for a, b in zip(ours, theirs)]
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return Ratio(statistics.median(ratios), medians[int(0.025 * DRAWS)], medians[int(0.975 * DRAWS) - 1])
