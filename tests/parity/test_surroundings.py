"""What surrounds a step changes nothing: autocast, inference mode, frozen parameters, options, batch sizes."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp
from tests.harness import on_ranks
from tests.parity.compare import assert_close, build, job_batch, owned_parameters, rows_of, sgd
from tests.parity.zoo import WIDTH, ZOO, Block, Case, vectors

PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 3, "auto_partition": False, "default_partition": 0}
REPLICAS = {**PIPELINE, "ddp": True}
ROWS = 6


class Pair:
    """The same model under smp and in plain PyTorch, stepped together and compared after every step."""

    def __init__(self, case: Case, average: bool = True, **options: Any) -> None:
        self.case, self.average = case, average
        self.module, self.plain = build(case), build(case)
        for path, stage in case.stages(smp.pp_size()).items():
            smp.set_partition(self.module.get_submodule(path), stage)
        self.model = smp.DistributedModel(self.module, **options)
        self.optimizer = smp.DistributedOptimizer(sgd(self.model.parameters()))
        self.plain_optimizer = sgd(self.plain.parameters())
        self.count = 0

    def step(
        self,
        rows: int = ROWS,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
        gradient_tolerance: float = 1e-5,
    ) -> None:
        """One training step of both; `around` stands around the step function, `inside` within it."""
        batch = job_batch(self.case, rows * smp.dp_size(), self.count, torch.float32)
        self.count += 1

        @smp.step
        def train(batch: dict[str, Any]) -> Tensor:
            with inside():
                loss = self.case.loss_of(self.model(**batch))
            self.model.backward(loss)
            return loss

        self.optimizer.zero_grad()
        self.plain_optimizer.zero_grad()
        with around():
            got = train(rows_of(batch, rows * smp.dp_rank(), rows * (smp.dp_rank() + 1))).reduce_mean().detach()
            want = self._plain_step(batch, rows, inside)
        assert_close(got.float(), want.float(), 1e-5, f"loss of step {self.count}")
        plain = dict(self.plain.named_parameters())
        for name, parameter in owned_parameters(self.model):
            expected = plain[name].grad
            assert (parameter.grad is None) == (expected is None), name
            if parameter.grad is not None and expected is not None:
                assert_close(parameter.grad, expected, gradient_tolerance, f"gradient of {name} in step {self.count}")
        self.optimizer.step()
        self.plain_optimizer.step()

    def _plain_step(
        self, batch: dict[str, Any], rows: int, inside: Callable[[], AbstractContextManager[Any]]
    ) -> Tensor:
        size = rows // 3
        own = torch.zeros(())
        for part in range(3 * smp.dp_size()):
            with inside():
                loss = self.case.loss_of(self.plain(**rows_of(batch, part * size, (part + 1) * size)))
            (loss / smp.dp_size() / (3 if self.average else 1)).backward()
            if part // 3 == smp.dp_rank():
                own = own + loss.detach() / 3
        return own


def bf16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", ["skip", "tied", "encoder_decoder"])
@pytest.mark.parametrize("where", ["around", "inside"])
@on_ranks(2, config=PIPELINE)
def test_autocast_reaches_every_stage(shape, where):
    """A thread or stage without it would compute in another precision: the loss would be several tolerances apart.

    Gradients of one bf16 value are added up in bf16, in an order that depends on the cut: each sum may round by 2^-8.
    """
    pair = Pair(ZOO[shape])
    pair.step(**{where: bf16, "gradient_tolerance": 2 * 2**-8})


@on_ranks(2, config=PIPELINE)
def test_evaluation_in_inference_mode():
    """Tensors of inference mode cannot be used later in training; nothing of them may be kept."""
    pair = Pair(ZOO["tied"])
    pair.step()

    @smp.step
    def evaluate(batch: dict[str, Any]) -> Tensor:
        return pair.model(**batch)

    batch = job_batch(pair.case, ROWS, 99, torch.float32)
    pair.model.eval()
    with torch.inference_mode():
        got = evaluate(batch).reduce_mean()
        want = torch.stack([pair.plain(**rows_of(batch, 2 * k, 2 * k + 2)) for k in range(3)]).mean()
    assert_close(got.clone(), want.clone(), 1e-5, "loss")
    pair.model.train()
    pair.step()


@on_ranks(4, config=REPLICAS)
def test_parameters_may_be_frozen_and_thawed_between_steps():
    """What requires a gradient is asked anew in each step, by every stage alike."""
    pair = Pair(ZOO["skip"])
    for frozen in ([], ["a"], ["a", "c"], ["d"], []):
        for name, parameter in [*pair.module.named_parameters(), *pair.plain.named_parameters()]:
            parameter.requires_grad_(name.split(".")[0] not in frozen)
        pair.step()


@pytest.mark.parametrize(
    "options",
    [
        {"overlapping_allreduce": False},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.0001},
        {"average_grads_across_microbatches": False},
    ],
    ids=lambda options: next(iter(options)),
)
@on_ranks(4, config=REPLICAS)
def test_options_of_the_reduction_change_no_gradient(options):
    """They say how gradients travel, not what they are; only the sum over microbatches is three times the mean."""
    pair = Pair(ZOO["listed"], average=options.get("average_grads_across_microbatches", True), **options)
    for _ in range(3):
        pair.step()


@on_ranks(2, config=PIPELINE)
def test_batches_of_changing_size():
    """The last batch of an epoch is smaller."""
    pair = Pair(ZOO["encoder_decoder"])
    for rows in (6, 3, 9, 6):
        pair.step(rows)


class Mixed(nn.Module):
    """Double precision in the middle: every move has its own type."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Block(), Block().double(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.b(self.a(x).double())
        hidden = hidden + y.double().sign()
        return F.mse_loss(self.c(hidden.float()).to(torch.float64), y.double()).float()


@on_ranks(2, config=PIPELINE)
def test_types_may_change_between_stages():
    """A receive that assumes one type for all would cut or misread what arrives."""
    pair = Pair(Case(Mixed, vectors, [("a", 0), ("b", 0.9), ("c", 0)]))
    for _ in range(2):
        pair.step()
