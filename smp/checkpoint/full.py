"""Full checkpoints: whole tensors in one file, written by rank 0, read by every rank to the extent that it needs.

    path/{tag}                the model's whole state dict, for plain torch.load too
    path/optimizer_{tag}      the optimizer's, with fp32 masters and the loss scale
    path/user_content_{tag}   the script's own
    path/{tag}.manifest.json  what the user's tensors are called there, sizes, checksums

Tensors are gathered one by one, so a rank that does not write holds its part and one tensor. Any file with a whole
state dict is read likewise, see whole.py.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from smp import log, state_mod
from smp.checkpoint import writer
from smp.checkpoint.archive import compact
from smp.checkpoint.content import describe, refuse_sparse, stored_groups
from smp.checkpoint.files import read_file
from smp.checkpoint.finder import stand_in
from smp.checkpoint.loading import Options, PartialLoad, load_by_dict
from smp.checkpoint.manifest import Manifest, StoredGroup, StoredTensor
from smp.checkpoint.partial import degrees_of
from smp.checkpoint.reader import Checkpoint, manifest_path
from smp.checkpoint.whole import Names, open_whole
from smp.comm.entry import together
from smp.dp.optimizer_state import PARTIAL_KEY
from smp.fp16.optimizer import SCALER_KEY
from smp.model_state import may_rename
from smp.runtime import Runtime
from smp.tp.origin import origins, source_shapes, tied_names

Translation = Callable[[dict[str, Any]], dict[str, Any]]


def save(
    rt: Runtime,
    path: Path,
    tag: str,
    model: Any,
    optimizer: Any,
    user_content: writer.Serialized | None,
    translate_if_full: bool,
    save_id: str,
) -> None:
    """Writes a full checkpoint. Collective over all ranks.

    Raises:
        CheckpointError: the disk refuses; on all ranks.
    """
    together(rt, lambda: _refuse_sparse(model, optimizer))
    state = {} if model is None else model.state_dict(gather_to_rank0=True)
    optimizer_state = {} if optimizer is None else optimizer.state_dict(gather_to_rank0=True)
    objects: dict[str, Any] = {} if model is None else {tag: state}
    objects |= {} if optimizer is None else {f"optimizer_{tag}": optimizer_state}
    objects |= {} if user_content is None else {f"user_content_{tag}": user_content}

    def write() -> None:
        if rt.rank == 0:
            if translate_if_full:
                for to_theirs, _ in state_mod.state.module_manager.translate_functions:
                    objects[tag] = to_theirs(objects[tag])
            _write(rt, path, tag, save_id, objects)

    together(rt, write)


def _refuse_sparse(model: Any, optimizer: Any) -> None:
    if model is not None:
        refuse_sparse("model", model.module.state_dict(keep_vars=True))
    if optimizer is not None:
        refuse_sparse("optimizer", optimizer.local_state_dict(gather_if_shard=False))


def _write(rt: Runtime, path: Path, tag: str, save_id: str, objects: Mapping[str, Any]) -> None:
    writer.prepare_full(path, tag)
    objects = {name: compact(obj) for name, obj in objects.items()}
    hidden = {writer.aside(path / name, writer.WRITING).name: name for name in objects}
    try:
        written = {h: objects[name] for h, name in hidden.items()}
        files = writer.write_files(path, written, dict.fromkeys(hidden), [path / name for name in objects])
        manifest = _manifest(rt, tag, save_id, objects)
    except BaseException:
        for name in hidden:
            (path / name).unlink(missing_ok=True)
        raise
    writer.commit_full(path, replace(manifest, files={hidden[name]: file for name, file in files.items()}))


def _manifest(rt: Runtime, tag: str, save_id: str, objects: Mapping[str, Any]) -> Manifest:
    module, optimizer_file = nn.Module() if rt.model is None else rt.model.module, f"optimizer_{tag}"
    stored: list[StoredTensor] = []
    groups: tuple[StoredGroup, ...] | None = None
    translated = False
    if tag in objects:
        translated = not objects[tag].keys() <= module.state_dict().keys()
    names = Names(module, ours_first=not translated)
    stored += names.describe(tag, objects.get(tag, {}))
    whole = origins(module, whole=True)
    whole_shapes = source_shapes(whole.values())
    for one in stored:  # a buffer of another stage may have grown there
        whole_shapes.update(names.shapes_of(one))
    half = optimizer_file in objects and SCALER_KEY in objects[optimizer_file]
    if optimizer_file in objects:
        state = objects[optimizer_file]
        shapes = {name: names.shape(name) for name, _ in module.named_parameters()}
        groups = stored_groups(state, whole)
        stored += describe("optimizer", optimizer_file, state, whole, shapes)
        stored += describe("master", optimizer_file, state, whole, shapes) if half else []
    return Manifest(
        full=True,
        tag=tag,
        save_id=save_id,
        written=time.time(),
        degrees=degrees_of(rt),
        half=("float16" if rt.config.fp16 else "bfloat16") if half else None,
        translated=translated,
        shapes=whole_shapes,
        groups=groups,
        tied=tied_names(module),
        tensors=tuple(stored),
    )


class FullLoad:
    """A full checkpoint, or another file of whole tensors, on its way into the job.

    Args:
        rt: the runtime, with the model.
        path: the file.
        options: what the script asked for.
        translate_function: from the names in the file to those of smp's modules.
    """

    def __init__(self, rt: Runtime, path: Path, options: Options, translate_function: Translation | None) -> None:
        self._rt, self._path, self._options = rt, stand_in(path) or path, options
        self._translate = translate_function

    def check(self) -> None:
        """Names, shapes, and this rank's share of the checksums, as far as they can be known before partition. Not
        collective.

        Raises:
            CheckpointError: the file is damaged, or does not fit.
        """
        module = self._rt.model.module
        hooks = any(part._load_state_dict_pre_hooks for part in module.modules())
        self._by_dict = self._translate is not None or hooks  # through code of the user's, which takes a whole dict
        known = os.path.lexists(manifest_path(self._path))
        self._names_later = not known and not self._rt.model.partitioned and may_rename(self._rt, self._rt.model)
        self._load = self._open()
        if self._by_dict or self._names_later:
            self._load.verify()
        else:
            self._load.check()

    def _open(self) -> PartialLoad:
        self._checkpoint = checkpoint = open_whole(self._path, self._rt.model.module)
        options = self._options
        if checkpoint.manifest.groups is None and options.load_optimizer and self._rt.optimizer is not None:
            log.warn_rank0("resume_from_checkpoint: %s holds no optimizer state, which stays as it is", self._path)
            options = replace(options, load_optimizer=False)
        if self._by_dict:
            rest = tuple(stored for stored in checkpoint.tensors() if stored.kind != "model")
            checkpoint = Checkpoint(self._path, replace(checkpoint.manifest, tensors=rest))
        return PartialLoad(self._rt, checkpoint, options)

    def user_content(self) -> Any:
        """What the script saved; None when there is nothing."""
        path = self._checkpoint.file(f"user_content_{self._path.name}")
        return read_file(path) if os.path.lexists(path) else None

    def settle_groups(self) -> None:
        """As `PartialLoad.settle_groups`."""
        self._load.settle_groups()
        self._options = self._load.options

    def apply(self) -> None:
        """Puts the values into model and optimizer, or keeps them until the model is partitioned. Collective."""
        if self._by_dict:
            load_by_dict(self._rt.model, together(self._rt, self._dict), self._options.strict, self._path)
        self._rt.load_once_partitioned(self._apply, of_model=True, of_optimizer=True)

    def _dict(self) -> dict[str, Any]:
        values = dict(self._checkpoint.load(self._path.name))
        return values if self._translate is None else {**self._translate(values), PARTIAL_KEY: False}

    def _apply(self) -> None:
        apply_values = together(self._rt, self._plan)
        apply_values()
        self._checkpoint.close()

    def _plan(self) -> Callable[[], None]:
        if self._names_later and not self._by_dict:
            self._load = self._open()
            self._load.check_fit()
        return self._load.plan()
