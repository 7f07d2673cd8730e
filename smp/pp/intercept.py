"""Parts of torch that hide from `__torch_function__`, intercepted while a step runs.

    torch.autograd.backward              loss.backward() in a step means model.backward(loss)
    torch.autograd.Function.apply        one node, on the owner of its largest operand
    a function of torch.jit.script       the same
    torch.utils.checkpoint.checkpoint    one node, run and recomputed on the stage of the module it wraps

A thread that runs no step function sees torch's own behaviour.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint

from smp.errors import StepError
from smp.pp.checkpointing import checkpoint_call
from smp.pp.placed import current, user_line
from smp.pp.program import Program

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


@contextmanager
def checkpoint_replaced(call: Callable[[Callable[[], Any], Any], Any]) -> Iterator[None]:
    """Inside, `checkpoint(function, *args, **kwargs)` is `call(run, (args, kwargs))`; `run()` runs the function."""
    previous = getattr(_checkpoint_inner, _HOOK, None)

    def replacement(function: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name not in _CHECKPOINT_OPTIONS}
        return call(functools.partial(function, *args, **kwargs), (args, kwargs))

    setattr(_checkpoint_inner, _HOOK, replacement)
    try:
        yield
    finally:
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
    if current.streams is None:
        return _checkpoint_inner(function, *args, **kwargs)
    options = {name: kwargs.pop(name) for name in _CHECKPOINT_OPTIONS if name in kwargs}
    if options.get("use_reentrant", True) is None:
        del options["use_reentrant"]
    return checkpoint_call(function, args, kwargs, {"use_reentrant": True, **options})


_CHECKPOINT_OPTIONS = ("use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state", "early_stop")
