"""`smp.save` and `smp.load` over ranks: names, who writes, and errors that every rank raises alike."""

import os
import pickle

import pytest
import torch

import smp
from smp import runtime
from smp.errors import CheckpointError, UsageError
from tests.harness import on_ranks
from tests.stateful import shared_directory

GRID = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True}
PIPELINE = {"pipeline_parallel_degree": 2, "ddp": True}


def mine():
    return {"w": torch.full((3,), float(smp.rank())), "_smp_is_partial": True}


def names(directory):
    smp.barrier()
    found = sorted(os.listdir(directory))
    smp.barrier()
    return found


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
@on_ranks(4, config=GRID, launcher=lambda arguments: arguments["launcher"])
def test_every_rank_of_the_replica_writes_and_reads_its_part(launcher):
    """The names are a contract with scripts that glob them; each rank must get its own values back."""
    with shared_directory() as directory:
        smp.save(mine(), directory / "m.pt", partial=True)
        assert names(directory) == ["m.pt_0_0", "m.pt_0_1", "m.pt_1_0", "m.pt_1_1"]
        by_hand = torch.load(directory / f"m.pt_{smp.pp_rank()}_{smp.tp_rank()}")
        for loaded in (by_hand, smp.load(directory / "m.pt")):
            assert torch.equal(loaded["w"], mine()["w"])
            assert loaded["_smp_is_partial"] is True


@on_ranks(4, config=PIPELINE)
def test_only_the_first_replica_writes_unless_state_is_sharded():
    """Replicas that write the same file race; sharded state lost on the other replicas could not be resumed."""
    with shared_directory() as directory:
        smp.save(mine(), f"{directory}/m")
        assert names(directory) == ["m_0_0", "m_1_0"]
        assert float(smp.load(f"{directory}/m")["w"][0]) == smp.get_rdp_group()[0]
        smp.save(mine(), f"{directory}/v", v3=True)
        assert names(directory)[2:] == ["v_0_0_0", "v_0_0_1", "v_1_0_0", "v_1_0_1"]
        assert float(smp.load(f"{directory}/v")["w"][0]) == smp.rank()


@on_ranks(4, config=PIPELINE)
def test_saving_works_under_the_guards_of_the_contract():
    """`rdp_rank() == 0`, and without tensor parallelism `dp_rank() == 0`, may stand around a partial save."""
    with shared_directory() as directory:
        if smp.rdp_rank() == 0:
            smp.save(mine(), directory / "a")
        if smp.dp_rank() == 0:
            smp.save(mine(), directory / "b")
        if smp.rank() == 3:
            smp.save([smp.rank()], directory / "whole", partial=False)
        assert names(directory) == ["a_0_0", "a_1_0", "b_0_0", "b_1_0", "whole"]
        assert smp.load(directory / "whole", partial=False) == [3]


@on_ranks(4, config=PIPELINE)
def test_all_ranks_may_save_one_whole_file_at_once():
    """Scripts save small things without a guard; a torn file must not come of it."""
    with shared_directory() as directory:
        smp.save({"epoch": 3}, directory / "f", partial=False)
        assert names(directory) == ["f"]
        assert smp.load(directory / "f", partial=False) == {"epoch": 3}


@on_ranks(4, config=GRID)
def test_old_names_are_read_on_request():
    """Checkpoints of the oldest naming, one number per rank."""
    with shared_directory() as directory:
        torch.save(mine(), directory / f"m_{smp.mp_rank()}")
        smp.barrier()
        assert torch.equal(smp.load(directory / "m", back_compat=True)["w"], mine()["w"])


def refused(call, *patterns):
    """Every rank of a replica must raise the same CheckpointError, with these words in it."""
    with pytest.raises(CheckpointError) as caught:
        call()
    texts = smp.allgather(str(caught.value), smp.MP_GROUP)
    assert len(set(texts)) == 1, texts
    for pattern in patterns:
        assert pattern in texts[0], texts[0]


@on_ranks(4, config=GRID)
def test_a_missing_part_is_named_on_every_rank():
    """One rank that stops while the others go on would hang the job."""
    with shared_directory() as directory:
        refused(lambda: smp.load(directory / "no"), f"{directory}/no_0_0 does not exist", "no file whose name begins")
        refused(lambda: smp.load(directory / "sub" / "m"), "the directory", "does not exist")
        smp.save(mine(), directory / "m")
        if smp.rank() == 0:
            os.unlink(directory / "m_1_0")
        smp.barrier()
        refused(lambda: smp.load(directory / "m"), f"rank 2: {directory}/m_1_0 does not exist", "m_0_0, m_0_1, m_1_1")


@on_ranks(4, config=None)
def test_a_file_of_other_degrees_is_refused_on_every_rank():
    """Its tensors would have wrong shapes, or right shapes of the wrong layers."""
    smp.init(GRID)
    with shared_directory() as directory:
        smp.save(mine(), directory / "m")
        torch.save(mine(), directory / f"foreign_{smp.rank()}_0")
        smp.barrier()
        for config in ({"pipeline_parallel_degree": 4}, {"tensor_parallel_degree": 4, "ddp": True}, PIPELINE):
            runtime.reset()
            smp.init(config)
            degrees = f"pipeline degree {smp.pp_size()}, tensor degree {smp.tp_size()}"
            with pytest.raises(
                CheckpointError, match="pipeline degree 2, tensor degree 2.*this job has " + degrees
            ) as caught:
                smp.load(directory / "m")
            assert str(directory / "m_") in str(caught.value)
        refused(lambda: smp.load(directory / "foreign"), "foreign_2_0 belongs to a save on other degrees")


@on_ranks(4, config=GRID)
def test_parts_of_different_saves_are_not_mixed():
    """After a copy that was cut short one rank would train on older weights than the others."""
    with shared_directory() as directory:
        smp.save(mine(), directory / "a")
        smp.save(mine(), directory / "b")
        if smp.rank() == 1:
            os.replace(directory / "b_0_1", directory / "a_0_1")
        smp.barrier()
        refused(lambda: smp.load(directory / "a"), "2 different saves", "[0, 2, 3], by the ranks [1]")


@on_ranks(4, config=GRID)
def test_a_damaged_part_is_named_on_every_rank():
    """A cut-off file on one rank ends the load on all."""
    with shared_directory() as directory:
        smp.save(mine(), directory / "m")
        if smp.rank() == 3:
            os.truncate(directory / "m_1_1", 100)
        smp.barrier()
        refused(lambda: smp.load(directory / "m"), "rank 3: ", "m_1_1")


@on_ranks(4, config=GRID)
def test_a_save_that_fails_on_one_rank_replaces_nothing():
    """Half of a new checkpoint over half of an old one can be loaded by nobody."""
    with shared_directory() as directory:
        smp.save(mine(), directory / "m")
        bad = {**mine(), "w": torch.zeros(3), "f": (lambda: None) if smp.rank() == 2 else None}
        refused(lambda: smp.save(bad, directory / "m"), "rank 2: ")
        assert names(directory) == ["m_0_0", "m_0_1", "m_1_0", "m_1_1"]
        assert torch.equal(smp.load(directory / "m")["w"], mine()["w"])
        refused(lambda: smp.save(mine(), directory / "missing" / "m"), "missing does not exist")


@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_a_partial_call_needs_a_path():
    """A file object cannot become a file per rank."""
    with pytest.raises(UsageError, match="needs a path"):
        smp.save(mine(), open(os.devnull, "wb"))
    with pytest.raises(UsageError, match="needs a path"):
        smp.load(open(os.devnull, "rb"))


@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_classes_are_loaded_only_when_trusted():
    """weights_only=True is the default; a pickle module may come with False alone."""
    with shared_directory() as directory:
        smp.save({"e": pickle.PickleError}, directory / "m")
        refused(lambda: smp.load(directory / "m"), "weights_only=False")
        assert smp.load(directory / "m", weights_only=False, pickle_module=pickle)["e"] is pickle.PickleError
        refused(lambda: smp.load(directory / "m", pickle_module=pickle), "weights_only=False")
