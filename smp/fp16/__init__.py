"""Half precision: the module wrapper and the optimizer, both usable alone; smp.DistributedModel and
smp.DistributedOptimizer do the same where the configuration says fp16 or bf16."""

from smp.fp16.module import FP16_Module
from smp.fp16.optimizer import FP16_Optimizer

__all__ = ["FP16_Module", "FP16_Optimizer"]
