"""Parts of split parameters outside their layers: refused, for each rank would compute with its own part only."""

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.harness import on_ranks

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


@on_ranks(4, config={**SPLIT, "pipeline_parallel_degree": 2})
def test_a_penalty_on_a_part_is_refused_in_a_pipeline() -> None:
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
