"""`smp.timeline`: what every rank did in a step, and when.

with smp.timeline() as timeline:
    train_step(model, x, y)
timeline.save("step.json")        # chrome://tracing or ui.perfetto.dev
timeline.save("step.png")         # stages x time, planned above measured
"""

import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from smp import runtime
from smp.comm.entry import enter_collective
from smp.errors import UsageError
from smp.pp import chart
from smp.pp.record import Recorder, StepRecord
from smp.pp.trace_events import Track, trace_events
from smp.topology import CommGroup

SUFFIXES = (".json", ".png")
_ADVICE = "call it on every rank of a model replica"


class timeline:
    """Records the steps that run inside `with smp.timeline() as t:`.

    Every rank of a model replica (all its stages and tensor-parallel parts) must enter, as every one runs the step;
    other replicas may do without. Inside, a step costs a little more: two clock readings per action and message.
    Without stages, forwards and backwards of microbatches are recorded, which have to run inside a step function.

    Attributes:
        steps: what this rank did, a `StepRecord` per step, in seconds of `time.perf_counter`. A step that raised is
            left out.

    Raises:
        UsageError: there is no DistributedModel yet, or a timeline is active already.
    """

    def __init__(self) -> None:
        self._recorder = Recorder()
        self._origin = 0.0

    @property
    def steps(self) -> list[StepRecord]:
        """What this rank did, step by step."""
        return self._recorder.steps

    def __enter__(self) -> "timeline":
        rt = runtime.get()
        if rt.model is None:
            raise UsageError("smp.timeline records the steps of a model: make the smp.DistributedModel first.")
        if rt.model.engine.recorder is not None:
            raise UsageError("an smp.timeline is active already; they cannot be nested.")
        rt.transport.barrier(rt.group(CommGroup.MP_GROUP), "smp.timeline")
        self._origin = time.perf_counter()
        rt.model.engine.recorder = self._recorder
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        runtime.get().model.engine.recorder = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what all ranks of the replica recorded.

        Collective over the ranks of a model replica (the MP group); the first rank of the first replica writes, other
        replicas do nothing, so that `if smp.rdp_rank() == 0:` around it is as good as no condition. Ranks of one host
        share a clock; hosts are aligned by the moment at which they entered the timeline, to about a millisecond.

        Args:
            path: the suffix decides: `.json` for Chrome's trace viewer, with a track of work, waiting, moves and the
                plan per rank and arrows from moves to waits; `.png` for a picture, which needs matplotlib.

        Raises:
            UsageError: on every rank: another suffix, no step was recorded, matplotlib is missing, the file cannot be
                written.
            CommError: ranks of the replica did not make this call (the error names them).
        """
        path = Path(path)
        if path.suffix not in SUFFIXES:
            raise UsageError(f"a timeline is saved as {' or '.join(SUFFIXES)}, not as '{path}'.")
        if not self.steps:
            raise UsageError("this timeline has recorded no step: run one inside its `with` block before saving.")
        rt = runtime.get()
        if rt.rdp_rank != 0:
            return
        group = rt.group(CommGroup.MP_GROUP)
        enter_collective(rt, "smp.timeline.save", group, _ADVICE)
        mine = (socket.gethostname(), self._origin, rt.pp_rank, rt.tp_rank, rt.rank, self.steps)
        answers = rt.transport.all_gather_object(mine, group, "smp.timeline.save")
        problem = _write(_tracks(answers), path) if group.rank == 0 else ""
        problem = rt.transport.broadcast_object(problem, group, group.ranks[0], "smp.timeline.save")
        if problem:
            raise UsageError(problem)


def _tracks(answers: list[Any]) -> list[Track]:
    """Each rank's steps on one clock, ordered by stage."""
    origins: dict[str, float] = {}
    for host, origin, *_ in answers:
        origins.setdefault(host, origin)
    tracks = [
        Track(stage, part, rank, tuple(_shifted(step, origins[host]) for step in steps))
        for host, _, stage, part, rank, steps in answers
    ]
    return sorted(tracks, key=lambda track: (track.stage, track.part))


def _shifted(step: StepRecord, origin: float) -> StepRecord:
    spans = tuple(span._replace(begin=span.begin - origin, end=span.end - origin) for span in step.spans)
    return StepRecord(spans, step.plan)


def _write(tracks: list[Track], path: Path) -> str:
    """Returns what went wrong, if anything."""
    try:
        if path.suffix == ".json":
            path.write_text(json.dumps(trace_events(tracks)))
        else:
            chart.require_matplotlib()
            chart.draw(tracks, str(path))
    except (UsageError, OSError) as error:
        return f"the timeline was not saved: {error}"
    return ""
