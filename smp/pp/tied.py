"""Tied weights: one Parameter that modules of several stages use, such as a token table and a language model's head.

Kept together                             replicated
  stage 0   table, head  <---- hidden       stage 0   table (W)
  stage 1   blocks       -----^             stage 1   blocks, head (W)      dW = sum over both, once per step

Replicated means: the Parameter has its memory on every stage whose modules use it (its *holders*), the gradient is
summed over them before the update, so the copies stay equal bit by bit, and the first holder counts it. Which ones may
be replicated is decided before the partition; whether one is follows from where its modules end up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from smp import log
from smp.errors import StepError
from smp.pp.placed import Value
from smp.tp.registry import used_parameters

Policy = bool | Literal["auto"]


@dataclass(frozen=True, eq=False)
class Shared:
    """A parameter and the modules that have it, or were registered for it, in the order of the module tree."""

    parameter: nn.Parameter
    users: tuple[tuple[str, nn.Module], ...]  # each module once, under its first name


def shared_parameters(root: nn.Module) -> list[Shared]:
    """The parameters that more than one module uses."""
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, module in root.named_modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        for parameter in {id(p): p for p in [*own, *used_parameters(module)]}.values():
            users.setdefault(id(parameter), []).append((name, module))
            parameters[id(parameter)] = parameter
    return [Shared(parameters[key], tuple(found)) for key, found in users.items() if len(found) > 1]


def obstacle(shared: Shared) -> str | None:
    """Why copies of this parameter could not be kept equal; None when they can."""
    for name, module in shared.users:
        if getattr(module, "max_norm", None) is not None:
            return f"'{name}' renormalises its rows in its forward (max_norm), which only one stage would see"
        if getattr(module, "sparse", False) is True:
            return f"'{name}' gives it sparse gradients, which cannot be summed over stages"
    return None


def replicable(root: nn.Module, policy: Policy, by_hand: Mapping[str, int], quiet: bool = False) -> frozenset[int]:
    """Ids of the parameters whose users the partition need not keep together.

    Pure, apart from a warning, which `quiet` leaves out. `by_hand`: name of each module placed by hand -> its stage.
    With the policy "auto" those whose users were placed by hand on different stages; whether others pay is for a
    simulation of the step to say, which compares this set with that of True.
    """
    if policy is False:
        return frozenset()
    found = set()
    for shared in shared_parameters(root):
        stages = {by_hand[name] for name, _ in shared.users if name in by_hand}
        if policy == "auto" and len(stages) < 2:
            continue
        why = obstacle(shared)
        if why is None:
            found.add(id(shared.parameter))
        elif not quiet:
            log.warn_rank0(
                "the weight that %s share is not replicated: %s. Its modules are placed on one stage",
                " and ".join(f"'{name}'" for name, _ in shared.users),
                why,
            )
    return frozenset(found)


def exchange_bytes(root: nn.Module, stage_of_module: Callable[[str], int]) -> int:
    """What a stage sends and receives in a step so that its copies stay equal: every tied gradient there and back, for
    each stage beyond the first."""
    total = 0
    for shared in shared_parameters(root):
        stages = {stage_of_module(name) for name, _ in shared.users}
        if shared.parameter.requires_grad:
            total += 2 * shared.parameter.nbytes * (len(stages) - 1)
    return total


# What glue code reads


def replica_values(value: Value, holders: Sequence[int], rank: int) -> dict[int, Value]:
    """The values that a tied parameter is on its holders other than `value.owner`: nothing has to be moved there."""
    found = {}
    for stage in holders:
        if stage != value.owner:
            local = value.parameter if stage == rank else None
            replica = found[stage] = Value(
                stage, value.program, value.shape, value.stride, value.dtype, value.requires_grad, local
            )
            replica.parameter = value.parameter
    return found


def owner_of_call(operands: Sequence[Value], holders_of: Callable[[Any], Sequence[int]]) -> int:
    """Where a call runs: where its largest operand lives, of equal ones that made last.

    When that is a tied parameter, it is on several stages: then where the largest of the others lives, if the parameter
    is there, else on its first holder.
    """
    largest = max(operands, key=_weight)
    holders = holders_of(largest.parameter)
    if len(holders) > 1:
        others = [value for value in operands if len(holders_of(value.parameter)) < 2]
        if others and (owner := max(others, key=_weight).owner) in holders:
            return owner
    return largest.owner


def _weight(value: Value) -> tuple[int, int]:
    return value.numel, value.order


def refuse_write(holders: Sequence[int], line: str) -> None:
    """Raises `StepError` when glue code has changed a parameter in place that several stages hold."""
    if len(holders) > 1:
        raise StepError(
            f"{line} changes a weight in place that the stages {list(holders)} hold, which only one of them would see. "
            "Do it outside of the step function, on every rank, or set 'replicate_tied' to False."
        )
