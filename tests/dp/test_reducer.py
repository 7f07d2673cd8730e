"""Gradients after a reduced pass are those of one process on all samples."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from smp import runtime
from smp.errors import StepError
from tests.dp.helpers import (
    KILOBYTE,
    all_gather,
    assert_close,
    assert_same_gradients,
    batch,
    chain,
    loss_of,
    make_reducer,
    my_part,
    recorded,
)
from tests.harness import on_ranks

DDP = {"ddp": True}


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cap", [KILOBYTE, 25])
@on_ranks(2, config=DDP)
def test_gradients_are_the_mean_over_ranks(views: bool, overlap: bool, cap: float) -> None:
    """A failure means that replicas train on other gradients than one process would."""
    model = chain()
    reference = copy.deepcopy(model)
    reducer = make_reducer(model, overlap=overlap, bucket_cap_mb=cap, gradient_as_bucket_view=views)
    for step in range(4):
        data = batch(step, 6)
        model.zero_grad()
        reference.zero_grad()
        loss_of(reference, data).backward()
        reducer.refresh()
        loss_of(model, my_part(data)).backward()
        assert_same_gradients(model, reference)


@on_ranks(3, config=DDP)
def test_three_ranks_agree_bit_by_bit() -> None:
    """A failure means that replicas drift apart by rounding."""
    model = chain()
    reference = copy.deepcopy(model)
    make_reducer(model)
    data = batch(0, 6)
    loss_of(reference, data).backward()
    loss_of(model, my_part(data)).backward()
    assert_same_gradients(model, reference)
    for param in model.parameters():
        assert param.grad is not None
        assert all(torch.equal(part, param.grad) for part in all_gather(param.grad))


class Mixed(nn.Module):
    """Parameters of three types in turn; its gradient is what it is given."""

    def __init__(self, order: list[int], shape: tuple[int, ...], wide: bool = False) -> None:
        super().__init__()
        dtypes = [torch.float32, torch.bfloat16, torch.float16]
        for number in order:
            param = nn.Parameter(torch.zeros(shape, dtype=dtypes[number % 3]))
            self.register_parameter(f"p{number}", param)
            if wide:
                param.grad_dtype = torch.float32

    def forward(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros(())
        for _, param in sorted(self.named_parameters()):
            total = total + (param * torch.randn(param.shape, generator=generator).to(param.dtype)).sum().float()
        return total


@pytest.mark.parametrize("order", [list(range(7)), [3, 0, 6, 1, 5, 2, 4]])
@pytest.mark.parametrize("cap", [KILOBYTE, 25])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@on_ranks(2, config=DDP)
def test_each_gradient_keeps_its_type_in_a_group_of_mixed_types(
    order: list[int], cap: float, views: bool, wide: bool
) -> None:
    """a3-1. A failure means that a bucket's type was taken from one member and forced on the others; when gradients are
    wider than their parameters (`wide`), that their mean was rounded back."""
    rt = runtime.get()
    model = Mixed(order, (5, 21), wide)
    make_reducer(model, bucket_cap_mb=cap, gradient_as_bucket_view=views)
    single = Mixed(order, (5, 21), wide)
    expected: dict[str, torch.Tensor] = {}
    for seed in range(rt.dp_size):
        single.zero_grad()
        single(seed).backward()
        for name, param in single.named_parameters():
            assert param.grad is not None
            expected[name] = expected.get(name, torch.zeros(())) + param.grad.float() / rt.dp_size
    for _ in range(2):
        model.zero_grad()
        model(rt.dp_rank).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            dtype = torch.float32 if wide else param.dtype
            assert param.grad.dtype == dtype
            assert torch.equal(param.grad, expected[name].to(dtype)), name


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b, self.c, self.never = (nn.Linear(8, 8).double() for _ in range(4))

    def forward(self, data: torch.Tensor, names: str) -> torch.Tensor:
        return sum((getattr(self, name)(data).tanh() for name in names), torch.zeros(())).pow(2).mean()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("cap", [KILOBYTE, 25])
@on_ranks(2, config=DDP)
def test_branches_used_in_some_passes_and_on_some_ranks(views: bool, cap: float) -> None:
    """a3-2. A failure means that parameters unused in the last pass, or on one rank, get a local gradient only."""
    rt = runtime.get()
    model, reference = Branches(), Branches()
    make_reducer(model, backward_passes_per_step=2, gradient_as_bucket_view=views, bucket_cap_mb=cap)
    for step in range(3):
        first, second = batch(2 * step, 4), batch(2 * step + 1, 4)
        uses = ["b", "bc"] if step != 1 else ["c", "ac"]  # by rank, in the second pass
        model.zero_grad()
        reference.zero_grad()
        for rank in range(2):
            reference(first.chunk(2)[rank], "a").backward()
            reference(second.chunk(2)[rank], uses[rank]).backward()
        model(my_part(first), "a").backward()
        model(my_part(second), uses[rt.dp_rank]).backward()
        assert_same_gradients(model, reference, factor=0.5)
        assert model.never.weight.grad is None


@pytest.mark.parametrize("views", [False, True])
@on_ranks(4, config=DDP)
def test_half_precision_neither_overflows_nor_vanishes(views: bool) -> None:
    """a3-3. A failure means a sum, or a quotient, formed in half precision."""
    model = Mixed([2, 5], (100,))  # two of float16
    reducer = make_reducer(model, gradient_as_bucket_view=views)
    for value in (40000.0, 6e-8):
        for param in model.parameters():
            param.grad = torch.full_like(param, value)
        reducer.begin()
        reducer.finish()
        expected = torch.tensor(value).half().expand(100)
        for param in model.parameters():
            assert param.grad is not None
            assert torch.equal(param.grad, expected)


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2, config=DDP)
def test_a_wide_gradient_that_only_another_rank_has_is_wide(views: bool) -> None:
    """A failure means an error, or a rounded gradient, where a rank has not used a half precision parameter."""
    rt = runtime.get()
    model = Mixed([1, 4], (3,), wide=True)
    reducer = make_reducer(model, gradient_as_bucket_view=views)
    if rt.dp_rank == 0:
        model.p1.grad = torch.full((3,), 1 + 2**-12)
    reducer.begin()
    reducer.finish()
    assert torch.equal(model.p1.grad, torch.full((3,), (1 + 2**-12) / 2))
    assert model.p4.grad is None


class LiveBytes(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes of storages made inside, and how many were alive at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._users: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        import weakref

        known = {
            leaf.untyped_storage().data_ptr()
            for leaf in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        } - self._users.keys()
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (key := leaf.untyped_storage().data_ptr()) not in known:
                size = leaf.untyped_storage().nbytes()
                if self._users.setdefault(key, 0) == 0:
                    self.now += size
                    self.peak = max(self.peak, self.now)
                self._users[key] += 1
                weakref.finalize(leaf, self._dropped, key, size)
        return result

    def _dropped(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if self._users[key] == 0:
            del self._users[key]
            self.now -= size


@on_ranks(2, config=DDP)
def test_half_precision_needs_one_bucket_of_memory() -> None:
    """a3-3. A failure means that wide copies of several buckets exist at a time, or are made anew at every pass."""
    model = Mixed([3 * number + 2 for number in range(20)], (200,))
    reducer = make_reducer(model, bucket_cap_mb=KILOBYTE)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    peaks = []
    for _ in range(2):
        with LiveBytes() as memory:
            reducer.begin()
            reducer.finish()
        peaks.append(memory.peak)
    assert len(reducer._buckets) == 20
    assert peaks[0] <= 1024 + 64  # the buffer, a few flags and numbers
    assert peaks[1] <= 64


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2, config=DDP)
def test_full_precision_needs_few_buckets_of_memory(views: bool) -> None:
    """A failure means that gradients exist twice, whatever the size of the model, or memory is made anew each pass."""
    model = Mixed([3 * number for number in range(40)], (200,))
    with LiveBytes() as memory:
        reducer = make_reducer(model, bucket_cap_mb=KILOBYTE, gradient_as_bucket_view=views)
    assert memory.peak <= (40 * 201 * 4 if views else 0)  # in the buckets is where gradients live then
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    peaks = []
    for _ in range(2):
        with LiveBytes() as memory:
            reducer.begin()
            reducer.finish()
        peaks.append(memory.peak)
    assert peaks[0] <= (64 + 320 if views else 4 * 1024 + 64 + 320)  # and the agreed order, 8 bytes per parameter
    assert peaks[1] <= 64


@on_ranks(2, config=DDP)
def test_gradients_asked_for_by_autograd_grad_disturb_nothing() -> None:
    """A failure means that a gradient penalty breaks the reduction, or ends overlap for the next pass."""
    model = chain(width=16)
    reference = copy.deepcopy(model)
    reducer = make_reducer(model, bucket_cap_mb=KILOBYTE)
    for step in range(3):
        losses = []
        for module, data in ((reference, batch(step, 4, 16)), (model, my_part(batch(step, 4, 16)))):
            module.zero_grad()
            output = module(data.requires_grad_())
            if module is model:
                reducer.watch([output])
            (slope,) = torch.autograd.grad(output.pow(2).sum(), data, create_graph=True)
            losses.append(slope.pow(2).sum(1).mean() + output.pow(2).mean())
        losses[0].backward()
        with recorded(model) as events:
            losses[1].backward()
        assert_same_gradients(model, reference)
        assert step == 0 or "reduce" in events[: events.index("0.weight")]


@on_ranks(2, config=DDP)
def test_accumulation_windows_and_the_short_last_one() -> None:
    """A failure means passes counted wrong: unreduced gradients at the update, or windows out of step after it."""
    model = chain()
    reference = copy.deepcopy(model)
    reducer = make_reducer(model, backward_passes_per_step=3)
    step = 0
    for passes in (3, 2, 3, 1):
        model.zero_grad()
        reference.zero_grad()
        for number in range(passes):
            loss_of(reference, batch(step, 4)).backward()
            loss_of(model, my_part(batch(step, 4))).backward()
            assert reducer.pending == (number < 2)
            step += 1
        if passes < 3:
            mine = model[0].weight.grad
            assert mine is not None
            assert not torch.equal(*all_gather(mine))
        reducer.flush()
        assert not reducer.pending
        assert_same_gradients(model, reference)


@on_ranks(2, config=DDP)
def test_no_sync_accumulates_until_the_first_pass_after_it() -> None:
    """A failure means messages inside of no_sync, or gradients lost after it."""
    model = chain()
    reference = copy.deepcopy(model)
    reducer = make_reducer(model)
    with recorded(model) as events:
        with reducer.no_sync():
            for step in range(2):
                loss_of(model, my_part(batch(step, 4))).backward()
        assert "reduce" not in events
        loss_of(model, my_part(batch(2, 4))).backward()
        assert "reduce" in events
    for step in range(3):
        loss_of(reference, batch(step, 4)).backward()
    assert_same_gradients(model, reference)


class Joined(nn.Module):
    """Of its two parameters, `mine` sees this rank's samples, `joint` those of the whole tensor-parallel group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mine = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.joint = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.joint._smp_scaled_batch = True

    def forward(self, mine: torch.Tensor, joint: list[torch.Tensor]) -> torch.Tensor:
        return (mine * self.mine).sin().mean() + sum((part * self.joint).sin().mean() for part in joint)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("cap", [KILOBYTE, 25])
@pytest.mark.parametrize("prescaled", [False, True])
@on_ranks(4, config={"ddp": True, "tensor_parallel_degree": 2})
def test_accumulated_gradients_are_never_rescaled(views: bool, cap: float, prescaled: bool) -> None:
    """A failure means that a pass on top of reduced gradients divides these once more."""
    rt = runtime.get()
    model, reference = Joined(), Joined()
    make_reducer(model, gradient_as_bucket_view=views, bucket_cap_mb=cap, prescaled_batch=prescaled)
    for step in range(3):
        parts = batch(step, 8).chunk(rt.rdp_size if prescaled else 4)
        own = parts[rt.rdp_rank if prescaled else rt.dp_rank]
        # A distributed module works on the joined batch: its loss is the sum of the group's.
        joint = [own] if prescaled else list(parts[2 * rt.rdp_rank : 2 * rt.rdp_rank + 2])
        model(own, joint).backward()
        for part in parts:
            (reference(part, [part]) / len(parts)).backward()
        assert_same_gradients(model, reference)


@pytest.mark.parametrize("microbatches", [1, 3])
@on_ranks(2, config=DDP)
def test_a_step_of_several_microbatches_is_one_pass(microbatches: int) -> None:
    """A failure means that each microbatch is reduced by itself, or the last one is not waited for."""
    model = chain()
    reference = copy.deepcopy(model)
    reducer = make_reducer(model, bucket_cap_mb=KILOBYTE)
    for step in range(3):
        data = batch(step, 6 * microbatches)
        model.zero_grad()
        reference.zero_grad()
        loss_of(reference, data).backward()
        reducer.refresh()
        with recorded(model) as events:
            reducer.open_step()
            for number, part in enumerate(my_part(data).chunk(microbatches)):
                if number == microbatches - 1:
                    reducer.last_microbatch()
                (loss_of(model, part) / microbatches).backward()
                assert number == microbatches - 1 or "reduce" not in events
            reducer.close_step()
        assert events.count("reduce") == len(reducer._buckets)
        assert_same_gradients(model, reference)


@on_ranks(2, config=DDP)
def test_reductions_overlap_the_backward_from_the_second_pass_on() -> None:
    """A failure means that communication waits for the end of the backward, or that the option does not turn it off."""
    for overlap in (True, False):
        model = chain(width=16)
        make_reducer(model, bucket_cap_mb=KILOBYTE, overlap=overlap)
        before_last = []
        for step in range(3):
            with recorded(model) as events:
                loss_of(model, my_part(batch(step, 4, 16))).backward()
            last_gradient = max(i for i, event in enumerate(events) if event != "reduce")
            before_last.append(events[:last_gradient].count("reduce"))
        assert before_last[0] == 0
        # of eight buckets, weights and biases, all but the one with the last gradient
        assert before_last[1:] == ([7, 7] if overlap else [0, 0]), before_last


class Backwards(nn.Module):
    """Registers its layers in the reverse of the order in which it runs them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(16, 16).double() for _ in range(4))
        self.unused = nn.Linear(16, 16).double()

    def forward(self, data: torch.Tensor, order: tuple[int, ...] = (3, 2, 1, 0)) -> torch.Tensor:
        for number in order:
            data = self.layers[number](data)
        return data


@on_ranks(2, config=DDP)
def test_buckets_follow_the_observed_order_of_completion() -> None:
    """A failure means that a model whose modules run in another order than they are registered in never overlaps."""
    model = Backwards()
    reducer = make_reducer(model, bucket_cap_mb=KILOBYTE)
    loss_of(model, my_part(batch(0, 4, 16))).backward()
    names = [name for bucket in reducer._buckets for name in bucket.names if name.endswith("weight")]
    assert names == [*(f"layers.{number}.weight" for number in range(4)), "unused.weight"]
    with recorded(model) as events:
        loss_of(model, my_part(batch(1, 4, 16))).backward()
    assert events[: events.index("layers.3.weight")].count("reduce") >= 6  # weights and biases of three layers


@on_ranks(2, config=DDP)
def test_ranks_that_run_in_different_orders_launch_in_the_same_one() -> None:
    """A failure means that the ranks' collectives do not meet: mixed up gradients, or a hang."""
    rt = runtime.get()
    model = Backwards()
    reference = copy.deepcopy(model)
    make_reducer(model, bucket_cap_mb=KILOBYTE)
    orders = [(3, 2, 1, 0), (0, 1, 2, 3)]
    for step in range(3):
        data = batch(step, 4, 16)
        model.zero_grad()
        reference.zero_grad()
        for part, order in zip(data.chunk(2), orders):
            (reference(part, order).pow(2).mean() / 2).backward()
        model(my_part(data), orders[rt.dp_rank]).pow(2).mean().backward()
        assert_same_gradients(model, reference)


@on_ranks(2, config=DDP)
def test_a_gradient_after_its_bucket_was_reduced_is_an_error() -> None:
    """A failure means that a changing program silently loses gradients."""
    for overlap in (True, False):
        model = chain()
        reference = copy.deepcopy(model)
        reducer = make_reducer(model, overlap=overlap, bucket_cap_mb=KILOBYTE)
        data = my_part(batch(0, 4))
        loss_of(model, data).backward()
        model.zero_grad()
        reducer.open_step()
        reducer.last_microbatch()
        loss_of(model, data).backward()
        if overlap:
            with pytest.raises(StepError, match=r"3\.(weight|bias).*overlapping_allreduce=False"):
                loss_of(model, data).backward()
            reducer.abort()
        else:
            loss_of(model, data).backward()
            reducer.close_step()
            loss_of(reference, batch(0, 4)).backward()
            assert_same_gradients(model, reference, factor=2.0)


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2, config=DDP)
def test_a_gradient_that_comes_twice_before_its_bucket_is_reduced_counts_twice(views: bool) -> None:
    """A failure means that a gradient copied ahead of its reduction hides what arrives after the copy."""
    model = chain()
    reference = copy.deepcopy(model)
    reducer = make_reducer(model, gradient_as_bucket_view=views)  # one bucket
    loss_of(model, my_part(batch(0, 4))).backward()
    model.zero_grad()
    reducer.open_step()
    reducer.last_microbatch()
    for part in (model[3], model):
        loss_of(part, my_part(batch(0, 4))).backward()
    reducer.close_step()
    for part in (reference[3], reference):
        loss_of(part, batch(0, 4)).backward()
    assert_same_gradients(model, reference)


@on_ranks(2, config=DDP)
def test_reentrant_checkpoints_are_part_of_the_pass_around_them() -> None:
    """A failure means one pass per checkpointed segment: passes miscounted, and every gradient reduced many times."""
    model = chain()
    reference = copy.deepcopy(model)
    reducer = make_reducer(model, backward_passes_per_step=2)
    for step in range(2):
        data = batch(step, 4)
        hidden = my_part(data).requires_grad_()
        for layer in model:
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        reducer.watch([hidden])
        hidden.tanh().pow(2).mean().backward()
        assert reducer.pending == (step == 0)
        loss_of(reference, data).backward()
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2, config=DDP)
def test_parameters_may_be_frozen_and_thawed_between_steps(views: bool) -> None:
    """A failure means unreduced gradients for what was frozen when the model was wrapped."""
    model = chain()
    reference = copy.deepcopy(model)
    for frozen in (model[0], reference[0]):
        frozen.requires_grad_(False)
    reducer = make_reducer(model, gradient_as_bucket_view=views)
    assert sum(bucket.bucket.numel for bucket in reducer._buckets) == 3 * 72
    for step in range(4):
        for each in (model, reference):
            each.zero_grad()
            each[0].requires_grad_(step in (1, 2))
            each[2].requires_grad_(step != 2)
        data = batch(step, 4)
        reducer.refresh()
        loss_of(reference, data).backward()
        loss_of(model, my_part(data)).backward()
        assert_same_gradients(model, reference)


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2, config=DDP)
def test_a_parameter_frozen_within_a_window_is_reduced_at_its_end(views: bool) -> None:
    """A failure means that each replica updates it by the gradient of its own batches, so that replicas drift apart."""
    model = chain()
    reference = copy.deepcopy(model)
    reducer = make_reducer(model, gradient_as_bucket_view=views, backward_passes_per_step=2)
    for step in range(4):
        model[0].requires_grad_(step == 0)
        data = batch(step, 6)
        reducer.refresh()
        loss_of(model, my_part(data)).backward()
        reference[0].requires_grad_(step == 0)
        loss_of(reference, data).backward()
    assert_same_gradients(model, reference)


@on_ranks(2, config=DDP)
def test_replicas_with_different_parameters_are_told_so() -> None:
    """A failure means that unlike gradients are summed, or a hang."""
    model = chain()
    model[runtime.get().rank].requires_grad_(False)
    make_reducer(model)
    with pytest.raises(StepError, match="do not hold the same trainable parameters"):
        loss_of(model, my_part(batch(0, 4))).backward()


@on_ranks(2, config=DDP)
def test_a_failed_backward_leaves_the_reducer_usable() -> None:
    """A failure means that one caught exception breaks every later step."""
    model = chain()
    reference = copy.deepcopy(model)
    reducer = make_reducer(model)

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("on purpose")

    handle = model[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(model, my_part(batch(0, 4))).backward()
    handle.remove()
    model.zero_grad()
    reducer.refresh()
    loss_of(model, my_part(batch(0, 4))).backward()
    loss_of(reference, batch(0, 4)).backward()
    assert_same_gradients(model, reference)


@on_ranks(2, config=DDP)
def test_the_engine_may_finish_parameters_in_any_order() -> None:
    """A failure means that with a pipeline, overlap depends on ranks finishing alike."""
    rt = runtime.get()
    model = chain()
    reference = copy.deepcopy(model)
    reducer = make_reducer(model, attach=False, bucket_cap_mb=KILOBYTE)
    for step in range(3):
        data = batch(step, 4)
        model.zero_grad()
        reference.zero_grad()
        loss_of(reference, data).backward()
        reducer.begin()
        with recorded(model) as events:
            loss_of(model, my_part(data)).backward()
            params = list(model.parameters())
            for param in params if rt.dp_rank else reversed(params):
                reducer.mark_done(param)
            reducer.mark_done(params[0])
            assert events.count("reduce") == len(reducer._buckets)
        reducer.finish()
        assert_same_gradients(model, reference)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.wave = nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))
        self.empty = nn.Parameter(torch.zeros(0, 8, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.kernel = nn.Parameter(torch.randn(4, 2, 3, 3, dtype=torch.float64).to(memory_format=torch.channels_last))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        image = nn.functional.conv2d(data.view(-1, 2, 2, 2), self.kernel, padding=1)
        return (image.mean() * self.wave).abs().sum() + self.scalar * image.pow(2).mean() + self.empty.sum()


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2, config=DDP)
def test_complex_empty_scalar_and_strided_parameters(views: bool) -> None:
    """A failure means a crash or wrong elements for parameters of unusual kinds."""
    model, reference = Odd(), Odd()
    make_reducer(model, gradient_as_bucket_view=views)
    for step in range(2):
        data = batch(step, 4)
        model.zero_grad()
        reference.zero_grad()
        for part in data.chunk(2):
            (reference(part) / 2).backward()
        model(my_part(data)).backward()
        assert_same_gradients(model, reference)


@on_ranks(2, config=DDP)
def test_sparse_gradients_are_refused_by_name() -> None:
    """A failure means an error from deep inside, on some ranks only."""
    model = nn.ModuleDict({"words": nn.Embedding(10, 4, sparse=True)})
    reducer = make_reducer(model)
    with pytest.raises(StepError, match=r"words\.weight.*sparse=False"):
        model["words"](torch.tensor([1, 2])).sum().backward()
    reducer.abort()


@on_ranks(1, config=DDP)
def test_one_rank_alone_needs_nothing() -> None:
    """A failure means work, memory or hooks where there is nobody to reduce with."""
    model = chain()
    reducer = make_reducer(model, backward_passes_per_step=2)
    with recorded(model) as events:
        loss_of(model, batch(0, 4)).backward()
        reducer.begin()
        reducer.finish()
        reducer.flush()
    assert "reduce" not in events
    assert reducer._buckets == []
    assert_close(model[0].weight.grad, model[0].weight.grad)
