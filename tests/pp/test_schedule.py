"""The order of work on a rank, against tables drawn by hand."""

import pytest

from smp import StepError
from smp.pp.schedule import Action, ActionKind, from_text, phase_order, to_text, validate

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD


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
