"""The exceptions a user can meet. Each message says what was got, what is allowed and what to change."""


class SmpError(Exception):
    """Base of every error that smp raises on purpose."""


class ConfigError(SmpError, ValueError):
    """The configuration has unknown keys, wrong values, or values that cannot work together."""


class PartitionError(SmpError, ValueError):
    """Modules cannot be placed on stages as asked."""


class StepError(SmpError, RuntimeError):
    """A step function did something that cannot run on several stages, or ranks that do not agree."""


class CheckpointError(SmpError, RuntimeError):
    """A checkpoint file is missing, damaged, foreign, or does not fit the model."""


class CommError(SmpError, RuntimeError):
    """A message or collective did not complete: a peer failed, left, or never arrived."""


class UsageError(SmpError, RuntimeError):
    """A call came too early, twice, or with an object of the wrong kind."""
