"""Automatic mixed precision: the gradient scaler."""

from smp.coming import to_come

__getattr__ = to_come(__name__, ("GradScaler",), "half precision")
