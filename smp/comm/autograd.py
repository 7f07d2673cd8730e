"""Collectives that gradients flow through, in dual pairs: the backward of one is the forward of the other.

Two kinds of gradient meet here. With **joined batches** each rank of the group computes its own loss from its own part
of the batch, and the loss that counts is their sum: the gradient of a value that several ranks used is the sum of
theirs. With a **shared batch** (`prescaled_batch`) all ranks compute one and the same loss redundantly: a value that is
equal on all ranks has a gradient that is equal on all ranks; only where each rank saw its part alone is it summed.

    joined batches      gather_batch  <->  scatter_sum                all_to_all  <->  all_to_all
    shared batch        copy_in       <->  sum_out                    own_slice   <->  gather_slices

All are the identity on a group of one. None saves a tensor for backward.
"""

from typing import Any

import torch
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
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return collectives.all_gather(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.chunk(ctx.group.size, ctx.dim)[ctx.group.rank].contiguous(), None, None


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


def gather_slices(x: Tensor, group: Group, dim: int) -> Tensor:
    """[.., n, ..] own slice -> [.., size * n, ..] whole, equal on every rank.

    Forward: all_gather along `dim`. Dual: own_slice; the gradient of the whole is equal on every rank = own slice
    of it. Saves nothing.
    """
    return x if group.size == 1 else _GatherSlices.apply(x, group, dim)
