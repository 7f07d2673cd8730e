"""Runs the programs of a step's microbatches in the order of an action list.

One thread per microbatch, exactly one running: the main thread hands the turn to a program and waits until the program
gives it back, at its pause before backward or at its end. A program that fails gives the turn back with its exception;
the others are then unwound by an exception of their own, so that nothing of the step stays behind.
"""

import contextvars
import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from smp.bootstrap import AUTOCAST_DEVICES, device_state
from smp.pp.placed import current
from smp.pp.program import Program
from smp.pp.schedule import Action, ActionKind


class Phase(enum.Enum):
    """Where a microbatch's program stands."""

    NEW = enum.auto()
    FORWARD = enum.auto()
    PAUSED = enum.auto()
    BACKWARD = enum.auto()
    ENDED = enum.auto()


class _Unwind(BaseException):
    """Ends a paused program after another one failed."""


class Turns:
    """Hands turns to programs. `body(k)` is the step function on microbatch k."""

    def __init__(self, programs: Sequence[Program], body: Callable[[int], Any]) -> None:
        self._programs = programs
        self._body = body
        count = len(programs)
        self.phases = [Phase.NEW] * count
        self.outputs: list[Any] = [None] * count
        self._turn = [threading.Semaphore(0) for _ in range(count)]
        self._given_back = threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._unwinding = False
        self._threads: list[threading.Thread | None] = [None] * count
        self._state = ThreadState()

    def run(self, actions: Sequence[Action], before: Callable[[int], None]) -> list[Any]:
        """Run all programs; `before(i)` is called ahead of action i. Returns what the step function returned."""
        try:
            for position, (kind, microbatch, _) in enumerate(actions):
                before(position)
                if kind is ActionKind.FORWARD:
                    self._start(microbatch)
                elif self.phases[microbatch] is Phase.PAUSED:
                    self._resume(microbatch)
                if self._failure is not None:
                    raise self._failure
        finally:
            self._unwind()
        return self.outputs

    def pause(self, program: Program) -> None:
        """Called by a program ahead of its first backward: gives the turn back and waits for the next one."""
        k = program.index
        self.phases[k] = Phase.PAUSED
        self._given_back.release()
        self._turn[k].acquire()
        if self._unwinding:
            raise _Unwind
        self.phases[k] = Phase.BACKWARD

    def _start(self, k: int) -> None:
        self.phases[k] = Phase.FORWARD
        thread = threading.Thread(target=self._main, args=(k,), name=f"microbatch-{k}", daemon=True)
        self._threads[k] = thread
        thread.start()
        self._given_back.acquire()

    def _resume(self, k: int) -> None:
        self._turn[k].release()
        self._given_back.acquire()

    def _main(self, k: int) -> None:
        try:
            self._state.context.copy().run(self._run_program, k)
        except _Unwind:
            pass
        except BaseException as error:  # handed to the main thread, which raises it
            self._failure = error
        finally:
            current.program = current.streams = None
            self.phases[k] = Phase.ENDED
            self._given_back.release()

    def _run_program(self, k: int) -> None:
        program = self._programs[k]
        with self._state.applied(), program.mode:
            current.program = program
            current.streams = program.step.streams
            program.start()
            self.outputs[k] = self._body(k)
            program.end()

    def _unwind(self) -> None:
        self._unwinding = True
        for k, phase in enumerate(self.phases):
            if phase is Phase.PAUSED:
                self._resume(k)
        for thread in self._threads:
            if thread is not None:
                thread.join()


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
