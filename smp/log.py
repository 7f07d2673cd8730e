"""Logging with the rank in front of every line: `[smp rank 2] ...` on stderr.

The level is INFO unless the environment variable `SMP_LOG_LEVEL` names another one.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LONG = 5.0  # seconds after which a phase says that it is running
_LOGGER = logging.getLogger("smp")
_seen: set[str] = set()
_rank: int | None = None


class _StderrHandler(logging.Handler):
    """Writes to whatever `sys.stderr` is at that moment, in one write per line so that ranks do not mix inside it."""

    def emit(self, record: logging.LogRecord) -> None:
        where = "smp" if _rank is None else f"smp rank {_rank}"
        level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        try:
            sys.stderr.write(f"[{where}] {level}{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # stderr is closed: the process is on its way out
            pass


def get_logger() -> logging.Logger:
    """The logger of the package. Its handler is attached at the first call, never at import."""
    if not _LOGGER.handlers:
        _LOGGER.addHandler(_StderrHandler())
        _LOGGER.propagate = False
        level = os.environ.get("SMP_LOG_LEVEL", "INFO").upper()
        _LOGGER.setLevel(level if level in logging.getLevelNamesMapping() else logging.INFO)
    return _LOGGER


def set_rank(rank: int | None) -> None:
    """Sets the world rank that lines carry from now on (None: not known)."""
    global _rank
    _rank = rank


def info_rank0(message: str, *args: object) -> None:
    """Logs at INFO on world rank 0, and in a process that has no rank yet."""
    if _rank in (None, 0):
        get_logger().info(message, *args)


def warn_rank0(message: str, *args: object) -> None:
    """Logs a warning on world rank 0, and in a process that has no rank yet."""
    if _rank in (None, 0):
        get_logger().warning(message, *args)


def warn_once(key: str, message: str, *args: object) -> None:
    """Logs a warning on the calling rank, once per process for each `key`."""
    if key not in _seen:
        _seen.add(key)
        get_logger().warning(message, *args)


def forget_warnings() -> None:
    """Makes every `warn_once` speak again (a new configuration starts in the same processes)."""
    _seen.clear()


@contextmanager
def long_phase(name: str, after: float | None = None) -> Iterator[None]:
    """Says on world rank 0 that a phase is running when it takes longer than `after` seconds (None: `LONG`), and how
    long it took.

    A user who sees nothing cannot tell waiting from hanging.
    """
    if _rank not in (None, 0):
        yield
        return
    after = LONG if after is None else after
    begin = time.monotonic()
    timer = threading.Timer(after, info_rank0, ("%s: still at it after %.0f s", name, after))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        took = time.monotonic() - begin
        if took > after:
            info_rank0("%s: ended after %.1f s", name, took)
