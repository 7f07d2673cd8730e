"""Small questions that scripts ask about parameters."""

from torch import Tensor

from smp.tp.shard import spec_of


def get_distribution_axis(param: Tensor) -> int | None:
    """The dimension along which a parameter is split over the tensor-parallel group; None when it is whole."""
    spec = spec_of(param)
    return None if spec is None else spec.dim
