"""The configuration of a run: every key typed, validated, and checked against the others. No torch.

`resolve` merges three sources, later ones win: defaults, the dict given to `smp.init`, and the JSON in the environment
variable `SM_HP_MP_PARAMETERS` (what a launcher says overrides the script). It raises one `ConfigError` that lists every
problem it can find, or returns a frozen `Config`.
"""

import difflib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from smp.errors import ConfigError
from smp.topology import PLACEMENT_NAMES, PLACEMENTS

ENV_VARIABLE = "SM_HP_MP_PARAMETERS"

# Second names of keys; also how keys that start with an underscore are spelled as attributes.
ALIASES = {
    "partitions": "pipeline_parallel_degree",
    "_match_weights": "match_weights",
    "_fp32_grad_accumulation": "fp32_grad_accumulation",
}
_SPELLING = {"match_weights": "_match_weights", "fp32_grad_accumulation": "_fp32_grad_accumulation"}

# What other frameworks' scripts may carry. False means "not used" and is dropped.
_OTHER_FRAMEWORKS = {
    "horovod": "Horovod drives TensorFlow jobs",
    "xla": "XLA compilation is for TensorFlow jobs",
}


class Config(BaseModel):
    """A resolved configuration, readable by attribute. Made by `resolve`, which also checks keys against each other."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    # Degrees and ranks
    pipeline_parallel_degree: int = Field(1, ge=1)
    tensor_parallel_degree: int = Field(1, ge=1)
    placement_strategy: Literal["cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"] = "cluster"
    ddp: bool = False
    ddp_port: int | None = Field(None, ge=1, le=65535)
    ddp_dist_backend: Literal["auto", "nccl", "gloo"] = "auto"
    # Pipeline
    microbatches: int = Field(1, ge=1)
    active_microbatches: int = Field(default_factory=lambda seen: seen.get("pipeline_parallel_degree", 1) + 2, ge=1)
    pipeline: Literal["interleaved", "simple", "_only_forward", "zero_bubble", "auto"] = "interleaved"
    virtual_stages: int = Field(1, ge=1)
    replicate_tied: bool | Literal["auto"] = "auto"
    # Partition
    auto_partition: bool = True
    default_partition: int = Field(0, ge=0)
    optimize: Literal["memory", "speed"] = "memory"
    memory_weight: float = Field(
        default_factory=lambda seen: 0.2 if seen.get("optimize") == "speed" else 0.8, ge=0, le=1, allow_inf_nan=False
    )
    skip_tracing: bool = False
    use_times: bool = False
    load_partition: bool = False
    partition_file: str | None = None
    # Tensor parallelism
    prescaled_batch: bool = False
    # Precision
    fp16: bool = False
    bf16: bool = False
    fp16_params: bool = False
    fp32_grad_accumulation: bool = False
    # Memory
    shard_optimizer_state: bool = False
    offload_activations: bool = False
    activation_loading_horizon: int = Field(4, ge=1)
    checkpoint_attentions: bool = False
    # Sharded data parallelism; sizes count elements
    sharded_data_parallel_degree: int = Field(1, ge=1)
    sdp_reduce_bucket_size: float = Field(5e8, gt=0, allow_inf_nan=False)
    sdp_param_persistence_threshold: float = Field(1e6, ge=0, allow_inf_nan=False)
    sdp_max_live_parameters: float = Field(1e9, gt=0, allow_inf_nan=False)
    sdp_hierarchical_allgather: bool = True
    sdp_gradient_clipping: float = Field(1.0, ge=0, allow_inf_nan=False)
    # Accepted for the sake of existing scripts (see NO_EFFECT)
    static_mode: bool = False
    fast_mode: bool = False
    deterministic_server: bool = False
    delayed_parameter_initialization: bool = False
    contiguous: bool = True
    match_weights: bool = False

    @property
    def partitions(self) -> int:
        """The older name of `pipeline_parallel_degree`."""
        return self.pipeline_parallel_degree

    @property
    def mp_size(self) -> int:
        """Number of ranks that hold one model replica."""
        return self.pipeline_parallel_degree * self.tensor_parallel_degree

    def check_world(self, world_size: int) -> None:
        """Raises ConfigError when a job of `world_size` processes cannot run with these degrees."""
        problems = []
        degrees = (
            f"pipeline_parallel_degree {self.pipeline_parallel_degree} x "
            f"tensor_parallel_degree {self.tensor_parallel_degree} = {self.mp_size}"
        )
        if world_size % self.mp_size:
            problems.append(
                f"{degrees} does not divide the {world_size} processes of this job; start a multiple of "
                f"{self.mp_size} processes or lower a degree"
            )
        elif world_size > self.mp_size and not self.ddp:
            problems.append(
                f"ddp: got False, but {world_size} processes hold {world_size // self.mp_size} model replicas "
                f"({degrees}); set ddp to True, or start {self.mp_size} processes"
            )
        _raise_all(problems)

    def describe(self) -> str:
        """One line: the degrees, then every key that differs from its default."""
        default = Config()
        shown = {"pipeline_parallel_degree", "tensor_parallel_degree", "microbatches", "ddp"}
        derived = {
            "active_microbatches": self.partitions + 2,
            "memory_weight": 0.2 if self.optimize == "speed" else 0.8,
        }
        parts = []
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name in shown or value != derived.get(name, getattr(default, name)):
                parts.append(f"{_SPELLING.get(name, name)}={value}")
        return ", ".join(parts)

    def warnings(self) -> tuple[str, ...]:
        """What the user should know of keys that were set and change nothing."""
        why_not = dict(NO_EFFECT)
        if not self.offload_activations:
            why_not["activation_loading_horizon"] = "it is for offload_activations, which is False"
        return tuple(
            f"{_SPELLING.get(key, key)}={getattr(self, key)!r} has no effect: {why}"
            for key, why in why_not.items()
            if key in self.model_fields_set and getattr(self, key) != type(self).model_fields[key].get_default()
        )


# Keys that are accepted and change nothing, with the reason.
NO_EFFECT = {
    "static_mode": "the order of work is always the same on every rank",
    "fast_mode": "values are always moved straight from their owner",
    "deterministic_server": "there is no server; the order of work never depends on arrival",
    "contiguous": "a stage is always a contiguous range in execution order",
    "checkpoint_attentions": "attention keeps no scores: its kernels compute them again in the backward pass",
    "delayed_parameter_initialization": "smp.model_creation and smp.delay_param_initialization delay parameters",
}

# Keys whose feature is still to come: the values that work today, and what the others would need.
_STILL_TO_COME: dict[str, tuple[tuple[Any, ...], str]] = {
    "sharded_data_parallel_degree": ((1,), "sharded data parallelism"),
    "sdp_reduce_bucket_size": ((5e8,), "sharded data parallelism"),
    "sdp_param_persistence_threshold": ((1e6,), "sharded data parallelism"),
    "sdp_max_live_parameters": ((1e9,), "sharded data parallelism"),
    "sdp_hierarchical_allgather": ((True,), "sharded data parallelism"),
    "sdp_gradient_clipping": ((1.0,), "sharded data parallelism"),
    "match_weights": ((False,), "comparing the weights of replicas"),
}


@dataclass(frozen=True)
class _Rule:
    """A check of keys against each other; it is skipped while one of its keys is wrong by itself.

    `message` is formatted with the values of the configuration.
    """

    keys: tuple[str, ...]
    broken: Callable[[Config], bool]
    message: str


_RULES = (
    _Rule(
        ("tensor_parallel_degree", "ddp"),
        lambda c: c.tensor_parallel_degree > 1 and not c.ddp,
        "tensor_parallel_degree: got {tensor_parallel_degree}, which needs ddp to be True (got {ddp})",
    ),
    _Rule(
        ("auto_partition", "default_partition"),
        lambda c: not c.auto_partition and "default_partition" not in c.model_fields_set,
        "auto_partition: got False, which needs default_partition: the stage of modules placed nowhere by hand",
    ),
    _Rule(
        ("default_partition", "pipeline_parallel_degree"),
        lambda c: c.default_partition >= c.pipeline_parallel_degree,
        "default_partition: got {default_partition}; with pipeline_parallel_degree {pipeline_parallel_degree} the "
        "stages are 0 to {last_stage}",
    ),
    _Rule(("fp16", "bf16"), lambda c: c.fp16 and c.bf16, "fp16 and bf16: both are True; choose one"),
    _Rule(
        ("fp16_params", "fp16", "bf16"),
        lambda c: c.fp16_params and not (c.fp16 or c.bf16),
        "fp16_params: got True, which needs fp16 or bf16 to be True",
    ),
    _Rule(
        ("sharded_data_parallel_degree", "pipeline_parallel_degree"),
        lambda c: c.sharded_data_parallel_degree > 1 and c.pipeline_parallel_degree > 1,
        "sharded_data_parallel_degree: got {sharded_data_parallel_degree}, which does not go with "
        "pipeline_parallel_degree {pipeline_parallel_degree}; set one of them to 1",
    ),
    _Rule(
        ("sharded_data_parallel_degree", "shard_optimizer_state"),
        lambda c: c.sharded_data_parallel_degree > 1 and c.shard_optimizer_state,
        "sharded_data_parallel_degree: got {sharded_data_parallel_degree}, which does not go with "
        "shard_optimizer_state True: it shards the optimizer state already",
    ),
    _Rule(
        ("virtual_stages", "auto_partition"),
        lambda c: c.virtual_stages > 1 and not c.auto_partition,
        "virtual_stages: got {virtual_stages}, which needs auto_partition to be True: modules placed by hand lie where "
        "they are placed",
    ),
    _Rule(
        ("load_partition", "partition_file"),
        lambda c: c.load_partition and not c.partition_file,
        "load_partition: got True, which needs partition_file: the file to read",
    ),
)


def resolve(config: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """Merges defaults, `config` and the environment into a checked configuration.

    Args:
        config: what the script gave to `smp.init`.
        environ: where `SM_HP_MP_PARAMETERS` is looked up.

    Raises:
        ConfigError: one message with every problem: the value got, what is allowed, the nearest key for a typo.
    """
    problems: list[str] = []
    values: dict[str, Any] = {}
    for source, given in _sources(config, environ, problems):
        values |= _canonical(source, given, problems)
    problems += _unknown_keys(values)
    values = {key: value for key, value in values.items() if key in Config.model_fields}
    wrong = _wrong_values(values)
    problems += wrong.values()
    # What is right by itself is still checked against the rest, so that one run shows every problem.
    checked = Config(**{key: value for key, value in values.items() if key not in wrong})
    problems += _broken_rules(checked, set(wrong))
    problems += _not_yet(checked)
    _raise_all(problems)
    return checked


def _raise_all(problems: list[str]) -> None:
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  - ".join([f"the smp configuration has {count}:", *problems]))


def _sources(
    config: Mapping[str, Any] | None, environ: Mapping[str, str], problems: list[str]
) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """The given mappings, weakest first, with a name for messages."""
    if config is not None and not isinstance(config, Mapping):
        problems.append(f"smp.init: got a {type(config).__name__}; the configuration is a dict")
    elif config:
        yield "the dict given to smp.init", config
    text = environ.get(ENV_VARIABLE, "").strip()
    if not text:
        return
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        problems.append(f"{ENV_VARIABLE}: got {_short(text)}, which is not JSON: {error}")
        return
    if isinstance(given, dict):
        yield ENV_VARIABLE, given
    else:
        problems.append(f"{ENV_VARIABLE}: got {_short(text)}; it must hold a JSON object")


def _canonical(source: str, given: Mapping[Any, Any], problems: list[str]) -> dict[str, Any]:
    """One source's values under the names of `Config`; keys of other frameworks are taken out."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key in _OTHER_FRAMEWORKS:
            if value is not False:
                problems.append(
                    f"{key}: got {_short(value)}, but {_OTHER_FRAMEWORKS[key]} and smp runs PyTorch only; remove it"
                )
            continue
        if key in _SPELLING:  # the attribute's name is no second name of the key
            problems.append(f"{key}: unknown key (value {_short(value)}); did you mean {_SPELLING[key]!r}?")
            continue
        name = ALIASES.get(key, key)
        if name in values and values[name] != value:
            alias = next(a for a, target in ALIASES.items() if target == name)
            problems.append(
                f"{alias} and {name}: {source} holds both, with different values ({_short(given[alias])} and "
                f"{_short(given[name])}); they are two names of one key"
            )
        values[name] = value
    return values


def _unknown_keys(values: Mapping[Any, Any]) -> list[str]:
    known = sorted({_SPELLING.get(name, name) for name in Config.model_fields} | {"partitions"})
    problems = []
    for key, value in values.items():
        if key in Config.model_fields:
            continue
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.6) if isinstance(key, str) else []
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        problems.append(f"{key}: unknown key (value {_short(value)}); {hint}")
    return problems


def _wrong_values(values: Mapping[str, Any]) -> dict[str, str]:
    """A message for each key whose value is wrong by itself."""
    try:
        Config(**values)
    except ValidationError as error:
        reasons: dict[str, list[str]] = {}
        for detail in error.errors():
            # A default that depends on a wrong key is not a problem of its own.
            if detail["type"] != "default_factory_not_called":
                reasons.setdefault(str(detail["loc"][0]), []).append(_reason(detail))
        return {key: _wrong_value(key, values[key], found) for key, found in reasons.items()}
    return {}


def _wrong_value(key: str, value: Any, reasons: list[str]) -> str:
    allowed = " or ".join(dict.fromkeys(reasons)).replace(" or must be ", " or ")
    if key == "placement_strategy":
        allowed = (
            f"must be {', '.join(PLACEMENT_NAMES)} or a permutation of the letters D, P, T: {', '.join(PLACEMENTS)}"
        )
    return f"{_SPELLING.get(key, key)}: got {_short(value)} ({type(value).__name__}); {allowed}"


def _reason(detail: ErrorDetails) -> str:
    return (
        detail["msg"].replace("Input should be", "must be").replace("a valid ", "a ").replace("a integer", "an integer")
    )


def _broken_rules(config: Config, wrong: set[str]) -> list[str]:
    values = {**config.model_dump(), "last_stage": config.pipeline_parallel_degree - 1}
    return [
        rule.message.format(**values) for rule in _RULES if not wrong.intersection(rule.keys) and rule.broken(config)
    ]


def _not_yet(config: Config) -> list[str]:
    problems = []
    for key, (works, feature) in _STILL_TO_COME.items():
        value = getattr(config, key)
        if value not in works:
            problems.append(
                f"{_SPELLING.get(key, key)}: got {_short(value)}, which needs a feature that is still to come "
                f"({feature}); what works today: {', '.join(map(repr, works))}"
            )
    return problems


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
