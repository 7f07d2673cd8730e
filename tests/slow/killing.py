"""Jobs of four ranks that save, are killed while they save, and are started again, in one process tree.

    driver (this module's main)            has imported everything once
      fork x 4 -> a job: resume, check, train and save ... kill -9 of one rank -> the others end
      fork x 4 -> the next job: ...

Forked ranks start in a fraction of a second, so that fifty kills fit into minutes. They find each other by the
variables of torchrun. What they have to say goes to a journal, a line at a time, and outlives them.
"""

import atexit
import faulthandler
import hashlib
import itertools
import json
import os
import random
import resource
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # optimizers import it
from torch import Tensor, nn

import smp
import smp.model
import smp.optimizer
from smp.checkpoint import writer
from smp.checkpoint.finder import find

RANKS = 4
CONFIG = {
    "pipeline_parallel_degree": 2,
    "ddp": True,
    "shard_optimizer_state": True,
    "auto_partition": False,
    "default_partition": 0,
}
KEPT = 2  # checkpoints
ALLOWED = 60.0  # seconds for a job
ROOMS = (0, 8 << 10, 40 << 10)  # bytes on a full disk, of the some hundred thousand that a checkpoint takes


class Kill(NamedTuple):
    """When a rank kills itself: in its save number `save`, counted from 0, at its call number `call` of the writer's
    seam, or, when that is negative, `delay` seconds after the save began."""

    rank: int
    save: int
    call: int = -1
    delay: float = 0.0


class Net(nn.Module):
    """Two stages of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.second = nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss = (model(x) - x).square().mean()
    model.backward(loss)
    return loss


def digest(model: Any, optimizer: Any) -> str:
    """Of all that this rank holds. Where its random numbers stand shows in the digest after the next step."""
    found = hashlib.sha256()
    names = optimizer._names()
    states = {names[id(p)]: state for p, state in optimizer.state.items()}
    held = {name: p.detach() for name, p in model.local_named_parameters()}
    held |= {f"{name} {key}": torch.as_tensor(value) for name, state in states.items() for key, value in state.items()}
    for name in sorted(held):
        found.update(name.encode() + held[name].numpy().tobytes())
    return found.hexdigest()


class Run:
    """One rank of one job. Its checkpoints lie in `root / "disk" / "checkpoints"`."""

    def __init__(self, root: Path, job: int) -> None:
        smp.init(CONFIG)
        self.root, self.job, self.path = root, job, root / "disk" / "checkpoints"
        self.path.parent.mkdir(exist_ok=True)
        self.journal = os.open(root / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        torch.manual_seed(5)
        module = Net()
        smp.set_partition(module.second, 1)
        self.model: Any = smp.DistributedModel(module)
        adam = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer: Any = smp.DistributedOptimizer(adam)
        torch.manual_seed(100 + smp.dp_rank())  # each replica has its own batches
        self.number = 0

    def tell(self, event: str, **more: Any) -> None:
        line = {"job": self.job, "rank": smp.rank(), "event": event, "number": self.number, "at": time.time(), **more}
        os.write(self.journal, (json.dumps(line) + "\n").encode())

    def resume(self) -> None:
        """From the newest checkpoint; what was loaded is told as soon as the model is partitioned."""
        notes = find(self.path, None, partial=True).notes
        content = smp.resume_from_checkpoint(self.path)
        self.number = content["number"]
        self.tell("resumed", notes=notes)
        self.model.register_post_partition_hook(lambda *both: self.tell("holds", digest=digest(*both)))

    def step(self) -> None:
        self.optimizer.zero_grad()
        train_step(self.model, torch.randn(4, 16))
        self.optimizer.step()
        self.number += 1
        self.tell("stepped", digest=digest(self.model, self.optimizer))

    def save(self, blocking: bool = True, kept: int = KEPT) -> None:
        content = {"number": self.number}
        smp.save_checkpoint(
            *(self.path, f"step_{self.number}"),
            model=self.model,
            optimizer=self.optimizer,
            user_content=content,
            num_kept_partial_checkpoints=kept,
            blocking=blocking,
        )


# What a job does, on each rank


def ledger(root: Path, job: int, steps: int) -> None:
    """The run that nobody kills: tells what each rank holds after each step."""
    run = Run(root, job)
    for _ in range(steps):
        run.step()


def train_until_killed(root: Path, job: int, kill: Kill | None, saves: int) -> None:
    """Goes on from the newest checkpoint, if there is any, and saves after each step `saves` times or until killed.

    Every third save is made in the background, under the step that follows.
    """
    run = Run(root, job)
    if (run.path / "newest").exists():
        run.resume()
    for number in range(saves):
        run.step()
        arm(kill if kill is not None and (kill.rank, kill.save) == (smp.rank(), number) else None, run)
        begin, saved = time.monotonic(), run.number
        run.tell("saving")
        in_background = run.number % 3 == 0
        run.save(blocking=not in_background)
        if in_background:
            run.step()
            smp.wait_for_checkpoint()
        _seam.armed = False
        seconds, names = time.monotonic() - begin, sorted(os.listdir(run.path))
        run.tell("saved", saved=saved, seconds=seconds, calls=_seam.calls, names=names)


class _Seam:
    """Counts the calls of the writer's seam, which may come from its thread, and kills at one of them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.kill_at, self.armed = -1, False

    def __call__(self, name: str) -> None:
        if len(self.calls) == self.kill_at:
            self.kill(name)
        self.calls.append(name)

    run: Run

    def kill(self, where: str) -> None:
        if not self.armed:
            return
        self.run.tell("killed", where=where)
        os.kill(os.getpid(), signal.SIGKILL)


_seam = _Seam()


def arm(kill: Kill | None, run: Run) -> None:
    """Makes ready for the save that comes."""
    _seam.calls, _seam.kill_at, _seam.armed, _seam.run = [], -1, True, run
    writer.on_step = _seam
    if kill is not None and kill.call >= 0:
        _seam.kill_at = kill.call
    elif kill is not None:
        timer = threading.Timer(kill.delay, _seam.kill, [f"after {kill.delay:.4f} s"])
        timer.daemon = True
        timer.start()


def save_once(root: Path, job: int, kill: Kill | None) -> None:
    """Resumes, trains a step and saves, with nothing kept but the newest checkpoint."""
    run = Run(root, job)
    if (run.path / "newest").exists():
        run.resume()
    run.step()
    arm(kill if kill is not None and kill.rank == smp.rank() else None, run)
    run.save(kept=1)
    run.tell("saved", saved=run.number, calls=_seam.calls, names=sorted(os.listdir(run.path)))


def save_on_a_full_disk(root: Path, job: int, is_small: bool) -> None:
    """Saves; is refused when nothing, or not all, fits on the disk, in the foreground and in the background; saves
    again.

    `is_small`: the disk is, and is filled. Otherwise files are not allowed to grow.
    """
    run = Run(root, job)
    if (run.path / "newest").exists():
        run.resume()
    run.step()
    run.save()
    before = sorted(os.listdir(run.path)), (run.path / "newest").read_text()
    for room, blocking in itertools.product(ROOMS, (True, False)):
        run.step()
        text = "nothing"
        with no_space(run.path.parent, is_small, room):
            try:
                run.save(blocking)
                smp.wait_for_checkpoint()
            except smp.CheckpointError as error:
                text = str(error)
            smp.barrier()
        run.tell("refused", blocking=blocking, room=room, text=text)
        after = sorted(os.listdir(run.path)), (run.path / "newest").read_text()
        expect(after == before, f"{after} instead of {before}")
        smp.barrier()
    run.save()
    run.tell("saved", saved=run.number, names=sorted(os.listdir(run.path)))


@contextmanager
def no_space(disk: Path, is_small: bool, room: int) -> Iterator[None]:
    """Nobody can write more than `room` bytes as long as this lasts: all together to a small disk. Elsewhere to one
    file 100 bytes and an eighth of it.
    """
    smp.barrier()
    if not is_small:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 + room // 8, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return
    ballast = disk / "ballast"
    if smp.rank() == 0:
        with suppress(OSError), ballast.open("wb", buffering=0) as out:
            while True:
                out.write(bytes(4096))
    if smp.rank() == 0:
        os.truncate(ballast, ballast.stat().st_size - room)
    smp.barrier()
    yield
    if smp.rank() == 0:
        ballast.unlink()
    smp.barrier()


# The driver


class Driver:
    """Starts jobs one after another and keeps what they told."""

    def __init__(self, root: Path) -> None:
        self.root, self.jobs = root, 0

    def run(self, target: Any, *arguments: Any) -> tuple[list[int], list[dict[str, Any]]]:
        """Exit statuses of the ranks (negative: killed by that signal), and what they told in order of time."""
        sys.stdout.flush()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children = [self._fork(rank, port, target, arguments) for rank in range(RANKS)]
        deadline = time.monotonic() + ALLOWED
        statuses: dict[int, int] = {}
        while len(statuses) < RANKS:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                statuses[children.index(pid)] = os.waitstatus_to_exitcode(status)
                if status:
                    self._end([child for rank, child in enumerate(children) if rank not in statuses])
            elif time.monotonic() > deadline:
                late = [children[rank] for rank in set(range(RANKS)) - set(statuses)]
                for signal_number in (signal.SIGUSR1, signal.SIGKILL):  # first, to say where they are
                    for child in late:
                        os.kill(child, signal_number)
                    time.sleep(1.0)
                raise SystemExit(f"job {self.jobs} {arguments}: ranks {set(range(RANKS)) - set(statuses)} did not end")
            else:
                time.sleep(0.005)
        told = [json.loads(line) for line in (self.root / "journal").read_text().splitlines()]
        self.jobs += 1
        return [statuses[rank] for rank in range(RANKS)], [line for line in told if line["job"] == self.jobs - 1]

    def _end(self, children: list[int]) -> None:
        """What launchers do when a rank has died. The others have a moment in which they may notice by themselves."""
        time.sleep(0.2)
        for child in children:
            os.kill(child, signal.SIGTERM)

    def _fork(self, rank: int, port: int, target: Any, arguments: tuple[Any, ...]) -> int:
        pid = os.fork()
        if pid:
            return pid
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
        os.environ.update({"MASTER_ADDR": "127.0.0.1", **{key: str(value) for key, value in place.items()}})
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        target(self.root, self.jobs, *arguments)
        # Like any script, but without taking the interpreter apart: the ranks wait for each other. An exception is
        # handled as in any job.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class Broken(Exception):
    """What a test would assert."""


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise Broken(what)


class Checker:
    """Holds what the jobs tell against the run that nobody killed."""

    def __init__(self, told: list[dict[str, Any]]) -> None:
        self._digests = {(line["rank"], line["number"]): line["digest"] for line in told if line["event"] == "stepped"}
        self.complete = 0  # number of the newest checkpoint that a rank has seen complete
        self.attempted = 0  # of the newest one that was begun

    def check(self, job: str, statuses: list[int], told: list[dict[str, Any]]) -> bool:
        """Returns whether the job was killed while it saved."""
        for line in told:
            if "digest" in line:
                place = (line["rank"], line["number"])
                expect(line["digest"] == self._digests[place], f"{job}: rank {place[0]} holds something else at {line}")
        resumed = {line["rank"]: line["number"] for line in told if line["event"] == "resumed"}
        if self.complete:
            expect(len(resumed) == RANKS, f"{job}: checkpoint {self.complete} was there, resumed were {resumed}")
        if resumed:
            (number,) = found = set(resumed.values())
            expect(len(found) == 1, f"{job}: ranks resumed {resumed}")
            within = self.complete <= number <= self.attempted
            expect(within, f"{job}: resumed {number}, not one of {self.complete} to {self.attempted}")
        killed = [line for line in told if line["event"] == "killed"]
        if killed:
            expect(statuses[killed[0]["rank"]] == -signal.SIGKILL, f"{job}: {statuses}")
        expect(all(statuses) if killed else not any(statuses), f"{job}: {statuses}, {killed}")
        for line in told:
            if line["event"] == "saved" and line["rank"] == 0:
                self._check_names(job, line["names"])
        self.attempted = max([self.attempted, *(line["number"] for line in told)])
        begun = {line["number"] for line in told if line["event"] == "saving"}
        done = {line["saved"] for line in told if line["event"] == "saved"}
        self.complete = max([self.complete, *done])
        return bool(killed) and bool(begun - done)

    def _check_names(self, job: str, names: list[str]) -> None:
        """After a save nothing is left of earlier ones but what is to be kept."""
        steps = [name for name in names if name.startswith("step_")]
        expect(set(names) - set(steps) == {"newest"}, f"{job}: {names}")
        expect(len(steps) <= KEPT, f"{job}: {names}")


def kill_many(root: Path, seed: int, count: int) -> None:
    """Kills at random moments until `count` came in the middle of a save, each followed by a resume that is right."""
    chance = random.Random(seed)
    driver = Driver(root)
    statuses, told = driver.run(ledger, 6 * count + 20)
    expect(not any(statuses), f"the run that nobody kills: {statuses}")
    checker = Checker(told)
    statuses, told = driver.run(train_until_killed, None, 4)
    checker.check("first job", statuses, told)
    saved = [line for line in told if line["event"] == "saved"][RANKS:]  # the first save is slower
    calls = [max(len(line["calls"]) for line in saved if line["rank"] == rank) for rank in range(RANKS)]
    usual = statistics.median(line["seconds"] for line in saved)
    while_saving = 0
    while while_saving < count:
        expect(driver.jobs < 3 * count, f"only {while_saving} of {driver.jobs} kills came in the middle of a save")
        rank = chance.randrange(RANKS)
        at_call = chance.random() < 0.5
        delay = -1 if at_call else chance.uniform(0, usual)
        kill = Kill(rank, chance.randrange(3), chance.randrange(calls[rank]) if at_call else -1, delay)
        job = f"job {driver.jobs} {kill}"
        while_saving += checker.check(job, *driver.run(train_until_killed, kill, kill.save + 1))
    statuses, told = driver.run(train_until_killed, None, 3)
    checker.check("last job", statuses, told)
    print(f"killed while saving: {while_saving}, in {driver.jobs} jobs; {checker.complete} steps; seam calls {calls}")


def kill_at_each_point(root: Path) -> None:
    """Rank 0, and one that only writes its files, are killed at each step of saving with one checkpoint kept: until the
    step that replaces `newest` the next job resumes the old checkpoint, and says that the new one was cut short."""
    driver = Driver(root)
    for _ in range(2):
        statuses, told = driver.run(save_once, None)
        expect(not any(statuses), f"a save that nobody kills: {statuses}")
    calls = {line["rank"]: line["calls"] for line in told if line["event"] == "saved"}
    complete = 2
    points = [(rank, number, name) for rank in (0, RANKS - 1) for number, name in enumerate(calls[rank])]
    for rank, number, name in points:
        statuses, told = driver.run(save_once, Kill(rank, 0, number))
        where = f"rank {rank} killed at {name!r}"
        expect(statuses[rank] == -signal.SIGKILL and all(statuses), f"{where}: {statuses}")
        before_newest = rank != 0 or number <= calls[0].index("newest")
        cut_short = rank != 0 or 0 < number <= calls[0].index("manifest")
        expected = complete if before_newest else complete + 1
        statuses, told = driver.run(save_once, None)
        expect(not any(statuses), f"after {where}: {statuses}")
        resumed = [line for line in told if line["event"] == "resumed"]
        numbers = [line["number"] for line in resumed]
        expect(numbers == RANKS * [expected], f"after {where}: resumed {numbers}, not {expected}")
        for line in resumed:
            says = any(f"'step_{complete + 1}' was cut short" in note for note in line["notes"])
            expect(says is cut_short, f"after {where}: the notes are {line['notes']}")
        (names,) = [line["names"] for line in told if line["event"] == "saved" and line["rank"] == 0]
        complete = expected + 1
        expect(names == ["newest", f"step_{complete}_partial"], f"after {where}: {names}")
    print(f"killed at {[f'{rank}: {name}' for rank, _, name in points]}")


def fill_disk(root: Path, is_small: int) -> None:
    """Two jobs, the second resumes from what the first one left."""
    driver = Driver(root)
    saved = 2 * (1 + 2 * len(ROOMS))
    statuses, told = driver.run(ledger, saved + 2)
    checker = Checker(told)
    for job in ("first job", "second job"):
        statuses, told = driver.run(save_on_a_full_disk, bool(is_small))
        expect(not any(statuses), f"{job}: {statuses}")
        refused = [line for line in told if line["event"] == "refused"]
        texts: dict[tuple[bool, int], list[str]] = {}
        for line in refused:
            texts.setdefault((line["blocking"], line["room"]), []).append(line["text"])
        expect(len(texts) == 2 * len(ROOMS), f"{job}: {refused}")
        for (blocking, room), said in texts.items():
            expect(len(said) == RANKS and len(set(said)) == 1 and "cannot be" in said[0], f"{job}: {said}")
            print(f"refused, blocking={blocking}, room for {room}: {said[0]}")
        checker.check(job, statuses, told)
    expect(checker.complete == saved, f"the newest complete checkpoint is {checker.complete}")


def main() -> None:
    """`killing.py WHAT DIRECTORY ARGUMENTS...`"""
    _, what, root, *arguments = sys.argv
    torch.optim.AdamW(Net().parameters())  # imports what the ranks would each import
    {"kill": kill_many, "points": kill_at_each_point, "fill": fill_disk}[what](Path(root), *map(int, arguments))


if __name__ == "__main__":
    main()
