"""Half precision: the module wrapper and the optimizer."""

from smp.coming import to_come

__getattr__ = to_come(__name__, ("FP16_Module", "FP16_Optimizer"), "half precision")
