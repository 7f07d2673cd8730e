"""A run that is resumed in the middle of an epoch sees the samples, and draws the random numbers, that it would have.

What a script has to do itself: keep its position in `user_content`, and skip the batches that were used inside of
`torch.random.fork_rng()`, so that reading them once more draws nothing.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import smp
from smp import runtime
from tests.harness import on_ranks

BATCHES = 10  # in an epoch, on each of two replicas
BATCH, SAMPLES = 2, 40
SAVED_AT, LAST = 13, 25  # steps, counted from 1
GRIDS = {"rdp2": (2, {"ddp": True}), "rdp2-pp2": (4, {"ddp": True, "pipeline_parallel_degree": 2})}
KINDS = ("ids", "noise", "masks", "draws")


class Numbers(Dataset[tuple[int, Tensor]]):
    """A sample is its number and an augmentation that is drawn when it is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.randn(16)


class Net(nn.Module):
    """What comes out is zero where dropout was."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Run:
    """A script that is fed by a shuffled sampler."""

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        runtime.reset()
        smp.init(config)
        torch.manual_seed(seed + smp.dp_rank())
        random.seed(seed + smp.dp_rank())
        numpy.random.seed(seed + smp.dp_rank())
        self.model: Any = smp.DistributedModel(Net())
        self.optimizer: Any = smp.DistributedOptimizer(torch.optim.AdamW(self.model.parameters()))
        self.number = 0

        @smp.step
        def train(model: Any, x: Tensor) -> Tensor:
            out = model(x)
            model.backward(out.square().mean())
            return out

        self._train = train

    def batches(self) -> Iterator[Any]:
        """From the position on, over the ends of epochs."""
        sampler = DistributedSampler(Numbers(), smp.dp_size(), smp.dp_rank(), shuffle=True, seed=3)
        loader = DataLoader(Numbers(), BATCH, sampler=sampler)
        while True:
            epoch, used = divmod(self.number, BATCHES)
            sampler.set_epoch(epoch)
            if used:
                with torch.random.fork_rng():
                    batches = iter(loader)
                    for _ in range(used):
                        next(batches)
            else:
                batches = iter(loader)
            yield from batches

    def until(self, last: int, save_to: Path | None = None) -> list[dict[str, Any]]:
        """What each step saw and drew."""
        seen = []
        for ids, noise in self.batches():
            self.optimizer.zero_grad()
            out = self._train(self.model, noise).concat()
            self.optimizer.step()
            self.number += 1
            draws = [float(torch.rand(())), random.random(), float(numpy.random.rand())]
            seen.append({"ids": ids.tolist(), "noise": noise, "masks": out == 0, "draws": draws})
            if save_to is not None and self.number == SAVED_AT:
                self.save(save_to)
            if self.number == last:
                return seen
        raise AssertionError

    def save(self, directory: Path) -> None:
        content = {"number": self.number}
        smp.save_checkpoint(directory, "middle", model=self.model, optimizer=self.optimizer, user_content=content)

    def resume(self, directory: Path) -> None:
        self.number = smp.resume_from_checkpoint(directory)["number"]


@pytest.mark.parametrize("grid", GRIDS)
@on_ranks(lambda kwargs: GRIDS[kwargs["grid"]][0])
def test_a_resume_in_the_middle_of_an_epoch_goes_on_exactly(grid: str, tmp_path: Path) -> None:
    """A failure means that samples are seen twice or never, or that dropout and augmentation repeat themselves."""
    config = GRIDS[grid][1]
    want = Run(config, seed=10).until(LAST, save_to=tmp_path)[SAVED_AT:]
    run = Run(config, seed=70)
    run.resume(tmp_path)
    got = run.until(LAST)
    assert len(got) == LAST - SAVED_AT
    for number, (a, b) in enumerate(zip(got, want, strict=True), SAVED_AT + 1):
        for kind in KINDS:
            same = torch.equal(a[kind], b[kind]) if isinstance(a[kind], Tensor) else a[kind] == b[kind]
            assert same, f"step {number}: {kind} {a[kind]} instead of {b[kind]}"
    zeros = torch.cat([a["masks"] for a in got])
    assert 0.3 < float(zeros.float().mean()) < 0.7, "nothing was masked, so nothing was compared"
    masks = smp.allgather(zeros, smp.RDP_GROUP)
    assert not torch.equal(*masks), "both replicas drew the same masks"


@on_ranks(2)
def save_on_two(directory: Path) -> None:
    run = Run({"ddp": True}, seed=10)
    run.until(SAVED_AT, save_to=directory)
    drawn = smp.allgather([float(torch.rand(())), random.random(), float(numpy.random.rand())], smp.WORLD)
    if smp.rank() == 0:
        torch.save(drawn, directory / "next")


@on_ranks(4)
def check_on_four(directory: Path) -> None:
    drawn = []
    for seed in (70, 80):
        run = Run({"ddp": True}, seed)
        run.resume(directory)
        drawn.append(smp.allgather([float(torch.rand(())), random.random(), float(numpy.random.rand())], smp.WORLD))
    assert drawn[0] == drawn[1], "what a new rank draws depends on more than the checkpoint and its rank"
    assert drawn[0][:2] == torch.load(directory / "next"), "a rank that was there before draws something else"
    assert len({value for values in drawn[0] for value in values}) == 4 * 3, "ranks draw the same"

    epoch, used = divmod(run.number, BATCHES)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3 + epoch)).tolist()
    consumed, left = order[: used * BATCH * 2], order[used * BATCH * 2 :]
    mine = left[smp.dp_rank() :: smp.dp_size()]
    all_left = [index for indices in smp.allgather(mine, smp.DP_GROUP) for index in indices]
    assert sorted(consumed + all_left) == list(range(SAMPLES))


def test_more_replicas_than_before_lose_no_sample_and_draw_numbers_of_their_own(tmp_path: Path) -> None:
    """Saved on two, resumed on four: the ranks that were there go on, the new ones get a seed that is a function of the
    saved one and of their rank. A failure means replicas that augment alike, or a run that cannot be repeated."""
    save_on_two(tmp_path)
    check_on_four(tmp_path)
