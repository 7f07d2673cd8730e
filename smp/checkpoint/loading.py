"""Puts a partial checkpoint into this job's model and optimizer, whatever degrees it was saved on.

    opened   sizes of files, names and shapes of the user's tensors, groups of the optimizer     on all ranks, agreed
    verified each byte's checksum, by one rank of the job
    planned  which boxes of which stored tensors make this rank's; optimizer state is read       agreed
    applied  nothing can go wrong any more: parameters and optimizer take the values

Before partition the last two wait for it: nobody knows yet which tensors this rank has.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smp.checkpoint.archive import map_tensors
from smp.checkpoint.content import sources_of
from smp.checkpoint.layout import Degrees, Place
from smp.checkpoint.manifest import Kind, StoredTensor
from smp.checkpoint.partial import degrees_of, place_of
from smp.checkpoint.reader import Checkpoint, traffic
from smp.checkpoint.slices import Copy
from smp.comm.entry import together
from smp.dp import optimizer_state
from smp.errors import CheckpointError
from smp.fp16.optimizer import SCALER_KEY
from smp.model_state import differences_of, entries_of, warn_of_rest
from smp.runtime import Runtime
from smp.topology import CommGroup
from smp.tp.origin import Origin, extra_names, origins, source_shapes

Kinds = Sequence[tuple[Kind, str]]
_MODEL: Kinds = (("model", ""),)
_EXACT: Kinds = (("master", ""), ("model", ""))  # unrounded values where there are some


@dataclass(frozen=True)
class Options:
    """What the script asked for."""

    strict: bool
    load_optimizer: bool
    load_sharded_optimizer_state: bool
    keep_options: bool = False  # of the optimizer's groups: they are loaded, or newer than what was saved


def load_by_dict(model: Any, state_dict: dict[str, Any], strict: bool, path: Path) -> None:
    """Through the model's own `load_state_dict`; says what of the file at `path` that has passed over."""
    keys = model.load_state_dict(state_dict, strict=strict)
    _warn_of_rest(path, keys.missing_keys, keys.unexpected_keys)


def _warn_of_rest(path: Path, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    warn_of_rest(f"resume_from_checkpoint({path}, strict=False)", missing, unexpected)


class PartialLoad:
    """One checkpoint on its way into the job."""

    def __init__(self, rt: Runtime, checkpoint: Checkpoint, options: Options) -> None:
        self._rt, self._checkpoint, self.options = rt, checkpoint, options
        self._near = place_of(rt)
        self._is_half = rt.config.fp16 or rt.config.bf16

    # ---- before anything is known of the partition

    def check(self) -> None:
        """Names, shapes, groups, and this rank's share of the checksums. Not collective.

        Raises:
            CheckpointError: the checkpoint is damaged, or does not fit.
        """
        self.check_fit()
        self.verify()

    def check_fit(self) -> None:
        """Names and shapes."""
        known = origins(self._rt.model.module)
        problems = list(self._shape_problems(known))
        if self._has("model"):
            wanted = {*source_shapes(known.values()), *extra_names(self._rt.model.module)}
            there = set(self._checkpoint.sources("model"))
            missing, unexpected = sorted(wanted - there), sorted(there - wanted)
            if not self.options.strict:
                _warn_of_rest(self._checkpoint.path, missing, unexpected)
            elif differences := differences_of(missing, unexpected):
                problems.append(differences)
        if problems:
            name = type(self._rt.model.module).__name__
            raise CheckpointError(f"{self._checkpoint.path} does not fit {name}:\n  " + "\n  ".join(problems))

    def verify(self) -> None:
        """This rank's share of the checksums."""
        manifest = self._checkpoint.manifest
        kinds: tuple[Kind, ...] = ("model", "master", "optimizer") if self._wants_optimizer() else ("model", "master")
        share = share_of(
            list(self._checkpoint.records(kinds)),
            {name: file.place for name, file in manifest.files.items()},
            manifest.degrees,
            degrees_of(self._rt),
            [Place(pp, tp, rdp) for rdp, pp, tp in map(self._rt.topology.coordinates, range(self._rt.size))],
        )[self._rt.rank]
        if wrong := self._checkpoint.damage(share):
            raise CheckpointError("\n".join(wrong[:8]))

    def _shape_problems(self, known: Mapping[str, Origin]) -> Iterator[str]:
        stored, model = self._checkpoint.manifest.shapes, self._rt.model
        here = (origin for name, origin in known.items() if not model.partitioned or model.owned(name))
        for source, shape in source_shapes(here).items():
            if stored.get(source, shape) != shape:
                yield f"{source} has shape {list(stored[source])}, the model has {list(shape)}"

    def _has(self, kind: Kind) -> bool:
        return bool(self._checkpoint.tensors(kind))

    def _wants_optimizer(self) -> bool:
        if not self.options.load_optimizer or self._rt.optimizer is None:
            return False
        return self.options.load_sharded_optimizer_state or not self._checkpoint.manifest.sharded

    def settle_groups(self) -> None:
        """Sees that the optimizer's groups are those that were saved. Before partition gives them the saved options at
        once: schedulers made from here on need them, and what the script sets from here on shall stay. Collective over
        all ranks.

        Raises:
            CheckpointError: on every rank: the optimizer has other groups, fewer parameters, or is of another kind.
        """
        if not self._wants_optimizer():
            return
        rt, known = self._rt, origins(self._rt.model.module)
        names = rt.optimizer._names()
        mine = {source for group in rt.optimizer._given for p in group for source in sources_of(names[id(p)], known)}
        given = set().union(*rt.transport.all_gather_object(mine, rt.group(CommGroup.WORLD)))

        def checked() -> list[dict[str, Any]]:
            groups = OptimizerReader(self._checkpoint, rt.optimizer, known, self._near).saved_groups()
            optimizer_state.check_options(rt.optimizer.optimizer, groups)
            saved = [name for group in self._checkpoint.manifest.groups or () for name in group.names]
            if lost := [name for name in saved if name not in given]:
                raise CheckpointError(
                    f"{self._checkpoint.path} holds optimizer state of {_some(lost)}, which the job's optimizer was "
                    "not given: give it the parameters that the saved one had, or resume with load_optimizer=False"
                )
            return groups

        groups = together(rt, checked)
        if not rt.model.partitioned:
            rt.optimizer.load_options(groups)
            self.options = replace(self.options, keep_options=True)

    # ---- once this rank's tensors are known

    def plan(self) -> Callable[[], None]:
        """What to do so that model and optimizer have the values; doing it fails no more. Not collective.

        Raises:
            CheckpointError: something that is wanted is not in the checkpoint.
        """
        known = origins(self._rt.model.module)
        copies = list(self._copies(known))
        extra = {n: self._plain(n) for n in extra_names(self._rt.model.module) if self._checkpoint.stored("model", n)}
        masters = self._masters(known)
        state, scaler = None, None
        if self._wants_optimizer():
            state = OptimizerReader(self._checkpoint, self._rt.optimizer, known, self._near).read(
                self.options.keep_options
            )
            scaler = self._scaler()

        def apply() -> None:
            with torch.no_grad():
                for tensor, pieces in copies:
                    self._copy(tensor, pieces)
            for name, value in extra.items():
                self._rt.model.module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
            if masters:
                self._rt.optimizer.load_masters(masters)
            if state is not None:
                self._rt.optimizer.optimizer.load_state_dict(state)
            if scaler is not None:
                self._rt.optimizer.load_scaler_state(scaler)

        return apply

    def _weights(self) -> Kind | None:
        """What the weights come from; None: they stay. In a checkpoint without a model, masters are the optimizer's
        state, and the parameters are these rounded.
        """
        if self._has("model"):
            return "model"
        return "master" if self._is_half and self._wants_optimizer() and self._has("master") else None

    def _copies(self, known: Mapping[str, Origin]) -> Iterator[tuple[Tensor, list[Copy]]]:
        """The model's tensors on this rank that get values, and what makes these up."""
        kind = self._weights()
        there = set() if kind is None else set(self._checkpoint.sources(kind))
        for entry in entries_of(self._rt.model) if there else ():
            name, tensor = entry.names[0], entry.tensor.detach()
            all_needed = kind == "model" and self.options.strict
            if not entry.live or not (all_needed or {block.source for block in known[name].blocks} <= there):
                continue
            kinds = _EXACT if kind == "master" or tensor.dtype in (torch.float32, torch.float64) else _MODEL
            yield tensor, self._found(self._checkpoint.copies(known[name].blocks, kinds, name, self._near))

    def _found(self, copies: list[Copy]) -> list[Copy]:
        """The same, once it is sure that the files hold what the manifest says."""
        for copy in copies:
            self._checkpoint.value(copy.stored)
        return copies

    def _copy(self, tensor: Tensor, copies: list[Copy]) -> None:
        if sum(copy.numel for copy in copies) != tensor.numel():
            tensor.zero_()  # padding
        for copy in copies:
            traffic.copied += copy.apply(self._checkpoint.value(copy.stored), tensor)

    def _plain(self, name: str) -> Any:
        value = self._checkpoint.value(self._checkpoint.stored("model", name, near=self._near)[0])
        return map_tensors(value, lambda tensor: tensor.clone())  # the file may be gone one day

    def _masters(self, known: Mapping[str, Origin]) -> dict[str, Tensor]:
        """fp32 values for the masters that this rank has, wherever the weights come from."""
        kind = self._weights()
        if self._rt.optimizer is None or kind is None or not self._is_half:
            return {}
        values = {}
        for name, master in self._rt.optimizer.masters_by_name().items():
            if name in known and all(self._checkpoint.stored(kind, s) for s in sources_of(name, known)):
                values[name] = torch.zeros(master.shape, dtype=torch.float32)
                self._checkpoint.fill(values[name], known[name].blocks, _EXACT, name, self._near)
        return values

    def _scaler(self) -> Any:
        manifest = self._checkpoint.manifest
        if manifest.full:
            return self._checkpoint.load(f"optimizer_{manifest.tag}").get(SCALER_KEY)
        names = [name for name in manifest.files if name.startswith("fp16_states")]
        return self._checkpoint.load(names[0])["scaler"] if names else None


class OptimizerReader:
    """Makes the state dict of this rank's inner optimizer from a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, optimizer: Any, known: Mapping[str, Origin], near: Place) -> None:
        self._checkpoint, self._known, self._near = checkpoint, known, near
        self._inner = optimizer.optimizer
        self._names: dict[int, str] = optimizer._names()

    def read(self, keep_options: bool) -> dict[str, Any]:
        """A state dict that the inner optimizer loads: the saved options, or its own, and each parameter's state.

        Raises:
            CheckpointError: the checkpoint has no optimizer, other groups, or lacks something of the state.
        """
        saved = self.saved_groups(and_more=keep_options)
        groups = self._inner.param_groups if keep_options else saved
        names = ((self._names[id(param)], param) for group in self._inner.param_groups for param in group["params"])
        entries = {name: state for name, param in names if (state := self._state_of(name, param))}
        return optimizer_state.take_local(self._inner, self._names, groups, entries)

    def saved_groups(self, and_more: bool = False) -> list[dict[str, Any]]:
        """The saved `param_groups`, once it is sure that they are of the same parameters.

        `and_more`: groups that the script has added since it resumed may follow.
        """
        path, stored = self._checkpoint.path, self._checkpoint.manifest.groups
        if stored is None:
            raise CheckpointError(f"{path} holds no optimizer state: resume with load_optimizer=False")
        here = len(self._inner.param_groups)
        if here < len(stored) or (here > len(stored) and not and_more):
            raise CheckpointError(f"{path} holds an optimizer of {len(stored)} parameter groups, the job's has {here}")
        for number, (group, saved) in enumerate(zip(self._inner.param_groups, stored)):
            theirs = set(saved.names)
            for param in group["params"]:
                for source in sources_of(self._names[id(param)], self._known):
                    if source not in theirs:
                        at = [str(n) for n, other in enumerate(stored) if source in other.names]
                        where = f"is in group {at[0]} of" if at else "is in no group of"
                        raise CheckpointError(
                            f"{source} is in group {number} of the job's optimizer and {where} the one in {path}"
                        )
        files = [name for name in self._checkpoint.manifest.files if name.startswith("optimizer_")]
        groups: list[dict[str, Any]] = self._checkpoint.load(files[0])["param_groups"]
        return groups

    def _state_of(self, name: str, param: Tensor) -> dict[str, Any]:
        origin = self._known.get(name) or Origin.whole(name, tuple(param.shape))
        state: dict[str, Any] = {}
        for key in self._checkpoint.keys():
            held = {source: self._checkpoint.stored("optimizer", source, key, self._near) for source in origin.shapes}
            found = [stored for of_source in held.values() for stored in of_source]
            if not found:
                continue
            if any(stored.like for stored in found):
                state[key] = torch.zeros(param.shape, dtype=getattr(torch, found[0].dtype))
                blocks = [block for block in origin.blocks if held[block.source]]
                self._checkpoint.fill(state[key], blocks, [("optimizer", key)], name, self._near)
                continue
            numbers = self._numbers(held)
            if len(set(numbers.values())) > 1:  # such as norms, of each source its own
                state[key] = torch.zeros(param.shape, dtype=getattr(torch, found[0].dtype))
                for block in origin.blocks:
                    block.in_local(state[key]).fill_(numbers.get(block.source, 0.0))
            else:
                state[key] = self._unlike(name, key, origin, found)
        return state

    def _numbers(self, held: Mapping[str, Sequence[StoredTensor]]) -> dict[str, float]:
        """By source of a parameter that has several, state that is one number for each."""
        firsts = {source: of_source[0] for source, of_source in held.items() if of_source and len(held) > 1}
        return {
            source: float(self._checkpoint.value(stored))
            for source, stored in firsts.items()
            if stored.shape == () and stored.record
        }

    def _unlike(self, name: str, key: str, origin: Origin, found: Sequence[StoredTensor]) -> Any:
        """State that is not shaped like its parameter: a number for all of it, or something of the optimizer's own."""
        first = next((stored for stored in found if stored.blocks == origin.blocks), found[0])
        if first.shape and first.blocks != origin.blocks and not _same_whole(first, origin):
            raise CheckpointError(
                f"optimizer state {key!r} of {name} has shape {list(first.shape)}, which is not the parameter's: it "
                "can only be loaded on the degrees it was saved on"
            )
        value = self._checkpoint.value(first)
        if isinstance(value, Tensor):
            traffic.copied += value.numel() * value.element_size()
            return value.clone()
        return value


def _same_whole(stored: StoredTensor, origin: Origin) -> bool:
    """Whether both hold one and the same of the user's tensors, whole and as it is."""
    if len(stored.blocks) != 1 or len(origin.blocks) != 1:
        return False
    theirs, ours = stored.blocks[0], origin.blocks[0]
    whole = origin.shapes[ours.source]
    return theirs.source == ours.source and theirs.size == ours.size == whole and theirs.transposed == ours.transposed


def share_of(
    records: Sequence[tuple[str, str, int]],
    places: Mapping[str, Place | None],
    saved: Degrees,
    job: Degrees,
    ranks: Sequence[Place],
) -> list[list[tuple[str, str, int]]]:
    """Which records (file, record, bytes) each rank of the job verifies: together all of them, each once.

    A rank's own file where the stages and parts have not changed, shared with the replicas that read it too; otherwise
    all ranks share all files.
    """
    unchanged = (saved.pp, saved.tp) == (job.pp, job.tp)
    readers: dict[tuple[int, int], list[int]] = {}
    for rank, place in enumerate(ranks):
        readers.setdefault((place.pp, place.tp), []).append(rank)
    shares: list[list[tuple[str, str, int]]] = [[] for _ in ranks]
    turns: dict[tuple[int, ...], int] = {}
    for record in sorted(records, key=lambda item: (-item[2], *item[:2])):
        owner = places[record[0]]
        among = tuple(readers[owner.pp, owner.tp] if unchanged and owner is not None else range(len(ranks)))
        turn = turns[among] = turns.get(among, -1) + 1
        shares[among[turn % len(among)]].append(record)
    return shares


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
