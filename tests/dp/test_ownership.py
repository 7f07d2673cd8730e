"""Who owns whose optimizer state: pure arithmetic."""

import random

import pytest

from smp.dp.ownership import Cell, Share, assign_owners


def loads(shares: list[Share], owners: list[Cell], rdp_size: int, tp_size: int) -> list[int]:
    """Elements of trained parameters whose state each rank keeps."""
    load = {Cell(rdp, tp): 0 for rdp in range(rdp_size) for tp in range(tp_size)}
    for share, owner in zip(shares, owners):
        if share.is_trained:
            for cell in [Cell(owner.rdp, tp) for tp in range(tp_size)] if share.by_rdp else [owner]:
                load[cell] += share.numel
    return list(load.values())


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("rdp_size", [1, 2, 3, 8])
def test_ranks_differ_by_one_per_cent_or_one_parameter(rdp_size: int, tp_size: int) -> None:
    """A failure means that the fullest rank needs more memory than 1/rdp (1/dp for whole parameters) promises."""
    generator = random.Random(10 * rdp_size + tp_size)
    for _ in range(50):
        shares = [
            Share(
                generator.choice([0, 1, 7, 1000, generator.randrange(5000)]), tp_size > 1 and generator.random() < 0.5
            )
            for _ in range(generator.randrange(40))
        ]
        shares += [Share(10**6, tp_size > 1, is_trained=False)] * generator.randrange(3)
        owners = assign_owners(shares, rdp_size, tp_size)
        assert all(0 <= owner.rdp < rdp_size and 0 <= owner.tp < tp_size for owner in owners)
        load = loads(shares, owners, rdp_size, tp_size)
        largest = max((share.numel for share in shares if share.is_trained), default=0)
        assert max(load) - min(load) <= max(largest, 0.01 * max(load))


def test_a_model_of_many_layers_is_balanced_to_one_of_its_small_matrices() -> None:
    """A failure means that order, not size, decides; its large matrices are four times as large."""
    layer = [768 * 2304, 2304, 768 * 768, 768, 768 * 3072, 3072, 3072 * 768, 768, 768, 768, 768, 768]
    shares = [Share(numel, False) for numel in [1024 * 768, *layer * 24, 768, 768]]
    for rdp_size in (2, 4, 8):
        load = loads(shares, assign_owners(shares, rdp_size, 1), rdp_size, 1)
        assert max(load) - min(load) <= 768 * 768


def test_whole_parameters_fill_up_what_distributed_ones_leave() -> None:
    """One distributed parameter binds a row of ranks; the whole ones go to the others, largest first."""
    shares = [Share(30, False), Share(40, True), Share(10, False), Share(5, False)]
    owners = assign_owners(shares, 2, 2)
    assert owners == [Cell(1, 0), Cell(0, 0), Cell(1, 1), Cell(1, 1)]


def test_frozen_parameters_do_not_count_against_trained_ones() -> None:
    """A failure means that with a frozen base all adapters' states end up on one rank."""
    shares = [Share(1000, False, is_trained=False), Share(4, False), Share(3, False), Share(3, False)]
    owners = assign_owners(shares, 2, 1)
    assert sorted(loads(shares, owners, 2, 1)) == [4, 6]


def test_fewer_parameters_than_ranks_and_nothing_to_keep() -> None:
    """a7-3. Scalars, zero elements and empty stages have an owner too, and do not all crowd on one rank."""
    assert assign_owners([], 4, 1) == []
    assert assign_owners([Share(3, False), Share(1, False)], 4, 1) == [Cell(0, 0), Cell(1, 0)]
    assert len(set(assign_owners([Share(0, False)] * 4, 4, 1))) == 4
