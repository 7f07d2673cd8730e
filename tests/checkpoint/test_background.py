"""Saving while training goes on: what is saved, when failures are raised, and how the program ends."""

import os
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import smp
from smp.checkpoint import background, writer
from smp.errors import CheckpointError, UsageError
from tests.checkpoint.small import Job, assert_equal, grid
from tests.harness import launch, on_ranks
from tests.stateful import shared_directory

TWO = grid(pp=2)


class Gate:
    """Holds back the writing thread at its first file, or fails it there."""

    def __init__(self, monkeypatch, fails=False):
        self.opened = threading.Event()
        self._fails = fails
        monkeypatch.setattr(writer, "on_step", self)

    def __call__(self, step):
        if step.startswith("write model"):
            assert self.opened.wait(60)
            if self._fails:
                raise OSError(28, "No space left on device")


@on_ranks(2, config=TWO, timeout=200)
def test_what_is_saved_is_the_state_at_the_call():
    """Weights that move while they are written would make a checkpoint of two steps."""
    with shared_directory() as directory, pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        job = Job(TWO)
        job.steps(0, 1)
        content = {"step": [2]}
        job.save(directory, "a", user_content=content, blocking=False)
        content["step"].append("changed")
        want = job.steps(2, 3)
        assert not (directory / "newest").exists()
        with pytest.raises(CheckpointError, match="still being written"):
            job.save(directory, "b", blocking=False)
        smp.barrier()
        gate.opened.set()
        smp.wait_for_checkpoint()
        assert (directory / "newest").read_text() == "a"
        smp.wait_for_checkpoint()  # nothing to wait for

        job = Job(TWO)
        assert smp.resume_from_checkpoint(directory) == {"step": [2]}
        assert_equal(job.steps(2, 3), want)


@on_ranks(2, config=TWO, timeout=200)
def test_a_relative_path_is_that_of_the_call():
    """A script that changes its working directory afterwards would lose the save, or find nothing at partition."""
    with shared_directory() as directory, pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        patch.chdir(directory)
        job = Job(TWO)
        job.step(0)
        job.save("run", "a", blocking=False)
        patch.chdir("/")
        gate.opened.set()
        smp.wait_for_checkpoint()
        want = job.step(1)

        job = Job(TWO)
        patch.chdir(directory)
        smp.resume_from_checkpoint("run")
        patch.chdir("/")
        assert_equal([job.step(1)], [want])


class Seen(nn.Module):
    """Notes in extra state, in place, how often it has run."""

    def __init__(self):
        super().__init__()
        self.notes = {"array": np.zeros(2), "set": set(), "list": []}

    def get_extra_state(self):
        return self.notes

    def set_extra_state(self, state):
        self.notes = state

    def note(self):
        number = len(self.notes["list"])
        self.notes["array"] += 1
        self.notes["set"].add(number)
        self.notes["list"].append(number)


@on_ranks(1, config={"ddp": True}, timeout=120)
def test_extra_state_that_is_changed_in_place_is_saved_as_it_was_at_the_call():
    """Values of a later step beside the weights of this one make a checkpoint of two steps."""
    with shared_directory() as directory, pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), Seen()))
        seen = model.module[1]
        seen.note()
        smp.save_checkpoint(directory, "a", model=model, blocking=False)
        seen.note()
        gate.opened.set()
        smp.resume_from_checkpoint(directory, load_optimizer=False)
        assert [list(value) for value in seen.notes.values()] == [[1, 1], [0], [0]]


@on_ranks(2, config=TWO, timeout=200)
def test_a_blocking_save_waits_for_the_one_before():
    """The last save of a run must not be refused because the one before is slow."""
    with shared_directory() as directory, pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        job = Job(TWO)
        job.step(0)
        job.save(directory, "a", blocking=False)
        timer = threading.Timer(0.5, gate.opened.set)
        timer.start()
        job.save(directory, "b")
        assert sorted(os.listdir(directory)) == ["a_partial", "b_partial", "newest"]
        smp.barrier()
        timer.join()


@on_ranks(2, config=TWO, timeout=200)
def test_a_failure_on_one_rank_is_raised_on_all_at_the_next_call():
    """A checkpoint that silently was not written is found missing when it is needed."""
    with shared_directory() as directory, pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch, fails=smp.rank() == 1)
        gate.opened.set()
        job = Job(TWO)
        job.step(0)
        job.save(directory, "a", blocking=False)
        while background.is_running():
            time.sleep(0.01)
        with pytest.raises(CheckpointError, match=r"rank 1: .*model_1_0.pt cannot be written: .*No space left"):
            job.save(directory, "b", blocking=False)
        assert os.listdir(directory) == []
        job.save(directory, "b", blocking=False)  # said once; but it fails again
        with pytest.raises(CheckpointError, match="No space left"):
            smp.wait_for_checkpoint()
        patch.undo()
        smp.barrier()
        job.save(directory, "b")
        assert sorted(os.listdir(directory)) == ["b_partial", "newest"]


@on_ranks(2, config=TWO, timeout=200)
def test_two_threads_that_save_at_once_are_refused():
    """Ranks on which they came in another order would write one checkpoint of two, or wait for each other."""
    with shared_directory() as directory, pytest.MonkeyPatch.context() as patch:
        gate, entered = Gate(patch), threading.Event()

        def step(name):
            entered.set()
            gate(name)

        patch.setattr(writer, "on_step", step)
        job = Job(TWO)
        job.step(0)
        thread = threading.Thread(target=job.save, args=(directory, "a"))
        thread.start()
        assert entered.wait(60)
        for call in (lambda: job.save(directory, "b"), lambda: smp.resume_from_checkpoint(directory)):
            with pytest.raises(UsageError, match="another thread of this process saves or resumes"):
                call()
        gate.opened.set()
        thread.join()
        job.save(directory, "b")
        assert sorted(os.listdir(directory)) == ["a_partial", "b_partial", "newest"]
        smp.barrier()


def test_host_copies_are_used_again():
    """New memory has to be mapped first, which takes longer than copying: the stall would be several times as long."""
    copies = background.HostCopies()
    pairs = []
    for value in (1.0, 2.0):
        copies.begin()
        pairs.append([copies.copy(torch.full((4,), value)), copies.copy(torch.full((2, 2), value))])
    assert pairs[0][0] is pairs[1][0]
    assert pairs[0][1] is pairs[1][1]
    assert float(pairs[1][1].sum()) == 8.0
    copies.begin()
    assert copies.copy(torch.zeros(5)).shape == (5,)  # another model


SCRIPT = """
import sys, time
import torch
import smp
from smp.checkpoint import writer
smp.init({"pipeline_parallel_degree": 1, "ddp": True})
model = smp.DistributedModel(torch.nn.Linear(3, 3))
def step(name):
    if name.startswith("write model"):
        time.sleep(1)
        if FAILS:
            raise OSError(28, "No space left on device")
writer.on_step = step
smp.save_checkpoint("run", "last", model=model, blocking=False)
print("main program is through", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_leaving_the_program_waits_for_the_save(ranks, fails, tmp_path):
    """The last checkpoint of a run is the one that matters; when it fails, the exit status says so."""
    script = SCRIPT.replace("FAILS", str(fails)).replace('"run"', repr(str(tmp_path)))
    done = launch(script, ranks)
    assert "main program is through" in done.stdout
    if fails:
        assert done.returncode != 0
        assert "No space left" in done.stdout
        assert os.listdir(tmp_path) == []
    else:
        assert done.returncode == 0, done.stdout
        assert sorted(os.listdir(tmp_path)) == ["last_partial", "newest"]


JOB = """
import os, signal, sys, time
import torch
import smp
from smp.checkpoint import writer
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell is started without it
smp.init({"pipeline_parallel_degree": 1, "ddp": True})
model = smp.DistributedModel(torch.nn.Linear(3, 3))
path, end = sys.argv[1:]
if os.path.exists(path + "/newest"):
    smp.resume_from_checkpoint(path)
    smp.save_checkpoint(path, "next", model=model)
else:
    smp.save_checkpoint(path, "before", model=model)
    writer.on_step = lambda name: time.sleep(name.startswith("write model"))
    smp.save_checkpoint(path, "last", model=model, blocking=False)
    exec(end)
"""
ENDS = {
    "raise RuntimeError('on purpose')": "RuntimeError: on purpose",
    "if smp.rank() == smp.size() - 1: raise RuntimeError('on purpose')": "RuntimeError: on purpose",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "os.kill(os.getpid(), signal.SIGINT); time.sleep(5)": "KeyboardInterrupt",
    "sys.exit(3)": "",
    "torch.distributed.destroy_process_group()": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_ends_while_it_saves_leaves_whole_checkpoints_only(ranks, end, tmp_path):
    """The exit must not wait for ever, nor hide why the program ended; the next job resumes and cleans up."""
    done = launch(JOB, ranks, args=(str(tmp_path), end), timeout=60)
    assert ENDS[end] in done.stdout
    assert (done.returncode != 0) == (ENDS[end] != "" or "exit" in end), done.stdout
    names = {"before_partial", "last_partial", "newest"}
    if ranks == 1 or not ENDS[end]:  # of several ranks the first one that fails ends the job at once
        assert set(os.listdir(tmp_path)) == names, done.stdout
    done = launch(JOB, ranks, args=(str(tmp_path), ""), timeout=60)
    assert done.returncode == 0, done.stdout
    assert set(os.listdir(tmp_path)) | {"last_partial"} == names | {"next_partial"}
