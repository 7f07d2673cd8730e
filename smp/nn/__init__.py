"""Public names of the modules that are split over the tensor-parallel group."""

from smp.tp.cross_entropy import vocabulary_parallel_cross_entropy
from smp.tp.embedding import DistributedEmbedding
from smp.tp.layernorm import DistributedLayerNorm
from smp.tp.linear import DistributedLinear
from smp.tp.module import DistributedModule

__all__ = [
    "DistributedEmbedding",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedModule",
    "vocabulary_parallel_cross_entropy",
]
