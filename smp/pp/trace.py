"""The order in which a model calls its modules, found by running it once on fake tensors."""

import copy
import functools
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from smp import log
from smp.nested import map_leaves
from smp.pp.placed import Placed

_tracing = False


def is_tracing() -> bool:
    """Whether the model is being run on fake tensors to learn its structure (`smp.is_tracing`)."""
    return _tracing


@log.long_phase("trace")
def execution_order(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str] | None:
    """Names of modules in the order of their first call; None, with a warning, when the model cannot run on fake
    tensors.

    Runs a copy of the module tree whose parameters and buffers are fake, so that nothing the model does to itself
    stays.
    """
    global _tracing
    order: dict[str, None] = {}
    _tracing = True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, _AssumeTrue(), torch.no_grad():
            tensors = [*module.parameters(), *module.buffers()]
            twins = {id(t): _fake_twin(t) for t in tensors}
            twin = copy.deepcopy(module, twins)
            for name, child in twin.named_modules():
                child.register_forward_pre_hook(functools.partial(_note_call, order, name))
            fake_args = map_leaves(lambda leaf: _fake(mode, leaf), (args, kwargs))
            twin(*fake_args[0], **fake_args[1])
    except Exception as error:
        log.warn_once(
            "trace",
            "the model cannot be traced on fake tensors (%s: %s); modules are partitioned in the order of their "
            "definition",
            type(error).__name__,
            str(error).splitlines()[0] if str(error) else "",
        )
        return None
    finally:
        _tracing = False
    return list(order)


class _AssumeTrue(TorchDispatchMode):
    """A branch on a tensor's value is taken as if it were true, and a number read from a tensor is 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].dtype.is_floating_point else 1)
        return func(*args, **(kwargs or {}))


def _note_call(order: dict[str, None], name: str, module: nn.Module, args: Any) -> None:
    order.setdefault(name)


def _fake_twin(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def _fake(mode: FakeTensorMode, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if type(leaf) is Placed:
        value = leaf.value
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.program.device)
    return mode.from_tensor(leaf)
