"""Full checkpoints: one file that plain torch reads, and any degrees resume from; and files of other programs."""

import torch

import smp
from tests.checkpoint.small import Job, assert_close, assert_equal, grid
from tests.harness import on_ranks
from tests.stateful import shared_directory


@on_ranks(4, config=grid(pp=2, tp=2), timeout=300)
def test_a_full_checkpoint_resumes_on_any_degrees_and_in_plain_torch():
    """Weights, optimizer state and user content; resumed before the model is partitioned and after."""
    with shared_directory() as path:
        job = Job(grid(pp=2, tp=2))
        job.steps(0, 1)
        state = job.model.state_dict()
        smp.save_checkpoint(path, "2", partial=False, model=job.model, optimizer=job.optimizer, user_content={"at": 2})
        expected = job.steps(2, 3)
        plain = torch.load(path / "2", weights_only=True)
        assert plain.keys() == state.keys()
        assert all(torch.equal(value, state[name]) for name, value in plain.items())
        for pp, tp, partitioned in [(2, 2, True), (1, 2, False), (4, 1, False), (1, 4, True)]:
            job = Job(grid(pp=pp, tp=tp))
            if partitioned:
                job.step(0)
            assert smp.resume_from_checkpoint(path, partial=False) == {"at": 2}
            (assert_equal if (pp, tp) == (2, 2) else assert_close)(job.steps(2, 3), expected)
