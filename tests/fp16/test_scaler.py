"""The loss scale as a state machine, against tables made by hand."""

from typing import Any

import pytest

from smp.errors import CheckpointError, UsageError
from smp.fp16.scaler import LossScaler, make_scaler

# arguments, then one row for each step: o overflow, . good; the scale after it.
TABLES: dict[str, tuple[dict[str, Any], str, list[float]]] = {
    "falls at every overflow, grows after a window of good steps": (
        {"init_scale": 2**16, "scale_window": 4},
        "o....o.",
        [2**15, 2**15, 2**15, 2**15, 2**16, 2**15, 2**15],
    ),
    "an overflow begins the window anew": (
        {"init_scale": 8, "scale_window": 2},
        "..o.o..",
        [8, 16, 8, 8, 4, 4, 8],
    ),
    "windows follow each other": ({"init_scale": 1, "scale_window": 2}, "......", [1, 2, 2, 4, 4, 8]),
    "stays above the smallest": ({"init_scale": 8, "min_scale": 2}, "oooo.", [4, 2, 2, 2, 2]),
    "stays below the largest": ({"scale_window": 1}, "..o.", [2**32, 2**32, 2**31, 2**32]),
    "its own factor": ({"init_scale": 64, "scale_factor": 4, "scale_window": 1}, "oo.", [16, 4, 16]),
    "the second overflow counts, though a good step lies between": (
        {"init_scale": 16, "delayed_shift": 2, "scale_window": 100},
        "o.ooo",
        [16, 16, 8, 4, 2],
    ),
    "consecutive: only the second one in a row counts": (
        {"init_scale": 16, "delayed_shift": 2, "scale_window": 100, "consecutive_hysteresis": True},
        "o.oo.oo",
        [16, 16, 16, 8, 8, 8, 4],
    ),
    "growing gives the delay back": (
        {"init_scale": 16, "delayed_shift": 2, "scale_window": 2},
        "oo..ooo",
        [16, 8, 8, 16, 16, 8, 4],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_scale_follows_the_table(name: str) -> None:
    """A failure means that two jobs with the same overflows train with different scales."""
    arguments, steps, expected = TABLES[name]
    scaler = make_scaler(None, True, arguments)
    scales = []
    for step in steps:
        scaler.update(step == "o")
        scales.append(scaler.loss_scale)
    assert scales == expected


def test_it_starts_where_scripts_expect_it() -> None:
    """The documented defaults."""
    dynamic = make_scaler(None, True, None)
    assert (dynamic.scale, dynamic.scale_factor, dynamic.scale_window, dynamic.min_scale) == (2**32, 2, 1000, 1)
    assert (dynamic.delayed_shift, dynamic.consecutive_hysteresis) == (1, False)
    assert make_scaler(None, False, None).scale == 1.0
    assert make_scaler(128.0, False, {"init_scale": 4}).scale == 128.0


def test_a_static_scale_stays() -> None:
    """Whatever happens; it says that it is stuck after twenty skips in a row."""
    scaler = make_scaler(2.0**40, False, None)
    stuck = []
    for _ in range(20):
        scaler.update(True)
        stuck.append(scaler.is_stuck)
    assert scaler.scale == 2.0**40
    assert stuck == [False] * 19 + [True]


def test_it_is_stuck_only_when_skips_repeat_at_the_smallest_scale() -> None:
    """An honest start at 2**32 skips many steps, and one overflow at the smallest scale may happen."""
    scaler = make_scaler(None, True, {"init_scale": 4})
    stuck = []
    for step in "ooo.oo":
        scaler.update(step == "o")
        stuck.append(scaler.is_stuck)
    assert stuck == [False, False, False, False, False, True]
    assert scaler.skips == 2


@pytest.mark.parametrize("cut", range(8))
def test_it_continues_from_its_state(cut: int) -> None:
    """A failure means that a resumed run has other scales than an unbroken one."""
    arguments = {"init_scale": 64, "delayed_shift": 2, "scale_window": 2}
    unbroken, before, after = (make_scaler(None, True, arguments) for _ in range(3))
    steps = [step == "o" for step in "o.oo..o"]
    for overflow in steps:
        unbroken.update(overflow)
    for overflow in steps[:cut]:
        before.update(overflow)
    after.load_state_dict(before.state_dict())
    for overflow in steps[cut:]:
        after.update(overflow)
    assert after == unbroken


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"initial_scale": 4}, "initial_scale.*init_scale"),
        ({"scale_factor": 1.0}, "scale_factor must be a finite number above 1, got 1.0"),
        ({"scale_window": 0}, "scale_window"),
        ({"min_scale": 0.0}, "min_scale"),
        ({"init_scale": 1, "min_scale": 2.0}, "init_scale"),
        ({"delayed_shift": 0}, "delayed_shift"),
        ({"scale_window": 2.5}, "scale_window must be a whole number"),
        ({"init_scale": "2"}, "init_scale must be a finite number above 0, got '2'"),
        ({"min_scale": None, "scale_factor": float("inf")}, "min_scale .* got None; scale_factor .* got inf"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any], names: str) -> None:
    """A scale of 0, or one that never moves, would only show as a run that does not learn."""
    with pytest.raises(UsageError, match=names):
        make_scaler(None, True, arguments)


def test_a_wrong_static_scale_or_state_is_refused() -> None:
    """By name."""
    with pytest.raises(UsageError, match="static_loss_scale must be a finite number above 0, got 0"):
        make_scaler(0, False, None)
    with pytest.raises(CheckpointError, match="hysteresis"):
        LossScaler(1.0).load_state_dict({"scale": 4.0})
