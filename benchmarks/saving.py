"""Sides that save and load: a model and Adam's moments, spread over two processes, against torch on the same tensors.

`sizes`: `width` of the square layers and the number of `layers` in each process; with two moments for each weight that
makes 3 x 4 x layers x width^2 bytes per process.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smp

Built = tuple[Callable[[], Any], Any]
TAG = "bench"


class _Saved:
    """A directory that is removed with the world, and the step that is timed there."""

    def __init__(self, directory: Path, step: Callable[[], Any]) -> None:
        self._directory, self._step = directory, step

    def __call__(self) -> None:
        self._step()

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def _layers(sizes: dict[str, int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(sizes["width"], sizes["width"], bias=False) for _ in range(sizes["layers"])))


@smp.step
def _train(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def _ours(sizes: dict[str, int], config: dict[str, Any]) -> tuple[Path, Any, Any]:
    """A directory for both processes, and a model of two stages that has trained a step."""
    smp.init({"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0, **config})
    module = nn.Sequential(_layers(sizes), _layers(sizes))
    smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-4))
    _train(model, torch.ones(1, sizes["width"]))
    optimizer.step()
    made = tempfile.mkdtemp(prefix="smp-bench-") if smp.rank() == 0 else None
    return Path(smp.allgather(made, smp.WORLD)[0]), model, optimizer


def save(sizes: dict[str, int], config: dict[str, Any]) -> Built:
    """A partial checkpoint, complete and flushed when the step ends."""
    directory, model, optimizer = _ours(sizes, config)
    step = _Saved(directory, lambda: smp.save_checkpoint(directory, TAG, model=model, optimizer=optimizer))
    step()
    return step, None


def load(sizes: dict[str, int], config: dict[str, Any]) -> Built:
    """Resumes from it, every byte verified."""
    directory, model, optimizer = _ours(sizes, config)
    smp.save_checkpoint(directory, TAG, model=model, optimizer=optimizer)
    step = _Saved(directory, lambda: smp.resume_from_checkpoint(directory, TAG))
    step()
    return step, None


def _theirs(sizes: dict[str, int]) -> tuple[Path, dict[str, Any]]:
    """The tensors of one process, and a file for them."""
    weights = list(_layers(sizes).parameters())
    state = {
        i: {"step": torch.ones(()), "exp_avg": p.detach() + 1, "exp_avg_sq": p.detach() + 2}
        for i, p in enumerate(weights)
    }
    model = {str(i): p.detach() for i, p in enumerate(weights)}
    return Path(tempfile.mkdtemp(prefix="smp-bench-")), {"model": model, "optimizer": state}


def _save_with_torch(tensors: dict[str, Any], path: Path) -> None:
    with path.open("wb") as out:
        torch.save(tensors, out)
        out.flush()
        os.fsync(out.fileno())


def torch_save(sizes: dict[str, int]) -> Built:
    """torch.save and fsync in each process."""
    directory, tensors = _theirs(sizes)
    step = _Saved(directory, lambda: _save_with_torch(tensors, directory / "state.pt"))
    step()
    return step, None


def torch_load(sizes: dict[str, int]) -> Built:
    """torch.load in each process, nothing verified."""
    directory, tensors = _theirs(sizes)
    _save_with_torch(tensors, directory / "state.pt")
    step = _Saved(directory, lambda: torch.load(directory / "state.pt", weights_only=True))
    step()
    return step, None


def stall(sizes: dict[str, int], config: dict[str, Any], repeats: int) -> Built:
    """How long the call stops training, saving in the foreground and in the background, in turn; medians."""
    directory, model, optimizer = _ours(sizes, config)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * repeats + 2):
        blocking = number % 2 == 0
        smp.barrier()
        begin = time.perf_counter()
        smp.save_checkpoint(directory, TAG, model=model, optimizer=optimizer, blocking=blocking)
        seconds[blocking].append(time.perf_counter() - begin)
        smp.wait_for_checkpoint()
    answer = {"blocking": statistics.median(seconds[True][1:]), "background": statistics.median(seconds[False][1:])}
    return _Saved(directory, lambda: None), {"stage": smp.pp_rank(), **answer}
