"""`shard_optimizer_state`: which rank keeps the optimizer state of which parameter, and the way back to the others.

The ranks of a stage hold the same parameters, so one of them is enough to update each:

                 rank 0                          rank 1
    gradients    A' B' C'                        A" B" C"
                    | reduced to the owner          |
                 A  .  C                         .  B  .      whoever does not own a parameter drops its gradient
    optimizer    A  C                            B            state of what is owned only
                    | gathered from the owner       |
    parameters   A  B  C                         A  B  C      equal bit for bit

A parameter of a distributed module has an owner in each RDP group: its ranks hold the same part of it and add up the
same gradient. Any other one has an owner in the DP group, whose ranks all hold it whole. A weight that several stages
hold has an owner on each of them. Parameters are owned whole, never flattened and cut, so that any update rule works.
"""

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from smp import runtime
from smp.dp.buckets import Item, assign
from smp.dp.reduction import MAX_IN_FLIGHT, real, wait
from smp.dp.tied import is_copy
from smp.errors import UsageError
from smp.groups import Group
from smp.runtime import Runtime
from smp.topology import CommGroup
from smp.tp.shard import spec_of

_CAP = 25 * 2**20  # bytes of one message


class Share(NamedTuple):
    """One parameter as far as ownership cares: its elements on one rank, whether each tensor-parallel rank needs an
    owner of its own for it (it is updated by RDP group), and whether it is trained."""

    numel: int
    by_rdp: bool
    is_trained: bool = True


class Cell(NamedTuple):
    """A rank of a stage: its replica and its tensor-parallel rank."""

    rdp: int
    tp: int


def assign_owners(shares: Sequence[Share], rdp_size: int, tp_size: int) -> list[Cell]:
    """The owner of each parameter of a stage; for one `by_rdp`, `tp` is 0 and stands for every tensor-parallel rank.

    Largest first, each goes to the rank that has the fewest elements so far: the ranks differ by one parameter at most.
    Those that bind a whole row of ranks come before those that can fill up a single one. Frozen ones come last, so that
    trained ones are balanced by themselves. A pure function: every rank finds the same.
    """
    load = {Cell(rdp, tp): (0, 0) for rdp in range(rdp_size) for tp in range(tp_size)}
    owners: dict[int, Cell] = {}
    order = sorted(enumerate(shares), key=lambda item: (not item[1].is_trained, not item[1].by_rdp, -item[1].numel))
    for index, share in order:
        owner = min((cell for cell in load if not (share.by_rdp and cell.tp)), key=lambda cell: (load[cell], cell))
        owners[index] = owner
        for cell in [Cell(owner.rdp, tp) for tp in range(tp_size)] if share.by_rdp else [owner]:
            elements, number = load[cell]
            load[cell] = (elements + share.numel, number + 1)
    return [owners[index] for index in range(len(shares))]


class Ownership:
    """Who owns which of this stage's `parameters`, which are the same, in the same order, on all ranks of `dp`.

    A parameter that is not among them, like one that a script made itself, is owned by every rank for itself.
    """

    def __init__(self, rt: Runtime, parameters: Iterable[Parameter]) -> None:
        self._rt = rt
        self._parameters = list(parameters)
        is_scaled = [bool(getattr(param, "_smp_scaled_batch", False)) for param in self._parameters]
        shares = [
            Share(_numel(param), scaled, param.requires_grad) for param, scaled in zip(self._parameters, is_scaled)
        ]
        cells = assign_owners(shares, rt.rdp_size, rt.tp_size)
        self._group: dict[int, Group] = {}
        self._owner: dict[int, int] = {}
        for param, scaled, cell in zip(self._parameters, is_scaled, cells):
            group = rt.group(CommGroup.RDP_GROUP if scaled else CommGroup.DP_GROUP)
            rank = rt.topology.rank_at(rdp=cell.rdp, pp=rt.pp_rank, tp=rt.tp_rank if scaled else cell.tp)
            self._group[id(param)] = group
            self._owner[id(param)] = group.ranks.index(rank)
        self._messages: tuple[tuple[int, ...], list[_Message]] = ((), [])
        self.is_updating = False
        _look_at_steps()

    def owner(self, param: Tensor) -> int | None:
        """The owner's index in the group that averages the parameter's gradient; None for a parameter not known."""
        return self._owner.get(id(param))

    def owns(self, param: Tensor) -> bool:
        """Whether this rank keeps the parameter's gradient and optimizer state."""
        return id(param) not in self._owner or self._group[id(param)].rank == self._owner[id(param)]

    def group(self, param: Tensor) -> Group | None:
        """The ranks among which the parameter has one owner; None for a parameter not known."""
        return self._group.get(id(param))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around the update by the owners, after which `gather` is called. No optimizer may update them otherwise."""
        self.is_updating = True
        try:
            yield
        finally:
            self.is_updating = False

    @torch.no_grad()
    def gather(self, parameters: Iterable[Tensor]) -> None:
        """Gives every rank the owner's values of `parameters`, in place; collective over the stage's ranks (`dp`).

        All pass the same ones in the same order. They travel flat, some messages at a time.
        """
        known = [param for param in parameters if id(param) in self._owner and self._group[id(param)].size > 1]
        key = tuple(map(id, known))
        if key != self._messages[0]:
            self._messages = (key, self._plan(known))
        in_flight: deque[_Message] = deque()
        for message in self._messages[1]:
            if len(in_flight) == MAX_IN_FLIGHT:
                in_flight.popleft().finish()
            message.start()
            in_flight.append(message)
        for message in in_flight:
            message.finish()

    def _plan(self, parameters: Sequence[Tensor]) -> "list[_Message]":
        items = [
            Item((self._group[id(p)].ranks, self.owner(p), p.dtype, p.device), _numel(p), p.dtype.to_real().itemsize)
            for p in parameters
        ]
        buckets = assign(items, range(len(items)), _CAP)
        return [
            _Message([parameters[i] for i in bucket.members], self._group[key], self._owner[key])
            for bucket in buckets
            if bucket.numel
            for key in [id(parameters[bucket.members[0]])]
        ]


@functools.cache
def _look_at_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_plain_step)


def _refuse_plain_step(optimizer: Optimizer, *_: Any) -> None:
    """Before the step of any torch optimizer."""
    ownership = ownership_of(runtime.get()) if runtime.is_initialized() else None
    if ownership is None or ownership.is_updating:
        return
    if any(ownership.owner(param) is not None for group in optimizer.param_groups for param in group["params"]):
        name = type(optimizer).__name__
        raise UsageError(
            f"{name}.step(): with shard_optimizer_state each gradient is on one rank only, and this step would leave "
            f"the other ranks' parameters as they are. Make optimizer = smp.DistributedOptimizer({name}(...)) and call "
            "optimizer.step(), which gives all ranks the updated parameters, or leave shard_optimizer_state out"
        )


def ownership_of(rt: Runtime) -> Ownership | None:
    """With sharded optimizer state, once the model is partitioned: who owns what. Else None."""
    return getattr(rt.model, "ownership", None)


def counts(rt: Runtime, param: Tensor) -> bool:
    """Whether a logical parameter counts here, in norms and in the whole optimizer state; it does on one rank of a
    replica, of a distributed one each part on one rank. With sharded optimizer state it does at its owner.

    `param`: a parameter of this rank's stage, or a master of one.
    """
    ownership = ownership_of(rt)
    if is_copy(param) or (ownership is not None and not ownership.owns(param)):
        return False
    is_on_each_tp_rank = ownership is None or bool(getattr(param, "_smp_scaled_batch", False))
    return spec_of(param) is not None or not is_on_each_tp_rank or rt.tp_rank == 0


class _Message:
    """Some parameters of one owner on their way to the others of `group`."""

    def __init__(self, parameters: Sequence[Tensor], group: Group, owner: int) -> None:
        self._parameters, self._group, self._owner = parameters, group, owner
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None

    def start(self) -> None:
        values = [real(param.data) for param in self._parameters]
        if len(values) == 1 and values[0].is_contiguous():
            self._flat = values[0]  # arrives where it belongs
        elif self._group.rank == self._owner:
            self._flat = torch.cat([value.reshape(-1) for value in values])
        else:
            self._flat = values[0].new_empty(sum(value.numel() for value in values))
        source = self._group.ranks[self._owner]
        self._work = dist.broadcast(self._flat, source, group=self._group.process_group, async_op=True)

    def finish(self) -> None:
        assert self._work is not None and self._flat is not None, "finish() before start()"
        wait(self._work, "optimizer.step() (updated parameters from their owners)", self._group)
        values = [real(param.data) for param in self._parameters]
        if self._group.rank != self._owner and self._flat.data_ptr() != values[0].data_ptr():
            parts = self._flat.split([value.numel() for value in values])
            torch._foreach_copy_(values, [part.view(value.shape) for part, value in zip(parts, values)])
        self._work = self._flat = None


def _numel(param: Tensor) -> int:
    return param.numel() * (2 if param.is_complex() else 1)
