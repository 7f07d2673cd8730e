"""Half precision of a module: its parameters, and what goes in and comes out.

    inputs  --to half-->  module in half precision  --to fp32-->  outputs, the loss

Only floating-point tensors are cast, wherever they are nested; ids and masks of other types stay.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smp.config import Config
from smp.errors import UsageError
from smp.fp16.gradients import HALF
from smp.nested import flatten, unflatten


def half_dtype(config: Config) -> torch.dtype | None:
    """The half precision type that the configuration asks for; None: full precision."""
    return torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None


# Frequencies of rotary embeddings in `transformers`: models multiply them with positions in float32, and a rounded
# frequency is a wrong angle at a late position.
_KEPT_BUFFERS = ("inv_freq", "original_inv_freq")


@torch.no_grad()
def cast_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating-point parameters and buffers in place; the Parameter objects stay the same.

    Delayed parameters, on the meta device, are cast too. Gradients that are there are cast with their parameters.
    Frequencies of rotary embeddings keep their type.
    """
    for param in module.parameters():
        if param.is_floating_point() and param.dtype != dtype:
            grad, param.grad = param.grad, None
            param.data = param.data.to(dtype)
            if grad is not None:
                param.grad = grad.to(dtype)
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and name.rpartition(".")[2] not in _KEPT_BUFFERS:
            buffer.data = buffer.data.to(dtype)


def cast_nested(value: Any, dtype: torch.dtype) -> Any:
    """The same structure with floating-point tensors in `dtype`; the same object where there is nothing to cast."""
    leaves, spec = flatten(value)
    cast = [_cast(leaf, dtype) for leaf in leaves]
    return unflatten(spec, cast) if any(new is not old for new, old in zip(cast, leaves)) else value


def cast_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`cast_nested` of each argument."""
    return tuple(cast_nested(arg, dtype) for arg in args), {key: cast_nested(v, dtype) for key, v in kwargs.items()}


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype:
        return leaf.to(dtype)
    return leaf


class FP16_Module(nn.Module):
    """A module in half precision: floating-point inputs are cast to `dtype`, outputs to float32.

    `smp.DistributedModel` does this itself where the configuration says fp16 or bf16; this class is for a module that
    is used alone. The user's module is `.module`; its Parameter objects are cast in place.

    Args:
        module: the module.
        dtype: torch.float16 or torch.bfloat16.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise UsageError(f"FP16_Module takes a torch.nn.Module, got {type(module).__name__}")
        if dtype not in HALF:
            raise UsageError(f"FP16_Module: dtype must be torch.float16 or torch.bfloat16, got {dtype}")
        cast_module(module, dtype)
        self.module = module
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result in float32."""
        args, kwargs = cast_arguments(args, kwargs, self.dtype)
        return cast_nested(self.module(*args, **kwargs), torch.float32)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, under its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.module.load_state_dict(*args, **kwargs)
