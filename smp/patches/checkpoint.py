"""Activation checkpointing of single calls."""

from smp.pp.checkpointing import checkpoint, checkpoint_sequential

__all__ = ["checkpoint", "checkpoint_sequential"]
