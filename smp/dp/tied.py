"""Who sums the gradient of a tied weight: the data-parallel ranks of all the stages that hold it.

    rdp 0   stage 0: W ---+--- stage 2: W        union of the holders' DP groups (of their RDP groups, one for each
    rdp 1   stage 0: W ---+--- stage 2: W        tp_rank, when the weight's modules work on the joined batch)

The sum over the union, divided by the size of dp, is the sum over stages of the mean over replicas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch import Tensor
from torch.nn import Parameter

from smp.dp.broadcast import broadcast_coalesced
from smp.groups import Group, group_of
from smp.pp.stages import StageMap
from smp.runtime import Runtime
from smp.topology import CommGroup

_COPY = "_smp_tied_copy"


@dataclass(frozen=True)
class TiedGroup:
    """`group`: all ranks that hold a parameter (its part). `source`: index of the one whose initial values count.
    `counts`: whether this rank's stage is the one that counts the parameter in norms and in optimizer state."""

    group: Group
    source: int
    counts: bool


def is_copy(parameter: Tensor) -> bool:
    """Whether another stage counts this parameter: it holds the same one."""
    return bool(getattr(parameter, _COPY, False))


def tied_groups(rt: Runtime, stages: StageMap) -> dict[int, TiedGroup]:
    """By the id of each parameter that this rank's stage holds together with others. Collective over the world."""
    timeout = timedelta(seconds=rt.monitor.timeout + 60)
    found: dict[int, TiedGroup] = {}
    for parameter in stages.root.parameters():
        parameter.__dict__.pop(_COPY, None)
    for _, parameter, holders in stages.tied_parameters():
        scaled = bool(getattr(parameter, "_smp_scaled_batch", False))
        tp_ranks: list[Sequence[int]] = [[tp] for tp in range(rt.tp_size)] if scaled else [range(rt.tp_size)]
        kind = CommGroup.RDP_GROUP if scaled else CommGroup.DP_GROUP
        for tps in tp_ranks:
            group = group_of(rt.topology, _ranks(rt, holders, tps), kind, rt.rank, timeout)
            if group is None:
                continue
            source = rt.topology.rank_at(rdp=0, pp=holders[0], tp=tps[0])
            counts = rt.pp_rank == holders[0]
            found[id(parameter)] = TiedGroup(group, group.ranks.index(source), counts)
            if not counts:
                setattr(parameter, _COPY, True)
    return found


def _ranks(rt: Runtime, holders: Sequence[int], tps: Sequence[int]) -> tuple[int, ...]:
    at = rt.topology.rank_at
    return tuple(sorted(at(rdp=rdp, pp=pp, tp=tp) for rdp in range(rt.rdp_size) for pp in holders for tp in tps))


def share_initial_values(parameters: Sequence[Parameter], tied: Mapping[int, TiedGroup]) -> None:
    """The first holder's values for all holders: stages may be seeded differently. Collective over each group."""
    for parameter in parameters:
        if (entry := tied.get(id(parameter))) is not None:
            call = "smp.DistributedModel (initial values of tied weights)"
            broadcast_coalesced([parameter.data], entry.group, entry.source, call)
