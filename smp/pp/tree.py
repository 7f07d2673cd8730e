"""Names in a module tree."""

from collections.abc import Iterator

from torch import nn


def join(prefix: str, name: str) -> str:
    """`a` and `b` -> `a.b`; the root's name is empty."""
    return f"{prefix}.{name}" if prefix else name


def ancestors(name: str) -> Iterator[str]:
    """`a.b.c` -> `a.b`, `a`, the root. Nothing for the root."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def is_inside(name: str, outer: str) -> bool:
    """Whether a module is `outer` or lies below it."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def has_parameters(module: nn.Module) -> bool:
    """Whether a module or anything in it has parameters."""
    return next(module.parameters(), None) is not None
