"""Which rank does what: pure arithmetic on one grid of ranks, no processes, no torch.

The world is a box of `rdp x pp x tp` ranks. A placement is a permutation of the letters D (rdp), P and T that says how
the box is laid over the world ranks; its right-most letter varies fastest. Every group is a slice of the box:

    group      axes that vary inside it      what its ranks share
    WORLD      D P T                         the job
    PP_GROUP   P                             one model replica's tensor-parallel part, cut into stages
    TP_GROUP   T                             one stage of one replica
    RDP_GROUP  D                             exactly the same parameters
    DP_GROUP   D T                           the stage
    MP_GROUP   P T                           one whole model replica
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import permutations, product
from typing import TYPE_CHECKING, NamedTuple

from smp.errors import ConfigError

if TYPE_CHECKING:
    from smp.config import Config

PLACEMENT_NAMES = {"cluster": "DPT", "spread": "TPD"}
PLACEMENTS = tuple("".join(letters) for letters in permutations("DPT"))


class CommGroup(Enum):
    """A kind of group; each rank is in exactly one group of each kind."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"


class RankType(Enum):
    """How a rank is numbered: by its place in the group of that kind."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"

    @property
    def group(self) -> CommGroup:
        """The kind of group in which this number counts."""
        return CommGroup(self.value)


class Coordinates(NamedTuple):
    """A rank's place in the box."""

    rdp: int
    pp: int
    tp: int


# Coordinates that are equal all over a group of the kind, as indexes into Coordinates.
_FIXED_AXES: dict[CommGroup, tuple[int, ...]] = {
    CommGroup.WORLD: (),
    CommGroup.MP_GROUP: (0,),
    CommGroup.DP_GROUP: (1,),
    CommGroup.PP_GROUP: (0, 2),
    CommGroup.TP_GROUP: (0, 1),
    CommGroup.RDP_GROUP: (1, 2),
}


@dataclass(frozen=True)
class Topology:
    """The grid of ranks.

    Args:
        world_size: number of ranks; a multiple of `pp_size * tp_size`.
        pp_size, tp_size: pipeline and tensor parallel degrees.
        placement: a permutation of `DPT`, or `cluster` (DPT) or `spread` (TPD).

    Raises:
        ConfigError: the degrees do not fit the world, or the placement is none.
    """

    world_size: int
    pp_size: int = 1
    tp_size: int = 1
    placement: str = "DPT"

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", PLACEMENT_NAMES.get(self.placement, self.placement))
        if self.placement not in PLACEMENTS:
            raise ConfigError(
                f"placement {self.placement!r} is not one of {', '.join([*PLACEMENT_NAMES, *PLACEMENTS])}"
            )
        if min(self.world_size, self.pp_size, self.tp_size) < 1 or self.world_size % (self.pp_size * self.tp_size):
            raise ConfigError(
                f"{self.world_size} processes cannot be divided into model replicas of pipeline_parallel_degree "
                f"{self.pp_size} x tensor_parallel_degree {self.tp_size} = {self.pp_size * self.tp_size} processes"
            )

    @classmethod
    def from_config(cls, config: "Config", world_size: int) -> "Topology":
        """The grid that a configuration asks for in a world of `world_size` ranks."""
        config.check_world(world_size)
        return cls(
            world_size, config.pipeline_parallel_degree, config.tensor_parallel_degree, config.placement_strategy
        )

    @property
    def rdp_size(self) -> int:
        """Number of whole model replicas."""
        return self.world_size // (self.pp_size * self.tp_size)

    @cached_property
    def _grid(self) -> tuple[Coordinates, ...]:
        """Coordinates by world rank."""
        sizes = {"D": self.rdp_size, "P": self.pp_size, "T": self.tp_size}
        cells: Iterator[tuple[int, ...]] = product(*(range(sizes[letter]) for letter in self.placement))
        d, p, t = (self.placement.index(letter) for letter in "DPT")
        return tuple(Coordinates(rdp=cell[d], pp=cell[p], tp=cell[t]) for cell in cells)

    @cached_property
    def _rank_of(self) -> dict[Coordinates, int]:
        return {coordinates: rank for rank, coordinates in enumerate(self._grid)}

    @cached_property
    def _groups(self) -> dict[CommGroup, tuple[tuple[int, ...], ...]]:
        result = {}
        for kind, axes in _FIXED_AXES.items():
            members: dict[tuple[int, ...], list[int]] = {}
            for rank, coordinates in enumerate(self._grid):
                members.setdefault(tuple(coordinates[axis] for axis in axes), []).append(rank)
            result[kind] = tuple(tuple(ranks) for ranks in members.values())
        return result

    @cached_property
    def _group_of(self) -> dict[CommGroup, dict[int, tuple[int, ...]]]:
        return {kind: {rank: ranks for ranks in groups for rank in ranks} for kind, groups in self._groups.items()}

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a world rank in the box."""
        return self._grid[rank]

    def rank_at(self, *, rdp: int, pp: int, tp: int) -> int:
        """The world rank at a place in the box."""
        return self._rank_of[Coordinates(rdp, pp, tp)]

    def group(self, kind: CommGroup, rank: int) -> tuple[int, ...]:
        """World ranks, ascending, of the group of that kind in which `rank` is."""
        return self._group_of[kind][rank]

    def groups(self, kind: CommGroup) -> tuple[tuple[int, ...], ...]:
        """All groups of a kind, ordered by their smallest world rank; every rank sees the same order."""
        return self._groups[kind]

    def rank_in(self, kind: CommGroup, rank: int) -> int:
        """The number of a world rank inside its group of that kind, counted by ascending world rank."""
        return self.group(kind, rank).index(rank)
