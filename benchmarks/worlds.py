"""Worlds of processes that wait, without using the machine, until they are given the turn.

    driver                       world "ours"            world "theirs"
      build ---------------------> builds its model
      build --------------------------------------------> builds its model
      run 2 steps ---------------> runs                    blocked in recv
            <--- begin, end, cpu -
      run 2 steps ------------------------------------->  runs
            <----------------------------- begin, end, cpu

Each side has processes of its own, so neither carries what the other has imported or started, and yet blocks of both
run right after one another.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.worker import ADDRESS_VARIABLE

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT = 120.0  # seconds


@dataclass(frozen=True)
class Side:
    """One of the things that are compared.

    Attributes:
        build: `module:function` whose result is the step and an answer for the driver, for example first losses.
        arguments: what the function is given.
        processes: how many.
        launcher: `mpi`, or `plain` for processes that find each other by torchrun's variables.
        python: the interpreter, where it is another one than the driver's.
    """

    name: str
    build: str
    arguments: dict[str, Any]
    processes: int = 2
    launcher: str = "plain"
    python: str = sys.executable


class Block(NamedTuple):
    """Seconds of one step, from the first process that began to the last that ended, and all their processor time."""

    seconds: float
    cpu: float
    cpu_by_rank: tuple[float, ...]


class World:
    """The processes of one side."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self._log = tempfile.TemporaryFile()
        key = secrets.token_bytes(16)
        with Listener(("127.0.0.1", 0), backlog=side.processes, authkey=key) as listener:
            self._jobs = self._start(f"{listener.address[1]}:{key.hex()}")
            try:
                self._connections = self._greet(listener)
            except BaseException:
                self.close()
                raise

    def _start(self, address: str) -> list["subprocess.Popen[bytes]"]:
        count = self.side.processes
        worker = [self.side.python, "-m", "benchmarks.worker"]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        common = {**os.environ, ADDRESS_VARIABLE: address, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        common |= {"SMP_LOG_LEVEL": os.environ.get("SMP_LOG_LEVEL", "WARNING")}
        if self.side.launcher == "mpi":
            beside = Path(sys.executable).parent / "mpirun"
            command = [str(beside) if beside.exists() else "mpirun", "--allow-run-as-root", "--oversubscribe"]
            commands = [([*command, "--bind-to", "none", "-np", str(count), *worker], common)]
        else:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
            meeting |= {"LOCAL_WORLD_SIZE": str(count)}
            commands = [
                (worker, {**common, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)
            ]
        jobs = []
        for command, environment in commands:
            jobs.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        return jobs

    def _greet(self, listener: Listener) -> list[Connection]:
        listener._listener._socket.settimeout(0.5)  # type: ignore[attr-defined]
        deadline = time.monotonic() + START_TIMEOUT
        arrived: list[Connection] = []
        while len(arrived) < self.side.processes:
            with suppress(TimeoutError):
                arrived.append(listener.accept())
                continue
            if time.monotonic() > deadline or any(job.poll() is not None for job in self._jobs):
                raise RuntimeError(f"'{self.side.name}' did not start:\n{self.output()}")
        return arrived

    def build(self) -> list[Any]:
        """Makes every process build its side. Returns their answers, in no order."""
        return self._ask(("build", self.side.build, self.side.arguments), 300.0)

    def run(self, steps: int) -> Block:
        """One block."""
        answers = self._ask(("run", steps), 300.0)
        seconds = max(end for _, end, _ in answers) - min(begin for begin, _, _ in answers)
        cpu = tuple(used / steps for _, _, used in answers)
        return Block(seconds / steps, sum(cpu), cpu)

    def _ask(self, order: tuple[Any, ...], timeout: float) -> list[Any]:
        with suppress(OSError):  # what has died shows below
            for connection in self._connections:
                connection.send(order)
        answers: dict[Connection, Any] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self._connections):
            waiting = [connection for connection in self._connections if connection not in answers]
            ready = [c for c in waiting if c in wait(waiting, max(0.0, deadline - time.monotonic()))]
            try:
                answers |= {connection: connection.recv() for connection in ready}
            except (EOFError, OSError):
                ready = []
            if not ready:
                raise RuntimeError(f"'{self.side.name}' failed at {order[0]}:\n{self.output()}")
        return [answers[connection] for connection in self._connections]

    def output(self) -> str:
        """The end of what the processes printed."""
        time.sleep(1.0)  # a failing process may still be writing its traceback
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-6000:]

    def close(self) -> None:
        """Ends the processes."""
        for connection in getattr(self, "_connections", []):
            connection.close()
        for job in self._jobs:
            with suppress(subprocess.TimeoutExpired):
                job.wait(5.0 if hasattr(self, "_connections") else 0.0)
        for job in self._jobs:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        self._log.close()


@contextmanager
def worlds(sides: list[Side]) -> Iterator[list[World]]:
    """A world for each side, built; closed at the end."""
    opened: list[World] = []
    try:
        for side in sides:
            opened.append(World(side))
        yield opened
    finally:
        for world in opened:
            world.close()
