"""Parts of split parameters that are used outside their layer: each rank would compute with its own part only."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from smp.errors import StepError
from smp.nested import flatten
from smp.tp.module import DistributedModule
from smp.tp.shard import spec_of


def refuse_part(parameter: Tensor, line: str) -> None:
    """Raises `StepError` when `parameter` is a part that code outside its layer is about to compute gradients with."""
    spec = spec_of(parameter)
    if spec is not None and parameter.requires_grad and torch.is_grad_enabled():
        raise StepError(
            f"{line} computes with a parameter of shape {tuple(spec.global_shape)} that is split over the "
            "tensor-parallel ranks; outside its layer each rank sees its own part only, and the gradients would be "
            "wrong. Say smp.register_parameter(module, parameter) before making the DistributedModel, so that it "
            "stays whole, or do this under torch.no_grad()."
        )


class PartWatch(TorchFunctionMode):
    """Looks at the operands of every torch call of a model without a pipeline; used in a step function's first run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.requires_grad and not isinstance(result, torch.nn.Parameter):
            for operand in flatten((args, kwargs))[0]:
                if isinstance(operand, torch.nn.Parameter) and spec_of(operand) is not None:
                    line = _line_outside_layers()
                    if line is not None:
                        refuse_part(operand, line)
        return result


def _line_outside_layers() -> str | None:
    """Where user code computes, None inside a distributed module's forward."""
    line = None
    frame = sys._getframe(2)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), DistributedModule):
            return None
        if line is None and frame.f_globals.get("__name__", "").split(".")[0] not in ("smp", "torch"):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return line
