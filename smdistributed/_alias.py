"""Importing a module under a second name without making a second module."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class AliasFinder(MetaPathFinder):
    """Finds modules under second names.

    Args:
        names: second name -> name of the real module. Submodules follow their package.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec that loads the real module, or None where there is none."""
        for alias, real in self._names.items():
            if fullname == alias or fullname.startswith(f"{alias}."):
                real_name = real + fullname.removeprefix(alias)
                if find_spec(real_name) is not None:
                    return ModuleSpec(fullname, _AliasLoader(real_name), is_package=True)
        return None


class _AliasLoader(Loader):
    def __init__(self, real_name: str) -> None:
        self._real_name = real_name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._real_name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has just overwritten it; the module itself ran long ago
