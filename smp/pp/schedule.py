"""The order in which a rank works on microbatches, as a list of typed actions with a text form.

An action gives the turn to one microbatch's program until it stands at its next pause:

    F k   from the start of the step function to its first backward (or to its end)
    B k   from there to the end of the step function

Until plans are simulated, ranks use the phase order: all forwards of a window in order, then all their backwards in
order. Every rank of the pipeline group runs the same list, so no two ranks can wait for each other.

    active = 2, 4 microbatches:   F0 F1 B0 B1 F2 F3 B2 B3
"""

import enum
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from smp.errors import StepError


class ActionKind(enum.Enum):
    """What the turn is given for."""

    FORWARD = "F"
    BACKWARD = "B"


class Action(NamedTuple):
    """One turn: `F3` runs microbatch 3 up to its backward."""

    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


def phase_order(num_microbatches: int, active_microbatches: int) -> list[Action]:
    """All forwards, then all backwards, in windows of at most `active_microbatches` microbatches."""
    actions: list[Action] = []
    for start in range(0, num_microbatches, active_microbatches):
        window = range(start, min(start + active_microbatches, num_microbatches))
        actions += [Action(ActionKind.FORWARD, k) for k in window]
        actions += [Action(ActionKind.BACKWARD, k) for k in window]
    return actions


def to_text(actions: Iterable[Action]) -> str:
    """`F0 F1 B0 B1`."""
    return " ".join(str(action) for action in actions)


def from_text(text: str) -> list[Action]:
    """The inverse of `to_text`. Raises `StepError` on anything that is no action."""
    actions = []
    for word in text.split():
        match = re.fullmatch(r"([FB])(\d+)", word)
        if match is None:
            raise StepError(f"'{word}' is no action; an action is F or B and a microbatch number, such as F0 or B3.")
        actions.append(Action(ActionKind(match[1]), int(match[2])))
    return actions


def validate(actions: Sequence[Action], num_microbatches: int, active_microbatches: int) -> None:
    """Check that each microbatch runs forward once and then backward once, with at most `active_microbatches` in
    flight.

    Raises `StepError` with the action list and a mark under the action that is wrong.
    """
    started: set[int] = set()
    ended: set[int] = set()
    for position, (kind, microbatch) in enumerate(actions):
        problem = ""
        if microbatch >= num_microbatches:
            problem = f"there are {num_microbatches} microbatches"
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
