"""One process of a world of benchmarks/worlds.py: builds its side of a comparison, then runs blocks when told to."""

import os
import resource
import sys
import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Client
from typing import Any

ADDRESS_VARIABLE = "SMP_BENCH_ADDRESS"  # port:key of the driver


def cpu_seconds() -> float:
    """Processor time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Answers the driver until it hangs up.

    `("build", "module:function", arguments)` -> what the function's second result is; the first is the step to run.
    A step that has `close` is closed at the end.
    `("run", n)` -> begin, end (perf_counter, one clock for all processes of a host) and processor seconds of n steps.
    """
    port, key = os.environ[ADDRESS_VARIABLE].split(":")
    with Client(("127.0.0.1", int(port)), authkey=bytes.fromhex(key)) as driver:
        step: Callable[[], Any] = lambda: None  # noqa: E731
        while True:
            try:
                order = driver.recv()
            except EOFError:
                getattr(step, "close", lambda: None)()
                break
            if order[0] == "build":
                module, _, function = order[1].partition(":")
                step, answer = getattr(import_module(module), function)(**order[2])
                driver.send(answer)
            elif order[0] == "run":
                cpu, begin = cpu_seconds(), time.perf_counter()
                for _ in range(order[1]):
                    step()
                driver.send((begin, time.perf_counter(), cpu_seconds() - cpu))
    sys.stdout.flush()
    os._exit(0)  # nothing is left to finish, and the peers leave at any moment


if __name__ == "__main__":
    main()
