"""State dicts of a model that is spread over ranks: gathering the whole one, keeping the local one, loading either.

Names are those of the user's module. A tensor that several names share (tied weights) is one entry: gathered once,
loaded once. Its owner is a stage; the parts of a distributed parameter lie on the tensor-parallel ranks of that stage.

Gathering goes through the entries one by one, in the same order on every rank:

    owner stage, tp_rank 0     part 0 --+
    owner stage, tp_rank 1     part 1 --+-> ShardSpec.merge -> whole tensor on the ranks that want it

so a rank that only sends never holds more than its own shard and one tensor.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from smp import log, runtime, state_mod
from smp.comm.entry import enter_collective, raise_alike
from smp.comm.transport import Channel
from smp.dp.optimizer_state import PARTIAL_KEY
from smp.errors import CheckpointError, UsageError
from smp.runtime import Runtime
from smp.topology import CommGroup
from smp.tp.contexts import mark_of
from smp.tp.origin import extra_names, is_extra
from smp.tp.shard import ShardSpec, spec_of

_STATE_DICT_ADVICE = (
    "Call model.state_dict() on all ranks, or under `if smp.rdp_rank() == 0` (without tensor parallelism also "
    "`if smp.dp_rank() == 0`)."
)
_LOAD_ADVICE = "Call model.load_state_dict() on all ranks, under no condition."


class StatefulModel(Protocol):
    """What is asked of a `DistributedModel`."""

    module: nn.Module

    @property
    def stage_of(self) -> Mapping[str, int]: ...

    @property
    def partitioned(self) -> bool: ...

    def runs_module(self, name: str) -> bool:
        """Whether the module of that name runs on this rank's stage."""
        ...

    def owned(self, name: str) -> bool:
        """Whether the parameter or buffer of that name lives on this rank's stage."""
        ...

    def holders(self, name: str) -> tuple[int, ...]:
        """The stages on which the parameter or buffer of that name lives: several for a replicated tied weight."""
        ...


@dataclass(frozen=True)
class _Load:
    """What `load_state_dict` was given."""

    state_dict: Mapping[str, Any]
    strict: bool
    same_partition_load: bool


@dataclass(frozen=True, eq=False)
class _Entry:
    """One tensor of the model with all names that stand for it."""

    names: tuple[str, ...]
    tensor: Tensor
    stage: int  # the first of `holders`
    holders: tuple[int, ...]
    owned: bool

    @property
    def spec(self) -> ShardSpec | None:
        return spec_of(self.tensor)

    @property
    def global_shape(self) -> tuple[int, ...]:
        return tuple(self.spec.global_shape if self.spec is not None else self.tensor.shape)

    @property
    def live(self) -> bool:
        """Whether this rank holds values for it: its owner does, and every stage for a buffer that is replicated."""
        if self.owned:
            return True
        if isinstance(self.tensor, nn.Parameter) or self.tensor.is_meta:
            return False
        return self.tensor.untyped_storage().nbytes() >= self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True)
class _Description:
    """What the owner of an entry says about its part, so that receivers need not guess."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: ShardSpec | None


# --- names and entries


def _named_state(module: nn.Module) -> dict[str, Any]:
    """The module's own state dict, live objects in it: parameters, persistent buffers, extra state."""
    return module.state_dict(keep_vars=True)


def entries_of(model: StatefulModel) -> list[_Entry]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, value in _named_state(model.module).items():
        if not is_extra(name, value):
            names.setdefault(id(value), []).append(name)
            tensors[id(value)] = value
    return [_entry(model, tuple(names[key]), tensor) for key, tensor in tensors.items()]


def _entry(model: StatefulModel, names: tuple[str, ...], tensor: Tensor) -> _Entry:
    known = next((name for name in names if name in model.stage_of), None)
    if known is None:
        raise UsageError(
            f"the state dict of the model holds a tensor {names[0]}, which is no parameter or buffer of that name (a "
            "module's own `_save_to_state_dict` or a hook has put it there), so it is not known on which stage it "
            "lives: register it as a buffer, or return it from the module's `get_extra_state`"
        )
    return _Entry(names, tensor, model.stage_of[known], model.holders(known), model.owned(known))


def _owner_of(name: str) -> str:
    """The module whose parameter, buffer or extra state has that name."""
    return name.rpartition(".")[0]


def _like(source: Mapping[str, Any]) -> "OrderedDict[str, Any]":
    """An empty state dict with the version numbers that torch keeps in `_metadata`."""
    result: OrderedDict[str, Any] = OrderedDict()
    result._metadata = getattr(source, "_metadata", OrderedDict())  # type: ignore[attr-defined]
    return result


def _by_name(values: Mapping[_Entry, Tensor]) -> dict[str, Tensor]:
    """One tensor object for all names of an entry, so that ties survive in a saved file."""
    return {name: value for entry, value in values.items() for name in entry.names}


def _output(tensor: Tensor, cast_to_cpu: bool) -> Tensor:
    return tensor.detach().cpu() if cast_to_cpu else tensor.detach()


# --- saving


def local_state_dict(model: StatefulModel, cast_to_cpu: bool = True) -> "OrderedDict[str, Any]":
    """What this rank's stage owns, distributed parameters as their local part; `_smp_is_partial` is True in it.

    Not collective. Like torch's, the tensors share memory with the model (unless the cast to CPU copies them).
    Raises `UsageError` before partition, when nothing has been assigned to ranks yet.
    """
    if not model.partitioned:
        raise UsageError("local_state_dict() was called before the model is partitioned: run the first step before it")
    state = _named_state(model.module)
    local = _by_name({e: _output(e.tensor, cast_to_cpu) for e in entries_of(model) if e.owned})
    result = _like(state)
    for name, value in state.items():
        if name in local:
            result[name] = local[name]
        elif is_extra(name, value) and model.runs_module(_owner_of(name)):
            result[name] = value
    result[PARTIAL_KEY] = True
    return result


@log.long_phase("gathering the model's state")
def full_state_dict(
    model: StatefulModel, gather_to_rank0: bool = False, cast_to_cpu: bool = True
) -> "OrderedDict[str, Any]":
    """The whole model under the names of the user's module, on every rank; collective over the mp group.

    With `gather_to_rank0` only world rank 0 gets it, the others an empty dict. Tied names share one tensor. When the
    replica is one rank, tensors share memory with the model as torch's do; otherwise they are copies.
    Raises `CommError` naming the missing ranks when part of the mp group does not call it.
    """
    rt = runtime.get()
    group = rt.group(CommGroup.MP_GROUP)
    enter_collective(rt, "model.state_dict()", group, _STATE_DICT_ADVICE)
    state = _named_state(model.module)
    takers = [0] if gather_to_rank0 else list(group.ranks)
    if gather_to_rank0 and 0 not in group.ranks:
        return OrderedDict()
    if not model.partitioned:
        values = _whole_before_partition(model, cast_to_cpu)
    else:
        values = _gather_all(rt, model, takers, cast_to_cpu)
        own = (name for name in extra_names(model.module) if model.runs_module(_owner_of(name)))
        state.update(_gather_extra(rt, {name: state[name] for name in own}))
    if rt.rank not in takers:
        return OrderedDict()
    result = _like(state)
    result.update((name, value if is_extra(name, value) else values[name]) for name, value in state.items())
    return result


def _whole_before_partition(model: StatefulModel, cast_to_cpu: bool) -> dict[str, Tensor]:
    if any(waiting.of_model for waiting in runtime.get().waiting_loads):
        raise UsageError(
            "state_dict() was called between load_state_dict() or resume_from_checkpoint() and the first step, which "
            "applies what was loaded"
        )
    entries = entries_of(model)
    if delayed := [entry.names[0] for entry in entries if entry.tensor.is_meta]:
        raise UsageError(
            f"state_dict() was called before the first step, which initialises delayed parameters ({delayed[0]}, …)"
        )
    return _by_name({e: _output(e.tensor, cast_to_cpu) for e in entries})


def _gather_all(rt: Runtime, model: StatefulModel, takers: Sequence[int], cast_to_cpu: bool) -> dict[str, Tensor]:
    """name -> whole tensor, on the ranks of `takers`; empty elsewhere."""
    group = rt.group(CommGroup.MP_GROUP)
    entries = entries_of(model)
    if group.size == 1:
        return _by_name({e: _output(e.tensor, cast_to_cpu) for e in entries})
    mine = {e.names[0]: _Description(tuple(e.tensor.shape), e.tensor.dtype, e.spec) for e in entries if e.owned}
    described = dict(zip(group.ranks, rt.transport.all_gather_object(mine, group)))
    values: dict[_Entry, Tensor] = {}
    for tag, entry in enumerate(entries):
        whole = _gather(rt, entry, described, takers, tag)
        if whole is not None:
            values[entry] = _output(whole, cast_to_cpu)
    return _by_name(values)


def _gather_extra(rt: Runtime, own: Mapping[str, Any]) -> dict[str, Any]:
    """Extra state of modules of all stages, from that of this rank's; of several tensor-parallel ranks the first's."""
    group = rt.group(CommGroup.MP_GROUP)
    gathered = rt.transport.all_gather_object(dict(own), group) if group.size > 1 else [own]
    return {name: value for held in reversed(gathered) for name, value in held.items()}


def _gather(
    rt: Runtime, entry: _Entry, described: dict[int, dict[str, _Description]], takers: Sequence[int], tag: int
) -> Tensor | None:
    """The whole tensor of an entry on `takers`, None elsewhere."""
    owner = rt.topology.rank_at(rdp=rt.rdp_rank, pp=entry.stage, tp=0)
    spec = described[owner][entry.names[0]].spec
    num_parts = spec.num_parts if spec is not None else 1
    sources = [rt.topology.rank_at(rdp=rt.rdp_rank, pp=entry.stage, tp=tp) for tp in range(num_parts)]
    parts = [_transfer(rt, entry, described[source][entry.names[0]], source, takers, tag) for source in sources]
    present = [part for part in parts if part is not None]
    if not present:
        return None
    return spec.merge(present) if spec is not None else present[0]


def _transfer(
    rt: Runtime, entry: _Entry, described: _Description, source: int, takers: Sequence[int], tag: int
) -> Tensor | None:
    """Send this rank's part from `source` to `takers`; returns it where it was wanted."""
    call = f"model.state_dict(), {entry.names[0]}"
    if rt.rank == source:
        part = entry.tensor.detach()
        requests = [rt.transport.isend(part, taker, tag, Channel.CONTROL) for taker in takers if taker != source]
        for request in requests:
            rt.monitor.wait(request.test, call, [t for t in takers if t != source])
        # a copy: the dict shall not be half live and half a snapshot
        return part.clone() if source in takers else None
    if rt.rank not in takers:
        return None
    buffer = torch.empty(described.shape, dtype=described.dtype, device=rt.device)
    rt.monitor.wait(rt.transport.irecv(buffer, source, tag, Channel.CONTROL).test, call, [source])
    return buffer


# --- loading


def load_state_dict(
    model: StatefulModel, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False
) -> _IncompatibleKeys:
    """Load a full state dict or the partial one of this rank; collective over all ranks.

    A full one may have the names of another library's models where those of smp's modules differ; with
    `_smp_is_partial` False in it, it has smp's names. A partial one must come from the same degrees. Its tensors may
    have been on another stage then: they are sent to where they live now, unless `same_partition_load` promises that
    nothing has moved. Before partition the dict is kept and applied at the first step; the result is empty then,
    and names are logged that differ without `strict`.
    Missing and unexpected keys are counted over the whole model and are the same on all ranks of the replica; a tied
    tensor is not missing when one of its names is there.
    Raises `CheckpointError` for keys when `strict`, and for shapes that differ in any case, before anything is changed.
    """
    rt = runtime.get()
    enter_collective(rt, "model.load_state_dict()", rt.group(CommGroup.WORLD), _LOAD_ADVICE)
    if not isinstance(state_dict, Mapping):
        raise UsageError(f"load_state_dict() needs a mapping from names to tensors, got {type(state_dict).__name__}")
    load = _Load(state_dict, strict, same_partition_load)
    if model.partitioned:
        return _apply(rt, model, load)
    raise_alike(rt, rt.group(CommGroup.WORLD), _early_refusal(rt, model, load))

    def later() -> None:
        keys = _apply(rt, model, load)
        warn_of_rest("model.load_state_dict(strict=False)", keys.missing_keys, keys.unexpected_keys)

    rt.load_once_partitioned(later, of_model=True, of_optimizer=False)
    return _IncompatibleKeys([], [])


def warn_of_rest(call: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Says on rank 0 what a call that is not strict has passed over, where nobody sees its result."""
    if differences := differences_of(missing, unexpected):
        log.warn_rank0("%s: only what is in both the model and what was saved is loaded:\n  %s", call, differences)


def differences_of(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Names in words, a line for each of both; empty when there are none."""
    found = {"missing": missing, "unexpected": unexpected}
    return "\n  ".join(f"{what}: {_some(names)}" for what, names in found.items() if names)


def _early_refusal(rt: Runtime, model: StatefulModel, load: _Load) -> CheckpointError | None:
    """What is wrong with the names of a whole state dict, as far as it is known before partition."""
    if not load.strict or load.state_dict.get(PARTIAL_KEY):
        return None
    if may_rename(rt, model):
        return None
    if any(child._load_state_dict_pre_hooks for child in model.module.modules()):  # they may rename
        return None
    unexpected = [name for name in load.state_dict if name != PARTIAL_KEY and name not in _named_state(model.module)]
    if not unexpected:
        return None
    name = type(model.module).__name__
    return CheckpointError(f"The state dict does not fit {name}:\n  unexpected: {_some(unexpected)}")


def may_rename(rt: Runtime, model: StatefulModel) -> bool:
    """Whether a module of a model that is not partitioned yet will be replaced: its names may be others then."""
    return rt.tp_size > 1 or any(mark is not None and mark.enabled for mark in map(mark_of, model.module.modules()))


@dataclass
class _Plan:
    """What a load would do, found out before anything is changed.

    `sources`: number of an entry -> world rank that holds its value, and the shape that the value has there.
    """

    missing: list[str]
    unexpected: list[str]
    problems: list[str]
    sources: dict[int, tuple[int, tuple[int, ...]]]
    partial: bool


@log.long_phase("loading the model's state")
def _apply(rt: Runtime, model: StatefulModel, load: _Load) -> _IncompatibleKeys:
    group = rt.group(CommGroup.MP_GROUP)
    values = OrderedDict(load.state_dict)
    partial = bool(values.pop(PARTIAL_KEY, False))
    if PARTIAL_KEY not in load.state_dict:
        for _, to_ours in state_mod.state.module_manager.translate_functions:
            values = OrderedDict(to_ours(values))
    if not partial:
        _run_load_hooks(model.module, values, load)
    entries = entries_of(model)
    extra = extra_names(model.module)
    if partial and extra:  # their modules may have moved to other stages
        values.update({**_gather_extra(rt, {n: v for n, v in values.items() if n in extra}), **values})
    mine = {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in values.items()}
    gathered = rt.transport.all_gather_object((partial, mine), group) if group.size > 1 else [(partial, mine)]
    held = {rank: shapes for rank, (_, shapes) in zip(group.ranks, gathered)}
    plan = _plan(rt, entries, extra, held, partial, load.same_partition_load)
    error = _refusal(model, plan, {rank: kind for rank, (kind, _) in zip(group.ranks, gathered)}, load.strict)
    raise_alike(rt, group, error)
    _copy_in(rt, entries, values, plan)
    for name in extra:
        if name in values:
            model.module.get_submodule(_owner_of(name)).set_extra_state(values[name])
    return _IncompatibleKeys(plan.missing, plan.unexpected)


def _run_load_hooks(module: nn.Module, values: "OrderedDict[str, Any]", load: _Load) -> None:
    """The pre-hooks that modules registered to rename or repair old state dicts, on a whole one."""
    metadata = getattr(load.state_dict, "_metadata", {})
    ignored: list[str] = []
    for path, child in module.named_modules():
        for hook in list(child._load_state_dict_pre_hooks.values()):
            prefix = f"{path}." if path else ""
            hook(values, prefix, metadata.get(path, {}), load.strict, ignored, ignored, ignored)


def _plan(
    rt: Runtime,
    entries: Sequence[_Entry],
    extra: Sequence[str],
    held: Mapping[int, Mapping[str, tuple[int, ...] | None]],
    partial: bool,
    same_partition: bool,
) -> _Plan:
    plan = _Plan([], [], [], {}, partial)
    for number, entry in enumerate(entries):
        here = rt.topology.rank_at(rdp=rt.rdp_rank, pp=entry.stage, tp=rt.tp_rank)
        peers = rt.group(CommGroup.PP_GROUP).ranks
        wanted = tuple(entry.tensor.shape) if partial else entry.global_shape
        order = [here, *(r for r in peers if r != here and partial and not same_partition)]
        source = next((r for r in order for name in entry.names if name in held[r]), None)
        others = [rt.topology.rank_at(rdp=rt.rdp_rank, pp=pp, tp=rt.tp_rank) for pp in entry.holders[1:]]
        if source is None or not (partial or all(any(name in held[r] for name in entry.names) for r in others)):
            plan.missing.extend(entry.names)
            continue
        shape = next(held[source][name] for name in reversed(entry.names) if name in held[source])
        plan.sources[number] = source, shape or ()
        if entry.owned:  # what has grown on its own stage has another shape on the rest
            plan.problems.extend(_shape_problems(entry, held[source], wanted))
    known = {name for entry in entries for name in entry.names} | set(extra)
    plan.missing.extend(name for name in extra if not any(name in shapes for shapes in held.values()))
    keys = dict.fromkeys(name for shapes in held.values() for name in shapes)
    plan.unexpected.extend(name for name in keys if name not in known)
    return plan


def _shape_problems(
    entry: _Entry, shapes: Mapping[str, tuple[int, ...] | None], wanted: tuple[int, ...]
) -> Iterator[str]:
    for name in entry.names:
        if name in shapes and shapes[name] is None:
            yield f"{name} is not a tensor"
        elif name in shapes and shapes[name] != wanted:
            part = f" (part of {list(entry.global_shape)})" if wanted != entry.global_shape else ""
            yield f"{name} has shape {list(shapes[name] or ())}, the model has {list(wanted)}{part}"


def _refusal(model: StatefulModel, plan: _Plan, kinds: Mapping[int, bool], strict: bool) -> CheckpointError | None:
    if len(set(kinds.values())) > 1:
        partial = [rank for rank, kind in kinds.items() if kind]
        return CheckpointError(f"The ranks {partial} load a partial state dict, the others of the replica a full one")
    problems = list(plan.problems)
    if strict and plan.missing:
        problems.insert(0, f"missing: {_some(plan.missing)}")
    if strict and plan.unexpected:
        problems.insert(0, f"unexpected: {_some(plan.unexpected)}")
    if not problems:
        return None
    name = type(model.module).__name__
    return CheckpointError(f"The state dict does not fit {name}:\n  " + "\n  ".join(problems))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


@torch.no_grad()
def _copy_in(rt: Runtime, entries: Sequence[_Entry], values: Mapping[str, Any], plan: _Plan) -> None:
    for number, (source, shape) in plan.sources.items():
        entry = entries[number]
        own = [values[name] for name in entry.names if name in values]
        if plan.partial:
            own = _deliver(rt, entry, own[-1:], source, shape, number)
        if entry.live:
            for value in own:  # more than one when tied names were saved apart: the last wins, as in torch
                part = value if plan.partial or entry.spec is None else entry.spec.split(value)
                if part.shape != entry.tensor.shape and not entry.owned:
                    continue
                entry.tensor.copy_(part)
                if rt.optimizer is not None:
                    rt.optimizer.on_loaded(entry.tensor, part)


def _deliver(
    rt: Runtime, entry: _Entry, own: list[Tensor], source: int, shape: tuple[int, ...], tag: int
) -> list[Tensor]:
    """A partial dict's tensor goes from `source` to the stages that hold it now; a buffer to all: they have copies."""
    owners = [rt.topology.rank_at(rdp=rt.rdp_rank, pp=pp, tp=rt.tp_rank) for pp in entry.holders]
    wanted = owners if isinstance(entry.tensor, nn.Parameter) else rt.group(CommGroup.PP_GROUP).ranks
    takers = [rank for rank in wanted if rank != source]
    call = f"model.load_state_dict(), {entry.names[0]}"
    if rt.rank == source:
        value = own[0].to(device=rt.device, dtype=entry.tensor.dtype)
        requests = [rt.transport.isend(value, taker, tag, Channel.CONTROL) for taker in takers]
        for request in requests:
            rt.monitor.wait(request.test, call, takers)
        return own
    if rt.rank not in takers:
        return []
    buffer = torch.empty(shape, dtype=entry.tensor.dtype, device=rt.device)
    rt.monitor.wait(rt.transport.irecv(buffer, source, tag, Channel.CONTROL).test, call, [source])
    return [buffer]
