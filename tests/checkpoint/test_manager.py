"""`smp.save_checkpoint` and `smp.resume_from_checkpoint`: files, guards, continuation, retention, errors."""

import argparse
import os

import pytest
import torch

import smp
from tests.checkpoint.small import Job, assert_close, assert_equal, grid
from tests.harness import on_ranks
from tests.stateful import shared_directory

BOTH = grid(pp=2, tp=2)


def names(directory):
    smp.barrier()
    found = sorted(os.listdir(directory))
    smp.barrier()
    return found


@pytest.mark.parametrize("before_partition", [True, False])
@on_ranks(4, config=BOTH, timeout=200)
def test_a_resumed_job_continues_to_the_last_bit_on_unchanged_degrees(before_partition):
    """Loss, optimizer state, options and random numbers: a resumed run that differs is another run."""
    with shared_directory() as directory:
        job = Job(BOTH)
        job.steps(0, 1)
        job.save(directory, "two", user_content={"epoch": 3, "arguments": argparse.Namespace(lr=0.1)})
        drawn = torch.rand(3)
        want = job.steps(2, 3)
        assert names(directory) == ["newest", "two_partial"]
        assert names(directory / "two_partial") == [
            "manifest.json",
            *[f"{kind}_{pp}_{tp}.pt" for kind in ("model", "optimizer") for pp in (0, 1) for tp in (0, 1)],
            *[f"random_{pp}_{tp}_0.pt" for pp in (0, 1) for tp in (0, 1)],
            "user_content.pt",
        ]
        assert (directory / "newest").read_text() == "two"

        job = Job(BOTH, lr=0.3)
        if not before_partition:
            job.step(9)
        content = smp.resume_from_checkpoint(directory)
        assert content == {"epoch": 3, "arguments": argparse.Namespace(lr=0.1)}
        assert torch.equal(torch.rand(3), drawn)
        assert_equal(job.steps(2, 3), want)
        assert [group["lr"] for group in job.optimizer.param_groups] == [0.01, 0.005]


@on_ranks(4, config=BOTH, timeout=200)
def test_a_checkpoint_resumes_on_other_degrees():
    """A job that comes back with other machines must be the same run."""
    with shared_directory() as directory:
        job = Job(BOTH)
        job.steps(0, 1)
        job.save(directory, "a")
        want = job.steps(2, 3, 4)
        for config in (grid(tp=4), grid(pp=4, microbatches=4), grid(pp=2), grid(pp=2, shard_optimizer_state=True)):
            job = Job(config)
            smp.resume_from_checkpoint(directory, "a")
            assert_close([job.step(2)], want[:1])
            job.save(directory, "b")  # and from there back
            job = Job(BOTH)
            smp.resume_from_checkpoint(directory)
            assert_close(job.steps(3, 4), want[1:])
