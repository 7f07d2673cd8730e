"""DistributedModel as a user meets it: life cycle, names, hooks, placement, and what it refuses."""

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from tests.harness import on_ranks

PP2 = {"pipeline_parallel_degree": 2, "microbatches": 2}
PP2_DP2 = {**PP2, "ddp": True}


class Net(nn.Module):
    def __init__(self, width: int = 6, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * scale
        return x


def net(**kwargs: Any) -> Net:
    torch.manual_seed(0)
    return Net(**kwargs).double()


def batch(rows: int = 4, width: int = 6, seed: int = 1) -> Tensor:
    return torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train_step(model: Any) -> Any:
    @smp.step
    def train(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss

    return train


@on_ranks(2, config=PP2)
def test_partition_happens_at_the_first_step_and_local_calls_wait_for_it() -> None:
    """A script that asks too early would see all parameters and build on them."""
    module = net()
    model = smp.DistributedModel(module)
    assert not model.partitioned and model.get_module() is model.module is module
    assert len(list(model.parameters())) == 8
    for call in ("local_parameters", "local_named_buffers", "local_modules", "local_state_dict"):
        with pytest.raises(smp.UsageError, match="before the model is partitioned"):
            list(getattr(model, call)())
    train_step(model)(batch())
    assert model.partitioned
    names = [name for name, _ in model.named_parameters()]
    mine = (0, 1) if smp.pp_rank() == 0 else (2, 3)
    assert names == [f"layers.{i}.{kind}" for i in mine for kind in ("weight", "bias")]
    assert names == [name for name, _ in model.local_named_parameters()]
    assert [id(p) for p in model.parameters()] == [id(p) for p in model.local_parameters()]
    assert [name for name, _ in model.local_named_modules()] == [f"layers.{i}" for i in mine]
    assert set(dict(module.named_parameters())) == {f"layers.{i}.{k}" for i in range(4) for k in ("weight", "bias")}


@on_ranks(2, config=PP2)
def test_other_stages_parameters_keep_object_shape_and_device_and_lose_their_memory() -> None:
    """Otherwise an optimizer made before keeps the whole model alive on every rank."""
    module = net()
    before = list(module.parameters())
    model = smp.DistributedModel(module)
    train_step(model)(batch())
    mine = {id(p) for p in model.parameters()}
    for old, now in zip(before, module.parameters(), strict=True):
        assert old is now and now.device.type == "cpu"
        if id(now) not in mine:
            assert now.untyped_storage().nbytes() <= now.element_size() and now.grad is None
            with torch.no_grad(), pytest.raises(RuntimeError):
                now.add_(1)


@on_ranks(2, config=PP2)
def test_hooks_run_once_with_model_and_optimizer_and_can_be_removed() -> None:
    """Clients load their optimizer state in these hooks."""
    model = smp.DistributedModel(net())
    calls: list[tuple[str, Any, Any]] = []
    model.register_post_partition_hook(lambda m, o: calls.append(("partition", m, o)))
    model.register_post_step_hook(lambda m, o: calls.append(("step", m, o)))
    model.register_post_step_hook(lambda m, o: calls.append(("never", m, o))).remove()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train = train_step(model)
    for _ in range(2):
        train(batch())
    assert calls == [("partition", model, optimizer), ("step", model, optimizer)]


@on_ranks(2, config=PP2)
def test_a_post_step_hook_waits_for_a_backward() -> None:
    """An evaluation before the first training step is not the first step."""
    model = smp.DistributedModel(net())
    calls: list[str] = []
    model.register_post_step_hook(lambda m, o: calls.append("step"))

    @smp.step
    def evaluate(x: Tensor) -> Tensor:
        return model(x)

    with torch.no_grad():
        evaluate(batch())
    assert calls == [] and all(p.grad is None for p in model.parameters())
    train_step(model)(batch())
    assert calls == ["step"]


@pytest.mark.parametrize("passes", [1, 2, 3])
@on_ranks(4, config=PP2_DP2)
def test_accumulation_windows_equal_one_process_also_a_short_last_one(passes: int) -> None:
    """Gradients of a window add up, are averaged over replicas once, and a step in the middle of a window counts."""
    module, reference = net(), net()
    model = smp.DistributedModel(module, backward_passes_per_step=passes)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.5))
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    train = train_step(model)
    seed = 0
    for window in (passes, passes, max(1, passes - 1), passes):  # the third is short
        for _ in range(window):
            seed += 1
            parts = [batch(seed=10 * seed + replica) for replica in range(2)]
            loss = train(parts[smp.rdp_rank()]).reduce_mean()
            for part in parts:
                (reference(part).pow(2).mean() / 2).backward()
            torch.testing.assert_close(loss, reference(parts[smp.rdp_rank()]).pow(2).mean().detach())
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    expected = dict(reference.named_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(4, config=PP2_DP2)
def test_gradients_are_reduced_when_the_step_returns(overlap: bool) -> None:
    """Scripts read gradients right after the step, with and without overlapped reduction."""
    module, reference = net(), net()
    model = smp.DistributedModel(module, overlapping_allreduce=overlap, bucket_cap_mb=1e-4)
    train = train_step(model)
    for seed in range(4):  # the second step and later ones overlap
        parts = [batch(seed=10 * seed + replica) for replica in range(2)]
        train(parts[smp.rdp_rank()])
        for part in parts:
            (reference(part).pow(2).mean() / 2).backward()
        expected = {name: p.grad for name, p in reference.named_parameters()}
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12)
        model.zero_grad()
        reference.zero_grad()


@on_ranks(4, config=PP2_DP2)
def test_no_sync_keeps_gradients_local_until_the_next_synchronised_pass() -> None:
    """Accumulating by hand must cost no communication and lose nothing."""
    module, reference = net(), net()
    model = smp.DistributedModel(module)
    train = train_step(model)
    parts = [[batch(seed=10 * n + replica) for replica in range(2)] for n in range(3)]
    with model.no_sync():
        train(parts[0][smp.rdp_rank()])
        train(parts[1][smp.rdp_rank()])
    gradients = smp.allgather([p.grad.clone() for p in model.parameters()], smp.RDP_GROUP)
    assert not torch.equal(gradients[0][0], gradients[1][0])
    train(parts[2][smp.rdp_rank()])
    for row in parts:
        for part in row:
            (reference(part).pow(2).mean() / 2).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12)


@on_ranks(2, config={**PP2, "microbatches": 4})
def test_gradients_are_summed_over_microbatches_when_asked() -> None:
    """`average_grads_across_microbatches=False` is for losses that are sums already."""
    module, reference = net(), net()
    model = smp.DistributedModel(module, average_grads_across_microbatches=False)
    train_step(model)(batch(8))
    for part in batch(8).chunk(4):
        reference(part).pow(2).mean().backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12)


@on_ranks(2, config={**PP2, "auto_partition": False, "default_partition": 1})
def test_placement_by_hand() -> None:
    """Innermost context wins, set_partition wins over both, the rest goes to the default stage."""

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with smp.partition(0):
                self.first = nn.Linear(6, 6)
                with smp.partition(1):
                    self.second = nn.Linear(6, 6)
            self.third = nn.Linear(6, 6)
            self.fourth = nn.Linear(6, 6)
            smp.set_partition(self.fourth, 0)

        def forward(self, x: Tensor) -> Tensor:
            return self.fourth(self.third(self.second(self.first(x))))

    torch.manual_seed(0)
    module = Placed().double()
    reference = copy.deepcopy(module)
    model = smp.DistributedModel(module)
    loss = train_step(model)(batch()).reduce_mean()
    torch.testing.assert_close(loss, reference(batch()).pow(2).mean().detach())
    mine = ["first", "fourth"] if smp.pp_rank() == 0 else ["second", "third"]
    assert [name for name, _ in model.local_named_modules()] == mine
    with pytest.raises(smp.PartitionError, match="after the model was partitioned"):
        smp.set_partition(module.first, 1)


@on_ranks(2, config=PP2)
def test_a_stage_that_does_not_exist_is_refused() -> None:
    """A typo in a stage number must not end in a model that hangs."""
    with pytest.raises(smp.PartitionError, match="stage 2; .*0 to 1"):
        smp.set_partition(nn.Linear(2, 2), 2)
    with pytest.raises(smp.PartitionError, match="-1"), smp.partition(-1):
        pass


@on_ranks(2, config={**PP2, "auto_partition": False, "default_partition": 0})
def test_a_stage_without_parameters_takes_every_step() -> None:
    """Small models on many ranks must train, and the optimizer of an empty stage must step."""
    module, reference = net(), net()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(module.parameters(), lr=0.1))
    plain = torch.optim.AdamW(reference.parameters(), lr=0.1)
    train = train_step(model)
    for seed in range(3):
        optimizer.zero_grad()
        loss = train(batch(seed=seed)).reduce_mean()
        smp.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        plain.zero_grad()
        expected = reference(batch(seed=seed)).pow(2).mean()
        expected.backward()
        torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
        torch.nn.utils.clip_grad_norm_(list(reference.parameters()), 0.5)
        plain.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-12)
    assert len(list(model.parameters())) == (8 if smp.pp_rank() == 0 else 0)


@on_ranks(2, config=PP2)
def test_the_wrapper_looks_like_the_module() -> None:
    """Trainers read the signature of forward, and settings from the model."""
    module = net()
    module.config = {"hidden": 6}  # type: ignore[assignment]
    signature = inspect.signature(module.forward)
    model = smp.DistributedModel(module)
    assert inspect.signature(model.forward) == signature
    assert model.config is module.config and model.layers is module.layers
    with pytest.raises(AttributeError):
        _ = model.no_such_thing
    train_step(model)(batch())
    model.eval()
    assert not module.training and not module.layers[0].training
    assert model.train().training and module.layers[0].training
    assert model.cpu() is model
    twin = copy.deepcopy(module)
    assert type(twin) is Net and len(list(twin.parameters())) == 8


@on_ranks(2, config=PP2)
def test_wrong_use_is_an_error_that_says_what_to_do() -> None:
    """Each of these would hang or train wrongly if it were let through."""
    with pytest.raises(smp.UsageError, match="torch.nn.Module"):
        smp.DistributedModel(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(smp.UsageError, match="backward_passes_per_step"):
        smp.DistributedModel(net(), backward_passes_per_step=0)
    model = smp.DistributedModel(net())
    with pytest.raises(smp.UsageError, match="already"):
        smp.DistributedModel(net())
    with pytest.raises(smp.UsageError, match="cannot be copied or pickled.*local_named_parameters"):
        torch.optim.swa_utils.AveragedModel(model)
    with pytest.raises(smp.StepError, match="outside a step function"):
        model(batch())
    with pytest.raises(smp.StepError, match="outside a step function"):
        model.backward(torch.ones((), requires_grad=True))
    with pytest.raises(smp.StepError, match=r"'x' has shape \(3, 6\).*2 microbatches"):
        train_step(model)(batch(3))
    train_step(model)(batch())  # the world is as good as before

    @smp.step
    def no_loss(x: Tensor) -> None:
        model(x)
        model.backward(x.sum())

    with pytest.raises(smp.StepError, match="does not depend on any parameter"):
        no_loss(batch())

    @smp.step
    def nested(x: Tensor) -> None:
        train_step(model)(x)

    with pytest.raises(smp.StepError, match="inside a step function"):
        nested(batch())
    with pytest.raises(smp.StepError, match="no_such"):
        smp.step(non_split_inputs=["no_such"])(lambda x: x)
    train_step(model)(batch())


@on_ranks(2, config={"microbatches": 2, "ddp": True})
def test_without_a_pipeline_the_decorator_is_optional() -> None:
    """A script that only wants data parallelism keeps its plain loop."""
    module, reference = net(), net()
    model = smp.DistributedModel(module)
    parts = [batch(seed=replica) for replica in range(2)]
    model(parts[smp.dp_rank()]).pow(2).mean().backward()
    for part in parts:
        (reference(part).pow(2).mean() / 2).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12)

    @smp.step
    def plain_backward(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    model.zero_grad()
    plain_backward(parts[smp.dp_rank()])  # the mean over microbatches, too
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12)


@on_ranks(2, config=PP2)
def test_a_state_dict_of_another_model_is_refused_before_the_first_step() -> None:
    """Found out in the first step, it would leave a model half set up."""
    model = smp.DistributedModel(net())
    with pytest.raises(smp.CheckpointError, match="unexpected: other"):
        model.load_state_dict({"other": torch.zeros(1)})
    train_step(model)(batch())


@on_ranks(2, config=PP2)
def test_microbatches_of_one_function_can_differ() -> None:
    """Evaluation and generation run on batches of one."""
    model = smp.DistributedModel(net())
    train_step(model)(batch())

    @smp.step(microbatches=1)
    def predict(x: Tensor) -> Tensor:
        return F.relu(model(x))

    with torch.no_grad():
        outputs = predict(batch(1))
    assert len(outputs.outputs) == 1
    torch.testing.assert_close(outputs.concat(), F.relu(net()(batch(1))).detach())


@on_ranks(2, config={"ddp": True})
def test_uneven_batches_end_by_join() -> None:
    """A replica with fewer batches must neither hang the others nor drop out of their mean."""
    module, reference = net(), net()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    counts = (3, 1)
    with model.join():
        for n in range(counts[smp.dp_rank()]):
            optimizer.zero_grad()
            model.backward(model(batch(seed=10 * n + smp.dp_rank())).pow(2).mean())
            optimizer.step()
    for n in range(3):
        plain.zero_grad()
        for replica in range(2):
            if n < counts[replica]:
                (reference(batch(seed=10 * n + replica)).pow(2).mean() / 2).backward()
        plain.step()
    for mine, expected in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


@on_ranks(4, config=PP2_DP2)
def test_a_communication_hook_reduces_the_gradients_of_every_stage() -> None:
    """Compression hooks written for torch's DistributedDataParallel must work unchanged."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    module, reference = net(), net()
    model = smp.DistributedModel(module)
    model.register_comm_hook(smp.get_dp_process_group(), allreduce_hook)
    train = train_step(model)
    parts = [batch(seed=replica) for replica in range(2)]
    train(parts[smp.rdp_rank()])
    for part in parts:
        (reference(part).pow(2).mean() / 2).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12)


@on_ranks(4, config=PP2_DP2)
def test_ranks_seeded_differently_start_from_the_first_replica() -> None:
    """Replicas that start apart never meet again."""
    torch.manual_seed(smp.rdp_rank())
    model = smp.DistributedModel(Net().double())
    train_step(model)(batch())
    first, second = smp.allgather([p.detach().clone() for p in model.parameters()], smp.RDP_GROUP)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@on_ranks(2, config={**PP2, "auto_partition": False, "default_partition": 0})
def test_members_of_a_placed_container_run_on_its_stage_when_the_model_iterates_over_it() -> None:
    """Otherwise their weights would travel to the activations at every step."""

    class Iterating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.rest = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for module in self.rest:
                x = module(x)
            return x

    torch.manual_seed(0)
    module = Iterating().double()
    reference = copy.deepcopy(module)
    smp.set_partition(module.rest, 1)
    ran: list[str] = []

    def note(name: str) -> None:
        if not smp.is_tracing():
            ran.append(name)

    for name, child in module.named_modules():
        child.register_forward_hook(lambda _module, _args, _output, name=name: note(name))
    loss = train_step(smp.DistributedModel(module))(batch()).reduce_mean()
    torch.testing.assert_close(loss, reference(batch()).pow(2).mean().detach())
    here = {name for name in ran if name}
    assert here == ({"first"} if smp.pp_rank() == 0 else {"rest.0", "rest.1", "rest.2"})


@on_ranks(1, config={"microbatches": 2})
def test_a_function_mode_around_the_step_changes_nothing() -> None:
    """torch.set_default_device is one: under it, torch's backward calls itself once more and scaled the loss twice."""
    module, reference = net(), net()
    model = smp.DistributedModel(module)
    with torch.device("cpu"):
        train_step(model)(batch())
    reference(batch()).pow(2).mean().backward()
    for mine, expected in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-9, atol=1e-12)
