"""Public names of the modules that are split over the tensor-parallel group."""

from smp.tp.attention import DistributedAttentionLayer
from smp.tp.cross_entropy import vocabulary_parallel_cross_entropy
from smp.tp.embedding import DistributedEmbedding
from smp.tp.flash import FlashAttentionLayer
from smp.tp.layernorm import DistributedLayerNorm, FusedLayerNorm
from smp.tp.linear import DistributedLinear
from smp.tp.lm_head import DistributedTransformerLMHead
from smp.tp.module import DistributedModule
from smp.tp.transformer import (
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerOutputLayer,
)

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "vocabulary_parallel_cross_entropy",
]
