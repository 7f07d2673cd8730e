"""The harness itself: a test on several ranks must not pass, hang or hide anything when a rank does not do its part."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import ROOT, processes_of, test_environment

pytestmark = pytest.mark.slow

SUITE = """
import os, time
import pytest
import smp
from tests.harness import World, launch, on_ranks

PAIR = {"config": {"ddp": True}, "timeout": 20}


def pid_of_world():
    return World.get(2, "mpi").pids[0]


@on_ranks(2, **PAIR)
def test_passes():
    assert smp.allgather(smp.rank()) == [0, 1]


@on_ranks(2, **PAIR)
def test_fails_on_one_rank():
    smp.barrier()
    value = smp.rank()
    assert value == 0


@on_ranks(2, **PAIR)
def test_passes_in_the_same_world():
    assert smp.allgather(smp.rank()) == [0, 1]


@on_ranks(2, **PAIR)
def test_fails_while_the_other_rank_waits():
    if smp.rank() == 1:
        raise ValueError("broken on purpose")
    smp.barrier()


@on_ranks(2, **PAIR)
def test_passes_in_a_new_world():
    assert smp.allgather(smp.rank()) == [0, 1]


@on_ranks(2, config={"ddp": True}, timeout=5)
def test_hangs():
    if smp.rank() == 1:
        time.sleep(1000)


@on_ranks(2, **PAIR)
def test_dies():
    if smp.rank() == 1:
        os._exit(0)


@on_ranks(2, **PAIR)
def test_skips():
    pytest.skip("not here")


@on_ranks(2, **PAIR)
def test_skips_on_one_rank():
    if smp.rank() == 1:
        pytest.skip("not here")


@on_ranks(2, **PAIR)
def test_leaves_a_message_behind():
    if smp.rank() == 1:
        smp.recv_from  # rank 0's message is never received
    else:
        smp.send("x" * 1_000_000, 1)


@on_ranks(2, **PAIR)
def test_does_not_meet_that_message():
    if smp.rank() == 0:
        smp.send("mine", 1)
    else:
        assert smp.recv_from(0) == "mine"


@on_ranks(2, config={"microbatches": 0})
def test_has_a_wrong_configuration():
    pass


@pytest.mark.parametrize("value", [1, "two"])
@on_ranks(1, config=lambda arguments: {"microbatches": 1 if arguments["value"] == 1 else 2})
def test_takes_parameters(value, tmp_path):
    assert smp.state.cfg.microbatches == (1 if value == 1 else 2)
    assert tmp_path.exists()


def test_launches_a_job_that_hangs():
    launch("import time; time.sleep(1000)", 2, timeout=3)


def test_launches_a_job_that_starts_no_rank():
    done = launch("", 2, command=["/bin/false"])
    assert done.returncode == 0
"""

EXPECTED = {
    "test_passes": "passed",
    "test_fails_on_one_rank": "failed",
    "test_passes_in_the_same_world": "passed",
    "test_fails_while_the_other_rank_waits": "failed",
    "test_passes_in_a_new_world": "passed",
    "test_hangs": "failed",
    "test_dies": "failed",
    "test_skips": "skipped",
    "test_skips_on_one_rank": "failed",
    "test_leaves_a_message_behind": "passed",
    "test_does_not_meet_that_message": "passed",
    "test_has_a_wrong_configuration": "failed",
    "test_takes_parameters[1]": "passed",
    "test_takes_parameters[two]": "passed",
    "test_launches_a_job_that_hangs": "failed",
    "test_launches_a_job_that_starts_no_rank": "failed",
}


def run_pytest(suite: str, *arguments: str) -> tuple[str, list[int]]:
    """Output of pytest on a test file, and the processes that it left behind."""
    mark = f"harness-{os.getpid()}"
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "test_sample.py").write_text(suite)
        environment = test_environment(mark) | {"PYTHONPATH": f"{ROOT}{os.pathsep}{directory}"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", directory, *arguments],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
    return done.stdout, processes_of(mark)


def test_every_way_not_to_take_part_is_noticed() -> None:
    """A failure means that the suite can be green although ranks failed, or hides why they did."""
    output, left = run_pytest(SUITE)
    outcomes = dict(re.findall(r"^test_sample\.py::(\S+) (\w+)", output, re.M))
    assert {name: outcome.lower() for name, outcome in outcomes.items()} == EXPECTED, output
    assert "rank 1 failed first" in output and "assert 1 == 0" in output, output  # what was compared
    assert "ValueError: broken on purpose" in output and "ranks [0] did not end after another rank" in output, output
    assert "ranks [1] hang (limit 5 s)" in output, output
    assert re.search(r'test_sample.py", line \d+ in test_hangs', output), output  # where it hangs
    assert "ranks [1] died" in output and "skipped on ranks [1] only" in output, output
    assert "the job did not end within 3 s" in output, output
    assert "leaves messages behind" not in output, output  # the world goes on without them
    assert left == []


def test_no_worker_outlives_pytest(tmp_path: Path) -> None:
    """A failure means that an aborted pytest run leaves processes that compute or wait for ever."""
    suite = "from tests.harness import on_ranks\n"
    suite += "import os, signal, time\n@on_ranks(2)\ndef test_kills_pytest():\n"
    suite += f"    open({str(tmp_path / 'pid')!r} + str(os.getpid()), 'w')\n    time.sleep(1000)\n"
    (tmp_path / "test_sample.py").write_text(suite)
    environment = test_environment("pytest") | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    workers = wait_for(lambda: list(tmp_path.glob("pid*")), 2)
    process.kill()
    process.wait()
    assert wait_for(lambda: [w for w in workers if not Path("/proc", w.name.removeprefix("pid")).exists()], 2)


def wait_for(look: Callable[[], list[Path]], count: int) -> list[Path]:
    """Looks until there are `count` of them."""
    deadline = time.monotonic() + 120
    while len(found := look()) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found
