"""`smp.save_checkpoint` and `smp.resume_from_checkpoint`.

save     enter -> earlier background save settled -> contents collected and checked on all ranks -> place made
         -> files written -> agreement (agreement.py) -> commit (writer.py)       the last two may be a thread's
resume   enter -> found and opened -> checked on all ranks -> applied, or kept until the model is partitioned
"""

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial as bind
from pathlib import Path
from typing import Any

from torch import Tensor

from smp import log, runtime
from smp.checkpoint import background, full, manifest, old, writer
from smp.checkpoint.agreement import Agreement, Waiter
from smp.checkpoint.content import USER_CONTENT, Content, collect, merge
from smp.checkpoint.finder import Found, Style, find
from smp.checkpoint.loading import Options, PartialLoad
from smp.checkpoint.manifest import SUFFIX
from smp.checkpoint.partial import place_of
from smp.checkpoint.random_state import saved_random_state
from smp.checkpoint.reader import Checkpoint
from smp.checkpoint.safe_load import serialize
from smp.comm.entry import enter_collective, together
from smp.errors import CheckpointError, SmpError, UsageError
from smp.runtime import Runtime
from smp.topology import CommGroup

_RESUME_ADVICE = "Call smp.resume_from_checkpoint on all ranks, under no condition: each reads what it needs."
_SAVE_ADVICE = "Call smp.save_checkpoint on all ranks, under no condition: each decides by itself what it writes."


_busy = threading.Lock()


@contextmanager
def _alone(call: str) -> Iterator[None]:
    """Around a call of which a process makes one at a time."""
    if not _busy.acquire(blocking=False):
        raise UsageError(
            f"{call} was called while another thread of this process saves or resumes a checkpoint: all ranks make "
            "these calls in the same order, so make them from one thread"
        )
    try:
        yield
    finally:
        _busy.release()


@_alone("smp.save_checkpoint")
@log.long_phase("smp.save_checkpoint")
def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    partial: bool = True,
    model: Any = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    blocking: bool = True,
) -> None:
    """Saves model, optimizer, and what the script wants to find again, under a tag. Collective over all ranks.

    A crash at any moment leaves what `path` held before loadable, a checkpoint of the same tag included; the new one
    counts once all ranks have written it. Where a rank cannot write, all of them raise and nothing is left.

    Args:
        path: directory; made when it is missing. Seen by all ranks, and saved to by one job at a time.
        tag: names the checkpoint; one of the same tag is replaced.
        partial: each rank writes its part, to `path/{tag}_partial/`; a job of any degrees can resume from it. False:
            whole tensors are written to `path/{tag}`, `path/optimizer_{tag}` and `path/user_content_{tag}`.
        model, optimizer: the DistributedModel and DistributedOptimizer; None leaves them out.
        user_content: plain values, tensors, and the classes listed in `smp.checkpoint.safe_load`; rank 0's is saved.
        translate_if_full: give a full checkpoint the names of the library that the model's family is from.
        num_kept_partial_checkpoints: keep so many partial checkpoints in `path`, the newest, and remove older ones;
            None keeps all.
        blocking: False returns when the state has been copied to host memory, where it stays until the next save, and
            writes it while training goes on. A failure is raised by the next save or resume, by
            `smp.wait_for_checkpoint`, or at the program's end, which waits for it. While one is being written, another
            with `blocking=False` is refused, and one without it waits.

    Raises:
        CheckpointError: on every rank: a file cannot be written, or `user_content` could not be read again.
        CommError: some ranks did not call it; they are named.
    """
    rt = runtime.get()
    _enter(rt, "smp.save_checkpoint", _SAVE_ADVICE)
    _settle_earlier(rt, blocking)
    directory, tag = together(rt, lambda: _directory(path)), str(tag)
    called = (
        os.fspath(directory),
        tag,
        partial,
        model is None,
        optimizer is None,
        num_kept_partial_checkpoints,
        blocking,
    )
    _same_everywhere(rt, "smp.save_checkpoint", called)
    _check_save(rt, tag, partial, model, optimizer, num_kept_partial_checkpoints)
    if model is not None and getattr(rt.model.reducer, "pending", False):
        log.warn_rank0(
            "save_checkpoint: gradients are accumulated that no step has used yet. They are not saved, so the job that "
            "resumes has to repeat their backward passes; save after optimizer.step() instead"
        )
    if not (partial or blocking):
        raise UsageError("blocking=False is for partial checkpoints: leave it out, or save with partial=True")
    save_id = rt.transport.broadcast_object(secrets.token_hex(8), rt.group(CommGroup.WORLD), 0)
    if not partial:
        serialized = together(rt, lambda: _serialized(rt, user_content))
        full.save(rt, directory, tag, model, optimizer, serialized, translate_if_full, save_id)
        return
    content = together(rt, lambda: _collect(rt, tag, save_id, model, optimizer, user_content, blocking))
    _save_partial(rt, directory / f"{tag}_partial", content, num_kept_partial_checkpoints, save_id, blocking)


def _save_partial(
    rt: Runtime, target: Path, content: Content, num_kept: int | None, save_id: str, blocking: bool
) -> None:
    together(rt, lambda: writer.prepare(target) if rt.rank == 0 else None)
    save = _PartialSave(target, content, num_kept, rt.rank, rt.size)
    agreement = Agreement(rt.world.store, rt.rank, rt.size, save_id)
    if blocking:
        ranks = list(range(rt.size))
        problem = _run(save, agreement, lambda test: rt.monitor.wait(test, "smp.save_checkpoint", ranks))
        if problem:
            raise CheckpointError(problem)
    else:
        background.start(bind(_run, save, agreement, background.sleep_until(rt.monitor.timeout)))


@_alone("smp.resume_from_checkpoint")
@log.long_phase("smp.resume_from_checkpoint")
def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Any:
    """Loads a checkpoint into the job's model and optimizer and returns its `user_content`. Collective over all ranks.

    A partial checkpoint may have been saved on any degrees, with optimizer state sharded or not, in any precision; each
    rank reads what it needs of it. Random generators (torch's, Python's, numpy's) go on where they stood when a partial
    checkpoint was saved. Before the model is partitioned everything is checked, and loaded at partition; make the
    optimizer before that. Parts without a manifest, which old scripts made (`path/{tag}_partial/model_{pp}_{tp}.pt`, or
    `smp.save({"model": .., "optimizer": .., ..}, f"{path}/{tag}")`), are loaded on their own degrees; what else such a
    dict holds is returned.

    Args:
        path: the directory given to `save_checkpoint`.
        tag: which checkpoint; None: the one that `path/newest` names.
        partial: False: a full checkpoint `path/{tag}`, or any file with a whole state dict. `model.safetensors` beside
            a missing `pytorch_model.bin` stands in for it.
        strict: names must be the same in the model and the checkpoint. Shapes must be, in any case.
        load_optimizer: False leaves the optimizer as it is (but for fp32 masters, which are the weights).
        load_sharded_optimizer_state: False leaves it as it is where the checkpoint's is sharded over replicas.
        translate_function: from the names of a full checkpoint to smp's; None: as `model.load_state_dict` does.

    Raises:
        CheckpointError: on every rank, before any parameter is touched: there is no such checkpoint, a file is missing,
            cut short, damaged, foreign or of a newer version (it is named), or it does not fit the model.
        CommError: some ranks did not call it; they are named.
    """
    rt = runtime.get()
    _enter(rt, "smp.resume_from_checkpoint", _RESUME_ADVICE)
    _settle_earlier(rt, blocking=True)
    directory, tag = together(rt, lambda: _directory(path)), None if tag is None else str(tag)
    options = Options(strict, load_optimizer and rt.optimizer is not None, load_sharded_optimizer_state)
    called = (os.fspath(directory), tag, partial, options, translate_function is None)
    _same_everywhere(rt, "smp.resume_from_checkpoint", called)
    if rt.model is None:
        raise UsageError("smp.resume_from_checkpoint needs the DistributedModel: make it first")
    found = together(rt, lambda: find(directory, tag, partial) if rt.rank == 0 else None)
    found = rt.transport.broadcast_object(found, rt.group(CommGroup.WORLD), 0)
    for note in found.notes:
        log.warn_rank0("smp.resume_from_checkpoint: %s", note)
    if partial and translate_function is not None:
        log.warn_rank0("resume_from_checkpoint: translate_function has no effect on a partial checkpoint")
    if load_optimizer and rt.optimizer is None:
        log.warn_rank0("resume_from_checkpoint: there is no DistributedOptimizer (yet), so its state is not loaded")
    if found.style is Style.PARTIAL:
        return _resume_partial(rt, found, options)
    if found.style is Style.FULL:
        load = full.FullLoad(rt, found.path, options, translate_function)
        together(rt, load.check)
        user_content = together(rt, load.user_content)
        load.settle_groups()
        load.apply()
        return user_content
    return old.resume(rt, found, options)


def _resume_partial(rt: Runtime, found: Found, options: Options) -> Any:
    checkpoint = together(rt, lambda: Checkpoint.open(found.path))
    load = PartialLoad(rt, checkpoint, options)

    def check() -> tuple[Any, Callable[[], None]]:
        load.check()
        return checkpoint.load(USER_CONTENT), saved_random_state(checkpoint, place_of(rt))

    user_content, restore_random = together(rt, check)
    load.settle_groups()

    def apply() -> None:
        apply_values = together(rt, load.plan)
        apply_values()
        checkpoint.close()

    rt.load_once_partitioned(apply, of_model=True, of_optimizer=True)
    restore_random()
    return user_content


def _enter(rt: Runtime, call: str, advice: str) -> None:
    enter_collective(rt, f"{call}()", rt.group(CommGroup.WORLD), advice)


def _settle_earlier(rt: Runtime, blocking: bool) -> None:
    """Waits for a save in the background, and raises its failure; refuses to start a second one beside it."""
    running = not blocking and background.is_running()
    error: Exception | None = None
    if any(rt.transport.all_gather_object(running, rt.group(CommGroup.WORLD))):
        error = CheckpointError(
            "smp.save_checkpoint(blocking=False) was called while the checkpoint before is still being written. Save "
            "less often, call smp.wait_for_checkpoint() before, or save with blocking=True, which waits"
        )
    else:
        try:
            background.wait_for_checkpoint()
        except CheckpointError as caught:
            error = caught
    if error is not None:
        raise error


def _directory(path: Any) -> Path:
    """What `path` names now: the script may have changed its working directory by the time that files are written in
    the background, or read at partition.
    """
    try:
        return Path(path).absolute()
    except (TypeError, OSError) as error:  # the working directory is gone, for one
        raise UsageError(f"path must name a directory, a str or a pathlib.Path, got {path!r}: {error}") from error


def _same_everywhere(rt: Runtime, call: str, arguments: tuple[Any, ...]) -> None:
    given = rt.transport.all_gather_object(arguments, rt.group(CommGroup.WORLD))
    for rank, other in enumerate(given):
        if other != given[0]:
            raise UsageError(
                f"{call} was called with {given[0]} on rank 0 and with {other} on rank {rank}: they differ"
            )


def _check_save(rt: Runtime, tag: str, partial: bool, model: Any, optimizer: Any, num_kept: int | None) -> None:
    if (
        not tag
        or "/" in tag
        or tag.startswith(".")
        or tag == writer.NEWEST
        or tag != tag.strip()
        or not tag.isprintable()
    ):
        raise UsageError(
            f"tag is {tag!r}; it becomes a file's name: no '/', no '.' in front, no blanks at its ends, no control "
            "characters, and not 'newest'"
        )
    if not partial and (tag.startswith(("optimizer_", "user_content_")) or tag.endswith(("_partial", SUFFIX))):
        raise UsageError(
            f"tag is {tag!r}; of a full checkpoint it must not begin with 'optimizer_' or 'user_content_' nor end with "
            "'_partial' or '.manifest.json': files of other checkpoints are called so"
        )
    if model is not None and model is not rt.model:
        raise UsageError(f"model must be the job's DistributedModel or None, got {type(model).__name__}")
    if optimizer is not None and optimizer is not rt.optimizer:
        raise UsageError(f"optimizer must be the job's DistributedOptimizer or None, got {type(optimizer).__name__}")
    if num_kept is not None and (not isinstance(num_kept, int) or num_kept < 1):
        raise UsageError(f"num_kept_partial_checkpoints is {num_kept!r}; it must be a whole number from 1, or None")


def _collect(
    rt: Runtime, tag: str, save_id: str, model: Any, optimizer: Any, user_content: Any, blocking: bool
) -> Content:
    serialized = _serialized(rt, user_content)
    if blocking:
        return collect(rt, tag, save_id, model, optimizer, serialized, _to_host)
    background.copies.begin()
    content = collect(rt, tag, save_id, model, optimizer, serialized, background.copies.copy)
    background.copies.finish(rt.device)
    return content


def _serialized(rt: Runtime, user_content: Any) -> writer.Serialized | None:
    return writer.Serialized(serialize(user_content, "user_content")) if rt.rank == 0 else None


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.cpu()


@dataclass(frozen=True)
class _PartialSave:
    """The work of one save on one rank, once all is known that the other ranks must tell."""

    target: Path
    content: Content
    num_kept: int | None
    rank: int
    size: int

    def write(self) -> None:
        directory = writer.aside(self.target, writer.WRITING)
        if not directory.is_dir():
            raise CheckpointError(
                f"{directory}, which rank 0 has made, is not there: checkpoints are saved to a file system that all "
                "ranks share"
            )
        objects = self.content.objects
        files = writer.write_files(directory, objects, self.content.places, [self.target / name for name in objects])
        fragment = merge([self.content.manifest], files)
        writer.write_text(_fragment(directory, self.rank), fragment.to_json())

    def commit(self) -> None:
        directory = writer.aside(self.target, writer.WRITING)
        paths = [_fragment(directory, rank) for rank in range(self.size)]
        parts = [manifest.read(path) for path in paths]
        whole = merge(parts, {name: file for part in parts for name, file in part.files.items()})
        for path in paths:
            path.unlink()
        writer.commit(self.target, whole)

    def discard(self) -> None:
        writer.discard(self.target)

    def after(self) -> None:
        writer.remove_old(self.target, self.num_kept)


def _fragment(directory: Path, rank: int) -> Path:
    """What a rank has to say for the manifest."""
    return directory / f".part_{rank}.json"


def _run(save: _PartialSave, agreement: Agreement, wait: Waiter) -> str:
    """Writes, agrees and commits; returns what went wrong, the same on all ranks, or an empty text."""
    agreement.report(_attempt(save.write))
    if save.rank == 0:
        problem = agreement.problems(wait) or _attempt(save.commit)
        if problem:
            save.discard()
        else:
            save.after()
        agreement.settle(problem)
    return agreement.verdict(wait)


def _attempt(work: Callable[[], None]) -> str:
    """What goes wrong, in words that other ranks can repeat."""
    try:
        work()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        return f"{error}" if isinstance(error, SmpError) else f"{type(error).__name__}: {error}"
    return ""
