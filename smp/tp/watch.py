"""Parts of split parameters that are used outside their layer: each rank would compute with its own part only."""

import torch
from torch import Tensor

from smp.errors import StepError
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
