"""The exceptions under the name that clients import."""

from smp.errors import CheckpointError, CommError, ConfigError, PartitionError, SmpError, StepError, UsageError

__all__ = ["CheckpointError", "CommError", "ConfigError", "PartitionError", "SmpError", "StepError", "UsageError"]
