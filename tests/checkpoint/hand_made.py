"""Checkpoints written step by step in one process, without a job."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smp.checkpoint import writer
from smp.checkpoint.archive import records_of
from smp.checkpoint.content import describe, merge, stored_groups
from smp.checkpoint.layout import Degrees, Place
from smp.checkpoint.manifest import Manifest, StoredFile
from smp.tp.origin import Block, Origin

WHOLE = torch.arange(32.0).reshape(8, 4)  # what the source "w" holds; a checkpoint holds a multiple of it


def parts(value: float) -> dict[str, dict[str, Any]]:
    """Two tensor-parallel parts of "w", with the state of an optimizer."""
    files: dict[str, dict[str, Any]] = {}
    for tp, part in enumerate((value * WHOLE).chunk(2)):
        files[f"model_0_{tp}.pt"] = {"layer.w": part.clone(), "_smp_is_partial": True}
        files[f"optimizer_0_{tp}.pt"] = {
            "state": {0: {"exp_avg": -part, "step": torch.tensor(value), "count": int(value)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
            "_smp_param_names": [["layer.w"]],
        }
    return files


def manifest_of(tag: str, objects: dict[str, dict[str, Any]]) -> Manifest:
    """What the ranks would say together."""
    said = []
    for tp in (0, 1):
        known = {"layer.w": Origin((Block("w", (4 * tp, 0), (4, 4), (0, 0)),), {"w": (8, 4)})}
        tensors = [
            *describe("model", f"model_0_{tp}.pt", objects[f"model_0_{tp}.pt"], known, {"layer.w": (4, 4)}),
            *describe("optimizer", f"optimizer_0_{tp}.pt", objects[f"optimizer_0_{tp}.pt"], known, {"layer.w": (4, 4)}),
        ]
        groups = stored_groups(objects[f"optimizer_0_{tp}.pt"], known)
        shapes = {"w": (8, 4)}
        degrees = Degrees(1, 2, 1)
        said.append(
            Manifest(False, tag, tag, time.time(), degrees, groups=groups, shapes=shapes, tensors=tuple(tensors))
        )
    return merge(said, {})


def save(path: Path, tag: str, value: float, num_kept: int | None = None) -> None:
    """A partial checkpoint: all that a save does on disk."""
    target, objects = path / f"{tag}_partial", parts(value)
    writer.prepare(target)
    places: dict[str, Place | None] = {name: Place(0, int(name[-4]), 0) for name in objects}
    files = writer.write_files(writer.aside(target, writer.WRITING), objects, places)
    writer.commit(target, merge([manifest_of(tag, objects)], files))
    writer.remove_old(target, num_kept)


def save_full(path: Path, tag: str, value: float, optimizer: bool = True) -> None:
    """A full checkpoint."""
    objects: dict[str, Any] = {tag: {"w": value * WHOLE}}
    if optimizer:
        objects[f"optimizer_{tag}"] = {"state": {}, "param_groups": [], "value": value}
    writer.prepare_full(path, tag)
    files = {}
    for name, obj in objects.items():
        place = writer.aside(path / name, writer.WRITING)
        writer.on_step(f"write {name}")
        torch.save(obj, place)
        files[name] = StoredFile(place.stat().st_size, None, records_of(place))
    known = {"w": Origin.whole("w", (8, 4))}
    tensors = tuple(describe("model", tag, objects[tag], known, {"w": (8, 4)}))
    shapes = {"w": (8, 4)}
    writer.commit_full(
        path, Manifest(True, tag, tag, time.time(), Degrees(1, 1, 1), shapes=shapes, files=files, tensors=tensors)
    )


def factor(whole: Tensor) -> float:
    """Which multiple of WHOLE a tensor is."""
    value = float(whole[0, 1])
    assert torch.equal(whole, value * WHOLE)
    return value
