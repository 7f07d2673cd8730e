"""From what a program did to what a planner can order: segments of work between two waits.

       journal          stage 0             stage 1
    Work(0)             F0 |  embed
    MOVE 0 -> 1            |  send          F0 |  (waits)
    Work(1)                                    |  head, loss
    BACKWARD            ...............     ...........
    Work(1)                                 B0 |  backward
    GRADIENT 1 -> 0     B0 |  (waits)          |  send
    Work(0)                |  backward

A stage's program of one microbatch is cut where the stage waits for a message, and at the first backward. A piece in
which it does nothing but follow the program is joined to the next one.
"""

from dataclasses import dataclass, field

from smp.pp.journal import EVERYBODY, Edge, EdgeKind, Journal, Work
from smp.pp.schedule import ActionKind
from smp.pp.simulate import Message, ProgramCost, Segment


@dataclass(frozen=True)
class Cut:
    """One microbatch's program, cut. `stops[stage]` are the edges (counted in the journal) at which the turns of that
    stage end, ascending; its last turn ends with the program. `edges` are the journal's, to hold later steps against.
    """

    cost: ProgramCost
    stops: tuple[tuple[int, ...], ...]
    edges: tuple[Edge, ...]


@dataclass
class _Piece:
    position: int  # in the journal, where its last wait stands
    kind: ActionKind
    waits: list[int] = field(default_factory=list)
    sends: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    weight: float = 0.0
    works: bool = False


def cut(journal: Journal, num_stages: int) -> Cut:
    """Segments, messages and stops of a program on all stages."""
    edges = tuple(item for item in journal if isinstance(item, Edge))
    messages: list[Message] = []
    ids: dict[int, dict[int, int]] = {}  # position in the journal -> receiving stage -> message
    for position, item in enumerate(journal):
        if isinstance(item, Edge) and item.kind is not EdgeKind.BACKWARD:
            dests = [item.dest] if item.dest != EVERYBODY else [s for s in range(num_stages) if s != item.source]
            ids[position] = {dest: len(messages) + offset for offset, dest in enumerate(dests)}
            messages += [Message(item.source, dest, item.nbytes) for dest in dests]
    segments: list[tuple[int, Segment]] = []
    stops: list[tuple[int, ...]] = []
    for stage in range(num_stages):
        pieces, stage_stops = _pieces(journal, ids, stage)
        stops.append(stage_stops)
        for piece in pieces:
            segment = Segment(
                stage,
                piece.kind,
                piece.seconds,
                tuple(piece.waits),
                tuple(piece.sends),
                min(piece.weight, piece.seconds),
            )
            segments.append((piece.position, segment))
    segments.sort(key=lambda pair: (pair[0], pair[1].stage))
    return Cut(ProgramCost(tuple(segment for _, segment in segments), tuple(messages)), tuple(stops), edges)


def _pieces(journal: Journal, ids: dict[int, dict[int, int]], stage: int) -> tuple[list[_Piece], tuple[int, ...]]:
    pieces: list[_Piece] = []
    stops: list[int] = []
    piece = _Piece(-1, ActionKind.FORWARD)
    edge = -1
    for position, item in enumerate(journal):
        if isinstance(item, Work):
            if item.stage == stage:
                piece.seconds += item.seconds
                piece.weight += item.weight
                piece.works = True
            continue
        edge += 1
        awaited = ids.get(position, {}).get(stage)
        if item.kind is EdgeKind.BACKWARD or awaited is not None:
            kind = ActionKind.BACKWARD if item.kind is EdgeKind.BACKWARD else piece.kind
            following = _Piece(position, kind)
            if piece.works:
                pieces.append(piece)
                stops.append(edge)
            else:
                following.waits = piece.waits
            if awaited is not None:
                following.waits = [*following.waits, awaited]
            piece = following
        elif item.source == stage:
            piece.sends += [(message, piece.seconds) for message in ids[position].values()]
            piece.works = True
    if piece.works or piece.waits or not pieces:
        pieces.append(piece)
    else:
        stops.pop()  # nothing is left to do: the last turn that does something runs to the end
    return pieces, tuple(stops)
