"""One bucket's way through a reduction: fill, launch, wait, write back.

    p.grad ... p.grad                    the gradients of the bucket's members on this rank
        | 1 fill: copy into flat memory, zero where there is no gradient
    [ g g g g g g g g | 1 0 1 ]          gradients, then one flag per member: "this rank has a gradient"
        | 2 launch: asynchronous sum over the group
    [ G G G G G G G G | 2 1 0 ]          a member whose flag is still 0 has no gradient anywhere: it stays None
        | 3 complete: wait, then copy back
    p.grad ... p.grad

The flags ride along because whether a parameter was used may differ by rank and by pass (PITFALLS a3-2). Gradients in
half precision are summed in float32 and divided afterwards: their sum may overflow and their quotient vanish (a3-3).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from smp import runtime
from smp.dp.buckets import Bucket
from smp.errors import StepError
from smp.groups import Group

MAX_IN_FLIGHT = 4  # buffers of full precision that exist at a time; half precision has one


def real(tensor: Tensor) -> Tensor:
    """The same memory without complex numbers: shape (...) complex -> (..., 2) real."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def transport_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of `dtype` are summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype.to_real()


def gradient_dtype(param: Tensor) -> torch.dtype:
    """The type of `param.grad`: the parameter's own unless gradients are accumulated in a wider one."""
    with torch._C.DisableTorchFunction():  # in glue code a parameter is a placed value, whose attributes may travel
        return getattr(param, "grad_dtype", None) or param.dtype


def wait(work: dist.Work, call: str, group: Group) -> None:
    """Blocks until `work` is complete; a rank that never arrives is reported by name."""
    with runtime.get().monitor.blocking(call, group.ranks):
        work.wait()


def all_reduce(message: Tensor, op: dist.ReduceOp.RedOpType, call: str, group: Group) -> Tensor:
    """Reduces `message` over the group, in place, and returns it; `call` as for `wait`. Collective over the group."""
    if group.size > 1:
        wait(dist.all_reduce(message, op, group=group.process_group, async_op=True), call, group)
    return message


class Lane:
    """Flat buffers of one type that buckets use in turn: the k-th bucket of the lane uses buffer k modulo their count.

    A buffer's next user first completes the bucket before it. That bucket has a lower number, so every rank has
    launched it or will do so without waiting for this one.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, num_buffers: int) -> None:
        self.dtype, self.device = dtype, device
        self._sizes = [0] * num_buffers
        self._buffers: list[Tensor | None] = [None] * num_buffers
        self._users: list[Reduction | None] = [None] * num_buffers
        self._num_buckets = 0

    def enter(self, size: int) -> int:
        """Announces a bucket of `size` elements; returns its number in the lane."""
        slot = self._num_buckets % len(self._sizes)
        self._sizes[slot] = max(self._sizes[slot], size)
        self._num_buckets += 1
        return self._num_buckets - 1

    def take(self, number: int, user: "Reduction") -> Tensor:
        """The buffer of bucket `number`, free of its previous user. Made at its first use."""
        slot = number % len(self._sizes)
        previous = self._users[slot]
        if previous is not None and previous is not user:
            previous.complete()
        self._users[slot] = user
        buffer = self._buffers[slot]
        if buffer is None:
            buffer = self._buffers[slot] = torch.empty(self._sizes[slot], dtype=self.dtype, device=self.device)
        return buffer


class Member(NamedTuple):
    """A parameter and what becomes of its gradient: summed over `group`, for `root` alone (an index in the group) or,
    when that is None, for all; afterwards this rank keeps it or drops it."""

    name: str
    param: Parameter
    group: Group
    root: int | None = None
    keeps: bool = True


class Reduction(ABC):
    """A bucket with its members, all of one group and root. `launch` and `complete` alternate; both are collective over
    the group."""

    def __init__(self, index: int, bucket: Bucket, members: Sequence[Member]) -> None:
        self.index = index
        self.bucket = bucket
        self.names = [member.name for member in members]
        self.params = [member.param for member in members]
        self.keeps = [member.keeps for member in members]
        self.group, self.root = members[0].group, members[0].root
        self.size = bucket.numel + len(self.params)  # with flags
        self._work: dist.Work | None = None

    @property
    def call(self) -> str:
        return f"reduction of gradient bucket {self.index} ({self.names[0]} ... {self.names[-1]})"

    @abstractmethod
    def launch(self, scale: float) -> None:
        """Starts the sum over the group of the members' gradients, times `scale`."""

    @abstractmethod
    def complete(self) -> None:
        """Waits for the sum and puts it into the members' `grad`. Does nothing when nothing is on its way."""

    def begin(self) -> None:  # noqa: B027 (optional)
        """A pass that is reduced starts."""

    def adopt(self, member: int) -> None:  # noqa: B027 (optional)
        """The member's gradient has just changed."""

    def stage(self, member: int, scale: float) -> None:  # noqa: B027 (optional)
        """The member's gradient is final and this bucket is the next one: it may be copied while it is in cache."""

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each member's part of `flat`, in the member's (real) shape."""
        shapes = [real(param.data).shape for param in self.params]
        parts = zip(self.bucket.offsets, shapes)
        return [flat[offset : offset + shape.numel()].view(shape) for offset, shape in parts]

    def gradient(self, member: int) -> Tensor | None:
        """The member's gradient on this rank, as real numbers."""
        grad = self.params[member].grad
        if grad is None:
            return None
        if grad.layout is not torch.strided:
            raise StepError(
                f"{self.names[member]} has a gradient of layout {grad.layout}, which data parallelism cannot reduce; "
                "make the module give dense gradients (sparse=False)"
            )
        return real(grad)

    def present(self) -> list[bool]:
        """For each member: does this rank have a gradient?"""
        return [param.grad is not None for param in self.params]

    def write_flags(self, flags: Tensor) -> None:
        """Fills `flags` [members] with 1 where this rank has a gradient, else 0."""
        present = self.present()
        if all(present):
            flags.fill_(1)
        else:
            flags.copy_(torch.tensor(present, dtype=flags.dtype))

    def start_sum(self, message: Tensor) -> dist.Work:
        """Starts the sum of all ranks' `message`, in place, on the root or on all."""
        group = self.group.process_group
        if self.root is None:
            return dist.all_reduce(message, group=group, async_op=True)
        return dist.reduce(message, self.group.ranks[self.root], group=group, async_op=True)

    def drop(self) -> None:
        """Gives up the gradients of members that other ranks keep."""
        for param, keeps in zip(self.params, self.keeps):
            if not keeps:
                param.grad = None

    def write_back(self, views: Sequence[Tensor], flags: Tensor) -> None:
        """Copies each view into the `grad` of its member where that is kept, else drops it; `flags` [members] > 0 where
        any rank had a gradient."""
        self.drop()
        is_unsure = any(keeps and not present for keeps, present in zip(self.keeps, self.present()))
        anywhere = (flags > 0).tolist() if is_unsure else self.keeps
        targets, sources = [], []
        for param, view, exists, keeps in zip(self.params, views, anywhere, self.keeps):
            if exists and keeps:
                if param.grad is None:
                    param.grad = torch.empty_like(param, dtype=gradient_dtype(param))
                targets.append(real(param.grad))
                sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)


class CopiedReduction(Reduction):
    """Gradients are copied into a buffer of the lane and back."""

    def __init__(self, index: int, bucket: Bucket, members: Sequence[Member], lane: Lane) -> None:
        super().__init__(index, bucket, members)
        self._lane = lane
        self._number = lane.enter(self.size)
        self._widened = gradient_dtype(self.params[0]).to_real() != lane.dtype
        self._scale = 1.0
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self._staged = [False] * len(self.params)

    def begin(self) -> None:
        self._staged = [False] * len(self.params)

    def adopt(self, member: int) -> None:
        self._staged[member] = False

    @torch.no_grad()
    def stage(self, member: int, scale: float) -> None:
        if self._buffer is None:
            self._buffer = self._lane.take(self._number, self)[: self.size]
            self._views = self.views(self._buffer)
        elif not any(self._staged):
            self._lane.take(self._number, self)
        grad, view = self.gradient(member), self._views[member]
        if grad is None:
            view.zero_()
        elif self._widened:
            view.copy_(grad)
        else:
            torch.mul(grad, scale, out=view)
        self._staged[member] = True

    @torch.no_grad()
    def launch(self, scale: float) -> None:
        for member, is_staged in enumerate(self._staged):
            if not is_staged:
                self.stage(member, scale)
        assert self._buffer is not None
        self._scale = scale
        self.write_flags(self._buffer[self.bucket.numel :])
        self._work = self.start_sum(self._buffer)
        self.drop()

    @torch.no_grad()
    def complete(self) -> None:
        if self._work is None:
            return
        wait(self._work, self.call, self.group)
        self._work = None
        assert self._buffer is not None
        if self._widened and any(self.keeps):
            self._buffer[: self.bucket.numel].mul_(self._scale)
        self.write_back(self._views, self._buffer[self.bucket.numel :])


class ViewedReduction(Reduction):
    """Gradients live in the bucket: each `grad` is a view of its flat memory, so nothing is kept twice.

    Only for members that are all kept. `lane` carries the sum when it needs a wider type than the gradients have.
    """

    def __init__(self, index: int, bucket: Bucket, members: Sequence[Member], lane: Lane) -> None:
        super().__init__(index, bucket, members)
        dtype = gradient_dtype(self.params[0]).to_real()
        self._flat = torch.empty(self.size, dtype=dtype, device=self.params[0].device)
        self._views = self.views(self._flat)
        self._lane = lane
        self._number = lane.enter(self.size) if lane.dtype != dtype else None
        self._scale = 1.0
        self._sum = self._flat

    @torch.no_grad()
    def adopt(self, member: int) -> None:
        param, view = self.params[member], self._views[member]
        grad = self.gradient(member)
        if grad is not None and grad.data_ptr() != view.data_ptr():
            view.copy_(grad)
            param.grad = torch.view_as_complex(view) if param.is_complex() else view

    @torch.no_grad()
    def launch(self, scale: float) -> None:
        for member, view in enumerate(self._views):
            if self.params[member].grad is None:
                view.zero_()
            else:
                self.adopt(member)
        self.write_flags(self._flat[self.bucket.numel :])
        self._scale = scale
        if self._number is None:
            self._flat[: self.bucket.numel].mul_(scale)
        else:
            self._sum = self._lane.take(self._number, self)[: self.size].copy_(self._flat)
        self._work = self.start_sum(self._sum)

    @torch.no_grad()
    def complete(self) -> None:
        if self._work is None:
            return
        wait(self._work, self.call, self.group)
        self._work = None
        if self._number is not None:
            self._flat.copy_(self._sum.mul_(self._scale))
            self._sum = self._flat
        present = self.present()
        if not all(present):
            for param, view, exists in zip(self.params, self._views, (self._flat[self.bucket.numel :] > 0).tolist()):
                if exists and param.grad is None:
                    param.grad = torch.view_as_complex(view) if param.is_complex() else view
