"""Carries the parameters of a module of another library into its distributed twin, by the family's table of names.

    plan   which parameters become which, checked: every one of theirs must be wanted, and fit
    carry  the values of tp_rank 0, each rank its part. A Parameter object stays; of several that become one, the first:

               q_proj.weight --+
               k_proj.weight --+--> attention.qkv.weight   is q_proj's object; the others are left empty, and optimizers
               v_proj.weight --+                           let go of them (`is_merged`)

Delayed parameters have no values yet. Shells of theirs stay behind in the old module, which knows how to initialise
them; `delayed.materialize` makes ours from those.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smp.activation import mark_checkpointed
from smp.errors import PartitionError
from smp.tp import delayed
from smp.tp.families import Replacement, Rule, fill, pattern_of
from smp.tp.layouts import SAME
from smp.tp.module import DistributedModule
from smp.tp.origin import Names, Origin, remember
from smp.tp.shard import spec_of

_MERGED = "_smp_merged"
_NOT_CARRIED = ("_smp_arguments", "_smp_tensor_parallelism")  # about the class that the module had


@dataclass(frozen=True)
class Move:
    """Parameters of the old module that become one of the twin.

    Attributes:
        ours: its name in the twin.
        theirs: their names in the old module.
        rule: says how they differ.
    """

    ours: str
    theirs: tuple[str, ...]
    rule: Rule


def is_merged(param: Tensor) -> bool:
    """Whether a Parameter object has become part of another one."""
    return hasattr(param, _MERGED)


def plan(twin: DistributedModule, module: nn.Module, replacement: Replacement) -> list[Move]:
    """What becomes what.

    Raises:
        PartitionError: the module is not as its class makes it: a parameter has no counterpart, or another shape.
    """
    theirs = dict(module.named_parameters(remove_duplicate=False))
    config = replacement.config(module)
    moves: list[Move] = []
    for name, param in twin.named_parameters():
        move = _move(name, replacement.rules, theirs)
        for source in move.theirs:
            if source not in theirs:
                raise PartitionError(f"it has no parameter {source}, from which {name} of its twin would come")
        _check(move, [theirs[source] for source in move.theirs], param, config)
        moves.append(move)
    carried = {id(theirs[source]) for move in moves for source in move.theirs}
    more = sorted(name for name, param in theirs.items() if id(param) not in carried)
    if more:
        raise PartitionError(f"its twin has no counterpart for {', '.join(more[:4])} (adapters add such)")
    return moves


def _move(name: str, rules: Sequence[Rule], theirs: Container[str]) -> Move:
    """By the rule whose names the module has; several may make one parameter, where versions of a library differ."""
    moves = []
    for rule in rules:
        match = pattern_of(rule.ours).fullmatch(name) if rule.ours is not None else None
        if match is not None:
            moves.append(Move(name, tuple(fill(source, match.groups()) for source in rule.sources), rule))
    assert moves, f"no rule for {name}"
    return next((move for move in moves if all(source in theirs for source in move.theirs)), moves[0])


def _check(move: Move, params: Sequence[nn.Parameter], ours: nn.Parameter, config: Any) -> None:
    names = ", ".join(move.theirs)
    spec = spec_of(ours)
    wanted = tuple(spec.global_shape if spec is not None else ours.shape)
    shells = [torch.empty(param.shape, device="meta") for param in params]
    try:
        shape = tuple(move.rule.layout.merge(shells, config).shape)
    except RuntimeError as error:
        raise PartitionError(f"{names} cannot become {move.ours}: {error}") from error
    if shape != wanted:
        raise PartitionError(f"{names} would become {move.ours} of shape {shape}, its twin needs {wanted}")
    first = params[0]
    for what, same in {
        "requires_grad": all(param.requires_grad == first.requires_grad for param in params),
        "dtype": all(param.dtype == first.dtype for param in params),
        "delayed initialisation": len({delayed.is_delayed(param) for param in params}) == 1,
    }.items():
        if not same:
            raise PartitionError(f"{names} become one parameter, but differ in {what}")


@torch.no_grad()
def carry(
    twin: DistributedModule,
    module: nn.Module,
    replacement: Replacement,
    moves: Sequence[Move],
    names: Names,
) -> None:
    """Does what was planned; `names` are the canonical ones. Collective over the tensor-parallel group."""
    config = replacement.config(module)
    for move in moves:
        owners = [_owner(module, source) for source in move.theirs]
        params = [_parameter(owner, leaf) for owner, leaf in owners]
        if move.rule.layout is not SAME:
            remember(params[0], _origin(params, move.rule, config, names))
            merge = partial(_merge, move.rule, config)
            if delayed.is_delayed(params[0]):
                _leave_shells(owners, params, merge)
            else:
                _join(params, merge)
        twin.adopt(move.ours, params[0])


def _origin(params: Sequence[nn.Parameter], rule: Rule, config: Any, names: Names) -> Origin:
    sources, shapes = [names[id(param)][0] for param in params], [tuple(param.shape) for param in params]
    return Origin(tuple(rule.layout.blocks(sources, shapes, config)), dict(zip(sources, shapes)))


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _parameter(owner: nn.Module, leaf: str) -> nn.Parameter:
    param = owner._parameters[leaf]
    assert param is not None
    return param


def _merge(rule: Rule, config: Any, tensors: Sequence[Tensor]) -> Tensor:
    return rule.layout.merge(tensors, config).contiguous()


def _join(params: Sequence[nn.Parameter], merge: Any) -> None:
    """The first parameter gets the values and gradients of all of them, the others keep nothing."""
    first = params[0]
    gradients = [param.grad for param in params if param.grad is not None]
    for param in params:
        param.grad = None
    first.data = merge([param.data for param in params])
    if len(gradients) == len(params):
        first.grad = merge(gradients)
    for param in params[1:]:
        param.data = param.data.new_empty(0)
        setattr(param, _MERGED, True)


def _leave_shells(owners: Sequence[tuple[nn.Module, str]], params: Sequence[nn.Parameter], merge: Any) -> None:
    """Puts shells of the parameters into the old module and makes the first parameter a shell of ours."""
    shells = []
    for (owner, leaf), param in zip(owners, params):
        shell = nn.Parameter(torch.empty_like(param.data), requires_grad=param.requires_grad)
        owner._parameters[leaf] = shell
        shells.append(shell)
    for param in params[1:]:
        param.data = param.data.new_empty(0)
        setattr(param, _MERGED, True)
    params[0].data = merge([shell.data for shell in shells])
    delayed.remember_sources(params[0], shells, merge)


def carry_marks(twin: nn.Module, module: nn.Module, modules: Sequence[tuple[str, str]]) -> list[str]:
    """What other parts of smp have left on modules inside (a stage, activation checkpointing) goes over to those of the
    twin; so does the activation checkpointing of transformers. Returns the names of the modules that have no
    counterpart."""
    theirs = dict(module.named_modules())
    _carry_checkpointing(twin, module)
    lost = [name for name in theirs if name]
    for ours, target in twin.named_modules():
        for source in _counterparts(ours, modules):
            if source in theirs:
                for name, value in theirs[source].__dict__.items():
                    if name.startswith("_smp_") and name not in _NOT_CARRIED:
                        target.__dict__.setdefault(name, value)
                _carry_checkpointing(target, theirs[source])
                if source in lost:
                    lost.remove(source)
    return lost


def _carry_checkpointing(target: nn.Module, source: nn.Module) -> None:
    """`gradient_checkpointing_enable()` of a model of transformers leaves a flag on its layers, which heed it."""
    heeds = any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(source).__mro__)
    if heeds and getattr(source, "gradient_checkpointing", False):
        mark_checkpointed(target)


def _counterparts(ours: str, modules: Sequence[tuple[str, str]]) -> list[str]:
    found = []
    for source, target in modules:
        match = pattern_of(target).fullmatch(ours)
        if match is not None:
            found.append(fill(source, match.groups()))
    return found
