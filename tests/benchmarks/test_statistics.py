"""What the benchmark makes of its times, on times made by hand; and that its two sides compute the same."""

import pytest
import torch

from benchmarks import measured, models
from benchmarks.live_bytes import LiveBytes
from benchmarks.run import measure
from benchmarks.statistics import Ratio, paired_ratio
from benchmarks.worlds import Side


def test_what_slows_both_sides_of_a_round_cancels() -> None:
    """A neighbour on the machine would look like a difference between the sides."""
    theirs = [1.0, 1.0, 5.0, 1.0, 3.0, 1.0]
    assert paired_ratio([1.1 * t for t in theirs], theirs) == Ratio(*[pytest.approx(1.1)] * 3)


def test_the_interval_holds_what_varies_and_is_the_same_every_time() -> None:
    """A limit would be called reached, or missed, by chance of the drawing."""
    ours = [0.9, 1.0, 1.1, 1.0, 0.95, 1.05, 1.2, 0.8]
    found = paired_ratio(ours, [1.0] * 8)
    assert found.value == pytest.approx(1.0) and 0.8 < found.low < 1.0 < found.high < 1.2
    assert found == paired_ratio(ours, [1.0] * 8)
    assert found.reaches(0.99) and not found.reaches(0.8)


def test_live_bytes_count_storages_once_and_until_they_are_freed() -> None:
    """The memory row would count views twice, or what is long gone."""
    count = LiveBytes()
    with count:
        a = torch.zeros(10)
        b = a.view(2, 5)[0]
        del a
        assert count.live == 40
        del b
        c = torch.zeros(3, dtype=torch.float64)
        assert (count.live, count.peak) == (24, 40)
        del c
    assert count.live == 0


def test_the_arithmetic_of_a_block_is_what_autograd_keeps() -> None:
    """The memory row would be compared with a wrong sum."""
    sizes = {"vocabulary": 32, "length": 16, "width": 128, "layers": 2}
    blocks = models.gpt(sizes).blocks
    x = torch.randn(3, 16, 128)
    count = LiveBytes()
    for tensor in (x, *blocks.parameters()):
        count.track(tensor)
    before = count.live
    with count:
        y = x.requires_grad_()
        for block in blocks:
            y = block(y)
        kept = count.live - before
    assert kept == pytest.approx(2 * measured.block_bytes(sizes, rows=3), rel=0.01)


@pytest.mark.slow
def test_both_sides_of_the_pipeline_rows_compute_the_same() -> None:
    """The benchmark would compare different work. (It refuses to, by the first losses.)"""
    sizes = {"vocabulary": 64, "length": 8, "width": 32, "layers": 4}
    common = {"sizes": sizes, "batch": 8, "microbatches": 4}
    ours = [
        Side(split, "benchmarks.ours:pipeline", {**common, "stages": 2, "split": split, "config": {}}, 2, "mpi")
        for split in ("hand", "auto")
    ]
    theirs = [
        Side(schedule, "benchmarks.theirs:pipeline", {**common, "schedule": schedule})
        for schedule in ("Schedule1F1B", "ScheduleZBVZeroBubble", "ScheduleInterleaved1F1B")
    ]
    blocks = measure([*ours, *theirs], steps=1, rounds=2, same_losses=True)
    assert all(len(found) == 2 for found in blocks.values())
