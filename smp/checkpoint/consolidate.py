"""One full file of weights out of a checkpoint, for plain torch or as safetensors in the layout of Hugging Face.

    a file .pt, .pth or .bin     what torch.load reads: a dict of tensors under all names of the user's module
    a file .safetensors          the same, but each tied tensor under its first name only
    a directory                  model.safetensors, or several files of limited size with model.safetensors.index.json

Needs no job; one tensor is in memory at a time. fp32 masters are preferred to the half precision weights.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smp.checkpoint.manifest import Kind
from smp.checkpoint.reader import Checkpoint
from smp.checkpoint.streamed import Promise, replacing, write_safetensors, write_torch
from smp.errors import CheckpointError
from smp.tp.origin import Origin

TORCH_ENDINGS = (".pt", ".pth", ".bin")
SAFETENSORS = ".safetensors"
SHARD_BYTES = 5 * 10**9
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Written:
    """What `consolidate` has done: files, and how many tensors and bytes are in them.

    `left_out`: names of plain values (`get_extra_state`) that safetensors cannot hold.
    """

    files: tuple[Path, ...]
    tensors: int
    nbytes: int
    left_out: tuple[str, ...] = ()


def weights(checkpoint: Checkpoint, dtype: torch.dtype | None = None, masters: bool = True) -> dict[str, Promise]:
    """The model's tensors under their canonical names, to be read when they are wanted.

    Args:
        dtype: of floating point ones; None: as they are stored.
        masters: whether fp32 masters are taken where there are any.
    """
    preferred = set(checkpoint.sources("master")) if masters else set()
    promises: dict[str, Promise] = {}
    for source in checkpoint.sources("model"):
        if not checkpoint.stored("model", source)[0].record:
            continue
        kind: Kind = "master" if source in preferred else "model"
        stored = getattr(torch, checkpoint.stored(kind, source)[0].dtype)
        wanted = dtype if dtype is not None and stored.is_floating_point else stored
        shape = checkpoint.manifest.shapes[source]
        promises[source] = Promise(shape, wanted, partial(_read, checkpoint, kind, source, shape, wanted))
    return promises


def _read(checkpoint: Checkpoint, kind: Kind, source: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    checkpoint.fill(tensor, Origin.whole(source, shape).blocks, [(kind, "")], source)
    return tensor


def consolidate(
    checkpoint: Checkpoint,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    masters: bool = True,
    shard_bytes: int = SHARD_BYTES,
    directory: bool = False,
) -> Written:
    """Writes all weights of a checkpoint into one file, or one directory.

    Args:
        checkpoint: opened.
        out: see the top of this file; a name without an ending is a directory.
        dtype, masters: see `weights`.
        shard_bytes: largest size of a file in a directory; a larger tensor gets a file of its own.
        directory: whether `out` is a directory also if its name has some other ending.

    Raises:
        CheckpointError: the name of `out` has an ending that says nothing, or the disk refuses.
    """
    promises = weights(checkpoint, dtype, masters)
    beside = _plain_values(checkpoint)
    total = sum(promise.nbytes for promise in promises.values())
    out.parent.mkdir(parents=True, exist_ok=True)
    if directory or out.is_dir() or not out.suffix:
        files = _write_directory(out, promises, shard_bytes)
        return Written(tuple(files), len(promises), total, tuple(beside))
    if out.suffix == SAFETENSORS:
        with replacing(out) as file:
            write_safetensors(file, promises)
        return Written((out,), len(promises), total, tuple(beside))
    if out.suffix not in TORCH_ENDINGS:
        endings = ", ".join((*TORCH_ENDINGS, SAFETENSORS))
        raise CheckpointError(f"{out}: its ending does not say what to write; known are {endings}, or a directory")
    named: dict[str, Any] = {**promises, **beside}
    for names in checkpoint.manifest.tied:
        known = next((named[name] for name in names if name in named), None)
        if known is not None:
            named.update(dict.fromkeys(names, known))
    with replacing(out) as file:
        write_torch(file, named)
    return Written((out,), len(promises), total)


def _plain_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `get_extra_state` of modules has put beside the tensors."""
    return {stored.name: checkpoint.value(stored) for stored in checkpoint.tensors("model") if not stored.record}


def _write_directory(out: Path, promises: Mapping[str, Promise], shard_bytes: int) -> list[Path]:
    out.mkdir(exist_ok=True)
    shards = _shards(promises, shard_bytes)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else ["model.safetensors"]
    for name, shard in zip(names, shards):
        with replacing(out / name) as file:
            write_safetensors(file, shard)
    if len(shards) == 1:
        return [out / names[0]]
    index = {
        "metadata": {"total_size": sum(promise.nbytes for promise in promises.values())},
        "weight_map": {tensor: name for name, shard in zip(names, shards) for tensor in shard},
    }
    with replacing(out / _INDEX) as file:
        file.write(json.dumps(index, indent=2).encode() + b"\n")
    return [out / name for name in (*names, _INDEX)]


def _shards(promises: Mapping[str, Promise], shard_bytes: int) -> list[dict[str, Promise]]:
    """In order; a new one where the next tensor would make one too large."""
    shards: list[dict[str, Promise]] = [{}]
    size = 0
    for name, promise in promises.items():
        if shards[-1] and size + promise.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = promise
        size += promise.nbytes
    return shards
