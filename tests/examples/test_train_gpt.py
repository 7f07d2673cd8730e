"""The main job in small: on every kind of grid it computes what one plain process computes, and it resumes exactly."""

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import smp
from smp import runtime
from tests.harness import ROOT, on_ranks

STEPS = 6
SIZES = "--layers 3 --width 16 --heads 4 --context 12 --batch 8 --microbatches 2 --validation-batches 1".split()
SCHEDULE = f"--steps {STEPS} --save-every 2 --validate-every 3 --keep 2".split()
GRIDS = {
    "1": (1, 1, 1),
    "tp2-pp2": (4, 2, 2),
    "pp4": (4, 1, 4),
    "tp4": (4, 4, 1),
    "rdp2": (2, 1, 1),
    "rdp2-pp2": (4, 1, 2),
}


def load_example(name: str = "train_gpt") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config_of(args: Any) -> dict[str, Any]:
    degrees = {"tensor_parallel_degree": args.tensor, "pipeline_parallel_degree": args.pipeline}
    precision = {"fp16": args.fp16, "bf16": args.bf16}
    return {**degrees, **precision, "shard_optimizer_state": args.shard_optimizer_state, "microbatches": 2, "ddp": True}


def arguments_of(grid: str, text: Path, out: Path, *more: str) -> list[str]:
    _, tensor, pipeline = GRIDS[grid]
    paths = ["--data", str(text), "--out", str(out)]
    return [*SIZES, *SCHEDULE, *paths, "--tensor", str(tensor), "--pipeline", str(pipeline), *more]


@contextmanager
def float64() -> Iterator[None]:
    """In float32 Adam amplifies the rounding of gradients that are zero in truth."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def plain_losses(example: ModuleType, args: Any) -> list[float]:
    """The same training without smp."""
    torch.manual_seed(args.seed)
    model = example.GPT(args.layers, args.width, args.heads, args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: example.learning_rate(step, args))
    text = example.Text(example.find_text(args.data)[0], args.context, args.seed)
    losses = []
    for step in range(args.steps):
        optimizer.zero_grad()
        inputs, targets = text.batch(step * args.batch, args.batch)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def train_fresh(example: ModuleType, args: Any) -> dict[str, Any]:
    """One run as a process of its own would do it; the report that rank 0 wrote, on every rank."""
    runtime.reset()
    smp.init(config_of(args))
    example.train(args)
    smp.barrier()
    return dict(json.loads((args.out / "report.json").read_text()))


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(3):
        lines = (f"def function_{number}_{i}(x): return x * {i * 7 % 11}\n" for i in range(60))
        (folder / f"{number}.py").write_text("".join(lines))
    return folder


@pytest.mark.parametrize("grid", GRIDS)
@on_ranks(lambda kwargs: GRIDS[kwargs["grid"]][0], timeout=120)
def test_example_trains_like_one_plain_process_and_resumes_exactly(
    grid: str, text_folder: Path, tmp_path: Path
) -> None:
    """A failure means that the demo would train another model than its plain code, or that a killed job would not go
    on as it would have without the kill."""
    example = load_example()
    args = example.parse(arguments_of(grid, text_folder, tmp_path / "out"))
    with float64():
        whole = train_fresh(example, args)
        expected = plain_losses(example, args)
        torch.testing.assert_close(torch.tensor(whole["losses"]), torch.tensor(expected), rtol=1e-9, atol=0)
        assert sorted(path.name for path in args.out.glob("step_*")) == ["step_4_partial", "step_6_partial"]
        smp.barrier()

        args.resume_step = 4
        assert train_fresh(example, args) == whole


@on_ranks(4, timeout=120)
def test_example_goes_on_on_other_degrees_and_in_half_precision(text_folder: Path, tmp_path: Path) -> None:
    """From a checkpoint of 2 tensor parts x 2 stages: the losses that would have followed, on the grid of the demo but
    for rounding, and, resumed once more from there, exactly."""
    example = load_example()

    def run(grid: str, *more: str) -> dict[str, Any]:
        return train_fresh(example, example.parse(arguments_of(grid, text_folder, tmp_path / "out", *more)))

    with float64():
        whole = run("tp2-pp2")
        for step, grid in ((4, "rdp2-pp2"), (4, "tp4")):  # the second one from what the first one left
            other = run(grid, "--resume-step", str(step), "--shard-optimizer-state")
            torch.testing.assert_close(torch.tensor(other["losses"]), torch.tensor(whole["losses"]), rtol=1e-9, atol=0)
            assert other["rates"] == whole["rates"]
        smp.barrier()
    half = run("tp2-pp2", "--resume-step", "4", "--bf16")
    torch.testing.assert_close(torch.tensor(half["losses"]), torch.tensor(whole["losses"]), rtol=2e-2, atol=0)
    scaled = run("tp2-pp2", "--resume-step", "6", "--steps", "8", "--fp16")
    assert run("tp2-pp2", "--resume-step", "6", "--steps", "8", "--fp16") == scaled
