"""Which checkpoint a directory offers: by tag, or the newest. Reads names and manifests only, changes nothing."""

import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from smp.checkpoint.layout import describe_existing, existing_parts
from smp.checkpoint.manifest import SUFFIX
from smp.checkpoint.writer import (
    NEWEST,
    REPLACED,
    WRITING,
    aside,
    is_complete,
    is_written,
    journal_of,
    named,
    written_at,
)
from smp.errors import CheckpointError


class Style(Enum):
    """How a checkpoint lies on disk."""

    PARTIAL = "a partial checkpoint with a manifest"
    FULL = "a full checkpoint, or one file of whole tensors"
    OLD_DIRECTORY = "a directory of parts without a manifest"
    OLD_FILES = "files {tag}_{pp}_{tp} made by smp.save"


@dataclass(frozen=True)
class Found:
    """A checkpoint.

    Attributes:
        style: how it lies on disk.
        path: its directory; the file of a full one; of old files what smp.load takes.
        tag: its tag.
        notes: what the user should know about the choice.
    """

    style: Style
    path: Path
    tag: str
    notes: list[str] = field(default_factory=list)


def find(path: Path, tag: str | None, partial: bool) -> Found:
    """The checkpoint of a tag; without one that which `newest` names.

    Where `newest` is missing, or names one that is not there in the wanted kind, it is the complete one saved last.

    Raises:
        CheckpointError: there is none, or the directory cannot be read; says what is there instead.
    """
    try:
        return _find(path, tag, partial)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _find(path: Path, tag: str | None, partial: bool) -> Found:
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist or is no directory: there is no checkpoint to resume from")
    if tag is not None:
        found = _find_tag(path, tag, partial)
        if found is None:
            raise CheckpointError(_nothing_there(path, tag, partial))
        return found
    notes = [
        f"a save of the checkpoint {_tag(named(unfinished, WRITING))!r} was cut short; it is skipped"
        for unfinished in sorted(path.glob(f".*_partial.{WRITING}"))
        if not is_written(unfinished)
    ]
    newest = newest_tag(path)
    found = _find_tag(path, newest, partial) if newest is not None else None
    if found is None:
        last = _last_complete(path, partial)
        if last is None:
            raise CheckpointError(_nothing_there(path, newest, partial))
        nameless = "`newest` cannot be read" if os.path.lexists(path / NEWEST) else "there is no file `newest`"
        why = nameless if newest is None else f"`newest` names {newest!r}, which is not there"
        notes.append(f"{why}; resuming from {last!r}, the last complete {'partial' if partial else 'full'} checkpoint")
        found = _find_tag(path, last, partial)
        assert found is not None
    return Found(found.style, found.path, found.tag, notes)


def newest_tag(path: Path) -> str | None:
    """The tag in the file `newest`; None when there is none."""
    try:
        return (path / NEWEST).read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def newest_in(path: Path) -> Path | None:
    """The checkpoint that `newest` names: the directory of a partial one, else the file of a full one."""
    tag = newest_tag(path)
    found = None if tag is None else _find_tag(path, tag, partial=True) or _find_tag(path, tag, partial=False)
    return None if found is None else found.path


def _find_tag(path: Path, tag: str, partial: bool) -> Found | None:
    target = path / f"{tag}_partial"
    if not partial:
        whole = path / tag
        said = os.path.lexists(path / f"{tag}{SUFFIX}") or os.path.lexists(journal_of(whole))
        return Found(Style.FULL, whole, tag) if said or whole.is_file() or stand_in(whole) is not None else None
    writing = aside(target, WRITING)  # a save cut short while it renamed
    for place in (writing, target, aside(target, REPLACED)):
        if is_written(place) if place == writing else is_complete(place):
            return Found(Style.PARTIAL, place, tag)
    ours = any(target.glob("random_*_*_*.pt"))  # has lost its manifest: it would resume without masters and checksums
    if any(target.glob("model_*_*.pt")) and not ours:
        return Found(Style.OLD_DIRECTORY, target, tag)
    if any(len(numbers) == 2 for numbers in existing_parts(str(path / tag)).values()):
        return Found(Style.OLD_FILES, path / tag, tag)
    return None


def stand_in(whole: Path) -> Path | None:
    """What lies beside a file that is missing, with the same values: Hugging Face's trainer writes one or the other."""
    safe = whole.parent / "model.safetensors"
    return safe if whole.name == "pytorch_model.bin" and not whole.exists() and safe.is_file() else None


def _tag(directory: Path) -> str:
    return directory.name.removesuffix("_partial")


def _last_complete(path: Path, partial: bool) -> str | None:
    if partial:
        names = {place: _tag(place) for place in path.glob("*_partial")}
        times = {name: written_at(place) for place, name in names.items()}
    else:
        names = {place: place.name.removesuffix(SUFFIX) for place in path.glob(f"*{SUFFIX}")}
        times = {name: place.stat().st_mtime for place, name in names.items() if (path / name).is_file()}
    known = sorted((time, name) for name, time in times.items() if time is not None)
    return known[-1][1] if known else None


def _nothing_there(path: Path, tag: str | None, partial: bool) -> str:
    partials = sorted(_tag(place) for place in path.glob("*_partial") if is_complete(place))
    fulls = sorted(place.name.removesuffix(SUFFIX) for place in path.glob(f"*{SUFFIX}"))
    kind = "partial" if partial else "full"
    wanted = f"{path} holds no complete {kind} checkpoint" + (f" with the tag {tag!r}" if tag is not None else "")
    there = [f"partial ones: {', '.join(map(repr, partials[-8:]))}"] if partials else []
    there += [f"full ones (partial=False): {', '.join(map(repr, fulls[-8:]))}"] if fulls else []
    asked = path / (f"{tag}_partial" if partial else f"{tag}")
    if tag is not None and os.path.lexists(asked):
        there.insert(0, f"{asked} is {'without a manifest' if partial and asked.is_dir() else 'something else'}")
    if not there and tag is not None:
        there = [describe_existing(str(path / tag))]
    return f"{wanted}; {'; '.join(there)}" if there else f"{wanted}, and no other one"
