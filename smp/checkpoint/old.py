"""Resuming from parts without a manifest, as old scripts made them, on the degrees they were made on.

path/{tag}_partial/model_{pp}_{tp}.pt, optimizer_{pp}_{tp}[_{rdp}].pt, user_content.pt
path/{tag}_{pp}_{tp}     one dict, by smp.save(..., partial=True): "model", "optimizer", and the script's own
"""

import os
import re
from pathlib import Path
from typing import Any

from smp.checkpoint.content import USER_CONTENT
from smp.checkpoint.files import read_file
from smp.checkpoint.finder import Found, Style
from smp.checkpoint.layout import Degrees, part_name
from smp.checkpoint.loading import Options, load_by_dict
from smp.checkpoint.partial import degrees_of, load, place_of
from smp.comm.entry import together
from smp.errors import CheckpointError
from smp.runtime import Runtime


def resume(rt: Runtime, found: Found, options: Options) -> Any:
    """Loads model and optimizer; returns what else was saved. Collective over all ranks.

    Raises:
        CheckpointError: it was saved on other degrees, a file is missing or damaged, or it does not fit; on all ranks.
    """
    model_state, optimizer_state, user_content = together(rt, lambda: _read(rt, found, options))
    load_by_dict(rt.model, model_state, options.strict, found.path)
    if options.load_optimizer and rt.optimizer is not None:
        rt.optimizer.load_state_dict(optimizer_state)
    return user_content


def _read(rt: Runtime, found: Found, options: Options) -> tuple[Any, Any, Any]:
    """This rank's (model's state, optimizer's state, the rest)."""
    one_dict = found.style is Style.OLD_FILES
    parts = _from_one_dict(load(found.path), found) if one_dict else _from_directory(rt, found.path)
    if options.load_optimizer and rt.optimizer is not None and parts[1] is None:
        raise CheckpointError(f"{found.path} holds no optimizer state: resume with load_optimizer=False")
    return parts


def _from_one_dict(saved: Any, found: Found) -> tuple[Any, Any, Any]:
    if not isinstance(saved, dict) or "model" not in saved:
        raise CheckpointError(
            f"{found.path}_* hold no dict with an entry 'model': load them with smp.load and give each part to "
            "model.load_state_dict and optimizer.load_state_dict yourself"
        )
    rest = {key: value for key, value in saved.items() if key not in ("model", "optimizer")}
    return saved["model"], saved.get("optimizer"), rest


def _from_directory(rt: Runtime, directory: Path) -> tuple[Any, Any, Any]:
    place, degrees = place_of(rt), degrees_of(rt)
    matches = [re.fullmatch(r"model_(\d+)_(\d+)\.pt", path.name) for path in directory.iterdir()]
    parts = [(int(match[1]), int(match[2])) for match in matches if match]
    found = Degrees(max(pp for pp, _ in parts) + 1, max(tp for _, tp in parts) + 1, degrees.rdp)
    if found != degrees:
        raise CheckpointError(
            f"{directory} has no manifest, so it can only be resumed on the degrees it was saved on: its files are "
            f"those of {found}, this job has {degrees}"
        )
    names = [part_name("optimizer", place, each_replica) for each_replica in (False, True)]
    optimizer = next((directory / name for name in names if os.path.lexists(directory / name)), None)
    content = directory / USER_CONTENT
    return (
        read_file(directory / part_name("model", place), "cpu"),
        None if optimizer is None else read_file(optimizer, "cpu"),
        read_file(content, "cpu") if os.path.lexists(content) else None,
    )
