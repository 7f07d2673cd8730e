"""Sides that update bfloat16 parameters through fp32 masters, with AdamW, and do nothing else.

Gradients are there already, and in float32 on all sides: nobody casts them. `sizes`: `width` of the square layers, with
biases, and the number of `layers` in each process.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import smp

RATE = 1e-3
Built = tuple[Callable[[], Any], Any]


def _layers(sizes: dict[str, int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(sizes["width"], sizes["width"]) for _ in range(sizes["layers"])))


def _fill(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.full(parameter.shape, 1e-3, dtype=torch.float32)


def ours(sizes: dict[str, int], form: str, config: dict[str, Any]) -> Built:
    """`DistributedOptimizer` over two replicas; `form` of the inner AdamW as for `theirs`."""
    smp.init({"ddp": True, "bf16": True, **config})
    model = smp.DistributedModel(_layers(sizes))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=RATE, **FORMS[form]))
    _fill(list(model.parameters()))
    optimizer.step()
    return optimizer.step, None


def theirs(sizes: dict[str, int], form: str) -> Built:
    """AdamW over masters, whose new values are cast to the parameters; `form`: plain, foreach or fused."""
    parameters = list(_layers(sizes).bfloat16().parameters())
    masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=RATE, **FORMS[form])
    for parameter in parameters:
        parameter.grad_dtype = torch.float32
    _fill(parameters)

    @torch.no_grad()
    def step() -> None:
        for master, parameter in zip(masters, parameters):
            master.grad = parameter.grad
        optimizer.step()
        torch._foreach_copy_([*parameters], [*masters])

    step()
    return step, None


FORMS: dict[str, dict[str, Any]] = {
    "plain": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
