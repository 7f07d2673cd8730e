"""What a call returns, without the data: how ranks that own nothing of a call know its result.

The owner describes the result of the first call with a given signature and sends the description to the other stages,
which remember it. A signature holds everything the description depends on: shapes, dtypes, which inputs require
gradients, plain Python values, the training flag and grad mode; never the identity of an object.
"""

import enum
import io
import numbers
import pickle
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from smp.errors import StepError
from smp.nested import Spec, flatten
from smp.pp.placed import Value, user_line

_SCALARS = (int, float, complex, bool)
# What a module may return besides tensors without having to say at every call what it was.
_CONSTANT = (torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum, type)


class SameObject(NamedTuple):
    """A result that is one of the objects the call was given."""

    input: int


class Absent:
    """Stands on other stages for an object that a call made on its own stage, and that cannot be sent (a cache)."""

    def __init__(self, type_name: str) -> None:
        self._type_name = type_name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise StepError(
            f"'{name}' of a {self._type_name} is used at {user_line()} on a stage that has not got it: the object was "
            "made on another stage. Use it only in modules of that stage."
        )


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a result."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    same_as: int | None = None  # the result is this input itself
    shares: tuple[str, int] | None = None  # its memory is that of ("in", i) or of the earlier result ("out", j)


@dataclass(frozen=True, slots=True)
class Structure:
    """The result of a call: nested structure, tensors, plain leaves, and what it did to its inputs.

    `dynamic` results depend on the data (numbers, boolean indexing): their owner sends the structure every time.
    `draws` says that a function takes random numbers from the caller's stream.
    """

    spec: Spec
    leaves: tuple[Any, ...]  # TensorInfo or a plain value
    written: tuple[int, ...] = ()  # inputs changed in place
    written_info: tuple[TensorInfo, ...] = field(default=())
    dynamic: bool = False
    draws: bool = False
    buffers: tuple[str, ...] = ()  # names of the module's buffers that the call writes


def describe(
    result: Any,
    inputs: list[Any],
    written: tuple[int, ...],
    function_name: str | None,
    draws: bool,
    buffers: tuple[str, ...] = (),
) -> tuple[Structure, list[Any]]:
    """The structure of `result`, and its leaves. `inputs` are the leaves that the call was given (tensors or not)."""
    leaves, spec = flatten(result)
    by_id = {id(x): i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    by_storage = {_storage_key(x): ("in", i) for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    described: list[Any] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            key = _storage_key(leaf)
            described.append(_info(leaf, by_id.get(id(leaf)), by_storage.get(key)))
            by_storage.setdefault(key, ("out", index))
        else:
            described.append(_plain_leaf(leaf, inputs))
    dynamic = _is_dynamic(described, inputs, function_name)
    infos = tuple(_info(inputs[i], i, None) for i in written)
    return Structure(spec, tuple(described), written, infos, dynamic, draws, buffers), leaves


def _plain_leaf(leaf: Any, inputs: list[Any]) -> Any:
    if leaf is None or isinstance(leaf, (*_SCALARS, str)):
        return leaf
    for index, given in enumerate(inputs):
        if leaf is given:
            return SameObject(index)
    try:
        _TensorlessPickler(io.BytesIO()).dump(leaf)
    except Exception:  # anything can go wrong in a stranger's __reduce__
        return Absent(type(leaf).__name__)
    return leaf


class _TensorlessPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            raise pickle.PicklingError("holds a tensor")
        return NotImplemented


def agrees(structure: Structure, leaves: list[Any]) -> bool:
    """Whether a later result of the same signature is as remembered (cheap: run on every call by the owner)."""
    if len(leaves) != len(structure.leaves):
        return False
    for leaf, known in zip(leaves, structure.leaves, strict=True):
        if isinstance(known, TensorInfo):
            if (
                not isinstance(leaf, torch.Tensor)
                or leaf.shape != known.shape
                or leaf.dtype != known.dtype
                or leaf.requires_grad != known.requires_grad
            ):
                return False
        elif isinstance(leaf, torch.Tensor):
            return False
    return True


def signature_of(leaf: Any) -> Any:
    """The hashable part of one plain argument that a result's structure can depend on."""
    if leaf is None or isinstance(
        leaf, bool | int | float | str | complex | bytes | torch.dtype | torch.device | torch.Size
    ):
        return (type(leaf), leaf)
    if isinstance(leaf, torch.Tensor):
        return (torch.Tensor, tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    if isinstance(leaf, slice):
        return (slice, _bound(leaf.start), _bound(leaf.stop), _bound(leaf.step))
    if leaf is Ellipsis or isinstance(leaf, enum.Enum | type | torch.layout | torch.memory_format | range):
        return leaf
    if isinstance(leaf, numbers.Number):  # numpy's
        return (type(leaf), complex(leaf))  # type: ignore[call-overload]
    if hasattr(type(leaf), "shape") and hasattr(type(leaf), "dtype"):  # an array
        return (type(leaf), tuple(leaf.shape), str(leaf.dtype))
    return type(leaf)


def value_signature(value: Value) -> Any:
    return (value.shape, value.stride, value.dtype, value.requires_grad)


def _bound(bound: Any) -> Any:
    return bound if bound is None or isinstance(bound, int) else type(bound)


def _storage_key(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse tensors and wrappers have none
        return id(tensor)


def _info(tensor: torch.Tensor, same_as: int | None, shares: tuple[str, int] | None) -> TensorInfo:
    stride = tensor.stride() if tensor.layout is torch.strided else ()
    return TensorInfo(tuple(tensor.shape), tuple(stride), tensor.dtype, tensor.requires_grad, same_as, shares)


# Functions whose result's shape depends on data.
_DATA_SHAPED = frozenset(
    "nonzero argwhere masked_select unique unique_consecutive unique_dim bincount repeat_interleave histc".split()
)


def _is_dynamic(described: list[Any], inputs: list[Any], function_name: str | None) -> bool:
    plain = [leaf for leaf in described if not isinstance(leaf, TensorInfo) and leaf is not None]
    if function_name is None:  # a module: numbers, text and arrays in its result may change from call to call
        return not all(isinstance(leaf, _CONSTANT + (SameObject, Absent)) for leaf in plain)
    if plain or function_name in _DATA_SHAPED:
        return True
    if function_name == "where" and sum(isinstance(x, torch.Tensor) for x in inputs) == 1:
        return True
    indexing = function_name in ("__getitem__", "getitem")
    return indexing and any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in inputs[1:])
