"""Modules that clients import by path and whose contents are still to come."""

from collections.abc import Callable, Collection
from typing import NoReturn


def to_come(module: str, names: Collection[str], feature: str) -> Callable[[str], NoReturn]:
    """A module's `__getattr__` that says of `names` that they belong to a feature that does not exist yet."""

    def getattr_(name: str) -> NoReturn:
        if name in names:
            raise AttributeError(f"{module}.{name} is still to come, with {feature}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_
