"""Draws recorded steps as stages x time, planned above measured."""

from collections.abc import Sequence
from typing import Any

from smp.errors import UsageError
from smp.pp.record import Span, SpanKind
from smp.pp.trace_events import LETTERS, Track, arrows, begin_of, label, planned_spans

_COLOURS = {
    SpanKind.FORWARD: "#7fb3d5",
    SpanKind.BACKWARD: "#7dcea0",
    SpanKind.WEIGHT: "#f7dc6f",
    SpanKind.WAIT: "#bdbdbd",
    SpanKind.MOVE: "#a04000",
}
_NARROWEST_LABEL = 0.012  # of the width of the picture


def require_matplotlib() -> None:
    """Raises `UsageError` that says how to get matplotlib when it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "a picture of the timeline needs matplotlib, which is not installed: pip install 'smp-runtime[bench]' (or "
            "save a .json file, which needs nothing)."
        ) from error


def draw(tracks: Sequence[Track], path: str) -> None:
    """Writes a picture of all steps of all ranks, a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = range(max(len(track.steps) for track in tracks))
    begins = [begin_of(tracks, step) for step in steps]
    planned = [[s for step in steps for s in planned_spans(track, step, begins[step])] for track in tracks]
    measured = [[span for record in track.steps for span in record.spans] for track in tracks]
    spread = _length(measured)
    # Estimated seconds may be far from real ones; the order can still be seen.
    is_far = any(planned) and not 0.5 <= _length(planned) / max(spread, 1e-9) <= 2.0

    figure = Figure(figsize=(14, 2.4 + 0.9 * len(tracks)), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=not is_far)
    for axes, rows in ((above, planned), (below, measured)):
        width = _length(rows) if is_far else max(spread, _length(planned))
        for row, spans in enumerate(rows):
            _draw_row(axes, row, spans, begins[0], max(width, 1e-9))
        axes.set_yticks(range(len(tracks)), [track.name for track in tracks])
        axes.set_ylim(len(tracks) - 0.5, -0.5)
        axes.set_xlim(0.0, 1e3 * max(width, 1e-9))
    for arrow in arrows(tracks):
        begin, end = arrow.sent.begin, max(arrow.awaited.end, arrow.sent.begin)
        below.annotate(
            "",
            (1e3 * (end - begins[0]), arrow.dest),
            (1e3 * (begin - begins[0]), arrow.source),
            arrowprops={"arrowstyle": "->", "color": _COLOURS[SpanKind.MOVE], "linewidth": 0.6, "alpha": 0.7},
        )
    above.set_title(_title("planned", planned, is_far), loc="left")
    below.set_title(_title("measured", measured, False), loc="left")
    below.set_xlabel("milliseconds")
    _legend(above)
    figure.savefig(path, dpi=120)


def _draw_row(axes: Any, row: int, spans: Sequence[Span], first: float, width: float) -> None:
    """The actions of one rank as boxes with their names, its waits over them, names where there is room."""
    for kind, colour in _COLOURS.items():
        if kind is not SpanKind.MOVE:
            boxes = [(1e3 * (s.begin - first), 1e3 * (s.end - s.begin)) for s in spans if s.kind is kind]
            edge = {} if kind is SpanKind.WAIT else {"edgecolor": "white", "linewidth": 0.5}
            axes.broken_barh(boxes, (row - 0.4, 0.8), facecolor=colour, **edge)
    waits = [span for span in spans if span.kind is SpanKind.WAIT]
    for span in spans:
        if span.kind in LETTERS:
            begin = max([span.begin, *(w.end for w in waits if span.begin <= w.begin and w.end <= span.end)])
            if span.end - begin > _NARROWEST_LABEL * width:
                middle = 1e3 * ((begin + span.end) / 2 - first)
                axes.text(middle, row, label(span), ha="center", va="center", fontsize=7, clip_on=True)


def _length(rows: Sequence[Sequence[Span]]) -> float:
    """Seconds from the first begin to the last end."""
    spans = [span for row in rows for span in row]
    return max((s.end for s in spans), default=0.0) - min((s.begin for s in spans), default=0.0)


def _title(what: str, rows: Sequence[Sequence[Span]], is_far: bool) -> str:
    if not any(rows):
        return f"{what}: nothing, the step was run without a plan"
    return f"{what}: {1e3 * _length(rows):.1f} ms" + (", on a scale of its own" if is_far else "")


def _legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=kind.value) for kind, colour in _COLOURS.items()]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles), frameon=False)
