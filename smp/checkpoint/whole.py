"""Files of whole tensors seen as checkpoints: those of `smp.save_checkpoint(partial=False)`, and any other state dict.

A file without a manifest gets one here: its tensors are the user's, under their canonical names or under those of smp's
modules. Files are mapped into memory, so only what a rank copies out of them is read.
"""

import json
import math
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smp.checkpoint.archive import record_names, records_of, storage_address
from smp.checkpoint.layout import Degrees
from smp.checkpoint.manifest import Manifest, StoredFile, StoredTensor
from smp.checkpoint.reader import Checkpoint, manifest_path
from smp.checkpoint.safe_load import load_file
from smp.checkpoint.streamed import SAFETENSORS_NAMES
from smp.dp.optimizer_state import PARTIAL_KEY
from smp.errors import CheckpointError
from smp.state_mod import state as smp_state
from smp.tp.origin import Origin, is_extra, origins, tied_names

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


def open_whole(path: Path, module: nn.Module) -> Checkpoint:
    """The checkpoint in the file at `path`, with its manifest, or with one made for it.

    Args:
        path: a file of `torch.save` or of safetensors.
        module: the model that its tensors are for: says what names mean.

    Raises:
        CheckpointError: it is no file of whole tensors, cannot be read, or a tensor has another shape than the model's.
    """
    if os.path.lexists(manifest_path(path)):
        return Checkpoint.open(path)
    records: dict[str, tuple[int, int]] = {}
    if path.suffix == ".safetensors":
        values: Any = read_safetensors(path)
    elif zipfile.is_zipfile(path):
        values, records = load_file(str(path), "cpu", mmap=True), records_of(path)
    else:
        values = load_file(str(path), "cpu")  # made by a torch of long ago, or no tensor file
    if not isinstance(values, Mapping) or not any(isinstance(value, Tensor) for value in values.values()):
        raise CheckpointError(f"{path} holds no state dict, a dict from names to tensors")
    if values.get(PARTIAL_KEY):
        raise CheckpointError(f"{path} is the part of one rank, not a whole state dict: resume with partial=True")
    names = Names(module, ours_first=PARTIAL_KEY in values)
    stored = tuple(names.describe(path.name, values))
    status = path.stat()
    manifest = Manifest(
        full=True,
        tag=path.name,
        save_id="",
        written=status.st_mtime,
        degrees=Degrees(1, 1, 1),
        shapes={source: shape for one in stored for source, shape in names.shapes_of(one).items()},
        files={path.name: StoredFile(status.st_size, None, records)},
        tensors=stored,
    )
    checkpoint = Checkpoint(path, manifest)
    checkpoint.hold(path.name, values)
    return checkpoint


class Names:
    """What the names in a file of whole tensors mean in the user's module.

    Args:
        module: the model. Before it is partitioned it has no names of smp's modules yet.
        ours_first: whether a name that could be either is that of smp's module.
    """

    def __init__(self, module: nn.Module, ours_first: bool = False) -> None:
        self._ours = origins(module, whole=True)
        self._theirs = {source for origin in self._ours.values() for source in origin.shapes}
        self._first = {name: names[0] for names in tied_names(module) for name in names}
        self._ours_first = ours_first

    def origin(self, name: str, shape: tuple[int, ...]) -> Origin:
        """Of a whole tensor; a name that nobody knows is its own.

        Raises:
            CheckpointError: smp's module has another shape.
        """
        theirs, ours = self._first.get(name, name), self._ours.get(name)
        as_it_is = ours is not None and ours == Origin.whole(theirs, self.shape(name))
        if ours is not None and not as_it_is and (self._ours_first or theirs not in self._theirs):
            if self.shape(name) != shape:
                raise CheckpointError(f"{name} has shape {list(shape)}, the model has {list(self.shape(name))}")
            return ours
        return Origin.whole(theirs, shape)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole tensor of the model."""
        ends = ([at + size for at, size in zip(block.at, block.local_size)] for block in self._ours[name].blocks)
        return tuple(map(max, zip(*ends)))

    def describe(self, file: str, values: Mapping[str, Any]) -> Iterator[StoredTensor]:
        """What a manifest says of a state dict in a file; a tensor with several names is described once."""
        records, seen = record_names(values), set()
        for name, value in values.items():
            if name == PARTIAL_KEY:
                continue
            if is_extra(name, value):
                yield StoredTensor("model", name, "", "object", (), file, "", Origin.whole(name, ()).blocks, False)
                continue
            shape = tuple(value.shape)
            origin = self.origin(name, shape)
            if origin.blocks in seen or not (name in self._first or self._is_known(name)):
                continue
            seen.add(origin.blocks)
            dtype = str(value.dtype).removeprefix("torch.")
            record = records[storage_address(value)]
            yield StoredTensor("model", name, "", dtype, shape, file, record, origin.blocks)

    def _is_known(self, name: str) -> bool:
        """False for what the model's family drops, as masks that are computed anew."""
        if name in self._ours or name in self._theirs:
            return True
        return all(_translates(to_ours, name) for _, to_ours in smp_state.module_manager.translate_functions)

    def shapes_of(self, stored: StoredTensor) -> Mapping[str, tuple[int, ...]]:
        """Whole shapes of the user's tensors in a stored one."""
        if not stored.record:
            return {}
        return self.origin(stored.name, stored.shape).shapes


def _translates(to_ours: Any, name: str) -> bool:
    try:
        return bool(to_ours({name: torch.empty(0, device="meta")}))
    except CheckpointError:  # it is one of several that become one
        return True


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors in a file of safetensors, mapped into memory.

    Raises:
        CheckpointError: it is no such file, or cut short.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise ValueError("the file is cut short")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        return {name: _mapped(whole[8 + length :], entry) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {type(error).__name__} {error}") from error


def _mapped(data: Tensor, entry: Mapping[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    if end > len(data) or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError("the file is cut short")
    values = data[begin:end]
    aligned = values.storage_offset() % dtype.itemsize == 0
    return (values if aligned else values.clone()).view(dtype).view(shape)
