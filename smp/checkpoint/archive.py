"""The zip archives that `torch.save` writes, record by record: which tensor is in which, sizes, checksums.

Records are stored uncompressed, so a record's bytes are a range of the file. Nothing here unpickles.
"""

import copy
import io
import mmap
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from smp.errors import CheckpointError

FRAME = ""
_CHUNK = 1 << 22
_LOCAL_HEADER = struct.Struct("<26xHH")  # lengths of the name and of the extra field, before the record's bytes


def records_of(path: Path) -> dict[str, tuple[int, int]]:
    """Bytes and CRC-32 of each record, by its name without the archive's own in front, as the archive tells them.

    One named FRAME is everything around them: headers, padding and the archive's directory.
    """
    try:
        with path.open("rb") as file, _mapped(file) as whole, zipfile.ZipFile(io.BufferedReader(file)) as archive:
            infos = archive.infolist()
            records = {_short(info.filename): (info.file_size, info.CRC) for info in infos}
            return {**records, FRAME: _frame(whole, infos)}
    except (zipfile.BadZipFile, OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


@contextmanager
def _mapped(file: IO[bytes]) -> Iterator[memoryview]:
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole, memoryview(whole) as view:
        yield view


def _frame(whole: memoryview, infos: Iterable[zipfile.ZipInfo]) -> tuple[int, int]:
    """Bytes and CRC-32 of what is around the records."""
    size, checksum, end = 0, 0, 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        begin = _begin(whole, info.header_offset)
        size, checksum = size + begin - end, zlib.crc32(whole[end:begin], checksum)
        end = begin + info.file_size
    return size + len(whole) - end, zlib.crc32(whole[end:], checksum)


def _short(filename: str) -> str:
    return filename.partition("/")[2]


def tensors_in(obj: Any) -> Iterator[Tensor]:
    """The tensors in nested dicts, lists and tuples, in the order in which pickle meets them."""
    if isinstance(obj, Tensor):
        yield obj
    elif isinstance(obj, Mapping):
        for value in obj.values():
            yield from tensors_in(value)
    elif isinstance(obj, list | tuple):
        for value in obj:
            yield from tensors_in(value)


def record_names(obj: Any) -> dict[int, str]:
    """Which record `torch.save` puts each tensor of `obj` into, by the address of the tensor's storage.

    It numbers storages as pickle meets them.
    """
    names: dict[int, str] = {}
    for tensor in tensors_in(obj):
        names.setdefault(storage_address(tensor), f"data/{len(names)}")
    return names


def storage_address(tensor: Tensor) -> int:
    """What tells storages apart."""
    return tensor.untyped_storage()._cdata


def compact(obj: Any) -> Any:
    """`obj` with copies of those tensors whose storages are larger than all that is saved of them.

    torch saves whole storages: a row of a large buffer would bring the buffer along. Returned as it is where nothing is
    copied, else made anew.
    """
    used: dict[int, dict[tuple[int, int], int]] = {}
    for tensor in tensors_in(obj):
        seen = used.setdefault(storage_address(tensor), {})
        seen[int(tensor.storage_offset()), tensor.numel()] = tensor.numel() * tensor.element_size()
    wasteful = {
        storage_address(tensor)
        for tensor in tensors_in(obj)
        if tensor.untyped_storage().nbytes() > sum(used[storage_address(tensor)].values()) + 64
    }
    return map_tensors(obj, lambda t: t.clone() if storage_address(t) in wasteful else t) if wasteful else obj


def map_tensors(obj: Any, change: Callable[[Tensor], Tensor], done: dict[int, Tensor] | None = None) -> Any:
    """`obj` with each tensor changed, one that occurs twice once; the kind of dict and its attributes stay. What else
    is in it is copied, so that nobody changes a set or an array while it is written.
    """
    done = {} if done is None else done
    if isinstance(obj, Tensor):
        if id(obj) not in done:
            done[id(obj)] = change(obj)
        return done[id(obj)]
    if isinstance(obj, dict):
        changed = {key: map_tensors(value, change, done) for key, value in obj.items()}
        if type(obj) is dict:
            return changed
        result = copy.copy(obj)  # keeps the version numbers that torch hangs on state dicts
        dict.update(result, changed)  # a Counter's own adds
        return result
    if type(obj) in (list, tuple):
        return type(obj)(map_tensors(value, change, done) for value in obj)
    return copy.deepcopy(obj)


def damaged_records(path: Path, expected: Mapping[str, tuple[int, int]], names: Iterable[str]) -> list[str]:
    """What is wrong with these records of the file: sizes and checksums against those expected.

    Returns a line for each record that is missing, of another size, or whose bytes have another checksum.
    """
    found: list[str] = []
    with path.open("rb") as file, _mapped(file) as whole:
        try:
            with zipfile.ZipFile(io.BufferedReader(file)) as archive:
                present = {_short(info.filename): info for info in archive.infolist()}
        except zipfile.BadZipFile as error:
            return [f"it is no archive: {error}"]
        for name in names:
            size, checksum = expected[name]
            info = present.get(name)
            if name == FRAME:
                if _frame(whole, present.values()) != expected[FRAME]:
                    found.append("what is around its records is not as it was written")
            elif info is None or info.file_size != size or info.CRC != checksum:
                found.append(f"record {name} is another than the manifest says")
            elif _checksum(whole, info.header_offset, size) != checksum:
                found.append(f"record {name} has another checksum than when it was written")
    return found


def _begin(whole: memoryview, header: int) -> int:
    """Where the bytes of a record begin whose header is there."""
    name, extra = _LOCAL_HEADER.unpack_from(whole, header)
    return int(header + _LOCAL_HEADER.size + name + extra)


def _checksum(view: memoryview, header: int, size: int) -> int | None:
    """CRC-32 of a record whose header begins there; None when the file ends before."""
    begin, checksum = _begin(view, header), 0
    if begin + size > len(view):
        return None
    for start in range(begin, begin + size, _CHUNK):
        checksum = zlib.crc32(view[start : min(start + _CHUNK, begin + size)], checksum)
    return checksum
