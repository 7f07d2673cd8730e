"""Saving, loading and guards with a model that trains."""

from typing import Any

import pytest
import torch
from torch import Tensor

import smp
from smp import runtime
from tests.harness import on_ranks
from tests.parity.compare import (
    Setup,
    adam,
    assert_close,
    assert_same,
    batch_parts,
    build,
    job_batch,
    owned_parameters,
    plain_run,
    rows_of,
    sgd,
    smp_run,
)
from tests.parity.test_tensor_parallel import split_everything
from tests.parity.zoo import ZOO
from tests.stateful import shared_directory

GRID = Setup(pp=2, tp=2, microbatches=2, steps=2)
SHAPE = ZOO["encoder_decoder"]


def made(reverse: bool = False) -> tuple[Any, Any, Any]:
    """Model, optimizer and a training function, on the grid; `reverse` puts the modules on the other stage."""
    runtime.reset()
    smp.init(GRID.smp_config())
    module = build(SHAPE, torch.float64, seed=int(torch.randint(1 << 30, ())))
    split_everything(module)
    for path, stage in SHAPE.stages(GRID.pp).items():
        smp.set_partition(module.get_submodule(path), GRID.pp - 1 - stage if reverse else stage)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(adam(model.parameters()))

    @smp.step
    def train(batch: dict[str, Any]) -> Tensor:
        loss = model(**batch)
        model.backward(loss)
        return loss

    def one_step(number: int) -> Tensor:
        batch = job_batch(SHAPE, 8, number, torch.float64)
        optimizer.zero_grad()
        loss = train(rows_of(batch, 4 * smp.dp_rank(), 4 * smp.dp_rank() + 4)).reduce_mean().detach()
        optimizer.step()
        return loss

    return model, optimizer, one_step


@pytest.mark.parametrize("partial", [True, False])
@on_ranks(4, config=GRID.smp_config())
def test_a_resumed_run_continues_exactly(partial):
    """Partial or full, loaded before the first step: the next losses are those of the run that was not interrupted."""
    with shared_directory() as directory:
        model, optimizer, one_step = made()
        for number in range(2):
            one_step(number)
        if partial:
            smp.save(model.local_state_dict(), directory / "model", partial=True)
        else:
            state = model.state_dict()
            if smp.rank() == 0:
                smp.save(state, directory / "model", partial=False)
            smp.barrier()
        smp.save(optimizer.local_state_dict(), directory / "optimizer", partial=True)
        want = [one_step(number) for number in (2, 3, 4)]

        model, optimizer, one_step = made()
        model.load_state_dict(smp.load(directory / "model", partial=partial))
        optimizer.load_state_dict(smp.load(directory / "optimizer", partial=True))
        got = [one_step(number) for number in (2, 3, 4)]
        assert torch.equal(torch.stack(got), torch.stack(want))


@on_ranks(4, config=GRID.smp_config())
def test_partial_files_load_into_another_partition():
    """Another placement on the same degrees: what moved comes from the file of the rank that had it."""
    with shared_directory() as directory:
        model, _, one_step = made()
        one_step(0)
        smp.save(model.local_state_dict(), directory / "model", partial=True)
        want = one_step(1)
        model, _, one_step = made(reverse=True)
        model.load_state_dict(smp.load(directory / "model", partial=True))
        got = one_step(1)
        assert_close(got, want, 1e-12, "loss")


@on_ranks(4, config=None)
def test_the_full_state_dict_loads_into_the_plain_module():
    """Under the guard of the contract, by any rank that asked: names, shapes and values of the user's module."""
    got, model = smp_run(SHAPE, GRID, sgd, split_everything)
    want = plain_run(SHAPE, GRID, sgd, *batch_parts(GRID))
    state: dict[str, Any] = model.state_dict() if smp.rdp_rank() == 0 else {}
    plain = build(SHAPE, torch.float32, seed=9)
    plain.load_state_dict(state)
    for name, value in plain.state_dict().items():
        assert_close(value, want.state[name], 1e-5, name)
    assert_same(got, want, model, 1e-5)


@pytest.mark.parametrize("prescaled", [False, True])
@on_ranks(4, config=None)
def test_eight_samples_give_the_same_gradients_however_they_are_dealt(prescaled):
    """Four ranks with two samples each, or two tensor-parallel groups with four: one process with all eight."""
    setup = Setup(tp=2, rows=4 if prescaled else 2, steps=1, prescaled=prescaled)
    got, model = smp_run(ZOO["chain"], setup, sgd, split_everything)
    plain = build(ZOO["chain"], torch.float32)
    plain(**job_batch(ZOO["chain"], 8, 0, torch.float32)).backward()
    whole = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in owned_parameters(model):
        spec = getattr(parameter, "_smp_shard", None)
        expected = whole[name] if spec is None else spec.split(whole[name])
        assert_close(got.gradients[name], expected, 1e-5, f"gradient of {name}")
    model.state_dict()  # on all ranks: nobody has to know about kinds of ranks
