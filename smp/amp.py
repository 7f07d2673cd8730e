"""Automatic mixed precision: the gradient scaler."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from smp import grad_norm, runtime
from smp.dp.reduction import all_reduce
from smp.errors import UsageError
from smp.optimizer import DistributedOptimizer
from smp.pp.microbatch import StepOutput
from smp.topology import CommGroup


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a model that is spread over ranks: scale, growth and skipped steps are alike on all.

    Keeps parameters in float32 and scales the loss, so that gradients which autocast computes in float16 do not vanish:

        scaler = smp.amp.GradScaler()
        in the step function    model.backward(scaler.scale(loss))
        after it                scaler.step(optimizer); scaler.update()

    `step` and `unscale_` are collective over all ranks. They reduce first what a short accumulation window has left
    unreduced; a gradient that is infinite or NaN on any rank skips the step on every rank.

    Args:
        device: type of the device on which gradients are; None: the runtime's.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as for torch.

    Raises:
        UsageError: `fp16` or `bf16` is configured, where the DistributedOptimizer scales the loss itself.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        rt = runtime.get()
        if enabled and (rt.config.fp16 or rt.config.bf16):
            key = "fp16" if rt.config.fp16 else "bf16"
            raise UsageError(
                f"smp.amp.GradScaler is for float32 parameters under torch.autocast; with '{key}': True parameters are "
                "in half precision and smp.DistributedOptimizer scales the loss. Leave the scaler out (enabled=False), "
                f"or '{key}'"
            )
        super().__init__(device or rt.device.type, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def scale(self, outputs: Any) -> Any:
        """Multiplies a tensor, a StepOutput, or an iterable of them by the scale; in a step function or outside."""
        if not self._enabled:
            return outputs
        if self._scale is None:  # here and not on a loss's device: that may live on another stage
            self._lazy_init_scale_growth_tracker(runtime.get().device)
        if isinstance(outputs, StepOutput):
            return StepOutput(self.scale(outputs.outputs))
        if isinstance(outputs, list | tuple):
            return type(outputs)(self.scale(output) for output in outputs)
        return super().scale(outputs)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Updates parameters with unscaled gradients, or skips that on all ranks; what `optimizer.step` returns."""
        if isinstance(optimizer, DistributedOptimizer):
            optimizer._step_supports_amp_scaling = False  # gradients are unscaled here, also for fused optimizers
        return super().step(optimizer, *args, **kwargs)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Every check for infinities passes through here. Its result is agreed over all ranks."""
        rt = runtime.get()
        grad_norm.flush(rt)
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        anywhere = torch.stack([found_inf, *(one.to(found_inf.device) for one in found.values())]).amax()
        call = "GradScaler: whether a gradient overflowed"
        all_reduce(anywhere, dist.ReduceOp.MAX, call, rt.group(CommGroup.WORLD))
        return {anywhere.device: anywhere}
