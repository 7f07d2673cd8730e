"""Random masks do not depend on the number of stages: the reference is the same script under smp on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp
from tests.harness import on_ranks
from tests.parity.compare import assert_close
from tests.parity.zoo import VOCABULARY, WIDTH, Block


class Noisy(nn.Module):
    """Dropout in modules, in functions of glue code, and noise drawn in glue code."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Block() for _ in range(3)])
        self.drops = nn.ModuleList([nn.Dropout(0.3) for _ in range(3)])
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = F.dropout(self.embedding(ids), 0.2, self.training)
        for block, drop in zip(self.blocks, self.drops):
            hidden = drop(block(hidden))
        hidden = self.inner(hidden) + 0.1 * torch.randn(ids.shape[1], WIDTH)
        hidden = hidden + 0.1 * torch.randn_like(hidden)
        return F.cross_entropy(F.linear(hidden, self.embedding.weight).flatten(0, 1), ids.flatten())


PLACES = {"embedding": 0, "blocks.0": 0.3, "blocks.1": 0.6, "blocks.2": 0.9, "inner": 0.5}


def train_noisy(path: Path, auto: bool) -> None:
    """Three steps; this rank's state and the losses go to `path`."""
    torch.manual_seed(3)
    module = Noisy()
    if not auto:
        for name, part in PLACES.items():
            smp.set_partition(module.get_submodule(name), int(part * smp.pp_size()))
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(7)

    @smp.step
    def train(ids: Tensor) -> Tensor:
        loss = model(ids)
        model.backward(loss)
        return loss

    losses = []
    for n in range(3):
        ids = torch.randint(0, VOCABULARY, (6, 5), generator=torch.Generator().manual_seed(n))
        optimizer.zero_grad()
        losses.append(train(ids).stack().detach())
        optimizer.step()
    gradients = {name: p.grad for name, p in model.module.named_parameters() if model.owned(name)}
    torch.save({"losses": losses, "gradients": gradients}, f"{path}.{smp.rank()}")


def noisy_run(directory: Path, stages: int, auto: bool) -> dict[str, Any]:
    path = directory / f"{stages}-{auto}"
    config: dict[str, Any] = {"pipeline_parallel_degree": stages, "microbatches": 3, "auto_partition": auto}
    if not auto:
        config["default_partition"] = 0
    on_ranks(stages, config=config)(train_noisy)(path=path, auto=auto)
    parts = [torch.load(f"{path}.{rank}") for rank in range(stages)]
    gradients = {name: gradient for part in parts for name, gradient in part["gradients"].items()}
    for part in parts:
        assert all(torch.equal(a, b) for a, b in zip(part["losses"], parts[0]["losses"]))
    return {"losses": parts[0]["losses"], "gradients": gradients}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return noisy_run(tmp_path_factory.mktemp("noisy"), 1, False)


@pytest.mark.parametrize("auto", [False, True], ids=["placed", "auto"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_masks_do_not_depend_on_the_number_of_stages(tmp_path, one_process, stages, auto):
    """A run that is moved to more stages continues the same experiment."""
    got = noisy_run(tmp_path, stages, auto)
    for n, (a, b) in enumerate(zip(got["losses"], one_process["losses"])):
        assert_close(a, b, 1e-5, f"losses of step {n}")
    assert got["gradients"].keys() == one_process["gradients"].keys()
    for name, gradient in got["gradients"].items():
        assert_close(gradient, one_process["gradients"][name], 1e-5, f"gradient of {name}")


def test_masks_differ_between_steps_and_microbatches(one_process):
    """Equal masks everywhere would also pass the test above."""
    losses = torch.stack(one_process["losses"])
    assert losses.unique().numel() == losses.numel()
