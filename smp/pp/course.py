"""One program's way through a step: what it notes for a plan, or where a plan makes it stop.

NOTING      no plan yet: everything is noted, the turn passes on at the first backward
PLANNED     the turn passes on at the plan's stops; a program that does something else is parked there
FREE        no stops
"""

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING

from smp.pp.journal import EVERYBODY, Edge, EdgeKind, Journal, Work
from smp.pp.segments import Cut

if TYPE_CHECKING:
    from smp.pp.program import Program


class _Stops(enum.Enum):
    AT_BACKWARD = enum.auto()
    PLANNED = enum.auto()
    NONE = enum.auto()


class Course:
    """See the module's docstring. `journal` is None where nothing is noted."""

    def __init__(self, program: "Program") -> None:
        self._program = program
        self.journal: Journal | None = None
        self._backwards: dict[int, Work] = {}  # noted in the forward, by the id of their node
        self._how = _Stops.AT_BACKWARD
        self._cut: Cut | None = None
        self._stops: Iterator[int] = iter(())
        self._next_stop: int | None = None
        self._edge = -1

    @property
    def planned(self) -> bool:
        """Whether the program follows a plan."""
        return self._how is _Stops.PLANNED

    def follow(self, cut: Cut) -> None:
        """Stop where `cut` says, as long as the program does what it did when that was made."""
        self._how, self._cut = _Stops.PLANNED, cut
        self._stops = iter(cut.stops[self._program.rank])
        self._next_stop = next(self._stops, None)

    def leave_plan(self) -> None:
        """Run on without stops."""
        self._how, self._cut = _Stops.NONE, None

    def meet(self, kind: EdgeKind, source: int = EVERYBODY, dest: int = EVERYBODY, nbytes: int = 0) -> None:
        """Called on every rank ahead of every edge, where the turn may pass on."""
        index = self._edge = self._edge + 1
        program = self._program
        at_backward = kind is EdgeKind.BACKWARD and self._how is _Stops.AT_BACKWARD
        if self.journal is not None:
            program.step.watch_state(program.index, at_backward)
            if kind is not EdgeKind.STRUCTURE:  # only some will be there in later steps: see `structure_sent`
                self.journal.append(Edge(kind, source, dest, nbytes))
        if self._how is not _Stops.PLANNED:
            if at_backward:
                program.step.turns.pause(program)
            return
        assert self._cut is not None
        expected = self._cut.edges[index] if index < len(self._cut.edges) else None
        if expected is None or expected.kind is not kind or expected.source != source or expected.dest != dest:
            program.step.turns.park(program)
        elif index == self._next_stop:
            self._next_stop = next(self._stops, None)
            program.step.turns.pause(program)

    # Notes

    def called(self, owner: int, forward: float) -> None:
        """A call runs on its stage and nominally takes `forward` seconds."""
        assert self.journal is not None
        self.journal.append(Work(owner, forward))

    def structure_sent(self, owner: int) -> None:
        """A call's owner tells the structure of its result, as it will in every step."""
        if self.journal is not None:
            self.journal.append(Edge(EdgeKind.STRUCTURE, owner))

    def will_run_backward(self, node: object, work: Work) -> None:
        """The backward of that node, should it run, is this work."""
        self._backwards[id(node)] = work

    def runs_backward(self, node: object, owner: int) -> None:
        """The backward of that node runs."""
        if self.journal is not None:
            self.journal.append(self._backwards.pop(id(node), Work(owner, 0.0)))
