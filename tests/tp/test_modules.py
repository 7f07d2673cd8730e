"""Distributed linears, embeddings and layer norms against their twins: outputs, gradients, updated parameters."""

import pytest
import torch
from torch import nn

import smp
from smp import runtime
from smp.errors import PartitionError, StepError
from smp.nn import DistributedEmbedding, DistributedLayerNorm, DistributedLinear
from smp.tp.convert import convert
from smp.tp.shard import spec_of
from tests.harness import on_ranks
from tests.tp.twins import assert_trains_like_its_twin, config, square_loss, tp_group

STEPS = 3


def on_tp(**options):
    """Runs on `tp` ranks, `prescaled` or not, `launcher`: arguments of the test."""
    return on_ranks(
        lambda a: a["tp"],
        config=lambda a: config(a["tp"], a["prescaled"]),
        launcher=lambda a: a.get("launcher", "mpi"),
        **options,
    )


def both_modes(test):
    test = pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])(test)
    return pytest.mark.parametrize("tp", [1, 2, 4])(test)


def sgd(params):
    return torch.optim.SGD(params or [nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


def batches(shape, dtype=torch.float64, high=None):
    """Inputs for every rank and step; equal for all ranks where the batch is shared."""
    generator = torch.Generator().manual_seed(5)
    shared, size = runtime.get().config.prescaled_batch, tp_group().size

    def one():
        if high is not None:
            return torch.randint(high, shape, generator=generator)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return [[one()] * size if shared else [one() for _ in range(size)] for _ in range(STEPS)]


@both_modes
@on_tp()
def test_linear_equals_its_twin(tp, prescaled):
    """Cut along outputs and inputs, with and without bias, inputs of 1 to 4 dimensions."""
    for in_features, out_features in [(8, 16), (16, 8)]:
        for bias in (True, False):
            for shape in [(in_features,), (3, in_features), (2, 5, in_features), (4, 1, 3, in_features)]:
                torch.manual_seed(1)
                module = nn.Linear(in_features, out_features, bias, dtype=torch.float64)
                assert_trains_like_its_twin(module, batches(shape), make_optimizer=adam, expect=DistributedLinear)


@both_modes
@on_tp()
def test_linear_equals_its_twin_in_float32(tp, prescaled):
    """As above, at the precision that users train with."""
    for sizes in [(8, 16), (16, 8)]:
        module = nn.Linear(*sizes)
        given = batches((3, 5, sizes[0]), torch.float32)
        assert_trains_like_its_twin(module, given, make_optimizer=sgd, tolerance=1e-5)


@both_modes
@on_tp()
def test_linear_of_a_size_that_divides_one_way_is_cut_that_way(tp, prescaled):
    """7 outputs, 8 inputs, and the reverse."""
    for sizes, dim in [((8, 7), 1), ((7, 8), 0), ((4, 103), 1)]:
        module = nn.Linear(*sizes, dtype=torch.float64)
        split = assert_trains_like_its_twin(module, batches((3, sizes[0])), make_optimizer=sgd)
        if tp > 1:
            assert spec_of(split.weight).dim == dim


@both_modes
@on_tp()
def test_frozen_parameters_stay_frozen(tp, prescaled):
    """requires_grad is carried over, one by one."""
    for frozen in ("weight", "bias"):
        for sizes in [(8, 16), (16, 8)]:
            module = nn.Linear(*sizes, dtype=torch.float64)
            getattr(module, frozen).requires_grad_(False)
            assert_trains_like_its_twin(module, batches((3, sizes[0])), make_optimizer=sgd)


@both_modes
@on_tp()
def test_embedding_equals_its_twin(tp, prescaled):
    """Plain, with a padding row, with ids of 0 to 3 dimensions, counted by frequency."""
    for options in [{}, {"padding_idx": 3}, {"padding_idx": -1}, {"scale_grad_by_freq": True}]:
        for shape in [(), (6,), (2, 5), (2, 3, 4)]:
            torch.manual_seed(2)
            module = nn.Embedding(12, 8, dtype=torch.float64, **options)
            if shape == () and options.get("scale_grad_by_freq") and not prescaled:
                continue  # one id per rank: the twin counts in one batch
            given = batches(shape, high=12)
            assert_trains_like_its_twin(module, given, make_optimizer=adam, expect=DistributedEmbedding)


@both_modes
@on_tp()
def test_embedding_keeps_rows_within_max_norm(tp, prescaled):
    """Rows that are looked up are shortened in place, for several norms, also under no_grad."""
    for norm_type in (2.0, 1.0, float("inf")):
        torch.manual_seed(2)
        module = nn.Embedding(12, 8, max_norm=1.0, norm_type=norm_type, dtype=torch.float64)
        # torch adds 1e-7 to a norm that it computes in another order: 1e-9 holds for what it does with it.
        assert_trains_like_its_twin(module, batches((4, 5), high=12), make_optimizer=sgd, tolerance=1e-7)


@both_modes
@on_tp()
def test_embedding_cut_along_the_vocabulary_equals_its_twin(tp, prescaled):
    """An embedding_dim that does not divide; padding rows in the first and in the last part."""
    for padding_idx in (None, 0, 7):
        torch.manual_seed(2)
        module = nn.Embedding(8, 5, padding_idx=padding_idx, dtype=torch.float64)
        split = assert_trains_like_its_twin(module, batches((3, 4), high=8), make_optimizer=adam)
        if tp > 1:
            assert spec_of(split.weight).dim == 0


@pytest.mark.parametrize("prescaled", [False, True])
@pytest.mark.parametrize("tp", [2])
@on_tp()
def test_ids_out_of_range_are_refused(tp, prescaled):
    """On every rank, whichever way the table is cut."""
    for size in (4, 3):
        module = DistributedEmbedding(8, size)
        for wrong in (-1, 8):
            with pytest.raises(IndexError):
                module(torch.tensor([[1, wrong]]))


@both_modes
@on_tp()
def test_layer_norm_equals_its_twin(tp, prescaled):
    """One and two normalised dimensions, without shift, without scale and shift; a dimension that does not divide."""
    for shape, options in [
        ((8,), {}),
        ((3, 8), {}),
        ((8, 3), {}),
        ((8,), {"bias": False}),
        ((8,), {"elementwise_affine": False}),
    ]:
        module = nn.LayerNorm(shape, dtype=torch.float64, **options)
        for param in module.parameters():
            nn.init.normal_(param)
        given = batches((3, 4, *shape))
        assert_trains_like_its_twin(module, given, make_optimizer=sgd, expect=DistributedLayerNorm)


@pytest.mark.parametrize("launcher", ["torchrun"])
@pytest.mark.parametrize("prescaled", [False, True])
@pytest.mark.parametrize("tp", [2])
@on_tp()
def test_all_modules_equal_their_twins_under_torchrun(tp, prescaled, launcher):
    """The same over process groups, without MPI."""
    for sizes in [(8, 16), (16, 8)]:
        module = nn.Linear(*sizes, dtype=torch.float64)
        assert_trains_like_its_twin(module, batches((3, 2, sizes[0])), make_optimizer=adam)
    for sizes in [(12, 8), (12, 5)]:
        module = nn.Embedding(*sizes, dtype=torch.float64)
        assert_trains_like_its_twin(module, batches((3, 2), high=12), make_optimizer=adam)
    assert_trains_like_its_twin(nn.LayerNorm(8, dtype=torch.float64), batches((3, 8)), make_optimizer=sgd)


@both_modes
@on_tp()
def test_half_precision_modules_follow_their_twins(tp, prescaled):
    """bf16, within its rounding: sums of 16 terms, rounded at most four times (twice 2^-8 each in the worst case)."""
    for sizes in [(8, 16), (16, 8)]:
        module = nn.Linear(*sizes, dtype=torch.bfloat16)
        given = batches((4, sizes[0]), torch.bfloat16)
        assert_trains_like_its_twin(module, given[:1], make_optimizer=sgd, tolerance=4 * 2.0**-8)


class Autocast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            out = self.inner(x)
        assert out.dtype == torch.bfloat16
        return out.float()


@both_modes
@on_tp()
def test_linear_follows_its_twin_under_autocast(tp, prescaled):
    """The same dtypes come out, values within the rounding of bf16, as above."""
    for sizes in [(8, 16), (16, 8)]:
        module = Autocast(nn.Linear(*sizes))
        given = batches((4, sizes[0]), torch.float32)
        assert_trains_like_its_twin(module, given[:1], make_optimizer=sgd, tolerance=4 * 2.0**-8)


@pytest.mark.parametrize("prescaled", [False])
@pytest.mark.parametrize("tp", [2])
@on_tp()
def test_tp_ranks_with_different_batch_sizes_are_refused(tp, prescaled):
    """By every module that joins batches, on both ranks, with both shapes in the message."""
    modules = [nn.Linear(4, 8), nn.Linear(8, 4), nn.Embedding(8, 4), nn.Embedding(8, 3)]
    rank = tp_group().rank
    for module in modules:
        smp.set_tensor_parallelism(module)
        split = convert(module, runtime.get())
        x = torch.zeros(2 + rank, 6, dtype=torch.long) if hasattr(module, "num_embeddings") else None
        if x is None:
            x = torch.zeros(2 + rank, module.in_features)
        with pytest.raises(StepError, match="same shape"):
            split(x)


@pytest.mark.parametrize("prescaled", [False, True])
@pytest.mark.parametrize("tp", [2])
@on_tp()
def test_modules_made_directly_start_as_their_twins_under_the_same_seed(tp, prescaled):
    """tp_rank 0's values are cut for all: ranks seeded differently hold parts of one table."""
    torch.manual_seed(10 + tp_group().rank)
    made = [DistributedLinear(4, 8), DistributedLinear(8, 4, bias=False), DistributedEmbedding(8, 4, padding_idx=2)]
    torch.manual_seed(10)
    twins = [nn.Linear(4, 8), nn.Linear(8, 4, bias=False), nn.Embedding(8, 4, padding_idx=2)]
    with torch.no_grad():
        twins[2].weight.normal_(0, 0.02)
        twins[2].weight[2].zero_()
    for module, twin in zip(made[:2], twins):
        for param, whole in zip(module.parameters(), twin.parameters()):
            expected = spec_of(param).split(whole) if spec_of(param) else whole
            assert torch.equal(param, expected)
    assert made[2].weight.shape == (8, 2)
    assert made[2].weight[2].eq(0).all()
    assert 0.005 < made[2].weight.std() < 0.04
    norm = DistributedLayerNorm(8)
    assert norm.weight.tolist() == [1.0] * 4
    assert norm.bias.tolist() == [0.0] * 4
    given = torch.arange(16.0).view(4, 4)
    assert torch.equal(DistributedEmbedding(4, 4, _weight=given).weight, given.chunk(2, 1)[tp_group().rank])


@pytest.mark.parametrize("prescaled", [False])
@pytest.mark.parametrize("tp", [2])
@on_tp()
def test_what_cannot_be_cut_is_refused_by_name(tp, prescaled):
    """Made directly there is no module to leave whole."""
    for make, message in [
        (lambda: DistributedLinear(3, 5), "out_features 5, in_features 3"),
        (lambda: DistributedLinear(4, 5, split="out"), "out_features 5"),
        (lambda: DistributedEmbedding(5, 3), "embedding_dim 3, num_embeddings 5"),
        (lambda: DistributedEmbedding(4, 4, sparse=True), "sparse"),
        (lambda: DistributedEmbedding(4, 3, max_norm=1.0), "embedding_dim 3"),
        (lambda: DistributedEmbedding(4, 4, max_norm=1.0, split="vocabulary"), "max_norm"),
        (lambda: DistributedLayerNorm(5), "normalized_shape"),
    ]:
        with pytest.raises(PartitionError, match=message):
            make()


@pytest.mark.parametrize("prescaled", [False, True])
@pytest.mark.parametrize("tp", [2])
@on_tp()
def test_no_grad_and_eval_give_the_same_outputs(tp, prescaled):
    """Evaluation goes the same way."""
    module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).double()
    x = batches((3, 4))[0][tp_group().rank]
    expected = module(x)
    smp.set_tensor_parallelism(module)
    module = convert(module, runtime.get()).eval()
    with torch.no_grad():
        torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(square_loss(module, x, 0), square_loss(lambda _: expected, None, 0))
