"""One rank of a reused test world: runs test bodies that the pytest process (harness.py) names.

Started by a launcher as `python -m tests.worker`. It connects back to the harness, whose address is in the environment,
and ends when that connection does, so that no worker outlives its pytest run.
"""

import faulthandler
import importlib
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from typing import Any

ADDRESS_VARIABLE = "SMP_HARNESS"  # port and key, separated by a colon
# Searching for the best plan takes a second, on every rank; tests of numbers need a plan, not the best one.
PLANNING = 10_000


@dataclass
class Job:
    """A test body to run: `module` and `name` say where it is, `config` goes to smp.init (None: the body does that)."""

    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    config: dict[str, Any] | None


@dataclass
class Reply:
    """How a body ended on one rank: `outcome` is passed, failed or skipped; `clean` whether no message is left over."""

    rank: int
    outcome: str
    text: str = ""
    clean: bool = True


def main() -> None:
    """Connects, then runs jobs until the harness is gone."""
    port, key = os.environ[ADDRESS_VARIABLE].split(":")
    with Client(("127.0.0.1", int(port)), authkey=bytes.fromhex(key)) as connection:
        stacks = open(os.environ["SMP_HARNESS_STACKS"] + f".{os.getpid()}", "w")
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        _rewrite_asserts()
        import torch

        from smp.pp import simulate

        torch.set_num_threads(1)
        simulate.NODE_BUDGET = PLANNING
        rank = _rank()
        connection.send((rank, os.getpid()))
        jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(connection, jobs), daemon=True).start()
        while True:
            data = jobs.get()
            connection.send(_run(rank, data))


def _rank() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))


def _rewrite_asserts() -> None:
    """Lets plain asserts of test bodies say what they compared, as under pytest itself."""
    from _pytest.config import _prepareconfig

    _prepareconfig(["-p", "no:cacheprovider", "--capture=no"])


def _read(connection: Connection, jobs: "queue.SimpleQueue[bytes]") -> None:
    try:
        while True:
            jobs.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(1)


def _run(rank: int, data: bytes) -> Reply:
    import pytest
    import torch

    from smp import runtime

    try:
        job: Job = pickle.loads(data)
        runtime.reset()
        torch.manual_seed(0)
        torch.set_grad_enabled(True)
        body = _find(job)
        if job.config is not None:
            runtime.init(job.config)
        body(*job.args, **job.kwargs)
        return Reply(rank, "passed", clean=_is_clean())
    except pytest.skip.Exception as skip:
        return Reply(rank, "skipped", str(skip), _is_clean())
    except BaseException as error:
        return Reply(rank, "failed", _format(error), _is_clean())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _find(job: Job) -> Any:
    found: Any = importlib.import_module(job.module)
    for part in job.name.split("."):
        found = getattr(found, part)
    return getattr(found, "__wrapped__", found)


def _is_clean(patience: float = 1.0) -> bool:
    """Whether no message is left over; sends need a moment until the receiver has taken them."""
    from smp import runtime

    deadline = time.monotonic() + patience
    while runtime._transport is not None and not runtime._transport.idle():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return runtime._transport is None or not runtime._transport.unexpected()


def _format(error: BaseException) -> str:
    where = error.__traceback__
    while where is not None and where.tb_frame.f_code.co_filename == __file__:
        where = where.tb_next
    return "".join(traceback.format_exception(type(error), error, where))


def drain() -> None:
    """Takes what the last test has left in the pipes: starting a world anew takes long."""
    from smp import runtime
    from smp.comm.mpi import MpiTransport
    from smp.topology import CommGroup

    runtime.init({"ddp": True})
    current = runtime.get()
    assert isinstance(current.transport, MpiTransport)
    mpi, transport = current.transport.mpi, current.transport
    for posted in [*transport.arriving, *(one for row in transport.waiting.values() for one in row)]:
        for request in (posted.header_request, *posted._parts):
            if request:
                request.Cancel()
                request.Wait()
    transport.arriving.clear()
    transport.waiting.clear()
    status = mpi.Status()
    for _ in range(3):
        transport.barrier(current.group(CommGroup.WORLD))
        time.sleep(0.01)
        for comm in (comm for comms in transport.comms.values() for comm in comms):
            while message := comm.Improbe(mpi.ANY_SOURCE, mpi.ANY_TAG, status):
                message.Recv([bytearray(status.Get_count(mpi.BYTE)), mpi.BYTE])
        transport.progress()


def check_health() -> None:
    """After a failed test: raises unless the ranks still understand each other and nothing is left in the pipes."""
    from smp import runtime
    from smp.topology import CommGroup

    runtime.init({"ddp": True})
    current = runtime.get()
    world = current.group(CommGroup.WORLD)
    current.transport.barrier(world)
    assert current.transport.all_gather_object(current.rank, world) == list(range(current.size))
    assert current.transport.idle()
    assert not current.transport.unexpected()


if __name__ == "__main__":
    from tests.worker import main as start  # replies are pickled as tests.worker.Reply, not as __main__.Reply

    start()
