"""Activation checkpointing where modules live on stages.

    mark on a module          its `forward` is replaced, once the model is partitioned, and stays so: the call runs as
                              always (one node on its stage, hooks once), only what autograd saves in it is given up
    mark on a sequence        in glue: each group of members on one stage is one node; else: plain code of its node
    torch.utils.checkpoint    in glue: one node on the stage of the module it wraps (smp/pp/intercept.py)

The second run happens inside the backward, maybe on autograd's own thread, and maybe after the step: it takes the
program and the random streams of the first one with it.
"""

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn

from smp import activation, runtime
from smp.activation import WHOLE, Mark, mark_of, recomputed
from smp.errors import PartitionError, UsageError
from smp.log import warn_once, warn_rank0
from smp.nested import flatten
from smp.pp.partition import pinned_stages
from smp.pp.placed import Placed, current
from smp.pp.program import Program
from smp.pp.stages import StageMap, replaced_calls, scopes
from smp.pp.structure import signature_of


def checkpoint(module: Callable[..., Any], *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """`module(*args, **kwargs)`, whose activations are computed again in the backward instead of kept.

    Args:
        module: a module, or a function.
        args, kwargs: its arguments, which may be nested.
        preserve_rng_state: the second run draws the same random numbers as the first; False: new ones.

    Raises:
        UsageError: `module` cannot be called.
        PartitionError: its parts are placed on several stages by hand. (Where the automatic partition has split it, it
            is called without checkpointing, with a warning.)
    """
    if not isinstance(module, nn.Module):
        if not callable(module):
            raise UsageError(f"smp.patches.checkpoint.checkpoint takes a module, got {type(module).__name__}")
        return checkpoint_call(module, args, kwargs, {"preserve_rng_state": preserve_rng_state})
    if not activation.is_sequence(module):
        activation.checked(module, preserve_rng_state, False, "each", "smp.patches.checkpoint.checkpoint")
    return _call_marked(module, Mark(preserve_rng_state), args, kwargs)


def checkpoint_sequential(
    sequential: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """`sequential(input)` with the activations of its members computed again in the backward.

    Args:
        sequential: an nn.Sequential.
        input: what its first member is called on, a tensor or something nested.
        strategy, preserve_rng_state, pack_args_as_tuple: see smp.set_activation_checkpointing.

    Raises:
        UsageError: an unknown strategy, or a module that is no nn.Sequential.
        PartitionError: see `checkpoint`; said of a member.
    """
    call = "smp.patches.checkpoint.checkpoint_sequential"
    if not (isinstance(sequential, nn.Module) and activation.is_sequence(sequential)):
        raise UsageError(f"{call} takes an nn.Sequential, got {type(sequential).__name__}")
    group = activation.checked(sequential, preserve_rng_state, pack_args_as_tuple, strategy, call)
    return _call_marked(sequential, Mark(preserve_rng_state, group), (input,), {})


# What calls ask for, beside the marks on modules


class _Asked(threading.local):
    def __init__(self) -> None:
        self.marks: dict[int, Mark] = {}


_asked = _Asked()


def _call_marked(module: nn.Module, mark: Mark, args: Any, kwargs: Any) -> Any:
    installed = _install_on(module)
    outer = _asked.marks.get(id(module))
    _asked.marks[id(module)] = mark
    try:
        return module(*args, **kwargs)
    finally:
        if outer is None:
            del _asked.marks[id(module)]
        else:
            _asked.marks[id(module)] = outer
        if installed and current.streams is None:  # in a step, another microbatch may be in the middle of such a call
            _uninstall_from(module)


# Marked modules


def install(root: nn.Module, stages: StageMap | None) -> None:
    """Let the marks in a model that is partitioned take effect.

    Raises:
        PartitionError: a marked module whose parts are placed on several stages by hand.
    """
    for module in root.modules():
        mark = mark_of(module)
        if mark is not None:
            for piece in [module] if mark.group == WHOLE else module.children():
                _is_split(piece, stages)
            _install_on(module)


def warn_if_unused(root: nn.Module) -> None:
    """After the first step: what was to be offloaded was not there."""
    offload = activation.current_offload()
    if offload is not None and not offload.used and not any(map(activation.is_checkpointed, root.modules())):
        warn_rank0(
            "offload_activations=True has no effect: it is for checkpointed activations, and no module is checkpointed "
            "(smp.set_activation_checkpointing)"
        )


def _install_on(module: nn.Module) -> bool:
    """Whether that was to do."""
    if isinstance(module.__dict__.get("forward"), CheckpointedForward):
        return False
    module.__dict__.setdefault("_orig_forward", module.forward)
    module.__dict__["forward"] = CheckpointedForward(module, module.__dict__.get("forward"))
    return True


def _uninstall_from(module: nn.Module) -> None:
    ours = module.__dict__.pop("forward")
    if ours.replaced is not None:
        module.__dict__["forward"] = ours.replaced
    if module.__dict__["_orig_forward"] == ours.plain:
        del module.__dict__["_orig_forward"]


class CheckpointedForward:
    """The `forward` of a module that is, or was once, checkpointed. It can be copied and pickled with its module."""

    def __init__(self, module: nn.Module, replaced: Callable[..., Any] | None) -> None:
        self.module = module
        self.replaced = replaced  # an earlier `forward` of the instance; a class's own need not be kept

    @property
    def plain(self) -> Callable[..., Any]:
        """The forward without checkpointing."""
        forward = self.replaced
        return types.MethodType(type(self.module).forward, self.module) if forward is None else forward

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        mark = _asked.marks.get(id(module)) or mark_of(module)
        sequence_misused = mark is not None and mark.group != WHOLE and len(args) + len(kwargs) != 1
        if mark is None or activation.is_running(module) or sequence_misused:
            return self.plain(*args, **kwargs)
        program = current.program
        if program is not None and program.in_node:
            program = None
        if mark.group != WHOLE:
            (value,) = (*args, *kwargs.values())
            return _run_sequence(program, list(module), value, mark)  # type: ignore[call-overload]
        if program is not None:  # split over stages; or not placed, and then nothing in it requires a gradient
            _is_split(module, _stages(program, module))
            return self.plain(*args, **kwargs)
        # The replaced call has given the module its stream already.
        return recomputed(
            self.plain,
            args,
            kwargs,
            (module,),
            resumed=_resumption((module,)),
            preserve_rng_state=mark.preserve_rng_state,
        )


def _stages(program: Program, module: nn.Module) -> StageMap | None:
    if program.engine.stages is None:  # the first use of a part of the model: this partitions it
        for parameter in module.parameters():
            program.engine.owner_of(parameter)
    return program.engine.stages


def _is_split(module: nn.Module, stages: StageMap | None) -> bool:
    """Whether a module lies on several stages; then with a warning.

    Raises:
        PartitionError: it was placed so by hand.
    """
    found = stages.stages_in(module) if stages is not None else {}
    if len(set(found.values())) < 2:
        return False
    assert stages is not None
    name = stages.name_of(module) or type(module).__name__
    shown = "; ".join(
        f"stage {stage}: {', '.join(n for n, s in found.items() if s == stage)}"
        for stage in sorted(set(found.values()))
    )
    if not runtime.get().config.auto_partition or len(pinned_stages(module)) > 1:
        raise PartitionError(
            f"module '{name}' is to be checkpointed, but its parts are placed on several stages ({shown}). Place all "
            "of it on one stage, or checkpoint the modules inside it."
        )
    warn_once(
        f"checkpoint {name}",
        "module '%s' is not checkpointed, because the partition has split it (%s); checkpoint the modules inside it",
        *(name, shown),
    )
    return True


# Sequences


def _run_sequence(program: Program | None, members: Sequence[nn.Module], value: Any, mark: Mark) -> Any:
    stages = _stages(program, nn.ModuleList(members)) if program is not None else None
    if stages is None or program is None:
        for group in _chunks(members, mark.group):
            value = _run_group(group, value, mark)
        return value
    for stage, together in _runs_on_one_stage(stages, members):
        if stage is None and len(together) == 1 and stages.node_of(together[0]) is None:
            _is_split(together[0], stages)
            value = together[0](value)
            continue
        for group in _chunks(together, mark.group):
            value = _run_group_node(program, stages, group, value, mark)
    return value


def _chunks(members: Sequence[nn.Module], size: int) -> Iterator[tuple[nn.Module, ...]]:
    size = size or max(1, len(members))
    for start in range(0, len(members), size):
        yield tuple(members[start : start + size])


def _runs_on_one_stage(stages: StageMap, members: Sequence[nn.Module]) -> Iterator[tuple[int | None, list[nn.Module]]]:
    """Consecutive members that live on one stage. One without parameters goes with those before it; one that is split
    itself stands alone."""
    run: list[nn.Module] = []
    at: int | None = None
    for member in members:
        node = stages.node_of(member)
        stage = node[1] if node is not None else None
        if run and (node is None or (stage is not None and at is not None and stage != at)):
            yield at, run
            run, at = [], None
        if node is None:
            yield None, [member]
            continue
        run.append(member)
        at = stage if stage is not None else at
    if run:
        yield at, run


def _run_group(group: tuple[nn.Module, ...], value: Any, mark: Mark) -> Any:
    resumed = _resumption(group)
    run = functools.partial(_chain, group)
    return recomputed(run, (value,), {}, group, resumed=resumed, preserve_rng_state=mark.preserve_rng_state)


def _chain(group: tuple[nn.Module, ...], value: Any) -> Any:
    for member in group:
        value = member(value)
    return value


def _run_group_node(program: Program, stages: StageMap, group: tuple[nn.Module, ...], value: Any, mark: Mark) -> Any:
    """One node for the whole group. Each member splits the stream as it does without checkpointing."""
    key, stage = stages.group_of(group)
    streams = program.step.streams
    streams_left = sum(not node[0].deterministic for node in map(stages.node_of, group) if node is not None)
    seed = streams.current()
    value = program.call_module(f"checkpoint({key.name})", stage, _GroupCall(group, mark), key, (value,), {})
    for _ in range(streams_left):
        streams.leave(seed)
        seed = streams.current()
    return value


class _GroupCall:
    def __init__(self, group: tuple[nn.Module, ...], mark: Mark) -> None:
        self._group, self._mark = group, mark

    def __call__(self, value: Any) -> Any:
        if not current.program or not current.program.in_node:
            return _chain(self._group, value)
        return _run_group(self._group, value, self._mark)


# The second run


def _resumption(modules: tuple[nn.Module, ...]) -> Callable[[], AbstractContextManager[None]]:
    """For the second run: the program and the streams of the calling thread, and the modules' replaced calls."""
    program, streams = current.program, current.streams
    if streams is None:
        return nullcontext
    salt = streams.salt

    @contextmanager
    def resumed() -> Iterator[None]:
        outer, outer_salt = (current.program, current.streams), streams.salt
        current.program, current.streams, streams.salt = program, streams, salt
        try:
            with ExitStack() as stack:
                if outer[1] is None and program is None:  # the step is over: its modules have their own calls again
                    for module in modules:
                        stack.enter_context(replaced_calls(_missing(module)))
                yield
        finally:
            current.program, current.streams = outer
            streams.salt = outer_salt

    return resumed


def _missing(module: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    return ((part, call) for part, call in scopes(module) if "_call_impl" not in part.__dict__)


# torch.utils.checkpoint inside a step


def checkpoint_call(function: Any, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
    """What torch.utils.checkpoint.checkpoint(function, *args, **kwargs, **options) does in a step."""
    streams = current.streams
    function, args, kwargs = _unwrap_partial(function, args, kwargs)
    module = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    modules = (module,) if isinstance(module, nn.Module) else ()

    def run(*args: Any, **kwargs: Any) -> Any:
        if options.get("use_reentrant", False):  # this form takes no keyword arguments for the function
            return recomputed(functools.partial(function, **kwargs), args, {}, modules, **options)
        return recomputed(function, args, kwargs, modules, resumed=_resumption(modules), **options)

    program = current.program if current.program is not None and not current.program.in_node else None
    if program is not None and modules:
        return _module_as_node(program, modules[0], function, run, args, kwargs)
    # A module has a stream of its own already; any other function gets one here.
    seed = None if modules or streams is None else streams.enter()
    try:
        if program is None:
            return run(*args, **kwargs)
        return _function_as_node(program, function, run, args, kwargs)
    finally:
        if seed is not None and streams is not None:
            streams.leave(seed)


def _function_as_node(program: Program, function: Any, run: Any, args: Any, kwargs: Any) -> Any:
    reached = list(_reached(function, set()))
    if any(isinstance(x, nn.Module | Placed) for x in reached):
        warn_once(
            f"checkpoint {_describe(function)}",
            "%s is not done: the function uses modules or placed tensors that are not among its arguments; "
            "checkpoint the modules themselves.",
            _describe(function),
        )
        return function(*args, **kwargs)
    # Not the function itself: a closure is a new object on every call.
    key = (getattr(function, "__code__", function), "checkpoint", *map(signature_of, reached))
    return program.call_callable(_describe(function), run, key, args, kwargs)


def _module_as_node(program: Program, module: nn.Module, function: Any, run: Any, args: Any, kwargs: Any) -> Any:
    stages = _stages(program, module)
    node = None if stages is None else stages.node_of(module)
    if node is None:
        warn_once(
            f"checkpoint {id(module)}",
            f"module '{type(module).__name__}' lies on several stages and is not checkpointed; checkpoint the modules "
            "inside it.",
        )
        return function(*args, **kwargs)
    key, stage = node
    return program.call_module(f"checkpoint({key.name})", stage, run, key._replace(variant="checkpoint"), args, kwargs)


def _reached(function: Any, seen: set[int]) -> Iterator[Any]:
    """What a function reaches besides its arguments: through its closure, defaults and globals."""
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    held: list[Any] = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held += [function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__]
    for leaf in flatten(held)[0]:
        yield leaf
        if getattr(leaf, "__module__", None) == function.__module__:
            yield from _reached(leaf, seen)


def _describe(function: Any) -> str:
    return f"checkpoint({getattr(function, '__qualname__', type(function).__name__)})"


def _unwrap_partial(function: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Open `functools.partial`, so that the tensors it holds count as arguments."""
    while isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    return function, tuple(args), kwargs


activation.microbatch_of_thread = lambda: 0 if current.program is None else current.program.index
