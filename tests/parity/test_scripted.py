"""Parts compiled by torch.jit.script, which scripts for older versions of torch are full of."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness import on_ranks
from tests.parity.compare import Setup, check
from tests.parity.zoo import WIDTH, Case, vectors

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Scripted(nn.Module):
    """A scripted module between plain ones, and a scripted function in the code around them."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.bias_gelu = torch.jit.script(bias_gelu)
            self.inner = torch.jit.script(Inner())
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.inner(self.bias_gelu(self.first(x), self.bias))), y)


@pytest.mark.parametrize("stage", [0, 0.5])
@on_ranks(2)
def test_scripted_functions_in_glue_and_scripted_modules_keep_their_gradient(stage):
    """torch.jit looks below __torch_function__, and a scripted module's class does not show its forward."""
    case = Case(Scripted, vectors, [("first", 0), ("inner", stage), ("last", 0.5)])
    check(case, Setup(pp=2, microbatches=2))
