"""The configuration: sources, types, checks, and messages that let a user mend everything in one go."""

import json
from typing import Any

import pytest

from smp.config import ENV_VARIABLE, NO_EFFECT, Config, resolve
from smp.errors import ConfigError, SmpError


def problems_of(config: Any, environment: str = "") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(config, {ENV_VARIABLE: environment})
    head, *problems = str(caught.value).split("\n  - ")
    assert head == f"the smp configuration has {len(problems)} problem{'s' if len(problems) > 1 else ''}:"
    return problems


def problem_of(config: Any, environment: str = "") -> str:
    (problem,) = problems_of(config, environment)
    return problem


def test_defaults_are_the_documented_ones() -> None:
    """Scripts rely on what they do not set."""
    config = resolve({}, {})
    assert config == resolve(None, {})
    expected = {
        "pipeline_parallel_degree": 1, "tensor_parallel_degree": 1, "microbatches": 1, "active_microbatches": 3,
        "pipeline": "interleaved", "virtual_stages": 1, "optimize": "memory", "placement_strategy": "cluster",
        "auto_partition": True, "default_partition": 0, "memory_weight": 0.8, "ddp": False,
        "ddp_dist_backend": "auto", "prescaled_batch": False, "fp16": False, "bf16": False, "fp16_params": False,
        "shard_optimizer_state": False, "offload_activations": False, "activation_loading_horizon": 4,
        "sharded_data_parallel_degree": 1, "sdp_reduce_bucket_size": 5e8, "sdp_param_persistence_threshold": 1e6,
        "sdp_max_live_parameters": 1e9, "sdp_hierarchical_allgather": True, "sdp_gradient_clipping": 1.0,
    }  # fmt: skip
    assert {key: getattr(config, key) for key in expected} == expected


def test_defaults_that_follow_other_keys() -> None:
    """active_microbatches follows the pipeline degree, memory_weight follows optimize."""
    config = resolve({"pipeline_parallel_degree": 4, "optimize": "speed"}, {})
    assert (config.active_microbatches, config.memory_weight) == (6, 0.2)


def test_environment_overrides_the_script_key_by_key() -> None:
    """What the launcher says wins, also when it uses the other name of a key."""
    config = resolve({"partitions": 2, "microbatches": 4}, {ENV_VARIABLE: '{"pipeline_parallel_degree": 3}'})
    assert (config.pipeline_parallel_degree, config.partitions, config.microbatches) == (3, 3, 4)


@pytest.mark.parametrize("text", ["", "  ", "{}"])
def test_empty_environment_is_no_configuration(text: str) -> None:
    """Launchers export the variable empty."""
    assert resolve({"microbatches": 2}, {ENV_VARIABLE: text}).microbatches == 2


@pytest.mark.parametrize("text", ['{"partitions": 2', "[1]", "3", '"x"'])
def test_environment_that_is_no_json_object_is_named(text: str) -> None:
    """The user must learn that the variable is at fault, not the script."""
    problem = problem_of({}, text)
    assert problem.startswith(f"{ENV_VARIABLE}: got ") and "JSON" in problem


def test_aliases_that_agree_are_one_key_and_that_differ_are_refused() -> None:
    """`partitions` is the older name of `pipeline_parallel_degree`."""
    assert resolve({"partitions": 2, "pipeline_parallel_degree": 2}, {}).partitions == 2
    problem = problem_of({"partitions": 2, "pipeline_parallel_degree": 4})
    assert problem.startswith("partitions and pipeline_parallel_degree: ") and "2 and 4" in problem


def test_unknown_key_is_refused_with_the_nearest_one() -> None:
    """A misspelt setting that is ignored means that a default is trained with."""
    problem = problem_of({"tensor_paralell_degree": 2})
    assert problem == "tensor_paralell_degree: unknown key (value 2); did you mean 'tensor_parallel_degree'?"
    assert "known keys: " in problem_of({"zzzzzzzz": 1})
    assert "known keys: " in problem_of({7: 1})
    assert "'_match_weights'" in problem_of({"match_weights": False})


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("microbatches", "4x", "must be an integer"),
        ("microbatches", "4", "must be an integer"),
        ("microbatches", 4.0, "must be an integer"),
        ("microbatches", True, "must be an integer"),
        ("microbatches", None, "must be an integer"),
        ("microbatches", [4], "must be an integer"),
        ("microbatches", 0, "must be greater than or equal to 1"),
        ("pipeline_parallel_degree", 0, "must be greater than or equal to 1"),
        ("tensor_parallel_degree", -1, "must be greater than or equal to 1"),
        ("active_microbatches", 0, "must be greater than or equal to 1"),
        ("ddp", 1, "must be a boolean"),
        ("ddp", "true", "must be a boolean"),
        ("ddp", {"port": 1}, "must be a boolean"),
        ("memory_weight", "0.5", "must be a number"),
        ("memory_weight", True, "must be a number"),
        ("memory_weight", 1.5, "must be less than or equal to 1"),
        ("memory_weight", float("nan"), "must be"),
        ("optimize", "size", "must be 'memory' or 'speed'"),
        ("pipeline", "simpel", "must be 'interleaved', 'simple'"),
        ("placement_strategy", "DDT", "cluster, spread or a permutation of the letters D, P, T: DPT"),
        ("ddp_port", 70000, "must be less than or equal to 65535"),
        ("ddp_dist_backend", "gloos", "must be 'auto', 'nccl' or 'gloo'"),
        ("default_partition", -1, "must be greater than or equal to 0"),
        ("replicate_tied", "yes", "must be a boolean or 'auto'"),
        ("partition_file", 3, "must be a string"),
        ("sdp_reduce_bucket_size", 0, "must be greater than 0"),
    ],
)
def test_wrong_value_is_refused_with_what_is_allowed(key: str, value: Any, allowed: str) -> None:
    """Types are as strict as JSON's; the message holds key, value, type and what is allowed."""
    problem = problem_of({key: value})
    assert problem.startswith(f"{key}: got {value!r} ({type(value).__name__}); ")
    assert allowed in problem


def test_int_is_taken_for_float() -> None:
    """JSON writes 1.0 as 1."""
    assert resolve({"memory_weight": 1, "sdp_gradient_clipping": 1}, {}).memory_weight == 1.0


def test_all_problems_are_reported_at_once() -> None:
    """One failed job must be enough to mend a configuration: wrong keys, types, ranges, combinations, sources."""
    problems = problems_of(
        {
            "tensor_paralell_degree": 2, "microbatches": "4x", "partitions": 0, "tensor_parallel_degree": 2,
            "fp16": True, "bf16": True, "horovod": True, "auto_partition": False,
        },
        '{"pipelin": "simple"}',
    )  # fmt: skip
    starts = [
        "tensor_paralell_degree:", "pipelin:", "microbatches:", "pipeline_parallel_degree:", "tensor_parallel_degree:",
        "fp16 and bf16:", "horovod:", "auto_partition:",
    ]  # fmt: skip
    for start in starts:
        assert sum(problem.startswith(start) for problem in problems) == 1, start
    assert len(problems) == len(starts)


@pytest.mark.parametrize(
    ("config", "start"),
    [
        ({"tensor_parallel_degree": 2}, "tensor_parallel_degree: got 2, which needs ddp"),
        ({"auto_partition": False}, "auto_partition: got False, which needs default_partition"),
        ({"default_partition": 2, "partitions": 2}, "default_partition: got 2; with pipeline_parallel_degree 2"),
        ({"load_partition": True}, "load_partition: got True, which needs partition_file"),
        ({"fp16": True, "bf16": True}, "fp16 and bf16: both"),
        ({"fp16_params": True}, "fp16_params: got True, which needs fp16"),
        (
            {"virtual_stages": 2, "auto_partition": False, "default_partition": 0},
            "virtual_stages: got 2, which needs auto_partition to be True",
        ),
    ],
)
def test_combinations_that_cannot_work_are_refused(config: dict[str, Any], start: str) -> None:
    """Each is right by itself and wrong with the rest."""
    assert problem_of(config).startswith(start)


@pytest.mark.parametrize(
    ("config", "start"),
    [
        ({"sharded_data_parallel_degree": 2, "partitions": 2}, "sharded_data_parallel_degree: got 2, which does not"),
        ({"sharded_data_parallel_degree": 2, "shard_optimizer_state": True}, "sharded_data_parallel_degree: got 2, w"),
    ],
)
def test_combinations_of_coming_features_are_checked_too(config: dict[str, Any], start: str) -> None:
    """Keys of coming features are validated already."""
    assert any(problem.startswith(start) for problem in problems_of(config))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sharded_data_parallel_degree", 2), ("_match_weights", True), ("sdp_reduce_bucket_size", 1e6),
        ("sdp_param_persistence_threshold", 1.0), ("sdp_max_live_parameters", 1e6),
        ("sdp_hierarchical_allgather", False), ("sdp_gradient_clipping", 0.5),
    ],
)  # fmt: skip
def test_features_still_to_come_are_refused_by_name(key: str, value: Any) -> None:
    """A key that is silently ignored would let a user believe that the feature runs."""
    problem = problem_of({key: value})
    assert problem.startswith(f"{key}: got {value!r}, which needs a feature that is still to come")


def test_defaults_of_coming_features_are_accepted() -> None:
    """Scripts that spell out defaults keep working."""
    resolve({"fp16": False, "_match_weights": False, "sdp_reduce_bucket_size": 500_000_000, "horovod": False}, {})


@pytest.mark.parametrize("pipeline", ["interleaved", "simple", "_only_forward", "zero_bubble", "auto"])
def test_schedules_that_exist_are_accepted(pipeline: str) -> None:
    """Those that scripts use, and ours."""
    assert resolve({"pipeline": pipeline}, {}).pipeline == pipeline


def test_tensorflow_keys_say_pytorch_only() -> None:
    """The user should hear that the framework is wrong, not that the key is unknown."""
    assert "PyTorch only" in problem_of({"horovod": True})


def test_config_is_no_dict() -> None:
    """`smp.init("config.json")` is a mistake to name, not a TypeError from inside."""
    assert problem_of("config.json") == "smp.init: got a str; the configuration is a dict"


def test_config_error_is_a_value_error_and_config_is_frozen() -> None:
    """Clients catch ValueError; nothing may change a configuration after the checks."""
    assert issubclass(ConfigError, ValueError) and issubclass(ConfigError, SmpError)
    with pytest.raises(ValueError, match="frozen"):
        resolve({}, {}).microbatches = 3  # type: ignore[misc]


def test_equal_configurations_compare_equal_however_they_were_written() -> None:
    """`smp.init` a second time with the same meaning is a no-op."""
    assert resolve({"partitions": 2, "memory_weight": 1}, {}) == resolve(
        None, {ENV_VARIABLE: json.dumps({"pipeline_parallel_degree": 2, "memory_weight": 1.0, "microbatches": 1})}
    )
    assert resolve({"microbatches": 2}, {}) != resolve({}, {})


def test_world_that_does_not_fit_is_refused() -> None:
    """Degrees that do not divide the world, and replicas without ddp."""
    config = resolve({"partitions": 2, "tensor_parallel_degree": 2, "ddp": True}, {})
    config.check_world(4)
    config.check_world(8)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_degree 2 x tensor_parallel_degree 2 = 4 .* 6 processes"):
        config.check_world(6)
    with pytest.raises(ConfigError, match="ddp: got False, but 4 processes hold 2 model replicas"):
        resolve({"partitions": 2}, {}).check_world(4)


def test_keys_without_effect_are_accepted_with_a_warning() -> None:
    """An option that changes nothing must say so, once, and only when it was set to something else."""
    given = {"static_mode": True, "optimize": "speed", "contiguous": False, "fast_mode": False}
    warnings = resolve(given, {}).warnings()
    assert [text.split("=")[0] for text in warnings] == ["static_mode", "contiguous"]
    assert resolve({}, {}).warnings() == ()
    (text,) = resolve({"activation_loading_horizon": 2}, {}).warnings()
    assert "it is for offload_activations" in text
    assert resolve({"activation_loading_horizon": 2, "offload_activations": True}, {}).warnings() == ()
    assert set(NO_EFFECT) <= set(Config.model_fields)


def test_description_shows_degrees_and_what_differs() -> None:
    """This line is printed at the start of every job."""
    text = resolve({"partitions": 2, "pipeline": "simple", "optimize": "speed"}, {}).describe()
    degrees = "pipeline_parallel_degree=2, tensor_parallel_degree=1, ddp=False, microbatches=1"
    assert text == f"{degrees}, pipeline=simple, optimize=speed"
