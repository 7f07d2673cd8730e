"""Collectives that gradients flow through, in dual pairs: the backward of one is the forward of the other.

Two kinds of gradient meet here. With **joined batches** each rank of the group computes its own loss from its own part
of the batch, and the loss that counts is their sum: the gradient of a value that several ranks used is the sum of
theirs. With a **shared batch** (`prescaled_batch`) all ranks compute one and the same loss redundantly: a value that is
equal on all ranks has a gradient that is equal on all ranks; only where each rank saw its part alone is it summed.

    joined batches      gather_batch  <->  scatter_sum                all_to_all  <->  all_to_all
    shared batch        copy_in       <->  sum_out                    own_slice   <->  gather_slices

Inside a transformer (tp/region.py) a joined batch that every rank holds whole is a batch that all share.

All are the identity on a group of one. None but those with a linear in them save a tensor for backward.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from smp.comm import collectives
from smp.groups import Group

# ctx of an autograd Function has no useful type.


class _GatherBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, checked: bool | str) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return collectives.all_gather(x, group, dim, checked=checked)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return collectives.reduce_scatter(grad, ctx.group, ctx.dim), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return collectives.reduce_scatter(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return collectives.all_gather(grad, ctx.group, ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split_dim: int, concat_dim: int, checked: bool | str) -> Tensor:
        ctx.group, ctx.split_dim, ctx.concat_dim = group, split_dim, concat_dim
        return collectives.all_to_all(x, group, split_dim, concat_dim, checked=checked)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return collectives.all_to_all(grad, ctx.group, ctx.concat_dim, ctx.split_dim), None, None, None, None


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.all_reduce(grad, ctx.group), None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return collectives.all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _OwnSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return x.chunk(group.size, dim)[group.rank].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return collectives.all_gather(grad, ctx.group, ctx.dim), None, None


class _GatherSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, checked: bool | str) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return collectives.all_gather(x, group, dim, checked=checked)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.chunk(ctx.group.size, ctx.dim)[ctx.group.rank].contiguous(), None, None, None


_linear = F.linear


def _weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, dim: int, checked: bool | str
    ) -> Tensor:
        ctx.group, ctx.dim = group, dim
        ctx.save_for_backward(x, weight)
        return F.linear(collectives.all_gather(x, group, dim, checked=checked), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        # Each message travels while a product is computed.
        gathered = collectives.start_all_gather(x, ctx.group, ctx.dim) if need_weight else None
        partial = grad @ weight if need_x else None
        whole = gathered() if gathered is not None else None
        scattered = collectives.start_reduce_scatter(partial, ctx.group, ctx.dim) if partial is not None else None
        grad_weight = _weight_gradient(whole, grad) if whole is not None else None
        grad_bias = grad.flatten(0, -2).sum(0) if need_bias else None
        return scattered() if scattered is not None else None, grad_weight, grad_bias, None, None, None


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, group: Group, dim: int
    ) -> Tensor:
        ctx.group, ctx.dim = group, dim
        ctx.save_for_backward(part, weight)
        return F.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        need_whole, _, need_weight, need_bias, *_ = ctx.needs_input_grad
        gathered = collectives.start_all_gather(part, ctx.group, ctx.dim) if need_weight else None
        grad_whole = grad @ weight if need_whole else None
        grad_weight = _weight_gradient(gathered(), grad) if gathered is not None else None
        grad_bias = grad.flatten(0, -2).sum(0) if need_bias else None
        return grad_whole, None, grad_weight, grad_bias, None, None


class _CopyInLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        finish = collectives.start_all_reduce(grad @ weight, ctx.group) if need_x else None
        grad_weight = _weight_gradient(x, grad) if need_weight else None
        grad_bias = grad.flatten(0, -2).sum(0) if need_bias else None
        return finish() if finish is not None else None, grad_weight, grad_bias, None


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, size: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.size = size
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *(None if grad is None else grad / ctx.size for grad in grads)


class _CopyInAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat = collectives.all_reduce(torch.cat([grad.reshape(-1) for grad in grads]), ctx.group)
        parts = flat.split([grad.numel() for grad in grads])
        return None, *(part.view(grad.shape).to(grad.dtype) for part, grad in zip(parts, grads))


# Joined batches


def gather_batch(x: Tensor, group: Group, dim: int = 0, *, checked: bool | str = False) -> Tensor:
    """[.., n, ..] own part -> [.., size * n, ..] joined, equal on every rank.

    Forward: all_gather along `dim`. Dual: scatter_sum; each rank's gradient of the joined tensor is partial, own part =
    reduce_scatter. Saves nothing. `checked`: as in collectives.all_gather.
    """
    return x if group.size == 1 else _GatherBatch.apply(x, group, dim, checked)


def scatter_sum(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """[.., size * n, ..] partial sums of the joined tensor -> [.., n, ..] own part of the sum.

    Forward: reduce_scatter along `dim`. Dual: gather_batch; every rank's partial sum gets the whole gradient =
    all_gather. Saves nothing.
    """
    return x if group.size == 1 else _ScatterSum.apply(x, group, dim)


def all_to_all(x: Tensor, group: Group, split_dim: int, concat_dim: int, *, checked: bool | str = False) -> Tensor:
    """[.., size * a, .., b, ..] -> [.., a, .., size * b, ..]: own batch, all features <-> all batches, own features.

    Forward: all_to_all. Dual: all_to_all with the two dimensions exchanged. Saves nothing. `checked`: as in
    collectives.all_to_all.
    """
    return x if group.size == 1 else _AllToAll.apply(x, group, split_dim, concat_dim, checked)


# A batch that all ranks share


def copy_in(x: Tensor, group: Group) -> Tensor:
    """[s] equal on every rank -> [s], the same, about to be used with a different shard on each rank.

    Forward: identity. Dual: sum_out; each rank's gradient is partial = all_reduce. Saves nothing.
    """
    return x if group.size == 1 else _CopyIn.apply(x, group)


def sum_out(x: Tensor, group: Group) -> Tensor:
    """[s] partial sums -> [s] the sum, equal on every rank.

    Forward: all_reduce. Dual: copy_in; the gradient is whole and equal on every rank already = identity. Saves nothing.
    """
    return x if group.size == 1 else _SumOut.apply(x, group)


def own_slice(x: Tensor, group: Group, dim: int) -> Tensor:
    """[.., size * n, ..] equal on every rank -> [.., n, ..] own slice along `dim`.

    Forward: slice. Dual: gather_slices; the gradient of the whole, equal on every rank = all_gather. Saves nothing.
    """
    return x if group.size == 1 else _OwnSlice.apply(x, group, dim)


def gather_slices(x: Tensor, group: Group, dim: int, *, checked: bool | str = False) -> Tensor:
    """[.., n, ..] own slice -> [.., size * n, ..] whole, equal on every rank.

    Forward: all_gather along `dim`. Dual: own_slice; the gradient of the whole is equal on every rank = own slice
    of it. Saves nothing. `checked`: as in collectives.all_gather.
    """
    return x if group.size == 1 else _GatherSlices.apply(x, group, dim, checked)


# Inside a transformer


def gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, dim: int, *, checked: bool | str = False
) -> Tensor:
    """[.., n, .., in] own part, weight [out_k, in], bias [out_k] -> [.., size * n, .., out_k]: F.linear of all parts.

    Forward: all_gather of x along `dim`, then own columns. Dual: the gradient of the gathered x is partial, own part =
    reduce_scatter; for the weight's gradient x is gathered again. Saves own part of x. `checked`: as in
    collectives.all_gather.
    """
    if group.size == 1:
        return F.linear(x, weight, bias)
    with _cast_for_linear(x, weight, bias) as (x, weight, bias):
        return _GatherLinear.apply(x, weight, bias, group, dim, checked)


def gathered_linear(whole: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, group: Group, dim: int) -> Tensor:
    """What gather_batch made of own `part`, [.., size * n, .., in], weight [out_k, in], bias [out_k] -> F.linear of it,
    for several that share one gather_batch.

    Backward: `part` is gathered again for the weight's gradient. Saves `part`, to which no gradient flows.
    """
    if group.size == 1:
        return F.linear(whole, weight, bias)
    with _cast_for_linear(whole, weight, bias) as (whole, weight, bias):
        return _GatheredLinear.apply(whole, part.detach().to(whole.dtype), weight, bias, group, dim)


@contextmanager
def _cast_for_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """What autocast does to the operands of F.linear; off inside, since it would reach forward but not backward."""
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        yield x, weight, bias
        return
    dtype = torch.get_autocast_dtype(x.device.type)
    x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        yield x, weight, bias


def copy_in_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """[.., in] equal on every rank, weight [out_k, in], bias [out_k] -> [.., out_k]: F.linear of copy_in of x.

    Forward: own columns. Dual: the gradient of x is partial = all_reduce, while which own gradients of weight and bias
    are computed. Saves x.
    """
    if group.size == 1 or F.linear is not _linear or x.is_meta or torch.is_autocast_enabled(x.device.type):
        return F.linear(copy_in(x, group), weight, bias)  # something stands in for it: weights are put off
    return _CopyInLinear.apply(x, weight, bias, group)


def repeated(tensors: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """The same tensors, each equal on every rank and used by each rank for the same joined batch.

    Forward: identity. Backward: every rank computes the gradient of the whole joined batch; its share of it, 1 / size,
    so that the sum over the ranks counts it once. Saves nothing.
    """
    return tuple(tensors) if group.size == 1 or not tensors else _Repeated.apply(group.size, *tensors)


def copy_in_all(tensors: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """copy_in of several tensors, with one message in backward."""
    return tuple(tensors) if group.size == 1 or not tensors else _CopyInAll.apply(group, *tensors)
