"""Buffers of the first replica for all others, before a forward."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from smp.dp.broadcast import broadcast_coalesced
from smp.dp.reduction import wait
from smp.dp.uneven import Kind, UnevenInputs
from smp.groups import Group


class BufferSync:
    """Gives all replicas the buffers (batch norm's running statistics) of the first one.

    `buffers()` yields this stage's buffers under their names, the same on all ranks of `dp`; those with
    `_smp_scaled_batch` are copied over `rdp`, the others over `dp`. Integers and booleans travel only when some rank
    has changed them since the last time: a causal mask of a megabyte per layer does so once. Floating point always
    does, because kernels (batch norm's) write it without counting a new version.
    """

    def __init__(
        self, buffers: Callable[[], Iterable[tuple[str, Tensor]]], dp: Group, rdp: Group, uneven: UnevenInputs
    ) -> None:
        self.buffers = buffers
        self._dp, self._rdp = dp, rdp
        self._uneven = uneven
        self._seen: dict[str, tuple[int, int]] = {}
        uneven.buffer_sync = self

    def before_forward(self) -> None:
        """Call before the forward of a training pass that starts an accumulation window; collective over `dp`."""
        if self._dp.size > 1 and any(True for _ in self.buffers()):
            self._uneven.announce(Kind.BUFFERS)
            self.follow()

    def follow(self) -> None:
        """The copying itself; in a join, also called by ranks that have no more batches."""
        buffers = list(self.buffers())
        stale = [buffer for _, buffer in buffers if _travels_always(buffer)]
        constant = [(name, buffer) for name, buffer in buffers if not _travels_always(buffer)]
        if constant:
            changed = [self._seen.get(name) != _state(buffer) for name, buffer in constant]
            flags = torch.tensor(changed, dtype=torch.uint8, device=constant[0][1].device)
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._dp.process_group, async_op=True)
            wait(work, "agreement on changed buffers", self._dp)
            stale += [buffer for (_, buffer), flag in zip(constant, flags.tolist()) if flag]
        for group in (self._dp, self._rdp):
            members = [buffer for buffer in stale if self._group_of(buffer) is group]
            if group.size > 1:
                broadcast_coalesced(members, group, self._uneven.source(group), "copy of buffers to all replicas")
        self._seen = {name: _state(buffer) for name, buffer in constant}

    def _group_of(self, buffer: Tensor) -> Group:
        return self._rdp if getattr(buffer, "_smp_scaled_batch", False) else self._dp


def _travels_always(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _state(buffer: Tensor) -> tuple[int, int]:
    """Changes when the buffer is written by an operation that says so, or replaced."""
    return (buffer.data_ptr(), 0 if buffer.is_inference() else buffer._version)
