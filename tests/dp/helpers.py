"""What the data-parallel tests share: a reducer made as the model makes it, and a record of what it does when."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp import runtime
from smp.dp.reducer import Reducer
from smp.topology import CommGroup

KILOBYTE = 1 / 1024  # as bucket_cap_mb


def make_reducer(module: nn.Module, attach: bool = True, **options: Any) -> Reducer:
    """A reducer for all parameters of `module` over this world's groups."""
    rt = runtime.get()
    reducer = Reducer(
        list(module.named_parameters()), dp=rt.group(CommGroup.DP_GROUP), rdp=rt.group(CommGroup.RDP_GROUP), **options
    )
    if attach:
        reducer.attach()
    return reducer


def chain(width: int = 8, depth: int = 4) -> nn.Sequential:
    """Linear layers in float64, the same on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))).double()


def batch(step: int, samples: int, width: int = 8) -> Tensor:
    """The samples of all ranks together."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(samples, width, dtype=torch.float64, generator=generator)


def my_part(whole: Tensor) -> Tensor:
    """This dp rank's samples."""
    rt = runtime.get()
    return whole.chunk(rt.dp_size)[rt.dp_rank]


def loss_of(module: nn.Module, data: Tensor) -> Tensor:
    return module(data).tanh().pow(2).mean()


def assert_close(got: Tensor | None, expected: Tensor | None, name: str = "", tolerance: float = 1e-12) -> None:
    """Relative difference as QUALITY defines it."""
    if expected is None or got is None:
        assert got is expected, f"{name}: {got} against {expected}"
        return
    assert got.dtype == expected.dtype
    scale = expected.abs().double().norm().item() or 1.0
    difference = (got - expected).abs().double().norm().item() / scale
    assert difference <= tolerance, f"{name}: relative difference {difference}"


def assert_same_gradients(module: nn.Module, reference: nn.Module, factor: float = 1.0) -> None:
    pairs = zip(module.named_parameters(), reference.parameters())
    for (name, param), expected in pairs:
        assert_close(param.grad, None if expected.grad is None else expected.grad * factor, name)


@contextlib.contextmanager
def recorded(module: nn.Module) -> Iterator[list[str]]:
    """Events in order: "reduce" for each all-reduce that starts, the name of the parameter for each gradient."""
    events: list[str] = []
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point():
            events.append("reduce")
        return original(tensor, *args, **kwargs)

    handles = [
        param.register_hook(lambda grad, name=name: events.append(name)) for name, param in module.named_parameters()
    ]
    dist.all_reduce = all_reduce
    try:
        yield events
    finally:
        dist.all_reduce = original
        for handle in handles:
            handle.remove()


def all_gather(tensor: Tensor) -> list[Tensor]:
    """`tensor` of every rank of the dp group."""
    rt = runtime.get()
    parts = [torch.empty_like(tensor) for _ in range(rt.dp_size)]
    dist.all_gather(parts, tensor.contiguous(), group=rt.group(CommGroup.DP_GROUP).process_group)
    return parts
