"""The planner against tables drawn by hand, exhaustive search, known bounds, and ranks that block."""

import random
from dataclasses import replace

import pytest

from smp import StepError
from smp.pp import simulate as planner
from smp.pp.listing import Graph, Network
from smp.pp.schedule import ActionKind, from_text, to_text, validate_plan
from smp.pp.simulate import Message, Policy, ProgramCost, Segment, replay, simulate
from tests.pp.programs import (
    blocking_ranks_finish,
    chain,
    joined,
    least_step_time,
    path,
    random_program,
    vee,
    virtual,
)

FORWARD, BACKWARD, WEIGHT = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT
POLICIES = [Policy.INTERLEAVED, Policy.SIMPLE, Policy.ZERO_BUBBLE]


@pytest.fixture(autouse=True)
def _small_budget(monkeypatch):
    """Plans that are found with a tenth of the search are found faster here, and with more of it too."""
    monkeypatch.setattr(planner, "NODE_BUDGET", 15_000)


def planned(program, microbatches, stages, active, policy, **network):
    programs = [program] * microbatches
    plan = simulate(programs, stages, active, policy, **network)
    validate_plan(plan.actions, programs, active)
    return plan


# -- tables drawn by hand ----------------------------------------------------------------------------------------------

# fmt: off
ONE_FORWARD_ONE_BACKWARD = {
    2: ["F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"],
    3: ["F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"],
    4: ["F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"],
}
# Two chunks per stage; a full turn of p microbatches through each chunk. f = b = 1 per chunk.
TWO_CHUNKS = {
    2: ["F0 F1 F0.1 F1.1 B0 B1 B0.1 B1.1",
        "F0 F1 F0.1 B0 F1.1 B1 B0.1 B1.1"],
    3: ["F0 F1 F2 F0.1 F1.1 F2.1 B0 B1 B2 B0.1 B1.1 B2.1",
        "F0 F1 F2 F0.1 F1.1 F2.1 B0 B1 B2 B0.1 B1.1 B2.1",
        "F0 F1 F2 F0.1 B0 F1.1 B1 F2.1 B2 B0.1 B1.1 B2.1"],
    4: ["F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 B0 B1 B2 B3 B0.1 B1.1 B2.1 B3.1",
        "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 B0 B1 B2 B3 B0.1 B1.1 B2.1 B3.1",
        "F0 F1 F2 F3 F0.1 F1.1 F2.1 B0 F3.1 B1 B2 B3 B0.1 B1.1 B2.1 B3.1",
        "F0 F1 F2 F3 F0.1 B0 F1.1 B1 F2.1 B2 F3.1 B3 B0.1 B1.1 B2.1 B3.1"],
}
# f = b = w = 1. Stage 0 sends nothing back, so a B and a W that meet there are one backward.
SPLIT_BACKWARD = {
    2: ["F0 F1 B0 B1 F2 W1 F3 B2 B3",
        "F0 B0 F1 B1 W0 W1 F2 B2 F3 B3 W2 W3"],
    3: ["F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"],
    4: ["F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 W0 B2 W1 B3 W2 W3",
        "F0 F1 B0 F2 B1 F3 B2 W0 B3 W1 W2 W3",
        "F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3"],
}
# fmt: on


def drawn(plan):
    return [to_text(row) for row in plan.actions]


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (1, 1), (2, 1), (1, 1.7), (0.1, 0.3)])
def test_a_chain_gets_one_forward_one_backward(stages, forward, backward):
    """Another order is slower, or holds more activations than its step time needs."""
    plan = planned(chain(stages, forward, backward), 6, stages, stages + 2, Policy.INTERLEAVED)
    assert drawn(plan) == ONE_FORWARD_ONE_BACKWARD[stages]
    assert plan.in_flight == tuple(range(stages, 0, -1))
    assert plan.step_time == pytest.approx((6 + stages - 1) * (forward + backward))


def test_times_are_the_drawn_ones():
    """Wrong times make a wrong forecast, and a wrong choice between schedules."""
    plan = planned(chain(2), 2, 2, 2, Policy.INTERLEAVED)
    assert plan.times == (((0, 1), (1, 2), (4, 6), (7, 9)), ((1, 2), (2, 4), (4, 5), (5, 7)))
    assert plan.step_time == 9
    assert plan.bubble == pytest.approx(3 / 9)
    assert plan.idle == pytest.approx((3 / 9, 3 / 9))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_simple_runs_forwards_first_in_windows(stages):
    """`simple` promises all forwards before any backward, and no more microbatches in flight than allowed."""
    plan = planned(chain(stages), 5, stages, 2, Policy.SIMPLE)
    assert drawn(plan) == ["F0 F1 B0 B1 F2 F3 B2 B3 F4 B4"] * stages
    assert drawn(planned(chain(stages), 5, stages, 8, Policy.SIMPLE)) == ["F0 F1 F2 F3 F4 B0 B1 B2 B3 B4"] * stages


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_forward_only_streams_through(stages):
    """Evaluation must fill the pipeline: m + p - 1 steps."""
    plan = planned(chain(stages, trains=False), 5, stages, 2, Policy.FORWARD_ONLY)
    assert drawn(plan) == ["F0 F1 F2 F3 F4"] * stages
    assert plan.step_time == 5 + stages - 1
    assert plan.in_flight == (1,) * stages


def test_forward_only_refuses_a_backward():
    """A backward that is left out silently trains nothing."""
    with pytest.raises(StepError, match="_only_forward"):
        simulate([chain(2)], 2, 1, Policy.FORWARD_ONLY)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_chunks_interleave(stages):
    """Virtual stages that do not take turns in this way leave the bubble as it was."""
    plan = planned(virtual(stages, 2, 2, 2), stages, stages, stages, Policy.INTERLEAVED)
    assert drawn(plan) == TWO_CHUNKS[stages]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_weight_gradients_fill_the_bubble(stages):
    """W actions elsewhere do not shorten the step, or need more memory than 1F1B."""
    plan = planned(chain(stages, 1, 1, 1), 4, stages, stages, Policy.ZERO_BUBBLE)
    assert drawn(plan) == SPLIT_BACKWARD[stages]
    assert plan.step_time == 4 * 3 + stages - 1
    assert max(plan.in_flight) == stages


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("turns", [1, 2, 4])
@pytest.mark.parametrize("chunks", [2, 4])
def test_chunks_cut_the_bubble_by_their_number(stages, turns, chunks):
    """The only reason for virtual stages: a bubble of (p - 1) (f + b) / v with 2 p microbatches in flight."""
    m, f, b = stages * turns, 1, 2
    plan = planned(virtual(stages, chunks, f, b), m, stages, 2 * stages, Policy.INTERLEAVED)
    assert plan.step_time == pytest.approx(m * (f + b) + (stages - 1) * (f + b) / chunks)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 8), (8, 16)])
@pytest.mark.parametrize("costs", [(1, 1, 1), (1, 1.2, 0.8), (1, 0.8, 1.2), (1, 1.5, 0.5), (1, 2, 0.5)])
def test_zero_bubble_is_as_good_as_the_published_schedules(stages, microbatches, costs):
    """With p microbatches in flight ZB-H1's time, m (f + b + w) + (p - 1) (f + b - w), or the least there can be, where
    the last stage never waits after its start; with 2 p - 1 the latter for costs about alike."""
    f, b, w = costs
    work = microbatches * (f + b + w)
    least = work + (stages - 1) * f
    first = planned(chain(stages, *costs), microbatches, stages, stages, Policy.ZERO_BUBBLE)
    assert first.step_time <= max(least, work + (stages - 1) * (f + b - w)) * (1 + 1e-9)
    second = planned(chain(stages, *costs), microbatches, stages, 2 * stages - 1, Policy.ZERO_BUBBLE)
    assert second.step_time <= first.step_time * (1 + 1e-9)
    if abs(b - w) < 0.5:
        assert second.step_time == pytest.approx(least)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("active", [1, 2])
def test_chunks_placed_there_and_back_leave_almost_no_bubble(stages, active):
    """ZB-V: only the way to the last stage, half a forward per stage, is idle."""
    m = 2 * stages
    plan = planned(vee(stages), m, stages, active * stages, Policy.ZERO_BUBBLE)
    assert plan.step_time == pytest.approx(3 * m + (stages - 1) / 2)


def test_a_chain_of_uneven_stages_comes_near_its_slowest():
    """Real stages are uneven; a greedy order that ignores it loses what the partition won."""
    rng = random.Random(3)
    for stages in (2, 4):
        f = [rng.uniform(0.8, 1.2) for _ in range(stages)]
        b = [2 * x for x in f]
        program = path(range(stages), f, b, [0] * stages)
        plan = planned(program, 8, stages, stages + 2, Policy.INTERLEAVED)
        slowest = max(range(stages), key=f.__getitem__)
        ideal = 8 * 3 * f[slowest] + 3 * (sum(f) - f[slowest])
        assert plan.step_time <= 1.03 * ideal


# -- what else the order depends on ------------------------------------------------------------------------------------


def test_latency_bandwidth_and_overhead_are_counted():
    """A forecast that leaves them out is wrong by just what a slow network costs."""
    program = ProgramCost(
        (
            Segment(0, FORWARD, 2.0, sends=((0, 0.5),)),
            Segment(1, FORWARD, 1.0, waits=(0,)),
        ),
        (Message(0, 1, 30),),
    )
    plan = simulate([program], 2, 1, Policy.FORWARD_ONLY, latency=0.25, bandwidth=10, overhead=0.125)
    assert plan.times == (((0, 2.125),), ((0.125 + 0.5 + 0.25 + 3, 5.0),))
    assert plan.step_time == 5.0


def test_a_backward_without_its_weights_sends_earlier():
    """Messages of a split backward leave in proportion; at their old time nothing would be won by splitting."""
    program = chain(2, 1, 1, 3)
    whole = replay([from_text("F0 B0"), from_text("F0 B0")], [program], 2)
    split = replay([from_text("F0 B0 W0"), from_text("F0 B0 W0")], [program], 2)
    assert whole.times == (((0, 1), (6, 10)), ((1, 2), (2, 6)))
    assert split.times == (((0, 1), (3, 4), (4, 7)), ((1, 2), (2, 3), (3, 6)))


def test_more_under_way_on_a_slow_network():
    """With latency a stage must hold more microbatches to stay busy; one per stage would leave it idle."""
    fast = planned(chain(2), 8, 2, 8, Policy.INTERLEAVED)
    slow = planned(chain(2), 8, 2, 8, Policy.INTERLEAVED, latency=1.5)
    assert fast.in_flight == (2, 1)
    assert slow.in_flight[0] > 2
    assert slow.step_time == pytest.approx(8 * 3 + 3 + 2 * 1.5)  # not a wait but for the first and the last message


def test_replay_gives_the_times_of_the_same_order_under_other_costs():
    """Measured beside planned: the order must not change with the durations."""
    plan = planned(chain(3), 4, 3, 3, Policy.INTERLEAVED)
    again = replay(plan.actions, [chain(3)] * 4, 3)
    assert again == plan
    slower = replay(plan.actions, [chain(3, 2, 4)] * 4, 3)
    assert slower.actions == plan.actions
    assert slower.step_time == 2 * plan.step_time
    with pytest.raises(StepError, match="waits for"):
        replay([from_text("F0 B0 F1 B1"), from_text("F0 F1 B0 B1")], [chain(2)] * 2, 2)


def test_plans_are_the_same_every_time():
    """Every rank must reach the same order; two plans of one program would deadlock."""
    program = random_program(random.Random(7), 4)
    for policy in POLICIES:
        assert simulate([program] * 4, 4, 3, policy) == simulate([replace(program)] * 4, 4, 3, policy)


def test_a_limit_of_one_microbatch_still_ends():
    """The least memory there is: one microbatch after the other on each stage."""
    for program in (chain(3), virtual(3, 2), vee(3), path([0, 1, 0, 2, 1], [1] * 5, [1] * 5, [1] * 5)):
        for policy in POLICIES:
            assert set(planned(program, 4, 3, 1, policy).in_flight) == {1}


def test_programs_may_differ():
    """A longer sequence in one microbatch makes its program another one, perhaps over other stages."""
    programs = [chain(3), path([0, 2], [1, 1], [1, 1], [1, 1]), path([1, 0, 1, 2], [1] * 4, [1] * 4, [1] * 4), chain(3)]
    for policy in POLICIES:
        for active in (1, 2, 4):
            validate_plan(simulate(programs, 3, active, policy).actions, programs, active)


def test_many_microbatches_on_many_stages_are_planned(monkeypatch):
    """Planning must not grow with the square of the work: 64 stages and microbatches, ten segments each."""
    monkeypatch.setattr(planner, "NODE_BUDGET", 0)
    monkeypatch.setattr(planner, "LEAST_RULES", 1)
    plan = simulate([virtual(64, 5)] * 64, 64, 64, Policy.INTERLEAVED)  # half a second a rule
    assert sum(map(len, plan.actions)) == 64 * 64 * 10


# -- against everything there is ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 4), (3, 3)])
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("active", [1, 2, 3])
def test_no_order_of_a_chain_is_faster(stages, microbatches, forward, backward, active):
    """An order that is faster within the same memory means that the planner leaves time on the table."""
    program = chain(stages, forward, backward)
    plan = planned(program, microbatches, stages, active, Policy.INTERLEAVED)
    assert plan.step_time == pytest.approx(least_step_time(program, microbatches, stages, active))


def test_few_orders_of_random_programs_are_faster():
    """Programs that wander over stages: within 1.2 of the best order, and on average within 1.01."""
    rng = random.Random(0)
    ratios = []
    while len(ratios) < 40:
        stages = rng.randint(2, 4)
        program = random_program(rng, stages)
        if 6 <= len(program.segments) <= 10 and len({s.stage for s in program.segments}) > 1:
            microbatches, active = rng.randint(2, 4), rng.randint(1, 4)
            least = least_step_time(program, microbatches, stages, active)
            assert Graph([program] * microbatches, stages, Network()).bound() <= least * (1 + 1e-9)
            ratios.append(planned(program, microbatches, stages, active, Policy.INTERLEAVED).step_time / least)
    assert min(ratios) > 1 - 1e-9  # else the search is wrong
    assert max(ratios) < 1.2
    assert sum(ratios) / len(ratios) < 1.01


# -- ranks that block --------------------------------------------------------------------------------------------------


def random_plan(seed, policy):
    """(programs, their plan under `policy`, the limit); programs wander, skip, go twice, or differ."""
    rng = random.Random(seed)
    stages, microbatches = rng.randint(1, 6), rng.randint(1, 5)
    active = rng.randint(1, stages + 2)
    programs = [random_program(rng, stages)] * microbatches
    if rng.random() < 0.3:
        programs = [random_program(rng, stages) for _ in programs]
    if rng.random() < 0.3:  # two backwards in one microbatch
        programs = [joined(program, random_program(rng, stages)) for program in programs]
    network = {"latency": rng.choice([0, 0.1]), "bandwidth": rng.choice([100, 1e9]), "overhead": rng.choice([0, 0.05])}
    return programs, simulate(programs, stages, active, policy, **network), active


@pytest.mark.parametrize("policy", POLICIES)
def test_a_thousand_random_programs_never_deadlock_with_tensor_parallel_peers(policy, monkeypatch):
    """Every (stage, tensor-parallel) rank runs its real list and blocks on messages and collectives. One that waits for
    ever here is a job that hangs."""
    monkeypatch.setattr(planner, "NODE_BUDGET", 500)
    for seed in range(334):
        programs, plan, active = random_plan(seed, policy)
        validate_plan(plan.actions, programs, active)
        assert max(plan.in_flight) <= active
        rng = random.Random(seed)
        assert blocking_ranks_finish(rng, plan.actions, programs, tp_size=rng.randint(1, 3)), seed


def test_lists_that_deadlock_are_caught_and_no_others(monkeypatch):
    """Two actions swapped at random: what blocks the ranks must be refused, and what replay refuses must block."""
    monkeypatch.setattr(planner, "NODE_BUDGET", 0)
    monkeypatch.setattr(planner, "LEAST_RULES", 1)
    stuck = 0
    for seed in range(400):
        programs, plan, active = random_plan(seed, POLICIES[seed % 3])
        rng = random.Random(seed)
        rows = [list(row) for row in plan.actions]
        row = rows[rng.randrange(len(rows))]
        if len(row) < 2:
            continue
        i = rng.randrange(len(row) - 1)
        j = min(len(row) - 1, i + rng.randint(1, 4))
        row[i], row[j] = row[j], row[i]
        finishes = blocking_ranks_finish(rng, rows, programs, tp_size=2)
        try:
            replay(rows, programs, len(rows))
            replays = True
        except StepError:
            replays = False
        assert finishes == replays, seed
        if not finishes:
            stuck += 1
            with pytest.raises(StepError, match="waits for"):
                replay(rows, programs, len(rows))
            with pytest.raises(StepError):
                validate_plan(rows, programs, active)
    assert stuck > 100
