"""Which modules are to be split over the tensor-parallel group: marks that users leave on them.

A mark says whether tensor parallelism is wanted and with which options. It is left at creation, by the innermost
`tensor_parallelism` context around it, or afterwards by `set_tensor_parallelism`. What becomes of it is decided by
convert.py, when the model is made.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from smp import runtime
from smp.errors import UsageError
from smp.tp.delayed import delay_param_initialization

# Options that distributed transformer layers know; a module that has no use for one ignores it.
KNOWN_OPTIONS = frozenset(
    [
        *["fused_softmax", "fused_bias_gelu", "fused_dropout", "flash_attention", "attention_in_fp32"],
        *["fp32_residual_addition", "query_key_layer_scaling", "use_alibi", "distribute_embedding", "zero_init"],
    ]
)
_ATTRIBUTE = "_smp_tensor_parallelism"


@dataclass(frozen=True)
class Mark:
    """What a user asked for one module.

    Args:
        enabled: whether the module may be split.
        options: what overrides the arguments that the registered `init_hook` gives.
    """

    enabled: bool
    options: Mapping[str, Any] = field(default_factory=dict)


def mark_of(module: nn.Module) -> Mark | None:
    """The module's mark; None when nobody has said anything."""
    return module.__dict__.get(_ATTRIBUTE)


_contexts: list[Mark] = []  # innermost last
_module_init = nn.Module.__init__


def _marking_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    _module_init(self, *args, **kwargs)
    self.__dict__[_ATTRIBUTE] = _contexts[-1]


@contextmanager
def tensor_parallelism(enabled: bool = True, **kwargs: Any) -> Iterator[None]:
    """Modules created inside are marked: supported ones will be split over the tensor-parallel group.

    Contexts nest, the innermost counts. Of supported modules inside each other the outermost one is split as a whole.

    Args:
        enabled: False: the modules are left whole.
        kwargs: options for the distributed modules, see API.md section 5; they override what an `init_hook` says.
    """
    _contexts.append(Mark(_flag(enabled), kwargs))
    nn.Module.__init__ = _marking_init  # type: ignore[method-assign]
    try:
        yield
    finally:
        _contexts.pop()
        if not _contexts:
            nn.Module.__init__ = _module_init  # type: ignore[method-assign]


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **kwargs: Any) -> None:
    """As `tensor_parallelism`, for a module that exists, with all modules inside it. Overrides earlier marks.

    Raises:
        UsageError: `module` is no module, or the model is partitioned already.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"set_tensor_parallelism takes a torch.nn.Module, got {type(module).__name__}")
    if runtime.is_initialized() and getattr(runtime.get().model, "partitioned", False):
        raise UsageError("the model is partitioned already: call set_tensor_parallelism before DistributedModel")
    mark = Mark(_flag(enabled), kwargs)
    for part in module.modules():
        part.__dict__[_ATTRIBUTE] = mark


def _flag(enabled: Any) -> bool:
    if not isinstance(enabled, bool):
        raise UsageError(f"tensor parallelism is enabled with True or False, got {enabled!r}")
    return enabled


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tp_kwargs: Any
) -> Iterator[None]:
    """For creating a model: marks its modules, delays the initialisation of its parameters, sets the default dtype.

    Args:
        tensor_parallelism: as `enabled` of `smp.tensor_parallelism`.
        dtype: floating dtype of what is created inside; None: torch's default dtype stays.
        tp_kwargs: as the options of `smp.tensor_parallelism`.
    """
    before = torch.get_default_dtype()
    with _tensor_parallelism(tensor_parallelism, **tp_kwargs), delay_param_initialization():
        if dtype is not None:
            torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


_tensor_parallelism = tensor_parallelism  # model_creation has an argument of that name
