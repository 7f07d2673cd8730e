"""The rows: what is compared with what, at which sizes, and the ratio to reach. Data only."""

import os
from dataclasses import dataclass, field
from typing import Any

from benchmarks.worlds import Side

SMALL_GPT = {"vocabulary": 2048, "length": 128, "width": 256, "layers": 8}
BIG_HEAD = {**SMALL_GPT, "vocabulary": 16384}
BLOCKS = {"length": 128, "width": 256, "layers": 4, "degree": 2}
SLEEP = {"stages": 4, "forward": 0.010, "backward": 0.020}
SAVED = {"width": 1024, "layers": 11}  # per process; with Adam's moments 264 MB in both together
STEPPED = {"width": 512, "layers": 40}  # per process; 10.5 million parameters
SCHEDULES_AT_FOUR = [
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
    "ScheduleInterleavedZeroBubble",
    "ScheduleInterleaved1F1B",
]
MEGATRON_VARIABLE = "SMP_BENCH_MEGATRON"  # an interpreter that has megatron-core


@dataclass(frozen=True)
class Row:
    """One comparison of times.

    Attributes:
        ours, theirs: what runs in turn; where `theirs` has several, the fastest counts.
        limit: the ratio ours / theirs to reach.
        ideal: seconds of a step to compare with instead of the fastest of `theirs`, which then only run along.
        steps: steps in one block.
        same_losses: whether the first losses of all sides must agree.
    """

    name: str
    title: str
    limit: float
    ours: Side
    theirs: tuple[Side, ...]
    ideal: float | None = None
    steps: int = 2
    same_losses: bool = True
    sizes: dict[str, Any] = field(default_factory=dict)


def _gpt(name: str, sizes: dict[str, int], microbatches: int, split: str, config: dict[str, Any]) -> Side:
    arguments = {"sizes": sizes, "batch": 16, "microbatches": microbatches, "stages": 2, "split": split}
    return Side(name, "benchmarks.ours:pipeline", {**arguments, "config": config}, 2, "mpi")


def _torch_gpt(schedule: str, sizes: dict[str, int], microbatches: int) -> Side:
    arguments = {"sizes": sizes, "batch": 16, "microbatches": microbatches, "schedule": schedule}
    return Side(schedule, "benchmarks.theirs:pipeline", arguments)


def _dtensor(sequence: bool, fused: bool) -> Side:
    name = "DTensor, sequence parallel" if sequence else "DTensor"
    arguments = {"sizes": BLOCKS, "batch": 8, "sequence": sequence, "fused": fused}
    return Side(name, "benchmarks.theirs:tensor_parallel", arguments)


def _tensor_parallel(name: str, title: str, limit: float, config: dict[str, Any], *theirs: Side) -> Row:
    ours = Side("ours", "benchmarks.ours:tensor_parallel", {"sizes": BLOCKS, "batch": 8, "config": config}, 2, "mpi")
    return Row(name, title, limit, ours, theirs, sizes={**BLOCKS, "batch": 8})


def _megatron(config: dict[str, Any]) -> list[Row]:
    """Where an interpreter that has it is named; see megatron.py for what is compared."""
    python = os.environ.get(MEGATRON_VARIABLE)
    if not python:
        return []
    arguments = {"sizes": BLOCKS, "batch": 8}
    side = Side("Megatron-Core", "benchmarks.megatron:tensor_parallel", arguments, python=python)
    return [_tensor_parallel("megatron", "the same blocks, against Megatron-Core's layers", 1.00, config, side)]


def _saving(name: str, title: str, ours: str, theirs: str, config: dict[str, Any]) -> Row:
    mine = Side("ours", f"benchmarks.saving:{ours}", {"sizes": SAVED, "config": config}, 2, "mpi")
    other = Side(theirs.replace("_", "."), f"benchmarks.saving:{theirs}", {"sizes": SAVED})
    return Row(name, title, 1.10, mine, (other,), steps=1, same_losses=False, sizes=dict(SAVED))


def rows(config: dict[str, Any]) -> list[Row]:
    """All rows; `config` is added to what smp.init gets in every one."""
    return [
        Row(
            "1f1b",
            "GPT, 8 microbatches, pp 2, against torch Schedule1F1B, both split 4 + 4",
            1.00,
            _gpt("ours", SMALL_GPT, 8, "hand", config),
            (_torch_gpt("Schedule1F1B", SMALL_GPT, 8),),
            sizes={**SMALL_GPT, "batch": 16},
        ),
        Row(
            "sleeping",
            "sleeping stages, pp 4, 8 microbatches, against (m + p - 1) x 30 ms",
            1.05,
            Side("ours", "benchmarks.ours:sleeping", {"sizes": SLEEP, "microbatches": 8, "config": config}, 4, "mpi"),
            (
                Side(
                    "Schedule1F1B",
                    "benchmarks.theirs:sleeping",
                    {"sizes": SLEEP, "microbatches": 8, "schedule": "Schedule1F1B"},
                    4,
                ),
            ),
            ideal=(8 + 4 - 1) * (SLEEP["forward"] + SLEEP["backward"]),
            steps=4,
            same_losses=False,
            sizes=dict(SLEEP),
        ),
        Row(
            "auto-split",
            "automatic partition against the split by hand, vocabulary 2048",
            1.00,
            _gpt("automatic", SMALL_GPT, 8, "auto", config),
            (_gpt("by hand", SMALL_GPT, 8, "hand", config),),
            sizes={**SMALL_GPT, "batch": 16},
        ),
        Row(
            "auto-split-16384",
            "automatic partition against the split by hand, vocabulary 16384",
            0.95,
            _gpt("automatic", BIG_HEAD, 8, "auto", config),
            (_gpt("by hand", BIG_HEAD, 8, "hand", config),),
            sizes={**BIG_HEAD, "batch": 16},
        ),
        Row(
            "four",
            "GPT, 4 microbatches, pp 2, against the fastest of torch's zero-bubble and interleaved schedules",
            1.00,
            _gpt("ours", SMALL_GPT, 4, "auto", {"pipeline": "auto", **config}),
            tuple(_torch_gpt(schedule, SMALL_GPT, 4) for schedule in SCHEDULES_AT_FOUR),
            sizes={**SMALL_GPT, "batch": 16},
        ),
        Row(
            "ddp",
            "GPT, data parallel 2, batch 8 per process, against DistributedDataParallel",
            1.00,
            Side("ours", "benchmarks.ours:data_parallel", {"sizes": SMALL_GPT, "batch": 8, "config": config}, 2, "mpi"),
            (Side("DistributedDataParallel", "benchmarks.theirs:data_parallel", {"sizes": SMALL_GPT, "batch": 8}),),
            sizes={**SMALL_GPT, "batch": 8},
        ),
        _tensor_parallel(
            "tp",
            "attention + MLP blocks, tp 2, against the better of DTensor with and without sequence parallel",
            0.65,
            config,
            *(_dtensor(sequence, fused=False) for sequence in (False, True)),
        ),
        _tensor_parallel(
            "tp-fused",
            "the same, where query, key and value were made one linear for DTensor by reordering its rows",
            1.00,
            config,
            *(_dtensor(sequence, fused=True) for sequence in (False, True)),
        ),
        Row(
            "step-bf16",
            "optimizer step over 10 million bf16 parameters, against the fastest of AdamW's forms + casts",
            1.05,
            Side("ours", "benchmarks.stepping:ours", {"sizes": STEPPED, "form": "fused", "config": config}, 2, "mpi"),
            tuple(
                Side(f"AdamW, {form}", "benchmarks.stepping:theirs", {"sizes": STEPPED, "form": form})
                for form in ("plain", "foreach", "fused")
            ),
            steps=10,
            same_losses=False,
            sizes=dict(STEPPED),
        ),
        _saving(
            "save",
            "partial checkpoint of 256 MB, checksummed and flushed, against torch.save + fsync",
            "save",
            "torch_save",
            config,
        ),
        _saving("load", "the same, resumed from and verified, against torch.load", "load", "torch_load", config),
        *_megatron(config),
    ]
