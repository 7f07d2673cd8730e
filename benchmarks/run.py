"""`make bench`: runs the rows and writes benchmarks/results.json and benchmarks/results.png.

    make bench                                   all rows, about ten minutes on two quiet cores
    make bench ROW=1f1b                          one row (several: ROW=1f1b,sleeping)
    make bench ROW=1f1b REPEATS=4 ROUNDS=10      more process launches, more rounds in each

A repeat starts all sides of a row anew; a round gives each side one block of steps, the order turning about. One thread
per process. A step is a whole training step: gradients to None, forward and backward, plain SGD.
"""

import argparse
import json
import math
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import FIGURES
from benchmarks.picture import draw
from benchmarks.rows import Row, rows
from benchmarks.statistics import paired_ratio
from benchmarks.worlds import Block, Side, World, worlds

HERE = Path(__file__).parent
QUIET_LOAD = 0.5
TOO_WIDE = 0.1  # an interval that says nothing
LOSS_TOLERANCE = 1e-4  # relative, over the first steps in float32


def losses_of(world: World) -> list[float]:
    """Builds a side; the mean over its processes of the losses of the first steps, where they know them."""
    known = [losses for losses in world.build() if losses and not math.isnan(losses[0])]
    return [statistics.fmean(column) for column in zip(*known)]


def check_losses(losses: dict[str, list[float]]) -> None:
    """All sides train the same model on the same batches."""
    first = next(iter(losses.values()))
    for name, found in losses.items():
        assert len(found) == len(first), f"'{name}' gave {found}"
        if any(abs(a - b) > LOSS_TOLERANCE * abs(b) for a, b in zip(found, first)):
            raise SystemExit(f"the sides do not compute the same: first losses {losses}")


def measure(sides: list[Side], steps: int, rounds: int, same_losses: bool) -> dict[str, list[Block]]:
    """One launch of every side and `rounds` blocks of each."""
    blocks: dict[str, list[Block]] = {side.name: [] for side in sides}
    with worlds(sides) as opened:
        losses = {world.side.name: losses_of(world) for world in opened}
        if same_losses:
            check_losses(losses)
        for number in range(rounds):
            for world in opened if number % 2 == 0 else reversed(opened):
                blocks[world.side.name].append(world.run(steps))
    return blocks


def run_row(row: Row, repeats: int, rounds: int) -> dict[str, Any]:
    """Measures a row and prints it."""
    sides = [row.ours, *row.theirs]
    blocks: dict[str, list[Block]] = {side.name: [] for side in sides}
    for _ in range(repeats):
        for name, found in measure(sides, row.steps, rounds, row.same_losses).items():
            blocks[name] += found
    seconds = {name: [block.seconds for block in found] for name, found in blocks.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = min((side.name for side in row.theirs), key=lambda name: medians[name])
    against = [row.ideal] * len(seconds[row.ours.name]) if row.ideal is not None else seconds[best]
    ratio = paired_ratio(seconds[row.ours.name], against)
    result = {
        "row": row.name,
        "title": row.title,
        "against": "ideal" if row.ideal is not None else best,
        "limit": row.limit,
        "ratio": ratio.value,
        "confidence": [ratio.low, ratio.high],
        "reached": ratio.reaches(row.limit),
        "seconds": {**medians, **({"ideal": row.ideal} if row.ideal is not None else {})},
        "cpu_seconds": {name: statistics.median(b.cpu for b in found) for name, found in blocks.items()},
        "blocks": seconds,
        "steps_per_block": row.steps,
        "sizes": row.sizes,
        "config": row.ours.arguments.get("config", {}),
        "load": os.getloadavg()[0],
    }
    show(result)
    return result


def show(result: dict[str, Any]) -> None:
    """Prints one row."""
    low, high = result["confidence"]
    mark = "reached" if result["reached"] else "MISSED"
    if result["reached"] and high > result["limit"] and high - low > TOO_WIDE:
        mark = "cannot be told (run it on a quiet machine, with more ROUNDS)"
    print(f"\n{result['row']}: {result['title']}")
    for name, seconds in result["seconds"].items():
        cpu = result["cpu_seconds"].get(name)
        print(f"  {name:32} {1e3 * seconds:9.1f} ms a step" + (f", {1e3 * cpu:9.1f} ms of processors" if cpu else ""))
    print(
        f"  ratio to {result['against']}: {result['ratio']:.3f} [{low:.3f}, {high:.3f}], "
        f"to reach {result['limit']:.2f}: {mark}; load {result['load']:.1f}",
        flush=True,
    )


def run_figure(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Measures a figure and prints it."""
    found = {**FIGURES[name](config), "load": os.getloadavg()[0]}
    print(f"\n{name}: {found['title']}")
    for stage in found.get("stages", []):
        print(
            "  "
            + ", ".join(f"{key} {value if isinstance(value, str) else f'{value:,.6g}'}" for key, value in stage.items())
        )
    for side, seconds in found.get("seconds", {}).items():
        print(f"  {side:32} {seconds:.3f} s")
    mark = "reached" if found["reached"] else "MISSED"
    print(
        f"  {found['value']:.3f} {found['unit']}, to reach {found['limit']:g}: {mark}; load {found['load']:.1f}",
        flush=True,
    )
    return found


def keep(found: dict[str, Any], path: Path, names: list[str]) -> None:
    """Puts a row's result into the file, in place of an earlier one, and draws the picture anew."""
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {row["row"]: row for row in [*earlier, found] if row["row"] in names}
    results = sorted(rows.values(), key=lambda row: names.index(row["row"]))
    machine = {"processors": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
    path.write_text(json.dumps({"machine": machine, "rows": results}, indent=1) + "\n")
    draw(results, path.with_suffix(".png"))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="", help="names of rows, separated by commas; all by default")
    parser.add_argument("--repeats", type=int, default=2, help="process launches of each side")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each side in a launch")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON: more keys for smp.init")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    return parser.parse_args()


def main() -> None:
    """Runs what the command line asks for."""
    args = parse()
    every = rows(args.config)
    names = [*(row.name for row in every), *FIGURES]
    wanted = args.row.split(",") if args.row else names
    unknown = set(wanted) - set(names)
    if unknown:
        raise SystemExit(f"no rows {sorted(unknown)}; there are {', '.join(names)}")
    begin = time.monotonic()
    if os.getloadavg()[0] > QUIET_LOAD:
        print(f"The load of this machine is {os.getloadavg()[0]:.1f} before anything has started: times will be noisy.")
    for row in every:
        if row.name in wanted:
            keep(run_row(row, args.repeats, args.rounds), args.out, names)
    for name in FIGURES:
        if name in wanted:
            keep(run_figure(name, args.config), args.out, names)
    print(f"\n{time.monotonic() - begin:.0f} s; {args.out}, {args.out.with_suffix('.png')}")


if __name__ == "__main__":
    main()
