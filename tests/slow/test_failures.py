"""However a rank ends, the job ends: soon, with a non-zero status, one traceback, and nothing left running."""

import re
import textwrap
import time

import pytest

from tests.harness import launch

pytestmark = pytest.mark.slow

LAUNCHERS = ["mpi", "torchrun"]

# Where rank 2 of 4 raises; {place} is replaced by the failing line in one of them.
SCRIPT = """
import atexit, os, sys, threading, time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK")))

def fail(place):
    if rank == 2 and place == "PLACE":
        FAILURE

fail("import")
import smp
if "PLACE" == "init" and rank == 2:
    class Config(dict):
        def items(self):
            fail("init")
        keys = __iter__ = items
    smp.init(Config(ddp=True))
smp.init({"ddp": True})
smp.barrier()
atexit.register(fail, "atexit")
if "PLACE" == "background thread" and rank == 2:
    threading.Thread(target=time.sleep, args=(1000,)).start()
    fail("background thread")
if "PLACE" == "inside a thread" and rank == 2:
    threading.Thread(target=fail, args=("inside a thread",)).start()
fail("user code")
if "PLACE" != "atexit":
    smp.recv_from(2) if rank == 0 else smp.barrier()
"""

PLACES = ["import", "init", "user code", "background thread", "inside a thread", "atexit"]


def job(place: str, failure: str, launcher: str) -> tuple[int, str, float]:
    """Exit status, output and seconds of a job of four in which rank 2 fails."""
    start = time.monotonic()
    done = launch(SCRIPT.replace("PLACE", place).replace("FAILURE", failure), 4, launcher, timeout=60)
    return done.returncode, done.stdout, time.monotonic() - start


def tracebacks(output: str) -> int:
    """How many tracebacks the ranks printed; torchrun's own, about a failed child, does not count."""
    return output.count("Traceback (most recent call last)") - output.count("raise ChildFailedError(")


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(place: str, launcher: str) -> None:
    """a8-1. A failure means that a user stares at a silent job, or cannot find the first error among many."""
    status, output, seconds = job(place, "raise ValueError('broken on purpose')", launcher)
    assert status != 0, output
    assert seconds < 30, output
    assert len(re.findall(r"^.*ValueError: broken on purpose", output, re.M)) == 1, output
    assert tracebacks(output) == 1, output
    if place == "import":  # smp is not there yet; the launcher itself names the rank
        assert re.search(r",2\]|rank +: 2", output), output
    else:
        assert "[rank 2] ValueError: broken on purpose" in output, output


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("place", ["import", "init", "user code", "background thread"])
def test_a_rank_that_exits_early_ends_the_job(place: str, launcher: str) -> None:
    """a8-1 with SystemExit(3). A failure means that ranks wait for one that has left."""
    status, output, seconds = job(place, "sys.exit(3)", launcher)
    assert status != 0, output
    assert seconds < 30, output
    if place in ("user code", "background thread"):
        assert re.search(r"\[rank \d\] smp.errors.CommError: rank 2 has exited while rank \d", output), output
        assert tracebacks(output) == 1, output


def script(text: str) -> str:
    return textwrap.dedent(text)
