"""One tensor file on disk: written aside, flushed and renamed; read with its checksums verified.

The file is what `torch.save` writes, with the header as one more record of its zip archive, so `torch.load` reads it
by hand as any other. torch does not compare the checksums of an archive while loading; a second thread does.
"""

import os
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch

from smp.checkpoint.layout import Header
from smp.checkpoint.safe_load import load_file
from smp.errors import CheckpointError

_HEADER_RECORD = "smp_header.json"
_CHUNK = 1 << 22


class FileWriter:
    """Replaces the file at `path` in two steps: `write` puts the new one beside it, `commit` renames.

    Until `commit` the file that was there stays as it was. `rank` keeps ranks apart that write the same path; the name
    does not change from run to run, so what a crash left behind is overwritten by the next save.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        # Not named `path` + something: scripts look for partial files with the pattern `path_*`.
        self._aside = path.parent / f".{path.name}.writing-{rank}"

    def write(
        self, obj: Any, header: Header | None = None, pickle_module: Any = None, pickle_protocol: int = 2
    ) -> None:
        """Write and flush `obj`. When the disk refuses, `CheckpointError` names the file, and nothing is left."""
        options: dict[str, Any] = {} if pickle_module is None else {"pickle_module": pickle_module}
        try:
            with writing(self.path), self._aside.open("wb+") as out:
                torch.save(obj, out, pickle_protocol=pickle_protocol, **options)
                if header is not None:
                    _append_header(out, header)
                flush_file(out)
        except BaseException:
            self.discard()
            raise

    def commit(self) -> None:
        with writing(self.path):
            os.replace(self._aside, self.path)
            flush_directory(self.path.parent)

    def discard(self) -> None:
        """Remove what `write` left, when it shall not be committed."""
        with suppress(OSError):
            self._aside.unlink()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Says which file it is when the disk refuses, by `CheckpointError`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error


def _append_header(out: IO[bytes], header: Header) -> None:
    with zipfile.ZipFile(out, "a") as archive:
        # torch wants all records in the directory of the first one
        archive.writestr(f"{archive.namelist()[0].split('/')[0]}/{_HEADER_RECORD}", header.to_json())


def flush_file(out: IO[Any]) -> None:
    """Returns when what was written to an open file is on the disk."""
    out.flush()
    os.fsync(out.fileno())


def flush_directory(directory: Path) -> None:
    """Returns when the names in a directory, new, changed and removed ones, are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def leave_cache(path: Path) -> None:
    """Frees the memory in which the system keeps what was read from or written to a file, if there is such a file.

    Before it is replaced: new bytes in memory just freed are written up to twice as fast as in memory long unused.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError), path.open("rb") as found:
        os.posix_fadvise(found.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_header(path: Path) -> Header | None:
    """The header of a partial file; None when the file has none (another program wrote it) or is no zip archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = [name for name in archive.namelist() if name.endswith(f"/{_HEADER_RECORD}")]
            return Header.from_json(archive.read(records[0]).decode()) if records else None
    except zipfile.BadZipFile:
        return None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_file(path: Path, map_location: Any = None, **options: Any) -> Any:
    """The object in the file at `path`, every record's checksum verified. `options` as in `load_file`.

    Raises `CheckpointError` naming the file when it is missing, truncated, altered, or holds classes not allowed.
    """
    check = _ChecksumThread(path)
    check.start()
    try:
        return load_file(path, map_location, **options)
    finally:
        check.join()
        check.raise_if_bad()


class _ChecksumThread(threading.Thread):
    """Compares the checksum of every record of a zip archive while another thread loads it."""

    def __init__(self, path: Path) -> None:
        super().__init__(name="smp-checksum", daemon=True)
        self._path, self._bad = path, ""

    def run(self) -> None:
        try:
            archive = zipfile.ZipFile(self._path)
        except (zipfile.BadZipFile, OSError):
            return  # no archive, or cut off: loading it says so
        with archive:
            for record in archive.infolist():
                try:
                    with archive.open(record) as stream:
                        while stream.read(_CHUNK):  # computes the checksum, and compares it at the end
                            pass
                except (zipfile.BadZipFile, EOFError, OSError) as error:
                    self._bad = f"record {record.filename}: {error}"
                    return

    def raise_if_bad(self) -> None:
        if self._bad:
            raise CheckpointError(f"{self._path} is damaged: {self._bad}")
