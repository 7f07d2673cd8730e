"""Names of partial files and their header: pure."""

from pathlib import Path

import pytest

from smp.checkpoint.layout import Degrees, Header, Place, describe_existing, existing_parts, foreign_part, partial_path

PLACE = Place(pp=1, tp=0, rdp=2)


def test_partial_names_follow_the_contract():
    """Scripts and `Trainer` glob these names: another pattern would not be found."""
    assert partial_path("ckpt/model.pt", PLACE, v3=False) == Path("ckpt/model.pt_1_0")
    assert partial_path("ckpt/model.pt", PLACE, v3=True) == Path("ckpt/model.pt_1_0_2")


def test_header_survives_a_round_trip():
    """A header that reads back differently would turn good files away."""
    header = Header(Degrees(2, 2, 1), PLACE, True, "id")
    assert Header.from_json(header.to_json()) == header


@pytest.mark.parametrize("text", ["", "[]", '{"format": 99}', '{"format": 1, "degrees": {"pp": 1}}'])
def test_a_header_of_another_version_is_refused(text):
    """Guessing at an unknown header could mix files of different layouts."""
    with pytest.raises(ValueError, match="."):
        Header.from_json(text)


def test_parts_are_listed_in_numeric_order(tmp_path):
    """`f_10_0` must not come before `f_2_0`, and neighbours with similar names are no parts."""
    for name in ("m_10_0", "m_2_0", "m_0_0_1", "m_3", "m_0_0.bak", "mm_0_0", ".m_0_0.writing-0"):
        (tmp_path / name).touch()
    assert [p.name for p in existing_parts(str(tmp_path / "m"))] == ["m_3", "m_2_0", "m_10_0", "m_0_0_1"]


def test_foreign_part_is_recognised_by_its_numbers(tmp_path):
    """Without a header only the set of names tells that a save had more stages."""
    for name in ("m_0_0", "m_1_0", "m_2_0"):
        (tmp_path / name).touch()
    assert foreign_part(str(tmp_path / "m"), Degrees(2, 1, 1), v3=False) == tmp_path / "m_2_0"
    assert foreign_part(str(tmp_path / "m"), Degrees(3, 1, 1), v3=False) is None


def test_the_message_says_what_exists(tmp_path):
    """A user who mistyped a path or forgot partial=False should see it at once."""
    assert "does not exist" in describe_existing(str(tmp_path / "no" / "m"))
    assert "no file whose name begins with m_" in describe_existing(str(tmp_path / "m"))
    (tmp_path / "m").touch()
    assert "partial=False" in describe_existing(str(tmp_path / "m"))
    for k in range(12):
        (tmp_path / f"m_{k}_0").touch()
    assert "and 5 more" in describe_existing(str(tmp_path / "m"))
