"""Activation checkpointing: what a module computes is given up after its forward and computed again in the backward.

    forward      code(args)          kept: args (in host memory, when they are offloaded), random state, autocast
    backward     code(args) again    with the random numbers, buffers and caches of the first time

`set_activation_checkpointing` leaves marks on modules; smp/pp/checkpointing.py acts on them, because it knows which
module runs on which stage. `recomputed` runs one piece of code that way, over torch.utils.checkpoint.
"""

import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from smp import log, runtime
from smp.errors import SmpError, UsageError
from smp.nested import Spec, flatten, unflatten
from smp.offload import Offload
from smp.runtime import Runtime

ATTRIBUTE = "_smp_checkpointing"
WHOLE = -1

# The function behind the decorator that keeps the compiler out; steps intercept the decorated one.
_torch_checkpoint = torch.utils.checkpoint.checkpoint.__wrapped__  # type: ignore[attr-defined]


# Marks


@dataclass(frozen=True)
class Mark:
    """What a user asked for one module.

    Args:
        preserve_rng_state: the second run draws the random numbers of the first.
        group: WHOLE: the module is one piece; else it is a sequence whose members are checkpointed together, so many
            at a time (0: all that lie on one stage).
        member: it only is a part of a sequence that is checkpointed in groups.
    """

    preserve_rng_state: bool = True
    group: int = WHOLE
    member: bool = False


def mark_of(module: nn.Module) -> Mark | None:
    """The module's mark; None when it is not checkpointed by itself."""
    mark: Mark | None = module.__dict__.get(ATTRIBUTE)
    return None if mark is None or mark.member else mark


def is_checkpointed(module: nn.Module) -> bool:
    """Whether the activations of `module` are computed again in the backward: it is checkpointed by itself or as a
    member of a sequence. Modules inside such a one are not told apart from others."""
    return ATTRIBUTE in module.__dict__


def mark_checkpointed(module: nn.Module) -> None:
    """Leaves the mark of `set_activation_checkpointing` on a module that is not part of the model yet."""
    module.__dict__.setdefault(ATTRIBUTE, Mark())


def set_activation_checkpointing(
    module: nn.Module, preserve_rng_state: bool = True, pack_args_as_tuple: bool = False, strategy: str = "each"
) -> None:
    """Compute the activations of `module` again in the backward instead of keeping them. Before or after
    DistributedModel is made, not inside a step.

    A module is checkpointed as a whole. It has to lie on one pipeline stage: one that is split by hand is refused when
    the model is partitioned, one that the automatic partition has split is not checkpointed, with a warning. Arguments
    and results may be nested and given by keyword.

    Args:
        module: part of the model. The members of an nn.Sequential are checkpointed as `strategy` says.
        preserve_rng_state: the second run draws the same random numbers as the first (dropout); False: new ones.
        pack_args_as_tuple: accepted and not needed: a member gets what it would get without checkpointing, be it a
            tensor or a tuple.
        strategy: for an nn.Sequential: "each" member by itself; "contiguous": all that lie on one stage together;
            "group_N": N consecutive ones together, never over the boundary of a stage.

    Raises:
        UsageError: `module` is no module, is not called itself (a list), or is not part of the model; an unknown
            strategy, or one for a module that is no nn.Sequential; a call inside a step.
    """
    model: Any = runtime.get().model if runtime.is_initialized() else None
    target = cast(nn.Module, module.module) if model is not None and module is model else module
    group = checked(target, preserve_rng_state, pack_args_as_tuple, strategy, "smp.set_activation_checkpointing")
    if model is not None and not model.owns_module(target):
        raise UsageError(
            f"smp.set_activation_checkpointing: this {type(module).__name__} is not part of the model. Take the module "
            "from model.get_module(); tensor parallelism has put other modules in the place of those it split."
        )
    marks = _marks(target, preserve_rng_state, group)
    before = {part: part.__dict__.get(ATTRIBUTE) for part in marks}
    _set_marks(marks)
    try:
        if model is not None:
            model.checkpointing_changed()
    except SmpError:
        _set_marks(before)
        raise


def _set_marks(marks: Mapping[nn.Module, Mark | None]) -> None:
    for part, mark in marks.items():
        part.__dict__.pop(ATTRIBUTE, None)
        if mark is not None:
            part.__dict__[ATTRIBUTE] = mark


def checked(module: Any, preserve_rng_state: Any, pack_args_as_tuple: Any, strategy: Any, call: str) -> int:
    """`Mark.group` for the given arguments of a public function.

    Raises:
        UsageError: see set_activation_checkpointing.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"{call} takes a torch.nn.Module, got {type(module).__name__}")
    for name, flag in (("preserve_rng_state", preserve_rng_state), ("pack_args_as_tuple", pack_args_as_tuple)):
        if not isinstance(flag, bool):
            raise UsageError(f"{call}: {name} is True or False, got {flag!r}")
    size = group_size(strategy, call)
    if is_sequence(module):
        return size
    if type(module).forward is nn.Module.forward and not isinstance(module, torch.jit.ScriptModule):
        raise UsageError(
            f"{call} got a {type(module).__name__}, which is never called itself; checkpoint the modules in it"
        )
    if strategy != "each":
        raise UsageError(
            f"{call}: strategy {strategy!r} is for an nn.Sequential, got a {type(module).__name__}, which is "
            "checkpointed as a whole; leave strategy out"
        )
    if pack_args_as_tuple:
        log.warn_once("pack_args_as_tuple", "%s: pack_args_as_tuple=True is for an nn.Sequential: no effect", call)
    return WHOLE


def group_size(strategy: Any, call: str) -> int:
    """How many members of a sequence a strategy takes together; 0 means all.

    Raises:
        UsageError: there is no such strategy.
    """
    if strategy == "each":
        return 1
    if strategy == "contiguous":
        return 0
    match = re.fullmatch(r"group_([1-9][0-9]*)", strategy) if isinstance(strategy, str) else None
    if match is None:
        raise UsageError(
            f"{call}: got strategy {strategy!r}; there are 'each', 'contiguous' and 'group_N' with a whole number N "
            "from 1, as 'group_2'"
        )
    return int(match[1])


def is_sequence(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether `module` does what an nn.Sequential does: each member is called on what the one before it returned."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _marks(module: nn.Module, preserve: bool, group: int) -> dict[nn.Module, Mark | None]:
    """The new marks; None where one goes away. The members of a sequence that are marked by themselves stay so."""
    if not is_sequence(module):
        return {module: Mark(preserve)}
    members = {m: m.__dict__.get(ATTRIBUTE) for m in module}
    if group == 1:
        return {module: None, **dict.fromkeys(members, Mark(preserve))}
    own = {m: mark or Mark(preserve, member=True) for m, mark in members.items()}
    earlier = module.__dict__.get(ATTRIBUTE)
    if earlier is None and members and all(mark == Mark(mark.preserve_rng_state) for mark in own.values()):
        own = dict.fromkeys(members, Mark(preserve, member=True))  # "each" was said before
    return {module: Mark(preserve, group), **own}


# Running


class _Running(threading.local):
    """The modules of the innermost checkpointed code that the calling thread runs, and what calls ask for."""

    modules: tuple[nn.Module, ...] = ()


_running = _Running()


def is_running(module: nn.Module) -> bool:
    """Whether the checkpointed code that runs is this module's."""
    return _running.modules == (module,)


def recomputed(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    modules: tuple[nn.Module, ...] = (),
    *,
    resumed: Callable[[], AbstractContextManager[None]] = nullcontext,
    preserve_rng_state: bool = True,
    use_reentrant: bool = False,
    **options: Any,
) -> Any:
    """`function(*args, **kwargs)`, of which the backward keeps only the arguments, and runs it again.

    The second run starts from the buffers of `modules`, from the arguments and from the state of objects in them (a
    key/value cache) as the first one found them, and leaves no trace in them.

    Args:
        modules: the modules that `function` runs.
        resumed: made ready for the second run, which may happen on another thread.
        preserve_rng_state, use_reentrant, options: as in torch.utils.checkpoint.checkpoint. The reentrant form takes
            the arguments' tensors as they are, and they are not offloaded.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    leaves, spec = flatten((tuple(args), kwargs))
    region = _Region(function, modules, leaves, spec, (tuple(args), kwargs), resumed)
    if use_reentrant:
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return _torch_checkpoint(region, *given, preserve_rng_state=preserve_rng_state, use_reentrant=True, **options)
    kept = region.tensors_to_keep(leaves)
    del leaves
    offload = current_offload() if _has_gradient(kept, modules) else None
    with offload.saving() if offload is not None else nullcontext():
        return _torch_checkpoint(region, *kept, preserve_rng_state=preserve_rng_state, use_reentrant=False, **options)


def _has_gradient(kept: list[Tensor], modules: tuple[nn.Module, ...]) -> bool:
    return bool(kept) and any(
        tensor.requires_grad for tensors in (kept, *(module.parameters() for module in modules)) for tensor in tensors
    )


@dataclass
class _Habits:
    """What a piece of code did when it was run first: whether it writes to its arguments, and to which buffers."""

    writes_arguments: bool
    buffers: frozenset[tuple[int, str]]


_habits: "weakref.WeakKeyDictionary[Any, dict[int, _Habits]]" = weakref.WeakKeyDictionary()


class _Region:
    """One run of checkpointed code: called first with what it was given, then with what was kept of that."""

    def __init__(
        self,
        function: Callable[..., Any],
        modules: tuple[nn.Module, ...],
        leaves: list[Any],
        spec: Spec,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        resumed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._function = function
        self._modules = modules
        self._spec = spec
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = given
        self._resumed = resumed
        self._owner = modules[0] if modules else getattr(function, "__code__", function)
        self._known = _habits.get(self._owner, {}).get(len(modules)) if _can_be_key(self._owner) else None
        self._buffers = _Buffers(modules, None if self._known is None else self._known.buffers)
        self._objects = _Objects(self._leaves)

    def tensors_to_keep(self, leaves: list[Any]) -> list[Tensor]:
        """The arguments' tensors for the second run: copies where the code may write to its arguments."""
        given = [leaves[i] for i in self._places]
        if self._known is not None and not self._known.writes_arguments:
            return given
        return [t if isinstance(t, nn.Parameter) else t.clone() for t in given]

    def __call__(self, *kept: Tensor) -> Any:
        outer, _running.modules = _running.modules, self._modules
        try:
            return self._first() if self._given is not None else self._again(kept)
        finally:
            _running.modules = outer

    def _first(self) -> Any:
        assert self._given is not None
        (args, kwargs), self._given = self._given, None
        tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)] if not self._known else []
        versions = [_version(t) for t in tensors]
        result = self._function(*args, **kwargs)
        written = self._buffers.note_written()
        self._objects.note_changed()
        if self._known is None and _can_be_key(self._owner):
            writes = any(_version(t) != version for t, version in zip(tensors, versions, strict=True))
            _habits.setdefault(self._owner, {})[len(self._modules)] = _Habits(writes, written)
        return result

    def _again(self, kept: tuple[Tensor, ...]) -> Any:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, kept, strict=True):
            leaves[place] = tensor
        args, kwargs = unflatten(self._spec, leaves)
        with self._resumed(), self._buffers.as_before(), self._objects.as_before():
            return self._function(*args, **kwargs)


def _can_be_key(owner: Any) -> bool:
    try:
        weakref.ref(owner)
        hash(owner)
    except TypeError:
        return False
    return True


class _Buffers:
    """The buffers of some modules before a run. Whatever runs `as_before` works on copies of those that it writes.

    `written`: which ones the code has written before, so that their values are kept; None: not known, all are.
    """

    def __init__(self, modules: tuple[nn.Module, ...], written: frozenset[tuple[int, str]] | None) -> None:
        self._holders: list[nn.Module] = []
        for module in modules:
            if next(module.buffers(), None) is not None:
                self._holders += [m for m in module.modules() if m._buffers]
        self._before: dict[tuple[int, str], tuple[Tensor, int, Tensor | None]] = {}
        for place, holder in enumerate(self._holders):
            for name, buffer in holder._buffers.items():
                if buffer is not None:
                    # Training does not read the statistics that normalisations keep.
                    copied = not _is_norm(holder) and (written is None or (place, name) in written)
                    self._before[place, name] = buffer, _version(buffer), buffer.detach().clone() if copied else None

    def note_written(self) -> frozenset[tuple[int, str]]:
        """After the run: forget all but the buffers that it has written."""
        for (place, name), (buffer, version, _) in list(self._before.items()):
            holder = self._holders[place]
            moved = _is_norm(holder) and holder.training  # its kernels write without counting a version
            if holder._buffers.get(name) is buffer and _version(buffer) == version and not moved:
                del self._before[place, name]
        return frozenset(self._before)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        entries = [(holder, dict(holder._buffers)) for holder in self._holders] if self._before else []
        copies: dict[int, Tensor] = {}  # a buffer that two modules share stays shared
        for (place, name), (buffer, _, copy) in self._before.items():
            if id(buffer) not in copies:
                copies[id(buffer)] = (buffer.detach() if copy is None else copy).clone()
            self._holders[place]._buffers[name] = copies[id(buffer)]
        try:
            yield
        finally:
            for holder, buffers in entries:
                holder._buffers.update(buffers)


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Objects:
    """What objects among the arguments held before a run: a cache that a run has added to would grow a second time.

    Follows attributes, lists and dicts of objects that are no modules, tensors or classes, to a depth.
    """

    def __init__(self, leaves: list[Any]) -> None:
        self._before: list[tuple[Any, Any]] = []
        seen: set[int] = set()
        for leaf in leaves:
            self._note(leaf, _DEPTH, seen)

    def _note(self, obj: Any, depth: int, seen: set[int]) -> None:
        state = _state_of(obj)
        if state is None or id(state) in seen:
            return
        seen.add(id(state))
        self._before.append((state, state.copy()))
        if depth:
            for value in state if isinstance(state, list) else state.values():
                self._note(value, depth - 1, seen)

    def note_changed(self) -> None:
        """After the run: forget all that is as it was."""
        self._before = [(state, before) for state, before in self._before if not _same(state, before)]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        now = [(state, state.copy()) for state, _ in self._before]
        for state, before in self._before:
            _set(state, before)
        try:
            yield
        finally:
            for state, later in now:
                _set(state, later)


_DEPTH = 4
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_NEVER = (Tensor, nn.Module, type, type(re), type(flatten), type(len), torch.Generator)


def _state_of(obj: Any) -> Any:
    """The list or dict in which an object keeps what can change; None when there is none to follow."""
    if isinstance(obj, _PLAIN) or isinstance(obj, _NEVER):
        return None
    if type(obj) in (list, dict):
        return obj
    state = getattr(obj, "__dict__", None)
    return state if type(state) is dict else None


def _same(state: Any, before: Any) -> bool:
    if len(state) != len(before):
        return False
    if isinstance(state, list):
        return all(a is b for a, b in zip(state, before, strict=True))
    return all(key in before and before[key] is value for key, value in state.items())


def _set(state: Any, content: Any) -> None:
    if isinstance(state, list):
        state[:] = content
    else:
        state.clear()
        state.update(content)


# Offloading

_offloads: "weakref.WeakKeyDictionary[Runtime, Offload]" = weakref.WeakKeyDictionary()
microbatch_of_thread: Callable[[], int] = lambda: 0  # noqa: E731  the pipeline engine puts its own in place


def current_offload() -> Offload | None:
    """Where the arguments of checkpointed code go between forward and backward; None: they stay on the device."""
    if not runtime.is_initialized() or not runtime.get().config.offload_activations:
        return None
    rt = runtime.get()
    found = _offloads.get(rt)
    if found is None:
        found = _offloads[rt] = Offload(rt.device, rt.config.activation_loading_horizon, lambda: microbatch_of_thread())
    return found


def prefetch(microbatches: Iterable[int]) -> None:
    """Start to copy back what is offloaded of these microbatches, whose backward comes soon, the first one first.

    To be called ahead of each turn, with the microbatches whose backward is among the next `activation_loading_horizon`
    turns on this stage. What is there already, and other microbatches, are left alone.
    """
    offload = current_offload()
    if offload is not None:
        offload.prefetch(microbatches)
