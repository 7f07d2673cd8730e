"""smp: model-parallel training for PyTorch. Importing it has no side effects; everything starts with `smp.init()`."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> module that defines it. Resolved on first use, so that `import smp` stays cheap.
_EXPORTS: dict[str, str] = {
    **dict.fromkeys(
        ["SmpError", "ConfigError", "PartitionError", "StepError", "CheckpointError", "CommError", "UsageError"],
        "smp.errors",
    ),
    **dict.fromkeys(["save", "load"], "smp.checkpoint.partial"),
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
