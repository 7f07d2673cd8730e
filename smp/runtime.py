"""The one global of smp: the Runtime that `smp.init` makes, and what scripts ask it.

1. resolve the configuration        pure; problems are kept, not raised
2. start the world                  once per process (bootstrap.py), with its monitor (failures.py)
3. agree                            a problem on any rank, or configurations that differ, is raised by every rank
4. torch.distributed, transport     once per process
5. process groups, Runtime          per configuration
"""

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from smp import bootstrap, cpu_trainer, log
from smp.bootstrap import World
from smp.comm.gloo import GlooTransport
from smp.comm.mpi import MpiTransport
from smp.comm.pairs import PairMoves, make_pair_groups
from smp.comm.transport import Moves, Transport
from smp.config import Config, resolve
from smp.errors import ConfigError, UsageError
from smp.failures import Monitor
from smp.groups import Group, make_groups
from smp.topology import CommGroup, RankType, Topology


@dataclass(frozen=True)
class WaitingLoad:
    """Values on their way into the model, the optimizer, or both, until these are partitioned."""

    load: Callable[[], object]
    of_model: bool
    of_optimizer: bool


class Runtime:
    """Configuration, grid, groups and transport of this rank.

    Attributes:
        transport: messages between any two ranks.
        moves: tensors between stages; the transport, or something faster on the device.
        model, optimizer: the one DistributedModel and DistributedOptimizer, once made.
        waiting_loads: what scripts have loaded before the model is partitioned, in the order of their calls.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        world: World,
        groups: Mapping[CommGroup, Group],
        transport: Transport,
        moves: Moves,
        monitor: Monitor,
    ) -> None:
        self.config = config
        self.topology = topology
        self.world = world
        self.transport = transport
        self.moves = moves
        self.monitor = monitor
        self.rank, self.size = world.rank, world.size
        self.local_rank, self.local_size = world.local_rank, world.local_size
        self.device = world.device
        self.model: Any = None
        self.optimizer: Any = None
        self.waiting_loads: list[WaitingLoad] = []
        self._groups = groups
        self.rdp_rank, self.pp_rank, self.tp_rank = topology.coordinates(world.rank)
        self.dp_rank = groups[CommGroup.DP_GROUP].rank
        self.mp_rank = groups[CommGroup.MP_GROUP].rank
        self.rdp_size, self.pp_size, self.tp_size = topology.rdp_size, topology.pp_size, topology.tp_size
        self.dp_size = groups[CommGroup.DP_GROUP].size
        self.mp_size = groups[CommGroup.MP_GROUP].size

    def group(self, kind: CommGroup) -> Group:
        """The group of that kind that this rank is in."""
        return self._groups[kind]

    def load_once_partitioned(self, load: Callable[[], object], *, of_model: bool, of_optimizer: bool) -> None:
        """Does it now where the model is partitioned, else when it is, after what waits already."""
        if self.model is not None and self.model.partitioned:
            load()
        else:
            self.waiting_loads.append(WaitingLoad(load, of_model, of_optimizer))

    def run_waiting_loads(self) -> None:
        """Does them, the last one last: the model is partitioned, and the optimizer has its parameters."""
        loads, self.waiting_loads = self.waiting_loads, []
        for waiting in loads:
            waiting.load()

    def world_rank(self, rank: int, kind: RankType) -> int:
        """The world rank of the member of this rank's own group that has this number.

        Raises:
            UsageError: the group has no such member.
        """
        ranks = self._groups[kind.group].ranks
        if not 0 <= rank < len(ranks):
            raise UsageError(f"{kind.name} {rank} is not in 0..{len(ranks) - 1}, the ranks of {kind.group.name}")
        return ranks[rank]


# The process-lifetime part and the current Runtime.
_world: World | None = None
_monitor: Monitor | None = None
_transport: Transport | None = None
_runtime: Runtime | None = None
_agreements = 0


def init(config: Mapping[str, Any] | None = None) -> None:
    """Starts smp. Collective over the job; a second call with no configuration, or an equal one, does nothing.

    Args:
        config: see the configuration table; the environment variable SM_HP_MP_PARAMETERS (JSON) overrides it.

    Raises:
        ConfigError: on every rank: all problems of the configuration at once, or ranks that were given different ones,
            or one that differs from that of an earlier call.
        CommError: on every rank: `ddp_port` is taken.
    """
    global _runtime
    cpu_trainer.prepare(_dealing)
    if _runtime is not None and config is None:
        return
    world, monitor = _start_world()
    resolved, problem = _resolve(config, world.size)
    if _runtime is not None:
        if problem is not None:
            raise problem
        if resolved != _runtime.config:
            raise ConfigError(_second_init(_runtime.config, resolved))
        return
    _agree(world, monitor, resolved, problem)
    assert resolved is not None
    _runtime = _build(resolved, world, monitor)
    log.info_rank0("%s", resolved.describe())
    for text in resolved.warnings():
        log.warn_rank0("%s", text)


def _dealing() -> cpu_trainer.Dealing | None:
    """How a client's data loader deals batches; None where it finds out rightly by itself."""
    rt = _runtime
    if rt is None or rt.device.type != "cpu":
        return None
    ranks = rt.group(CommGroup.RDP_GROUP if rt.config.prescaled_batch else CommGroup.DP_GROUP).ranks
    everybody = len(ranks) == rt.world.size
    return cpu_trainer.Dealing(rt.device, ranks.index(rt.world.rank), len(ranks), rt.world.local_rank, everybody)


def _resolve(config: Mapping[str, Any] | None, world_size: int) -> tuple[Config | None, ConfigError | None]:
    """The configuration, or what is wrong with it."""
    try:
        resolved = resolve(config)
        resolved.check_world(world_size)
    except ConfigError as error:
        return None, error
    return resolved, None


def _start_world() -> tuple[World, Monitor]:
    global _world, _monitor
    if _world is None or _monitor is None:
        _world = World.start()
        log.set_rank(_world.rank if _world.size > 1 else None)
        _monitor = Monitor(_world)
        _monitor.start()
    return _world, _monitor


def _build(config: Config, world: World, monitor: Monitor) -> Runtime:
    global _transport
    timeout = timedelta(seconds=monitor.timeout + 60)  # the monitor speaks first, and says more
    bootstrap.start_torch_distributed(world, config.ddp_port, config.ddp_dist_backend, timeout)
    monitor.install_hooks()
    if _transport is None:
        _transport = MpiTransport(world, monitor) if world.mpi is not None else GlooTransport(world, monitor)
        monitor.progress, monitor.advance = _transport.progress, _transport.advance
    topology = Topology.from_config(config, world.size)
    groups = make_groups(topology, world.rank, timeout)
    _transport.prepare(list(groups.values()))
    moves: Moves = _transport
    if bootstrap.moves_over_process_groups(world.device):
        moves = PairMoves(_transport, make_pair_groups(topology, world.rank, world.device, timeout))
    return Runtime(config, topology, world, groups, _transport, moves, monitor)


# Agreement


def _agree(world: World, monitor: Monitor, config: Config | None, problem: ConfigError | None) -> None:
    """Raises the same ConfigError on every rank when any rank has one, or when configurations differ."""
    global _agreements
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    mine = {
        "problem": str(problem) if problem is not None else None,
        "config": config.model_dump(mode="json") if config is not None else None,
        "cores": [socket.gethostname(), *cores],
    }
    if world.size == 1:
        if problem is not None:
            raise problem
        return
    key = f"agreement/{_agreements}"
    _agreements += 1
    answers = [json.loads(text) for text in _gather(world, monitor, key, json.dumps(mine))]
    message = _disagreement(answers)
    if message is not None:
        raise ConfigError(message)
    _set_threads(world, answers)


def _gather(world: World, monitor: Monitor, key: str, mine: str) -> list[str]:
    """Every rank's text, by rank, through the store: this has to work before there is any transport."""
    store = world.store
    store.set(f"{key}/{world.rank}", mine)
    if world.rank == 0:
        texts = []
        for rank in range(world.size):
            monitor.wait(lambda rank=rank: store.check([f"{key}/{rank}"]), "smp.init", [rank])  # type: ignore[misc]
            texts.append(store.get(f"{key}/{rank}").decode())
        store.set(key, json.dumps(texts))
    monitor.wait(lambda: store.check([key]), "smp.init", range(world.size))
    return list(json.loads(store.get(key)))


def _disagreement(answers: list[dict[str, Any]]) -> str | None:
    """What is wrong with the ranks' configurations taken together."""
    problems: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        if answer["problem"] is not None:
            problems.setdefault(answer["problem"], []).append(rank)
    if problems:
        return "\n".join(
            text if len(ranks) == len(answers) else f"on rank {', '.join(map(str, ranks))}: {text}"
            for text, ranks in problems.items()
        )
    first = answers[0]["config"]
    for rank, answer in enumerate(answers):
        if answer["config"] != first:
            keys = [key for key in first if answer["config"].get(key) != first[key]]
            return "ranks were given different configurations: " + "; ".join(
                f"{key} is {first[key]!r} on rank 0 and {answer['config'].get(key)!r} on rank {rank}" for key in keys
            )
    return None


def _second_init(old: Config, new: Config | None) -> str:
    before, after = old.model_dump(), new.model_dump() if new is not None else {}
    changes = [f"{key} is {before[key]!r}, now {after.get(key)!r}" for key in before if before[key] != after.get(key)]
    return f"smp.init was called before with another configuration: {'; '.join(changes)}"


def _set_threads(world: World, answers: list[dict[str, Any]]) -> None:
    """Shares the cores among the ranks of a host, unless OMP_NUM_THREADS says otherwise."""
    mine = answers[world.rank]["cores"]
    cores = len(mine) - 1
    sharing = sum(answer["cores"] == mine for answer in answers)
    if cores == 0:
        return
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores // sharing))
    wanted = max(torch.get_num_threads(), (os.cpu_count() or 1) // world.local_size)
    if cores < wanted:
        log.warn_rank0(
            "this process may run on %d of %d cores only, but %d threads are asked for or could be had: the launcher "
            "binds processes to cores; with mpirun, add --bind-to none",
            cores,
            os.cpu_count(),
            wanted,
        )


# Queries


def is_initialized() -> bool:
    """Whether `smp.init` has been called."""
    return _runtime is not None


def get() -> Runtime:
    """The Runtime.

    Raises:
        UsageError: before `smp.init`.
    """
    if _runtime is None:
        raise UsageError("call smp.init() first")
    return _runtime


def reset() -> None:
    """Drops the Runtime so that `init` can be called with another configuration (tests). The World stays."""
    global _runtime
    _runtime = None
    log.forget_warnings()


def rank() -> int:
    """This process among all."""
    return get().rank


def size() -> int:
    """Number of processes."""
    return get().size


def local_rank() -> int:
    """This process among those of its host."""
    return get().local_rank


def local_size() -> int:
    """Number of processes on this host."""
    return get().local_size


def tp_rank() -> int:
    """Which tensor-parallel part this rank holds."""
    return get().tp_rank


def tp_size() -> int:
    """Number of tensor-parallel parts."""
    return get().tp_size


def pp_rank() -> int:
    """Which pipeline stage this rank holds."""
    return get().pp_rank


def pp_size() -> int:
    """Number of pipeline stages."""
    return get().pp_size


def rdp_rank() -> int:
    """Which model replica this rank belongs to."""
    return get().rdp_rank


def rdp_size() -> int:
    """Number of model replicas."""
    return get().rdp_size


def dp_rank() -> int:
    """This rank among those that hold the same stage."""
    return get().dp_rank


def dp_size() -> int:
    """Number of ranks that hold the same stage."""
    return get().dp_size


def mp_rank() -> int:
    """This rank inside its model replica."""
    return get().mp_rank


def mp_size() -> int:
    """Number of ranks of one model replica."""
    return get().mp_size


def _ranks(kind: CommGroup) -> list[int]:
    return list(get().group(kind).ranks)


def get_world_group() -> list[int]:
    """All world ranks."""
    return _ranks(CommGroup.WORLD)


def get_tp_group() -> list[int]:
    """World ranks of this rank's tensor-parallel group."""
    return _ranks(CommGroup.TP_GROUP)


def get_pp_group() -> list[int]:
    """World ranks of this rank's pipeline."""
    return _ranks(CommGroup.PP_GROUP)


def get_rdp_group() -> list[int]:
    """World ranks that hold the same parameters."""
    return _ranks(CommGroup.RDP_GROUP)


def get_dp_group() -> list[int]:
    """World ranks that hold the same stage."""
    return _ranks(CommGroup.DP_GROUP)


def get_mp_group() -> list[int]:
    """World ranks of this rank's model replica."""
    return _ranks(CommGroup.MP_GROUP)


def get_world_process_group() -> dist.ProcessGroup:
    """The torch process group of all ranks."""
    return get().group(CommGroup.WORLD).process_group


def get_tp_process_group() -> dist.ProcessGroup:
    """The torch process group of get_tp_group()."""
    return get().group(CommGroup.TP_GROUP).process_group


def get_pp_process_group() -> dist.ProcessGroup:
    """The torch process group of get_pp_group()."""
    return get().group(CommGroup.PP_GROUP).process_group


def get_rdp_process_group() -> dist.ProcessGroup:
    """The torch process group of get_rdp_group()."""
    return get().group(CommGroup.RDP_GROUP).process_group


def get_dp_process_group() -> dist.ProcessGroup:
    """The torch process group of get_dp_group()."""
    return get().group(CommGroup.DP_GROUP).process_group


def get_mp_process_group() -> dist.ProcessGroup:
    """The torch process group of get_mp_group()."""
    return get().group(CommGroup.MP_GROUP).process_group
