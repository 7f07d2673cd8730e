"""Parts of split parameters outside their layers: refused, for each rank would compute with its own part only."""

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.harness import on_ranks
from tests.parity.compare import shard_of

SPLIT = {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}


def model_with_penalty(keep_whole: bool) -> tuple[nn.Module, nn.Module]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)))

    torch.manual_seed(0)
    module = Net().double()
    smp.set_tensor_parallelism(module)
    if keep_whole:
        smp.register_parameter(module, module.second.weight)
    reference = Net().double()
    reference.load_state_dict(module.state_dict())
    return module, reference


@pytest.mark.parametrize("stages", [1, 2])
@on_ranks(
    lambda given: 2 * given["stages"], config=lambda given: {**SPLIT, "pipeline_parallel_degree": given["stages"]}
)
def test_a_penalty_on_a_part_is_refused(stages: int) -> None:
    """A sum over the weights at hand would count a part of them, with no sign that anything is wrong."""
    module, _ = model_with_penalty(keep_whole=False)
    model = smp.DistributedModel(module)
    x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    @smp.step
    def penalised(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        loss = loss + module.second.weight.pow(2).sum()
        model.backward(loss)
        return loss

    with pytest.raises(
        smp.StepError, match=r"test_watch.py:\d+ computes with a parameter of shape \(4, 8\).*register_"
    ):
        penalised(x)
    with pytest.raises(smp.StepError, match="computes with a parameter"):
        penalised(x)  # not only once

    @smp.step
    def stacked(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean() + torch.stack([module.first.bias, module.first.bias]).sum()
        model.backward(loss)
        return loss

    with pytest.raises(smp.StepError, match="computes with a parameter"):
        stacked(x)

    @smp.step
    def observed(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        with torch.no_grad():
            module.second.weight.pow(2).sum()
        model.backward(loss)
        return loss

    observed(x)


@on_ranks(2, config=SPLIT)
def test_a_registered_parameter_stays_whole_and_may_be_penalised() -> None:
    """The remedy that the error names has to give the number of one process."""
    module, reference = model_with_penalty(keep_whole=True)
    model = smp.DistributedModel(module)
    x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    @smp.step
    def penalised(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean() + module.second.weight.pow(2).sum()
        model.backward(loss)
        return loss

    loss = penalised(x).reduce_mean()
    expected = reference(x).pow(2).mean() + reference.second.weight.pow(2).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(module.second.weight.grad, reference.second.weight.grad, rtol=1e-9, atol=1e-12)


@on_ranks(2, config=SPLIT)
def test_the_watch_changes_no_gradient() -> None:
    """It looks on in the first step: that one must train as the later ones do."""
    module, reference = model_with_penalty(keep_whole=False)
    model = smp.DistributedModel(module)
    x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    @smp.step
    def train(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    reference(x).pow(2).mean().backward()
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for _ in range(2):
        train(x)
        for name, parameter in model.module.named_parameters():
            whole = wanted[name]
            assert whole is not None
            torch.testing.assert_close(parameter.grad, shard_of(parameter, whole), rtol=1e-9, atol=1e-12)
            parameter.grad = None
