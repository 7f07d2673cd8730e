"""`smp.save` and `smp.load`: a file per rank of the model replica, or one ready object.

A partial save is collective:

    (1) every rank of the group enters, or those that did are told who is missing
    (2) each writes aside and flushes           the old files are still whole
    (3) all hear how it went on every rank      one failure: nothing is renamed, everybody raises
    (4) each renames its file
    (5) all hear again                          when the call returns, the files of all ranks are there
"""

import os
import pickle
import secrets
from pathlib import Path
from typing import IO, Any

from smp import log, runtime
from smp.checkpoint.files import FileWriter, read_file, read_header
from smp.checkpoint.layout import (
    Degrees,
    Header,
    Place,
    describe_existing,
    existing_parts,
    foreign_part,
    old_path,
    partial_path,
)
from smp.checkpoint.safe_load import load_file
from smp.comm.entry import enter_collective, together
from smp.errors import CheckpointError, UsageError
from smp.groups import Group
from smp.runtime import Runtime
from smp.topology import CommGroup

_SAVE_ADVICE = (
    "Call smp.save(partial=True) on all ranks, or under `if smp.rdp_rank() == 0` (without tensor parallelism also "
    "`if smp.dp_rank() == 0`)."
)
_SAVE_V3_ADVICE = "With v3=True every rank has a part of the state: call smp.save on all ranks, under no condition."
_LOAD_ADVICE = "Call smp.load(partial=True) on all ranks: each reads its own part."


@log.long_phase("smp.save")
def save(
    obj: Any,
    f: str | os.PathLike[str] | IO[bytes],
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Save `obj` as `torch.save` would, a file per rank (`partial`) or one file.

    partial=True: collective over the ranks of the model replica; `f` is a path, rdp_rank 0 writes
    `f_{pp_rank}_{tp_rank}`. With `v3` (state that differs over replicas) every rank writes
    `f_{pp_rank}_{tp_rank}_{rdp_rank}` and the call is collective over all ranks. Either all files of the save are
    replaced or, when a rank cannot write, none, and every writing rank raises `CheckpointError`. On a rank that writes,
    the files of its replica are there when the call returns; other replicas do not wait for them.
    partial=False: the calling rank writes `obj` to `f`, a path or a file object; any rank may call it.
    The file is written aside, flushed and renamed, and `torch.load` reads it by hand.
    """
    options = {"pickle_module": pickle_module, "pickle_protocol": pickle_protocol}
    if partial:
        _save_partial(obj, _path_of(f, "smp.save"), v3, options)
    elif isinstance(f, str | os.PathLike):
        rank = runtime.get().rank if runtime.is_initialized() else 0
        writer = FileWriter(Path(f), rank)
        writer.write(obj, **options)
        writer.commit()
    else:
        import torch

        torch.save(obj, f, **options)


@log.long_phase("smp.load")
def load(
    f: str | os.PathLike[str] | IO[bytes],
    map_location: Any = None,
    partial: bool = True,
    back_compat: bool = False,
    weights_only: bool = True,
    **pickle_load_args: Any,
) -> Any:
    """Load what `smp.save` wrote: this rank's part (`partial`, collective over the model replica) or a whole file.

    With partial=True `f` is the path given to `save`; the degrees must be those of the save. Parts saved with `v3` are
    loaded by all ranks together. `back_compat` reads the old names `f_{mp_rank}`. `weights_only=True` allows tensors,
    plain values and the classes listed in `smp.checkpoint.safe_load`; `pickle_module` and other arguments of
    `torch.load` need `weights_only=False`.
    Raises `CheckpointError`, on every rank of the replica, naming the file that is missing, damaged, of other degrees
    or of another save than the rest.
    """
    options = {"weights_only": weights_only, **pickle_load_args}
    if partial:
        return _load_partial(_path_of(f, "smp.load"), map_location, back_compat, options)
    if isinstance(f, str | os.PathLike):
        if not Path(f).is_file():
            raise CheckpointError(f"{f} does not exist: {describe_existing(str(f))}")
        return read_file(Path(f), map_location, **options)
    return load_file(f, map_location, **options)


def _path_of(f: object, call: str) -> str:
    if not isinstance(f, str | os.PathLike):
        raise UsageError(f"{call} with partial=True makes one file per rank and needs a path, got {type(f).__name__}")
    return os.fspath(f)


def degrees_of(rt: Runtime) -> Degrees:
    """Those of the job."""
    return Degrees(rt.topology.pp_size, rt.topology.tp_size, rt.topology.rdp_size)


def place_of(rt: Runtime) -> Place:
    """Coordinates of this rank."""
    return Place(rt.pp_rank, rt.tp_rank, rt.rdp_rank)


def _save_partial(obj: Any, f: str, v3: bool, options: dict[str, Any]) -> None:
    rt = runtime.get()
    group = rt.group(CommGroup.WORLD if v3 else CommGroup.MP_GROUP)
    enter_collective(rt, f"smp.save({f!r})", group, _SAVE_V3_ADVICE if v3 else _SAVE_ADVICE)  # (1)
    if not v3 and rt.rdp_rank != 0:
        return
    save_id = rt.transport.broadcast_object(secrets.token_hex(8), group, group.ranks[0])
    path = partial_path(f, place_of(rt), v3)
    writer = FileWriter(path, rt.rank)
    header = Header(degrees_of(rt), place_of(rt), v3, save_id)
    try:
        together(rt, lambda: _write(writer, obj, header, options), group)  # (2) (3)
    except BaseException:
        writer.discard()
        raise
    together(rt, writer.commit, group)  # (4) (5)


def _write(writer: FileWriter, obj: Any, header: Header, options: dict[str, Any]) -> None:
    directory = writer.path.parent
    if not directory.is_dir():
        raise CheckpointError(
            f"{writer.path} cannot be written: the directory {directory} does not exist, make it first"
        )
    writer.write(obj, header, **options)


def _load_partial(f: str, map_location: Any, back_compat: bool, options: dict[str, Any]) -> Any:
    rt = runtime.get()
    v3 = not back_compat and _is_v3(rt, f)
    group = rt.group(CommGroup.WORLD if v3 else CommGroup.MP_GROUP)
    enter_collective(rt, f"smp.load({f!r})", group, _LOAD_ADVICE)

    def read() -> tuple[Any, str]:
        path, header = _find_part(rt, f, v3, back_compat)
        return read_file(path, map_location, **options), header.save_id if header else ""

    obj, save_id = together(rt, read, group)
    _check_same_save(rt, group, f, save_id)
    return obj


def _is_v3(rt: Runtime, f: str) -> bool:
    """Whether to read parts of all ranks: what there is decides; where both kinds are, this job's sharding does."""
    kinds = {len(numbers) for numbers in existing_parts(f).values()}
    return 3 in kinds and (rt.config.shard_optimizer_state or 2 not in kinds)


def _find_part(rt: Runtime, f: str, v3: bool, back_compat: bool) -> tuple[Path, Header | None]:
    """This rank's file and its header, checked against the degrees of this job."""
    degrees, place = degrees_of(rt), place_of(rt)
    path = old_path(f, rt.mp_rank) if back_compat else partial_path(f, place, v3)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: {describe_existing(f)}.{_saved_with(f)} This job has {degrees}")
    header = read_header(path)
    if header is not None:
        _check_header(path, header, degrees, place)
    elif not back_compat and (foreign := foreign_part(f, degrees, v3)):
        raise CheckpointError(f"{foreign} belongs to a save on other degrees than this job's, which has {degrees}")
    return path, header


def _saved_with(f: str) -> str:
    for part in existing_parts(f):
        if header := read_header(part):
            return f" {part.name} was saved with {header.degrees}."
    return ""


def _check_header(path: Path, header: Header, degrees: Degrees, place: Place) -> None:
    same = (header.degrees.pp, header.degrees.tp) == (degrees.pp, degrees.tp)
    if not same or (header.v3 and header.degrees.rdp != degrees.rdp):
        raise CheckpointError(
            f"{path} was saved with {header.degrees}; this job has {degrees}. A partial file can only be loaded on the "
            "degrees it was saved on"
        )
    if (header.place.pp, header.place.tp) != (place.pp, place.tp) or (header.v3 and header.place.rdp != place.rdp):
        raise CheckpointError(
            f"{path} says that it is the part of {header.place}, this rank is {place}: it was renamed"
        )


def _check_same_save(rt: Runtime, group: Group, f: str, save_id: str) -> None:
    if group.size == 1:
        return
    ids = rt.transport.all_gather_object(save_id, group)
    if len(set(ids)) > 1:
        saves = [[r for r, other in zip(group.ranks, ids) if other == one] for one in dict.fromkeys(ids)]
        raise CheckpointError(
            f"The parts of {f} come from {len(saves)} different saves: those read by the ranks "
            f"{', by the ranks '.join(map(str, saves))}. A save was cut short, or files were copied together"
        )
