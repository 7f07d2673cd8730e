"""The same model in plain PyTorch and over stages, in one process, compared to the last digits of float64."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import smp
from smp import runtime

TOLERANCE = 1e-9
WIDTH = 4


def start(pp: int = 2, **config: Any) -> None:
    """A new runtime in this process, with `pp` stages."""
    runtime.reset()
    smp.init({"pipeline_parallel_degree": pp, "ddp": True, "auto_partition": True, **config})


def wrap(module: nn.Module, places: dict[str, int], **options: Any) -> Any:
    """The DistributedModel of `module`, with children placed by hand."""
    for path, stage in places.items():
        smp.set_partition(module.get_submodule(path) if path else module, stage)
    return smp.DistributedModel(module, **options)


def rows(batch: dict[str, Any], k: int, count: int) -> dict[str, Any]:
    """Microbatch `k` of `count`."""
    return {
        name: value.chunk(count)[k] if isinstance(value, Tensor) and value.dim() else value
        for name, value in batch.items()
    }


def same(got: Tensor | None, want: Tensor | None, what: str, tolerance: float = TOLERANCE) -> None:
    """Equal up to rounding; None only where None is expected."""
    assert (got is None) == (want is None), f"{what}: {got}, plain PyTorch has {want}"
    if got is not None and want is not None:
        assert got.shape == want.shape and got.dtype == want.dtype, f"{what}: {got.shape} {got.dtype}, not {want.shape}"
        if not want.is_floating_point():
            assert torch.equal(got, want), f"{what}: {got}, plain PyTorch has {want}"
            return
        apart = float((got - want).norm() / want.norm().clamp_min(1e-30))
        assert apart <= tolerance, f"{what}: {apart:.1e} apart from plain PyTorch ({got} and {want})"


def same_state(model: Any, plain: nn.Module, what: str = "", tolerance: float = TOLERANCE) -> None:
    """Gradients, parameters and buffers that live on this rank, against plain PyTorch's."""
    parameters, buffers = dict(plain.named_parameters()), dict(plain.named_buffers())
    for name, parameter in model.local_named_parameters():
        same(parameter.grad, parameters[name].grad, f"{what} gradient of {name}", tolerance)
        same(parameter.data, parameters[name].data, f"{what} {name}", tolerance)
    for name, buffer in model.local_named_buffers():
        same(buffer, buffers[name], f"{what} buffer {name}", tolerance)


def plain_step(plain: nn.Module, loss_of: Callable[..., Tensor], batch: dict[str, Any], count: int) -> list[Tensor]:
    """Losses of the microbatches in order; gradients are the mean over them."""
    losses = []
    for k in range(count):
        loss = loss_of(plain, **rows(batch, k, count))
        (loss / count).backward()
        losses.append(loss.detach())
    return losses


def check(
    module: nn.Module,
    places: dict[str, int],
    batch: dict[str, Any] | None = None,
    loss_of: Callable[..., Tensor] = lambda model, **batch: model(**batch),
    *,
    pp: int = 2,
    count: int = 2,
    steps: int = 2,
    tolerance: float = TOLERANCE,
    **config: Any,
) -> Any:
    """Train `steps` steps of SGD both ways and compare losses, gradients, parameters and buffers; returns the model."""
    start(pp, microbatches=count, **config)
    module = module.double()
    plain = copy.deepcopy(module)
    model = wrap(module, places)
    ours = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)

    @smp.step
    def train(batch: dict[str, Any]) -> Tensor:
        loss = loss_of(model, **batch)
        model.backward(loss)
        return loss

    for step in range(steps):
        inputs = batch if batch is not None else vectors(2 * count, seed=step)
        ours.zero_grad()
        theirs.zero_grad()
        got = train(inputs)
        want = plain_step(plain, loss_of, inputs, count)
        for k, (a, b) in enumerate(zip(got.outputs, want, strict=True)):
            same(a, b, f"step {step}, loss of microbatch {k}", tolerance)
        ours.step()
        theirs.step()
        same_state(model, plain, f"step {step}:", tolerance)
    return model


def vectors(number: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A batch `x`, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(number, WIDTH, generator=generator, dtype=torch.float64), **more}


class Net(nn.Module):
    """`forward` is a function of the net and `x`; children and parameters as given."""

    def __init__(self, forward: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        self.code = forward
        for name, child in children.items():
            if isinstance(child, nn.Module):
                self.add_module(name, child)
            elif isinstance(child, nn.Parameter):
                self.register_parameter(name, child)
            elif isinstance(child, Tensor):
                self.register_buffer(name, child)
            else:
                setattr(self, name, child)

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Any:
        return self.code(self, x, *more, **named)


def linear(width: int = WIDTH, seed: int = 0) -> nn.Linear:
    """A square layer with weights of its own."""
    layer = nn.Linear(width, width)
    generator = torch.Generator().manual_seed(100 + seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return layer
