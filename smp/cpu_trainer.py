"""Lets the `Trainer` of `transformers` 4.57 run on a machine without accelerators.

Where it works with this package, its `TrainingArguments` ask for a CUDA device, also with `use_cpu`. And `accelerate`,
seeing a launcher's variables, would deal the batches to all ranks, also to those of one pipeline, which share a batch.
`transformers` calls `smp.init()` while it imports `training_args`; from there `prepare` reaches the class, which does
not exist yet at that moment.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_LAUNCHER_VARIABLES = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_PREPARED = "_smp_prepared"


@dataclass(frozen=True)
class Dealing:
    """How batches are dealt: this rank takes part `index` of `count`. `everybody`: each rank of the job has its own."""

    device: Any
    index: int
    count: int
    local_rank: int
    everybody: bool


def prepare(dealing: Callable[[], Dealing | None]) -> None:
    """Change `TrainingArguments` if `transformers` is there. `dealing()` is None where there is nothing to change."""
    module = sys.modules.get("transformers.training_args")
    if module is None or getattr(module, _PREPARED, False):
        return
    setattr(module, _PREPARED, True)
    if hasattr(module, "TrainingArguments"):
        _change(module, module.TrainingArguments, dealing)
        return
    decorator = module.dataclass  # what the class that is still to come is decorated with

    def deciding(cls: Any) -> Any:
        made = decorator(cls)
        if made.__name__ == "TrainingArguments":
            module.dataclass = decorator  # type: ignore[attr-defined]
            _change(module, made, dealing)
        return made

    module.dataclass = deciding  # type: ignore[attr-defined]


def _change(module: Any, cls: Any, dealing: Callable[[], Dealing | None]) -> None:
    original = cls._setup_devices

    def _setup_devices(self: Any) -> Any:
        mine = dealing() if module.is_sagemaker_mp_enabled() else None
        return original.func(self) if mine is None else _set_up(self, mine)

    changed = functools.cached_property(_setup_devices)
    changed.__set_name__(cls, "_setup_devices")
    cls._setup_devices = changed


def _set_up(arguments: Any, mine: Dealing) -> Any:
    """What the original does for a CUDA device, for the CPU."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    config = arguments.accelerator_config
    if getattr(config, "dispatch_batches", 0) is None:
        config.dispatch_batches = False  # each rank reads its own part, also of an iterable data set
    AcceleratorState._reset_state(reset_partial_state=True)
    with _without_launcher():
        state = PartialState(cpu=True)
    state.num_processes, state.process_index, state.local_process_index = mine.count, mine.index, mine.local_rank
    if mine.everybody and mine.count > 1:
        state.distributed_type, state.backend = DistributedType.MULTI_CPU, "gloo"
    arguments.distributed_state = None
    arguments._n_gpu = 0
    return mine.device


@contextlib.contextmanager
def _without_launcher() -> Iterator[None]:
    hidden = {name: os.environ.pop(name) for name in _LAUNCHER_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
