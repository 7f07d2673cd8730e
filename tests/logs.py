"""What smp logs on this rank, for tests that look at it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from smp import log


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """The lines logged inside, as they come."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.get_logger().addHandler(handler)
    try:
        yield lines
    finally:
        log.get_logger().removeHandler(handler)
