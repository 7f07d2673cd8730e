"""Gradients of half precision parameters add up in float32, whoever adds them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import smp
from smp.config import Config
from smp.errors import ConfigError
from smp.fp16 import gradients
from tests.harness import on_ranks

WIDTH = 4
SMALL = {"bf16": 2.0**-9, "fp16": 2.0**-12}  # 1 + SMALL is 1 in that type
BASE = {"ddp": True, "auto_partition": False, "default_partition": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "replicas": {},
    "views": {},
    "hook": {},
    "pp": {"pipeline_parallel_degree": 2},
    "pp simple": {"pipeline_parallel_degree": 2, "pipeline": "simple"},
    "pp zero bubble": {"pipeline_parallel_degree": 2, "pipeline": "zero_bubble"},
    "tp": {"tensor_parallel_degree": 2},
    "tp prescaled": {"tensor_parallel_degree": 2, "prescaled_batch": True},
    "tied": {"pipeline_parallel_degree": 2, "replicate_tied": True},
    "tp and pp": {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2},
}
RANKS = {"one process": 1, "tp and pp": 4}
# (type, passes, small gradients besides the large one, layout)
CASES = [("bf16", 5, 64, layout) for layout in LAYOUTS if layout != "tp and pp"] + [
    *[("bf16", 1, 64, layout) for layout in ("one process", "pp simple", "tp")],
    *[("fp16", 5, 64, layout) for layout in ("replicas", "pp zero bubble")],
    ("bf16", 1, 4, "tp and pp"),
]


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    half = {"bf16": True} if case["half"] == "bf16" else {"fp16": True, "_fp32_grad_accumulation": True}
    return {**BASE, **LAYOUTS[case["layout"]], **half, "microbatches": (case["num_small"] + 1) // case["passes"]}


class Pair(nn.Module):
    """Two layers whose weights are the unit matrix, and a vector: all gradients are the sum of the inputs."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        for layer in (self.first, self.second):
            nn.init.eye_(layer.weight)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x)) * self.scale).float().sum()


@pytest.mark.parametrize(("half", "passes", "num_small", "layout"), CASES)
@on_ranks(lambda case: RANKS.get(case["layout"], 2), config=config_of)
def test_many_small_gradients_do_not_vanish_beside_a_large_one(
    half: str, passes: int, num_small: int, layout: str
) -> None:
    """a5-2. A failure means that runs with many accumulation steps learn from their first microbatch only."""
    module = Pair(tied=layout == "tied")
    smp.set_partition(module.second, smp.state.cfg.pipeline_parallel_degree - 1)
    smp.set_tensor_parallelism(module, smp.tp_size() > 1)
    model = smp.DistributedModel(
        module,
        backward_passes_per_step=passes,
        average_grads_across_microbatches=False,
        gradient_as_bucket_view=layout == "views",
    )
    if layout == "hook":
        model.register_comm_hook(smp.get_dp_process_group(), default_hooks.allreduce_hook)

    @smp.step
    def train(x: Tensor) -> None:
        model.backward(model(x))

    small = SMALL[half]
    inputs = torch.full((num_small + 1, WIDTH), small)
    # Replicas differ by one small gradient, so that neither a sum nor a mean over them may be rounded.
    inputs[0] = 1 + (0 if smp.dp_rank() == 0 or smp.tp_size() > 1 else 4 * small)
    for part in inputs.chunk(passes):
        train(part)
    different = layout in ("replicas", "views", "hook")
    total = 1 + num_small * small + (2 * small if different else 0)
    for name, param in model.local_named_parameters():
        assert param.dtype == (torch.bfloat16 if half == "bf16" else torch.float16)
        assert param.grad is not None and param.grad.dtype == torch.float32
        error = (param.grad - total * (2 if name.endswith("first.weight") and layout == "tied" else 1)).abs().max()
        assert error < 1e-6, f"{name}: off by {error}"
    smp.barrier()  # so that nobody counts what another rank is still sending


@pytest.mark.parametrize("settings", [{"bf16": True}, {"fp16": True, "fp32_grad_accumulation": True}])
def test_a_torch_that_cannot_keep_wide_gradients_is_refused(
    settings: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure means that sums are silently kept in half precision with such a torch."""
    monkeypatch.setattr(gradients, "TORCH_CAN_WIDEN", False)
    config = Config.model_construct(**{"fp16": False, "bf16": False, "fp32_grad_accumulation": False, **settings})
    with pytest.raises(ConfigError, match=r"needs a torch .* 2\.10 or newer"):
        gradients.widen([], config)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bf16": True}, "gradients of torch.bfloat16 parameters are accumulated in torch.float32"),
        ({"fp16": True}, "gradients of torch.float16 parameters are accumulated in torch.float16"),
    ],
)
def test_the_type_of_gradients_is_said_once(
    settings: dict[str, bool], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """a5-2: a failure means that nobody can see in which type gradients add up."""
    config = Config.model_construct(**{"fp16": False, "bf16": False, "fp32_grad_accumulation": False, **settings})
    half, other = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), nn.Parameter(torch.ones(2))
    half.grad = torch.ones_like(half)
    gradients.widen([half, other], config)
    assert capsys.readouterr().err.count(said) == 1
    assert half.grad.dtype == (torch.float32 if "bf16" in settings else torch.bfloat16)
    assert other.grad_dtype == torch.float32
