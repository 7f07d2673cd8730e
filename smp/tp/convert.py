"""Replaces the marked modules of a model by their distributed twins.

    1. find      outermost marked modules of registered classes, in the order of the module tree
    2. agree     the ranks of the tensor-parallel group found the same ones
    3. build     the twin, without memory; from the module's constructor arguments, the init_hook, the options
    4. carry     the module's Parameter objects move to the twin: tp_rank 0's values, each rank its part; for families
                 of another library by their tables of names (carry.py)
    5. put       the twin in the module's place, hooks and flags with it

Whole tensors get tp_rank 0's values too. What cannot be split is left whole, with one warning for each reason.
"""

import difflib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from smp import log
from smp.activation import is_checkpointed
from smp.comm import collectives
from smp.errors import PartitionError, UsageError
from smp.runtime import Runtime
from smp.state_mod import state
from smp.topology import CommGroup
from smp.tp import delayed, families
from smp.tp.carry import Move, carry, carry_marks, plan
from smp.tp.contexts import KNOWN_OPTIONS, Mark, mark_of
from smp.tp.module import FORWARD_HOOKS, DistributedModule
from smp.tp.origin import Names, names_of, remember_names
from smp.tp.plan import Plans, find_units
from smp.tp.planned import distribute
from smp.tp.registry import (
    Registration,
    recorded_arguments,
    registered_twins,
    registration_of,
    used_parameters,
)
from smp.tp.shard import spec_of

# What torch keeps about a module's hooks; handles refer to these dictionaries, so they move as they are.
_HOOKS = (
    *["_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"],
    *["_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"],
    *["_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"],
)


@dataclass(frozen=True)
class _Candidate:
    """A module that shall be replaced: where it stands (several places when it is used twice), and how."""

    name: str
    module: nn.Module
    places: tuple[tuple[nn.Module, str], ...]  # parent and name of the child; none for the root
    registration: Registration
    mark: Mark


def convert(module: nn.Module, runtime: Runtime) -> nn.Module:
    """Splits the marked modules in `module` over the tensor-parallel group, in place; returns the model, which is a
    new module when `module` itself is replaced. Collective over the tensor-parallel group.

    The Parameter objects stay the same: what an optimizer holds is what trains. A replaced module's `_orig_forward`
    is the forward it had. Delayed parameters stay without memory; `materialize` follows.

    Raises:
        UsageError: an unknown option, ranks that marked different modules, or a module that was made before its class
            was registered.
    """
    families.forget_places()
    state.module_manager.translate_functions.clear()
    plans = find_units(module, runtime.tp_size, _is_claimed) if runtime.tp_size > 1 else Plans()
    candidates = list(_find(module, runtime.tp_size == 1, plans.settled))
    if runtime.tp_size == 1 and not candidates:
        return module
    _check_options(candidates)
    names = names_of(module)
    whole, cuts = _shared_weights(module, candidates)
    twins: dict[str, tuple[DistributedModule, list[Move]]] = {}
    for candidate in candidates:
        if candidate.name not in whole:
            try:
                twins[candidate.name] = _build(candidate, cuts.get(candidate.name, {}))
            except PartitionError as why:
                whole[candidate.name] = str(why)
    _undo_half_tied(candidates, cuts, twins, whole)
    candidates = [candidate for candidate in candidates if candidate.name in twins]
    _agree(module, candidates, [unit.name for unit in plans.units], runtime)
    for unit in plans.units:
        distribute(unit, runtime.group(CommGroup.TP_GROUP))
    originals: list[delayed.Original] = []
    root = None
    for candidate in candidates:
        twin, moves = twins[candidate.name]
        _carry(candidate, twin, moves, names)
        _finish(candidate, twin)
        _adapt_surroundings(module, candidate, twin)
        for parent, child in candidate.places:
            originals.append((parent, child, candidate.module))
            parent._modules[child] = twin
        if not candidate.places:
            module, root = twin, candidate.module
    remember_names(module, names)
    _avoid_fused_encoder_layers(module)
    if delayed.has_delayed(module):
        delayed.remember_original(module, originals, root)
    _share_whole_tensors(module, runtime)
    _warn({**whole, **plans.whole})
    state.module_manager.translate_functions.extend(families.translate_functions())
    return module


# 1. Find


def _is_claimed(module: nn.Module) -> bool:
    """Whether a module with others in it is replaced as a whole."""
    mark = mark_of(module)
    if mark is None or not mark.enabled or type(module).__module__.startswith("torch.nn."):
        return False
    return registration_of(module) is not None


def _find(root: nn.Module, families_only: bool, settled: Set[int]) -> Iterator[_Candidate]:
    """The outermost marked modules of registered classes, or of declared families, but for the `settled` ones. A module
    used in several places is found once."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    order: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def walk(module: nn.Module, name: str) -> None:
        mark = mark_of(module)
        if not isinstance(module, DistributedModule) and mark is not None and mark.enabled:
            registration = None if id(module) in settled else registration_of(module)
            if registration is not None and (registration.family is not None or not families_only):
                if id(module) not in seen:
                    order.append((name, module))
                seen.add(id(module))
                return
        if id(module) in seen:
            return
        seen.add(id(module))
        for child_name, child in module._modules.items():
            if child is not None:
                places[id(child)].append((module, child_name))
                walk(child, f"{name}.{child_name}" if name else child_name)

    walk(root, "")
    for name, module in order:
        registration, mark = registration_of(module), mark_of(module)
        assert registration is not None and mark is not None
        yield _Candidate(name, module, tuple(places[id(module)]), registration, mark)


def _check_options(candidates: list[_Candidate]) -> None:
    known = set(KNOWN_OPTIONS)
    for twin in registered_twins() | {candidate.registration.dist_cls for candidate in candidates}:
        known |= set(inspect.signature(twin.__init__).parameters)
    for candidate in candidates:
        for option in candidate.mark.options:
            if option not in known:
                near = difflib.get_close_matches(option, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(KNOWN_OPTIONS))}"
                raise UsageError(f"tensor parallelism has no option {option!r} (on module {candidate.name!r}){hint}")


# Weights that several modules use


def _shared_weights(root: nn.Module, candidates: list[_Candidate]) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Candidates that have to stay whole, with the reason, and arguments that make sharing ones be cut alike.

    Only embeddings and linears whose tables are one Parameter can stay tied: both are cut along the vocabulary.
    """
    users: dict[int, list[nn.Module]] = defaultdict(list)
    for module in root.modules():
        for param in [*module._parameters.values(), *used_parameters(module)]:
            if param is not None:
                users[id(param)].append(module)
    names = {id(module): name for name, module in root.named_modules()}
    inside = {id(part): candidate for candidate in candidates for part in candidate.module.modules()}
    whole: dict[str, str] = {}
    cuts: dict[str, dict[str, Any]] = {}
    for candidate in candidates:
        mine = {id(part) for part in candidate.module.modules()}
        for param in candidate.module.parameters():
            others = [module for module in users[id(param)] if id(module) not in mine]
            if others and not _can_stay_tied(param, users[id(param)], inside):
                shown = ", ".join(sorted(names[id(module)] or type(module).__name__ for module in others))
                whole[candidate.name] = f"it shares weights with {shown}"
            elif others:
                linear = isinstance(candidate.module, nn.Linear)
                cuts[candidate.name] = {"split": "out" if linear else "vocabulary", "tied": id(param)}
    return whole, cuts


def _can_stay_tied(param: nn.Parameter, users: list[nn.Module], inside: dict[int, _Candidate]) -> bool:
    return all(
        type(module) in (nn.Linear, nn.Embedding)
        and id(module) in inside
        and inside[id(module)].module is module
        and module.weight is param
        for module in users
    )


def _undo_half_tied(
    candidates: list[_Candidate],
    cuts: dict[str, dict[str, Any]],
    twins: dict[str, Any],
    whole: dict[str, str],
) -> None:
    """When one of several modules that share a table cannot be cut, none is."""
    failed = {cuts[name]["tied"]: name for name in whole if name in cuts}
    for candidate in candidates:
        other = failed.get(cuts.get(candidate.name, {}).get("tied"))
        if other is not None and candidate.name in twins:
            del twins[candidate.name]
            whole[candidate.name] = f"it shares weights with {other}, which is left whole"


# 2. Agree


def _agree(root: nn.Module, candidates: list[_Candidate], units: list[str], runtime: Runtime) -> None:
    """Everything that follows sends tensors, so the ranks must have the same ones in mind."""
    group = runtime.group(CommGroup.TP_GROUP)
    mine = [f"{c.name or 'the model'} split as {c.registration.cls.__name__}" for c in candidates]
    mine += [f"{name} split by its plan" for name in units]
    for name, tensor in _tensors(root):
        mine.append(f"{name} of {tuple(tensor.shape)} {tensor.dtype}{' delayed' if delayed.is_delayed(tensor) else ''}")
    answers = runtime.transport.all_gather_object(mine, group, "splitting modules over TP_GROUP")
    for rank, answer in zip(group.ranks, answers):
        if answer != answers[0]:
            here = [entry for entry in answer if entry not in answers[0]]
            there = [entry for entry in answers[0] if entry not in answer]
            raise UsageError(
                "the ranks of a tensor-parallel group must build and mark the same model: "
                f"rank {rank} has {_shown(here)}, rank {group.ranks[0]} has {_shown(there)}"
            )


def _tensors(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from root.named_parameters()
    yield from root.named_buffers()


def _shown(entries: list[str]) -> str:
    return ", ".join(entries[:3]) or "nothing else"


def _share_whole_tensors(root: nn.Module, runtime: Runtime) -> None:
    """tp_rank 0's values of everything that is not cut: ranks seeded differently start from one model."""
    group = runtime.group(CommGroup.TP_GROUP)
    for _, tensor in _tensors(root):
        if spec_of(tensor) is None and not tensor.is_meta:
            tensor.data.copy_(collectives.broadcast(tensor.data, group, 0))


# 3. Build


def _build(candidate: _Candidate, cut: dict[str, Any]) -> tuple[DistributedModule, list[Move]]:
    """The twin, its parameters without memory, and where those of a declared family will come from.

    Raises:
        PartitionError: it cannot be split.
    """
    registration = candidate.registration
    if "forward" in candidate.module.__dict__:
        raise PartitionError("its forward was replaced on the instance")
    arguments = registration.arguments(candidate.module) if registration.arguments else None
    arguments = arguments or recorded_arguments(candidate.module)
    if arguments is None:
        raise UsageError(
            f"{candidate.name or 'the model'} was made before its class {registration.cls.__name__} was registered for "
            "tensor parallelism, so its arguments are not known; call tp_register first"
        )
    args, kwargs = arguments
    if registration.init_hook is not None:
        args, kwargs = _hooked(registration.init_hook, "init_hook", registration.cls, *args, **kwargs)
    parameters = inspect.signature(registration.dist_cls.__init__).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    options = {**candidate.mark.options, **{name: value for name, value in cut.items() if name != "tied"}}
    accepted = {name: value for name, value in options.items() if takes_all or name in parameters}
    positional = list(parameters)[1 : len(args) + 1]
    args = tuple(accepted.pop(name, value) for name, value in zip(positional, args)) + tuple(args[len(positional) :])
    with delayed.shells():
        twin = registration.dist_cls(*args, **{**kwargs, **accepted})
    if registration.replacement is not None:
        return twin, plan(twin, candidate.module, registration.replacement)
    if registration.built_in:  # what an instance holds beyond what its class gives it was put there later
        more = {name for name, _ in candidate.module.named_parameters()} - {name for name, _ in twin.named_parameters()}
        if more:
            raise PartitionError(
                f"it has the parameters {', '.join(sorted(more))}, which {type(twin).__name__} has not (weight_norm, "
                "spectral_norm and adapters add such)"
            )
    return twin, []


def _hooked(
    hook: Callable[..., Any], name: str, cls: type[nn.Module], *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Calls an init_hook or a forward_hook and checks what it returns."""
    result = hook(*args, **kwargs)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise UsageError(f"{name} of {cls.__name__} must return (args, kwargs), a tuple and a dict; got {result!r}")
    return tuple(result[0]), dict(result[1])


# 4. Carry


def _carry(candidate: _Candidate, twin: DistributedModule, moves: list[Move], names: Names) -> None:
    module, registration = candidate.module, candidate.registration
    checkpointed = [name for name, part in module.named_modules() if name and is_checkpointed(part)]
    if registration.replacement is not None and registration.family is not None:
        families.remember_place(candidate.name, module, registration.family, registration.replacement)
        lost = carry_marks(twin, module, registration.replacement.modules)
        checkpointed = [name for name in checkpointed if name in lost]
        carry(twin, module, registration.replacement, moves, names)
        for name in registration.replacement.attributes:
            if hasattr(module, name):
                setattr(twin, name, getattr(module, name))
    else:
        twin.carry_over(module)
    if checkpointed:
        log.warn_once(
            f"checkpointed inside {candidate.name}",
            "%s of '%s' was marked for activation checkpointing, but tensor parallelism replaces the whole of '%s'; "
            "mark that module, or what stands in its place once the model is made",
            *(", ".join(checkpointed), candidate.name, candidate.name),
        )


# 5. Put in place


def _finish(candidate: _Candidate, twin: DistributedModule) -> None:
    module, registration = candidate.module, candidate.registration
    twin.train(module.training)
    twin.__dict__["_smp_path"] = candidate.name
    if not delayed.has_delayed(twin):
        delayed.forget_initialisers(twin)
    for name in _HOOKS:
        if module.__dict__.get(name):
            twin.__dict__[name] = module.__dict__[name]
    twin._is_full_backward_hook = module._is_full_backward_hook  # how torch reads _backward_hooks
    for name, value in module.__dict__.items():
        # What other parts of smp have left on it: its stage, checkpointing. On a class of torch also what the user has.
        if name.startswith("_smp_") or registration.built_in:
            twin.__dict__.setdefault(name, value)
    twin.__dict__["_orig_forward"] = module.forward
    if registration.forward_hook is not None or registration.return_hook is not None:
        translate = None
        if registration.forward_hook is not None:
            translate = partial(_hooked, registration.forward_hook, "forward_hook", registration.cls)
        twin.__dict__[FORWARD_HOOKS] = translate, registration.return_hook
        twin.__dict__["forward"] = twin.hooked_forward  # a bound method: copies of the module call their own


def _adapt_surroundings(root: nn.Module, candidate: _Candidate, twin: DistributedModule) -> None:
    replacement = candidate.registration.replacement
    if replacement is not None and replacement.around is not None:
        chain = [root] if candidate.name else []
        for name in candidate.name.split(".")[:-1]:
            chain.append(chain[-1].get_submodule(name))
        replacement.around(twin, chain)


def _avoid_fused_encoder_layers(root: nn.Module) -> None:
    """In evaluation nn.TransformerEncoderLayer calls a fused kernel on its linears' weights; those are parts now. And
    nn.TransformerEncoder packs padded batches into nested tensors for that kernel."""
    for module in root.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and _has_twins(module):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and _has_twins(module):
            module.use_nested_tensor = False


def _has_twins(module: nn.Module) -> bool:
    return any(isinstance(part, DistributedModule) for part in module.modules())


def _warn(whole: dict[str, str]) -> None:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, why in whole.items():
        by_reason[why].append(name or "the model")
    for why, names in by_reason.items():
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        log.warn_rank0("tensor parallelism leaves %s whole: %s", shown, why)
