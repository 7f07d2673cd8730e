"""Parameters without memory: which ones, who initialises them, and that all degrees arrive at one model."""

import gc

import pytest
import torch
from torch import nn

import smp
from smp import runtime
from smp.errors import UsageError
from smp.nn import DistributedEmbedding, DistributedLayerNorm, DistributedLinear
from smp.tp.convert import convert
from smp.tp.delayed import has_delayed, is_delayed, materialize
from smp.tp.shard import spec_of
from tests.harness import on_ranks
from tests.tp.twins import config


class Table(nn.Module):
    """Values known to nobody else: no reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.arange(4.0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8, padding_idx=1)
        self.table = Table()
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.LayerNorm(8)
        self.batch_norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12)
        self.last = nn.Linear(12, 8, bias=False)
        self.last.weight.requires_grad_(False)


def make() -> Net:
    with smp.delay_param_initialization():
        return Net()


def test_parameters_take_no_memory_and_stay_the_same_objects():
    """Also for an optimizer that was made before; buffers and values nobody else knows are real from the start."""
    net = make()
    params = list(net.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    assert [name for name, p in net.named_parameters() if not p.is_meta] == ["table.positions"]
    assert not net.batch_norm.running_mean.is_meta
    assert has_delayed(net)
    materialize(net)
    assert not has_delayed(net)
    assert all(a is b for a, b in zip(net.parameters(), params))
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params))
    assert not any(p.is_meta or p.isnan().any() for p in net.parameters())
    assert [name for name, p in net.named_parameters() if not p.requires_grad] == ["last.weight"]
    net.head(net.norm(net.embedding(torch.tensor([2, 3])))).sum().backward()
    before = net.head.weight.clone()
    optimizer.step()
    assert not torch.equal(net.head.weight, before)


def test_values_are_those_of_reset_parameters():
    """Ranges and constants of torch's own modules, containers that overrule their children, padding."""
    net = make()
    materialize(net, seed=3)
    assert net.embedding.weight[1].eq(0).all()
    assert 0.5 < net.embedding.weight[2:].std() < 1.5
    assert net.table.positions.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert net.attention.out_proj.bias.eq(0).all()  # nn.MultiheadAttention says so, after nn.Linear said otherwise
    assert net.attention.in_proj_bias.eq(0).all()
    assert net.attention.in_proj_weight.abs().max() <= (6 / 32) ** 0.5
    assert net.norm.weight.eq(1).all()
    assert 0 < net.head.weight.abs().max() <= 8**-0.5


def test_values_depend_on_seed_and_name_alone():
    """And the script's random stream goes on as if nothing had been drawn."""
    first, second, third = make(), make(), make()
    torch.manual_seed(7)
    state = torch.get_rng_state()
    materialize(first, seed=3)
    torch.rand(5)
    materialize(second, seed=3)
    torch.manual_seed(7)
    materialize(third, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))
    assert not torch.equal(first.head.weight, third.head.weight)
    assert not torch.equal(first.head.weight.flatten()[:8], first.last.weight.flatten()[:8])


def test_tied_parameters_stay_tied_and_values_that_replace_others_are_kept():
    """Tying, and loading by assignment, happen after a parameter was registered first."""
    with smp.delay_param_initialization():
        net = Net()
        net.head.weight = nn.Parameter(torch.full((12, 8), 2.0))
        net.last.weight = net.embedding.weight
    materialize(net)
    assert net.head.weight.eq(2).all()
    assert net.last.weight is net.embedding.weight


def test_contexts_nest():
    """The innermost counts."""
    with smp.delay_param_initialization():
        with smp.delay_param_initialization(enabled=False):
            assert not nn.Linear(2, 2).weight.is_meta
        assert nn.Linear(2, 2).weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_init_weights_of_a_model_is_applied():
    """`_init_weights(module)` as transformers and others have it, from the nearest module that has one."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
            self.apply(self._init_weights)

        def _init_weights(self, module):
            if isinstance(module, nn.Linear):
                module.weight.data.fill_(3.0)
                module.bias.data.zero_()
            elif isinstance(module, nn.Sequential):
                for name, param in module.named_parameters():
                    if name == "1.weight":
                        param.data.fill_(5.0)

    with smp.delay_param_initialization():
        model = Model()
    materialize(model)
    assert model.inner[0].weight.eq(3).all()
    assert model.inner[0].bias.eq(0).all()
    assert model.inner[1].weight.eq(5).all()


def test_parameters_that_nobody_initialises_are_named():
    """Else a model would start from whatever was in memory."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.scale = nn.Parameter(torch.ones(2))

    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

        def reset_parameters(self):
            nn.init.ones_(self.a)
            self.b.data.copy_(self.a.data)

    with smp.delay_param_initialization():
        scaled, copies = nn.Sequential(Scaled()), Copies()
    state = torch.get_rng_state()
    with pytest.raises(UsageError, match=r"Scaled \(0\) does not initialise its parameter 'scale'"):
        materialize(scaled)
    with pytest.raises(UsageError, match="Copies .* cannot initialise its parameter 'b' alone"):
        materialize(copies)
    assert torch.equal(torch.get_rng_state(), state)
    assert scaled[0].scale is next(p for n, p in scaled.named_parameters() if n == "0.scale")


def test_parameters_of_others_get_a_shape_and_no_storage():
    """What lives on another stage."""
    net = make()
    reference = make()
    materialize(net, owned=lambda name: name.startswith("head"), seed=3)
    materialize(reference, seed=3)
    assert torch.equal(net.head.weight, reference.head.weight)
    assert net.last.weight.shape == (8, 12)
    assert net.last.weight.device.type == "cpu"
    assert net.last.weight.untyped_storage().nbytes() == 4
    assert not has_delayed(net)


def whole_and_split(prescaled: bool):
    whole = make()
    materialize(whole, seed=3)
    split = make()
    smp.set_tensor_parallelism(split)
    params = list(split.parameters())
    split = convert(split, runtime.get())
    assert all(a is b for a, b in zip(split.parameters(), params))
    return whole, split


@pytest.mark.parametrize("tp", [2, 4])
@on_ranks(lambda a: a["tp"], config=lambda a: config(a["tp"], False))
def test_parts_are_slices_of_the_whole_model(tp):
    """Any tp starts from the model that one process starts from."""
    whole, split = whole_and_split(False)
    assert type(split.head) is DistributedLinear
    assert type(split.embedding) is DistributedEmbedding
    assert is_delayed(split.head.weight)
    materialize(split, seed=3)
    for (name, param), expected in zip(split.named_parameters(), whole.parameters()):
        spec = spec_of(param)
        assert torch.equal(param, spec.split(expected) if spec else expected), name
    assert type(split.head) is DistributedLinear


@on_ranks(2, config=config(2, False))
def test_the_seed_is_agreed_by_all_ranks():
    """Ranks seeded differently still make one model."""
    torch.manual_seed(runtime.get().rank)
    _, split = whole_and_split(False)
    torch.manual_seed(17)  # what counts is the seed under which the model was made
    materialize(split)
    mine = [split.attention.in_proj_weight.tolist(), split.head.weight[0].abs().sum().item()]
    whole = make()
    materialize(whole, seed=0)
    assert mine[0] == whole.attention.in_proj_weight.tolist()
    assert torch.equal(split.head.weight, spec_of(split.head.weight).split(whole.head.weight))


@on_ranks(2, config=config(2, False))
def test_one_whole_tensor_exists_at_a_time():
    """Largest live storage while a model of 20 equal layers is split: its parts and one whole layer."""

    def storages() -> dict[int, int]:
        gc.collect()
        return {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if type(t) in (torch.Tensor, nn.Parameter)
            and t.device.type == "cpu"
            and t.layout == torch.strided
            and not torch._C._functorch.is_functorch_wrapped_tensor(t)  # it has no storage
        }

    earlier = storages()  # what other tests in this process have left

    class Watched(nn.Linear):
        largest = 0

        def reset_parameters(self):
            super().reset_parameters()
            if not self.weight.is_meta:
                alive = [n for p, n in storages().items() if p not in earlier and n >= 64 * 64 * 4 / 2]
                Watched.largest = max(Watched.largest, sum(alive))

    with smp.delay_param_initialization():
        layers = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(10)], Watched(64, 64, bias=False))
    smp.set_tensor_parallelism(layers)
    layers = convert(layers, runtime.get())
    materialize(layers)
    size = 64 * 64 * 4
    assert 10 * size / 2 <= Watched.largest <= 10 * size / 2 + size + size / 2


@on_ranks(2, config=config(2, False))
def test_distributed_modules_made_under_delay_start_as_those_made_at_once():
    """The same initialisation, parts of one whole."""
    with smp.delay_param_initialization():
        model = nn.Sequential(DistributedEmbedding(8, 4), DistributedLinear(4, 8), DistributedLayerNorm(8))
        twin = nn.Sequential(nn.Identity(), nn.Linear(4, 8), nn.LayerNorm(8))
    assert all(p.is_meta for p in model.parameters())
    assert model[1].weight.shape == (4, 4)
    materialize(model, seed=5)
    materialize(twin, seed=5)
    for name in ("1.weight", "1.bias", "2.weight", "2.bias"):
        param = model.get_parameter(name)
        assert torch.equal(param, spec_of(param).split(twin.get_parameter(name)))
    assert 0.005 < model[0].weight.std() < 0.04
    assert model(torch.tensor([1, 2])).shape == (2, 8)


def test_transformers_models_start_with_their_own_initialisation(tmp_path):
    """Standard deviations as without the delay, tied weights tied; a checkpoint loaded inside keeps its values."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=38, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    reference = transformers.T5ForConditionalGeneration(config)
    with smp.model_creation(tensor_parallelism=True):
        model = transformers.T5ForConditionalGeneration(config)
    assert has_delayed(model)
    materialize(model)
    assert model.lm_head.weight is model.shared.weight
    for (name, param), other in zip(model.named_parameters(), reference.parameters()):
        scale = other.norm() / other.numel() ** 0.5
        assert abs(param.norm() / param.numel() ** 0.5 - scale) < 0.25 * scale, name
    reference.save_pretrained(tmp_path)
    with smp.model_creation(tensor_parallelism=True):
        loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
    materialize(loaded)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), reference.parameters()))
