"""Checkpoints as jobs of any degrees would write them, made in one process.

The model is tiny: a table that the head shares, two layers whose matrices lie in smp's modules otherwise than in the
user's (one turned, one fused of two), a norm, and a counter. Values are those of the user's module, the same for all
degrees.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smp.checkpoint import manifest as manifests
from smp.checkpoint.archive import record_names, storage_address
from smp.checkpoint.layout import Degrees, Place
from smp.checkpoint.manifest import Manifest, StoredFile, StoredGroup, StoredTensor
from smp.checkpoint.writer import file_entry
from smp.dp.optimizer_state import NAMES_KEY
from smp.tp.layouts import FUSED_KV, TRANSPOSED, Layout
from smp.tp.origin import Origin
from smp.tp.shard import ShardSpec

TIED = ("table.weight", "head.weight")


def user_state(seed: int = 0) -> dict[str, Tensor]:
    """The state dict of the user's module."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(6, 4, generator=generator)
    return {
        "table.weight": table,
        "layers.0.turned": torch.randn(4, 8, generator=generator),
        "layers.1.k.weight": torch.randn(4, 4, generator=generator),
        "layers.1.v.weight": torch.randn(4, 4, generator=generator),
        "norm.bias": torch.randn(4, generator=generator),
        "norm.count": torch.tensor(7),
        "head.weight": table,
    }


def _whole(names: tuple[str, ...], layout: Layout | None, state: Mapping[str, Tensor]) -> tuple[Tensor, Origin]:
    tensors = [state[name] for name in names]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if layout is None:
        return tensors[0], Origin.whole(names[0], shapes[0])
    origin = Origin(tuple(layout.blocks(names, shapes, None)), dict(zip(names, shapes)))
    return layout.merge(tensors, None), origin


# name in the model, stage, dimension that is cut, sources and layout
MODEL: list[tuple[str, int, int | None, tuple[str, ...], Layout | None]] = [
    ("table.weight", 0, 0, ("table.weight",), None),
    ("layers.0.dense.weight", 0, 1, ("layers.0.turned",), TRANSPOSED),
    ("layers.1.key_value.weight", 1, 0, ("layers.1.k.weight", "layers.1.v.weight"), FUSED_KV),
    ("norm.bias", 1, None, ("norm.bias",), None),
    ("norm.count", 1, None, ("norm.count",), None),
]


def save(
    path: Path,
    tag: str = "300",
    *,
    tp: int = 2,
    pp: int = 2,
    half: bool = False,
    state: Mapping[str, Tensor] | None = None,
    change: Callable[[str, str, Tensor], Tensor] = lambda kind, name, tensor: tensor,
    extra: Mapping[str, Any] | None = None,
    written: float = 1.7e9,
    newest: bool = True,
) -> Path:
    """Writes a partial checkpoint and returns its directory.

    Args:
        half: bfloat16 weights with fp32 masters.
        state: as `user_state`.
        change: (kind or state key, name, whole tensor of smp's module) -> what is stored instead.
        extra: plain values of the model's first stage.
    """
    state = user_state() if state is None else state
    directory = path / f"{tag}_partial"
    directory.mkdir(parents=True)
    stored: list[StoredTensor] = []
    files: dict[str, StoredFile] = {}

    def keep(kind: str, place: Place, obj: Any, entries: list[tuple[str, str, Tensor, Origin, bool]]) -> None:
        file = f"{kind if kind != 'master' else 'fp16_states'}_{place.pp}_{place.tp}.pt"
        records = record_names(obj)
        torch.save(obj, directory / file)
        files[file] = file_entry(directory / file, place)
        what: Any = kind
        if kind == "model":
            stored.extend(
                StoredTensor("model", name, "", "object", (), file, "", Origin.whole(name, ()).blocks, False)
                for name in (extra or {})
                if place == Place(0, 0, 0)
            )
        stored.extend(
            StoredTensor(
                *(what, name, key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), file),
                *(records[storage_address(tensor)], origin.blocks, like),
            )
            for name, key, tensor, origin, like in entries
        )

    for stage in range(pp):
        for part in range(tp):
            place = Place(stage, part, 0)
            mine = {
                name: _part(part, tp, dim, *_whole(sources, layout, state), name, change)
                for name, where, dim, sources, layout in MODEL
                if where % pp == stage
            }
            _keep_rank(keep, place, mine, half, extra if stage == 0 else None)
    torch.save({"epoch": 3}, directory / "user_content.pt")
    files["user_content.pt"] = file_entry(directory / "user_content.pt", None)
    manifest = Manifest(
        full=False,
        tag=tag,
        save_id="ab",
        written=written,
        degrees=Degrees(pp, tp, 1),
        half="bfloat16" if half else None,
        partition={"": 0, "table": 0, "layers.0": 0, "layers.1": 1 % pp, "norm": 1 % pp},
        shapes={name: tuple(value.shape) for name, value in state.items() if name != TIED[1]},
        groups=(StoredGroup(tuple(state), {"lr": "0.1"}),),
        tied=(TIED,),
        files=files,
        tensors=tuple(stored),
    )
    (directory / manifests.NAME).write_text(manifest.to_json())
    if newest:
        (path / "newest").write_text(tag)
    return directory


Parts = Mapping[str, tuple[Callable[[str], Tensor], Origin]]


def _part(
    part: int,
    tp: int,
    dim: int | None,
    whole: Tensor,
    origin: Origin,
    name: str,
    change: Callable[[str, str, Tensor], Tensor],
) -> tuple[Callable[[str], Tensor], Origin]:
    if dim is None or tp == 1:
        return lambda kind: change(kind, name, whole.clone().contiguous()), origin
    sections = (len(whole) // 2,) * 2 if "key_value" in name else ()
    spec = ShardSpec(tuple(whole.shape), dim, part, tp, sections, padded=not sections)
    return lambda kind: spec.split(change(kind, name, whole.clone())), origin.part(spec)


def _keep_rank(
    keep: Callable[..., None], place: Place, mine: Parts, half: bool, extra: Mapping[str, Any] | None
) -> None:
    """The files of one rank."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.bfloat16() if half and tensor.is_floating_point() else tensor

    model = {name: cast(make("model")) for name, (make, _) in mine.items()}
    listed = [(name, "", model[name], origin, True) for name, (_, origin) in mine.items()]
    keep("model", place, {**model, **(extra or {}), "_smp_is_partial": True}, listed)
    trained = {name: entry for name, entry in mine.items() if name != "norm.count"}
    if half:
        masters = {name: make("master") for name, (make, _) in trained.items()}
        listed = [(name, "", masters[name], origin, True) for name, (_, origin) in trained.items()]
        keep("master", place, {"masters": masters}, listed)
    states = [{"step": torch.tensor(5.0), "exp_avg": make("exp_avg").float() * 2} for make, _ in trained.values()]
    obj = {
        "state": dict(enumerate(states)),
        "param_groups": [{"params": list(range(len(states))), "lr": 0.1}],
        NAMES_KEY: [list(trained)],
    }
    listed = [
        (name, key, values[key], origin, key != "step")
        for (name, (_, origin)), values in zip(trained.items(), states)
        for key in values
    ]
    keep("optimizer", place, obj, listed)
