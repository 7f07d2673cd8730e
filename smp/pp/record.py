"""What a rank did during a step, as spans of time. Pure: the engine adds spans while a timeline is active.

Who records what:

    FORWARD, BACKWARD, WEIGHT   one span per action of the plan; those of a rank do not overlap
    WAIT                        the receiver of a message, inside or between actions: from when it wants the message to
                                when it has it (about nothing when it has come already); `peer` is the sender
    MOVE                        the sender of a message: from posting it to going on; `peer` is the receiver

A MOVE and its WAIT carry the same microbatch and name: k-th meets k-th.
"""

import enum
from typing import NamedTuple


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


class Recorder:
    """Collects the spans of one rank, in the order in which they end."""

    __slots__ = ("spans",)

    def __init__(self) -> None:
        self.spans: list[Span] = []

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
