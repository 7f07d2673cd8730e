"""Copies from one replica to the others: buffers before a forward, and whole states."""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from smp.dp.reduction import wait
from smp.dp.uneven import Kind, UnevenInputs
from smp.groups import Group


def broadcast_coalesced(tensors: Sequence[Tensor], group: Group, source: int, call: str) -> None:
    """Overwrites `tensors` by those of the rank with index `source` in `group`: one message per dtype and device."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for members in by_kind.values():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in members])
            work = dist.broadcast(flat, group.ranks[source], group=group.process_group, async_op=True)
            wait(work, call, group)
            if group.rank != source:
                parts = flat.split([tensor.numel() for tensor in members])
                for tensor, part in zip(members, parts):
                    tensor.copy_(part.view(tensor.shape))


class BufferSync:
    """Gives all replicas the buffers (batch norm's running statistics) of the first one.

    `buffers()` yields this stage's buffers under their names, the same on all ranks of `dp`; those with
    `_smp_scaled_batch` are copied over `rdp`, the others over `dp`. Only buffers that some rank has changed since the
    last time travel: a causal mask of a megabyte per layer does so once.
    """

    def __init__(
        self, buffers: Callable[[], Iterable[tuple[str, Tensor]]], dp: Group, rdp: Group, uneven: UnevenInputs
    ) -> None:
        self._buffers = buffers
        self._dp, self._rdp = dp, rdp
        self._uneven = uneven
        self._seen: dict[str, tuple[int, int]] = {}
        uneven.sync_buffers = self._sync

    def before_forward(self) -> None:
        """Call before the forward of a training pass that starts an accumulation window; collective over `dp`."""
        if self._dp.size > 1 and any(True for _ in self._buffers()):
            self._uneven.announce(Kind.BUFFERS)
            self._sync()

    def _sync(self) -> None:
        buffers = list(self._buffers())
        changed = [self._seen.get(name) != _state(buffer) for name, buffer in buffers]
        flags = torch.tensor(changed, dtype=torch.uint8, device=buffers[0][1].device)
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._dp.process_group, async_op=True)
        wait(work, "agreement on changed buffers", self._dp)
        stale = [buffer for (_, buffer), flag in zip(buffers, flags.tolist()) if flag]
        for group in (self._dp, self._rdp):
            members = [buffer for buffer in stale if (self._group_of(buffer) is group)]
            if group.size > 1:
                broadcast_coalesced(members, group, self._uneven.source(group), "copy of buffers to all replicas")
        self._seen = {name: _state(buffer) for name, buffer in buffers}

    def _group_of(self, buffer: Tensor) -> Group:
        return self._rdp if getattr(buffer, "_smp_scaled_batch", False) else self._dp


def _state(buffer: Tensor) -> tuple[int, int]:
    """Changes whenever the buffer's content is written or the buffer is replaced."""
    return (buffer.data_ptr(), 0 if buffer.is_inference() else buffer._version)
