"""Small questions that scripts ask about parameters."""

from torch import nn


def get_distribution_axis(param: nn.Parameter) -> int | None:
    """The dimension along which a parameter is split over the tensor-parallel group; None when it is whole."""
    spec = getattr(param, "_smp_shard", None)
    return None if spec is None else spec.dim
