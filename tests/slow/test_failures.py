"""However a rank ends, the job ends: soon, with a non-zero status, one traceback, and nothing left running.

`launch` itself fails when a process of the job is still alive after the launcher has ended.
"""

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
        print("failing at", time.time(), flush=True)
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
    """Exit status, output, and seconds from the failure to the end of a job of four in which rank 2 fails."""
    done = launch(SCRIPT.replace("PLACE", place).replace("FAILURE", failure), 4, launcher)
    end = time.time()
    start = re.search(r"failing at (\S+)", done.stdout)
    assert start, done.stdout
    return done.returncode, done.stdout, end - float(start[1])


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


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_is_missing_is_reported_while_the_others_wait(launcher: str) -> None:
    """a10-3. A failure means that users cannot tell waiting from hanging."""
    script = """
        import time
        import smp
        smp.init({"ddp": True})
        if smp.rank() == 1:
            time.sleep(6)  # line 6
        smp.barrier()
    """
    done = launch(textwrap.dedent(script), 4, launcher, env={"SMP_REPORT_AFTER": "4"})
    assert done.returncode == 0, done.stdout
    reports = re.findall(r".*waiting for \d s: (.*)", done.stdout)
    reports = [report for report in reports if "smp.init" not in report]  # ranks of a loaded machine start apart
    assert reports == ["rank 1 is missing in smp.barrier(WORLD), last seen at train.py:6"], done.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_wait_ends_at_the_timeout_with_the_missing_rank(launcher: str) -> None:
    """A failure means that a job in which one rank never arrives holds its machines for ever."""
    script = """
        import time
        import smp
        smp.init({"ddp": True})
        if smp.rank() == 1:
            time.sleep(1000)  # line 6
        smp.allgather(smp.rank())
    """
    done = launch(textwrap.dedent(script), 4, launcher, env={"SMP_TIMEOUT": "15"})
    assert done.returncode != 0, done.stdout
    message = (
        r"CommError: smp.allgather\(WORLD\) did not complete within 15 s \(SMP_TIMEOUT\): "
        r"rank 1 is missing in smp.allgather\(WORLD\), last seen at train.py:6"
    )
    assert len(re.findall(message, done.stdout)) == 1, done.stdout
    assert tracebacks(done.stdout) == 1, done.stdout


def test_a_wait_inside_torch_ends_at_the_timeout_too() -> None:
    """A failure means that a gradient reduction which one rank never joins hangs silently."""
    script = """
        import time, torch
        import smp
        from smp import runtime
        smp.init({"ddp": True})
        if smp.rank() == 1:
            time.sleep(1000)  # line 7
        with runtime.get().monitor.blocking("gradient reduction", [0, 1]):
            torch.distributed.all_reduce(torch.ones(3))
    """
    done = launch(textwrap.dedent(script), 2, env={"SMP_TIMEOUT": "15"})
    assert done.returncode != 0, done.stdout
    assert "gradient reduction did not complete within 15 s" in done.stdout, done.stdout
    assert "rank 1 is missing in gradient reduction, last seen at train.py:7" in done.stdout, done.stdout


def test_calls_that_wait_for_each_other_are_recognised_long_before_the_timeout() -> None:
    """A failure means that a collective call under a rank guard costs ten minutes to find."""
    script = """
        import smp
        smp.init({"ddp": True})
        if smp.rank() == 0:
            smp.barrier()  # line 5
        smp.recv_from(1 - smp.rank())
    """
    done = launch(textwrap.dedent(script), 2)
    assert done.returncode != 0, done.stdout
    assert "rank 0 waits in smp.barrier(WORLD) at train.py:5" in done.stdout, done.stdout
    assert "rank 1 waits in smp.recv_from(0, WORLD_RANK) at train.py:6" in done.stdout, done.stdout


def test_a_rank_that_never_calls_init_does_not_hold_the_others_for_ever() -> None:
    """A failure means that smp.init under a rank guard hangs inside MPI, where no deadline reaches."""
    script = """
        import os, time
        import smp
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            time.sleep(1000)
        smp.init({"ddp": True})  # line 6
    """
    done = launch(textwrap.dedent(script), 2, env={"SMP_TIMEOUT": "5"})
    assert done.returncode != 0, done.stdout
    assert "wait_until_all_ranks_have_called_smp_init" in done.stdout and 'train.py", line 6' in done.stdout


WRONG_CONFIGS = {
    "misspelt key": ({"tensor_paralell_degree": 2}, {}, ["tensor_paralell_degree", "tensor_parallel_degree"]),
    "wrong type": ({"microbatches": "4x"}, {}, ["microbatches", "4x"]),
    "out of range": ({"pipeline_parallel_degree": 0}, {}, ["pipeline_parallel_degree", "0"]),
    "exclusive": ({"fp16": True, "bf16": True}, {}, ["fp16", "bf16"]),
    "world": ({"pipeline_parallel_degree": 3, "ddp": True}, {}, ["pipeline_parallel_degree", "3", "2 processes"]),
    "environment": ({}, {"SM_HP_MP_PARAMETERS": '{"partitons": 2}'}, ["partitons", "partitions"]),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("case", list(WRONG_CONFIGS))
def test_a_wrong_configuration_is_refused_at_once(case: str, launcher: str) -> None:
    """a10-1. A failure means that a typo is ignored, or found late, or leaves ranks behind."""
    config, env, words = WRONG_CONFIGS[case]
    script = f"""
        import time
        import mpi4py, torch
        import smp
        start = time.monotonic()
        try:
            smp.init({config!r})
        except smp.ConfigError:
            print(f"refused after {{int(time.monotonic() - start)}}\\n", end="", flush=True)
            raise
    """
    done = launch(textwrap.dedent(script), 2, launcher, env=env)
    assert done.returncode != 0, done.stdout
    seconds = [int(number) for number in re.findall(r"refused after (\d+)", done.stdout)]
    assert seconds and max(seconds) < 10, done.stdout  # the launcher may end the second rank before it has printed
    assert done.stdout.count("smp.errors.ConfigError") == 1, done.stdout
    for word in words:
        assert word in done.stdout, done.stdout


def test_ranks_with_different_configurations_are_all_refused() -> None:
    """A failure means that ranks disagree about the grid and hang later."""
    script = """
        import os
        import smp
        smp.init({"ddp": True, "microbatches": 2 + int(os.environ["OMPI_COMM_WORLD_RANK"])})
    """
    done = launch(textwrap.dedent(script), 2)
    assert done.returncode != 0
    assert "microbatches is 2 on rank 0 and 3 on rank 1" in done.stdout, done.stdout
