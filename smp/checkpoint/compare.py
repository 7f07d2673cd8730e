"""Two checkpoints compared, tensor by tensor under the names of the user's module: degrees make no difference."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smp.checkpoint.manifest import Kind
from smp.checkpoint.reader import Checkpoint

_CHUNK = 1 << 20  # values that are compared at once


@dataclass(frozen=True)
class Difference:
    """One tensor, or value beside it.

    Attributes:
        kind, key, name: as in a manifest; `name` in the user's module.
        what: how the two differ; empty when they do not.
    """

    kind: Kind
    key: str
    name: str
    what: str = ""


def compare(a: Checkpoint, b: Checkpoint, kinds: tuple[Kind, ...], tolerance: float = 0.0) -> Iterator[Difference]:
    """Goes through all tensors of both; a tensor of each is in memory at a time.

    Args:
        kinds: of what to compare.
        tolerance: largest absolute difference that is none.
    """
    for kind in kinds:
        keys = dict.fromkeys([*a.keys(), *b.keys()]) if kind == "optimizer" else {"": None}
        for key in keys:
            mine, others = set(a.sources(kind, key)), set(b.sources(kind, key))
            for name in dict.fromkeys([*a.sources(kind, key), *b.sources(kind, key)]):
                if name not in mine or name not in others:
                    what = f"only in {'A' if name in mine else 'B'}"
                else:
                    what = _difference(a.read(kind, name, key), b.read(kind, name, key), tolerance)
                yield Difference(kind, key, name, what)


def _difference(a: Any, b: Any, tolerance: float) -> str:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        a, b = (value.item() if isinstance(value, Tensor) and value.numel() == 1 else value for value in (a, b))
        same = not (isinstance(a, Tensor) or isinstance(b, Tensor)) and bool(a == b)
        return "" if same else f"{_shown(a)} in A, {_shown(b)} in B"
    if a.shape != b.shape:
        return f"shape {list(a.shape)} in A, {list(b.shape)} in B"
    wide = torch.promote_types(a.dtype, b.dtype)
    exact = torch.complex128 if wide.is_complex else torch.float64
    count, largest = 0, 0.0
    for left, right in zip(a.reshape(-1).split(_CHUNK), b.reshape(-1).split(_CHUNK)):
        left, right = left.to(wide), right.to(wide)
        other = (left != right) & ~(left.isnan() & right.isnan())
        if other.any():
            away = (left[other].to(exact) - right[other].to(exact)).abs().nan_to_num(torch.inf)
            count += int((away > tolerance).sum())
            largest = max(largest, float(away.max()))
    dtypes = "" if a.dtype == b.dtype else f" ({_name(a.dtype)} in A, {_name(b.dtype)} in B)"
    return f"{count} of {a.numel()} values differ, by at most {largest:.3g}{dtypes}" if count else ""


def _shown(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
