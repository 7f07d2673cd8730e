"""What a rank puts into a partial checkpoint: objects by file name, and what the manifest says about them.

model_{pp}_{tp}.pt              model.local_state_dict()                              rdp_rank 0
optimizer_{pp}_{tp}[_{rdp}].pt  optimizer.local_state_dict(gather_if_shard=False)     rdp_rank 0, all when sharded
fp16_states_{pp}_{tp}[_{rdp}].pt  {"masters": {name: fp32 tensor}, "scaler": {...}}   as the optimizer's
random_{pp}_{tp}_{rdp}.pt       where the random generators stand                     all
user_content.pt                 the script's own                                      rank 0
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smp.checkpoint.archive import compact, map_tensors, record_names, storage_address
from smp.checkpoint.layout import Place, part_name
from smp.checkpoint.manifest import Kind, Manifest, StoredFile, StoredGroup, StoredTensor
from smp.checkpoint.partial import degrees_of, place_of
from smp.checkpoint.random_state import random_state
from smp.checkpoint.writer import Serialized
from smp.dp.optimizer_state import NAMES_KEY, PARTIAL_KEY
from smp.errors import UsageError
from smp.fp16.optimizer import MASTERS_KEY, SCALER_KEY
from smp.runtime import Runtime
from smp.tp.origin import Origin, is_extra, origins, source_shapes, tied_names

USER_CONTENT = "user_content.pt"


@dataclass(frozen=True)
class Content:
    """What one rank writes.

    Attributes:
        objects: by file name.
        places: whose part a file is; None: the same for all.
        manifest: what is to be said about them; sizes and checksums are not known yet.
    """

    objects: Mapping[str, Any]
    places: Mapping[str, Place | None]
    manifest: Manifest


def collect(
    rt: Runtime,
    tag: str,
    save_id: str,
    model: Any,
    optimizer: Any,
    user_content: Serialized | None,
    to_host: Callable[[Tensor], Tensor],
) -> Content:
    """This rank's part of a partial checkpoint, its tensors put into host memory by `to_host`. Not collective.

    `user_content` is rank 0's; None on the others.

    Raises:
        UsageError: the model is not partitioned yet, or a tensor is sparse.
    """
    place, sharded = place_of(rt), bool(rt.config.shard_optimizer_state)
    module = None if rt.model is None else rt.model.module
    known = {} if module is None else origins(module)
    shapes = {} if module is None else {name: tuple(p.shape) for name, p in module.named_parameters()}
    objects: dict[str, Any] = {}
    places: dict[str, Place | None] = {}
    kinds: dict[str, Kind] = {}
    groups: tuple[StoredGroup, ...] | None = None
    half = None
    if model is not None and place.rdp == 0:
        name = part_name("model", place)
        objects[name], kinds[name] = model.local_state_dict(cast_to_cpu=False), "model"
    if optimizer is not None and (place.rdp == 0 or sharded):
        state = optimizer.local_state_dict(gather_if_shard=False)
        masters, scaler = state.pop(MASTERS_KEY, None), state.pop(SCALER_KEY, None)
        name, half_name = (part_name(kind, place, sharded) for kind in ("optimizer", "fp16_states"))
        objects[name], kinds[name] = state, "optimizer"
        groups = stored_groups(state, known)
        if masters is not None or scaler is not None:
            half = "float16" if rt.config.fp16 else "bfloat16"
            objects[half_name], kinds[half_name] = {"masters": masters or {}, "scaler": scaler}, "master"
    for name, kind in kinds.items():
        refuse_sparse(kind, objects[name])
    places.update(dict.fromkeys(objects, place))
    random_name = part_name("random", place, each_replica=True)
    objects[random_name], places[random_name] = random_state(), place
    if user_content is not None:
        objects[USER_CONTENT], places[USER_CONTENT] = user_content, None
    objects = {name: map_tensors(compact(obj), to_host) for name, obj in objects.items()}
    tensors = tuple(
        stored for name, kind in kinds.items() for stored in describe(kind, name, objects[name], known, shapes)
    )
    held = {stored.name for stored in tensors}  # a buffer of another stage may have grown there
    manifest = Manifest(
        full=False,
        tag=tag,
        save_id=save_id,
        written=time.time(),
        degrees=degrees_of(rt),
        sharded=sharded,
        half=half,
        partition=_partition(model),
        shapes=source_shapes(origin for name, origin in known.items() if name in held),
        groups=groups,
        tied=() if module is None else tied_names(module),
        tensors=tensors,
    )
    return Content(objects, places, manifest)


def _partition(model: Any) -> dict[str, int]:
    """Stage of each module that is on one."""
    stages = getattr(getattr(model, "engine", None), "stages", None)
    return {name: stage for name, stage in stages.assignment.items() if stage is not None} if stages else {}


def stored_groups(state: Mapping[str, Any], known: Mapping[str, Origin]) -> tuple[StoredGroup, ...]:
    """An optimizer's groups, its parameters by their names in the user's module."""
    groups = []
    for group, names in zip(state["param_groups"], state[NAMES_KEY]):
        sources = dict.fromkeys(source for name in names for source in sources_of(name, known))
        options = {key: repr(value) for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(StoredGroup(tuple(sources), options))
    return tuple(groups)


def sources_of(name: str, known: Mapping[str, Origin]) -> tuple[str, ...]:
    """The user's tensors that a parameter is of; one that is not the model's has its own name."""
    origin = known.get(name)
    return tuple(dict.fromkeys(block.source for block in origin.blocks)) if origin is not None else (name,)


def describe(
    kind: Kind, file: str, obj: Mapping[str, Any], known: Mapping[str, Origin], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[StoredTensor]:
    """What the manifest says about the object in a file of that kind.

    `known`: origins by local name; `shapes`: of this rank's parameters, by local name.
    """
    records = record_names(obj)
    for name, key, value in _VALUES[kind](obj):
        is_tensor = not is_extra(name, value)
        shape = tuple(value.shape) if is_tensor else ()
        origin = known.get(name) or Origin.whole(name, shapes.get(name, shape))
        like = is_tensor and (kind != "optimizer" or shape == shapes.get(name))
        dtype = str(value.dtype).removeprefix("torch.") if is_tensor else "object"
        record = records[storage_address(value)] if is_tensor else ""
        yield StoredTensor(kind, name, key, dtype, shape, file, record, origin.blocks, like)


def refuse_sparse(kind: Kind, obj: Mapping[str, Any]) -> None:
    """Raises UsageError naming a tensor in such an object that has no place for each value, as boxes of it need."""
    for name, key, value in _VALUES[kind](obj):
        if isinstance(value, Tensor) and not is_extra(name, value) and value.layout != torch.strided:
            what = f"optimizer state {key!r} of {name}" if key else name
            advice = "choose an optimizer whose state is dense" if key else "keep it dense, or out of the state dict"
            raise UsageError(f"{what} is sparse ({value.layout}); checkpoints hold dense tensors only: {advice}")


def _model_values(obj: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    return ((name, "", value) for name, value in obj.items() if name != PARTIAL_KEY)


def _master_values(obj: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    return ((name, "", value) for name, value in obj.get("masters", obj.get(MASTERS_KEY, {})).items())


def _optimizer_values(obj: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for group, names in zip(obj["param_groups"], obj[NAMES_KEY]):
        for position, name in zip(group["params"], names):
            yield from ((name, key, value) for key, value in obj["state"].get(position, {}).items())


_VALUES: dict[Kind, Callable[[Mapping[str, Any]], Iterator[tuple[str, str, Any]]]] = {
    "model": _model_values,
    "master": _master_values,
    "optimizer": _optimizer_values,
}


def merge(manifests: Sequence[Manifest], files: Mapping[str, StoredFile]) -> Manifest:
    """One manifest from those of all ranks' parts, by rank."""
    first = manifests[0]
    shapes = {source: shape for part in manifests for source, shape in part.shapes.items()}
    return replace(
        first,
        half=next((part.half for part in manifests if part.half is not None), None),
        shapes=shapes,
        groups=_merge_groups([part.groups for part in manifests if part.groups is not None]),
        files=files,
        tensors=tuple(stored for part in manifests for stored in part.tensors),
    )


def _merge_groups(parts: Sequence[tuple[StoredGroup, ...]]) -> tuple[StoredGroup, ...] | None:
    if not parts:
        return None
    merged = []
    for number in range(max(map(len, parts))):
        groups = [groups[number] for groups in parts if number < len(groups)]
        merged.append(StoredGroup(tuple(dict.fromkeys(n for group in groups for n in group.names)), groups[0].options))
    return tuple(merged)
