"""Parts of torch that hide from `__torch_function__`, intercepted while a step runs.

    torch.autograd.backward              loss.backward() in a step means model.backward(loss)
    torch.autograd.Function.apply        one node, on the owner of its largest operand
    a function of torch.jit.script       the same
    torch.utils.checkpoint.checkpoint    one node, run and recomputed on the stage of the module it wraps

A thread that runs no step function sees torch's own behaviour.
"""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from smp.errors import StepError
from smp.log import warn_once
from smp.nested import flatten
from smp.pp.placed import Placed, current, user_line
from smp.pp.program import Program
from smp.pp.structure import signature_of

plain_backward = torch.autograd.backward
_plain_apply = torch.autograd.Function.__dict__["apply"].__func__
_plain_script_call = torch.jit.ScriptFunction.__call__
_checkpoint = torch.utils.checkpoint.checkpoint
# The function behind the decorator that keeps the compiler out. It looks up this attribute on every call, so that
# setting it also reaches the references that models took when they were built.
_checkpoint_inner = _checkpoint.__wrapped__  # type: ignore[attr-defined]
_HOOK = "__dynamo_disable"


@contextmanager
def intercepted(backward: Callable[[list[Any], list[Any]], None]) -> Iterator[None]:
    """Intercept for the duration of a step; `backward(tensors, gradients)` is what model.backward does."""
    previous = getattr(_checkpoint_inner, _HOOK, None)

    def autograd_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        inside_autograd = torch._C._current_graph_task_id() != -1  # a reentrant checkpoint recomputes
        if (
            current.streams is None
            or current.in_backward
            or inside_autograd
            or (current.program is not None and current.program.in_node)
        ):
            plain_backward(tensors, grad_tensors, *args, **kwargs)
            return
        many = list(tensors) if isinstance(tensors, tuple | list) else [tensors]
        gradients = list(grad_tensors) if isinstance(grad_tensors, tuple | list) else [grad_tensors] * len(many)
        options = dict(zip(("retain_graph", "create_graph"), args, strict=False)) | kwargs
        if any(options.get(name) for name in ("retain_graph", "create_graph")) or options.get("inputs") is not None:
            raise StepError(f"{user_line()}: in a step, backward takes no retain_graph, create_graph or inputs.")
        backward(many, gradients)

    torch.autograd.backward = autograd_backward
    torch.autograd.Function.apply = classmethod(_function_apply)  # type: ignore[assignment]
    torch.jit.ScriptFunction.__call__ = _script_call  # type: ignore[assignment,method-assign]
    setattr(_checkpoint_inner, _HOOK, _checkpoint_in_step)
    try:
        yield
    finally:
        torch.autograd.backward = plain_backward
        torch.autograd.Function.apply = classmethod(_plain_apply)  # type: ignore[assignment]
        torch.jit.ScriptFunction.__call__ = _plain_script_call  # type: ignore[method-assign]
        setattr(_checkpoint_inner, _HOOK, previous)


def _in_glue() -> Program | None:
    program = current.program
    return None if program is None or program.in_node else program


def _function_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    program = _in_glue()
    if program is None:
        return _plain_apply(cls, *args, **kwargs)

    def apply(*args: Any, **kwargs: Any) -> Any:
        return _plain_apply(cls, *args, **kwargs)

    return program.call_callable(cls.__name__, apply, (cls, "apply"), args, kwargs)


def _script_call(function: Any, *args: Any, **kwargs: Any) -> Any:
    program = _in_glue()
    if program is None:
        return _plain_script_call(function, *args, **kwargs)
    run = functools.partial(_plain_script_call, function)
    return program.call_callable(function.qualified_name, run, (function.qualified_name, "script"), args, kwargs)


def _checkpoint_in_step(function: Any, *args: Any, **kwargs: Any) -> Any:
    streams = current.streams
    if streams is None:
        return _checkpoint_inner(function, *args, **kwargs)
    options = {name: kwargs.pop(name) for name in _CHECKPOINT_OPTIONS if name in kwargs}
    function, args, kwargs = _unwrap_partial(function, args, kwargs)
    module = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)

    def run(*args: Any, **kwargs: Any) -> Any:
        # The reentrant form takes no keyword arguments for the function.
        code = functools.partial(function, **kwargs)
        once = _buffers_written_once(module, code) if isinstance(module, nn.Module) else code
        return _checkpoint_inner(once, *args, **options)

    program = _in_glue()
    if program is not None and isinstance(module, nn.Module):
        return _checkpoint_module(program, module, function, run, args, kwargs)
    # A module has a stream of its own already; any other function gets one here.
    seed = None if isinstance(module, nn.Module) else streams.enter()
    try:
        if program is None:
            return run(*args, **kwargs)
        return _checkpoint_function(program, function, run, args, kwargs)
    finally:
        if seed is not None:
            streams.leave(seed)


def _checkpoint_function(program: Program, function: Any, run: Any, args: Any, kwargs: Any) -> Any:
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


def _checkpoint_module(program: Program, module: nn.Module, function: Any, run: Any, args: Any, kwargs: Any) -> Any:
    node = None if program.engine.stages is None else program.engine.stages.node_of(module)
    if node is None:
        warn_once(
            f"checkpoint {id(module)}",
            f"module '{type(module).__name__}' lies on several stages and is not checkpointed; checkpoint the modules "
            "inside it.",
        )
        return function(*args, **kwargs)
    key, stage = node
    return program.call_module(f"checkpoint({key.name})", stage, run, key._replace(variant="checkpoint"), args, kwargs)


def _buffers_written_once(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for one checkpoint: when it is run again in the backward, the module's buffers stay as they are.

    Else running statistics would move, and batches be counted, twice.
    """
    first = True
    written: list[torch.Tensor] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        if first:
            first = False
            versions = [(b, _version(b)) for b in module.buffers()]
            result = function(*args, **kwargs)
            written.extend(b for b, version in versions if _version(b) != version)
            written.extend(_running_statistics(module))
            return result
        entries = [(m, dict(m._buffers)) for m in module.modules() if m._buffers]
        values = [(b, b.detach().clone()) for b in written]
        try:
            return function(*args, **kwargs)
        finally:
            for m, buffers in entries:
                m._buffers.update(buffers)
            for b, value in values:
                b.data.copy_(value)  # past the version counter: the new graph may have saved the buffer

    return call


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _running_statistics(module: nn.Module) -> Iterator[torch.Tensor]:
    """Buffers of normalisations, whose kernels write them without counting a version."""
    for m in module.modules():
        if isinstance(m, nn.modules.batchnorm._NormBase):
            yield from (b for b in m._buffers.values() if b is not None)


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


_CHECKPOINT_OPTIONS = ("use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state", "early_stop")
