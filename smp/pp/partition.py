"""Which module goes to which stage: pins by hand, and an automatic balance of parameters in execution order.

    smp.partition(1)                      recorded on modules while they are created; only without auto_partition
    smp.set_partition(module, 1)          always honoured
    auto_partition                        units in execution order, cut into contiguous stages so that the largest is
                                          as small as it can be

A unit is a module that is not worth splitting further: one that costs no more than a stage's fair share.
"""

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from smp import log
from smp.errors import PartitionError
from smp.tp.registry import used_parameters

_CREATED = "_smp_created_on_stage"  # set by `partition`
_PINNED = "_smp_pinned_to_stage"  # set by `set_partition`
_contexts = threading.local()


@contextmanager
def partition(stage: int) -> Iterator[None]:
    """Modules created inside are placed on `stage` (innermost context wins). Ignored under `auto_partition`.

    Raises `PartitionError` when the stage does not exist.
    """
    _check_stage(stage, "smp.partition")
    stack: list[int] = _contexts.__dict__.setdefault("stack", [])
    stack.append(stage)
    try:
        with _recorded_creation():
            yield
    finally:
        stack.pop()


def set_partition(module: nn.Module, stage: int) -> None:
    """Place `module` on `stage`, with everything in it that is not placed by itself.

    Raises `PartitionError` when the stage does not exist or the model is partitioned already.
    """
    from smp import runtime

    _check_stage(stage, "smp.set_partition")
    model = runtime.get().model
    if model is not None and model.partitioned and model.owns_module(module):
        raise PartitionError(
            "smp.set_partition was called after the model was partitioned; call it before the first step."
        )
    setattr(module, _PINNED, stage)


def _check_stage(stage: int, call: str) -> None:
    from smp import runtime

    count = runtime.get().topology.pp_size
    if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage < count:
        raise PartitionError(
            f"{call} got stage {stage!r}; with pipeline_parallel_degree {count} a stage is a number from 0 to "
            f"{count - 1}."
        )


_recording_depth = 0


@contextmanager
def _recorded_creation() -> Iterator[None]:
    """Note the innermost stage on every module whose constructor runs inside."""
    global _recording_depth
    if _recording_depth:
        _recording_depth += 1
        try:
            yield
        finally:
            _recording_depth -= 1
        return
    original = nn.Module.__init__

    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        stack = getattr(_contexts, "stack", [])
        if stack:
            self.__dict__[_CREATED] = stack[-1]

    nn.Module.__init__ = init  # type: ignore[method-assign]
    _recording_depth = 1
    try:
        yield
    finally:
        _recording_depth = 0
        nn.Module.__init__ = original  # type: ignore[method-assign]


@dataclass(frozen=True)
class Assignment:
    """`modules`: name -> stage, None for glue. `own`: glue module's name -> stage of its own parameters."""

    modules: dict[str, int | None]
    own: dict[str, int]


def assign(root: nn.Module, num_stages: int, auto: bool, default: int, order: Sequence[str] | None) -> Assignment:
    """Assign every module of the tree. `order` is the execution order of module names, None for definition order.

    Pure: the same tree, pins and order give the same result. Raises `PartitionError` for pins that do not exist.
    """
    _check_pins(root, num_stages)
    placed = _automatic(root, num_stages, order) if auto else _by_hand(root, default)
    _join_shared(root, placed, auto)
    return _settle(root, placed)


def _check_pins(root: nn.Module, num_stages: int) -> None:
    for name, module in root.named_modules():
        pin = _pin(module)
        if pin is not None and pin >= num_stages:
            raise PartitionError(
                f"module '{name}' is placed on stage {pin}, but there are {num_stages} stages (0 to {num_stages - 1})."
            )


def _pin(module: nn.Module) -> int | None:
    return module.__dict__.get(_PINNED)


# Below, `placed` gives each module that has parameters of its own the stage of those; it is keyed by the module's name.


def _by_hand(root: nn.Module, default: int) -> dict[str, int]:
    placed: dict[str, int] = {}

    def visit(name: str, module: nn.Module, stage: int) -> None:
        pin = _pin(module)
        stage = pin if pin is not None else module.__dict__.get(_CREATED, stage)
        placed[name] = stage
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child, stage)

    visit("", root, default)
    return placed


def _first_call(order: Sequence[str]) -> dict[str, int]:
    """When a module, or something inside it, is called first: containers are never called themselves."""
    position: dict[str, int] = {}
    for index, name in enumerate(order):
        while name:
            position.setdefault(name, index)
            name = name.rpartition(".")[0]
    return position


@dataclass
class _Unit:
    """A module that stays whole (`whole`), or the parameters of a split module itself."""

    name: str
    module: nn.Module
    whole: bool
    cost: int
    pin: int | None


def _automatic(root: nn.Module, num_stages: int, order: Sequence[str] | None) -> dict[str, int]:
    position = _first_call(order or [])
    seen: set[int] = set()
    total = sum(p.numel() for p in root.parameters())
    share = max(1, total / num_stages)
    units: list[_Unit] = []

    def visit(name: str, module: nn.Module, pin: int | None) -> None:
        pin = _pin(module) if _pin(module) is not None else pin
        children = list(module.named_children())
        inner_pins = any(_pin(m) is not None for m in module.modules() if m is not module)
        cost = sum(p.numel() for p in module.parameters() if id(p) not in seen)
        if not inner_pins and (cost <= share or not children):
            seen.update(id(p) for p in module.parameters())
            units.append(_Unit(name, module, True, cost, pin))
            return
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(id(p) for p in own)
        if own or pin is not None:  # else there is nothing to place, and it must not take up a stage
            units.append(_Unit(name, module, False, sum(p.numel() for p in own), pin))
        full = [(f"{name}.{child}" if name else child, m) for child, m in children]
        full.sort(key=lambda item: position.get(item[0], len(position)) if position else 0)
        for child_name, child in full:
            visit(child_name, child, pin)

    visit("", root, None)
    free = [unit for unit in units if unit.pin is None]
    stages = contiguous([unit.cost for unit in free], num_stages)
    placed: dict[str, int] = {}
    for unit, stage in [*zip(free, stages, strict=True), *((u, u.pin) for u in units if u.pin is not None)]:
        assert stage is not None
        if unit.whole:
            for inner, _ in unit.module.named_modules():
                placed[f"{unit.name}.{inner}".strip(".")] = stage
        else:
            placed[unit.name] = stage
    return placed


def contiguous(costs: Sequence[int], num_parts: int) -> list[int]:
    """The part of each item when the sequence is cut into contiguous parts whose largest cost is smallest.

    Among equals, earlier parts are filled first; no part is left empty while there are items enough.
    """
    count = len(costs)
    parts = min(num_parts, count)
    prefix = [0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    infinite = float("inf")
    # best[k][i]: smallest largest cost of the first i items in k parts; cut[k][i]: where the last of them begins
    best: list[list[float]] = [[infinite] * (count + 1) for _ in range(parts + 1)]
    cut = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for k in range(1, parts + 1):
        for i in range(k, count + 1):
            for j in range(k - 1, i):
                largest = max(best[k - 1][j], prefix[i] - prefix[j])
                if largest < best[k][i]:
                    best[k][i], cut[k][i] = largest, j
    result = [0] * count
    end = count
    for k in range(parts, 0, -1):
        begin = cut[k][end]
        result[begin:end] = [k - 1] * (end - begin)
        end = begin
    return result


def _join_shared(root: nn.Module, placed: dict[str, int], auto: bool) -> None:
    """Modules that share a parameter live on one stage: where one is pinned, else where the first was placed."""
    sharing: dict[int, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        for parameter in [*module.parameters(recurse=False), *used_parameters(module)]:
            sharing.setdefault(id(parameter), []).append(name)
    groups: dict[str, set[str]] = {}
    for names in sharing.values():
        together = set(names).union(*(groups.get(name, ()) for name in names))
        groups.update(dict.fromkeys(together, together))
    rank = {name: (_pin(root.get_submodule(name)) is None, i) for i, name in enumerate(placed)}
    for name, together in groups.items():
        first = min(together, key=lambda n: rank.get(n, (True, len(rank))))
        stage = placed[first]
        if placed.setdefault(name, stage) != stage:
            if not auto:
                log.warn_rank0(
                    "module '%s' shares a parameter with '%s' and is placed with it on stage %s, not on stage %s",
                    name,
                    first,
                    stage,
                    placed[name],
                )
            placed[name] = stage


def _settle(root: nn.Module, placed: dict[str, int]) -> Assignment:
    """From the stages of parameters to those of modules: one whose parameters all lie on one stage lives there."""
    modules: dict[str, int | None] = {}
    own: dict[str, int] = {}

    def visit(name: str, module: nn.Module, inherited: int) -> set[int]:
        stage = placed.get(name, inherited)
        found = {stage} if next(module.parameters(recurse=False), None) is not None else set()
        for child_name, child in module.named_children():
            found |= visit(f"{name}.{child_name}" if name else child_name, child, stage)
        modules[name] = next(iter(found)) if len(found) == 1 else None
        own[name] = stage
        return found

    visit("", root, 0)
    for name in list(modules):  # below a module that lives on one stage, so does everything
        parent = name.rpartition(".")[0]
        if name and modules.get(parent) is not None:
            modules[name] = modules[parent]
    # a module reached under several names
    aliases = {id(module): name for name, module in root.named_modules()}
    for name, module in root.named_modules(remove_duplicate=False):
        first = aliases[id(module)]
        modules.setdefault(name, modules.get(first))
        own.setdefault(name, own.get(first, 0))
    return Assignment(modules, own)
