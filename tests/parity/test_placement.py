"""What is placed on a stage runs there, and what glue code moves keeps its hooks."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp
from tests.harness import on_ranks
from tests.parity.compare import Setup, assert_close, build, job_batch, sgd, smp_run
from tests.parity.zoo import WIDTH, Case, vectors

PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 3, "auto_partition": False, "default_partition": 0}


class Counted(nn.Linear):
    """Counts the calls that compute something."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += type(x) is Tensor
        return super().forward(x)


class Collected(nn.Module):
    """Modules in containers that are never called themselves."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.first = Counted()
        if container == "list":
            self.rest: nn.Module = nn.ModuleList([Counted(), Counted()])
        elif container == "dict":
            self.rest = nn.ModuleDict({"a": Counted(), "b": Counted()})
        else:
            self.rest = nn.Module()
            self.rest.inner = nn.ModuleList([Counted(), Counted()])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for module in self.rest.modules():
            if isinstance(module, Counted):
                hidden = module(hidden)
        return hidden.square().sum()


@pytest.mark.parametrize("container", ["list", "dict", "module"])
@on_ranks(2, config=PIPELINE)
def test_members_of_a_container_run_on_the_stage_of_the_container(container):
    """They would otherwise run op by op on the stage that has their inputs, fetching their weights every time."""
    module = Collected(container)
    smp.set_partition(module.rest, 1)
    model = smp.DistributedModel(module)

    @smp.step
    def train(x: Tensor) -> Tensor:
        loss = model(x)
        model.backward(loss)
        return loss

    for _ in range(2):
        train(torch.randn(30, WIDTH))
    calls = [m.calls for m in module.modules() if isinstance(m, Counted)]
    assert calls == ([6, 0, 0] if smp.pp_rank() == 0 else [0, 6, 6])


class Borrowed(nn.Module):
    """Glue code uses the weight of a module of another stage on a larger tensor, so that the weight is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.linear(self.first(x), self.last.weight)
        return F.mse_loss(self.last(torch.tanh(hidden)), y)


BORROWED = Case(Borrowed, vectors, [("first", 0), ("last", 0.9)])


@on_ranks(2)
def test_hooks_of_a_parameter_see_the_gradient_of_its_moved_copy():
    """A hook that clips or scales must act on all of the gradient, wherever it was computed."""

    def double(module: nn.Module) -> None:
        module.last.weight.register_hook(lambda gradient: 2 * gradient)

    setup = Setup(pp=2, steps=1, rows=20)
    got, _ = smp_run(BORROWED, setup, sgd, double)
    module = build(BORROWED, torch.float32)
    double(module)
    module(**job_batch(BORROWED, 20, 0, torch.float32)).backward()
    for name, gradient in got.gradients.items():
        assert_close(gradient, module.get_parameter(name).grad, 1e-5, f"gradient of {name}")
