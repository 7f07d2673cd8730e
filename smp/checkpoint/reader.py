"""Reading a checkpoint by its manifest, with or without a job: any box of any tensor of the user's module.

    checkpoint = Checkpoint.open("run/300_partial")          sizes of all files are checked
    checkpoint.verify()                                      and every checksum
    checkpoint.read("model", "transformer.wte.weight")       put together from the parts that hold it

Files are mapped into memory, so only what is copied out of them is read. Nothing is unpickled but what
`smp.checkpoint.safe_load` allows.
"""

import fcntl
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from smp.checkpoint import manifest as manifests
from smp.checkpoint.archive import damaged_records
from smp.checkpoint.layout import Place
from smp.checkpoint.manifest import Kind, Manifest, StoredTensor
from smp.checkpoint.safe_load import load_file
from smp.checkpoint.slices import Box, Copy, plan_copies
from smp.checkpoint.writer import WRITING, aside, journal_of
from smp.dp.optimizer_state import MASTERS_KEY, NAMES_KEY
from smp.errors import CheckpointError
from smp.tp.origin import Block, Origin

_THREADS = 2  # that compute checksums


@dataclass
class Traffic:
    """Bytes that this process has copied out of checkpoints, and bytes whose checksums it has compared."""

    copied: int = 0
    verified: int = 0


traffic = Traffic()


def manifest_path(path: Path) -> Path:
    """Of a partial checkpoint, a directory, or a full one, a file."""
    if path.is_dir():
        return path / manifests.NAME
    journal = journal_of(path)
    return journal if journal.exists() else path.parent / f"{path.name}.{manifests.NAME}"


class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        path: the directory of a partial checkpoint; of a full one, the file of the model.
        manifest: what it holds.
    """

    def __init__(self, path: Path, manifest: Manifest, lock: IO[Any] | None = None) -> None:
        self.path, self.manifest = path, manifest
        self._lock = lock  # while this is open and locked, no save removes the checkpoint as an old one
        self.directory = path.parent if manifest.full else path
        self._in_journal = manifest.full and journal_of(path).exists()
        self._objects: dict[str, Any] = {}
        self._positions: dict[str, dict[str, int]] = {}
        self._index: dict[tuple[str, str], dict[str, list[StoredTensor]]] = {}
        for stored in manifest.tensors:
            by_source = self._index.setdefault((stored.kind, stored.key), {})
            for source in stored.sources:
                by_source.setdefault(source, []).append(stored)

    @staticmethod
    def open(path: str | Path) -> "Checkpoint":
        """Reads the manifest and checks that every file is there with its size.

        Args:
            path: directory of a partial checkpoint (`.../{tag}_partial`) or file of a full one (`.../{tag}`).

        Raises:
            CheckpointError: there is none, it was never completed, a newer version wrote it, or a file is missing or
                cut short; names the file.
        """
        source = path = Path(path)
        try:
            source = manifest_path(path)
            lock = source.open()
            with suppress(OSError):  # where files cannot be locked
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            checkpoint = Checkpoint(path, Manifest.from_json(lock.read()), lock)
        except FileNotFoundError:
            if not path.exists():
                raise CheckpointError(f"{path} does not exist") from None
            raise CheckpointError(
                f"{source} does not exist: {path} is no complete checkpoint of smp.save_checkpoint (saving it was cut "
                "short, or another program wrote it)"
            ) from None
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{source} cannot be read: {error}") from error
        checkpoint.check_sizes()
        return checkpoint

    def file(self, name: str) -> Path:
        """Where a file of the checkpoint lies: under its name, unless replacing the full one before was cut short."""
        path = self.directory / name
        replacement = aside(path, WRITING)
        return replacement if self._in_journal and replacement.exists() else path

    def check_sizes(self) -> None:
        """Raises `CheckpointError` naming the first file that is missing or has another size than when it was saved."""
        for name, file in self.manifest.files.items():
            path = self.file(name)
            try:
                if not path.is_file():
                    what = "is something else" if path.exists() else "is missing"
                    raise CheckpointError(f"{path} {what}: the manifest of the checkpoint names a file")
                size = path.stat().st_size
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            if size != file.size:
                what = "is cut short" if size < file.size else "is another file"
                raise CheckpointError(f"{path} {what}: it has {size} bytes, the manifest says {file.size}")

    # ---- what is in it

    def tensors(self, kind: Kind | None = None) -> tuple[StoredTensor, ...]:
        """Everything stored, of one kind or of all."""
        return tuple(stored for stored in self.manifest.tensors if kind in (None, stored.kind))

    def sources(self, kind: Kind, key: str = "") -> tuple[str, ...]:
        """Names of the user's tensors of which there are values of that kind."""
        return tuple(self._index.get((kind, key), ()))

    def keys(self) -> tuple[str, ...]:
        """The optimizer's kinds of state, as `exp_avg`."""
        return tuple(key for kind, key in self._index if kind == "optimizer")

    def stored(self, kind: Kind, source: str, key: str = "", near: Place | None = None) -> list[StoredTensor]:
        """What holds values of a user's tensor; the parts of the rank at `near` first."""
        found = self._index.get((kind, key), {}).get(source, [])
        return found if near is None else sorted(found, key=lambda stored: not self._is_at(stored, near))

    def _is_at(self, stored: StoredTensor, near: Place) -> bool:
        place = self.manifest.files[stored.file].place
        return place is not None and (place.pp, place.tp) == (near.pp, near.tp)

    # ---- values

    def load(self, name: str) -> Any:
        """The object in a file, its tensors mapped into memory.

        Raises:
            CheckpointError: it cannot be read, or holds a class that is not allowed.
        """
        if name not in self._objects:
            self._objects[name] = load_file(str(self.file(name)), "cpu", mmap=True)
        return self._objects[name]

    def hold(self, name: str, obj: Any) -> None:
        """Takes `obj` for what is in a file that need not be read again."""
        self._objects[name] = obj

    def close(self) -> None:
        """Lets go of the files."""
        self._objects.clear()
        if self._lock is not None:
            self._lock.close()

    def value(self, stored: StoredTensor) -> Any:
        """The tensor (mapped, not to be changed) or plain value that an entry of the manifest speaks of."""
        obj = self.load(stored.file)
        try:
            found = self._within(obj, stored)
        except (KeyError, TypeError, IndexError, ValueError):
            found = None
        if stored.record and not (isinstance(found, Tensor) and tuple(found.shape) == stored.shape):
            raise CheckpointError(
                f"{self.file(stored.file)} does not hold {_describe(stored)}, of which the manifest speaks: it "
                "is a file of another checkpoint"
            )
        return found

    def _within(self, obj: Any, stored: StoredTensor) -> Any:
        """Where an entry's value stands in the object of its file."""
        if stored.kind == "model":
            return obj[stored.name]
        if stored.kind == "master":
            return (obj[MASTERS_KEY] if self.manifest.full else obj["masters"])[stored.name]
        if stored.file not in self._positions:
            self._positions[stored.file] = {
                name: position
                for group, names in zip(obj["param_groups"], obj[NAMES_KEY])
                for position, name in zip(group["params"], names)
            }
        return obj["state"][self._positions[stored.file][stored.name]][stored.key]

    def _blocks(self, kind: Kind, key: str, near: Place | None, source: str) -> list[tuple[Block, StoredTensor]]:
        return [
            (block, stored)
            for stored in self.stored(kind, source, key, near)
            if stored.like
            for block in stored.blocks
            if block.source == source
        ]

    def read(self, kind: Kind, source: str, key: str = "") -> Any:
        """A whole tensor of the user's module, put together; or the value beside it that is not shaped like it.

        Raises:
            CheckpointError: parts of it, or all, are not in the checkpoint.
        """
        found = self.stored(kind, source, key)
        if not found:
            raise CheckpointError(f"{self.path} holds no {_what(kind, key)} of {source}")
        if not found[0].like:
            return self.value(found[0])
        wanted = Origin.whole(source, self.manifest.shapes[source])
        tensor = torch.empty(self.manifest.shapes[source], dtype=getattr(torch, found[0].dtype))
        self.fill(tensor, wanted.blocks, [(kind, key)], source)
        return tensor

    def fill(
        self,
        wanted: Tensor,
        blocks: Iterable[Block],
        kinds: Sequence[tuple[Kind, str]],
        name: str,
        near: Place | None = None,
    ) -> None:
        """Copies into `wanted` its `blocks`, from the first of `kinds` (kind, key) that has all of them.

        `name` is what the error calls it; `near` as in `stored`.

        Raises:
            CheckpointError: none of the kinds has all of it.
        """
        for copy in self.copies(blocks, kinds, name, near):
            traffic.copied += copy.apply(self.value(copy.stored), wanted)

    def copies(
        self, blocks: Iterable[Block], kinds: Sequence[tuple[Kind, str]], name: str, near: Place | None = None
    ) -> list[Copy]:
        """What `fill` would do; raises as it does."""
        wanted = list(blocks)
        missing: list[tuple[str, Box]] = []
        for kind, key in kinds:
            copies, missing = plan_copies(wanted, partial(self._blocks, kind, key, near))
            if not missing:
                return copies
        source, box = missing[0]
        raise CheckpointError(
            f"{self.path} does not hold all of the {_what(*kinds[-1])} of {name}: {source} is missing from "
            f"{list(box.start)} on, {list(box.size)} places"
        )

    # ---- health

    def records(self, kinds: Iterable[Kind] | None = None) -> Iterator[tuple[str, str, int]]:
        """(file, record, bytes) of everything, or of the files that hold values of these kinds and of no other ones."""
        wanted = None if kinds is None else set(kinds)
        held: dict[str, set[str]] = {}
        for stored in self.manifest.tensors:
            held.setdefault(stored.file, set()).add(stored.kind)
        for name, file in self.manifest.files.items():
            if wanted is None or not held.get(name) or held[name] & wanted:
                for record, (size, _) in file.records.items():
                    yield name, record, size

    def damage(self, records: Iterable[tuple[str, str, int]] | None = None) -> list[str]:
        """What is wrong with these records, or with all: a line for each that differs from the manifest."""
        shares = _split(self.records() if records is None else records)
        found: list[list[str]] = [[] for _ in shares]
        threads = [threading.Thread(target=self._look, args=pair, daemon=True) for pair in zip(shares, found)]
        for thread in threads[1:]:
            thread.start()
        threads[0].run()
        for thread in threads[1:]:
            thread.join()
        traffic.verified += sum(size for share in shares for _, _, size in share)
        return [line for lines in found for line in lines]

    def _look(self, records: Sequence[tuple[str, str, int]], found: list[str]) -> None:
        by_file: dict[str, list[str]] = {}
        for name, record, _ in records:
            by_file.setdefault(name, []).append(record)
        for name, names in by_file.items():
            path = self.file(name)
            try:
                wrong = damaged_records(path, self.manifest.files[name].records, names)
            except Exception as error:  # whatever a damaged archive leads to
                wrong = [f"it cannot be read: {error}"]
            found.extend(f"{path} is damaged: {line}" for line in wrong)

    def verify(self) -> None:
        """Raises `CheckpointError` naming files and records whose bytes are not those that were saved."""
        if wrong := self.damage():
            more = f"\nand {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise CheckpointError("\n".join(wrong[:8]) + more)


def _split(records: Iterable[tuple[str, str, int]]) -> list[list[tuple[str, str, int]]]:
    """Into a share of about the same size for each thread."""
    shares: list[list[tuple[str, str, int]]] = [[] for _ in range(_THREADS)]
    sizes = [0] * _THREADS
    for record in sorted(records, key=lambda item: -item[2]):
        least = sizes.index(min(sizes))
        shares[least].append(record)
        sizes[least] += record[2]
    return shares


def _what(kind: Kind, key: str) -> str:
    return {"model": "values", "master": "fp32 master", "optimizer": f"optimizer state {key!r}"}[kind]


def _describe(stored: StoredTensor) -> str:
    return f"{_what(stored.kind, stored.key)} of {stored.name} with shape {list(stored.shape)}"
