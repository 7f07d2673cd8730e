"""Which layout and which schedule: every candidate's step is simulated from the costs of a trace.

    layouts (chunks per stage, how they are laid)  x  policies  ->  simulate each  ->  the fastest

The simulation takes a model for a chain of modules in execution order, each charged with what runs around it. It is the
same on every rank and in every run. What the steps then really do is planned from what a recorded step did.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from smp.pp.call import CALL
from smp.pp.cost import ZERO, Costs
from smp.pp.journal import Edge, EdgeKind, Journal, Work
from smp.pp.partition import Assignment
from smp.pp.segments import cut
from smp.pp.simulate import Plan, Policy, ProgramCost, simulate
from smp.pp.split import Placement
from smp.runtime import Runtime

# What a message and an action cost beside the work, in seconds and bytes per second.
LATENCY, BANDWIDTH, OVERHEAD = 50e-6, 5e9, 50e-6
# More chunks and put-off gradients have costs that a simulation does not see: they have to win by so much.
MARGIN = 0.01
T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """Where modules lie, in how many chunks per stage. `exchange`: seconds of a step in which the gradients of tied
    weights are summed over the stages that hold them."""

    assignment: Assignment
    virtual_stages: int
    placement: Placement
    exchange: float = 0.0


@dataclass(frozen=True)
class Choice:
    """A layout, a policy, and the step that the two should give."""

    layout: Layout
    policy: Policy
    plan: Plan

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.plan.step_time + self.layout.exchange

    def __str__(self) -> str:
        chunks = f", {self.layout.virtual_stages} chunks per stage" if self.layout.virtual_stages > 1 else ""
        return (
            f"schedule {self.policy.value}{chunks}: a step computes for {1e3 * self.seconds:.3g} nominal ms, "
            f"{100 * self.plan.bubble:.0f} % of them idle on the busiest stage"
        )


def policies_of(pipeline: str) -> list[Policy]:
    """What the key `pipeline` allows, the simplest first."""
    if pipeline == "auto":
        return [Policy.INTERLEAVED, Policy.ZERO_BUBBLE]
    return [Policy(pipeline)]


def placement_of(pipeline: str, virtual_stages: int) -> Placement:
    """How chunks are laid where the user has said how many: as a V where weight gradients can fill its bubbles."""
    return "v" if pipeline == "zero_bubble" and virtual_stages > 1 else "loop"


def plan_step(programs: Sequence[ProgramCost], rt: Runtime, policy: Policy) -> Plan:
    """The plan of a step whose microbatches run `programs`, as the configuration allows."""
    return simulate(
        programs,
        rt.topology.pp_size,
        rt.config.active_microbatches,
        policy,
        latency=LATENCY,
        bandwidth=BANDWIDTH,
        overhead=OVERHEAD,
    )


def best_plan(programs: Sequence[ProgramCost], rt: Runtime, policies: Sequence[Policy]) -> Plan:
    """The fastest of the policies' plans; a later one has to win by `MARGIN`."""
    return _fastest((plan_step(programs, rt, policy) for policy in policies), lambda plan: plan.step_time)


def choose(layouts: Sequence[Layout], policies: Sequence[Policy], costs: Costs, rt: Runtime) -> Choice:
    """The fastest combination; a later one has to win by `MARGIN`. Pure."""

    def choices() -> Iterator[Choice]:
        for layout in layouts:
            program = cut(chain(layout.assignment, costs), rt.topology.pp_size).cost
            for policy in policies:
                if policy is Policy.FORWARD_ONLY:
                    policy = Policy.INTERLEAVED  # the same order; the model refuses backwards
                yield Choice(layout, policy, plan_step([program] * rt.config.microbatches, rt, policy))

    return _fastest(choices(), lambda choice: choice.seconds)


def _fastest(candidates: Iterator[T], seconds: Callable[[T], float]) -> T:
    best = next(candidates)
    for candidate in candidates:
        if seconds(candidate) < (1 - MARGIN) * seconds(best):
            best = candidate
    return best


def chain(assignment: Assignment, costs: Costs) -> Journal:
    """One microbatch of a model as a chain of its modules in execution order."""
    links: list[tuple[int, str]] = []
    for name in dict.fromkeys([*costs.order, *costs.charged]):
        if costs.charged.get(name, ZERO).seconds:
            stage = assignment.modules.get(name)
            links.append((assignment.own.get(name, 0) if stage is None else stage, name))
    forward: Journal = []
    backward: Journal = []
    for position, (stage, name) in enumerate(links):
        cost = costs.charged[name]
        if position and links[position - 1][0] != stage:
            before, nbytes = links[position - 1][0], costs.own.get(links[position - 1][1], ZERO).output_bytes
            forward.append(Edge(EdgeKind.MOVE, before, stage, nbytes))
            backward.append(Edge(EdgeKind.GRADIENT, stage, before, nbytes))
        forward.append(Work(stage, cost.forward + CALL))
        backward.append(Work(stage, cost.backward + CALL, cost.weight))
    return [*forward, Edge(EdgeKind.BACKWARD), *reversed(backward)]
