"""Training and evaluation in any order, lengths that change, buffers that are written."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import smp
from smp import runtime
from tests.harness import on_ranks
from tests.parity.compare import (
    Setup,
    assert_close,
    assert_same,
    build,
    job_batch,
    owned_parameters,
    plain_run,
    rows_of,
    sgd,
    smp_run,
)
from tests.parity.zoo import VOCABULARY, WIDTH, ZOO, Block, Case, Norms, tokens, vectors

TIGHT = 1e-5


class Flagged(nn.Linear):
    """Adds 1 to its output in evaluation, and keeps the flags under which it ran."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:  # a run that only finds out the structure has fake tensors
            self.seen.append(self.training)
        return super().forward(x) + (0.0 if self.training else 1.0)


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norms = Flagged(), Flagged(), Norms()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.norms(self.b(torch.tanh(self.a(x))), y)


MODES = Case(Modes, vectors, [("a", 0), ("b", 0.9), ("norms.a", 0), ("norms.n", 0), ("norms.b", 0.9), ("norms.m", 0.9)])


def plain_orders(order: str, microbatches: int, rows: int) -> tuple[list[Tensor], nn.Module]:
    module = build(MODES, torch.float32)
    optimizer = sgd(module.parameters())
    losses = []
    for n, letter in enumerate(order):
        module.train(letter == "T")
        batch = job_batch(MODES, rows * microbatches, n, torch.float32)
        parts = [rows_of(batch, m * rows, (m + 1) * rows) for m in range(microbatches)]
        mean = torch.zeros(())
        for part in parts:
            with torch.set_grad_enabled(letter == "T"):
                loss = module(**part)
            if letter == "T":
                (loss / microbatches).backward()
            mean += loss.detach() / microbatches
        losses.append(mean)
        if letter == "T":
            optimizer.step()
            optimizer.zero_grad()
    return losses, module


def buffers_of(model: Any) -> Any:
    return model.local_named_buffers() if model.partitioned else model.named_buffers()


@pytest.mark.parametrize("order", ["EET", "TET", "ETET", "TTE"])
@on_ranks(2, config={"pipeline_parallel_degree": 2, "microbatches": 3, "auto_partition": False, "default_partition": 0})
def test_evaluation_and_training_in_any_order(order):
    """What is set up once must not keep the mode of the first call; evaluation must leave nothing behind."""
    module = build(MODES, torch.float32)
    for path, stage in MODES.stages(2).items():
        smp.set_partition(module.get_submodule(path), stage)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()))

    @smp.step
    def train(batch: dict[str, Any]) -> Tensor:
        loss = model(**batch)
        model.backward(loss)
        return loss

    @smp.step
    def evaluate(batch: dict[str, Any]) -> Tensor:
        return model(**batch)

    want, reference = plain_orders(order, 3, 4)
    for n, letter in enumerate(order):
        batch = job_batch(MODES, 12, n, torch.float32)
        model.train(letter == "T")
        assert model.training is (letter == "T")
        if letter == "T":
            optimizer.zero_grad()
            loss = train(batch).reduce_mean()
            optimizer.step()
        else:
            before = {name: buffer.clone() for name, buffer in buffers_of(model)}
            with torch.no_grad():
                loss = evaluate(batch).reduce_mean()
            assert not loss.requires_grad
            if n == 0:
                assert all(p.grad is None for p in model.local_parameters())
            for name, buffer in buffers_of(model):
                assert torch.equal(buffer, before[name]), f"evaluation changed {name}"
        assert_close(loss.detach(), want[n], TIGHT, f"{order}: loss {n}")
    seen = (module.a if smp.pp_rank() == 0 else module.b).seen
    assert seen == [letter == "T" for letter in order for _ in range(3)]
    for name, value in model.local_state_dict().items():
        if isinstance(value, Tensor):
            assert_close(value, reference.state_dict()[name], TIGHT, name)


@pytest.mark.parametrize("with_checkpoint", [False, True])
@on_ranks(2)
def test_batch_norm_sees_the_microbatches_in_order(with_checkpoint):
    """Statistics are those of one process fed the same slices; the number of stages changes no gradient."""

    class Checkpointed(Norms):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            hidden = checkpoint(self.b, torch.relu(self.n(self.a(x))), use_reentrant=False)
            return F.mse_loss(self.m(hidden), y[:, :4])

    case = Case(Checkpointed if with_checkpoint else Norms, vectors, ZOO["norms"].places)
    setup = Setup(pp=2, microbatches=4, rows=3, steps=3)
    got, model = smp_run(case, setup)
    want = plain_run(case, setup)
    assert_same(got, want, model, TIGHT)
    counts = {name: int(v) for name, v in got.state.items() if name.endswith("num_batches_tracked")}
    assert counts == dict.fromkeys(counts, 12)
    assert len(counts) == 1, "each stage has one of the two"


class Lengths:
    """A batch whose microbatches have different lengths: it slices itself."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Tensor:
        assert num_mb == len(self.parts)
        return self.parts[mb]


class Attention(nn.Module):
    """Lengths appear in every shape, in the mask, and in plain Python values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.a, self.b, self.c = nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), Block()

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        length = ids.shape[1]
        mask = torch.full((length, length), float("-inf"), device=ids.device).triu(1)
        hidden = self.a(hidden)
        hidden = self.b(F.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask))
        logits = F.linear(self.c(hidden), self.embedding.weight) / length
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def ids_of(length: int, number: int) -> Tensor:
    return tokens(2, torch.Generator().manual_seed(number), length)["ids"]


# Lengths of the microbatches in each step: changing between steps, then inside one, then fixed again.
LENGTHS = [[16, 16], [9, 9], [24, 24], [9, 9], [16, 9], [24, 9], [9, 9], [9, 9]]


@pytest.mark.parametrize("launcher", ["mpi", pytest.param("torchrun", marks=pytest.mark.slow)])
@on_ranks(
    4,
    config={"pipeline_parallel_degree": 4, "microbatches": 2, "auto_partition": False, "default_partition": 0},
    launcher=lambda arguments: arguments["launcher"],
)
def test_sequence_lengths_may_change_at_any_time(launcher):
    """Shapes remembered from an earlier batch would cut tensors or hang; and no message is spent on exchanging them."""
    case = Case(Attention, tokens, [("embedding", 0), ("a", 0.3), ("b", 0.6), ("c", 0.9)])
    module, reference = build(case, torch.float32), build(case, torch.float32)
    for path, stage in case.stages(4).items():
        smp.set_partition(module.get_submodule(path), stage)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()))
    plain = sgd(reference.parameters())

    @smp.step
    def train(batch: Any) -> Tensor:
        loss = model(batch)
        model.backward(loss)
        return loss

    messages = []
    transport = runtime.get().transport
    send = type(transport)._isend

    def counted(*args: Any) -> Any:
        messages[-1] += 1
        return send(transport, *args)

    transport._isend = counted  # type: ignore[method-assign]
    try:
        for n, lengths in enumerate(LENGTHS):
            parts = [ids_of(length, 10 * n + m) for m, length in enumerate(lengths)]
            messages.append(0)
            optimizer.zero_grad()
            plain.zero_grad()
            equal = len(set(lengths)) == 1
            got = train(torch.cat(parts) if equal else Lengths(parts)).reduce_mean().detach()
            want = torch.zeros(())
            for part in parts:
                loss = reference(part) / 2
                loss.backward()
                want += loss.detach()
            assert_close(got, want, TIGHT, f"loss of lengths {lengths}")
            gradients = dict(reference.named_parameters())
            for name, p in owned_parameters(model):
                assert_close(p.grad, gradients[name].grad, TIGHT, f"gradient of {name}, lengths {lengths}")
            optimizer.step()
            plain.step()
    finally:
        del transport._isend  # type: ignore[method-assign]
    fixed = messages[-1]
    moves = {n: messages[n] for n, lengths in enumerate(LENGTHS) if len(set(lengths)) == 1}
    assert set(moves.values()) == {fixed}, f"messages per step {messages} depend on the lengths"
