"""Ways to call backward in a step: several losses, given gradients, one after another, through `loss.backward()`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.errors import StepError
from tests.harness import on_ranks
from tests.parity.compare import assert_close, owned_parameters
from tests.parity.zoo import WIDTH, Block

PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0}

# Called with the tensors, and with their gradients where there are any.
Backward = Callable[..., None]


class Fork(nn.Module):
    """One trunk, two heads on different stages."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = Block(), Block(), Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.left(hidden), self.right(hidden)


def several_losses(net: Any, x: Tensor, backward: Backward) -> None:
    left, right = net(x)
    backward([left.square().mean(), right.sin().mean()])


def product(net: Any, x: Tensor, backward: Backward) -> None:
    left, right = net(x)
    backward(left.square().mean() * right.sin().mean())


def given_gradients(net: Any, x: Tensor, backward: Backward) -> None:
    left, right = net(x)
    backward([left, right], [torch.ones_like(left), torch.full_like(right, 0.3)])


def one_head_detached(net: Any, x: Tensor, backward: Backward) -> None:
    left, right = net(x)
    backward((left * right.detach()).mean())


def one_after_another(net: Any, x: Tensor, backward: Backward) -> None:
    """As adversarial training does: a backward, then another forward and backward."""
    left, right = net(x)
    backward(left.square().mean() + right.mean())
    left, right = net(0.5 * x)
    backward(right.square().mean())


def plain_backward(tensors: Any, gradients: Any = None) -> None:
    """What smp's does for a mean over two microbatches."""
    tensors = tensors if isinstance(tensors, list) else [tensors]
    gradients = [torch.full_like(t, 0.5) for t in tensors] if gradients is None else [0.5 * g for g in gradients]
    torch.autograd.backward(tensors, gradients)


@pytest.mark.parametrize("way", ["model", "loss"])
@pytest.mark.parametrize(
    "body",
    [several_losses, product, given_gradients, one_head_detached, one_after_another],
    ids=lambda body: body.__name__,
)
@on_ranks(2, config=PIPELINE)
def test_every_way_to_call_backward_gives_the_gradients_of_one_process(body, way):
    """Each loss has its own way back over the stages; none may be lost, none counted twice."""
    torch.manual_seed(0)
    module = Fork()
    torch.manual_seed(0)
    plain = Fork()
    smp.set_partition(module.left, 1)
    model = smp.DistributedModel(module)

    def through_loss(tensors: Any, gradients: Any = None) -> None:
        if isinstance(tensors, list):
            torch.autograd.backward(tensors, gradients)
        else:
            tensors.backward()

    @smp.step
    def train(x: Tensor) -> None:
        body(model, x, model.backward if way == "model" else through_loss)

    for number in range(2):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        train(x)
        for part in x.chunk(2):
            body(plain, part, plain_backward)
        expected = dict(plain.named_parameters())
        for name, parameter in owned_parameters(model):
            assert (parameter.grad is None) == (expected[name].grad is None), name
            if parameter.grad is not None:
                assert_close(parameter.grad, expected[name].grad, 1e-5, f"gradient of {name}")


@on_ranks(2, config=PIPELINE)
def test_a_second_backward_through_the_same_part_is_refused():
    """As in torch, whose graph is freed by the first; every rank must say so, with the line."""
    module = Fork()
    smp.set_partition(module.left, 1)
    model = smp.DistributedModel(module)

    @smp.step
    def train(x: Tensor) -> None:
        left, right = model(x)
        model.backward(left.mean())
        model.backward(right.mean())

    with pytest.raises(StepError, match=r"test_backward\.py:\d+ goes through a part"):
        train(torch.randn(4, WIDTH))
