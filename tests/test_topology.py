"""The grid of ranks: the contract's examples, and what must hold for every placement."""

import pytest

from smp.errors import ConfigError
from smp.topology import PLACEMENTS, CommGroup, Coordinates, RankType, Topology

SHAPES = [(1, 1, 1), (4, 2, 1), (4, 1, 2), (4, 4, 1), (8, 2, 2), (12, 3, 2), (24, 2, 3), (16, 2, 4)]


def digits(topology: Topology) -> list[str]:
    return ["".join(map(str, topology.coordinates(rank))) for rank in range(topology.world_size)]


def test_dpt_numbers_ranks_as_documented() -> None:
    """A failure means that scripts written for the documented rank order read other ranks' data."""
    assert digits(Topology(8, 2, 2, "DPT")) == "000 001 010 011 100 101 110 111".split()
    assert digits(Topology(8, 2, 2, "cluster")) == digits(Topology(8, 2, 2, "DPT"))


def test_ptd_numbers_ranks_as_documented() -> None:
    """The right-most letter must vary fastest; a failure means the letters are read from the wrong end."""
    assert digits(Topology(8, 2, 2, "PTD")) == "000 100 001 101 010 110 011 111".split()


def test_spread_and_cluster_groups_without_tensor_parallelism() -> None:
    """The documented groups of 8 ranks in 2 partitions."""
    spread, cluster = Topology(8, 2, 1, "spread"), Topology(8, 2, 1, "cluster")
    assert spread.groups(CommGroup.MP_GROUP) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert cluster.groups(CommGroup.MP_GROUP) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert cluster.groups(CommGroup.DP_GROUP) == ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("world", "pp", "tp"), SHAPES)
def test_groups_are_slices_of_one_grid(world: int, pp: int, tp: int, placement: str) -> None:
    """Each kind of group partitions the world, has the right size and shares exactly the coordinates it should."""
    topology = Topology(world, pp, tp, placement)
    rdp = topology.rdp_size
    assert rdp * pp * tp == world
    sizes = {
        "WORLD": world,
        "MP_GROUP": pp * tp,
        "DP_GROUP": rdp * tp,
        "PP_GROUP": pp,
        "TP_GROUP": tp,
        "RDP_GROUP": rdp,
    }
    shared = {"WORLD": "", "MP_GROUP": "rdp", "DP_GROUP": "pp", "PP_GROUP": "rdp tp", "TP_GROUP": "rdp pp"}
    shared["RDP_GROUP"] = "pp tp"
    for kind in CommGroup:
        groups = topology.groups(kind)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert [group[0] for group in groups] == sorted(group[0] for group in groups)
        for group in groups:
            assert len(group) == sizes[kind.name] and list(group) == sorted(group)
            for axis in shared[kind.name].split():
                assert len({getattr(topology.coordinates(rank), axis) for rank in group}) == 1
            for number, rank in enumerate(group):
                assert topology.group(kind, rank) == group
                assert topology.rank_in(kind, rank) == number


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("world", "pp", "tp"), SHAPES)
def test_coordinates_and_ranks_are_inverse(world: int, pp: int, tp: int, placement: str) -> None:
    """pp, tp and rdp ranks are the coordinates, and every place in the box has one rank."""
    topology = Topology(world, pp, tp, placement)
    for rank in range(world):
        place = topology.coordinates(rank)
        assert topology.rank_at(rdp=place.rdp, pp=place.pp, tp=place.tp) == rank
        assert place == Coordinates(
            rdp=topology.rank_in(CommGroup.RDP_GROUP, rank),
            pp=topology.rank_in(CommGroup.PP_GROUP, rank),
            tp=topology.rank_in(CommGroup.TP_GROUP, rank),
        )


def test_each_rank_type_names_its_group() -> None:
    """`send(obj, 1, RankType.PP_RANK)` must count inside the pipeline group, and so on."""
    assert [kind.group.name for kind in RankType] == [
        "WORLD", "MP_GROUP", "DP_GROUP", "PP_GROUP", "TP_GROUP", "RDP_GROUP"
    ]  # fmt: skip


def test_degrees_that_do_not_fit_are_refused() -> None:
    """The message holds all three numbers."""
    with pytest.raises(ConfigError, match=r"6 processes.*pipeline_parallel_degree 2 x tensor_parallel_degree 2 = 4"):
        Topology(6, 2, 2)
    with pytest.raises(ConfigError, match="'DDT' is not one of cluster, spread, DPT"):
        Topology(4, 1, 1, "DDT")
