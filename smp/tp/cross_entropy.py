"""Cross entropy of logits whose vocabulary is split over the tensor-parallel group, without gathering them.

    rank 0: logits [.., 0 .. V/tp)        log of the sum of exponentials, --+
                                          target's logit, of its own part   |-> one all_gather of two numbers
    rank 1: logits [.., V/tp .. 2V/tp)    the same                        --+   for each place -> losses

The log of a sum of exponentials is itself one of a sum over the parts' logs, so the parts' largest logits need no
message of their own. The gradient of a rank's logits, softmax - target, needs no message at all.
(Vocabulary-parallel loss: Shoeybi et al., "Megatron-LM", 2019, which takes three all_reduces.)
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smp import runtime
from smp.comm import collectives
from smp.errors import StepError, UsageError
from smp.groups import Group
from smp.topology import CommGroup

Reduction = Literal["none", "mean", "sum"]
# Logits worked on at a time: few enough for a cache (measured: a third of the forward's time), and for what is computed
# in float32 to take no memory that counts; on other devices enough for a kernel to be worth its start.
_CHUNK, _CHUNK_ON_DEVICE = 1 << 20, 1 << 26


def vocabulary_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    num_classes: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """What `F.cross_entropy` computes from whole logits, from this rank's part of them. Collective over TP_GROUP.

    With `prescaled_batch` all tp_ranks pass the same target and get the same loss. Otherwise each passes the target of
    its own batch, while `logits` are those of the joined batch, as after a column-parallel head; it gets the losses of
    its own batch. Half-precision logits are computed with in float32, which is then the dtype of the loss.

    Args:
        logits: [M, .., V/tp], the part number tp_rank of the vocabulary; M = N, or tp * N where batches are joined.
        target: [N, ..], int64 class numbers in the whole vocabulary.
        num_classes: V, where the vocabulary was padded to a multiple of tp: later columns take no part. None: all do.
        ignore_index: target of places that do not count.
        reduction: "none": losses [N, ..]; "sum"; "mean": over the places that count (NaN when there are none).
        label_smoothing: as in torch, 0 to 1.

    Raises:
        UsageError: an argument has the wrong type or range.
        StepError: shapes that do not fit; a target that is no class. (On CUDA, where finding out would make the host
            wait for the device, the loss and the gradients of such a place are NaN.)
    """
    group = runtime.get().group(CommGroup.TP_GROUP)
    joined = not runtime.get().config.prescaled_batch and group.size > 1
    width = logits.shape[-1]
    classes = width * group.size if num_classes is None else num_classes
    if not 0 < classes <= width * group.size:
        raise UsageError(f"num_classes is {classes}, but {group.size} parts of {width} columns were given")
    start = group.rank * width
    columns = Columns(start, max(min(classes - start, width), 0), classes)
    return cross_entropy_of_part(
        *(logits, target, columns, group),
        joined=joined,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


@dataclass(frozen=True)
class Columns:
    """Which classes a rank's logits are of: `num` from `start` on, of `classes`. Columns after `num` are padding."""

    start: int
    num: int
    classes: int


def cross_entropy_of_part(
    logits: Tensor,
    target: Tensor,
    columns: Columns,
    group: Group,
    *,
    joined: bool,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """As `vocabulary_parallel_cross_entropy`, for parts that need not have the same width.

    Args:
        columns: what this rank's logits are of.
        joined: whether logits are those of the joined batch, target and result of the rank's own.
    """
    _check(logits, target, reduction, label_smoothing, group.size if joined else 1)
    losses = _CrossEntropy.apply(logits, target, columns, group, joined, ignore_index, label_smoothing)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    """logits [M, .., V/tp], target [N, ..] -> losses [N, ..], zero where the target is to be ignored.

    Saves the logits as they are and one number for each place. Where batches are joined the backward gathers the
    gradients of the losses: every rank needs those of all places for its columns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        columns: Columns,
        group: Group,
        joined: bool,
        ignore_index: int,
        smoothing: float,
    ) -> Tensor:
        whole = collectives.all_gather(target, group, checked="the loss") if joined else target
        x, place = logits.flatten(0, -2), whole.flatten()
        counts = place != ignore_index
        wrong = counts & ((place < 0) | (place >= columns.classes))
        _refuse_on_cpu(place, wrong, columns.classes)
        own = counts & (place >= columns.start) & (place < columns.start + columns.num)
        index = torch.where(own, place - columns.start, 0).unsqueeze(1)
        sums, picked, *uniform = collectives.all_gather(_of_part(x, index, own, columns, smoothing), group).unbind(1)
        total = torch.logsumexp(sums, 0).masked_fill_(wrong, float("nan"))
        losses = total - picked.sum(0)
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (total - uniform[0].sum(0) / columns.classes)
        losses = losses.masked_fill_(~counts, 0).view(whole.shape)
        ctx.save_for_backward(logits, index, own, counts, total)
        ctx.columns, ctx.group, ctx.joined, ctx.smoothing = columns, group, joined, smoothing
        return losses.chunk(group.size)[group.rank].contiguous() if joined else losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, index, own, counts, total = ctx.saved_tensors
        columns: Columns = ctx.columns
        x = logits.flatten(0, -2)
        scale = collectives.all_gather(grad, ctx.group) if ctx.joined else grad
        scale = scale.reshape(-1).masked_fill(~counts, 0).unsqueeze(1)
        picked = (ctx.smoothing - 1) * scale * own.unsqueeze(1)
        result = torch.empty_like(x) if columns.num == x.shape[1] else torch.zeros_like(x)
        for rows in _chunks(x):
            piece = (x[rows, : columns.num] - total[rows].unsqueeze(1)).exp_()  # in the dtype of `total`
            if ctx.smoothing:
                piece -= ctx.smoothing / columns.classes
            piece *= scale[rows]
            if columns.num:
                at = index[rows]  # one for each row: no addition, whose order might vary on a device
                piece.scatter_(1, at, piece.gather(1, at) + picked[rows])
            result[rows, : columns.num] = piece
        return result.reshape(logits.shape), None, None, None, None, None, None


def _of_part(x: Tensor, index: Tensor, own: Tensor, columns: Columns, smoothing: float) -> Tensor:
    """What the other ranks have to know, [1, 2 or 3, M]: log of the sum of exponentials, the target's logit (zero where
    it is another rank's), and with smoothing the sum of all logits."""
    x = x[:, : columns.num]
    wide = torch.promote_types(x.dtype, torch.float32)
    picked = x.gather(1, index).squeeze(1).to(wide) if columns.num else x.new_zeros(len(x), dtype=wide)
    numbers = [torch.cat([torch.logsumexp(x[rows].to(wide), 1) for rows in _chunks(x)]), picked.masked_fill(~own, 0)]
    if smoothing:
        numbers.append(x.sum(1, dtype=wide))
    return torch.stack(numbers).unsqueeze(0)


def _chunks(x: Tensor) -> list[slice]:
    """Which rows of [M, V] to work on at a time."""
    size = _CHUNK if x.device.type == "cpu" else _CHUNK_ON_DEVICE
    num = max(size // max(x.shape[1], 1), 1)
    return [slice(start, start + num) for start in range(0, max(len(x), 1), num)]


def _refuse_on_cpu(place: Tensor, wrong: Tensor, classes: int) -> None:
    if place.device.type == "cpu" and not collectives.is_structure(place) and bool(wrong.any()):
        raise StepError(
            f"cross entropy: target {int(place[wrong][0])} is no class: there are {classes}, numbered from 0 "
            "(places that shall not count have ignore_index)"
        )


def _check(logits: Tensor, target: Tensor, reduction: str, smoothing: float, parts: int) -> None:
    if reduction not in ("none", "mean", "sum"):
        raise UsageError(f"reduction is {reduction!r}; it can be 'none', 'mean' or 'sum'")
    if not 0 <= smoothing <= 1:
        raise UsageError(f"label_smoothing is {smoothing}; it must be between 0 and 1")
    if target.dtype != torch.int64:
        raise UsageError(f"targets are class numbers, of dtype int64; got {target.dtype}")
    shape = tuple(target.shape)
    if shape:
        shape = (shape[0] * parts, *shape[1:])
    if not shape or tuple(logits.shape[:-1]) != shape:
        joined = f" from each of {parts} ranks, whose batches are joined," if parts > 1 else ""
        raise StepError(
            f"cross entropy: a target of shape {tuple(target.shape)}{joined} needs logits of shape "
            f"{(*shape, 'classes of this rank') if shape else '(batch, .., classes of this rank)'}; got "
            f"{tuple(logits.shape)}"
        )
