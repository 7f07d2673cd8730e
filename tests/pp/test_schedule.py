"""The order of work on a rank, against tables drawn by hand."""

import pytest

from smp import StepError
from smp.pp.schedule import (
    Action,
    ActionKind,
    from_text,
    grid,
    linearize,
    phase_order,
    to_text,
    validate,
    validate_plan,
)
from smp.pp.simulate import Policy, replay, simulate
from tests.pp.programs import chain, virtual

FORWARD, BACKWARD, WEIGHT = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT


@pytest.mark.parametrize(
    ("microbatches", "active", "drawn"),
    [
        (1, 1, "F0 B0"),
        (1, 4, "F0 B0"),
        (2, 1, "F0 B0 F1 B1"),
        (2, 2, "F0 F1 B0 B1"),
        (4, 2, "F0 F1 B0 B1 F2 F3 B2 B3"),
        (5, 2, "F0 F1 B0 B1 F2 F3 B2 B3 F4 B4"),
        (5, 3, "F0 F1 F2 B0 B1 B2 F3 F4 B3 B4"),
        (3, 8, "F0 F1 F2 B0 B1 B2"),
    ],
)
def test_phase_order_is_the_drawn_one(microbatches, active, drawn):
    """Another order may wait for ever: every rank must run the same list, and this one is safe without a plan."""
    actions = phase_order(microbatches, active)
    assert to_text(actions) == drawn
    validate(actions, microbatches, active)


def test_every_phase_order_is_valid_and_never_holds_more_than_allowed():
    """More microbatches in flight than `active_microbatches` is memory that the user has forbidden."""
    for microbatches in range(1, 9):
        for active in range(1, 10):
            actions = phase_order(microbatches, active)
            validate(actions, microbatches, active)
            in_flight = most = 0
            for kind, _, _ in actions:
                in_flight += 1 if kind is FORWARD else -1
                most = max(most, in_flight)
            assert most == min(microbatches, active)


def test_text_form_reads_back():
    """A schedule in a log or a bug report must be one that can be run again."""
    actions = [Action(FORWARD, 0), Action(FORWARD, 12), Action(BACKWARD, 12), Action(BACKWARD, 0)]
    assert to_text(actions) == "F0 F12 B12 B0"
    assert from_text("F0 F12\n  B12 B0") == actions
    segments = [Action(FORWARD, 2, 1), Action(BACKWARD, 3), Action(WEIGHT, 10, 12), Action(WEIGHT, 0)]
    assert to_text(segments) == "F2.1 B3 W10.12 W0"
    assert from_text(to_text(segments)) == segments
    assert from_text("") == []
    assert to_text([]) == ""


@pytest.mark.parametrize("word", ["X0", "F", "F-1", "0F", "f0", "F1.0", "F1.", "W", "F0B0"])
def test_what_is_no_action_is_refused_by_name(word):
    """A typo must not become an action that is left out."""
    with pytest.raises(StepError, match="is no action") as error:
        from_text(f"F0 {word} B0")
    assert f"'{word}'" in str(error.value)


@pytest.mark.parametrize(
    ("text", "active", "problem", "wrong"),
    [
        ("F0 F0 B0 B1", 2, "this forward has run already", 1),
        ("F0 B1 B0 F1", 2, "no forward of this microbatch is waiting for its backward", 1),
        ("F0 B0 B0 F1 B1", 2, "no forward of this microbatch is waiting for its backward", 2),
        ("F0 F1 B0 B1", 1, "more than 1 microbatches would be in flight", 1),
        ("F0 B0 F1 F2 B1", 2, "there are 2 microbatches", 3),
        ("B0 F0 F1 B1", 2, "no forward of this microbatch is waiting for its backward", 0),
    ],
)
def test_validator_marks_the_wrong_action(text, active, problem, wrong):
    """The reader of the error must see which cell is wrong, under it."""
    with pytest.raises(StepError) as error:
        validate(from_text(text), 2, active)
    message = str(error.value)
    assert problem in message
    *_, grid, mark = message.split("\n")
    assert grid.strip() == text
    words = text.split()
    begin = grid.index(text) + len(" ".join(words[:wrong])) + (1 if wrong else 0)
    assert mark.index("^") == begin
    assert mark.strip() == "^" * len(words[wrong])


def test_validator_names_microbatches_that_never_end():
    """A microbatch left out of a schedule is a part of the batch that is silently not trained on."""
    with pytest.raises(StepError, match=r"microbatches \[1, 2\] never end"):
        validate(from_text("F0 F1 B0"), 3, 3)


# -- whole groups ------------------------------------------------------------------------------------------------------

TWO_STAGES = ["F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 F1 W0 B1 F2 W1 B2 W2"]


def lists(texts):
    return [from_text(text) for text in texts]


def test_a_right_plan_passes():
    """A validator that refuses right plans would keep every planned step from running."""
    validate_plan(lists(TWO_STAGES), [chain(2, 1, 1, 1)] * 3, 2)
    validate_plan(lists(["F0 B0", "F0 B0"]), [chain(2, 1, 1, 1)], 1)  # without W a backward runs whole
    validate_plan(lists(["F0 F0.1 B0 B0.1", "F0 F0.1 B0 B0.1"]), [virtual(2, 2)], 1)
    validate_plan(lists(["F0 F1", "F0 F1"]), [chain(2, trains=False)] * 2, 1)


@pytest.mark.parametrize(
    ("stage", "row", "active", "problem", "wrong"),
    [
        (0, "F0 F0 F1 B0 F2 B1 B2", 3, "F0 has run already", 1),
        (1, "F0 B0 F1 B1 F2 B2 W2 W2", 3, "W2 has run already", 7),
        (0, "F0 F1 B0 F3 F2 B1 B2", 3, "there are 3 microbatches", 3),
        (0, "F0 F1 B0 F2.1 F2 B1 B2", 3, "microbatch 2 has no such segment here", 3),
        (1, "F0 B0 B1 F1 F2 B2", 3, "microbatch 1 must run F1 first", 2),
        (1, "F0 W0 B0 F1 B1 F2 B2", 3, "W0 comes before its backward", 1),
        (0, "F1 F0 B0 F2 B1 B2", 3, "microbatch 1 has run before 0", 1),
        (0, "F0 F1 F2 B0 B1 B2", 2, "more than 2 microbatches would be in flight", 2),
        (0, "F0 F1 B0 F2 B1 W0 B2", 2, "more than 2 microbatches would be in flight", 3),
        (1, "F0 B0 F1 B1 F2", 3, "B2 never runs", 5),
    ],
)
def test_the_plan_validator_marks_the_wrong_cell(stage, row, active, problem, wrong):
    """The reader of the error must see in the grid which action of which stage is wrong."""
    texts = list(TWO_STAGES)
    texts[stage] = row
    if active == 2:
        texts[1 - stage] = "F0 B0 F1 B1 F2 B2"
    with pytest.raises(StepError) as error:
        validate_plan(lists(texts), [chain(2, 1, 1, 1)] * 3, active)
    message = str(error.value)
    assert f"stage {stage}: {problem}" in message
    lines = message.split("\n")
    line = next(i for i, text in enumerate(lines) if text.startswith(f"  stage {stage} |"))
    mark = lines[line + 1]
    assert set(mark) <= {" ", "^"}
    words = row.split()
    assert lines[line][: mark.index("^")].split("|")[1].split() == words[:wrong]
    assert len(mark.strip()) == (len(words[wrong]) if wrong < len(words) else 1)
    assert len([text for text in lines if text.startswith("  stage ")]) == 2


def test_a_circle_is_named_with_both_its_ends():
    """Ranks that wait for each other hang for ten minutes and then say nothing; the plan must say it before."""
    texts = ["F0 B0 F1 B1", "F0 F1 B0 B1"]
    with pytest.raises(StepError) as error:
        validate_plan(lists(texts), [chain(2)] * 2, 2)
    assert str(error.value) == (
        "the schedule is wrong: it can never end:\n"
        "    stage 0 at B0 waits for B0 of stage 1,\n"
        "    stage 1 at F1 waits for F1 of stage 0\n"
        "  stage 0 | F0 B0 F1 B1\n"
        "               ^^\n"
        "  stage 1 | F0 F1 B0 B1\n"
        "               ^^"
    )


def test_a_stage_that_waits_for_itself_or_for_what_never_runs_is_named():
    """A list that was edited by hand goes wrong in these two ways too."""
    with pytest.raises(StepError, match="stage 0 at W0 waits for B0 of itself"):
        linearize(lists(["F0 W0 B0", "F0 B0"]), [chain(2, 1, 1, 1)])
    with pytest.raises(StepError, match="stage 0 at B0 waits for B0 of stage 1,\n    stage 1 never runs B0"):
        linearize(lists(["F0 B0", "F0"]), [chain(2)])
    with pytest.raises(StepError, match=r"stage 1 has no segment F0\.3"):
        linearize(lists(["F0 B0", "F0.3 B0"]), [chain(2)])


def test_an_order_of_the_group_is_found():
    """Each action must come after what it needs, or times computed along the order are too early."""
    order = linearize(lists(["F0 F1 B0 B1", "F0 B0 F1 B1"]), [chain(2)] * 2)
    assert sorted(order) == [(s, i) for s in range(2) for i in range(4)]
    place = {cell: n for n, cell in enumerate(order)}
    assert place[0, 0] < place[1, 0] and place[0, 1] < place[1, 2]  # forwards
    assert place[1, 1] < place[0, 2] and place[1, 3] < place[0, 3]  # backwards


def test_grid_draws_stages_over_time():
    """A drawing that is off by a column shows waits that are not there."""
    plan = simulate([chain(2)] * 3, 2, 2, Policy.INTERLEAVED)
    assert plan.step_time == 12
    assert grid(plan, 36).split("\n") == [
        "stage 0 |F0=F1=......B0====F2=B1====...B2====|",
        "stage 1 |...F0=B0====F1=B1====F2=B2====......|",
    ]


def test_grid_of_an_empty_plan():
    """A step of no microbatches, or one whose actions take no time, must not divide by zero."""
    assert grid(replay([[], []], [], 2), 4) == "stage 0 |....|\nstage 1 |....|"
    assert grid(replay([from_text("F0")], [chain(1, 0, trains=False)], 1), 4) == "stage 0 |....|"
