"""Trains a distributed module and its undistributed twin side by side and compares everything."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import smp
from smp import runtime
from smp.comm import collectives
from smp.nn import DistributedModule
from smp.topology import CommGroup
from smp.tp.convert import convert
from smp.tp.shard import spec_of

Loss = Callable[[nn.Module, Tensor, int], Tensor]  # module, inputs, which part of the joined batch they are


def config(tp: int, prescaled: bool, **others: object) -> dict[str, object]:
    return {"tensor_parallel_degree": tp, "ddp": True, "prescaled_batch": prescaled, **others}


def tp_group():
    return runtime.get().group(CommGroup.TP_GROUP)


def square_loss(module: nn.Module, x: Tensor, part: int) -> Tensor:
    """Different for each part of the joined batch, so that a batch handed back to the wrong rank is noticed."""
    out = module(x)
    weight = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape) + part
    return (out * out * weight).sum() / out.numel()


def local(tensor: Tensor, param: nn.Parameter) -> Tensor:
    """This rank's part of a tensor of the twin."""
    spec = spec_of(param)
    return spec.split(tensor) if spec else tensor


def assert_trains_like_its_twin(
    module: nn.Module,
    batches: Sequence[Sequence[Tensor]],
    *,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    loss: Loss = square_loss,
    tolerance: float = 1e-9,
    expect: type[DistributedModule] | None = None,
) -> nn.Module:
    """Converts a copy of `module` and trains both.

    Args:
        batches: for each step the inputs of all tp_ranks; a shared batch is repeated, and the twin sees it once.
        expect: class of the replacement.
    """
    group = tp_group()
    shared = runtime.get().config.prescaled_batch
    twin = copy.deepcopy(module)
    smp.set_tensor_parallelism(module)
    held = list(module.parameters())
    optimizer, twin_optimizer = make_optimizer(held), make_optimizer(list(twin.parameters()))
    module = convert(module, runtime.get())
    if expect is not None:
        assert (type(module) is expect) == (group.size > 1)
    assert {id(p) for p in module.parameters()} == {id(p) for p in held}
    for parts in batches:
        mine = _leaf(parts[group.rank])
        value = loss(module, mine, 0 if shared else group.rank)
        value.backward()
        theirs = [_leaf(part) for part in (parts[:1] if shared else parts)]
        joined = _Joined(twin, loss)
        values = joined.losses(theirs)
        sum(values).backward()
        own = 0 if shared else group.rank
        _close(value, values[own], tolerance, "loss")
        if mine.is_floating_point():
            _close(mine.grad, theirs[own].grad, tolerance, "gradient of the input")
        _compare_gradients(module, twin, shared, tolerance)
        for trained in (optimizer, twin_optimizer):
            trained.step()
            trained.zero_grad()
        for (name, param), other in zip(module.named_parameters(), twin.parameters()):
            _close(param, local(other, param), tolerance, f"{name} after the step")
    return module


class _Joined:
    """The twin on the batches of all ranks at once, as one batch; the loss of each rank's part."""

    def __init__(self, twin: nn.Module, loss: Loss) -> None:
        self.twin, self.loss = twin, loss

    def losses(self, parts: list[Tensor]) -> list[Tensor]:
        if parts[0].dim() == 0 or not _has_batch(self.twin, parts[0]):
            return [self.loss(self.twin, part, index) for index, part in enumerate(parts)]
        outputs = self.twin(torch.cat(parts)).chunk(len(parts))
        return [self.loss(lambda _, out=out: out, None, index) for index, out in enumerate(outputs)]


def _has_batch(module: nn.Module, x: Tensor) -> bool:
    return x.dim() > (0 if isinstance(module, nn.Embedding) else 1)


def _leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_() if x.is_floating_point() else x


def _compare_gradients(module: nn.Module, twin: nn.Module, shared: bool, tolerance: float) -> None:
    for (name, param), other in zip(module.named_parameters(), twin.named_parameters()):
        assert param.requires_grad == other[1].requires_grad
        if other[1].grad is None:
            assert param.grad is None
            continue
        if not getattr(param, "_smp_scaled_batch", False) and not shared:
            param.grad = collectives.all_reduce(param.grad, tp_group())  # what the reducer does for whole parameters
        _close(param.grad, local(other[1].grad, param), tolerance, f"gradient of {name}")


def _close(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    got, want = got.detach(), want.detach()
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} instead of {tuple(want.shape)}"
    assert got.dtype == want.dtype
    difference = (got - want).norm() / want.norm().clamp_min(1e-30)
    assert difference <= tolerance, f"{what} differs by {difference:.2e}"
