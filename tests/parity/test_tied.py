"""Tied weights that live on several stages: trained as the one weight that they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F

import smp
from smp import runtime
from tests.harness import on_ranks
from tests.logs import log_lines
from tests.parity.compare import (
    TOLERANCE,
    Optimizer,
    Setup,
    adam,
    assert_close,
    assert_same,
    batch_parts,
    build,
    check,
    job_batch,
    plain_run,
    rows_of,
    sgd,
    smp_run,
)
from tests.parity.zoo import VOCABULARY, WIDTH, ZOO, Block, Case, Tied, tokens

DOUBLE = torch.float64
TWO_STAGES = {"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0, "ddp": True}
APART = Case(Tied, tokens, [*((path, part) for path, part in ZOO["tied"].places if path != "head"), ("head", 0.9)])


class Three(nn.Module):
    """An encoder's table, a decoder's table and a head are one weight; glue code reads it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = Block(), Block()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.target.weight = self.head.weight = self.source.weight

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.encoder(self.source(ids)).mean(1, keepdim=True)
        hidden = self.decoder(self.target(ids) + memory)
        logits = self.head(hidden) + F.linear(hidden * 2, self.source.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten()) + 1e-3 * self.head.weight.square().sum()


THREE = Case(Three, tokens, [("source", 0), ("encoder", 0), ("target", 0.4), ("decoder", 0.6), ("head", 0.9)])


class Hidden(nn.Module):
    """A module that uses the table without having it as an attribute of its own."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.used = [table]

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.used[0])


class Registered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.block = nn.Embedding(VOCABULARY, WIDTH), Block()
        self.head = Hidden(self.table.weight)
        smp.register_parameter(self.head, self.table.weight)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return super().to(*args, **kwargs)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.block(self.table(ids))).flatten(0, 1), ids.flatten())


REGISTERED = Case(Registered, tokens, [("table", 0), ("block", 0.5), ("head", 0.9)])


def tied(model: Any) -> list[tuple[str, nn.Parameter, tuple[int, ...]]]:
    found: list[tuple[str, nn.Parameter, tuple[int, ...]]] = model.engine.stages.tied_parameters()
    return found


def assert_equal_copies(model: Any, expected: int | None = 1) -> None:
    """Weight, gradient and optimizer state of tied parameters are the same bits on all ranks that hold them."""
    assert len(tied(model)) == expected or (expected is None and tied(model))
    optimizer = runtime.get().optimizer
    for name, parameter, holders in tied(model):
        mine = None
        if smp.pp_rank() in holders:
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            mine = [smp.tp_rank(), parameter.detach(), parameter.grad, *state.values()]
        held = [part for part in smp.allgather(mine, smp.WORLD) if part is not None]
        assert len(held) == len(holders) * smp.dp_size()
        for part in held[1:]:
            first = next(other for other in held if other[0] == part[0])
            for a, b in zip(first, part, strict=True):
                assert torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b, name


def check_apart(
    setup: Setup,
    case: Case = APART,
    optimizer: Optimizer = adam,
    prepare: Callable[[nn.Module], None] = lambda module: None,
    expected: int | None = 1,
) -> None:
    """Both runs, their comparison, and that the copies are equal."""
    runtime.reset()
    try:
        got, model = smp_run(case, setup, optimizer, prepare)
        assert_equal_copies(model, expected)
        want = plain_run(case, setup, optimizer, *batch_parts(setup))
        assert_same(got, want, model, TOLERANCE[setup.dtype], f"{setup}:", case.without_gradient)
    finally:
        runtime.reset()


@on_ranks(2)
def test_two_stages_hold_and_train_one_weight():
    """Copies that drift, or a gradient that only one stage's use has given: a2-2."""
    check_apart(Setup(pp=2, microbatches=5, steps=3, dtype=DOUBLE))
    check_apart(Setup(pp=2, microbatches=2, passes=2), optimizer=sgd)
    for options in ({"overlapping_allreduce": False}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}):
        check_apart(Setup(pp=2, microbatches=2, passes=2, dtype=DOUBLE, options=options))
    check_apart(Setup(pp=2, microbatches=2, auto=True, dtype=DOUBLE, config={"replicate_tied": True}))


@on_ranks(2)
def test_a_use_that_the_tree_does_not_show_and_one_in_glue_code():
    """register_parameter, and F.linear with the weight of another module."""
    check_apart(Setup(pp=2, microbatches=2, dtype=DOUBLE), REGISTERED)
    check_apart(Setup(pp=2, microbatches=2, dtype=DOUBLE), THREE)


@on_ranks(3)
def test_three_stages_hold_one_weight():
    """A sum over three; what is there already must not count three times."""
    check_apart(Setup(pp=3, microbatches=2, dtype=DOUBLE), THREE)
    check_apart(Setup(pp=3, microbatches=1, passes=2, dtype=DOUBLE), THREE)


@on_ranks(4)
def test_replicas_and_four_stages():
    """The sum over stages and the mean over replicas in one reduction."""
    check_apart(Setup(pp=2, microbatches=2, passes=2, dtype=DOUBLE))
    check_apart(Setup(pp=2, microbatches=1, dtype=DOUBLE, options={"overlapping_allreduce": False}), THREE)
    check_apart(Setup(pp=4, microbatches=5), THREE, sgd)


@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@on_ranks(4)
def test_split_table_and_head_on_two_stages(prescaled):
    """Each tensor-parallel rank's part is summed over the stages, over ranks with the same part only."""
    setup = Setup(2, 2, microbatches=2, passes=2, dtype=DOUBLE, prescaled=prescaled)
    check_apart(setup, prepare=smp.set_tensor_parallelism)
    check_apart(setup, prepare=lambda module: smp.set_tensor_parallelism(module.blocks))


@on_ranks(2)
def test_kept_together_or_as_a_simulated_step_is_faster():
    """replicate_tied False; and by default whatever the planner finds better."""
    kept = Setup(pp=2, microbatches=2, config={"replicate_tied": False})
    check_apart(kept, optimizer=sgd, expected=0)
    check_apart(kept, REGISTERED, sgd, expected=0)
    runtime.reset()
    check(APART, Setup(pp=2, microbatches=4, auto=True), sgd)


@on_ranks(2)
def test_schedules_that_put_gradients_of_weights_off_or_have_several_chunks():
    """The head's gradient comes late under zero_bubble; with chunks, table and head may be on one stage again."""
    config = {"replicate_tied": True, "pipeline": "zero_bubble"}
    check_apart(Setup(pp=2, microbatches=4, steps=3, dtype=DOUBLE, config=config))
    check_apart(Setup(pp=2, microbatches=4, steps=3, dtype=DOUBLE, auto=True, config={**config, "virtual_stages": 1}))
    chunks = {"replicate_tied": True, "virtual_stages": 2}
    check_apart(Setup(pp=2, microbatches=4, steps=3, dtype=DOUBLE, auto=True, config=chunks))
    check(APART, Setup(pp=2, microbatches=4, steps=3, dtype=DOUBLE, auto=True, config={"pipeline": "auto"}), adam)


# -- passes ------------------------------------------------------------------------------------------------------------


def start(
    case: Case = APART,
    config: dict[str, Any] | None = None,
    seed: int = 0,
    dtype: torch.dtype = DOUBLE,
    **options: Any,
) -> tuple[Any, Any]:
    """Model and optimizer, head and table on two stages."""
    runtime.reset()
    smp.init({**TWO_STAGES, **(config or {})})
    module = build(case, dtype, seed)
    for path, stage in case.stages(smp.pp_size()).items():
        smp.set_partition(module.get_submodule(path), stage)
    model = smp.DistributedModel(module, **options)
    return model, smp.DistributedOptimizer(adam(model.parameters()))


def one_step(model: Any) -> Callable[..., Any]:
    @smp.step
    def train(*args: Any) -> Tensor:
        loss: Tensor = model(*args)
        model.backward(loss)
        return loss

    return train


def stepper(model: Any) -> Callable[[int], Tensor]:
    train = one_step(model)

    def run(number: int) -> Tensor:
        batch = job_batch(APART, 2 * smp.dp_size(), number, DOUBLE)
        loss: Tensor = train(rows_of(batch, 2 * smp.dp_rank(), 2 * smp.dp_rank() + 2)["ids"]).reduce_mean().detach()
        return loss

    return run


def plain_gradient(numbers: list[int]) -> Tensor:
    """The summed gradient of the tied weight after plain backwards over the job's batches of these numbers."""
    module = build(APART, DOUBLE)
    for number in numbers:
        module(**job_batch(APART, 2 * smp.dp_size(), number, DOUBLE)).backward()
    gradient = module.get_parameter("embedding.weight").grad
    assert gradient is not None
    return gradient


def tied_gradient(model: Any) -> Tensor | None:
    return tied(model)[0][1].grad


@on_ranks(2)
def test_gradients_of_earlier_windows_count_once():
    """A step without zero_grad, no_sync, and a window cut short by clipping: nothing is counted twice."""
    model, optimizer = start(backward_passes_per_step=2)
    train = stepper(model)
    for number in range(4):  # two windows without zero_grad
        train(number)
    assert_close(tied_gradient(model), plain_gradient([0, 1, 2, 3]), 1e-9, "two windows")
    with model.no_sync():
        train(4)
        train(5)
    train(6)
    assert_close(tied_gradient(model), plain_gradient([*range(7)]), 1e-9, "after no_sync")
    train(7)  # the first of a window that ends early
    smp.clip_grad_norm_(model.parameters(), 1e9)
    assert_close(tied_gradient(model), plain_gradient([*range(8)]), 1e-9, "a short window")
    assert_equal_copies(model)
    optimizer.zero_grad(set_to_none=False)
    train(0)
    train(1)
    assert_close(tied_gradient(model), plain_gradient([0, 1]), 1e-9, "after zeroing")
    assert_equal_copies(model)
    runtime.reset()


@on_ranks(2)
def test_gradients_summed_over_microbatches():
    """average_grads_across_microbatches=False."""
    model, _ = start(config={"microbatches": 2}, average_grads_across_microbatches=False)
    stepper(model)(0)
    # each microbatch has one of the two rows, whose mean the plain loss is
    assert_close(tied_gradient(model), 2 * plain_gradient([0]), 1e-9, "sum")
    runtime.reset()


class Switched(Tied):
    """Uses the weight at its begin or end only, or not at all."""

    def forward(self, ids: Tensor, uses: str = "both") -> Tensor:  # type: ignore[override]
        hidden = self.embedding(ids) if uses in ("both", "begin") else F.one_hot(ids, WIDTH).to(self.position.dtype)
        for block in self.blocks:
            hidden = block(hidden + self.position * 1.0)
        loss = hidden.square().mean()
        return loss + self.head(hidden).square().mean() if uses in ("both", "end") else loss


@on_ranks(2)
def test_a_holder_without_a_gradient():
    """A use on one stage alone reaches both; a weight that nobody used has no gradient, which is not one of zero."""
    case = Case(Switched, tokens, APART.places)
    for options in ({}, {"gradient_as_bucket_view": True}):
        model, optimizer = start(case, **options)

        module = build(case, DOUBLE)
        plain = adam(module.parameters())
        ids = torch.arange(10).view(2, 5) % WIDTH
        for uses in ("none", "begin", "end", "none", "both"):
            optimizer.zero_grad()
            plain.zero_grad()
            one_step(model)(ids, uses)
            module(ids, uses).backward()
            got, want = tied_gradient(model), module.get_parameter("embedding.weight").grad
            assert (got is None) == (want is None), uses
            if got is not None:
                assert_close(got, want, 1e-9, uses)
            optimizer.step()
            plain.step()
        assert_close(tied(model)[0][1].detach(), module.embedding.weight.detach(), 1e-9, "weight")
        assert_equal_copies(model)
    runtime.reset()


@on_ranks(4)
def test_a_replica_that_runs_out_of_batches():
    """join: its stages still take part in the sums over replicas and stages."""
    model, optimizer = start()
    train = stepper(model)
    module = build(APART, DOUBLE)
    plain = adam(module.parameters())
    counts = (1, 3)
    with model.join():
        for number in range(counts[smp.rdp_rank()]):
            optimizer.zero_grad()
            train(number)
            optimizer.step()
    for number in range(3):
        plain.zero_grad()
        for replica in range(2):
            if number < counts[replica]:
                part = rows_of(job_batch(APART, 4, number, DOUBLE), 2 * replica, 2 * replica + 2)
                (module(**part) / 2).backward()
        plain.step()
    assert_close(tied(model)[0][1].detach(), module.embedding.weight.detach(), 1e-9, "weight")
    held = smp.allgather(tied(model)[0][1].detach(), smp.WORLD)
    assert all(torch.equal(weight, held[0]) for weight in held)
    runtime.reset()


@on_ranks(2)
def test_half_precision_frozen_and_thawed():
    """Gradients in bfloat16, summed in float32, are the same bits; a weight may be frozen for a while."""
    for options in ({}, {"gradient_as_bucket_view": True}):
        model, optimizer = start(THREE, dtype=torch.bfloat16, **options)
        for trains in (True, False, True):
            model.module.source.weight.requires_grad_(trains)
            optimizer.zero_grad()
            one_step(model)(torch.arange(10).view(2, 5))
            assert (tied_gradient(model) is not None) == trains
            optimizer.step()
            assert_equal_copies(model)
    runtime.reset()


@on_ranks(4)
def test_a_communication_hook_leaves_tied_weights_alone():
    """The hook's state is the data-parallel group, which is not all that hold the weight; others go through it."""
    seen: list[str] = []

    def hook(group: Any, bucket: Any) -> Any:
        seen.extend(str(tuple(p.shape)) for p in bucket.parameters())
        return allreduce_hook(group, bucket)

    with log_lines() as lines:
        model, _ = start()
        model.register_comm_hook(smp.get_dp_process_group(), hook)
        stepper(model)(0)
    assert_close(tied_gradient(model), plain_gradient([0]), 1e-9, "gradient")
    assert seen and str((VOCABULARY, WIDTH)) not in seen
    assert (smp.rank() == 0) == any("does not go through the hook" in line for line in lines)
    runtime.reset()
