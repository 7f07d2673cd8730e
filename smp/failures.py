"""How a job fails: every wait has a deadline, one traceback is printed, and no process is left behind.

Each rank runs one monitor thread with its own connection to the job's store. Keys there:

    events            counter, moves when a rank fails or exits; the one key that every monitor polls
    failed            the first rank that failed (compare-and-set, so that one traceback is printed)
    failure           one line about that failure
    exits             "2,0," ranks that have left their main program
    state/<rank>      the smp call in which that rank waits and for whom, and where in the user's script it is

    exception -> first to claim `failed` prints it -> the job is aborted -> waits elsewhere raise CommError
    clean end -> `exits` -> wait for the others    -> MPI_Finalize
                         -> a wait for a rank that has left raises CommError, unless what it sent still arrives
"""

import atexit
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import CodeType, FrameType, TracebackType
from typing import Any

from smp import log
from smp.bootstrap import World, seconds_from_environment, timeout_seconds
from smp.errors import CommError

DEFAULT_REPORT_AFTER = 30.0  # seconds after which a wait says for whom it waits
TICK = 0.25  # seconds between two looks of the monitor at the store
PUBLISH_EVERY = 1.5  # seconds between two publications of this rank's position
DEADLOCK_AFTER = 20.0  # seconds after which a wait looks whether it is part of a deadlock
DEADLOCK_STABLE = 5.0  # seconds for which a deadlock has to stay unchanged to be believed
SPIN = 40  # tests in a row before the first sleep
FIRST_SLEEP, LONGEST_SLEEP = 20e-6, 1e-3
LATE = 0.02  # sleeps are this part of the time waited so far: so much too late may a wait end
# Large messages travel in parts, each when both sides test. So a wait tests again and again while parts are coming: a
# test that moves one is slower, by BUSY seconds and more, than one that finds nothing. One that finds nothing is
# followed by sleep: processes that wait should leave the processors to those that compute.
HOT, BUSY = 200e-6, 3e-6
EXIT_GRACE = 1.5  # seconds for messages of a rank that has left to arrive
ABORT_GRACE = 5.0  # seconds in which the rank that failed first should end the job for all


@dataclass
class Wait:
    """One wait in progress.

    Attributes:
        call: the smp call, as users know it.
        ranks: world ranks that have to do something for it to end.
        hard: it happens inside C code and cannot be interrupted by an exception.
        next_report: seconds after which it says (again) for whom it waits.
        serial: a number that no other wait of this rank has.
        hopeless: why it can never end, once that is known.
    """

    call: str
    ranks: Sequence[int]
    hard: bool = False
    started: float = field(default_factory=time.monotonic)
    next_report: float = 0.0
    serial: int = 0
    hopeless: str | None = None

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self.started


class Monitor:
    """Watches this rank's waits and the other ranks' fates. One per process, made with the World."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rank, self.size = world.rank, world.size
        self.timeout = timeout_seconds()
        self.report_after = seconds_from_environment("SMP_REPORT_AFTER", DEFAULT_REPORT_AFTER)
        self.progress: Callable[[], bool] = lambda: False  # pushes outstanding sends; True while there are some
        self.advance: Callable[[], None] = lambda: None  # lets posted receives advance while something else is awaited
        self._store = world.side_store
        self._waits: dict[int, list[Wait]] = {}  # by thread
        self._serials = itertools.count(1)
        self._suspected: dict[int, Any] = {}  # the waits of what looked like a deadlock, and since when
        self._suspected_since = 0.0
        self._events = 0
        self._failure: tuple[int, str] | None = None
        self._failure_seen = 0.0
        self._exited: dict[int, float] = {}  # rank -> when this rank learned of it
        self._published: str | None = None
        self._published_at = 0.0
        self._unraisable_before = sys.unraisablehook
        self._sending = False
        self._left = False
        self._reported = False
        self._stop = threading.Event()
        self.thread: threading.Thread | None = None

    # Waiting

    def wait(self, test: Callable[[], bool], call: str, ranks: Sequence[int]) -> None:
        """Returns when `test()` is true. It is polled: at once, then ever more rarely, up to every millisecond.

        Args:
            test: becomes true when what is awaited has happened; may raise.
            call: the smp call, for messages.
            ranks: world ranks that have to act.

        Raises:
            CommError: the deadline passed, or a rank failed or left.
        """
        for _ in range(SPIN):
            if test():
                return
        wait = self._enter(Wait(call, ranks))
        try:
            began, fastest = time.perf_counter(), 1.0
            while True:
                self.advance()
                self._check(wait)
                if test():  # not timed: after a sleep everything is slow
                    return
                now = until = time.perf_counter()
                while now <= until:
                    before = now
                    if test():
                        return
                    now = time.perf_counter()
                    took = now - before
                    fastest = min(fastest, took)
                    if took > 3 * fastest + BUSY:  # it moved a part of a large message; the next part follows
                        until, began = now + HOT, now
                time.sleep(min(max(FIRST_SLEEP, LATE * (before - began)), LONGEST_SLEEP))
        finally:
            self._leave(wait)

    @contextmanager
    def blocking(self, call: str, ranks: Sequence[int]) -> Iterator[None]:
        """Around a wait inside C code (Work.wait): the same reports; at the deadline, or when a rank has failed, the
        monitor thread prints why and ends the job, as no exception can reach the waiting thread."""
        wait = self._enter(Wait(call, ranks, hard=True))
        try:
            yield
        finally:
            self._leave(wait)

    def _enter(self, wait: Wait) -> Wait:
        wait.next_report = self.report_after
        wait.serial = next(self._serials)
        self._waits.setdefault(threading.get_ident(), []).append(wait)
        return wait

    def _leave(self, wait: Wait) -> None:
        thread = threading.get_ident()
        waits = self._waits[thread]
        waits.remove(wait)
        if not waits:
            del self._waits[thread]

    def _check(self, wait: Wait) -> None:
        """Raises when there is no hope for this wait."""
        if self._failure is not None:
            rank, what = self._failure
            raise CommError(f"rank {rank} has failed ({what}) while rank {self.rank} was in {wait.call}")
        if self._exited:
            now = time.monotonic()
            gone = sorted(r for r in wait.ranks if now - self._exited.get(r, now) > EXIT_GRACE)
            if gone:
                raise CommError(f"{_ranks(gone)} exited while rank {self.rank} was waiting for it in {wait.call}")
        if wait.hopeless is not None:
            raise CommError(wait.hopeless)
        if wait.seconds > self.timeout:
            raise CommError(
                f"{wait.call} did not complete within {self.timeout:g} s (SMP_TIMEOUT): {self._who_is_missing(wait)}"
            )

    # What other ranks do

    def states(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """What those ranks last said about themselves: `call` (None: not in a wait) and `where`."""
        states: dict[int, dict[str, Any]] = {}
        for rank in ranks:
            key = f"state/{rank}"
            states[rank] = json.loads(self._store.get(key)) if self._store.check([key]) else {}
        return states

    def _who_is_missing(self, wait: Wait) -> str:
        others = [rank for rank in wait.ranks if rank != self.rank]
        states = self.states(others)
        missing = [rank for rank in others if states[rank].get("call") != wait.call]
        if not others:
            return f"{wait.call} waits for this rank's own work"
        if not missing:
            return f"{wait.call} waits for rank {_list(others)}, and all of them are in it"
        return "; ".join(f"rank {rank} is missing in {wait.call}, {_seen(states[rank])}" for rank in missing)

    def _speaks_for(self, wait: Wait) -> bool:
        """One of the ranks that are in the same call reports, not each."""
        below = [rank for rank in wait.ranks if rank < self.rank]
        return all(state.get("call") != wait.call for state in self.states(below).values())

    # The monitor thread

    def start(self) -> None:
        """Installs the hooks and starts the thread. In a world of one there is nobody to tell."""
        if self.size == 1:
            return
        self.install_hooks()
        atexit.register(self._at_exit)
        self.thread = threading.Thread(target=self._run, name="smp-monitor", daemon=True)
        self.thread.start()

    def install_hooks(self) -> None:
        """Makes uncaught exceptions ours. Again after torch.distributed has started, which wraps sys.excepthook."""
        if self.size > 1:
            sys.excepthook = self._on_uncaught
            threading.excepthook = self._on_thread_uncaught
            if sys.unraisablehook != self._on_unraisable:
                self._unraisable_before = sys.unraisablehook
                sys.unraisablehook = self._on_unraisable

    def _run(self) -> None:
        lost_since: float | None = None
        tick = max(TICK, self.size / 1000)
        while not self._stop.wait(tick):
            self._push()
            try:
                self._look()
                lost_since = None
            except Exception as error:  # the store is in rank 0's process, or in torchrun's
                if self._stop.is_set():
                    return
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > ABORT_GRACE and self._failure is None:
                    self._learn_failure(0, f"its store cannot be reached any more: {error}")
            if self._failure is not None and time.monotonic() - self._failure_seen > 2 * ABORT_GRACE:
                self.abort()

    def _push(self) -> None:
        """Messages make progress even while this rank is inside torch for long, where nobody polls."""
        try:
            self._sending = self.progress()
            self.advance()
        except Exception as error:
            self.report_failure(error)
            self.abort()

    def _look(self) -> None:
        """One look at the store, one publication, and a look at this rank's own waits."""
        if not threading.main_thread().is_alive():
            self._announce_exit()  # the program has ended, but another thread keeps the process alive
        events = self._store.add("events", 0)
        if events != self._events:
            self._read_events()
            self._events = events
        self._publish()
        for waits in list(self._waits.values()):
            for wait in list(waits):
                self._look_at(wait)

    def _read_events(self) -> None:
        if self._failure is None and self._store.check(["failed"]):
            rank = int(self._store.get("failed"))
            if rank != self.rank:
                self._learn_failure(rank, self._store.get("failure").decode())
        if self._store.check(["exits"]):
            for gone in self._store.get("exits").decode().split(",")[:-1]:
                self._exited.setdefault(int(gone), time.monotonic())

    def _learn_failure(self, rank: int, what: str) -> None:
        self._failure_seen = time.monotonic()
        self._failure = (rank, what)

    def _look_at(self, wait: Wait) -> None:
        if wait.hard:
            try:
                self._check(wait)
            except CommError as error:
                self.report_failure(error)
                self.abort()
        if wait.seconds > DEADLOCK_AFTER and wait.hopeless is None:
            wait.hopeless = self._find_deadlock(wait)
        if wait.seconds > wait.next_report:
            wait.next_report *= 2
            if self._speaks_for(wait):
                log.get_logger().warning("waiting for %.0f s: %s", wait.seconds, self._who_is_missing(wait))

    def _find_deadlock(self, wait: Wait) -> str | None:
        """What to say when this rank and those it waits for, and so on, have only been waiting for each other for a
        while, with nothing on its way between them."""
        states = self.states(range(self.size))
        ring = waiting_for_each_other(self.rank, states)
        waits = {rank: states[rank]["waits"] for rank in ring}
        now = time.monotonic()
        if not ring or waits != self._suspected:
            self._suspected, self._suspected_since = waits, now
            return None
        if now - self._suspected_since < DEADLOCK_STABLE:
            return None
        lines = "; ".join(
            f"rank {rank} waits in {states[rank]['call']} at {states[rank]['where']}" for rank in sorted(ring)
        )
        return f"deadlock in {wait.call}: {lines}; these ranks wait for each other and none of them can go on"

    def _publish(self) -> None:
        now = time.monotonic()
        if now - self._published_at < PUBLISH_EVERY:
            return
        waits = [wait for waits in list(self._waits.values()) for wait in waits]
        state = json.dumps(
            {
                "call": waits[-1].call if waits else None,
                "where": main_thread_position(),
                "waits": [[wait.serial, list(wait.ranks)] for wait in waits],
                "sending": self._sending,
            }
        )
        if state != self._published:
            self._store.set(f"state/{self.rank}", state)
            self._published, self._published_at = state, now

    # Ends

    def report_failure(self, error: BaseException) -> None:
        """Tells all ranks that this one failed. The first rank to do so prints its traceback, the others are silent."""
        if self.size == 1 or self._reported:
            return
        self._reported = True
        first = True
        with suppress(Exception):  # a store that is gone cannot arbitrate
            what = f"{type(error).__name__}: {error}".splitlines()[0][:500]
            if not self._store.check(["failed"]):
                self._store.set("failure", what)
            claimed = self._store.compare_set("failed", "", str(self.rank))
            first = int(claimed) == self.rank
            self._store.add("events", 1)
        if not first:
            return
        text = "".join(traceback.format_exception(error))
        lines = [f"[rank {self.rank}] {line}" for line in text.splitlines()]
        _flush()
        sys.stderr.write("\n".join([f"smp: rank {self.rank} of {self.size} failed", *lines]) + "\n")
        _flush()
        self._failure = self._failure or (self.rank, "this rank")

    def abort(self, code: int = 1) -> None:
        """Ends this process at once and, under mpirun, the job. Does not return."""
        _flush()
        time.sleep(0.2)  # launchers read the output of a process that still lives
        if self._failure is not None and self._failure[0] != self.rank:
            time.sleep(ABORT_GRACE)
        if self.world.mpi is not None and not self.world.mpi.Is_finalized():
            self.world.mpi.COMM_WORLD.Abort(code)
        os._exit(code)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        self.report_failure(error.with_traceback(where))
        self.abort()

    def _on_thread_uncaught(self, args: threading.ExceptHookArgs) -> None:
        if self._left:  # the interpreter is being torn down, and daemon threads with it
            threading.__excepthook__(args)
        elif args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            self.report_failure(args.exc_value)
            self.abort()

    def _on_unraisable(self, args: "sys.UnraisableHookArgs") -> None:
        if args.exc_value is not None and "atexit" in (args.err_msg or ""):
            self.report_failure(args.exc_value)
            self.abort()
        self._unraisable_before(args)

    def _announce_exit(self) -> None:
        if not self._left:
            self._left = True
            self._store.append("exits", f"{self.rank},")  # type: ignore[attr-defined]
            self._store.add("events", 1)

    def _at_exit(self) -> None:
        """Leaves together with the others: a rank that ends early must push what it sent, and be known as gone."""
        try:
            self._announce_exit()
            deadline = time.monotonic() + self.timeout
            while len(self._exited) < self.size and self._failure is None:
                self.progress()
                time.sleep(0.01)
                if time.monotonic() > deadline:
                    late = sorted(set(range(self.size)) - set(self._exited))
                    self.report_failure(CommError(f"{_ranks(late)} did not exit within {self.timeout:g} s"))
            if self._failure is not None:
                self.abort()
            self._stop.set()
            if self.thread is not None:
                self.thread.join(ABORT_GRACE)
            self._close()
        except Exception as error:
            self.report_failure(error)
            self.abort()

    def _close(self) -> None:
        """Rank 0's process may hold the store, so it goes last."""
        if self.rank:
            self._store.add("closed", 1)
        else:
            deadline = time.monotonic() + ABORT_GRACE
            while self._store.add("closed", 0) < self.size - 1 and time.monotonic() < deadline:
                time.sleep(0.005)
        if self.world.mpi is not None and self.world.owns_mpi and not self.world.mpi.Is_finalized():
            self.world.mpi.Finalize()


def waiting_for_each_other(start: int, states: Mapping[int, Mapping[str, Any]]) -> set[int]:
    """The ranks that `start` waits for, directly or through others, and itself, when none of them can go on.

    A rank waits for those of its wait's ranks that are in another call than itself. When all ranks that are reached so
    are in one wait each, wait for somebody, and have no message on its way, nobody will ever act. Empty: somebody may.
    """
    reached, pending = {start}, [start]
    while pending:
        rank = pending.pop()
        state = states.get(rank) or {}
        if len(state.get("waits", ())) != 1 or state.get("sending"):
            return set()
        blockers = [
            other
            for other in state["waits"][0][1]
            if other != rank and (states.get(other) or {}).get("call") != state["call"]
        ]
        if not blockers:
            return set()
        pending.extend(set(blockers) - reached)
        reached.update(blockers)
    return reached


# Text

_LIBRARIES = tuple(
    os.path.join(path, "")
    for path in {
        os.path.dirname(os.path.abspath(__file__)),
        os.path.dirname(os.path.abspath(os.__file__)),
        os.path.join(sys.prefix, "lib"),
    }
)


def _is_library(code: CodeType) -> bool:
    return code.co_filename.startswith((*_LIBRARIES, "<"))


def main_thread_position() -> str:
    """`train.py:45`: the innermost line of the user's own code that the main thread is in."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None and _is_library(frame.f_code):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "the end of its program"
    path = frame.f_code.co_filename
    short = os.path.relpath(path) if os.path.isabs(path) else path
    return f"{path if short.startswith('..') else short}:{frame.f_lineno}"


def _seen(state: dict[str, Any]) -> str:
    if not state:
        return "which has said nothing yet"
    call = f" in {state['call']}" if state["call"] else ""
    return f"last seen{call} at {state['where']}"


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {_list(ranks)} have"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
