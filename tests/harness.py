"""Runs test functions on several ranks, in worlds that are started once per pytest run and reused.

    from tests.harness import on_ranks

    @on_ranks(4, config={"pipeline_parallel_degree": 2, "ddp": True})
    def test_something():
        ...                      # runs on each of four ranks, with smp initialised; plain asserts

    pytest process                        launcher (mpirun, torchrun, none)
    World.run(job)  --- job ----------->  rank 0..n-1: tests/worker.py
                    <-- one reply each -

A test fails when a rank fails (its traceback is shown), dies, or does not reply in time (the stacks of all ranks are
shown). A world that may be damaged is killed and started anew when next needed. `launch` runs a script of its own.
"""

import atexit
import contextlib
import functools
import os
import pickle
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import pytest

from tests.worker import ADDRESS_VARIABLE, Job, Reply

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT = 120.0  # seconds for all ranks of a world to come up
FAILURE_GRACE = 2.0  # seconds for the other ranks to reply when one has failed
HEALTH_TIMEOUT = 10.0
# What mpirun says, rarely and on busy machines, when it could not start itself; nothing of ours has run then.
LAUNCHER_FAULT = "The PMIx server's listener thread failed to start"
LAUNCHER_ATTEMPTS = 3
# Threads of the runtime and of the worker that wait in every process.
_IDLE_THREADS = re.compile(r"failures.py\", line \d+ in _run|worker.py\", line \d+ in _read|^[^\n]*\n[^\n]* in _loop")
MARK_VARIABLE = "SMP_TEST_JOB"  # in the environment of every process of a job, so that all of them can be found


def on_ranks(
    n: Any, *, config: Any = None, launcher: Any = "mpi", timeout: float = 60.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test function run on every rank of a world of `n` ranks.

    Arguments (parametrized values, fixtures) are pickled. `n`, `config` and `launcher` may be functions of the test's
    keyword arguments, as a dict.

    Args:
        n: number of ranks; 1 is a worker process too.
        config: what smp.init gets before the body runs; None: smp is not initialised.
        launcher: `mpi` or `torchrun`.
        timeout: seconds after which the test fails and the world is killed.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            size, settings, started_by = (
                option(kwargs) if callable(option) else option for option in (n, config, launcher)
            )
            world = World.get(size, started_by)
            world.run(Job(body.__module__, body.__qualname__, args, kwargs, settings), timeout)

        return test

    return decorate


def launcher_command(n: int, launcher: str) -> list[str]:
    """The command line that starts `n` processes of the Python program that follows it."""
    if launcher == "single" or n == 1:
        return [sys.executable]
    if launcher == "mpi":
        return [
            *[_tool("mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(n)],
            sys.executable,
        ]
    assert launcher == "torchrun", f"unknown launcher {launcher}"
    return [
        *[sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n)],
        *["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"],
    ]


def _tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} is not installed"
    return found


def test_environment(mark: str) -> dict[str, str]:
    """The environment of test processes: one thread each, this checkout first, no launcher above us."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("OMPI_", "PMIX_", "PRTE_", "TORCHELASTIC_", "SM_HP_"))
        and key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
    # Unbuffered processes write a line in pieces, which tear when several share one pipe.
    return environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "", MARK_VARIABLE: mark}


test_environment.__test__ = False  # type: ignore[attr-defined]


class World:
    """Processes that stay up between tests."""

    _running: dict[tuple[int, str], "World"] = {}

    @classmethod
    def get(cls, n: int, launcher: str) -> "World":
        """The running world of that size and launcher; started when there is none."""
        key = (n, "mpi" if n == 1 else launcher)
        for attempt in range(LAUNCHER_ATTEMPTS):
            if key in cls._running:
                break
            try:
                cls._running[key] = cls(*key)
            except pytest.fail.Exception as failure:
                if LAUNCHER_FAULT not in str(failure) or attempt == LAUNCHER_ATTEMPTS - 1:
                    raise
        return cls._running[key]

    @classmethod
    def close_all(cls) -> None:
        """Ends every world."""
        for world in list(cls._running.values()):
            world.close()

    def __init__(self, n: int, launcher: str) -> None:
        self.n, self.launcher = n, launcher
        self.mark = secrets.token_hex(8)
        self.directory = Path(tempfile.mkdtemp(prefix="smp-tests-"))
        self.log = self.directory / "log"
        self.connections: dict[int, Connection] = {}
        self.pids: dict[int, int] = {}
        key = secrets.token_bytes(16)
        with Listener(("127.0.0.1", 0), backlog=n, authkey=key) as listener:
            environment = test_environment(self.mark) | {
                ADDRESS_VARIABLE: f"{listener.address[1]}:{key.hex()}",
                "SMP_HARNESS_STACKS": str(self.directory / "stacks"),
                "SMP_TIMEOUT": os.environ.get("SMP_TIMEOUT", "50"),
            }
            with open(self.log, "wb") as output:
                self.process = subprocess.Popen(
                    [*launcher_command(n, launcher), "-m", "tests.worker"],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            try:
                self._greet(listener)
            except BaseException:
                self.close()
                raise

    def _greet(self, listener: Listener) -> None:
        """Waits until every rank has connected."""
        deadline = time.monotonic() + START_TIMEOUT
        listener._listener._socket.settimeout(0.5)  # type: ignore[attr-defined]
        arrived: list[Connection] = []
        while len(arrived) < self.n:
            with contextlib.suppress(TimeoutError):
                arrived.append(listener.accept())
                continue
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(
                    f"a world of {self.n} ranks ({self.launcher}) did not start: {len(arrived)} ranks came up\n"
                    + self._output(0),
                    pytrace=False,
                )
        for connection in arrived:
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                pytest.fail(f"a rank of a new world said nothing\n{self._output(0)}", pytrace=False)
            try:
                rank, pid = connection.recv()
            except EOFError:
                pytest.fail(f"a rank of a new world died\n{self._output(0)}", pytrace=False)
            self.connections[rank], self.pids[rank] = connection, pid
        assert sorted(self.connections) == list(range(self.n)), f"ranks {sorted(self.connections)} came up"

    def run(self, job: Job, timeout: float) -> None:
        """Runs a job on all ranks and raises its outcome in pytest's terms."""
        start = self.log.stat().st_size
        replies, problem = self._collect(job, timeout)
        failed = [reply for reply in replies if reply.outcome == "failed"]
        skipped = [reply for reply in replies if reply.outcome == "skipped"]
        if problem is None and not failed:
            if not all(reply.clean for reply in replies) and not (self._does("drain") and self._healthy()):
                warnings.warn(f"{job.name} leaves messages behind; its world is started anew", stacklevel=2)
                self.close()  # the messages could meet the next test
            if len(skipped) == self.n:
                pytest.skip(skipped[0].text)
            if not skipped:
                return
            problem = f"skipped on ranks {[reply.rank for reply in skipped]} only"
        text = self._describe(failed, problem, start)
        if problem is not None or not self._healthy():
            self.close()
        pytest.fail(text, pytrace=False)

    def _collect(self, job: Job, timeout: float) -> tuple[list[Reply], str | None]:
        """Replies in order of arrival, and what is wrong when some are missing."""
        data = pickle.dumps(job)
        dead: list[int] = []
        for rank, connection in self.connections.items():
            try:
                connection.send_bytes(data)
            except OSError:
                dead.append(rank)
        replies: list[Reply] = []
        waiting = {connection: rank for rank, connection in self.connections.items() if rank not in dead}
        deadline = time.monotonic() + timeout
        while waiting and time.monotonic() < deadline:
            for connection in wait(list(waiting), max(0.0, deadline - time.monotonic())):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    replies.append(connection.recv())
                except (EOFError, OSError):
                    dead.append(rank)
                if dead or replies[-1].outcome == "failed":
                    deadline = min(deadline, time.monotonic() + FAILURE_GRACE)
        if dead:
            return replies, f"ranks {sorted(dead)} died{self._stacks(sorted(waiting.values()))}"
        if waiting:
            missing = sorted(waiting.values())
            what = "did not end after another rank had failed" if replies and self._any_failed(replies) else "hang"
            return replies, f"ranks {missing} {what} (limit {timeout:g} s){self._stacks(missing)}"
        return replies, None

    @staticmethod
    def _any_failed(replies: list[Reply]) -> bool:
        return any(reply.outcome == "failed" for reply in replies)

    def _describe(self, failed: list[Reply], problem: str | None, start: int) -> str:
        parts = [f"{self.n} ranks, launcher {self.launcher}"]
        if failed:
            others = f" (failed too: ranks {sorted(reply.rank for reply in failed[1:])})" if failed[1:] else ""
            parts.append(f"rank {failed[0].rank} failed first{others}:\n{failed[0].text}")
        if problem:
            parts.append(problem)
        output = self._output(start)
        if output:
            parts.append(f"output of the ranks:\n{output}")
        return "\n".join(parts)

    def _output(self, start: int) -> str:
        with open(self.log, "rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")[-6000:]

    def _stacks(self, ranks: list[int]) -> str:
        """Where the Python threads of those ranks are."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.5 if ranks else 0)
        texts = []
        for rank in ranks:
            path = Path(f"{self.directory}/stacks.{self.pids[rank]}")
            if path.exists():
                threads = path.read_text().split("\n\n")
                shown = "\n\n".join(thread for thread in threads if not _IDLE_THREADS.search(thread))
                texts.append(f"\nrank {rank} is at:\n{shown[-5000:]}")
        return "".join(texts)

    def _healthy(self) -> bool:
        """Whether the world can be used again although a test failed."""
        return self._does("check_health")

    def _does(self, what: str) -> bool:
        """Whether all ranks do what that function of the worker does."""
        if self.launcher == "torchrun":
            return False
        replies, problem = self._collect(Job("tests.worker", what, (), {}, None), HEALTH_TIMEOUT)
        return problem is None and all(reply.outcome == "passed" for reply in replies)

    def close(self) -> None:
        """Kills all processes of this world; another one is started when needed."""
        for key, world in list(self._running.items()):
            if world is self:
                del self._running[key]
        for connection in self.connections.values():
            connection.close()
        kill_job(self.mark, self.process)
        shutil.rmtree(self.directory, ignore_errors=True)


atexit.register(World.close_all)


# Whole jobs


def processes_of(mark: str) -> list[int]:
    """Ids of the living processes whose environment carries this mark."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0") and _state(path.parent) != "Z":
                found.append(int(path.parent.name))
    return found


def _state(process: Path) -> str:
    return (process / "stat").read_text().rpartition(")")[2].split()[0]


def kill_job(mark: str, process: "subprocess.Popen[Any]") -> None:
    """Kills the launcher and every process that it started."""
    for _ in range(3):
        for pid in processes_of(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
        if not processes_of(mark):
            return


def launch(
    script: str,
    n: int,
    launcher: str = "mpi",
    env: dict[str, str] | None = None,
    timeout: float = 120.0,
    args: tuple[str, ...] = (),
    command: list[str] | None = None,
    unset: tuple[str, ...] = (),
) -> "subprocess.CompletedProcess[str]":
    """Runs a script as a job of its own and returns its exit status and output (stderr is merged into stdout).

    Args:
        script: the program's text; it is written to `train.py` in an empty directory, which is the working directory.
        n: number of processes.
        launcher: `mpi`, `torchrun` or `single`.
        env: additional environment variables.
        timeout: seconds; when they are over everything is killed and the calling test fails with the output so far.
        command: what to put before the script, instead of the launcher's usual command line.
        unset: environment variables that the job shall not see.

    The test fails too when a process of the job is still alive a few seconds after the launcher has ended.
    """
    __tracebackhide__ = True
    for _ in range(LAUNCHER_ATTEMPTS):
        done = _launch_once(script, command or launcher_command(n, launcher), env or {}, timeout, args, unset)
        if LAUNCHER_FAULT not in done.stdout:
            break
    return done


def _launch_once(
    script: str, command: list[str], env: dict[str, str], timeout: float, args: tuple[str, ...], unset: tuple[str, ...]
) -> "subprocess.CompletedProcess[str]":
    __tracebackhide__ = True
    mark = secrets.token_hex(8)
    environment = test_environment(mark) | env
    for name in unset:
        environment.pop(name, None)
    with _script(script) as path, open(path.parent / "output", "w+") as output:
        process = subprocess.Popen(
            [*command, path.name, *args],
            cwd=path.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            late = not _ends(process, timeout)
            left = [] if late else _left_running(mark)
        finally:
            kill_job(mark, process)
        output.seek(0)
        text = output.read()
    if late:
        pytest.fail(f"the job did not end within {timeout:g} s:\n{text}", pytrace=False)
    if left:
        pytest.fail(f"processes {left} were left running:\n{text}", pytrace=False)
    return subprocess.CompletedProcess(process.args, process.returncode, text, "")


@contextlib.contextmanager
def _script(text: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="smp-job-") as directory:
        path = Path(directory) / "train.py"
        path.write_text(text)
        yield path


def _ends(process: "subprocess.Popen[Any]", timeout: float) -> bool:
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        return False
    return True


def _left_running(mark: str, patience: float = 5.0) -> list[int]:
    deadline = time.monotonic() + patience
    while (left := processes_of(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
