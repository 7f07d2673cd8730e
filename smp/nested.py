"""Nested containers of tensors as a flat list of leaves and a hashable description of the rest.

Lists, tuples, named tuples, mappings (`dict`, `OrderedDict`, `BatchEncoding`, `ModelOutput`, ...), sets and dataclasses
are containers; everything else is a leaf. torch's pytree knows no unregistered mappings and no dataclasses, which step
functions pass and models return, and its specs are costly to build on every call.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch


class Leaf(NamedTuple):
    """One leaf of a nested structure."""


class Container(NamedTuple):
    """A container: its type, what rebuilding needs beside the children (keys, field names), and the children."""

    type: type
    context: Any
    children: tuple[Any, ...]


Spec = Leaf | Container
LEAF = Leaf()


def flatten(obj: Any, keep_tensorless: bool = False) -> tuple[list[Any], Spec]:
    """Return the leaves of `obj` in order, and the spec from which `unflatten` rebuilds it.

    With `keep_tensorless`, a container that holds no tensor (and nothing that slices itself) is itself a leaf, so that
    its identity survives: a list that the user's function appends to, an argparse namespace in a dict.
    """
    leaves: list[Any] = []
    spec = _flatten(obj, leaves, keep_tensorless)
    return leaves, spec


def unflatten(spec: Spec, leaves: list[Any]) -> Any:
    """Rebuild the nested object whose description is `spec` from its leaves, in the order `flatten` gave them."""
    return _unflatten(spec, iter(leaves))


def map_leaves(function: Callable[[Any], Any], obj: Any) -> Any:
    """The same structure with `function` applied to every leaf."""
    leaves, spec = flatten(obj)
    return unflatten(spec, [function(leaf) for leaf in leaves])


_PLAIN_LEAVES = frozenset(
    (torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.Size, torch.dtype)
)


def _flatten(obj: Any, leaves: list[Any], keep_tensorless: bool) -> Spec:
    cls = type(obj)
    if cls in _PLAIN_LEAVES or isinstance(obj, torch.Tensor):
        leaves.append(obj)
        return LEAF
    items = _open(obj)
    if items is None:
        leaves.append(obj)
        return LEAF
    context, values = items
    start = len(leaves)
    children: list[Spec] = []
    for value in values:
        if type(value) in _PLAIN_LEAVES or isinstance(value, torch.Tensor):  # most of them
            leaves.append(value)
            children.append(LEAF)
        else:
            children.append(_flatten(value, leaves, keep_tensorless))
    opaque = cls not in (tuple, list, dict) and dataclasses.is_dataclass(obj) and not isinstance(obj, Mapping)
    if (keep_tensorless or opaque) and not any(_is_data(leaf) for leaf in leaves[start:]):
        # A dataclass without tensors is somebody's settings object; taking it apart would lose its other attributes.
        del leaves[start:]
        leaves.append(obj)
        return LEAF
    return Container(cls, context, tuple(children))


def _is_data(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) or hasattr(leaf, "smp_slice")


def _open(obj: Any) -> tuple[Any, Any] | None:
    """(context, children) of a container, None for a leaf."""
    cls = type(obj)
    if cls is list or cls is tuple:
        return None, obj
    if cls is dict:
        return tuple(obj), obj.values()
    if obj is None or cls in (int, float, bool, str):
        return None
    if isinstance(obj, torch.Size):
        return None
    if isinstance(obj, tuple):
        return None, obj
    if isinstance(obj, list):
        return None, obj
    if isinstance(obj, Mapping):
        factory = getattr(obj, "default_factory", None)
        return (tuple(obj), factory), [obj[key] for key in obj]
    if isinstance(obj, set | frozenset):
        return None, obj
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type) and not hasattr(obj, "smp_slice"):
        names = tuple(field.name for field in dataclasses.fields(obj) if hasattr(obj, field.name))
        return names, [getattr(obj, name) for name in names]
    return None


def _unflatten(spec: Spec, leaves: Iterator[Any]) -> Any:
    if isinstance(spec, Leaf):
        return next(leaves)
    cls = spec.type
    values = [next(leaves) if child is LEAF else _unflatten(child, leaves) for child in spec.children]
    if cls is list:
        return values
    if cls is tuple:
        return tuple(values)
    if cls is dict:
        return dict(zip(spec.context, values, strict=True))
    if issubclass(cls, tuple):
        return cls(*values) if hasattr(cls, "_fields") else cls(values)
    if issubclass(cls, Mapping):
        return _rebuild_mapping(cls, spec.context, values)
    if issubclass(cls, list | set | frozenset):
        return cls(values)
    instance = object.__new__(cls)
    for name, value in zip(spec.context, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance


def _rebuild_mapping(cls: type, context: tuple[tuple[Any, ...], Any], values: list[Any]) -> Any:
    keys, default_factory = context
    items = dict(zip(keys, values, strict=True))
    if default_factory is not None:
        return cls(default_factory, items)
    if dataclasses.is_dataclass(cls):  # ModelOutput: a mapping whose constructor takes its fields
        return cls(**items)
    return cls(items)
