"""Writing whole models into one file while no more than one tensor is in memory.

A `Promise` says what a tensor will look like and how to make it. Both formats name every tensor before the first value:

    torch.save's     a zip archive: data.pkl with names and shapes, then a record with the bytes of each tensor
    safetensors      names, shapes and places in JSON, then the bytes one after the other

so tensors can be made, written and dropped one by one. The archive has right checksums and the alignment that mapping
a file into memory needs; plain `torch.load` and the `safetensors` library read the files.
"""

import io
import json
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from smp.checkpoint.files import flush_file
from smp.errors import CheckpointError

_ALIGNMENT = 64
_LOCAL_HEADER = 30  # bytes before the name of a record
_LONG_FORM = 20  # bytes of a field for sizes, where zipfile finds them large
SAFETENSORS_NAMES = {  # of types
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, eq=False)
class Promise:
    """A tensor that is made when it is written: one object for all its names, so that ties survive.

    Attributes:
        shape, dtype: what it will have.
        make: makes it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize

    def write(self, out: IO[bytes]) -> None:
        """Makes it, writes its values in the order of rows, and lets go of it."""
        tensor = self.make().detach().cpu().contiguous()
        assert tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype
        if tensor.numel():
            out.write(tensor.view(-1).view(torch.uint8).numpy().data)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to that takes the place of `path` once it is whole and on disk; nothing is left of it otherwise.

    Raises:
        CheckpointError: the disk refuses.
    """
    aside = path.parent / f".{path.name}.writing"
    try:
        with aside.open("wb") as out:
            yield out
            flush_file(out)
        os.replace(aside, path)
    except BaseException as error:
        with suppress(OSError):
            aside.unlink()
        if isinstance(error, OSError):
            raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
        raise


# torch.save's format


def write_torch(out: IO[bytes], obj: Any) -> None:
    """`obj`, a nest of dicts, lists and plain values with promises or tensors in it, as `torch.save` writes it."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(obj)
    small = {
        "data.pkl": pickled.getvalue(),
        ".format_version": b"1",
        ".storage_alignment": str(_ALIGNMENT).encode(),
        "byteorder": sys.byteorder.encode(),
    }
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, content in small.items():
            with _record(archive, out, name, len(content)) as record:
                record.write(content)
        for storage in pickler.storages.values():
            with _record(archive, out, f"data/{storage.key}", storage.promise.nbytes) as record:
                storage.promise.write(record)
        with _record(archive, out, "version", 2) as record:
            record.write(b"3\n")


def _record(archive: zipfile.ZipFile, out: IO[bytes], name: str, size: int) -> IO[bytes]:
    """One record, to write to. Its bytes begin at a multiple of the alignment, by an extra field as torch has it."""
    info = zipfile.ZipInfo(f"archive/{name}")
    info.file_size = size
    large = size > zipfile.ZIP64_LIMIT // 2
    begin = out.tell() + _LOCAL_HEADER + len(info.filename) + (_LONG_FORM if large else 0) + 4
    padding = -begin % _ALIGNMENT
    info.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return archive.open(info, "w", force_zip64=large)


@dataclass(frozen=True, eq=False)
class _Storage:
    """What stands for the memory of a promise in the pickle."""

    promise: Promise
    type: Any
    key: str
    numel: int


class _Pickler(pickle.Pickler):
    """Pickles promises as torch does tensors.

    Attributes:
        storages: what has to follow in the file, by id of the promise or tensor.
    """

    def __init__(self, out: IO[bytes]) -> None:
        super().__init__(out, protocol=2)
        self.storages: dict[int, _Storage] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Promises, and tensors beside them, are rebuilt from a storage of their own."""
        if isinstance(obj, Tensor):
            kept = obj.detach()
            return self._rebuilt(obj, Promise(tuple(kept.shape), kept.dtype, lambda: kept))
        return self._rebuilt(obj, obj) if isinstance(obj, Promise) else NotImplemented

    def _rebuilt(self, obj: Any, promise: Promise) -> Any:
        rebuild, (like, _, _, _, *rest) = torch.empty(0, dtype=promise.dtype).__reduce_ex__(2)
        typed = isinstance(like, torch.storage.TypedStorage)
        kind = getattr(torch, like._pickle_storage_type()) if typed else torch.UntypedStorage
        numel = prod(promise.shape) if typed else promise.nbytes
        storage = self.storages.setdefault(id(obj), _Storage(promise, kind, str(len(self.storages)), numel))
        return rebuild, (storage, 0, promise.shape, _strides(promise.shape), *rest)

    def persistent_id(self, obj: Any) -> Any:
        """Storages stand beside the pickle."""
        return ("storage", obj.type, obj.key, "cpu", obj.numel) if isinstance(obj, _Storage) else None


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return tuple(strides)


# safetensors


def write_safetensors(out: IO[bytes], promises: Mapping[str, Promise]) -> None:
    """Tensors by name.

    Raises:
        CheckpointError: the format has no name for a dtype.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, promise in promises.items():
        if promise.dtype not in SAFETENSORS_NAMES:
            raise CheckpointError(f"{name} has dtype {promise.dtype}, which safetensors files cannot hold")
        begin, end = end, end + promise.nbytes
        header[name] = {
            "dtype": SAFETENSORS_NAMES[promise.dtype],
            "shape": list(promise.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
    for promise in promises.values():
        promise.write(out)
