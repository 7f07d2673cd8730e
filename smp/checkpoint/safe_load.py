"""Reading tensor files without running code from them: `torch.load(weights_only=True)` and the classes allowed on top.

Besides what torch itself allows (tensors, parameters, sizes, dtypes, devices, and plain Python values: numbers,
strings, bytes, lists, tuples, sets, dicts, `OrderedDict`, `Counter`) these may stand in a file read with
`smp.load(weights_only=True)` and in the `user_content` of a checkpoint; each is plain data whose constructor runs
nothing of the file's choosing:

    argparse.Namespace                      a script's arguments
    frozenset, slice, range, datetime.*     plain values
    pathlib paths                           where the data lay
    numpy arrays, scalars and dtypes        random states, counters
    configurations of transformers          classes of its own configuration modules, found in the installed library

A script allows another class of its own with `torch.serialization.add_safe_globals([Class])`, when it saves and when it
loads.
"""

import argparse
import datetime
import importlib
import io
import pathlib
import pickle
import re
from collections.abc import Iterable
from functools import cache
from os import PathLike
from typing import IO, Any

import torch

from smp.errors import CheckpointError


@cache
def allowed_globals() -> list[Any]:
    """The classes allowed in files read with `weights_only=True`, beyond those of torch: see the table above."""
    import numpy as np

    plain = [
        argparse.Namespace,
        bytes,  # numpy writes arrays without elements with it
        frozenset,
        slice,
        range,
        datetime.date,
        datetime.datetime,
        datetime.time,
        datetime.timedelta,
        datetime.timezone,
        pathlib.PurePosixPath,
        pathlib.PosixPath,
        pathlib.PureWindowsPath,
    ]
    array, scalar = np.zeros(1), np.float64(0)
    rebuild_array, rebuild_scalar = array.__reduce__()[0], scalar.__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in np.typecodes["All"]}
    return [*plain, rebuild_array, rebuild_scalar, np.ndarray, np.dtype, *dtypes]


_CONFIGURATIONS = re.compile(
    r"(transformers\.(?:configuration_utils|generation\.configuration_utils|models\.\w+\.configuration_\w+))\.(\w+)"
)


def configurations(names: Iterable[str]) -> list[Any]:
    """Those of these full names that are configuration classes of the installed transformers."""
    found = []
    for match in filter(None, map(_CONFIGURATIONS.fullmatch, names)):
        try:
            value = getattr(importlib.import_module(match[1]), match[2])
            bases = importlib.import_module("transformers")
        except (ImportError, AttributeError):
            continue  # it stays forbidden, and is named
        if isinstance(value, type) and issubclass(value, bases.PretrainedConfig | bases.GenerationConfig):
            found.append(value)
    return found


def forbidden_classes(f: str | PathLike[str] | IO[bytes]) -> list[str]:
    """Full names of the classes in a tensor file that are not allowed with `weights_only=True`."""
    names = torch.serialization.get_unsafe_globals_in_checkpoint(f)
    known = {f"{value.__module__}.{value.__qualname__}" for value in [*allowed_globals(), *configurations(names)]}
    return sorted(name for name in names if name not in known)


def refuse_forbidden(f: str | PathLike[str] | IO[bytes], what: str) -> None:
    """Raises CheckpointError naming the classes in a tensor file that could not be read again: better when the job
    saves than when it is resumed.
    """
    if names := forbidden_classes(f):
        raise CheckpointError(
            f"{what} holds {', '.join(names)}: not allowed in a checkpoint, which is read without running code from "
            "it. Save plain values instead (a dict, vars(obj), obj.state_dict()), or allow the class with "
            "torch.serialization.add_safe_globals([...]) in the script that saves and in the one that resumes"
        )


def serialize(obj: Any, what: str) -> bytes:
    """`obj` as `torch.save` writes it, after making sure that it can be read again.

    Raises:
        CheckpointError: it holds a class that is not allowed; names it.
    """
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
    except Exception as error:  # an object's own pickling may raise anything, as that of a DataLoader's iterator
        raise CheckpointError(f"{what} cannot be saved: {error}") from error
    refuse_forbidden(io.BytesIO(buffer.getvalue()), what)
    try:
        load_file(io.BytesIO(buffer.getvalue()))
    except CheckpointError as error:
        raise CheckpointError(f"{what} could not be read again: {error}") from error
    return buffer.getvalue()


def load_file(
    f: str | PathLike[str] | IO[bytes], map_location: Any = None, *, weights_only: bool = True, **kwargs: Any
) -> Any:
    """`torch.load` with the allow list, and a `CheckpointError` that names the file when it cannot be read.

    `kwargs` go to `torch.load`; torch refuses `pickle_module` together with `weights_only=True`, and so do we.
    """
    if weights_only and kwargs.get("pickle_module") is not None:
        raise CheckpointError("pickle_module needs weights_only=False: a custom unpickler may run code from the file")
    try:
        if not weights_only:
            return torch.load(f, map_location, weights_only=False, **kwargs)
        return _load_safely(f, map_location, kwargs)
    except FileNotFoundError:
        raise CheckpointError(f"{f} does not exist") from None
    except pickle.UnpicklingError as error:
        blocked = [line.strip() for line in str(error).splitlines() if "global" in line.lower() and "GLOBAL" in line]
        if not weights_only or not blocked:
            raise CheckpointError(f"{f} cannot be read as a tensor file: {error}") from error
        raise CheckpointError(
            f"{f} holds an object of a class that is not allowed with weights_only=True ({blocked[0]}). "
            "If you trust who wrote it, allow the class with torch.serialization.add_safe_globals([...]) before "
            "loading, or read the file with weights_only=False: that runs code from the file"
        ) from error
    except (RuntimeError, EOFError, KeyError, ValueError, OSError, AttributeError, IndexError) as error:
        first_line = str(error).splitlines()[0] if str(error) else ""
        raise CheckpointError(
            f"{f} cannot be read as a tensor file, it is damaged or something else: {type(error).__name__} {first_line}"
        ) from error


def _load_safely(f: str | PathLike[str] | IO[bytes], map_location: Any, kwargs: dict[str, Any]) -> Any:
    """With the allow list; configurations of transformers are looked up only where a file holds one."""
    with torch.serialization.safe_globals(allowed_globals()):
        try:
            return torch.load(f, map_location, weights_only=True, **kwargs)
        except pickle.UnpicklingError as error:
            if not configurations(re.findall(r"GLOBAL ([\w.]+)", str(error))):
                raise
        _rewind(f)
        more = configurations(torch.serialization.get_unsafe_globals_in_checkpoint(f))
        _rewind(f)
        with torch.serialization.safe_globals(more):
            return torch.load(f, map_location, weights_only=True, **kwargs)


def _rewind(f: str | PathLike[str] | IO[bytes]) -> None:
    if not isinstance(f, str | PathLike):
        f.seek(0)
