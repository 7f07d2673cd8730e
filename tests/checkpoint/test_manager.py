"""`smp.save_checkpoint` and `smp.resume_from_checkpoint`: files, guards, continuation, retention, errors."""

import argparse
import os
import random
import shutil

import numpy
import pytest
import torch
from torch import nn

import smp
from smp.checkpoint import reader
from smp.checkpoint.__main__ import main
from smp.errors import CheckpointError, CommError, UsageError
from tests.checkpoint.small import Job, assert_close, assert_equal, grid
from tests.checkpoint.test_reader import damage
from tests.harness import on_ranks
from tests.logs import log_lines
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
def test_a_checkpoint_resumes_on_other_degrees_and_each_rank_reads_its_part():
    """A job that comes back with other machines must be the same run, and must not need the whole model's memory."""
    with shared_directory() as directory:
        job = Job(BOTH)
        job.steps(0, 1)
        job.save(directory, "a")
        want = job.steps(2, 3)
        for config in (grid(tp=4), grid(pp=4, microbatches=4), grid(pp=2, shard_optimizer_state=True)):
            job = Job(config)
            smp.resume_from_checkpoint(directory, "a")
            copied, verified = reader.traffic.copied, reader.traffic.verified
            assert_close([job.step(2)], want[:1])  # with a pipeline the values are read here
            if config["pipeline_parallel_degree"] > 1:
                weights = sum(p.numel() * p.element_size() for p in job.model.local_parameters())
                state = sum(
                    value.numel() * value.element_size()
                    for param in job.optimizer.optimizer.state.values()
                    for value in param.values()
                )
                assert reader.traffic.copied - copied == weights + state
            assert reader.traffic.verified == verified
            job.save(directory, "b")
            job = Job(BOTH)
            smp.resume_from_checkpoint(directory)
            assert_close([job.step(3)], want[1:])


@on_ranks(2, config=grid(pp=2), timeout=200)
def test_every_byte_is_verified_once_by_the_job():
    """A byte that nobody looks at may be wrong; one that all look at makes resuming slow."""
    with shared_directory() as directory:
        job = Job(grid(pp=2))
        job.step(0)
        job.save(directory, "a")
        size = sum(file.stat().st_size for file in (directory / "a_partial").glob("*.pt"))
        for config in (grid(pp=2), grid(tp=2)):
            job = Job(config)
            before = reader.traffic.verified
            smp.resume_from_checkpoint(directory)
            verified = smp.allgather(reader.traffic.verified - before, smp.WORLD)
            assert 0.5 * size < sum(verified) <= size
            assert max(verified) < 0.7 * sum(verified)


@pytest.mark.parametrize("half", ["fp16", "bf16"])
@on_ranks(2, config=grid(pp=2), timeout=200)
def test_half_precision_resumes_to_the_last_bit_and_in_full_precision(half):
    """Masters and the loss scale are part of the run; the unrounded weights are what a full-precision job goes on
    with, and what a half-precision job that comes from one starts its masters from."""
    config = grid(pp=2) | {half: True}
    scaled = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**8}}
    with shared_directory() as directory:
        job = Job(config, dtype=torch.float32, **scaled)
        job.steps(0, 1)
        job.save(directory, "half")
        assert (directory / "half_partial" / f"fp16_states_{smp.pp_rank()}_0.pt").is_file()
        masters = {name: value.clone() for name, value in job.optimizer.masters_by_name().items()}
        want = job.steps(2, 3)
        job = Job(config, dtype=torch.float32, dynamic_loss_scale=True)
        smp.resume_from_checkpoint(directory)
        got = job.step(2)
        assert_equal([got, job.step(3)], want)
        assert job.optimizer.loss_scale == 2.0**8

        job = Job(grid(pp=2), dtype=torch.float32)
        job.step(9)
        smp.resume_from_checkpoint(directory)
        for name, param in job.model.local_named_parameters():
            assert torch.equal(param, masters[name])
        job.save(directory, "full")
        job = Job(config, dtype=torch.float32)
        job.step(9)
        smp.resume_from_checkpoint(directory, load_optimizer=False)
        for name, value in job.optimizer.masters_by_name().items():
            assert torch.equal(value, masters[name])
        for name, param in job.model.local_named_parameters():
            assert torch.equal(param, masters[name].to(param.dtype))


@pytest.mark.parametrize("config", [grid(pp=2), grid(shard_optimizer_state=True)], ids=["pipeline", "sharded"])
@pytest.mark.parametrize("partial", [True, False])
@on_ranks(2, config=grid(pp=2), timeout=200)
def test_masters_of_a_checkpoint_without_a_model_are_optimizer_state(config, partial):
    """As `optimizer.load_state_dict` has it: updates of other masters than the saved ones are another run."""
    config = config | {"bf16": True}
    with shared_directory() as directory:
        job = Job(config, dtype=torch.float32)
        job.steps(0, 1)
        smp.save_checkpoint(directory, "a", partial=partial, optimizer=job.optimizer)
        assert main(["verify", str(directory / ("a_partial" if partial else "a"))]) == 0
        masters = {name: value.clone() for name, value in job.optimizer.masters_by_name().items()}
        weights = {name: param.detach().clone() for name, param in job.model.local_named_parameters()}
        want = job.step(2)
        for partitioned in (True, False):
            job = Job(config, dtype=torch.float32)
            if partitioned:
                job.step(9)
                before = [param.detach().clone() for param in job.model.local_parameters()]
                smp.resume_from_checkpoint(directory, "a", partial=partial, load_optimizer=False)
                assert all(map(torch.equal, before, job.model.local_parameters()))
            smp.resume_from_checkpoint(directory, "a", partial=partial)
            if partitioned:
                got = job.optimizer.masters_by_name()
                assert all(torch.equal(got[name], value) for name, value in masters.items())
                assert all(torch.equal(param, weights[name]) for name, param in job.model.local_named_parameters())
            assert_equal([job.step(2)], [want])
        job = Job(grid(pp=2), dtype=torch.float32)  # which has no masters that could take them
        job.step(9)
        before = [param.detach().clone() for param in job.model.local_parameters()]
        smp.resume_from_checkpoint(directory, "a", partial=partial)
        assert all(map(torch.equal, before, job.model.local_parameters()))


def refused(kind, says, call):
    """Every rank must raise the same error."""
    with pytest.raises(kind, match=says) as caught:
        call()
    texts = smp.allgather(str(caught.value), smp.WORLD)
    assert len(set(texts)) == 1, texts


def refused_damaged(whole, broken, damages, resume):
    """For each (file, kind of damage, what is said): `broken` is made anew, and resuming from it refused."""
    for name, how, says in damages:
        if smp.rank() == 0:
            shutil.rmtree(broken, ignore_errors=True)
            shutil.copytree(whole, broken)
            damage(broken / name, how)
        smp.barrier()
        refused(CheckpointError, says, resume)


def unchanged(job, call):
    """What a refused resume must not do is change the model or the optimizer."""
    before = [p.detach().clone() for p in job.model.local_parameters()]
    lr = [group["lr"] for group in job.optimizer.param_groups]
    call()
    assert all(torch.equal(a, b) for a, b in zip(before, job.model.local_parameters()))
    assert lr == [group["lr"] for group in job.optimizer.param_groups]


@on_ranks(4, config=BOTH, timeout=200)
def test_wrong_calls_are_refused_on_every_rank_before_anything_is_touched():
    """An error that only one rank sees is a hang; one that comes in the middle leaves half a model."""
    job = Job(BOTH)
    with shared_directory() as directory:
        refused(CheckpointError, "called before the model is partitioned", lambda: job.save(directory, "a"))
        job.step(0)
        refused(
            CheckpointError,
            "user_content holds .*on_ranks|user_content cannot be saved",
            lambda: job.save(directory, "a", user_content=lambda: 0),
        )
        assert names(directory) == []
        for wrong in ("", "a/b", ".a", "newest"):
            refused(UsageError, "it becomes a file's name", lambda wrong=wrong: job.save(directory, wrong))
        for call in (lambda: job.save(None, "a"), lambda: smp.resume_from_checkpoint(None)):
            refused(CheckpointError, "path must name a directory, .* got None", call)
        refused(UsageError, "whole number from 1", lambda: job.save(directory, "a", num_kept_partial_checkpoints=0))
        refused(UsageError, r"'a0'.* on rank 0 and with .*'a1'", lambda: job.save(directory, f"a{min(1, smp.rank())}"))
        refused(CheckpointError, "no complete partial checkpoint", lambda: smp.resume_from_checkpoint(directory))
        job.save(directory, "a")
        smp.save_checkpoint(directory, "model only", model=job.model)
        job.step(1)
        refused(CheckpointError, "holds no optimizer state", lambda: unchanged_resume(job, directory, "model only"))
        damages = [
            ("model_1_1.pt", "bit", "rank 3: .*model_1_1.pt is damaged"),
            ("optimizer_0_1.pt", "cut", "optimizer_0_1.pt is cut short"),
            ("random_1_0_0.pt", "missing", "random_1_0_0.pt is missing"),
            ("manifest.json", "cut", "manifest.json cannot be read"),
            ("manifest.json", "edited", "manifest.json cannot be read: it is damaged, or was edited"),
            ("manifest.json", "directory", "manifest.json cannot be read: .*Is a directory"),
            ("user_content.pt", "missing", "user_content.pt is missing"),
            ("user_content.pt", "directory", "user_content.pt is something else"),
            ("random_0_1_0.pt", "empty", "random_0_1_0.pt is cut short"),
            ("model_0_0.pt", "dangling", "model_0_0.pt is missing"),
        ]
        refused_damaged(
            directory / "a_partial",
            directory / "broken_partial",
            damages,
            lambda: unchanged_resume(job, directory, "broken"),
        )
        if smp.rank() == 0:
            shutil.rmtree(directory / "broken_partial")
            (directory / "broken_partial").touch()
        smp.barrier()
        refused(CheckpointError, "broken_partial is something else", lambda: unchanged_resume(job, directory, "broken"))


@on_ranks(2, config=grid(pp=2), timeout=200)
def test_a_full_checkpoint_of_which_a_file_cannot_be_read_is_refused_on_every_rank():
    """As a partial one: named, the same everywhere, before any parameter is touched."""
    job = Job(grid(pp=2))
    with shared_directory() as directory:
        job.step(0)
        job.save(directory / "whole", "a", partial=False, user_content={"epoch": 1})
        job.step(1)
        damages = [
            ("a", "noise", "/a is damaged"),
            ("optimizer_a", "bit", "/optimizer_a is damaged"),
            ("a", "directory", "/a cannot be read as a tensor file"),
            ("optimizer_a", "missing", "/optimizer_a is missing"),
            ("optimizer_a", "empty", "/optimizer_a is cut short"),
            ("user_content_a", "missing", "/user_content_a is missing"),
            ("user_content_a", "dangling", "/user_content_a is missing"),
            ("a.manifest.json", "edited", "/a.manifest.json cannot be read: it is damaged, or was edited"),
            ("a.manifest.json", "cut", "/a.manifest.json cannot be read"),
            ("a.manifest.json", "directory", "/a.manifest.json cannot be read: .*Is a directory"),
        ]
        broken = directory / "broken"
        refused_damaged(directory / "whole", broken, damages, lambda: unchanged_resume(job, broken, "a", partial=False))


@on_ranks(2, config=grid(pp=2), timeout=200)
def test_a_disk_that_fails_in_reading_is_named_on_every_rank():
    """A sector that one rank cannot read must end all, not leave the others waiting."""
    with shared_directory() as directory, pytest.MonkeyPatch.context() as patch:
        job = Job(grid(pp=2))
        job.step(0)
        job.save(directory, "a")
        job.save(directory, "f", partial=False)
        if smp.rank() == 1:
            patch.setattr(reader, "damaged_records", fail_to_read)
        for tag, partial in (("a", True), ("f", False)):
            refused(
                CheckpointError,
                "rank 1: .* is damaged: it cannot be read: .*Input/output error",
                lambda tag=tag, partial=partial: unchanged_resume(job, directory, tag, partial=partial),
            )


def fail_to_read(*arguments):
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("partial", [True, False])
@on_ranks(2, config=grid(pp=2), timeout=200)
def test_newest_that_is_no_file_is_refused_before_anything_is_written(partial):
    """Found out last it would leave a checkpoint of which the script was told that it was not saved."""
    with shared_directory() as directory:
        job = Job(grid(pp=2))
        job.step(0)
        if smp.rank() == 0:
            (directory / "newest").mkdir()
        smp.barrier()
        for options in ({}, {"blocking": False}) if partial else ({},):
            refused(
                CheckpointError,
                "newest is in the way",
                lambda options=options: job.save(directory, "a", partial=partial, **options),
            )
            assert names(directory) == ["newest"]
        if smp.rank() == 0:
            (directory / "newest").rmdir()
        smp.barrier()
        job.save(directory, "a", partial=partial)
        assert (directory / "newest").read_text() == "a"


def unchanged_resume(job, directory, tag, **options):
    unchanged_error = None

    def call():
        nonlocal unchanged_error
        try:
            smp.resume_from_checkpoint(directory, tag, **options)
        except CheckpointError as error:
            unchanged_error = error

    unchanged(job, call)
    raise unchanged_error


@on_ranks(4, config=grid(pp=2), timeout=200)
def test_a_call_under_a_condition_names_the_missing_ranks():
    """What scripts write around the original's calls would hang; the error says which ranks are missing."""
    job = Job(grid(pp=2))
    job.step(0)
    with shared_directory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMP_GUARD_TIMEOUT", "1")
        for call in (lambda: job.save(directory, "a"), lambda: smp.resume_from_checkpoint(directory)):
            if smp.rdp_rank() == 0:
                with pytest.raises(CommError, match=r"missing ranks \[2, 3\].*on all ranks, under no condition"):
                    call()
            smp.barrier()
        assert names(directory) == []


def renamed(module):
    module.head.bias = None
    module.extra = nn.Parameter(torch.zeros(2, dtype=torch.float64))


def wider(module):
    module.head = nn.Linear(2 * module.head.in_features, module.head.out_features, dtype=torch.float64)


@on_ranks(2, config=grid(tp=2), timeout=200)
def test_strict_names_what_differs_and_without_it_the_rest_is_loaded():
    """A renamed layer that silently keeps its random weights is a bug that only the loss shows."""
    with shared_directory() as directory:
        job = Job(grid(tp=2))
        job.step(0)
        job.save(directory, "a")
        saved = job.model.state_dict()
        job.save(directory, "f", partial=False)

        differ = "does not fit EncoderDecoder"
        for tag, partial in (("a", True), ("f", False)):
            for partitioned in (False, True):
                job = Job(grid(tp=2), change=renamed)
                if partitioned:
                    job.step(9)
                says = rf"{differ}:\n  missing: extra\n  unexpected: head.bias"
                unchanged = {"job": job, "directory": directory, "tag": tag, "partial": partial}
                refused(CheckpointError, says, lambda unchanged=unchanged: unchanged_resume(**unchanged))
                with log_lines() as lines:
                    loose = {"strict": False, "load_optimizer": False}
                    smp.resume_from_checkpoint(directory, tag, partial=partial, **loose)
                    now = job.model.state_dict()
                assert all(torch.equal(value, saved[name]) for name, value in now.items() if name != "extra")
                told = [line for line in lines if "strict=False" in line]
                assert len(told) == (smp.rank() == 0), lines
                assert all(line.endswith("\n  missing: extra\n  unexpected: head.bias") for line in told)

        job = Job(grid(tp=2), change=wider)
        refused(CheckpointError, r"head.weight has shape", lambda: unchanged_resume(job, directory, "a"))


@on_ranks(4, config=BOTH, timeout=200)
def test_random_numbers_go_on_and_new_ranks_get_seeds_of_their_own():
    """Dropout and augmentation repeat themselves exactly; ranks that were not there before draw other numbers."""
    with shared_directory() as directory:
        job = Job(BOTH)
        job.step(0)
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(smp.dp_rank())
        job.save(directory, "a")
        drawn = draw()
        for config in (BOTH, grid(pp=1, tp=2), grid(pp=4, microbatches=4)):
            again = []
            for _ in range(2):
                Job(config)
                torch.manual_seed(123)
                smp.resume_from_checkpoint(directory)
                again.append(draw())
            assert again[0] == again[1]
            everybody = smp.allgather(again[0], smp.WORLD)
            if config is BOTH:
                assert again[0] == drawn
            elif config["tensor_parallel_degree"] == 2:  # two replicas, of which the second is new
                assert len(set(everybody)) == 4
            else:  # stages work on the same data
                assert len(set(everybody)) == 1


def draw():
    return float(torch.rand(())), random.random(), float(numpy.random.rand())


@on_ranks(4, config=BOTH, timeout=200)
def test_parts_that_old_scripts_made_resume_on_their_own_degrees():
    """A script's old checkpoints stay useful; on other degrees they are refused by name instead of loading wrongly."""
    with shared_directory() as directory:
        job = Job(BOTH)
        job.steps(0, 1)
        state = {"model": job.model.local_state_dict(), "optimizer": job.optimizer.local_state_dict(), "epoch": 3}
        smp.save(state, directory / "old", partial=True)
        place = f"{smp.pp_rank()}_{smp.tp_rank()}.pt"
        (directory / "dir_partial").mkdir(exist_ok=True)
        torch.save(state["model"], directory / "dir_partial" / f"model_{place}")
        torch.save(state["optimizer"], directory / "dir_partial" / f"optimizer_{place}")
        want = job.step(2)
        for tag, content in (("old", {"epoch": 3}), ("dir", None)):
            job = Job(BOTH)
            assert smp.resume_from_checkpoint(directory, tag) == content
            assert_equal([job.step(2)], [want])
        smp.barrier()
        (directory / "dir_partial" / "user_content.pt").mkdir(exist_ok=True)
        refused(CheckpointError, "user_content.pt cannot be read", lambda: unchanged_resume(job, directory, "dir"))
        job = Job(grid(tp=4))
        for tag in ("old", "dir"):
            refused(CheckpointError, "degree", lambda tag=tag: unchanged_resume(job, directory, tag))
