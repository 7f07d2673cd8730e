"""What all tp_ranks hold stays one and the same, and random masks differ exactly where data differ (a1-1, a1-2)."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import smp
from smp import runtime
from smp.tp.shard import spec_of
from tests.harness import on_ranks
from tests.tp.twins import config

SIZE = 8


class Net(nn.Module):
    """Two split linears, and a sub-network between them that nobody marked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)
        self.whole = nn.Sequential(nn.Linear(2 * SIZE, 2 * SIZE), nn.BatchNorm1d(2 * SIZE), nn.Tanh())
        smp.set_tensor_parallelism(self.first)
        smp.set_tensor_parallelism(self.last)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.whole(self.first(x).tanh()))


def batch(step: int, prescaled: bool) -> Tensor:
    source = smp.rdp_rank() if prescaled else smp.dp_rank()
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(100 * step + source))


@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@on_ranks(4, config=lambda a: config(2, a["prescaled"]))
def test_parts_left_whole_stay_equal_on_all_tp_ranks(prescaled, tmp_path: Path):
    """Although every rank's gradient is off by a little of its own: else a checkpoint, which keeps one copy, is another
    model than the one that was trained."""
    torch.manual_seed(3)
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    rank = runtime.get().rank
    whole = [param for param in model.module.parameters() if spec_of(param) is None]
    assert len(whole) == 5  # four of the sub-network, and the bias of `last`
    for param in whole:
        param.register_hook(lambda grad: grad + 1e-6 * (rank + 1))

    @smp.step
    def train(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss

    for step in range(20):
        train(batch(step, prescaled))
        optimizer.step()
        optimizer.zero_grad()
    held = [param.detach() for param in whole]
    if prescaled:  # with batches of their own, running statistics are the first rank's again at the next pass
        held += list(model.module.buffers())
    for others in smp.allgather(held, smp.DP_GROUP if not prescaled else smp.TP_GROUP):
        assert all(torch.equal(a, b) for a, b in zip(held, others))

    @smp.step
    def evaluate(x: Tensor) -> Tensor:
        return model(x).pow(2).mean()

    with torch.no_grad():
        model.eval()
        before = evaluate(batch(99, prescaled)).reduce_mean()
        path = smp.allgather(str(tmp_path), smp.WORLD)[0] + "/model"
        smp.save(model.local_state_dict(), path, partial=True)
        state = copy.deepcopy(model.local_state_dict())
        for param in model.parameters():
            param.mul_(2)
        smp.barrier()
        model.load_state_dict(smp.load(path, partial=True))
        assert all(
            torch.equal(value, state[name])
            for name, value in model.local_state_dict().items()
            if isinstance(value, Tensor) and "running" not in name and "num_batches" not in name
        )
        after = evaluate(batch(99, prescaled)).reduce_mean()
    if smp.rdp_rank() == 0:  # whose buffers the file holds
        assert torch.equal(before, after)


class Masked(nn.Module):
    """Dropout on what every rank holds whole, once plain and once under a checkpoint; keeps the masks it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, 32), nn.Linear(32, SIZE)
        self.masks: list[Tensor] = []
        smp.set_tensor_parallelism(self.first)
        smp.set_tensor_parallelism(self.last)

    def drop(self, x: Tensor) -> Tensor:
        mask = nn.functional.dropout(torch.ones_like(x), 0.5)
        self.masks.append(mask.detach())
        return x * mask

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.drop, self.drop(self.first(x)), use_reentrant=False))


@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@on_ranks(4, config=lambda a: config(2, a["prescaled"]))
def test_masks_are_equal_on_a_shared_batch_and_differ_where_batches_do(prescaled):
    """Also when tp_rank 0 alone draws numbers between steps, as a data loader does; a recomputed mask is the first."""
    model = smp.DistributedModel(Masked())

    @smp.step
    def train(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss

    for step in range(3):
        if smp.tp_rank() == 0:
            torch.rand(7)
        model.module.masks.clear()
        train(batch(step, prescaled))
        plain, first, recomputed = model.module.masks
        assert torch.equal(first, recomputed)
        assert not torch.equal(plain, first)
        by_rank = dict(zip(smp.get_dp_group(), smp.allgather(plain, smp.DP_GROUP)))
        mine = runtime.get().rank
        for rank, mask in by_rank.items():
            shares_batch = rank in smp.get_tp_group() if prescaled else rank == mine
            assert torch.equal(mask, plain) == shares_batch, f"ranks {mine} and {rank}, step {step}"


@on_ranks(2, config=config(2, False))
def test_uneven_inputs_are_refused():
    """A tp_rank without a batch would leave the others waiting inside a layer."""
    model = smp.DistributedModel(nn.Linear(SIZE, SIZE))
    with pytest.raises(smp.UsageError, match="tensor_parallel_degree 2"):
        with model.join():
            pass
    with model.join(enable=False):
        pass
