"""Optimizers that scripts know from apex."""

from smp.coming import to_come

__getattr__ = to_come(__name__, ("FusedLAMB", "FusedNovoGrad"), "half precision")
