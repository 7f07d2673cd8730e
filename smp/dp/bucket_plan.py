"""The reducer's parameters cut into buckets, and the ranks' agreement that they have cut alike."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from smp.dp.buckets import Bucket, Item, assign
from smp.dp.comm_hook import Hook, HookedReduction
from smp.dp.reduction import (
    MAX_IN_FLIGHT,
    CopiedReduction,
    Lane,
    Member,
    Reduction,
    ViewedReduction,
    all_reduce,
    gradient_dtype,
    transport_dtype,
)
from smp.groups import Group

FIRST_BUCKET_BYTES = 2**20  # small, so that the first reduction starts early


class BucketPlan(NamedTuple):
    """Buckets in the order in which they are launched."""

    buckets: list[Reduction]
    num_early: int  # those that may be launched while the pass runs: all but those of tied weights
    bucket_of: dict[int, tuple[int, int]]  # parameter index -> (bucket, member)


def plan_buckets(
    members: Sequence[Member],
    order: Sequence[int],
    tied: Sequence[int],
    *,
    cap: int,
    as_views: bool,
    hook: tuple[Any, Hook] | None,
    hooked: Group,
) -> BucketPlan:
    """Cuts those members that can get a gradient into buckets of at most `cap` bytes.

    `order`: their indices by the time at which gradients become complete. `tied`: indices of weights that other stages
    hold too; they go last. `hook` reduces what is averaged over the group `hooked`. `as_views`: gradients live in the
    buckets.
    """
    live = [i for i in order if members[i].group.size > 1]
    is_hooked = [hook is not None and member.group is hooked for member in members]
    items = [_item(member, goes_to_hook) for member, goes_to_hook in zip(members, is_hooked)]
    own = assign(items, [i for i in live if i not in tied], cap, FIRST_BUCKET_BYTES)
    # Tied ones keep the order of the module tree: stages observe different orders of completion.
    shared = assign(items, [i for i in sorted(live) if i in tied], cap)
    lanes: dict[tuple[torch.dtype, torch.device], Lane] = {}
    plan = BucketPlan([], len(own), {})
    hooked_buckets: list[HookedReduction] = []
    for number, bucket in enumerate((*own, *shared)):
        plan.bucket_of.update({index: (number, member) for member, index in enumerate(bucket.members)})
        inside = [members[index] for index in bucket.members]
        if hook is not None and is_hooked[bucket.members[0]]:
            hooked_buckets.append(HookedReduction(number, bucket, inside, hook[1], hook[0]))
            plan.buckets.append(hooked_buckets[-1])
        else:
            plan.buckets.append(_summed(number, bucket, inside, lanes, as_views))
    for number, hooked_bucket in enumerate(hooked_buckets):
        hooked_bucket.hook_index = number
        hooked_bucket.is_last = number == len(hooked_buckets) - 1
    return plan


def _item(member: Member, goes_to_hook: bool) -> Item:
    param, of_gradient = member.param, gradient_dtype(member.param)
    dtype = of_gradient.to_real() if goes_to_hook else transport_dtype(of_gradient)
    root = None if goes_to_hook else member.root
    kind = (member.group.kind, member.group.ranks, root, of_gradient, param.device)
    return Item(kind, param.numel() * (2 if param.is_complex() else 1), dtype.itemsize)


def _summed(
    number: int,
    bucket: Bucket,
    members: Sequence[Member],
    lanes: dict[tuple[torch.dtype, torch.device], Lane],
    as_views: bool,
) -> Reduction:
    param = members[0].param
    of_gradient = gradient_dtype(param)
    dtype = transport_dtype(of_gradient)
    if (dtype, param.device) not in lanes:
        narrow = dtype != of_gradient.to_real()
        lanes[dtype, param.device] = Lane(dtype, param.device, 1 if narrow else MAX_IN_FLIGHT)
    form = ViewedReduction if as_views and all(member.keeps for member in members) else CopiedReduction
    return form(number, bucket, members, lanes[dtype, param.device])


def content(buckets: Sequence[Reduction]) -> str:
    """What has to be equal on all ranks."""
    return repr(
        [(b.names, b.bucket.offsets, b.bucket.numel, str(gradient_dtype(b.params[0])), b.root) for b in buckets]
    )


def is_agreed(group: Group, content_here: str, device: torch.device) -> bool:
    """Whether all ranks of `group` have the same content; collective over it."""
    mine = int.from_bytes(hashlib.sha256(content_here.encode()).digest()[:7], "big")
    largest = torch.tensor([mine, -mine], dtype=torch.int64, device=device)
    all_reduce(largest, dist.ReduceOp.MAX, "agreement on gradient buckets", group)
    high, negated_low = largest.tolist()
    return bool(high == -negated_low)
