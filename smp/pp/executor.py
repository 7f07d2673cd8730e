"""Runs the programs of a step's microbatches in the order of an action list.

A thread for each microbatch that has begun, exactly one running. A program has the turn until it stands at its next
stop; then it looks up whose turn is next and hands it over straight to that thread, or goes on when it is its own:

    thread 0   F0 | hand to 1                    | B0 ...
    thread 1          F1 | hand to 0 ........... |
                    ^ a stop: an edge of the plan; without a plan, the first backward

A program that leaves the plan is parked where it stands, as it is on every other rank; when the plan is through, parked
programs finish one by one. A program that fails ends the step: the others are unwound by an exception of their own.
"""

import contextvars
import enum
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from smp.bootstrap import AUTOCAST_DEVICES, device_state
from smp.pp.placed import current
from smp.pp.program import Program
from smp.pp.record import Measured, SpanKind
from smp.pp.schedule import Action, ActionKind

_SPAN_KINDS = {
    ActionKind.FORWARD: SpanKind.FORWARD,
    ActionKind.BACKWARD: SpanKind.BACKWARD,
    ActionKind.WEIGHT: SpanKind.WEIGHT,
}


class Phase(enum.Enum):
    """Where a microbatch's program stands."""

    NEW = enum.auto()
    RUNNING = enum.auto()
    PAUSED = enum.auto()
    PARKED = enum.auto()  # it has left the plan
    ENDED = enum.auto()


class _Unwind(BaseException):
    """Ends a paused program after another one failed."""


class Turns:
    """Hands turns to programs. `body(k)` is the step function on microbatch k; `before(i)` is called ahead of action i.

    After `run`, `left_plan` says whether a program did something else than planned, `measured` what actions took.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        body: Callable[[int], Any],
        actions: Sequence[Action],
        before: Callable[[int], None],
    ) -> None:
        self._programs = programs
        self._body = body
        self._actions = actions
        self._before = before
        self._deferred = {action[1:] for action in actions if action.kind is ActionKind.WEIGHT}
        count = len(programs)
        self.phases = [Phase.NEW] * count
        self.outputs: list[Any] = [None] * count
        self.measured: list[Measured] = []
        self.left_plan = False
        self._cursor = -1
        # Locks, not semaphores, which Python makes of several locks: a turn is handed over by releasing one.
        self._turn = [_held() for _ in range(count)]
        self._over = _held()
        self._failure: BaseException | None = None
        self._unwinding = False
        self._ended = [_held() for _ in range(count)]
        self._workers: list[Worker] = []
        self._state = ThreadState()
        self._step = programs[0].step
        self._began = self._waited = 0.0

    def run(self) -> list[Any]:
        """Run all programs to their ends. Returns what the step function returned."""
        try:
            first = self._next()
            assert first is not None
            self._hand(first)
            self._over.acquire()
            if self._failure is not None:
                raise self._failure
        finally:
            self._unwind()
        return self.outputs

    def pause(self, program: Program) -> None:
        """Called by a program at a stop: it goes on when its next turn comes."""
        self._end_turn()
        self._wait_for_turn(program, Phase.PAUSED)

    def park(self, program: Program) -> None:
        """Called by a program that leaves the plan: it goes on alone when the plan is through."""
        self.left_plan = True
        program.engine.last_plan = None
        self._end_turn()
        self._wait_for_turn(program, Phase.PARKED)

    def _wait_for_turn(self, program: Program, phase: Phase) -> None:
        k = program.index
        self.phases[k] = phase
        following = self._next()
        assert following is not None, "a paused program has a turn to come"
        if following != k:
            states = self._step.streams.snapshot()
            self._hand(following)
            self._turn[k].acquire()
            if self._unwinding:
                raise _Unwind
            self._step.streams.restore(states)
        self.phases[k] = Phase.RUNNING
        self._begin_turn()

    def _next(self) -> int | None:
        """The microbatch whose turn is next; None when all have ended."""
        while self._cursor + 1 < len(self._actions):
            self._cursor += 1
            action = self._actions[self._cursor]
            self._before(self._cursor)
            if action.kind is ActionKind.WEIGHT:
                self._begin_turn()
                self._programs[action.microbatch].run_deferred(action.segment)
                self._end_turn()
            elif self.phases[action.microbatch] in (Phase.NEW, Phase.PAUSED):
                return action.microbatch
        self._cursor = len(self._actions)
        for program in self._programs:
            if self.phases[program.index] is not Phase.ENDED:
                program.leave_plan()
                return program.index
        return None

    def _begin_turn(self) -> None:
        self._began, self._waited = time.perf_counter(), self._step.waited

    def _end_turn(self) -> None:
        if self._cursor == len(self._actions):
            return
        action, now = self._actions[self._cursor], time.perf_counter()
        self.measured.append(Measured(action, now - self._began - (self._step.waited - self._waited)))
        if self._step.recorder is not None:
            self._step.recorder.add(_SPAN_KINDS[action.kind], action.microbatch, action.segment, self._began, now)
        if action.kind is ActionKind.BACKWARD:
            self._programs[action.microbatch].end_backward_turn(action.segment, action[1:] in self._deferred)

    def _hand(self, k: int) -> None:
        if self._unwinding:
            raise _Unwind
        if self.phases[k] is Phase.NEW:
            self._workers.append(Worker.start(self._main, k))
        else:
            self._turn[k].release()

    def _main(self, k: int) -> None:
        following: int | None = k
        try:
            while following is not None and self.phases[following] is Phase.NEW:  # goes on in this thread
                k = following
                self.phases[k] = Phase.RUNNING
                self._begin_turn()
                self._state.context.copy().run(self._run_program, k)
                self._end(k)
                self._end_turn()
                following = self._next()
        except _Unwind:
            following = None
        except BaseException as error:  # handed to the main thread, which raises it
            self._failure, following = error, None
        finally:
            current.program = current.streams = None
            self._end(k)
            if following is None:
                if self._over.locked():  # in an interrupted step several programs may end it
                    self._over.release()
            elif not self._unwinding:
                self._hand(following)

    def _end(self, k: int) -> None:
        self.phases[k] = Phase.ENDED
        if self._ended[k].locked():
            self._ended[k].release()

    def _run_program(self, k: int) -> None:
        program = self._programs[k]
        with self._state.applied(), program.mode:
            current.program = program
            current.streams = program.step.streams
            program.start()
            self.outputs[k] = self._body(k)
            program.end()

    def _unwind(self) -> None:
        """End what has not ended, one program after another: none but the one that runs now gets anywhere."""
        self._unwinding = True
        for k, phase in enumerate(self.phases):
            if phase is not Phase.NEW:
                if self._turn[k].locked():
                    self._turn[k].release()
                self._ended[k].acquire()
        for worker in self._workers:
            worker.wait()


class Worker:
    """A thread that runs microbatches and outlives steps: starting one takes time, and so does what libraries set up
    for every new thread (buffers of matrix products, memory arenas)."""

    _idle: list["Worker"] = []

    def __init__(self) -> None:
        self._go = _held()
        self._finished = threading.Lock()
        self._job: tuple[Callable[..., None], tuple[Any, ...]] | None = None
        threading.Thread(target=self._loop, name="smp-microbatches", daemon=True).start()

    @classmethod
    def start(cls, function: Callable[..., None], *args: Any) -> "Worker":
        """Let an idle worker, or a new one, run `function`, which must not raise."""
        worker = cls._idle.pop() if cls._idle else cls()  # the one that was busy last: its memory is warm
        worker._job, worker._finished = (function, args), _held()
        worker._go.release()
        return worker

    def wait(self) -> None:
        """Until it has ended."""
        with self._finished:
            pass

    def _loop(self) -> None:
        while True:
            self._go.acquire()
            assert self._job is not None
            (function, args), finished = self._job, self._finished
            self._job = None
            function(*args)
            del function, args
            self._idle.append(self)
            finished.release()


def _held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class ThreadState:
    """The calling thread's state that a program must see: everything torch and Python keep per thread."""

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in AUTOCAST_DEVICES
        ]
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._function_modes = torch.overrides._get_current_function_mode_stack()
        self._dispatch_modes = _get_current_dispatch_mode_stack()
        self._saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        self._device = device_state()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Enter the same state in this thread."""
        with ExitStack() as stack:
            stack.enter_context(self._device())
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for device, enabled, dtype in self._autocast:
                if enabled:
                    stack.enter_context(torch.autocast(device, dtype, enabled, self._autocast_cache))
            if self._anomaly[0]:
                stack.enter_context(torch.autograd.set_detect_anomaly(*self._anomaly))
            if self._saved_tensor_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saved_tensor_hooks))
            for mode in self._function_modes:
                stack.enter_context(mode)
            for mode in self._dispatch_modes:
                stack.enter_context(mode)
            yield
