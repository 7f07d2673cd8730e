"""Input that makes no sense, or little: one clear error on every rank, or what one process does."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.errors import PartitionError, StepError
from tests.harness import on_ranks
from tests.pp.reference import WIDTH, Net, check, linear, same, start, vectors, wrap


def two_layers() -> Net:
    return Net(lambda net, x: net.b(torch.tanh(net.a(x))), a=linear(), b=linear(seed=1)).double()


@pytest.mark.parametrize("pp", [2, 3])
@on_ranks(lambda arguments: arguments["pp"])
def test_more_stages_than_modules_is_refused_on_every_rank(pp):
    """A stage without work would only cost; the user has to hear how many there can be, and the world goes on."""
    start(pp)
    model = smp.DistributedModel(nn.Sequential(*[linear(seed=k) for k in range(pp - 1)]).double())

    @smp.step
    def train(x: Tensor) -> Tensor:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    with pytest.raises(PartitionError, match=rf"{pp - 1} modules? .* too few for pipeline_parallel_degree {pp}"):
        train(vectors(2)["x"])
    assert smp.allgather(smp.rank(), smp.WORLD) == list(range(pp))


LOSSES = {
    "an argument alone": lambda model, x: x.pow(2).mean(),
    "a constant": lambda model, x: torch.ones(()),
    "made under no_grad": lambda model, x: without_grad(model, x),
    "detached": lambda model, x: model(x).detach().mean(),
    "one of two": lambda model, x: [model(x).mean(), x.mean()],
}


def without_grad(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).mean()


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("kind", LOSSES)
@on_ranks(2)
def test_a_loss_that_does_not_depend_on_the_model_is_refused_on_every_rank(kind, pp):
    """Training on it would change nothing, without a word. Once the user has heard, the next step trains."""
    start(pp, microbatches=2)
    model = smp.DistributedModel(two_layers())

    @smp.step
    def train(x: Tensor, kind: str) -> Any:
        model.backward(LOSSES[kind](model, x) if kind else model(x).pow(2).mean())

    with pytest.raises(StepError, match="does not depend on any parameter"):
        train(vectors(4)["x"], kind)
    train(vectors(4)["x"], "")
    assert all(p.grad is not None for p in model.local_parameters())


@pytest.mark.parametrize("pp", [1, 2])
@on_ranks(2)
def test_outputs_that_do_not_depend_on_the_model_are_returned(pp):
    """A step function may return what it likes: its arguments, constants, other objects."""
    start(pp, microbatches=2)
    model = smp.DistributedModel(two_layers())

    @smp.step
    def train(x: Tensor, labels: Tensor) -> Any:
        model.backward(model(x).pow(2).mean())
        return {"x": x, "double": x * 2, "labels": labels, "one": torch.ones(3), "text": "done"}

    x, labels = vectors(4)["x"], torch.arange(4)
    out = train(x, labels)
    same(out["x"].concat(), x, "the argument")
    same(out["double"].concat(), x * 2, "made from the argument")
    same(out["labels"].concat(), labels, "labels")
    assert out["one"].stack().shape == (2, 3) and out["text"] == ["done", "done"]


def ignoring(model: Any, x: Tensor, **unused: Any) -> Tensor:
    """The model is given one of the unused tensors, and another is worked on; none reaches the loss."""
    _ = unused["mask"].float() * 2 if "mask" in unused else None
    return model(x, unused.get("y")).pow(2).mean()


@on_ranks(2)
def test_tensors_that_never_reach_the_loss_change_nothing():
    """Of every type and on every way: left alone, given to the model, worked on in glue code, requiring a gradient."""
    batch = vectors(4)
    y = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask, labels = torch.ones(4, 2, dtype=torch.bool), torch.arange(4)

    def forward(net: Any, x: Tensor, y: Any = None) -> Tensor:
        aside = net.c(y) if y is not None else None  # computed, and dropped
        assert aside is None or aside.shape == x.shape
        return net.b(torch.tanh(net.a(x)))

    for extra in ({"y": y}, {"mask": mask, "labels": labels}, {"y": y.clone().requires_grad_(), "mask": mask}):
        net = Net(forward, a=linear(), b=linear(seed=1), c=linear(seed=2))
        model = check(net, {"a": 0, "b": 1, "c": 1}, {**batch, **extra}, ignoring)
        if smp.pp_rank() == 1:
            assert all(p.grad is None for p in model.module.c.parameters())
        assert extra.get("y") is None or extra["y"].grad is None


@on_ranks(2)
def test_a_batch_that_reaches_nothing_of_a_stage_is_trained_on_the_others():
    """A branch of the step may leave a whole stage out, and take it in again in the next step."""
    start(2, microbatches=2)
    net = two_layers()
    model = wrap(net, {"a": 0, "b": 1})

    @smp.step
    def train(x: Tensor, whole: bool) -> Tensor:
        loss = (model(x) if whole else net.a(x)).pow(2).mean()
        model.backward(loss)
        return loss

    for whole in (True, False, True):
        for p in model.parameters():
            p.grad = None
        train(vectors(4)["x"], whole)
        expected = whole or smp.pp_rank() == 0
        assert all((p.grad is not None) == expected for p in model.local_parameters())


@pytest.mark.parametrize("pp", [1, 2])
@on_ranks(2)
def test_forward_only_refuses_every_backward(pp):
    """Nothing is kept for it: what gradients there were would be wrong."""
    start(pp, pipeline="_only_forward")
    model = smp.DistributedModel(two_layers())

    @smp.step
    def train(x: Tensor, way: str) -> Any:
        loss = model(x).sum()
        if way:
            loss.backward() if way == "torch" else model.backward(loss)
        return loss

    x = vectors(2)["x"]
    for way in ("ours", "torch"):
        with pytest.raises(StepError, match="_only_forward"):
            train(x, way)
    if pp == 1:
        with pytest.raises(StepError, match="_only_forward"):
            model(x).sum().backward()
    assert torch.isfinite(train(x, "").reduce_mean())
