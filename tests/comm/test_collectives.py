"""Tensor collectives and their duals, against the one-process program that is mathematically equal."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from smp import runtime
from smp.comm import autograd, collectives
from smp.errors import CommError, StepError
from smp.topology import CommGroup
from tests.harness import on_ranks

LAUNCHERS = ["mpi", "torchrun"]
TP = {"tensor_parallel_degree": 4, "ddp": True}
TP2 = {"tensor_parallel_degree": 2, "ddp": True}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]


def tp_group():
    return runtime.get().group(CommGroup.TP_GROUP)


def inputs(size, shape, dtype=torch.float64, seed=0):
    """The same list of tensors, one for each rank, on every rank."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(size)]
    return [(value * 4).round().to(dtype) for value in values]  # exact in every dtype


@pytest.mark.parametrize("launcher", LAUNCHERS)
@on_ranks(4, config=TP, launcher=lambda arguments: arguments["launcher"])
def test_collectives_compute_what_their_contracts_say(launcher):
    """Every collective, every kind of dtype, along every dimension, on contiguous and on transposed tensors."""
    group = tp_group()
    for dtype in DTYPES:
        xs = inputs(4, (4, 8), dtype)
        for make in (lambda x: x, lambda x: x.t().contiguous().t()):
            x = make(xs[group.rank])
            before = x.clone()
            total = torch.stack(xs).sum(0)
            assert torch.equal(collectives.all_reduce(x, group), total)
            assert torch.equal(collectives.all_reduce(x, group, "max"), torch.stack(xs).amax(0))
            assert torch.equal(collectives.all_reduce(x, group, "min"), torch.stack(xs).amin(0))
            for dim in (0, 1, -1):
                assert torch.equal(collectives.all_gather(x, group, dim), torch.cat(xs, dim))
                assert torch.equal(collectives.all_gather(x, group, dim, checked=True), torch.cat(xs, dim))
                assert torch.equal(collectives.reduce_scatter(x, group, dim), total.chunk(4, dim)[group.rank])
                for concat_dim in (0, 1):
                    expected = torch.cat([other.chunk(4, dim)[group.rank] for other in xs], concat_dim)
                    assert torch.equal(collectives.all_to_all(x, group, dim, concat_dim), expected)
            for source in range(4):
                assert torch.equal(collectives.broadcast(x, group, source), xs[source])
            assert torch.equal(x, before)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@on_ranks(2, config=TP2, launcher=lambda arguments: arguments["launcher"])
def test_odd_tensors_travel(launcher):
    """Scalars, empty tensors, bools, complex numbers, sizes that do not divide, 3 MB."""
    group = tp_group()
    other = 1 - group.rank
    assert collectives.all_reduce(torch.tensor(float(group.rank)), group).item() == 1.0
    assert collectives.all_reduce(torch.full((5,), 1.5, dtype=torch.bfloat16), group).tolist() == [3.0] * 5
    assert collectives.all_gather(torch.empty(0, 3), group).shape == (0, 3)
    assert collectives.all_to_all(torch.empty(0, 4), group, 1, 0).shape == (0, 2)
    assert collectives.reduce_scatter(torch.empty(0, 4), group).shape == (0, 4)
    flags = torch.tensor([bool(group.rank), True])
    assert collectives.all_gather(flags, group).tolist() == [False, True, True, True]
    assert collectives.all_gather(torch.tensor([complex(0, 1)]).conj(), group).tolist() == [complex(0, -1)] * 2
    assert collectives.all_reduce(torch.ones(2, requires_grad=True), group).tolist() == [2.0, 2.0]
    number = torch.tensor([complex(1, group.rank)])
    assert collectives.broadcast(number, group, 1).tolist() == [complex(1, 1)]
    big = torch.arange(800_000, dtype=torch.float32) + group.rank
    assert torch.equal(collectives.all_reduce(big, group), 2 * torch.arange(800_000, dtype=torch.float32) + 1)
    assert torch.equal(collectives.all_gather(big, group)[other * 800_000 :][:3], torch.arange(3.0) + other)
    with pytest.raises(CommError, match="does not divide by 2"):
        collectives.reduce_scatter(torch.zeros(3, 2), group)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("size", [2, 4])
@on_ranks(
    lambda arguments: arguments["size"],
    config=lambda arguments: {**TP, "tensor_parallel_degree": arguments["size"]},
    launcher=lambda arguments: arguments["launcher"],
)
def test_several_may_travel_at_a_time(launcher, size):
    """Small and large ones, ended in another order than begun; what is given is not changed."""
    group = tp_group()
    for rows in (1, 40_000):
        for dtype in (torch.float32, torch.bfloat16):
            xs = inputs(size, (rows * size, 4), dtype)
            total = torch.stack(xs).sum(0)
            x, before = xs[group.rank], xs[group.rank].clone()
            reduced, gathered = collectives.start_all_reduce(x, group), collectives.start_all_gather(x, group, 1)
            scattered, again = collectives.start_reduce_scatter(x, group), collectives.start_all_reduce(x, group, "max")
            assert torch.equal(again(), torch.stack(xs).amax(0))
            assert torch.equal(scattered(), total.chunk(size)[group.rank])
            assert torch.equal(gathered(), torch.cat(xs, 1))
            assert torch.equal(reduced(), total)
            assert torch.equal(x, before)


@on_ranks(4, config=TP)
def test_half_precision_sums_are_rounded_once():
    """1 + three times 2^-9 in bf16: added one by one in bf16 it stays 1."""
    x = torch.full((6,), 1.0 if tp_group().rank == 0 else 3 * 2.0**-9, dtype=torch.bfloat16)
    expected = torch.tensor(1 + 9 * 2.0**-9).to(torch.bfloat16)
    assert collectives.all_reduce(x, tp_group()).eq(expected).all()
    assert collectives.reduce_scatter(x.repeat(4), tp_group()).eq(expected).all()


@pytest.mark.parametrize("launcher", LAUNCHERS)
@on_ranks(2, config=TP2, launcher=lambda arguments: arguments["launcher"])
def test_batches_of_different_shapes_are_refused_on_every_rank(launcher):
    """Shorter, longer, and the same number of elements in another shape; the group stays usable."""
    group = tp_group()
    for shapes in [((2, 3), (4, 3)), ((200, 300), (100, 300)), ((2, 6), (4, 3))]:
        x = torch.zeros(shapes[group.rank])
        with pytest.raises(StepError, match=r"rank 0: all_gather of .* rank 1: all_gather of"):
            collectives.all_gather(x, group, checked=True)
        assert collectives.all_reduce(torch.ones(2), group).tolist() == [2.0, 2.0]
    with pytest.raises(StepError, match="same shape"):
        collectives.all_to_all(torch.zeros((2 + 2 * group.rank, 4)), group, 1, 0, checked=True)
    if launcher == "mpi":
        with pytest.raises(StepError, match="int64"):
            collectives.all_gather(
                torch.zeros(2, dtype=torch.int64 if group.rank else torch.float64), group, checked=True
            )


@on_ranks(2, config=TP2)
def test_a_tensor_without_data_gives_the_shape_and_sends_nothing():
    """Rank 0 alone works out structure; a message would meet the next collective."""
    group = tp_group()
    if group.rank == 0:
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(torch.zeros(4, 6))
            assert collectives.all_gather(fake, group, 1).shape == (4, 12)
            assert collectives.reduce_scatter(fake, group, 0).shape == (2, 6)
            assert collectives.all_to_all(fake, group, 1, 0).shape == (8, 3)
            assert collectives.all_reduce(fake, group).shape == (4, 6)
            assert collectives.broadcast(fake, group, 0).shape == (4, 6)
        assert autograd.gather_batch(torch.zeros(4, 6, device="meta"), group).shape == (8, 6)
    assert collectives.all_reduce(torch.ones(1), group).item() == 2.0


def simulate_joined(name, xs, rank):
    """What `rank` gets in the one-process program, as a function of all ranks' inputs."""
    size = len(xs)
    if name == "gather_batch":
        return torch.cat(xs, 0)
    if name == "scatter_sum":
        return sum(xs).chunk(size, 0)[rank]
    return torch.cat([x.chunk(size, 1)[rank] for x in xs], 0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@on_ranks(4, config=TP)
def test_joined_batch_duals_sum_the_losses_of_all_ranks(dtype, tolerance):
    """Each rank weighs its output by its own c: the gradient must be that of the sum of all ranks' losses."""
    group = tp_group()
    calls = {
        "gather_batch": lambda x: autograd.gather_batch(x, group, 0),
        "scatter_sum": lambda x: autograd.scatter_sum(x, group, 0),
        "all_to_all": lambda x: autograd.all_to_all(x, group, 1, 0),
    }
    generator = torch.Generator().manual_seed(3)
    for name, call in calls.items():
        xs = [torch.randn(4, 8, 2, generator=generator, dtype=dtype).requires_grad_() for _ in range(4)]
        outs = [simulate_joined(name, xs, rank) for rank in range(4)]
        weights = [torch.randn(out.shape, generator=generator, dtype=dtype) for out in outs]
        sum(((out * out * weight).sum() for out, weight in zip(outs, weights))).backward()
        mine = xs[group.rank].detach().clone().requires_grad_()
        out = call(mine)
        torch.testing.assert_close(out, outs[group.rank].detach(), rtol=tolerance, atol=tolerance)
        (out * out * weights[group.rank]).sum().backward()
        torch.testing.assert_close(mine.grad, xs[group.rank].grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@on_ranks(4, config=TP)
def test_shared_batch_duals_count_the_one_loss_once(dtype, tolerance):
    """A two-layer product split over the ranks, on a batch that all share: gradients are those of one process."""
    group = tp_group()
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(3, 8, generator=generator, dtype=dtype)
    first = torch.randn(8, 12, generator=generator, dtype=dtype)
    second = torch.randn(12, 8, generator=generator, dtype=dtype)

    def one_process():
        leaves = [t.clone().requires_grad_() for t in (x, first, second)]
        hidden = (leaves[0] @ leaves[1]).tanh()
        (hidden @ leaves[2]).pow(2).sum().backward()
        return [leaf.grad for leaf in leaves]

    def split_column_then_row():
        leaves = [
            t.clone().requires_grad_() for t in (x, first.chunk(4, 1)[group.rank], second.chunk(4, 0)[group.rank])
        ]
        hidden = (autograd.copy_in(leaves[0], group) @ leaves[1]).tanh()
        autograd.sum_out(hidden @ leaves[2], group).pow(2).sum().backward()
        return [leaf.grad for leaf in leaves]

    def split_with_whole_values_between():
        leaves = [
            t.clone().requires_grad_() for t in (x, first.chunk(4, 1)[group.rank], second.chunk(4, 0)[group.rank])
        ]
        hidden = autograd.gather_slices(autograd.copy_in(leaves[0], group) @ leaves[1], group, 1).tanh()
        autograd.sum_out(autograd.own_slice(hidden, group, 1) @ leaves[2], group).pow(2).sum().backward()
        return [leaf.grad for leaf in leaves]

    whole = one_process()
    expected = [whole[0], whole[1].chunk(4, 1)[group.rank], whole[2].chunk(4, 0)[group.rank]]
    for program in (split_column_then_row, split_with_whole_values_between):
        for got, want in zip(program(), expected):
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@on_ranks(1, config={})
def test_a_group_of_one_adds_no_node():
    """tp 1 costs nothing."""
    x = torch.ones(2, 2, requires_grad=True)
    group = tp_group()
    assert autograd.gather_batch(x, group) is x
    assert autograd.all_to_all(x, group, 0, 1) is x
    assert autograd.copy_in(x, group) is x
