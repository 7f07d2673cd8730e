"""A small model with a tied head, a norm, a layer that tensor parallelism cuts and one that it leaves whole."""

from typing import Any

import torch
from torch import Tensor, nn

import smp

NUM_CLASSES = 12
SIZE = 8


class Net(nn.Module):
    """ids [N, S] -> logits [N, S, classes]. `embedding` and `head` share their weight and lie on different stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CLASSES, SIZE)
        self.up = nn.Linear(SIZE, 2 * SIZE)
        self.whole = nn.Linear(2 * SIZE, SIZE)
        self.norm = nn.LayerNorm(SIZE)
        self.head = nn.Linear(SIZE, NUM_CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.whole(torch.tanh(self.up(x)))
        return self.head(self.norm(x))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    module = Net()
    with torch.no_grad():
        module.embedding.weight.mul_(0.5)
    return module


def placed(module: Net) -> Net:
    """The same, told how to be spread over two stages and two tensor-parallel ranks."""
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(module, True)
        smp.set_tensor_parallelism(module.whole, False)
    if smp.pp_size() > 1:
        for part, stage in ((module.embedding, 0), (module.up, 0), (module.whole, 1), (module.norm, 1)):
            smp.set_partition(part, stage)
        smp.set_partition(module.head, 1)
    return module


def batch(step: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """ids and classes [rows, 3] that a model can learn: the class follows from the id."""
    ids = torch.randint(NUM_CLASSES, (rows, 3), generator=torch.Generator().manual_seed(step))
    return ids, (5 * ids + 1) % NUM_CLASSES


def loss_of(logits: Tensor, classes: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), classes.flatten())


@smp.step
def train_step(model: Any, ids: Tensor, classes: Tensor) -> Tensor:
    """One pass over a batch."""
    loss = loss_of(model(ids), classes)
    model.backward(loss)
    return loss
