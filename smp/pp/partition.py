"""Which module goes to which stage: pins by hand, and an automatic balance of costs in execution order.

    smp.partition(1)                      recorded on modules while they are created; only without auto_partition
    smp.set_partition(module, 1)          always honoured
    auto_partition                        units in execution order, cut into contiguous stages so that the largest is
                                          as small as it can be

A unit is what cannot be divided: a module with parameters of its own, together with those that have to live where it
does. Modules without parameters live where their parent does.
"""

import functools
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from smp import log
from smp.errors import PartitionError
from smp.pp.cost import ZERO, Costs, ModuleCost, parameter_bytes
from smp.pp.split import Placement, Sequel, balanced, stage_of_chunk
from smp.pp.tree import ancestors, has_parameters, is_inside, join
from smp.tp.module import DistributedModule
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

    def stage_of(self, name: str) -> int:
        """The stage of a module, or of a glue module's own parameters."""
        stage = self.modules.get(name)
        return self.own.get(name, 0) if stage is None else stage


@dataclass(frozen=True)
class Balance:
    """What the automatic partition weighs.

    Attributes:
        memory_weight: how much memory counts, 0 to 1; the rest is time. Both are normalised to shares of the model.
        virtual_stages: how many chunks of the model each stage gets.
        placement: how chunks are laid on stages.
        tolerance: by how much the largest stage may exceed the smallest possible one so that fewer modules are torn.
    """

    memory_weight: float = 0.8
    virtual_stages: int = 1
    placement: Placement = "loop"
    tolerance: float = 0.01


def assign(
    root: nn.Module,
    num_stages: int,
    auto: bool,
    default: int,
    costs: Costs | None = None,
    balance: Balance = Balance(),
    replicable: Collection[int] = (),
) -> Assignment:
    """Assign every module of the tree.

    Pure: the same tree, pins and costs give the same result.

    Args:
        root: the model.
        num_stages: how many stages there are.
        auto: balance what is not pinned; else it goes to `default` or where `smp.partition` said.
        default: see above.
        costs: what a trace found out; None: parameters count, in the order of their definition.
        balance: what to weigh.
        replicable: ids of parameters that may live on several stages (see `smp.pp.tied`); modules that share any other
            one stay together.

    Raises:
        PartitionError: a pin that does not exist, or more stages than modules that could be spread over them.
    """
    _check_pins(root, num_stages)
    if auto:
        placed = _automatic(root, num_stages, costs, balance, replicable)
    else:
        placed = _by_hand(root, default)
        _join_shared(root, placed, replicable)
    return _settle(root, placed)


def _check_pins(root: nn.Module, num_stages: int) -> None:
    for name, module in root.named_modules():
        pin = pin_of(module)
        if pin is not None and pin >= num_stages:
            raise PartitionError(
                f"module '{name}' is placed on stage {pin}, but there are {num_stages} stages (0 to {num_stages - 1})."
            )


def pin_of(module: nn.Module) -> int | None:
    """The stage that `set_partition` put the module itself on."""
    return module.__dict__.get(_PINNED)


def pinned_stages(module: nn.Module) -> set[int]:
    """The stages on which parts of a module are placed by `set_partition`."""
    return {pin for pin in map(pin_of, module.modules()) if pin is not None}


def placed_by_hand(root: nn.Module, auto: bool) -> dict[str, int]:
    """Name -> stage of the modules that were placed by hand, themselves or by a module around them."""
    found: dict[str, int] = {}

    def visit(name: str, module: nn.Module, stage: int | None) -> None:
        pin = pin_of(module)
        stage = pin if pin is not None else stage if auto else module.__dict__.get(_CREATED, stage)
        if stage is not None:
            found[name] = stage
        for child_name, child in module.named_children():
            visit(join(name, child_name), child, stage)

    visit("", root, None)
    return found


# Below, `placed` gives each module that has parameters of its own the stage of those; it is keyed by the module's name.


def _by_hand(root: nn.Module, default: int) -> dict[str, int]:
    placed: dict[str, int] = {}

    def visit(name: str, module: nn.Module, stage: int) -> None:
        pin = pin_of(module)
        stage = pin if pin is not None else module.__dict__.get(_CREATED, stage)
        placed[name] = stage
        for child_name, child in module.named_children():
            visit(join(name, child_name), child, stage)

    visit("", root, default)
    return placed


# -- units -------------------------------------------------------------------------------------------------------------


@dataclass
class Unit:
    """Modules whose own parameters have to live on one stage.

    Attributes:
        names: the modules, in execution order.
        load: what they cost, as `Balance` weighs it: a share of the model.
        pin: the stage they are pinned to.
    """

    names: list[str]
    load: float = 0.0
    pin: int | None = None


def sharing_groups(root: nn.Module, replicable: Collection[int] = ()) -> list[set[str]]:
    """Names of modules that have to live on one stage because they share a parameter, or use a common one, that is not
    `replicable`."""
    sharing: dict[tuple[int, int], list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        for parameter in [*module.parameters(recurse=False), *used_parameters(module)]:
            alone = id(module) if id(parameter) in replicable else 0  # but all names of one module
            sharing.setdefault((id(parameter), alone), []).append(name)
    return _joined(sharing.values())


def _joined(sets: Iterable[Iterable[str]]) -> list[set[str]]:
    """Sets that have members in common become one."""
    group_of: dict[str, set[str]] = {}
    for names in sets:
        together = set(names).union(*(group_of.get(name, ()) for name in names))
        group_of.update(dict.fromkeys(together, together))
    return list({id(group): group for group in group_of.values()}.values())


def units_of(
    root: nn.Module, num_stages: int, costs: Costs | None, memory_weight: float, replicable: Collection[int] = ()
) -> list[Unit]:
    """What the automatic partition distributes, in execution order (of the first module of each unit).

    See `Balance` for `memory_weight`.
    """
    modules = dict(root.named_modules())
    names = _in_execution_order(root, costs.order if costs is not None else ())
    holders = [name for name in names if modules[name]._parameters.keys() or used_parameters(modules[name])]
    holders = [name for name in holders if _holds(modules[name])]
    known = set(holders)
    together: list[Iterable[str]] = [[name] for name in holders]
    together += [[name for name in group if name in known] for group in sharing_groups(root, replicable)]
    whole = [name for name, module in modules.items() if isinstance(module, DistributedModule) and module.on_one_stage]
    for outer in [*whole, *(costs.whole if costs is not None else ())]:
        together.append([name for name in holders if is_inside(name, outer)])
    pins = {name: _inherited_pin(name, modules) for name in holders}
    together += _with_what_runs_next(holders, modules, pins, costs)
    place = {name: i for i, name in enumerate(holders)}
    loads = _loads(holders, modules, num_stages, costs, memory_weight, replicable)
    for outer in costs.recomputed if costs is not None else ():
        inside = [name for name in holders if is_inside(name, outer)]
        if sum(loads[name] for name in inside) <= 1 / num_stages:  # torn, it would keep all of its activations
            together.append(inside)
    groups = sorted((sorted(group, key=place.__getitem__) for group in _joined(together)), key=lambda g: place[g[0]])
    return [
        Unit(group, sum(loads[name] for name in group), next((pins[n] for n in group if pins[n] is not None), None))
        for group in groups
    ]


def _holds(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None or bool(used_parameters(module))


def _inherited_pin(name: str, modules: dict[str, nn.Module]) -> int | None:
    """The pin of a module, or of the innermost one around it that has one."""
    return next((pin for at in (name, *ancestors(name)) if (pin := pin_of(modules[at])) is not None), None)


def _in_execution_order(root: nn.Module, order: Iterable[str]) -> list[str]:
    """All names of the tree, parents first, children in the order in which they, or what is inside, are first called.

    Those that are never called come last, in the order of their definition.
    """
    position: dict[str, int] = {}
    for index, name in enumerate(order):
        for at in (name, *ancestors(name)):  # containers are never called themselves
            position.setdefault(at, index)
    children: dict[str, list[str]] = {}
    for name, _ in root.named_modules():
        if name:
            children.setdefault(name.rpartition(".")[0], []).append(name)
    found: list[str] = []

    def visit(name: str) -> None:
        found.append(name)
        for child in sorted(children.get(name, ()), key=lambda n: position.get(n, len(position) + 1)):
            visit(child)

    visit("")
    return found


def _with_what_runs_next(
    holders: list[str], modules: dict[str, nn.Module], pins: dict[str, int | None], costs: Costs | None
) -> list[list[str]]:
    """The own parameters of a module that has others inside go with the module inside that they are used after, or else
    with the first one: alone they would not be worth a stage."""
    pairs = []
    for i, name in enumerate(holders):
        inside = next((n for n in holders[i + 1 :] if is_inside(n, name)), None)
        near = costs.near.get(name) if costs is not None else None
        near = near if near in pins else inside
        if near is not None and pins[near] == pins[name]:
            pairs.append([name, near])
    return pairs


def _loads(
    holders: list[str],
    modules: dict[str, nn.Module],
    num_stages: int,
    costs: Costs | None,
    memory_weight: float,
    replicable: Collection[int],
) -> dict[str, float]:
    seconds: dict[str, float] = dict.fromkeys(holders, 0.0)
    memory: dict[str, float] = {}
    seen: set[int] = set()
    for name in holders:
        fresh = [p for p in modules[name].parameters(recurse=False) if id(p) not in seen]
        seen.update(id(p) for p in fresh if id(p) not in replicable)
        cost = costs.charged.get(name, ZERO) if costs is not None else ZERO
        seconds[name] = cost.seconds
        memory[name] = memory_bytes(cost, parameter_bytes(fresh), num_stages)
    all_seconds, all_memory = sum(seconds.values()), sum(memory.values())
    weight = memory_weight if all_seconds else 1.0
    return {
        name: weight * memory[name] / (all_memory or 1.0) + (1 - weight) * seconds[name] / (all_seconds or 1.0)
        for name in holders
    }


def memory_bytes(cost: ModuleCost, parameters: int, num_stages: int) -> float:
    """What training a module takes: its parameters, their gradients and two moments of the optimizer, and the
    activations of as many microbatches as are in flight on a stage of average place."""
    return 4 * parameters + cost.activation_bytes * (num_stages + 1) / 2


# -- balance -----------------------------------------------------------------------------------------------------------


def _automatic(
    root: nn.Module, num_stages: int, costs: Costs | None, balance: Balance, replicable: Collection[int]
) -> dict[str, int]:
    units = units_of(root, num_stages, costs, balance.memory_weight, replicable)
    free = [unit for unit in units if unit.pin is None]
    base = [0.0] * num_stages
    for unit in units:
        if unit.pin is not None:
            base[unit.pin] += unit.load or 1e-12
    _check_count(root, num_stages, balance.virtual_stages, len(units), pinned=len(free) < len(units))
    stages: list[int] = []
    if free:
        sequel = Sequel(tuple(unit.load for unit in free), tuple(_penalties(root, free, costs)))
        chunks = balanced(sequel, num_stages, balance.virtual_stages, base, balance.placement, balance.tolerance)
        stages = [stage_of_chunk(chunk, num_stages, balance.placement) for chunk in chunks]
    placed: dict[str, int] = {}
    for unit, stage in [*zip(free, stages, strict=True), *((u, u.pin) for u in units if u.pin is not None)]:
        assert stage is not None
        placed.update(dict.fromkeys(unit.names, stage))
    return placed


def _check_count(root: nn.Module, num_stages: int, virtual_stages: int, count: int, pinned: bool) -> None:
    if pinned or count >= num_stages * virtual_stages or not has_parameters(root):
        return  # what is placed by hand may leave a stage empty
    chunks = f"pipeline_parallel_degree {num_stages}"
    if virtual_stages > 1:
        chunks += f" x virtual_stages {virtual_stages} = {num_stages * virtual_stages} parts"
    raise PartitionError(
        f"the model has {count} module{'s' * (count != 1)} that can be placed on their own, too few for {chunks}. "
        "(Modules without parameters stay with their parent, modules that share a parameter stay together.) Lower the "
        "degree, or place modules by hand with smp.set_partition."
    )


def _penalties(root: nn.Module, units: list[Unit], costs: Costs | None) -> list[float]:
    """Of a cut before each unit: how many modules it tears that are more than a list of modules, and, as a fraction,
    how much has to be sent there."""
    modules = dict(root.named_modules())
    torn = {name for name, module in modules.items() if name and not _is_container(module)}
    sent = [costs.own[u.names[0]].output_bytes if costs is not None and u.names[0] in costs.own else 0 for u in units]
    most = max(sent, default=0) or 1
    penalties = [0.0]
    for before, after, nbytes in zip(units, units[1:], sent):
        left, right = before.names[0], after.names[0]
        common = [at for at in (left, *ancestors(left)) if is_inside(right, at)]
        penalties.append(sum(at in torn for at in common) + 0.5 * nbytes / most)
    return penalties


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def _join_shared(root: nn.Module, placed: dict[str, int], replicable: Collection[int]) -> None:
    """Modules that share a parameter live on one stage: where one is pinned, else where the first was placed."""
    rank = {name: (pin_of(root.get_submodule(name)) is None, i) for i, name in enumerate(placed)}
    for together in sharing_groups(root, replicable):
        first = min(together, key=lambda n: rank.get(n, (True, len(rank))))
        stage = placed[first]
        for name in sorted(together):
            if placed.setdefault(name, stage) != stage:
                log.warn_rank0(
                    "module '%s' shares a parameter with '%s' and is placed with it on stage %s, not on stage %s",
                    *(name, first, stage, placed[name]),
                )
                placed[name] = stage


def _settle(root: nn.Module, placed: dict[str, int]) -> Assignment:
    """From the stages of parameters to those of modules: one whose parameters all lie on one stage lives there."""
    modules: dict[str, int | None] = {}
    own: dict[str, int] = {}
    aliases = {id(module): name for name, module in root.named_modules()}  # of one with several names, the first

    def visit(name: str, module: nn.Module, inherited: int) -> set[int]:
        stage = placed.get(name, placed.get(aliases[id(module)], inherited))
        found = {stage} if _holds(module) else set()
        for child_name, child in module.named_children():
            found |= visit(join(name, child_name), child, stage)
        modules[name] = next(iter(found)) if len(found) == 1 else None
        own[name] = stage
        return found

    visit("", root, 0)
    for name in list(modules):  # below a module that lives on one stage, so does everything
        parent = name.rpartition(".")[0]
        if name and modules.get(parent) is not None:
            modules[name] = modules[parent]
    for name, module in root.named_modules(remove_duplicate=False):
        first = aliases[id(module)]
        modules.setdefault(name, modules.get(first))
        own.setdefault(name, own.get(first, 0))
    return Assignment(modules, own)
