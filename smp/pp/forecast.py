"""What a planned step should take, from how long its actions took.

Plans are made from nominal costs, so that the order of work is the same in every run. Once a planned step has run, the
same order is replayed with measured seconds: the result is what the step would take if stages did nothing but their
actions and the waiting that the order implies. Beside the measured step it shows what the order does not explain.
"""

from collections.abc import Sequence
from dataclasses import replace

from smp.pp.choose import BANDWIDTH, LATENCY
from smp.pp.engine import Engine
from smp.pp.record import Measured
from smp.pp.schedule import ActionKind, Index, ProgramCost, Segment
from smp.pp.simulate import Plan, replay
from smp.runtime import Runtime
from smp.topology import CommGroup

Seconds = dict[tuple[ActionKind, int, int], float]  # by kind, microbatch and segment


def forecast(rt: Runtime, engine: Engine) -> Plan | None:
    """The last step's plan with the times that its actions took on all stages; None when it had no plan.

    Collective over the ranks of a pipeline.
    """
    plan = engine.last_plan
    if plan is None:
        return None
    rows: list[Sequence[Measured]] = rt.transport.all_gather_object(
        engine.last_measured, rt.group(CommGroup.PP_GROUP), "the forecast of a step"
    )
    seconds = [{(m.action.kind, m.action.microbatch, m.action.segment): m.seconds for m in row} for row in rows]
    programs = [with_seconds(cost, k, seconds) for k, cost in enumerate(engine.last_costs)]
    return replay(plan.actions, programs, engine.num_stages, LATENCY, BANDWIDTH, policy=plan.policy)


def with_seconds(program: ProgramCost, microbatch: int, seconds: Sequence[Seconds]) -> ProgramCost:
    """The program of a microbatch with measured times, by stage. What was not measured keeps its nominal time."""
    numbered = zip(program.segments, Index(program).numbers, strict=True)
    segments = [_measured(segment, microbatch, number, seconds[segment.stage]) for segment, number in numbered]
    return replace(program, segments=tuple(segments))


def _measured(segment: Segment, microbatch: int, number: int, seconds: Seconds) -> Segment:
    at_once = seconds.get((segment.kind, microbatch, number))
    if at_once is None:
        return segment
    later = seconds.get((ActionKind.WEIGHT, microbatch, number), 0.0)
    if segment.kind is ActionKind.FORWARD:
        later = 0.0
    nominal = segment.duration - (segment.weight if later else 0.0)
    sends = tuple(
        (message, at_once * min(1.0, offset / nominal if nominal else 1.0)) for message, offset in segment.sends
    )
    return replace(segment, duration=at_once + later, weight=later, sends=sends)
