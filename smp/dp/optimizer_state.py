"""Optimizer state of a model spread over ranks: named, gathered into the whole, and taken apart again.

torch keys optimizer state by position, and positions differ by rank once each rank holds its own stage only. So in
between everything goes by the parameter's name in the user's module:

    this rank's optimizer      {0: {exp_avg}, 1: ..}                    positions on this rank
        <-> entries            {"layers.3.weight": {exp_avg}}           this rank's parts
        <-> entries of a stage {"layers.3.weight": .., 4.weight ..}     with sharded state: gathered from the owners
        <-> whole entries      {"layers.0.weight": ..., all of them}    merged over tp, gathered over stages
        <-> full state dict    {0: .., 57: ..}                          positions in the whole model's optimizer

A **layout** is the names of a whole optimizer's parameters, group by group, in order.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from smp import runtime
from smp.comm.entry import Result, raise_alike, together
from smp.dp.ownership import counts, ownership_of
from smp.dp.state_exchange import Key, exchange
from smp.errors import CheckpointError, UsageError
from smp.pp.stages import StageMap
from smp.runtime import Runtime
from smp.topology import CommGroup
from smp.tp.shard import ShardSpec, spec_of

PARTIAL_KEY = "_smp_is_partial"
NAMES_KEY = "_smp_param_names"
MASTERS_KEY = "_smp_fp32_masters"
_CUT = "_smp_cut"  # beside a parameter's state on its way: its ShardSpec and the shape of its part
MASTER_KEY = "fp32_master"  # of a parameter's state, while its master is gathered, cut and moved with it

Layout = list[list[str]]
Entries = dict[str, dict[str, Any]]


# State of torch's optimizers that has the shape of its parameter.
_LIKE_THE_PARAMETER = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", MASTER_KEY)


def merge_layouts(layouts: Sequence[Layout], module_order: Sequence[str]) -> Layout:
    """The whole optimizer's layout from what each rank of a replica knows.

    A rank whose optimizer was made from all parameters of the model knows it, order included; where every optimizer
    was made from its stage's parameters, their union in the module's order is what one process would have had.
    """
    place = {name: number for number, name in enumerate(module_order)}
    merged: Layout = []
    for number in range(max((len(layout) for layout in layouts), default=0)):
        groups = [layout[number] for layout in layouts if number < len(layout)]
        union = dict.fromkeys(name for group in groups for name in group)
        whole = next((group for group in groups if len(group) == len(union)), None)
        merged.append(list(whole) if whole is not None else sorted(union, key=lambda name: place.get(name, len(place))))
    return merged


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def full_groups(optimizer: Optimizer, layout: Layout) -> list[dict[str, Any]]:
    """The `param_groups` of a full state dict: options of `optimizer`'s groups, positions by `layout`."""
    groups, start = [], 0
    for group, names in zip(optimizer.param_groups, layout):
        full = options_of(group)
        if "param_names" in group:
            full["param_names"] = list(names)
        full["params"] = list(range(start, start + len(names)))
        groups.append(full)
        start += len(names)
    return groups


def gather(
    rt: Runtime, optimizer: Optimizer, names: Mapping[int, str], layout: Layout, to_rank0: bool = False
) -> dict[int, dict[str, Any]]:
    """The whole state by full position, in host memory, on every rank of the group, which all call this: the mp group,
    or with sharded state the world. With `to_rank0` on rank 0 only.

    `names`: id of a parameter on this rank -> its name. Nobody holds more than the result and one parameter's state.
    """
    group = rt.group(CommGroup.MP_GROUP if ownership_of(rt) is None else CommGroup.WORLD)
    offers: dict[Key, dict[str, Any]] = {}
    for param in _parameters(optimizer):
        if (state := optimizer.state.get(param)) and counts(rt, param):
            spec = spec_of(param)
            offers[names[id(param)], None if spec is None else rt.tp_rank] = {**state, _CUT: (spec, tuple(param.shape))}
    position = {name: number for number, name in enumerate(name for group_names in layout for name in group_names)}
    whole: dict[int, dict[str, Any]] = {}
    error: Exception | None = None
    arriving = exchange(rt, group, offers, [] if to_rank0 and rt.rank != 0 else None)
    for name, parts in itertools.groupby(arriving, lambda item: item[0][0]):
        try:
            whole[position[name]] = _merge(name, [part for _, part in parts])
        except CheckpointError as problem:
            error = error or problem
    raise_alike(rt, group, error)
    return dict(sorted(whole.items()))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _merge(name: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One parameter's whole state from its parts, in any order."""
    spec: ShardSpec | None = parts[0][_CUT][0]
    by_part = {part[_CUT][0].part: part for part in parts} if spec is not None else {}
    merged = {}
    for key, value in parts[0].items():
        if key == _CUT:
            continue
        if spec is not None and isinstance(value, Tensor) and value.dim() > 0:
            wrong = [tuple(part[key].shape) for part in parts if tuple(part[key].shape) != part[_CUT][1]]
            if wrong:
                raise CheckpointError(
                    f"optimizer state {key!r} of the distributed parameter {name} has shape {list(wrong[0])}, which is "
                    "not the parameter's: how to merge it is not known. Use smp.save(partial=True)"
                )
            value = spec.merge([by_part[part][key] for part in range(spec.num_parts)])
        merged[key] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return merged


def gather_stage(
    rt: Runtime, optimizer: Optimizer, names: Mapping[int, str], groups: Sequence[Sequence[Tensor]]
) -> dict[str, Any]:
    """The partial state dict that this rank would have without sharding; collective over the stage's ranks (dp).

    `groups`: the parameters of the optimizer's groups that live on this stage. State of other owners comes in host
    memory.
    """
    key_of = {names[id(p)]: _key(rt, names[id(p)], p) for params in groups for p in params}
    offers = {}
    for param in _parameters(optimizer):
        if state := optimizer.state.get(param):
            offers[key_of[names[id(param)]]] = dict(state)  # a master is in it for the time of the call only
    entries = {
        key[0]: state for key, state in exchange(rt, rt.group(CommGroup.DP_GROUP), offers, list(key_of.values()))
    }
    layout = [[names[id(param)] for param in params] for params in groups]
    order = enumerate(name for group_names in layout for name in group_names)
    state = {position: entries[name] for position, name in order if name in entries}
    return {"state": state, "param_groups": full_groups(optimizer, layout), NAMES_KEY: layout, PARTIAL_KEY: True}


def _key(rt: Runtime, name: str, param: Tensor) -> Key:
    """Which state it is: tensor-parallel ranks have states of their own for parameters of distributed modules."""
    return name, rt.tp_rank if getattr(param, "_smp_scaled_batch", False) else None


def take_local(
    optimizer: Optimizer, names: Mapping[int, str], groups: Sequence[Mapping[str, Any]], entries: Mapping[str, Any]
) -> dict[str, Any]:
    """A state dict that `optimizer.load_state_dict` takes: options from `groups`, state from `entries` by name.

    Raises:
        CheckpointError: the groups are those of another kind of optimizer.
    """
    check_options(optimizer, groups)
    state, packed, start = {}, [], 0
    for group, saved in zip(optimizer.param_groups, groups):
        packed.append({**options_of(saved), "params": list(range(start, start + len(group["params"])))})
        for position, param in enumerate(group["params"], start):
            if entry := entries.get(names[id(param)]):
                state[position] = entry
        start += len(group["params"])
    return {"state": state, "param_groups": packed}


def check_options(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises CheckpointError when `groups` lack options of `optimizer`, beyond those that its class adds by itself to
    groups that older versions of it saved.
    """
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(optimizer.__dict__, defaults=dict(optimizer.defaults))
    trial.__setstate__({"state": {}, "param_groups": [{**group, "params": []} for group in groups]})
    # Loading adds defaults to an optimizer of torch's base class that its groups never had.
    wanted = optimizer.defaults.keys() & set.intersection(*(set(group) for group in optimizer.param_groups))
    for group in trial.param_groups:
        if lacking := sorted(wanted - group.keys()):
            raise CheckpointError(
                f"the saved optimizer has no option {', '.join(map(repr, lacking))}, which {type(optimizer).__name__} "
                "has: it was of another kind. Make the same one, or load without the optimizer's state "
                "(resume_from_checkpoint(load_optimizer=False))"
            )


def split_full(
    optimizer: Optimizer, names: Mapping[int, str], layout: Layout, state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """This rank's part of a full state dict, as one that `optimizer.load_state_dict` takes.

    One of ours says which position is whose: the order in which an optimizer was given the parameters may have changed
    since. One of a plain optimizer goes by position.

    Raises:
        CheckpointError: its groups do not have as many parameters as `layout`, or other ones, or other shapes.
    """
    saved = state_dict["param_groups"]
    lengths, expected = [len(group["params"]) for group in saved], [len(group) for group in layout]
    if lengths != expected:
        raise CheckpointError(
            f"the full optimizer state has parameter groups of {lengths} parameters, the model's optimizer has "
            f"{expected}: it was saved from another model or another grouping"
        )
    order = _saved_order(state_dict, layout)
    position_of = {
        name: position for group, names_of in zip(saved, order) for position, name in zip(group["params"], names_of)
    }
    entries: Entries = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            name = names[id(param)]
            state = state_dict["state"].get(position_of[name])
            if state is not None:
                _check_shapes(name, param, state)
                entries[name] = _split(param, state)
    return take_local(optimizer, names, saved, entries)


def _saved_order(state_dict: Mapping[str, Any], layout: Layout) -> Layout:
    """Names by position in the groups of a full state dict."""
    saved: Layout = state_dict.get(NAMES_KEY, layout)
    for theirs, ours in zip(saved, layout):
        if set(theirs) != set(ours):
            there, here = sorted(set(theirs) - set(ours)), sorted(set(ours) - set(theirs))
            raise CheckpointError(
                f"the full optimizer state is of other parameters: it has {', '.join(there[:3])}, the model has "
                f"{', '.join(here[:3])}; it was saved from another model, or with another choice of what is split"
            )
    return saved


def _check_shapes(name: str, param: Tensor, state: Mapping[str, Any]) -> None:
    spec = getattr(param, "_smp_shard", None)
    whole = tuple(param.shape if spec is None else spec.global_shape)
    for key in _LIKE_THE_PARAMETER:
        value = state.get(key)
        if isinstance(value, Tensor) and tuple(value.shape) != whole:
            raise CheckpointError(
                f"the full optimizer state has {key} of shape {tuple(value.shape)} for {name} of shape {whole}: its "
                "parameters are in another order, or of another model"
            )


def _split(param: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    spec = getattr(param, "_smp_shard", None)
    if spec is None:
        return dict(state)
    whole = tuple(spec.global_shape)
    return {
        key: spec.split(value) if isinstance(value, Tensor) and tuple(value.shape) == whole else value
        for key, value in state.items()
    }


def partial_state_dict(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """This rank's optimizer's own state dict, marked as partial, with the names behind its positions."""
    state_dict = optimizer.state_dict()
    state_dict[NAMES_KEY] = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    state_dict[PARTIAL_KEY] = True
    return state_dict


def take_out_masters(state_dict: dict[str, Any]) -> dict[int, Tensor]:
    """Masters by position from a state dict in which they are state, which is taken out of it."""
    masters, state = {}, {}
    for position, entry in state_dict["state"].items():
        if MASTER_KEY in entry:
            masters[position] = entry[MASTER_KEY]
        rest = {key: value for key, value in entry.items() if key != MASTER_KEY}
        if rest:  # torch takes an entry for a state that it can go on from
            state[position] = rest
    state_dict["state"] = state
    return masters


def masters_into_state(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The opposite: a state dict in which its masters are state."""
    masters = state_dict.get(MASTERS_KEY)
    if not masters:
        return state_dict
    state = dict(state_dict["state"])
    for position, name in names_by_position(state_dict).items():
        if name in masters:
            state[position] = {**state.get(position, {}), MASTER_KEY: masters[name]}
    return {**state_dict, "state": state}


def names_by_position(state_dict: Mapping[str, Any]) -> dict[int, str]:
    """Position in a state dict of ours -> name."""
    return {
        position: name
        for group, names in zip(state_dict["param_groups"], state_dict[NAMES_KEY])
        for position, name in zip(group["params"], names)
    }


def is_partial(rt: Runtime, state_dict: Mapping[str, Any]) -> bool:
    """Whether a state dict is a partial one, the same on all ranks, which all call this.

    Raises:
        CheckpointError: some have a partial one and some a full one; on all ranks.
    """
    group = rt.group(CommGroup.WORLD)
    mine = bool(state_dict.get(PARTIAL_KEY, False))
    partial = rt.transport.all_gather_object(mine, group) if group.size > 1 else [mine]
    if any(partial) and not all(partial):
        ranks = [rank for rank, flag in zip(group.ranks, partial) if flag]
        raise CheckpointError(f"the ranks {ranks} load a partial optimizer state, the others a full one")
    return mine


def split_partial(
    rt: Runtime, optimizer: Optimizer, names: Mapping[int, str], state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """What this rank needs of the partial state dicts that all ranks hold; all call this.

    Parameters may have been on another stage when they were saved, or with another owner: their state comes from there.

    Raises:
        CheckpointError: no rank has a parameter that this one needs, or its part has another shape; on all ranks.
    """
    known = agree(rt, lambda: _by_name(optimizer, names, state_dict))
    needed = {names[id(param)]: param for param in _parameters(optimizer)}
    of_model = dict(rt.model.module.named_parameters())

    def key(name: str) -> Key:
        return _key(rt, name, of_model[name]) if name in of_model else (name, rt.tp_rank)

    offers = {key(name): state for name, state in known.items()}
    missing = [key(name) for name in needed if name not in known]
    known |= {name: dict(state) for (name, _), state in exchange(rt, rt.group(CommGroup.WORLD), offers, missing)}

    def checked() -> dict[str, Any]:
        if missing := [name for name in needed if name not in known]:
            raise CheckpointError(
                f"the partial optimizer state has nothing about {missing[0]} (and {len(missing) - 1} more) of this "
                "stage: it was saved from another model, or with other degrees"
            )
        for name, param in needed.items():
            for key, value in known[name].items():
                if isinstance(value, Tensor) and value.dim() == param.dim() > 0 and value.shape != param.shape:
                    raise CheckpointError(
                        f"the partial optimizer state {key!r} of {name} has shape {list(value.shape)}, the parameter's "
                        f"part on this rank has {list(param.shape)}: it was saved with other degrees"
                    )
        return take_local(optimizer, names, state_dict["param_groups"], known)

    return agree(rt, checked)


def _by_name(optimizer: Optimizer, names: Mapping[int, str], state_dict: Mapping[str, Any]) -> Entries:
    """The state in a partial state dict by parameter name; empty for a parameter that was never updated."""
    groups = state_dict["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the partial optimizer state has {len(groups)} parameter groups, the optimizer has "
            f"{len(optimizer.param_groups)}"
        )
    saved_names: Layout = state_dict.get(NAMES_KEY) or _names_by_position(optimizer, names, state_dict)
    return {
        name: state_dict["state"].get(position, {})
        for saved, names_of_group in zip(groups, saved_names)
        for position, name in zip(saved["params"], names_of_group)
    }


def _names_by_position(optimizer: Optimizer, names: Mapping[int, str], state_dict: Mapping[str, Any]) -> Layout:
    """For a partial state dict without names: it must be this rank's, parameter by parameter."""
    mine = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    lengths = [len(group["params"]) for group in state_dict["param_groups"]]
    if lengths != [len(group) for group in mine]:
        raise CheckpointError(
            f"the partial optimizer state has parameter groups of {lengths} parameters, this rank's optimizer has "
            f"{[len(group) for group in mine]}"
        )
    return mine


def agree(rt: Runtime, make: Callable[[], Result]) -> Result:
    """What `make` gives; when it raises a CheckpointError on one rank, all ranks raise it."""

    def checked() -> Result:
        try:
            return make()
        except (KeyError, TypeError) as problem:
            raise CheckpointError(f"not an optimizer's state dict: {problem!r}") from problem

    return together(rt, checked)


def check_tied_options(rt: Runtime, optimizer: Optimizer, given: Sequence[Sequence[Tensor]]) -> None:
    """Sees that all stages that hold a tied weight update it alike. Collective over the pp group when there is one.

    `given`: the parameters of the optimizer's groups, also those that other ranks update.

    Raises:
        UsageError: they have it in groups of different options, or one has it in no group; on all ranks.
    """
    engine = getattr(rt.model, "engine", None)
    stages: StageMap | None = engine.stages if engine is not None else None
    tied = {id(parameter): name for name, parameter, _ in stages.tied_parameters()} if stages is not None else {}
    if stages is None or not tied:
        return
    mine: dict[str, str | None] = {name: None for name in tied.values() if stages.is_local(name)}
    for group, params in zip(optimizer.param_groups, given):
        options = repr(sorted(options_of(group).items()))
        mine |= {tied[id(p)]: options for p in params if tied.get(id(p)) in mine}
    seen: dict[str, dict[str | None, int]] = {}
    for stage, held in enumerate(rt.transport.all_gather_object(mine, rt.group(CommGroup.PP_GROUP))):
        for name, option in held.items():
            seen.setdefault(name, {}).setdefault(option, stage)
    for name, by_option in seen.items():
        if len(by_option) > 1:
            (first, a), (second, b), *_ = by_option.items()
            raise UsageError(
                f"the stages {a} and {b} hold the tied weight '{name}' and would update it differently: with {first} "
                f"and with {second} (None: not at all). Build the optimizer's groups by the parameters' names, or "
                "before the first step from all parameters"
            )


def drop_parameters(optimizer: Optimizer, keep: Callable[[Tensor], bool]) -> None:
    """Takes parameters out of the groups, in place, and their state with them. Groups stay, also when empty."""
    for group in optimizer.param_groups:
        kept = [keep(param) for param in group["params"]]
        for param, stays in zip(group["params"], kept):
            if not stays:
                optimizer.state.pop(param, None)
        for key in ("params", "param_names"):
            if key in group:
                group[key][:] = [item for item, stays in zip(group[key], kept) if stays]


def accept_empty_stages() -> None:
    """Lets `AdamW(model.parameters())` work on a rank whose stage has no parameters; torch refuses an empty list."""
    original = Optimizer.__init__
    if hasattr(original, "_smp_original"):
        return

    @functools.wraps(original)
    def __init__(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        if not isinstance(params, Tensor):
            params = list(params)
            if not params and _stage_is_empty():
                params = [{"params": []}]
        original(self, params, defaults)

    __init__._smp_original = original  # type: ignore[attr-defined]
    Optimizer.__init__ = __init__  # type: ignore[method-assign]


def _stage_is_empty() -> bool:
    model = runtime.get().model if runtime.is_initialized() else None
    return model is not None and model.partitioned and not any(True for _ in model.local_parameters())
