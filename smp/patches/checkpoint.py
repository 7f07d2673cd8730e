"""Activation checkpointing."""

from smp.coming import to_come

__getattr__ = to_come(__name__, ("checkpoint", "checkpoint_sequential"), "activation checkpointing")
