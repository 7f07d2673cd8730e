"""Functions of torch that mean something of their own on a placed tensor.

Each takes (program, func, args, kwargs) as glue code called them; on plain tensors they are torch's own.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from smp.errors import StepError
from smp.nested import flatten
from smp.pp import placed as glue
from smp.pp.placed import Placed, user_line

if TYPE_CHECKING:
    from smp.pp.program import Program


# ----------------------------------------------------------


def _requires_grad(program: "Program", func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    return tensor.value.requires_grad if type(tensor) is Placed else func(*args, **kwargs)


def _set_requires_grad(program: "Program", func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if type(tensor) is not Placed:
        return func(*args, **kwargs)
    wanted = bool(kwargs.get("requires_grad", args[1] if len(args) > 1 else True))
    value = tensor.value
    if value.requires_grad and not wanted:
        raise StepError(f"{user_line()} turns requires_grad off on a computed tensor; use detach() instead.")
    value.requires_grad = wanted
    if value.local is not None:
        value.local.requires_grad_(wanted)
    return tensor


def _is_leaf(program: "Program", func: Any, args: Any, kwargs: Any) -> Any:
    return not args[0].value.requires_grad if type(args[0]) is Placed else func(*args, **kwargs)


def _grad_fn(program: "Program", func: Any, args: Any, kwargs: Any) -> Any:
    # Only asked whether it is None: the graph behind a placed value is the tape.
    return (program.tape if args[0].value.requires_grad else None) if type(args[0]) is Placed else func(*args, **kwargs)


def _data(program: "Program", func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].detach() if type(args[0]) is Placed else func(*args, **kwargs)


def _iterate(program: "Program", func: Any, args: Any, kwargs: Any) -> Any:
    return iter(torch.unbind(args[0])) if type(args[0]) is Placed else func(*args, **kwargs)


def _tensor_backward(program: "Program", func: Any, args: Any, kwargs: Any) -> Any:
    tensor, *rest = args
    if type(tensor) is not Placed:
        return func(*args, **kwargs)
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = {**dict(zip(names, rest, strict=False)), **kwargs}
    if given.get("retain_graph") or given.get("create_graph") or given.get("inputs") is not None:
        raise StepError(f"{user_line()}: across stages backward takes no retain_graph, create_graph or inputs.")
    program.engine.backward([tensor], [given.get("gradient")])
    return None


def _register_hook(program: "Program", func: Any, args: Any, kwargs: Any) -> Any:
    tensor, hook = args
    if type(tensor) is not Placed:
        return func(*args, **kwargs)
    if not tensor.value.requires_grad:
        raise StepError(f"{user_line()}: a hook on a tensor that requires no gradient never runs.")
    if tensor.value.graph is not None:
        return tensor.value.graph.register_hook(hook)
    tensor.value.hooks.append(hook)
    return _HookHandle(tensor.value.hooks, hook)


class _HookHandle:
    def __init__(self, hooks: list[Any], hook: Any) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


def refuse(program: "Program", func: Any, args: Any, kwargs: Any) -> Any:
    leaves, _ = flatten((args, kwargs))
    if not any(type(leaf) is Placed for leaf in leaves):
        return func(*args, **kwargs)
    raise StepError(
        f"'{getattr(func, '__qualname__', func)}' at {user_line()} cannot work on a tensor that lives on one pipeline "
        "stage. Use model.backward(loss) for gradients of parameters, or put that code inside one module, so that it "
        "runs on one stage."
    )


SPECIAL: dict[Any, Callable[[Any, Any, Any, Any], Any]] = {
    glue.GET_REQUIRES_GRAD: _requires_grad,
    glue.SET_REQUIRES_GRAD: _set_requires_grad,
    torch.Tensor.requires_grad_: _set_requires_grad,
    glue.GET_IS_LEAF: _is_leaf,
    glue.GET_GRAD_FN: _grad_fn,
    glue.GET_DATA: _data,
    torch.Tensor.__iter__: _iterate,
    torch.Tensor.backward: _tensor_backward,
    torch.Tensor.register_hook: _register_hook,
    torch.Tensor.retain_grad: refuse,
    torch.autograd.grad: refuse,
    glue.GET_GRAD: refuse,
    torch.Tensor.data.__set__: refuse,  # type: ignore[attr-defined]
    torch.Tensor.set_: refuse,
    torch.Tensor.data_ptr: refuse,
    torch.Tensor.untyped_storage: refuse,
    torch.Tensor.register_post_accumulate_grad_hook: refuse,
    torch.Tensor.share_memory_: refuse,
}
