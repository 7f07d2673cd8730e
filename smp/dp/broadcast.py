"""Tensors of one rank for a whole group, in few messages."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from smp.dp.reduction import wait
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
