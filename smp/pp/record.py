"""What a rank did during a step, as spans of time. The engine adds spans while a timeline is active.

Who records what:

    FORWARD, BACKWARD, WEIGHT   one span per action of the plan; those of a rank do not overlap
    WAIT                        the receiver of a message, inside or between actions: from when it wants the message to
                                when it has it (about nothing when it has come already); `peer` is the sender
    MOVE                        the sender of a message: from posting it to going on; `peer` is the receiver

A MOVE and its WAIT carry the same microbatch and name: k-th meets k-th.
"""

import enum
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from smp.pp.schedule import Action

if TYPE_CHECKING:
    from smp.pp.simulate import Plan


class SpanKind(enum.Enum):
    """What a span's time was spent on."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"
    WAIT = "wait"
    MOVE = "move"


class Span(NamedTuple):
    """A stretch of time on one rank.

    Attributes:
        microbatch, segment: as in `smp.pp.schedule.Action`; of a move, those of the action that it belongs to.
        begin, end: seconds of `time.perf_counter` on this host.
        name: what was moved or waited for.
        peer: stage at the other end of a message, -1 where there is none.
        nbytes: size of the message.
    """

    kind: SpanKind
    microbatch: int
    segment: int
    begin: float
    end: float
    name: str = ""
    peer: int = -1
    nbytes: int = 0


@dataclass(frozen=True)
class StepRecord:
    """One step on one rank, as it was run.

    Attributes:
        spans: what the rank did, in the order in which it ended.
        plan: what the whole pipeline had planned; None for a step without a plan.
    """

    spans: tuple[Span, ...]
    plan: "Plan | None" = None

    @property
    def actions(self) -> list[Span]:
        """The spans of forward, backward and weight actions, in order."""
        return [span for span in self.spans if span.kind not in (SpanKind.WAIT, SpanKind.MOVE)]


class Measured(NamedTuple):
    """How long an action took on a rank, in seconds, without its waits."""

    action: Action
    seconds: float


class Recorder:
    """Collects the spans of one rank, in the order in which they end, and cuts them into steps.

    Attributes:
        spans: of the step that runs.
        steps: those that have ended.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.steps: list[StepRecord] = []
        self._microbatch = self._part = 0
        self._began = 0.0

    def add(
        self,
        kind: SpanKind,
        microbatch: int,
        segment: int,
        begin: float,
        end: float,
        name: str = "",
        peer: int = -1,
        nbytes: int = 0,
    ) -> None:
        """Add a span; see `Span` for the arguments."""
        self.spans.append(Span(kind, microbatch, segment, begin, end, name, peer, nbytes))

    # Without stages a program runs from its begin to its end, and only its backwards are marked.

    def begin_microbatch(self, microbatch: int) -> None:
        """Its forward begins."""
        self._microbatch, self._began = microbatch, time.perf_counter()
        self._part = 0

    def begin_backward(self) -> None:
        """A backward of the current microbatch begins: what was until now was its forward."""
        self._turn_over(SpanKind.FORWARD)

    def end_backward(self) -> None:
        """The backward has ended."""
        self._turn_over(SpanKind.BACKWARD)
        self._part += 1

    def end_microbatch(self) -> None:
        """The program of the current microbatch has ended."""
        self._turn_over(SpanKind.FORWARD)

    def _turn_over(self, kind: SpanKind) -> None:
        now = time.perf_counter()
        self.add(kind, self._microbatch, self._part, self._began, now)
        self._began = now

    def end_step(self, plan: "Plan | None" = None) -> None:
        """The spans since the last step make up one."""
        self.steps.append(StepRecord(tuple(self.spans), plan))
        self.spans.clear()

    def drop_step(self) -> None:
        """The step has failed: what was recorded of it is forgotten."""
        self.spans.clear()
