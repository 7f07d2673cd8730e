"""Logging: long phases say that they are running."""

import time

import pytest

from smp import log


def test_a_long_phase_says_so_while_it_runs_and_when_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """a10-3. A failure means that users cannot tell a slow start from a hang."""
    with log.long_phase("partition", after=0.05):
        time.sleep(0.3)
        assert "partition: still at it after" in capsys.readouterr().err
    assert "partition: ended after 0." in capsys.readouterr().err


def test_a_short_phase_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure means noise on every step."""
    with log.long_phase("partition", after=5):
        pass
    assert capsys.readouterr().err == ""
