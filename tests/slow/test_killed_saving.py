"""A job that is killed while it saves, or whose disk is full, goes on from its newest complete checkpoint."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import launch

pytestmark = pytest.mark.slow

SCRIPT = "from tests.slow.killing import main\nmain()\n"


def run(*arguments: str, timeout: float) -> str:
    done = launch(SCRIPT, 1, launcher="single", args=arguments, timeout=timeout)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_after_fifty_kills_in_saving_every_resume_is_exact(tmp_path: Path) -> None:
    """kill -9 of a random rank of four at random moments of saving, partly in the background, with two checkpoints
    kept. The next job has to resume the newest complete one, on every rank alike, to hold bit for bit what the run held
    that nobody killed, to go on as it did, and to leave nothing behind that is not a complete checkpoint."""
    output = run("kill", str(tmp_path), "11", "50", timeout=400)
    assert "killed while saving" in output, output


def test_a_kill_at_each_step_of_saving_resumes_the_old_checkpoint_until_newest_is_replaced(tmp_path: Path) -> None:
    """With one checkpoint kept: it must not be removed before the new one counts. The next job says what was cut short,
    and its own save leaves nothing else behind."""
    output = run("points", str(tmp_path), timeout=300)
    assert "0: manifest" in output and "3: write" in output, output


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """`tmp_path` with a disk of two megabytes in it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("no right to mount a small disk")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(disk)], check=True)


REFUSED = ("refused, blocking=True, room for 0: ", "refused, blocking=False, room for 0: ")


def test_a_full_disk_is_named_by_every_rank_and_leaves_the_last_checkpoint(small_disk: Path) -> None:
    """In the foreground and in the background; when there is room again this job saves, the next one resumes."""
    output = run("fill", str(small_disk), "1", timeout=120)
    assert all(text in output for text in REFUSED) and "No space left on device" in output, output


def test_files_that_may_not_grow_are_named_by_every_rank(tmp_path: Path) -> None:
    """The same with a limit on the size of files, for machines where no disk can be mounted."""
    output = run("fill", str(tmp_path), "0", timeout=120)
    assert all(text in output for text in REFUSED) and "File too large" in output, output
