"""Dropout of a distributed language model: its masks depend neither on stages nor on recomputation, come again when a
run is resumed, and differ exactly where data differ (a1-1). Recorded masks are replayed in test_transformer_dropout.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import smp
from smp import runtime
from smp.nn import DistributedTransformerLMHead
from tests.harness import on_ranks
from tests.parity.compare import assert_close
from tests.stateful import shared_directory
from tests.tp.lm_twin import GPT2
from tests.tp.twins import config

OPTIONS = {**GPT2, "num_layers": 3, "tie_word_embeddings": False}
DROPOUT = {"attention_dropout_prob": 0.3, "hidden_dropout_prob": 0.4}
MODES = pytest.mark.parametrize(
    ("optimize", "prescaled"), [("speed", False), ("speed", True), ("memory", False), ("memory", True)]
)


class Run:
    """A model that trains, made anew."""

    def __init__(self, pp: int, optimize: str, prescaled: bool, checkpointed: bool = False, seed: int = 3) -> None:
        runtime.reset()
        stages = {"pipeline_parallel_degree": pp, "microbatches": 2}
        smp.init(config(2, prescaled, optimize=optimize, **stages))
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float64)
        module = DistributedTransformerLMHead(**{**OPTIONS, **DROPOUT})
        torch.set_default_dtype(torch.float32)
        if checkpointed:
            smp.set_activation_checkpointing(module.transformer.seq_layers)
            smp.set_activation_checkpointing(module.embedding_dropout)
        self.model = smp.DistributedModel(module)
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), lr=0.01))
        self.prescaled = prescaled

        @smp.step
        def train(ids: Tensor) -> Tensor:
            loss = self.model((ids, None, None, None, ids))
            self.model.backward(loss)
            return loss

        self.train = train

    def step(self, number: int) -> Tensor:
        """One step; the losses of its microbatches."""
        part = smp.rdp_rank() if self.prescaled else smp.dp_rank()
        generator = torch.Generator().manual_seed(10 * number + part)
        ids = torch.randint(OPTIONS["vocab_size"], (4, 4), generator=generator)
        self.optimizer.zero_grad()
        losses = self.train(ids).stack().detach()
        self.optimizer.step()
        return losses

    def gradients(self) -> dict[str, Tensor]:
        """Of this rank's parameters."""
        return {name: p.grad for name, p in self.model.module.named_parameters() if self.model.owned(name)}


def train_noisy(path: Path, pp: int, optimize: str, prescaled: bool, checkpointed: bool) -> None:
    """Two steps; the losses and this rank's last gradients go to `path`."""
    run = Run(pp, optimize, prescaled, checkpointed)
    torch.manual_seed(7 + smp.rank())  # ranks whose generators have parted
    if smp.rank() == 0:
        torch.manual_seed(7)
    losses = [run.step(number) for number in range(2)]
    torch.save({"losses": losses, "gradients": run.gradients(), "part": smp.tp_rank()}, f"{path}.{smp.rank()}")
    runtime.reset()


def noisy_run(directory: Path, pp: int, optimize: str, prescaled: bool, checkpointed: bool) -> dict[Any, Tensor]:
    """Losses by part and step, gradients by part and name."""
    path = directory / f"{pp}-{checkpointed}"
    on_ranks(2 * pp)(train_noisy)(path=path, pp=pp, optimize=optimize, prescaled=prescaled, checkpointed=checkpointed)
    found: dict[Any, Tensor] = {}
    for rank in range(2 * pp):
        saved = torch.load(f"{path}.{rank}")
        for step, losses in enumerate(saved["losses"]):
            assert torch.equal(found.setdefault((saved["part"], step), losses), losses)
        found |= {(saved["part"], name): gradient for name, gradient in saved["gradients"].items()}
    return found


@MODES
def test_masks_depend_neither_on_stages_nor_on_recomputation(tmp_path, optimize, prescaled):
    """One stage or two, kept activations or recomputed ones: the same losses and gradients."""
    want = noisy_run(tmp_path, 1, optimize, prescaled, False)
    assert len({float(loss) for key, losses in want.items() if isinstance(key[1], int) for loss in losses}) >= 4
    for pp, checkpointed in [(1, True), (2, False), (2, True)]:
        got = noisy_run(tmp_path, pp, optimize, prescaled, checkpointed)
        assert got.keys() == want.keys()
        for key, value in got.items():
            assert_close(value, want[key], 1e-9, f"{key} on {pp} stages, checkpointed {checkpointed}")


@pytest.mark.parametrize("pp", [1, 2])
@MODES
@on_ranks(lambda a: 2 * a["pp"])
def test_a_resumed_run_draws_what_the_unbroken_one_draws(pp, optimize, prescaled):
    """From partial files, one of which holds the state of the script's own generator."""
    run = Run(pp, optimize, prescaled)
    with shared_directory() as directory:
        for number in range(2):
            run.step(number)
        state = {"model": run.model.local_state_dict(), "random": torch.get_rng_state()}
        smp.save(state, directory / "model", partial=True)
        smp.save(run.optimizer.local_state_dict(), directory / "optimizer", partial=True)
        want = [run.step(number) for number in (2, 3)]

        run = Run(pp, optimize, prescaled, seed=5)
        state = smp.load(directory / "model", partial=True)
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(smp.load(directory / "optimizer", partial=True))
        torch.set_rng_state(state["random"])
        got = [run.step(number) for number in (2, 3)]
        assert torch.equal(torch.stack(got), torch.stack(want))
    runtime.reset()


@MODES
@on_ranks(4)
def test_masks_of_replicas_differ_and_those_of_parts_follow_the_data(optimize, prescaled):
    """Inside a tensor-parallel group equal where every rank holds the same, although each rank's generator was seeded
    otherwise; never equal in two replicas, nor in two steps."""
    run = Run(1, optimize, prescaled)
    torch.manual_seed(100 + smp.rank())
    masks: list[Tensor] = []
    run.model.module.embedding_dropout.register_forward_hook(lambda module, args, out: masks.append(out == 0))
    for number in range(2):
        masks.clear()
        run.step(number)
        assert len(masks) == 2 and not torch.equal(*masks)
        answers = smp.allgather((smp.rdp_rank(), smp.tp_rank(), masks[0]), smp.WORLD)
        for replica, part, mask in answers:
            for other, its_part, its_mask in answers:
                if (replica, part) != (other, its_part):
                    assert torch.equal(mask, its_mask) == (replica == other and optimize == "speed")
    runtime.reset()
