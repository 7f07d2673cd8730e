"""Saving while training goes on: one thread, at most one save at a time, no failure lost.

IDLE --start--> RUNNING --thread ends--> DONE --wait / the next save or resume / the program's end--> IDLE
                   |                       a failure is raised there, on every rank alike
                   +-- another save without blocking is refused, a blocking one waits
"""

import atexit
import threading
import time
import traceback
from collections.abc import Callable

import torch
from torch import Tensor

from smp import runtime
from smp.errors import CheckpointError

_POLL = 0.02  # seconds between two looks at the store


class HostCopies:
    """Copies of tensors in host memory that the next save uses again: memory that is new has to be mapped first, which
    takes longer than copying. Pinned where the tensors are on a device.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._used = 0

    def begin(self) -> None:
        """A new save: all copies may be overwritten."""
        self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Starts copying; `finish` ends it."""
        if self._used == len(self._kept) or not _alike(self._kept[self._used], tensor):
            del self._kept[self._used :]
            on_device = tensor.device.type != "cpu"
            self._kept.append(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=on_device))
        copy = self._kept[self._used]
        self._used += 1
        return copy.copy_(tensor, non_blocking=True)

    def finish(self, device: torch.device) -> None:
        """Returns when all copies have been made."""
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _alike(copy: Tensor, tensor: Tensor) -> bool:
    return copy.shape == tensor.shape and copy.dtype == tensor.dtype


class _Save(threading.Thread):
    """A save that is written while the script goes on."""

    def __init__(self, work: Callable[[], str]) -> None:
        super().__init__(name="smp-save", daemon=True)  # a crash shall not wait for it; a clean end does
        self._work = work
        self.problem = ""

    def run(self) -> None:
        try:
            self.problem = self._work()
        except BaseException as error:  # the main thread raises it
            self.problem = f"{type(error).__name__}: {error}"


copies = HostCopies()
_save: _Save | None = None
_registered = False


def start(work: Callable[[], str]) -> None:
    """Runs `work` on a thread; it returns what went wrong, or an empty text."""
    global _save, _registered
    assert _save is None
    if not _registered:
        atexit.register(_at_exit)  # after smp.init registered its own, so before that runs
        _registered = True
    save = _Save(work)
    save.start()
    _save = save


def is_running() -> bool:
    """Whether a save is under way."""
    return _save is not None and _save.is_alive()


def wait_for_checkpoint() -> None:
    """Returns when no save made with `blocking=False` is under way any more. Not collective.

    Raises:
        CheckpointError: the last one failed; every rank gets the same error, once: here, at the next save or resume,
            or at the program's end.
    """
    global _save
    save = _save
    if save is not None:
        save.join()
        _save = None
        if save.problem:
            raise CheckpointError(f"the checkpoint saved in the background could not be written: {save.problem}")


def sleep_until(timeout: float) -> Callable[[Callable[[], bool]], None]:
    """Waits as a background thread does: asleep; raises `CheckpointError` after `timeout` seconds."""

    def wait(test: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout
        while not test():
            if time.monotonic() > deadline:
                raise CheckpointError(f"not all ranks wrote their files within {timeout:g} s (SMP_TIMEOUT)")
            time.sleep(_POLL)

    return wait


def _at_exit() -> None:
    try:
        wait_for_checkpoint()
    except CheckpointError as error:
        monitor = runtime.get().monitor
        if monitor.size == 1:
            traceback.print_exception(error)
        monitor.report_failure(error)
        monitor.abort()  # an exception here would not change the program's exit status
