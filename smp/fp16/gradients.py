"""The type in which gradients of half precision parameters add up.

Many small gradients added to a large one are lost in half precision (1 + 2**-9 is 1 in bfloat16), so under bf16, and
under fp16 on request, `.grad` is float32 while parameters and activations stay what they are:

    microbatch 0   bf16 gradient --+
    microbatch 1   bf16 gradient --+--> .grad, float32 --> sum over replicas, float32 --> .grad of the master

Autograd does that itself where it is told to with `Parameter.grad_dtype`; the reducer follows that attribute.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from smp import log
from smp.config import Config
from smp.errors import ConfigError

HALF = (torch.float16, torch.bfloat16)
TORCH_CAN_WIDEN = hasattr(Tensor, "grad_dtype")


def accumulates_wide(config: Config) -> bool:
    """Whether gradients of half precision parameters are kept in float32: with bf16, or `_fp32_grad_accumulation`."""
    return config.bf16 or (config.fp16 and config.fp32_grad_accumulation)


def widen(params: Iterable[Tensor], config: Config) -> None:
    """Lets the gradients of those of `params` that are in half precision add up in float32, when `config` asks for it.

    Call when parameters have their final dtype. Gradients that are there already are converted. Says on rank 0 which
    type gradients have.

    Raises:
        ConfigError: torch cannot do that.
    """
    if not (config.fp16 or config.bf16):
        return
    wide = accumulates_wide(config)
    parameters_are = torch.bfloat16 if config.bf16 else torch.float16
    if wide and not TORCH_CAN_WIDEN:
        key = "bf16" if config.bf16 else "_fp32_grad_accumulation"
        raise ConfigError(
            f"{key}: got True, which needs a torch whose tensors have `grad_dtype`; this is torch {torch.__version__}. "
            "Install torch 2.10 or newer" + ("." if config.bf16 else ", or leave the key out.")
        )
    log.info_rank0(
        "gradients of %s parameters are accumulated in %s", parameters_are, torch.float32 if wide else parameters_are
    )
    for param in params:
        if wide and param.dtype in HALF:
            grad, param.grad = param.grad, None
            param.grad_dtype = torch.float32
            if grad is not None:
                param.grad = grad.float()
