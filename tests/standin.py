"""A stand-in for DistributedModel where a test is about what the optimizer and clipping ask of it."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from smp import runtime
from smp.topology import CommGroup
from smp.tp.shard import ShardSpec


def install_model(module: nn.Module, local: list[str] | None = None, partitioned: bool = True, **more: Any) -> Any:
    """Makes `module` the runtime's model, of which the parameters named in `local` (None: all) lie on this rank."""
    rt = runtime.get()

    def local_parameters() -> list[nn.Parameter]:
        return [param for name, param in module.named_parameters() if local is None or name in local]

    rt.model = SimpleNamespace(
        module=module, partitioned=partitioned, local_parameters=local_parameters, reducer=None, **more
    )
    return rt.model


def shard(param: nn.Parameter, dim: int) -> None:
    """Cuts `param` over the tensor-parallel group, in place."""
    rt = runtime.get()
    size = rt.group(CommGroup.TP_GROUP).size
    spec = ShardSpec(tuple(param.shape), dim, rt.tp_rank, size)
    gradient = param.grad
    param.grad = None
    param.data = spec.split(param.data)
    param._smp_shard = spec  # type: ignore[attr-defined]
    param._smp_scaled_batch = True  # type: ignore[attr-defined]
    if gradient is not None:
        param.grad = spec.split(gradient)


def free(param: nn.Parameter) -> None:
    """What becomes of a parameter that another stage owns: the same object, shape and device, no storage."""
    param.grad = None
    param.data.untyped_storage().resize_(0)


def layers(num: int = 4, width: int = 8, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(num)))
