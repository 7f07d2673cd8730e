"""smp: model-parallel training for PyTorch. Importing it has no side effects; everything starts with `smp.init()`."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

__version__ = "0.1.0"

# Public name -> module that defines it. Resolved on first use, so that `import smp` stays cheap.
_EXPORTS: dict[str, str] = {
    **dict.fromkeys(
        ["SmpError", "ConfigError", "PartitionError", "StepError", "CheckpointError", "CommError", "UsageError"],
        "smp.errors",
    ),
    **dict.fromkeys(
        [
            *["init", "is_initialized", "rank", "size", "local_rank", "local_size"],
            *[f"{kind}_{what}" for kind in ("tp", "pp", "rdp", "dp", "mp") for what in ("rank", "size")],
            *[f"get_{kind}_group" for kind in ("world", "tp", "pp", "rdp", "dp", "mp")],
            *[f"get_{kind}_process_group" for kind in ("world", "tp", "pp", "rdp", "dp", "mp")],
        ],
        "smp.runtime",
    ),
    **dict.fromkeys(["CommGroup", "RankType"], "smp.topology"),
    "state": "smp.state_mod",
    **dict.fromkeys(
        [
            *["WORLD", "MP_GROUP", "DP_GROUP", "PP_GROUP", "TP_GROUP", "RDP_GROUP"],
            *["WORLD_RANK", "MP_RANK", "DP_RANK", "PP_RANK", "TP_RANK", "RDP_RANK"],
            *["send", "recv_from", "broadcast", "allgather"],
            *["barrier", "dp_barrier", "mp_barrier", "pp_barrier", "tp_barrier", "rdp_barrier"],
        ],
        "smp.comm.objects",
    ),
    "clip_grad_norm_": "smp.grad_norm",
    "DistributedOptimizer": "smp.optimizer",
    **dict.fromkeys(["tensor_parallelism", "set_tensor_parallelism", "model_creation"], "smp.tp.contexts"),
    "delay_param_initialization": "smp.tp.delayed",
    **dict.fromkeys(["tp_register", "tp_register_with_module", "register_parameter"], "smp.tp.registry"),
    **dict.fromkeys(["save", "load"], "smp.checkpoint.partial"),
    **dict.fromkeys(["save_checkpoint", "resume_from_checkpoint"], "smp.checkpoint.manager"),
    "wait_for_checkpoint": "smp.checkpoint.background",
    "set_activation_checkpointing": "smp.activation",
    "step": "smp.pp.step",
    "StepOutput": "smp.pp.microbatch",
    "DistributedModel": "smp.model",
    **dict.fromkeys(["partition", "set_partition"], "smp.pp.partition"),
    "is_tracing": "smp.pp.trace",
    "timeline": "smp.pp.timeline",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
