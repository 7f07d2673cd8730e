"""Cross entropy of split logits against torch's of the whole ones: losses and gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import smp
from smp import runtime
from smp.comm import collectives
from smp.nn import vocabulary_parallel_cross_entropy
from smp.tp import cross_entropy
from tests.harness import on_ranks
from tests.tp.twins import config, tp_group

VOCABULARY = 11
SHAPES = [(6,), (2, 3), (2, 1, 4)]


def on_tp(**options: Any) -> Any:
    return on_ranks(
        lambda a: a["tp"],
        config=lambda a: config(a["tp"], a["prescaled"]),
        launcher=lambda a: a.get("launcher", "mpi"),
        **options,
    )


def both_modes(test: Any) -> Any:
    test = pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])(test)
    return pytest.mark.parametrize("tp", [1, 2, 4])(test)


def batches(shape: tuple[int, ...], classes: int, scale: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    """Whole logits and targets for every rank, some targets to be ignored; one for all where the batch is shared."""
    generator = torch.Generator().manual_seed(3)

    def one() -> tuple[Tensor, Tensor]:
        target = torch.randint(classes, shape, generator=generator)
        target.view(-1)[1] = -100
        return torch.randn(*shape, classes, generator=generator, dtype=torch.float64) * scale, target

    if runtime.get().config.prescaled_batch:
        return [one()] * tp_group().size
    return [one() for _ in range(tp_group().size)]


def own_columns(whole: Tensor) -> tuple[Tensor, int]:
    """This rank's part of the logits, padded to a multiple of the ranks with what must not count; where it starts."""
    group = tp_group()
    width = -(-whole.shape[-1] // group.size)
    padded = F.pad(whole, (0, width * group.size - whole.shape[-1]), value=50.0)
    return padded[..., group.rank * width : (group.rank + 1) * width].clone(), group.rank * width


def weighted(losses: Tensor) -> Tensor:
    """A different weight for each place."""
    return (losses * torch.linspace(0.5, 1.5, losses.numel(), dtype=losses.dtype).view(losses.shape)).sum()


def assert_equals_torch(
    parts: list[tuple[Tensor, Tensor]], tolerance: float = 1e-9, dtype: torch.dtype = torch.float64, **options: Any
) -> None:
    """This rank's loss, and the gradient of its logits, from everybody's losses where batches are joined."""
    group = tp_group()
    shared = runtime.get().config.prescaled_batch
    used = parts[:1] if shared else parts
    leaves = [logits.to(dtype).double().requires_grad_() for logits, _ in used]
    expected = [
        F.cross_entropy(x.movedim(-1, 1) if x.dim() > 2 else x, target, **options)
        for x, (_, target) in zip(leaves, used)
    ]
    sum(weighted(loss) * (number + 1) for number, loss in enumerate(expected)).backward()

    own = 0 if shared else group.rank
    logits, start = own_columns(torch.cat([leaf.detach() for leaf in leaves]))
    logits = logits.to(dtype).requires_grad_()
    loss = vocabulary_parallel_cross_entropy(logits, parts[own][1], num_classes=parts[0][0].shape[-1], **options)
    torch.testing.assert_close(loss.double(), expected[own], rtol=tolerance, atol=tolerance)
    (weighted(loss) * (own + 1)).backward()
    gradient = torch.cat([leaf.grad for leaf in leaves])[..., start : start + logits.shape[-1]]
    assert logits.grad is not None and logits.grad.dtype == dtype
    assert not logits.grad[..., gradient.shape[-1] :].any(), "padding has a gradient"
    found = logits.grad[..., : gradient.shape[-1]].double()
    torch.testing.assert_close(found, gradient, rtol=tolerance, atol=tolerance)


@both_modes
@on_tp()
def test_losses_and_gradients_are_those_of_torch(tp, prescaled):
    """Places in one to three dimensions, every reduction, smoothing, vocabularies that divide and that do not, any
    layout in memory."""
    for shape in SHAPES:
        for reduction in ("none", "mean", "sum"):
            for smoothing in (0.0, 0.1, 1.0):
                for classes in (VOCABULARY, 12):
                    options = {"reduction": reduction, "label_smoothing": smoothing}
                    assert_equals_torch(batches(shape, classes), **options)
    if prescaled:  # logits whose memory is laid out another way, as those of a transposed product
        whole, target = batches((4, 3), 12)[0]
        strided = own_columns(whole)[0].transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
        plain = own_columns(whole)[0].requires_grad_()
        for logits in (strided, plain):
            vocabulary_parallel_cross_entropy(logits, target).backward()
        torch.testing.assert_close(strided.grad, plain.grad)
    parts = [(logits, target.clamp_min(3)) for logits, target in batches((6,), VOCABULARY)]
    assert_equals_torch(parts, ignore_index=3)


@both_modes
@on_tp()
def test_ranks_that_hold_nothing_but_padding_take_part(tp, prescaled):
    """Five classes over four ranks: two, two, one and none."""
    for smoothing in (0.0, 0.1):
        assert_equals_torch(batches((6,), 5), label_smoothing=smoothing)


@both_modes
@on_tp()
def test_extreme_logits_do_not_overflow(tp, prescaled):
    """Exponentials of thousands are infinite; only differences to the largest logit, wherever it lies, may be taken."""
    for scale in (1e3, 1e5, 1e30):
        assert_equals_torch(batches((2, 3), VOCABULARY, scale))
    parts = [(logits, target.clamp_min(1)) for logits, target in batches((2, 3), VOCABULARY)]
    for logits, _ in parts:
        logits[..., 0] = -float("inf")  # a class that is ruled out
    assert_equals_torch(parts)


@both_modes
@on_tp()
def test_half_precision_logits_are_computed_with_in_float32(tp, prescaled):
    """The loss of the rounded logits is exact to float32; the gradient is rounded once (2^-8, 2^-11 relative)."""
    for dtype, rounding in [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)]:
        parts = batches((2, 3), VOCABULARY)
        assert_equals_torch(parts, rounding, dtype)
        group = tp_group()
        whole, target = parts[0 if prescaled else group.rank]
        joined = whole if prescaled else torch.cat([logits for logits, _ in parts])
        loss = vocabulary_parallel_cross_entropy(own_columns(joined)[0].to(dtype), target, num_classes=VOCABULARY)
        expected = F.cross_entropy(whole.to(dtype).double().flatten(0, 1), target.flatten())
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


@both_modes
@on_tp()
def test_a_batch_without_a_target_that_counts_is_as_in_torch(tp, prescaled):
    """The mean over nothing is NaN, the sum is zero; a rank with such a batch does not disturb the others."""
    logits, target = batches((2, 3), VOCABULARY)[0 if prescaled else tp_group().rank]
    joined = logits if prescaled else torch.cat([logits for logits, _ in batches((2, 3), VOCABULARY)])
    own, _ = own_columns(joined)
    if prescaled or tp_group().rank == tp - 1:
        target = torch.full_like(target, -100)
    sums = vocabulary_parallel_cross_entropy(own, target, num_classes=VOCABULARY, reduction="sum")
    mean = vocabulary_parallel_cross_entropy(own, target, num_classes=VOCABULARY)
    for got, reduction in [(sums, "sum"), (mean, "mean")]:
        expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=reduction)
        torch.testing.assert_close(got, expected, equal_nan=True)


@both_modes
@on_tp()
def test_wrong_arguments_are_refused_by_every_rank(tp, prescaled):
    """A target that is no class would otherwise count as one whose logit is zero."""
    rows = 3 if prescaled else 3 * tp
    logits = torch.zeros(rows, 4)
    for wrong in (-1, 4 * tp, -101):
        target = torch.tensor([0, wrong, 1])
        with pytest.raises(smp.SmpError, match=f"target {wrong} is no class: there are {4 * tp}"):
            vocabulary_parallel_cross_entropy(logits, target)
    target = torch.zeros(3, dtype=torch.long)
    with pytest.raises(smp.SmpError, match="target 3 is no class: there are 3"):
        vocabulary_parallel_cross_entropy(logits, target + 3, num_classes=3)
    for arguments, message in [
        ((logits, target.int(), {}), "int64"),
        ((logits, target[:2], {}), r"needs logits of shape"),
        ((logits[0], target[0], {}), r"needs logits of shape"),
        ((logits, target, {"reduction": "average"}), "reduction is 'average'"),
        ((logits, target, {"label_smoothing": 1.5}), "label_smoothing is 1.5"),
        ((logits, target, {"num_classes": 4 * tp + 1}), f"num_classes is {4 * tp + 1}"),
    ]:
        *given, options = arguments
        with pytest.raises(smp.SmpError, match=message):
            vocabulary_parallel_cross_entropy(*given, **options)


@pytest.mark.parametrize("tp", [2])
@pytest.mark.parametrize("prescaled", [False, True])
@on_tp()
def test_rows_are_worked_on_in_chunks(tp, prescaled):
    """Of one row and of three, the last chunk being smaller."""
    usual = cross_entropy._CHUNK
    try:
        for chunk in (1, 3 * VOCABULARY):
            cross_entropy._CHUNK = chunk
            for dtype, tolerance in [(torch.float64, 1e-9), (torch.bfloat16, 2.0**-8)]:
                assert_equals_torch(batches((2, 5), VOCABULARY), tolerance, dtype, label_smoothing=0.1)
    finally:
        cross_entropy._CHUNK = usual


@pytest.mark.parametrize("tp", [2])
@pytest.mark.parametrize("prescaled", [False, True])
@on_tp()
def test_logits_are_never_gathered(tp, prescaled):
    """Sent are two numbers for each place; with joined batches the targets too, and a gradient each in the backward."""
    sent: list[int] = []
    original = collectives.all_gather

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sent.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    collectives.all_gather = counting
    try:
        places = 6
        joined = places if prescaled else tp * places
        logits = torch.zeros(joined, 50, requires_grad=True)
        loss = vocabulary_parallel_cross_entropy(logits, torch.arange(places))
        assert sent == ([] if prescaled else [places]) + [2 * joined]
        loss.backward()
        assert sent[1 if prescaled else 2 :] == ([] if prescaled else [places])
    finally:
        collectives.all_gather = original


@pytest.mark.parametrize("launcher", ["torchrun"])
@pytest.mark.parametrize("prescaled", [False, True])
@pytest.mark.parametrize("tp", [2])
@on_tp()
def test_the_loss_does_not_depend_on_the_launcher(tp, prescaled, launcher):
    """Over process groups, without MPI."""
    assert_equals_torch(batches((2, 3), VOCABULARY), label_smoothing=0.1)
