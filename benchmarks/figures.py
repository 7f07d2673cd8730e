"""Rows that are not a race of two sides: bytes, costs and seconds of one thing, each a function that returns a result.

A result has the keys of `result`; `value` and `limit` are in the row's unit.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.rows import BLOCKS, SAVED, SMALL_GPT
from benchmarks.worlds import ROOT, Side, worlds

IMPORTS = 5  # of each kind, in turn


def result(name: str, title: str, value: float, limit: float, unit: str, **more: Any) -> dict[str, Any]:
    """What every figure returns."""
    return {
        "row": name,
        "title": title,
        "value": value,
        "limit": limit,
        "unit": unit,
        "reached": value <= limit,
        **more,
    }


def _answers(side: Side) -> list[dict[str, Any]]:
    with worlds([side]) as (world,):
        return sorted(world.build(), key=lambda answer: answer["stage"])


def memory(config: dict[str, Any]) -> dict[str, Any]:
    """The stage whose live bytes exceed the arithmetic most."""
    arguments = {"sizes": SMALL_GPT, "batch": 16, "microbatches": 8, "stages": 2, "config": config}
    stages = _answers(Side("memory", "benchmarks.measured:memory", arguments, 2, "mpi"))
    ratios = [stage["peak"] / stage["arithmetic"] for stage in stages]
    title = "peak live tensor bytes of a stage, against parameters + gradients + states + activations in flight"
    return result("memory", title, max(ratios), 1.15, "times", stages=stages, sizes={**SMALL_GPT, "batch": 16})


def sent(config: dict[str, Any]) -> dict[str, Any]:
    """What the blocks of the row `tp` send, against the least that their scheme needs."""
    arguments = {"sizes": BLOCKS, "batch": 8, "config": config}
    ranks = _answers(Side("sent", "benchmarks.measured:sent", arguments, BLOCKS["degree"], "mpi"))
    title = "bytes sent by attention + MLP blocks, tp 2, against 2 all-reduces forward + 2 backward per layer and step"
    ratio = max(rank["sent"] / rank["minimum"] for rank in ranks)
    return result("sent", title, ratio, 1.0, "times", stages=ranks, sizes={**BLOCKS, "batch": 8})


def overhead(config: dict[str, Any]) -> dict[str, Any]:
    """The engine's own processor time on a stage without parameters."""
    sizes = {"vocabulary": 64, "length": 8, "width": 16, "layers": 12}
    arguments = {"sizes": sizes, "microbatches": 8, "config": config}
    stages = _answers(Side("overhead", "benchmarks.measured:overhead", arguments, 3, "mpi"))
    assert stages[1]["parameters"] == 0
    title = "the engine's own time per microbatch on a stage that owns nothing, 12-layer GPT, pp 3"
    return result("overhead", title, 1e3 * stages[1]["cpu"], 2.0, "ms", stages=stages, sizes=sizes)


def stall(config: dict[str, Any]) -> dict[str, Any]:
    """How long a save in the background stops training, of what one in the foreground does."""
    arguments = {"sizes": SAVED, "config": config, "repeats": 5}
    ranks = _answers(Side("stall", "benchmarks.saving:stall", arguments, 2, "mpi"))
    title = "time for which saving in the background (256 MB) stops training, of what saving in the foreground takes"
    share = max(rank["background"] / rank["blocking"] for rank in ranks)
    return result("stall", title, share, 0.2, "of it", stages=ranks, sizes=dict(SAVED))


def imports(config: dict[str, Any]) -> dict[str, Any]:
    """`import smp` with all it needs to start, against torch and mpi4py alone."""
    codes = {
        "torch + mpi4py": "import torch, torch.distributed, mpi4py",
        "smp": "import smp; smp.init, smp.DistributedModel, smp.DistributedOptimizer, smp.step",
        "smp, nothing used": "import smp",
    }
    seconds: dict[str, list[float]] = {name: [] for name in codes}
    for _ in range(IMPORTS):
        for name, code in codes.items():
            begin = time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", code], cwd=ROOT, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            seconds[name].append(time.perf_counter() - begin)
    more = statistics.median(a - b for a, b in zip(seconds["smp"], seconds["torch + mpi4py"]))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return result(
        "import", "import smp and its main names, beyond import torch + mpi4py", more, 0.3, "s", seconds=medians
    )


def partition(config: dict[str, Any]) -> dict[str, Any]:
    """The worst of several models, stage counts and memory weights."""
    from benchmarks.planning import partition_quality

    cases = partition_quality()
    worst = max(cases, key=lambda case: case["ratio"])
    title = "largest stage cost of the automatic partition, against the best contiguous one"
    return result("partition", title, worst["ratio"], 1.01, "times", cases=cases, stages=[worst])


def planning(config: dict[str, Any]) -> dict[str, Any]:
    """Memory and seconds in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.planning"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout[done.stdout.index("{") :])
    share = max(found["peak_bytes"] / 2**31, found["seconds"] / 60)
    title = f"tracing and planning a GPT of {found['parameters'] / 1e9:.0f} billion parameters, of 2 GiB and 60 s"
    return result("planning", title, share, 1.0, "of the limits", stages=[found])


FIGURES = {
    "memory": memory,
    "sent": sent,
    "overhead": overhead,
    "partition": partition,
    "planning": planning,
    "stall": stall,
    "import": imports,
}
