"""Writing the files of a checkpoint and making it the one that counts: steps on the file system, no processes.

    path/.{tag}_partial.writing/   (1) every rank writes its files and flushes them       the old checkpoint is whole
                                   (2) manifest.json: what is in it is complete
    path/.{tag}_partial.replaced/  (3) a checkpoint of the same tag moves aside
    path/{tag}_partial/            (4) .writing gets its name
    path/newest                    (5) replaced by one that was written and flushed before (3)
                                   (6) what was replaced, and old ones beyond the number kept, are removed

A crash before (2) leaves a directory that nobody takes for a checkpoint; between (2) and (4) `find` takes `.writing`,
and where there is none, or its manifest is damaged, what was there before. After (2) nothing needs room on the disk.
"""

import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smp import log
from smp.checkpoint import manifest as manifests
from smp.checkpoint.archive import records_of
from smp.checkpoint.files import flush_directory, flush_file, leave_cache, writing
from smp.checkpoint.layout import Place
from smp.checkpoint.manifest import Manifest, StoredFile
from smp.checkpoint.safe_load import refuse_forbidden
from smp.errors import CheckpointError

NEWEST = "newest"
WRITING, REPLACED, REMOVING, JOURNAL = "writing", "replaced", "removing", "commit"


def _nothing(step: str) -> None:
    """What happens at a step unless a test wants to know."""


# Called with the name of each step before it is done, on the thread that does it. A seam for tests that kill a job.
on_step: Callable[[str], None] = _nothing


@dataclass(frozen=True)
class Serialized:
    """An object as `torch.save` would write it."""

    data: bytes


def aside(path: Path, state: str) -> Path:
    """The hidden name that a checkpoint, or one of its files, has in one of the states above."""
    return path.parent / f".{path.name}.{state}"


def named(hidden: Path, state: str) -> Path:
    """What `aside` was given."""
    return hidden.parent / hidden.name[1 : -len(state) - 1]


def write_files(
    directory: Path, objects: Mapping[str, Any], places: Mapping[str, Place | None], replaced: Iterable[Path] = ()
) -> dict[str, StoredFile]:
    """Writes each object to its file and flushes all of them; returns what the manifest says of the files.

    `replaced` are files, if they exist, that those will take the place of.

    Raises:
        CheckpointError: the disk refuses, or an object holds a class that could not be read again; names the file.
    """
    for path in replaced:
        leave_cache(path)
    written = {}
    descriptors = {}  # kept open: whoever opens a file later may not hear of an earlier failure of its disk
    with ExitStack() as still_open:
        for name, obj in objects.items():
            path = directory / name
            with writing(path):
                on_step(f"write {name}")
                with path.open("wb") as out:
                    if isinstance(obj, Serialized):
                        out.write(obj.data)
                    else:
                        torch.save(obj, out)
                    descriptors[name] = os.dup(out.fileno())
                    still_open.callback(os.close, descriptors[name])
                if not isinstance(obj, Serialized):
                    refuse_forbidden(path, name)
                written[name] = file_entry(path, places[name])
        for name, descriptor in descriptors.items():
            with writing(directory / name):
                on_step(f"flush {name}")
                os.fsync(descriptor)
    flush_directory(directory)
    return written


def file_entry(path: Path, place: Place | None) -> StoredFile:
    """What the manifest says of a file that has been written."""
    return StoredFile(path.stat().st_size, place, records_of(path))


def write_text(path: Path, text: str) -> None:
    """Writes and flushes a small file.

    Raises:
        CheckpointError: the disk refuses; names the file.
    """
    with writing(path), path.open("w") as out:
        out.write(text)
        flush_file(out)


def prepare(path: Path) -> None:
    """Makes the empty directory in which the partial checkpoint `path` is written, and `path`'s own parents.

    Raises:
        CheckpointError: the disk refuses, or something else has the checkpoint's name; names what it is about.
    """
    directory = aside(path, WRITING)
    on_step("prepare")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_other(path, stat.S_ISDIR, "the directory of a checkpoint")
        clean(path.parent)
        directory.mkdir()
        flush_directory(path.parent)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be made: {error}") from error


def prepare_full(directory: Path, tag: str) -> None:
    """Makes the directory in which the full checkpoint of a tag is written.

    Raises:
        CheckpointError: as `prepare`.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in (tag, f"optimizer_{tag}", f"user_content_{tag}", f"{tag}.{manifests.NAME}"):
            _refuse_other(directory / name, stat.S_ISREG, "a file of a checkpoint")
        clean(directory)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written to: {error}") from error


def _refuse_other(path: Path, wanted: Callable[[int], bool], what: str) -> None:
    """Raises where something else has the name: found out when the new checkpoint gets it, that would be too late."""
    if os.path.lexists(path) and not (path.is_symlink() or wanted(path.stat().st_mode)):
        raise CheckpointError(f"{path} is in the way: {what} is to be called so. Move it, or save elsewhere")


def discard(path: Path) -> None:
    """Removes what was written for `path` after a failure."""
    shutil.rmtree(aside(path, WRITING), ignore_errors=True)
    with suppress(OSError):
        aside(path.parent / NEWEST, WRITING).unlink()


def commit(path: Path, manifest: Manifest) -> None:
    """Steps (2) to (5): makes what all ranks have written the checkpoint at `path`, and the newest.

    Raises:
        CheckpointError: the disk refuses; what was there before is there again.
    """
    directory, replaced, newest = aside(path, WRITING), aside(path, REPLACED), path.parent / NEWEST
    on_step("newest aside")
    write_text(aside(newest, WRITING), manifest.tag)
    on_step("manifest")
    write_text(directory / f".{manifests.NAME}", manifest.to_json())
    try:
        with writing(path):
            os.replace(directory / f".{manifests.NAME}", directory / manifests.NAME)
            flush_directory(directory)
            if os.path.lexists(path):
                on_step("move the old one aside")
                os.replace(path, replaced)
            on_step("rename")
            os.replace(directory, path)
            flush_directory(path.parent)
            on_step("newest")
            os.replace(aside(newest, WRITING), newest)
            flush_directory(path.parent)
    except CheckpointError:
        if os.path.lexists(replaced) and not os.path.lexists(path):
            os.replace(replaced, path)
        raise


def commit_full(directory: Path, manifest: Manifest) -> None:
    """Makes the files of a full checkpoint, each of them written and flushed aside, those that count.

    A file can only be replaced by itself, so the manifest becomes a journal first: from then on the new files are the
    checkpoint, whether or not they have their names yet.

    Raises:
        CheckpointError: the disk refuses.
    """
    newest, name = directory / NEWEST, f"{manifest.tag}.{manifests.NAME}"
    on_step("newest aside")
    write_text(aside(newest, WRITING), manifest.tag)
    on_step("manifest")
    write_text(aside(directory / name, WRITING), manifest.to_json())
    with writing(directory / manifest.tag):
        on_step("journal")
        os.replace(aside(directory / name, WRITING), journal_of(directory / manifest.tag))
        flush_directory(directory)
        _follow_journal(directory, manifest)
        on_step("newest")
        os.replace(aside(newest, WRITING), newest)
        flush_directory(directory)


def journal_of(path: Path) -> Path:
    """Where the manifest of the full checkpoint `path` is while its files get their names."""
    return aside(path, JOURNAL)


def _follow_journal(directory: Path, manifest: Manifest) -> None:
    tag = manifest.tag
    for name in manifest.files:
        on_step(f"rename {name}")
        with suppress(FileNotFoundError):  # it has its name already
            os.replace(aside(directory / name, WRITING), directory / name)
    for stale in {f"optimizer_{tag}", f"user_content_{tag}"} - set(manifest.files):
        (directory / stale).unlink(missing_ok=True)
    on_step("journal done")
    os.replace(journal_of(directory / tag), directory / f"{tag}.{manifests.NAME}")
    flush_directory(directory)


def is_complete(path: Path) -> bool:
    """Whether a directory is a partial checkpoint with a manifest, be it a damaged one. Raises OSError when the
    directory cannot be read.
    """
    try:
        (path / manifests.NAME).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_written(unfinished: Path) -> bool:
    """Whether a partial checkpoint that does not have its name yet is complete. With a damaged manifest it is not: what
    was there before is better.
    """
    try:
        return manifests.is_whole((unfinished / manifests.NAME).read_text())
    except (OSError, UnicodeDecodeError):
        return False


def clean(directory: Path) -> None:
    """Ends what saves that were cut short have left in a directory: completes what can be completed, removes the rest.

    For a job that is about to save there: nobody else may be saving.

    Raises:
        CheckpointError: `newest` is no file, or the journal of a full checkpoint cannot be read.
    """
    _refuse_other(directory / NEWEST, stat.S_ISREG, "the file that names the newest checkpoint")
    for found in sorted(directory.glob(f".*_partial.{WRITING}")):
        path = named(found, WRITING)
        if not is_written(found):
            _remove_tree(found)
        elif os.path.lexists(path):
            os.replace(path, aside(path, REPLACED))
            os.replace(found, path)
        else:
            os.replace(found, path)
    for found in sorted(directory.glob(f".*_partial.{REPLACED}")):
        path = named(found, REPLACED)
        if os.path.lexists(path):
            _remove_tree(found)
        else:
            os.replace(found, path)
    for found in directory.glob(f".*_partial.{REMOVING}"):
        _remove_tree(found)
    for found in directory.glob(f".*.{JOURNAL}"):
        _follow_journal(directory, manifests.read(found))
    for found in directory.glob(f".*.{WRITING}"):
        _remove_tree(found)


def _remove_tree(path: Path) -> None:
    """Removes what has one of our hidden names, whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_old(path: Path, num_kept: int | None) -> None:
    """Step (6), after `path` was saved: keeps the `num_kept` newest complete partial checkpoints beside it, itself
    included; None keeps all. One that is being read stays; nothing that has no manifest is touched.

    What cannot be removed is reported and tried again by the next save.
    """
    on_step("retention")
    try:
        if os.path.lexists(aside(path, REPLACED)):
            _remove_tree(aside(path, REPLACED))
        if num_kept is not None:
            times = {other: written_at(other) for other in path.parent.glob("*_partial") if other != path}
            others = sorted((time, other) for other, time in times.items() if time is not None)
            for _, old in others[: max(0, len(others) - num_kept + 1)]:
                _remove(old)
    except (OSError, CheckpointError) as error:
        log.get_logger().warning("an old checkpoint cannot be removed: %s", error)


def written_at(path: Path) -> float | None:
    """When the partial checkpoint in a directory was saved; None when it has no manifest that this version knows."""
    try:
        return manifests.read(path / manifests.NAME).written
    except CheckpointError:
        return None


def _remove(path: Path) -> None:
    with (path / manifests.NAME).open("r+") as manifest:
        try:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            log.get_logger().info("%s is being read and stays until the next save", path)
            return
        on_step(f"remove {path.name}")
        os.replace(path, aside(path, REMOVING))
        shutil.rmtree(aside(path, REMOVING))
