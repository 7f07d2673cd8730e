"""A checkpoint resumes on any degrees: weights, moments, masters bit for bit, and the losses that would have followed.

One job of each kind is saved at tensor degree 2 x pipeline degree 2 and goes on for five steps; these are what every
other grid has to compute that resumes from it.
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import smp
from smp.checkpoint import reader
from tests.checkpoint.jobs import Grid, Job, Tensors, assert_equal
from tests.harness import on_ranks

SAVED = Grid(pp=2, tp=2, microbatches=2)
STEPS_BEFORE, STEPS_AFTER = 2, 5
TAG = "two_steps"
DTYPES = {"gpt": torch.float64, "gpt2": torch.float64, "body": torch.float32}
TOLERANCE = 1e-6  # relative, of losses
HALF_TOLERANCE = 2e-2

GRIDS = {
    "tp2-pp2": SAVED,
    "tp4": Grid(tp=4, microbatches=1),
    "pp4": Grid(pp=4, microbatches=4),
    "pp2-rdp2": Grid(pp=2, microbatches=1),
    "pp2-rdp2-sharded": Grid(pp=2, microbatches=4, sharded=True),
    "tp2-rdp2-sharded": Grid(tp=2, microbatches=1, sharded=True),
    "one": Grid(microbatches=4),
}


def size_of(arguments: dict[str, Any]) -> int:
    return 1 if arguments["grid"] == "one" else 4


def go_on(job: Job) -> tuple[list[float], list[list[float]]]:
    """The losses and the learning rates of the next steps."""
    steps = [job.step() for _ in range(STEPS_AFTER)]
    return [loss for loss, _ in steps], [rates for _, rates in steps]


@on_ranks(4, timeout=120)
def save(directory: Path, shape: str, grid: Grid) -> None:
    """Trains, saves, and writes what follows to `directory / "want"`."""
    job = Job(shape, grid, DTYPES[shape])
    for _ in range(STEPS_BEFORE):
        job.step()
    job.save(directory, TAG)
    held, scale = job.whole_tensors(), job.optimizer.loss_scale
    losses, rates = go_on(job)
    if smp.rank() == 0:
        torch.save({"held": held, "losses": losses, "rates": rates, "scale": scale}, directory / "want")
    smp.barrier()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(shape, grid) -> the directory in which such a job was saved; each is made once."""
    made: dict[tuple[str, Grid], Path] = {}

    def get(shape: str, grid: Grid = SAVED) -> Path:
        if (shape, grid) not in made:
            directory = tmp_path_factory.mktemp(shape)
            save(directory, shape, grid)
            made[(shape, grid)] = directory
        return made[(shape, grid)]

    return get


def close(got: list[float], want: list[float], tolerance: float) -> bool:
    return all(abs(a - b) <= tolerance * abs(b) for a, b in zip(got, want, strict=True))


class Scanned:
    """What os.scandir gives, in another order."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> "Scanned":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    close = __exit__


@contextmanager
def shuffled_listings(seed: int) -> Iterator[None]:
    """Directories list their entries in any order, as file systems may."""
    order = random.Random(seed)
    listdir, scandir = os.listdir, os.scandir

    def listed(*path: Any) -> list[str]:
        found = listdir(*path)
        order.shuffle(found)
        return found

    def scanned(*path: Any) -> Scanned:
        with scandir(*path) as entries:
            found = list(entries)
        order.shuffle(found)
        return Scanned(found)

    with mock.patch.object(os, "listdir", listed), mock.patch.object(os, "scandir", scanned):
        yield


def check_resumed(directory: Path, shape: str, grid: Grid) -> None:
    job = Job(shape, grid, DTYPES[shape])
    held = job.resume(directory)
    want = torch.load(directory / "want")
    assert job.number == STEPS_BEFORE
    losses, rates = go_on(job)
    assert_equal(held[0], want["held"])
    assert rates == want["rates"]
    assert close(losses, want["losses"], TOLERANCE), f"{losses} instead of {want['losses']}"


@on_ranks(size_of, timeout=90)
def resume(directory: Path, shape: str, grid: str) -> None:
    check_resumed(directory, shape, GRIDS[grid])


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("shape", ["gpt", "body"])
def test_a_job_goes_on_on_other_degrees(saved: Any, shape: str, grid: str) -> None:
    """One model whose tensors are renamed and fused on other degrees, and one that is split layer by layer. A failure
    means that a run that lost a machine, or gained one, trains another model from there on."""
    resume(directory=saved(shape), shape=shape, grid=grid)


@pytest.mark.parametrize("grid", ["tp4", pytest.param("pp4", marks=pytest.mark.slow), "pp2-rdp2-sharded", "one"])
def test_a_model_of_transformers_goes_on_on_other_degrees(saved: Any, grid: str) -> None:
    """Its twin transposes weights and ties the head."""
    resume(directory=saved("gpt2"), shape="gpt2", grid=grid)


@pytest.mark.parametrize("grid", ["tp2-pp2", "pp2-rdp2", "tp2-rdp2-sharded", "one"])
def test_sharded_optimizer_state_is_found_by_other_replicas(saved: Any, grid: str) -> None:
    """Each replica wrote a part of the state: none may be lost, none taken twice."""
    resume(directory=saved("gpt", replace(GRIDS["tp2-rdp2-sharded"], microbatches=2)), shape="gpt", grid=grid)


@on_ranks(4, timeout=90)
def test_losses_after_a_resume_on_the_same_degrees_are_equal_bit_for_bit(tmp_path: Path) -> None:
    """In float32, also after a resume that came after the first steps of a new job."""
    shape = "gpt"
    job = Job(shape, SAVED, torch.float32)
    for _ in range(STEPS_BEFORE):
        job.step()
    job.save(tmp_path, TAG)
    want = go_on(job)
    job = Job(shape, SAVED, torch.float32)
    job.resume(tmp_path)
    assert go_on(job) == want
    held = job.resume(tmp_path, tag=TAG)  # the model is partitioned already
    assert job.number == STEPS_BEFORE and len(held) == 1
    assert go_on(job) == want


@on_ranks(4, timeout=90)
def resume_five_times(directory: Path) -> None:
    want = torch.load(directory / "want")["held"]
    job = Job("gpt", GRIDS["tp2-rdp2-sharded"])
    for seed in range(5):
        with shuffled_listings(10 * seed + smp.rank()):
            (held,) = job.resume(directory)
        assert_equal(held, want)
        job.step()


def test_the_order_of_directory_listings_does_not_matter(saved: Any) -> None:
    """Ranks that list differently, and other than when saving, must not mix up files."""
    resume_five_times(saved("gpt"))


@on_ranks(4, timeout=90)
def check_bytes_read(directory: Path, grid: str) -> None:
    job = Job("gpt", GRIDS[grid])
    job.step()  # with a pipeline, only now it is known what a rank needs
    before = reader.traffic.copied
    job.resume(directory)
    copied = reader.traffic.copied - before
    needed = sum(tensor.nbytes for tensor in [*job.local_tensors().values(), *job.model.local_buffers()])
    assert copied == needed, f"{copied} bytes were copied, {needed} are held"
    assert copied < 0.6 * sum(path.stat().st_size for path in directory.rglob("*.pt"))


@pytest.mark.parametrize("grid", ["tp2-pp2", "tp4", "pp4", "tp2-rdp2-sharded"])
def test_a_rank_copies_no_more_than_it_holds(saved: Any, grid: str) -> None:
    """A failure means ranks that read what is another one's: each would read the whole checkpoint on large jobs."""
    check_bytes_read(saved("gpt"), grid)


HALVES = {half: replace(SAVED, half=half) for half in ("bf16", "fp16")}


@on_ranks(size_of, timeout=90)
def resume_converted(directory: Path, grid: str, saved_in: str, half: str) -> None:
    """Between precisions it is the fp32 values that go on: weights of float32, masters of the others."""
    job = Job("body", replace(GRIDS[grid], half=half), torch.float32)
    held = job.resume(directory)
    scales: list[float] = []
    job.model.register_post_partition_hook(lambda *_: scales.append(job.optimizer.loss_scale))
    want = torch.load(directory / "want")
    losses, rates = go_on(job)
    if saved_in == half == "fp16":
        assert scales == [want["scale"]] == [2.0**9]  # it has doubled once
    fp32 = under_kind(want["held"], "master" if saved_in else "weight")
    moments = {key: tensor for key, tensor in want["held"].items() if key[0] not in ("weight", "master")}
    expected = moments | {("master" if half else "weight", name): tensor for name, tensor in fp32.items()}
    if half:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[half]
        expected |= {("weight", name): tensor.to(dtype) for name, tensor in fp32.items()}
    assert_equal(held[0], expected)
    assert rates == want["rates"]
    assert close(losses, want["losses"], HALF_TOLERANCE), f"{losses} instead of {want['losses']}"


def under_kind(tensors: Tensors, kind: str) -> dict[str, Any]:
    return {name: tensor for (k, name), tensor in tensors.items() if k == kind}


CONVERSIONS = [
    ("", "bf16", "tp2-pp2"),
    ("", "bf16", "pp2-rdp2-sharded"),
    ("", "fp16", "tp4"),
    ("bf16", "", "pp4"),
    ("bf16", "bf16", "tp4"),
    ("bf16", "bf16", "pp2-rdp2-sharded"),
    ("bf16", "fp16", "pp2-rdp2"),
    ("fp16", "fp16", "pp2-rdp2-sharded"),
    ("bf16", "", "one"),
]


@pytest.mark.parametrize(("saved_in", "half", "grid"), CONVERSIONS)
def test_a_job_goes_on_in_another_precision(saved: Any, saved_in: str, half: str, grid: str) -> None:
    """A failure means that a run loses what its masters knew beyond half precision, or starts without any."""
    directory = saved("body", HALVES[saved_in] if saved_in else SAVED)
    resume_converted(directory=directory, grid=grid, saved_in=saved_in, half=half)


# Optimizers whose state is not that of Adam: made with the parameters, numbers that change, several tensors.
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, dampening=0.5),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.125),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True, momentum=0.5),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=0.01, t0=1),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4, timeout=120)
def test_any_state_of_an_optimizer_goes_on(tmp_path: Path, kind: str) -> None:
    """A failure means that only what Adam keeps is cut, sharded and put together again."""
    for half, saved, tag in (("", GRIDS["tp2-pp2"], "a"), ("fp16", GRIDS["tp2-rdp2-sharded"], "b")):
        job = Job("body", replace(saved, half=half), make=KINDS[kind])
        job.step()
        job.save(tmp_path, tag, partial=tag == "b")
        held, want = job.whole_tensors(), job.step()
        for grid in ("tp4", "pp2-rdp2-sharded"):
            job = Job("body", replace(GRIDS[grid], half=half), seed=1, make=KINDS[kind])
            found = job.resume(tmp_path, tag=tag, partial=tag == "b")
            loss, rates = job.step()
            assert found[0].keys() == held.keys()
            # torch loads a number of an optimizer in the type of its parameter
            assert all(torch.equal(found[0][key].double(), value.double()) for key, value in held.items())
            assert rates == want[1] and close([loss], [want[0]], HALF_TOLERANCE if half else TOLERANCE)
