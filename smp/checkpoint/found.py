"""Which checkpoints lie in a directory, complete or not. No job is needed, nothing is changed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from smp.checkpoint.finder import newest_in
from smp.checkpoint.manifest import SUFFIX
from smp.checkpoint.reader import Checkpoint, manifest_path
from smp.checkpoint.writer import JOURNAL, NEWEST, REMOVING, REPLACED, WRITING, named
from smp.errors import CheckpointError


@dataclass(frozen=True)
class Found:
    """What may be a checkpoint.

    Attributes:
        path: a directory or, of a full one, a file.
        checkpoint: opened; None when that fails.
        problem: why.
    """

    path: Path
    checkpoint: Checkpoint | None
    problem: str = ""

    @staticmethod
    def at(path: Path) -> "Found":
        """Opens it if possible."""
        try:
            return Found(path, Checkpoint.open(path))
        except CheckpointError as error:
            return Found(path, None, str(error))


def is_checkpoint(path: Path) -> bool:
    """Whether a path names a single checkpoint, rather than a directory with several."""
    return path.is_file() or manifest_path(path).is_file() or path.name.endswith("_partial")


def checkpoints_in(directory: Path) -> list[Found]:
    """All there are, the oldest first; then those that cannot be opened, and what unfinished saves have left."""
    full = {path.parent / path.name.removesuffix(SUFFIX) for path in directory.glob(f"*{SUFFIX}")}
    full |= {named(path, JOURNAL) for path in directory.glob(f".*.{JOURNAL}")}
    partial = [path for path in directory.iterdir() if path.name.endswith("_partial")]
    left = [path for state in (WRITING, REPLACED, REMOVING) for path in directory.glob(f".*.{state}")]
    opened = [Found.at(path) for path in sorted([*full, *partial])]
    unfinished = [Found(path, None, "left by a save that was cut short") for path in sorted(left)]
    return sorted(opened, key=_age) + unfinished


def _age(found: Found) -> float:
    return float("inf") if found.checkpoint is None else found.checkpoint.manifest.written


def single(path: Path) -> Checkpoint:
    """The checkpoint at a path; of a directory with several the newest.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    if path.exists() and not is_checkpoint(path):
        newest = newest_in(path)
        if newest is None:
            raise CheckpointError(f"{path} holds no file `{NEWEST}`: {_listed(checkpoints_in(path))}")
        path = newest
    return Checkpoint.open(path)


def _listed(found: Sequence[Found]) -> str:
    names = ", ".join(one.path.name for one in found if one.checkpoint is not None)
    return f"name one of its checkpoints: {names}" if names else "it holds no checkpoint of smp.save_checkpoint"
