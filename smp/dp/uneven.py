"""Uneven inputs: data-parallel ranks that run out of batches keep the others' collectives company.

    with model.join():                         rank 0 (3 batches)        rank 1 (2 batches)
        for batch in loader:                   announce, reduce          announce, reduce
            ...                                announce, reduce          announce, reduce
                                               announce, reduce          <leaves the loop> shadow: announce, reduce
                                               <leaves> announce         announce
                                               nobody is active: end     end: takes rank 0's weights

Inside `join`, every collective of data parallelism is preceded by an announcement: one small sum that says which ranks
are still active and what comes next. Who has run out answers with zeros and follows along.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from smp import runtime
from smp.dp.broadcast import broadcast_coalesced
from smp.dp.reduction import wait
from smp.errors import StepError, UsageError
from smp.groups import Group

if TYPE_CHECKING:
    from smp.dp.buffer_sync import BufferSync
    from smp.dp.reducer import Reducer


_RAN_OUT = "join(throw_on_early_termination=True): a rank has run out of batches"


class Kind(Enum):
    """What follows an announcement."""

    BUFFERS = 0
    REDUCTION = 1


_NEVER_RAN = (
    "join: a rank has no batch at all, and the model is not partitioned yet, which takes every replica. Run one step "
    "on all ranks before join, or give each rank at least one batch."
)


class UnevenInputs:
    """The state of `join` on one rank; it does nothing outside of that context.

    `reducer` and `buffer_sync` are set by those that announce.
    """

    def __init__(self, dp: Group, rdp: Group) -> None:
        self.dp, self.rdp = dp, rdp
        self.reducer: Reducer | None = None
        self.buffer_sync: BufferSync | None = None
        self.enabled = False
        self._raises_early = False
        self._by_all = True
        self._active = [True] * dp.size

    def scale(self, group: Group) -> float:
        """What makes a sum over `group` a mean."""
        if not self.enabled or self._by_all:
            return 1.0 / group.size
        return 1.0 / max(1, sum(self._active[self.dp.ranks.index(rank)] for rank in group.ranks))

    def source(self, group: Group) -> int:
        """The index in `group` of the first rank that still trains (that trained last)."""
        return next((i for i, rank in enumerate(group.ranks) if self._active[self.dp.ranks.index(rank)]), 0)

    def announce(self, kind: Kind) -> None:
        """Called by a rank that still trains, before a collective that all ranks of the DP group take part in."""
        if not self.enabled or self.dp.size == 1:
            return
        active, kinds = self._exchange(kind)
        if kinds[1 - kind.value]:
            raise StepError("join: ranks that still have batches do not run the same sequence of passes")
        self._active = active
        if self._raises_early and not all(active):
            raise StepError(_RAN_OUT)

    def before_partition(self) -> None:
        """Called by a rank that is about to cut its model into stages, which takes every replica."""
        if self.enabled and self.dp.size > 1 and not all(self._exchange(Kind.REDUCTION)[0]):
            raise UsageError(_NEVER_RAN)

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """The context of `DistributedModel.join`; arguments as in torch's `DistributedDataParallel.join`.

        By default a mean is still over all ranks, those without batches counting as zero gradients.
        """
        if self.enabled:
            raise UsageError("join: already inside of a join context")
        self.enabled = enable
        self._raises_early, self._by_all = throw_on_early_termination, divide_by_initial_world_size
        try:
            yield
            if enable and self.dp.size > 1:
                self._follow()
        finally:
            self.enabled = False
            self._active = [True] * self.dp.size

    def _exchange(self, kind: Kind | None) -> tuple[list[bool], list[int]]:
        """Sums everybody's announcement (None: no more batches): who is active, how many announce each kind."""
        size = self.dp.size
        device = runtime.get().device
        message = torch.zeros(size + len(Kind), dtype=torch.int64, device=device)
        if kind is not None:
            message[self.dp.rank] = 1
            message[size + kind.value] = 1
        work = dist.all_reduce(message, group=self.dp.process_group, async_op=True)
        wait(work, "join (which ranks still have batches)", self.dp)
        values: list[int] = message.tolist()
        return [value > 0 for value in values[:size]], values[size:]

    def _follow(self) -> None:
        """This rank has no more batches: takes part in what the others announce until nobody does."""
        while True:
            active, kinds = self._exchange(None)
            if not any(active):
                break
            self._active = active
            if self._raises_early:
                raise StepError(_RAN_OUT)
            if self.reducer is None:
                raise UsageError(_NEVER_RAN)
            if kinds[Kind.REDUCTION.value]:
                self.reducer.follow()
            elif self.buffer_sync is not None:
                self.buffer_sync.follow()
        if not all(self._active):
            self._take_final_state()

    def _take_final_state(self) -> None:
        """Parameters and buffers of a rank that trained last, for those that ran out before it."""
        assert self.reducer is not None
        tensors: list[Tensor] = [*self.reducer.parameters]
        if self.buffer_sync is not None:
            tensors += [buffer for _, buffer in self.buffer_sync.buffers()]
        for group in (self.dp, self.rdp):
            members = [t for t in tensors if (self.rdp if getattr(t, "_smp_scaled_batch", False) else self.dp) is group]
            if group.size > 1:
                broadcast_coalesced(members, group, self.source(group), "join (final state)")
