"""A training job that is killed goes on, after `--resume`, as if nothing had happened."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT, launch

pytestmark = pytest.mark.slow

# Trains the example in small; rank 2 kills itself in its step number KILL, counted from 1 (0: never).
SCRIPT = f"""
import importlib.util, os, signal, sys
spec = importlib.util.spec_from_file_location("train_gpt", {str(ROOT / "examples" / "train_gpt.py")!r})
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
kill_at, original, calls = int(os.environ["KILL"]), example.train_step, []

def train_step(*args):
    calls.append(args)
    if len(calls) == kill_at and os.environ["OMPI_COMM_WORLD_RANK"] == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args)

example.train_step = train_step
example.main()
"""
SIZES = "--layers 2 --width 16 --heads 2 --context 12 --batch 8 --microbatches 2 --validation-batches 1"
SCHEDULE = "--steps 8 --save-every 2 --validate-every 4 --tensor 2 --pipeline 2"


def train(out: Path, text: Path, kill_at: int, *more: str) -> tuple[int, str]:
    arguments = [*SIZES.split(), *SCHEDULE.split(), "--data", str(text), "--out", str(out), *more]
    done = launch(textwrap.dedent(SCRIPT), 4, env={"KILL": str(kill_at)}, args=tuple(arguments), timeout=120)
    return done.returncode, done.stdout


def report(out: Path) -> Any:
    return json.loads((out / "report.json").read_text())


def test_killed_job_resumes_from_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    """Losses, learning rates, validation losses and the position in the text must be those of the job without the
    kill; a failure means that a long training run is lost, or goes on differently, when a machine dies."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(3):
        (text / f"{number}.txt").write_text("".join(f"line {i * 7 % 11} of file {number}\n" for i in range(60)))
    status, output = train(tmp_path / "whole", text, 0)
    assert status == 0, output
    status, output = train(tmp_path / "killed", text, 6)
    assert status != 0, output
    assert (tmp_path / "killed" / "newest").read_text() == "step_4"
    status, output = train(tmp_path / "killed", text, 0, "--resume")
    assert status == 0 and "resuming at step 4" in output, output
    assert report(tmp_path / "killed") == report(tmp_path / "whole")
