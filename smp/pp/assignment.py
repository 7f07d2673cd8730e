"""The decision which module goes to which stage: made on one rank, told to all, kept in a file, shown as a table.

world rank 0                          all ranks
  1. trace, or read partition_file
  2. assign
  3. write partition_file
               --- the decision, or the error --->   4. the same `Decision`, or the same exception
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from smp.activation import is_checkpointed
from smp.config import Config
from smp.errors import PartitionError
from smp.pp.choose import BANDWIDTH, Layout, choose, placement_of, policies_of
from smp.pp.cost import ZERO, Costs, ModuleCost
from smp.pp.measure import measure
from smp.pp.partition import Assignment, Balance, Placement, assign, memory_bytes, pin_of, placed_by_hand
from smp.pp.simulate import Policy
from smp.pp.stages import StageMap
from smp.pp.tied import exchange_bytes, obstacle, replicable, shared_parameters
from smp.pp.trace import trace
from smp.runtime import Runtime
from smp.topology import CommGroup

_FORMAT = 1
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Decision:
    """What all ranks go by. `costs` is None when the model was not or could not be traced; `policy` is how steps are
    scheduled, `forecast` what that is expected to give, for the table."""

    assignment: Assignment
    costs: Costs | None
    policy: Policy = Policy.INTERLEAVED
    forecast: str | None = None


def decide(module: nn.Module, rt: Runtime, call: Call | None, times: bool = False, memory: bool = False) -> Decision:
    """The decision of world rank 0. Collective over the world.

    Args:
        module: the model, after tensor-parallel replacement.
        rt: the runtime; its configuration says how to decide.
        call: arguments of the model's first call; None when they are not known.
        times: whether execution times are measured.
        memory: whether the memory kept for the backward is measured.

    Raises:
        PartitionError: on every rank, when world rank 0 could not decide.
    """
    config = rt.config
    times = times or config.use_times
    costs = None
    # Tensor-parallel layers need their peers to be measured, so every first stage measures.
    taking_part = rt.pp_rank == 0 if times or memory else rt.rank == 0
    if taking_part and call is not None and not config.skip_tracing and not config.load_partition:
        costs = trace(module, *call, device=rt.device, recomputed=is_checkpointed)
        if costs is not None and (times or memory):
            costs = measure(module, *call, costs, times, memory) or costs
    outcome: Decision | PartitionError | None = None
    if rt.rank == 0:
        try:
            outcome = _decide_alone(module, rt, costs)
        except PartitionError as error:
            outcome = error
    outcome = rt.transport.broadcast_object(outcome, rt.group(CommGroup.WORLD), 0, "partition")
    if isinstance(outcome, PartitionError):
        raise outcome
    assert isinstance(outcome, Decision)
    return outcome


def _decide_alone(module: nn.Module, rt: Runtime, costs: Costs | None) -> Decision:
    config = rt.config
    degrees = {
        "pipeline_parallel_degree": rt.topology.pp_size,
        "tensor_parallel_degree": rt.topology.tp_size,
        "virtual_stages": config.virtual_stages,
    }
    if config.load_partition:
        assert config.partition_file is not None  # checked with the configuration
        stored = load(config.partition_file, module, degrees)
        _check_ties(config, module, stored.assignment)
        return _scheduled(module, rt, [Layout(stored.assignment, config.virtual_stages, "loop")], stored.costs)
    by_hand = placed_by_hand(module, config.auto_partition)
    apart = [replicable(module, config.replicate_tied, by_hand)]
    choosing = config.auto_partition and costs is not None
    if config.replicate_tied == "auto" and choosing:
        apart += {replicable(module, True, by_hand, quiet=True)} - {*apart}

    def layouts_of(virtual_stages: int, placement: Placement) -> list[Layout]:
        balance = Balance(config.memory_weight, virtual_stages, placement)
        found: list[Layout] = []
        for replicated in apart:
            try:
                assignment = assign(
                    *(module, rt.topology.pp_size, config.auto_partition, config.default_partition, costs, balance),
                    replicable=replicated,
                )
            except PartitionError:  # too few modules, which may be more when those that share a weight are taken apart
                if found or replicated is not apart[-1]:
                    continue
                raise
            exchange = exchange_bytes(module, assignment.stage_of) / BANDWIDTH
            found.append(Layout(assignment, virtual_stages, placement, exchange))
        return found

    layouts = layouts_of(config.virtual_stages, placement_of(config.pipeline, config.virtual_stages))
    if config.pipeline == "auto" and choosing and config.virtual_stages == 1:
        with contextlib.suppress(PartitionError):  # too few modules for more chunks
            layouts += [*layouts_of(2, "loop"), *layouts_of(2, "v")]
    decision = _scheduled(module, rt, layouts, costs)
    if config.partition_file is not None:
        save(config.partition_file, module, degrees, decision)
    return decision


def _check_ties(config: Config, module: nn.Module, assignment: Assignment) -> None:
    for shared in shared_parameters(module):
        if len({assignment.stage_of(name) for name, _ in shared.users}) > 1:
            why = "'replicate_tied' is False" if config.replicate_tied is False else obstacle(shared)
            if why is not None:
                names = " and ".join(f"'{name}'" for name, _ in shared.users)
                raise PartitionError(
                    f"partition_file {config.partition_file!r} takes {names} apart, which share a weight, but {why}."
                )


# -- file --------------------------------------------------------------------------------------------------------------


def _scheduled(module: nn.Module, rt: Runtime, layouts: list[Layout], costs: Costs | None) -> Decision:
    """The layout and policy that a simulated step is fastest with."""
    policies = policies_of(rt.config.pipeline)
    if costs is None or rt.config.microbatches == 1:
        return Decision(layouts[0].assignment, costs, policies[0])
    best = choose(layouts, policies, costs, rt)
    return Decision(best.layout.assignment, costs, best.policy, str(best))


def save(path: str | os.PathLike[str], module: nn.Module, degrees: dict[str, int], decision: Decision) -> None:
    """Writes a decision as JSON; a reader finds the old file or the new one, never a part of it.

    Raises:
        PartitionError: the file cannot be written.
    """
    parameters = _parameters(module)
    content = {
        "format": _FORMAT,
        "fingerprint": _fingerprint(parameters),
        "degrees": degrees,
        "assignment": decision.assignment.modules,
        "own": decision.assignment.own,
        "costs": None if decision.costs is None else _costs_to_json(decision.costs),
        "parameters": parameters,
    }
    aside = Path(f"{os.fspath(path)}.{os.getpid()}.tmp")
    try:
        with open(aside, "w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise PartitionError(f"partition_file {os.fspath(path)!r} cannot be written: {error}") from error


def load(path: str | os.PathLike[str], module: nn.Module, degrees: dict[str, int]) -> Decision:
    """Reads a decision and checks that it is one about this model.

    Raises:
        PartitionError: the file is missing or damaged, was made for another model (the parameters that differ are
            named) or other degrees, or says otherwise than smp.set_partition.
    """
    where = f"partition_file {os.fspath(path)!r}"
    try:
        content = json.loads(Path(path).read_text())
        if content["format"] != _FORMAT:
            raise PartitionError(f"{where} has format {content['format']!r}; this version reads format {_FORMAT}.")
        parameters = _parameters(module)
        _check_same_model(where, content["parameters"], parameters)
        if content["fingerprint"] != _fingerprint(parameters):
            raise ValueError("its fingerprint is not that of its parameters")
        different = [
            f"{key} {content['degrees'].get(key)}" for key, n in degrees.items() if content["degrees"].get(key) != n
        ]
        if different:
            raise PartitionError(
                f"{where} was made for {', '.join(different)}; this run has "
                f"{', '.join(f'{key} {n}' for key, n in degrees.items())}."
            )
        modules = {str(name): None if stage is None else int(stage) for name, stage in content["assignment"].items()}
        own = {str(name): int(stage) for name, stage in content["own"].items()}
        costs = None if content["costs"] is None else _costs_from_json(content["costs"])
    except OSError as error:
        raise PartitionError(f"{where} cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PartitionError(f"{where} is damaged: {type(error).__name__}: {error}") from error
    assignment = Assignment(modules, own)
    _check_covers(where, module, assignment, degrees["pipeline_parallel_degree"])
    return Decision(assignment, costs)


def _parameters(module: nn.Module) -> dict[str, list[int]]:
    return {name: list(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}


def _fingerprint(parameters: dict[str, list[int]]) -> str:
    return hashlib.sha256(json.dumps(sorted(parameters.items())).encode()).hexdigest()


def _check_same_model(where: str, stored: dict[str, list[int]], present: dict[str, list[int]]) -> None:
    problems = [f"'{name}' is not in this model" for name in stored if name not in present]
    problems += [f"'{name}' is not in the file" for name in present if name not in stored]
    problems += [
        f"'{name}' has shape {present[name]} and was {stored[name]}"
        for name in stored
        if name in present and stored[name] != present[name]
    ]
    if problems:
        more = f", and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise PartitionError(f"{where} belongs to another model: {'; '.join(problems[:4])}{more}.")


def _check_covers(where: str, module: nn.Module, assignment: Assignment, num_stages: int) -> None:
    for name, part in module.named_modules(remove_duplicate=False):
        if name not in assignment.modules or name not in assignment.own:
            raise PartitionError(f"{where} belongs to another model: module '{name}' is not in the file.")
        stages = {assignment.modules[name], assignment.own[name]} - {None}
        if any(not 0 <= stage < num_stages for stage in stages if stage is not None):
            raise PartitionError(f"{where} is damaged: module '{name}' lies on stage {max(filter(None, stages))}.")
        pin = pin_of(part)
        if pin is not None and next(part.parameters(), None) is not None:
            stage = assignment.modules[name] if assignment.modules[name] is not None else assignment.own[name]
            if stage != pin:
                raise PartitionError(
                    f"{where} places module '{name}' on stage {stage}, smp.set_partition on stage {pin}. Remove one of "
                    "them."
                )


def _costs_to_json(costs: Costs) -> dict[str, Any]:
    return asdict(costs) | {"whole": sorted(costs.whole), "recomputed": sorted(costs.recomputed)}


def _costs_from_json(content: dict[str, Any]) -> Costs:
    return Costs(
        order=tuple(content["order"]),
        own={name: ModuleCost(**cost) for name, cost in content["own"].items()},
        charged={name: ModuleCost(**cost) for name, cost in content["charged"].items()},
        near=content["near"],
        whole=frozenset(content["whole"]),
        opaque=content["opaque"],
        recomputed=frozenset(content["recomputed"]),
        shapes={name: tuple(map(tuple, shapes)) for name, shapes in content["shapes"].items()},
        measured=content["measured"],
    )


# -- table -------------------------------------------------------------------------------------------------------------


def table(root: nn.Module, stages: StageMap, num_stages: int, costs: Costs | None, forecast: str | None = None) -> str:
    """What rank 0 prints at the first step: for each stage its parameters, shares and modules.

    Args:
        root: the model.
        stages: where its modules and parameters are.
        num_stages: how many stages there are.
        costs: what a trace found out; None: there are no shares of time.
        forecast: what a planner expects of a step; None: the nominal seconds of the costliest stage.
    """
    count = [0] * num_stages
    nbytes = [0] * num_stages
    for name, parameter in root.named_parameters():
        count[stages.stage_of[name]] += parameter.numel()
        for holder in stages.holders[name]:
            nbytes[holder] += parameter.numel() * parameter.element_size()
    spent = [ZERO] * num_stages
    for name, cost in costs.charged.items() if costs is not None else ():
        stage = stages.assignment.get(name)
        spent[stages.own_stage.get(name, 0) if stage is None else stage] += cost
    memory = [memory_bytes(cost, size, num_stages) for cost, size in zip(spent, nbytes, strict=True)]
    names: list[list[str]] = [[] for _ in range(num_stages)]
    for name, part in stages.nodes():
        if next(part.parameters(), None) is not None:
            names[stages.assignment[name] or 0].append(name or type(root).__name__)
    seconds = [cost.seconds for cost in spent]
    rows = [
        (
            str(stage),
            f"{count[stage]:,}",
            _share(seconds, stage),
            _share(memory, stage),
            ", ".join(compressed(names[stage])),
        )
        for stage in range(num_stages)
    ]
    lines = _aligned([("stage", "parameters", "compute", "memory", "modules"), *rows])
    if forecast is None and costs is not None:
        kind = "measured" if costs.measured else "nominal"
        forecast = (
            f"one microbatch computes for {sum(seconds) * 1e3:.3g} {kind} ms, {max(seconds) * 1e3:.3g} ms of them on "
            f"stage {seconds.index(max(seconds))}"
        )
    for name, _, holders in stages.tied_parameters():
        lines.append(f"{name} is held by the stages {', '.join(map(str, holders))} and counted on {holders[0]}")
    return "\n".join(["Partition assignments:", *lines, *([f"forecast: {forecast}"] if forecast else [])])


def _share(values: list[float], index: int) -> str:
    return f"{100 * values[index] / sum(values):.1f} %" if sum(values) else "-"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths)), row[-1] or "(no module)"]) for row in rows
    ]


def compressed(names: Iterable[str]) -> list[str]:
    """`h.0`, `h.1`, `h.2`, `head` -> `h.0-2`, `head`: runs of numbered modules in one word each."""
    found: list[tuple[str, int, int] | str] = []
    for name in names:
        match = re.fullmatch(r"(.*\.|)(\d+)", name)
        if match is None:
            found.append(name)
            continue
        prefix, number = match[1], int(match[2])
        last = found[-1] if found else ""
        if isinstance(last, tuple) and last[0] == prefix and last[2] == number - 1:
            found[-1] = (prefix, last[1], number)
        else:
            found.append((prefix, number, number))
    return [
        item if isinstance(item, str) else f"{item[0]}{item[1]}" + (f"-{item[2]}" if item[2] > item[1] else "")
        for item in found
    ]
