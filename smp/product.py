"""Products of matrices in fp32 on the processor, by the faster one of the two libraries that torch has for them.

torch takes MKL, which runs code for AVX2 on processors that are not Intel's. Where such a processor has AVX-512, oneDNN
is twice as fast (one core of an EPYC, GFLOP/s, MKL / oneDNN):

    [1024, 256] x [384, 256]'    forward 116 / 254    gradient of the input 113 / 260    of the weight 108 / 217
    [64, 256] x [512, 256]'              107 / 193                          107 / 206                  105 / 174
    [8, 64] x [64, 64]'                   22 /   6                           32 /   6                   24 /   5

oneDNN rounds otherwise than MKL (3e-7), and always alike for the same shapes. Everything else, and small products, is
left to torch.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

SMALL = 1 << 20  # multiplications; a call of oneDNN takes 10 us before it begins
CPU_INFO = Path("/proc/cpuinfo")
_torch_linear = F.linear


@lru_cache(maxsize=1)
def onednn_is_faster() -> bool:
    """Whether oneDNN is to be used on this machine."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    if not torch.backends.mkl.is_available() or not CPU_INFO.exists() or "GenuineIntel" in CPU_INFO.read_text():
        return False
    try:
        probe = torch.ones(2, 2, device="cpu")
        return bool(_onednn(probe, probe, None).eq(2).all())
    except (AttributeError, RuntimeError):  # not a public operator: it may change
        return False


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x, weight = (
        t if t.is_contiguous() or (t.dim() == 2 and t.t().is_contiguous()) else t.contiguous() for t in (x, weight)
    )
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _fits(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() * weight.shape[0] >= SMALL
        and not isinstance(x, FakeTensor)
        and onednn_is_faster()
    )


def times_transposed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[.., k], [n, k], [n] -> [.., n], x weight' + bias. Without gradients."""
    if _fits(x, weight) and (bias is None or bias.dtype == torch.float32):
        return _onednn(x, weight, bias)
    return _torch_linear(x, weight, bias)


def weight_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    """Inputs [.., k] of a linear layer and gradient [.., n] of its output -> the gradient of its weight, [n, k]."""
    return times_transposed(gradient.flatten(0, -2).t(), x.flatten(0, -2).t())


def bias_gradient(gradient: Tensor) -> Tensor:
    """[.., n] -> [n]."""
    return gradient.flatten(0, -2).sum(0)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times_transposed(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        times = _torch_linear if torch.is_grad_enabled() else times_transposed  # the former is differentiable again
        return (
            times(gradient, weight.t()) if need_x else None,
            times(gradient.flatten(0, -2).t(), x.flatten(0, -2).t()) if need_weight else None,
            bias_gradient(gradient) if need_bias else None,
        )


def is_plain(x: Tensor) -> bool:
    """Whether F.linear is torch's own and computes in the dtype of its arguments."""
    return F.linear is _torch_linear and not torch.is_autocast_enabled(x.device.type)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, which is called where something stands in for it (weights are put off), and under autocast."""
    if is_plain(x) and _fits(x, weight):
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight, bias)
