"""Reading tensor files without running code from them: `torch.load(weights_only=True)` and the classes allowed on top.

Besides what torch itself allows (tensors, parameters, sizes, dtypes, devices, and plain Python values: numbers,
strings, bytes, lists, tuples, sets, dicts, `OrderedDict`, `Counter`) these may stand in a file read with
`smp.load(weights_only=True)`; each is plain data whose constructor runs nothing of the file's choosing:

    argparse.Namespace                      a script's arguments
    frozenset, slice, range, datetime.*     plain values
    pathlib paths                           where the data lay
    numpy arrays, scalars and dtypes        random states, counters
"""

import argparse
import datetime
import pathlib
import pickle
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
        with torch.serialization.safe_globals(allowed_globals()):
            return torch.load(f, map_location, weights_only=True, **kwargs)
    except FileNotFoundError:
        raise CheckpointError(f"{f} does not exist") from None
    except pickle.UnpicklingError as error:
        blocked = [line.strip() for line in str(error).splitlines() if "global" in line.lower() and "GLOBAL" in line]
        if not weights_only or not blocked:
            raise CheckpointError(f"{f} cannot be read as a tensor file: {error}") from error
        raise CheckpointError(
            f"{f} holds an object of a class that is not allowed with weights_only=True ({blocked[0]}). "
            "Load it with weights_only=False only if you trust who wrote it: that runs code from the file"
        ) from error
    except (RuntimeError, EOFError, KeyError, ValueError, OSError, AttributeError, IndexError) as error:
        first_line = str(error).splitlines()[0] if str(error) else ""
        raise CheckpointError(
            f"{f} cannot be read as a tensor file, it is damaged or something else: {type(error).__name__} {first_line}"
        ) from error
