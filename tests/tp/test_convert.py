"""Which modules are replaced, what is carried over, and what is left whole with which warning."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smp
from smp import runtime
from smp.errors import UsageError
from smp.nn import DistributedEmbedding, DistributedLayerNorm, DistributedLinear, DistributedModule
from smp.tp.contexts import mark_of
from smp.tp.convert import convert
from smp.tp.shard import spec_of
from tests.harness import on_ranks
from tests.logs import log_lines
from tests.tp.twins import assert_trains_like_its_twin, config, tp_group

on_two = on_ranks(2, config=config(2, False))


def converted(module: nn.Module) -> nn.Module:
    return convert(module, runtime.get())


# Marks


def test_innermost_context_wins():
    """Without processes: marks only."""
    before = nn.Module.__init__
    with smp.tensor_parallelism(fused_softmax=False):
        outer = nn.Linear(2, 2)
        with smp.tensor_parallelism(enabled=False):
            inner = nn.Linear(2, 2)
        after = nn.Linear(2, 2)
    outside = nn.Linear(2, 2)
    assert nn.Module.__init__ is before
    assert mark_of(outer).enabled
    assert mark_of(outer).options == {"fused_softmax": False}
    assert not mark_of(inner).enabled
    assert mark_of(after).enabled
    assert mark_of(outside) is None


def test_contexts_end_with_an_exception():
    """Else every later module would be marked."""
    before, register = nn.Module.__init__, nn.Module.register_parameter
    dtype = torch.get_default_dtype()
    with pytest.raises(ZeroDivisionError):
        with smp.model_creation(tensor_parallelism=True, dtype=torch.float64):
            assert torch.get_default_dtype() == torch.float64
            1 / 0  # noqa: B018
    assert nn.Module.__init__ is before
    assert nn.Module.register_parameter is register
    assert torch.get_default_dtype() == dtype


def test_set_tensor_parallelism_overrides_earlier_marks_below():
    """For the module and everything in it."""
    with smp.tensor_parallelism():
        module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    smp.set_tensor_parallelism(module[1], False)
    assert [mark_of(m).enabled for m in module.modules()] == [True, True, False, False]
    with pytest.raises(UsageError, match="Module"):
        smp.set_tensor_parallelism(3)
    with pytest.raises(UsageError, match="True or False"):
        smp.set_tensor_parallelism(module, "yes")


def test_model_creation_is_the_contexts_and_a_dtype():
    """Marks with the options, parameters without memory, the dtype."""
    with smp.model_creation(tensor_parallelism=True, dtype=torch.float16, use_alibi=True):
        module = nn.Linear(4, 4)
    assert mark_of(module).options == {"use_alibi": True}
    assert module.weight.is_meta
    assert module.weight.dtype == torch.float16
    with smp.model_creation():
        assert not mark_of(nn.Linear(4, 4)).enabled


# What is replaced


class Block(nn.Module):
    def __init__(self, size: int, factor: int = 2) -> None:
        super().__init__()
        self.up = nn.Linear(size, factor * size)
        self.norm = nn.LayerNorm(factor * size)
        self.down = nn.Linear(factor * size, size)

    def forward(self, x, scale=1.0):
        return x + self.down(self.norm(F.gelu(self.up(x)))) * scale


class DistributedBlock(DistributedModule):
    """Two matrices with one reduction between them; arguments and names are its own."""

    def __init__(self, hidden: int, inner: int, fused_softmax: bool = True) -> None:
        super().__init__()
        self.fused_softmax = fused_softmax
        self.up = DistributedLinear(hidden, inner, split="out")
        self.norm = nn.LayerNorm(inner)
        self.down = DistributedLinear(inner, hidden, split="in")

    def forward(self, factor, x):
        return {"out": x + self.down(self.norm(F.gelu(self.up(x)))) * factor}


@on_two
def test_supported_modules_inside_a_marked_one_are_replaced():
    """The Parameter objects stay, parts of them; names stay; what is not marked stays."""
    model = nn.Sequential(nn.Embedding(8, 4), Block(4), nn.Linear(4, 2))
    names = [name for name, _ in model.named_parameters()]
    params = list(model.parameters())
    forward = model[1].up.forward
    smp.set_tensor_parallelism(model[0])
    smp.set_tensor_parallelism(model[1])
    out = converted(model)
    assert out is model
    assert [type(m) for m in (model[0], model[1].up, model[1].norm, model[2])] == [
        *[DistributedEmbedding, DistributedLinear, DistributedLayerNorm, nn.Linear]
    ]
    assert [name for name, _ in model.named_parameters()] == names
    assert all(a is b for a, b in zip(model.parameters(), params))
    assert model[1].up._orig_forward == forward
    assert model[1].up.weight.shape == (4, 4)
    assert spec_of(model[1].up.weight).global_shape == (8, 4)
    assert model[1].up.weight._smp_scaled_batch
    assert spec_of(model[2].weight) is None
    assert not hasattr(model[1].down.bias, "_smp_scaled_batch")
    assert converted(model) is model  # nothing left to do


@on_two
def test_a_converted_model_trains_like_the_whole_one():
    """Both registered and built-in modules in one model."""
    torch.manual_seed(1)
    model = nn.Sequential(Block(4), nn.Linear(4, 6), Block(6, factor=3)).double()
    batches = [[torch.randn(3, 4, dtype=torch.float64) for _ in range(2)] for _ in range(3)]
    assert_trains_like_its_twin(model, batches, make_optimizer=lambda p: torch.optim.Adam(p, lr=0.01))


@pytest.mark.parametrize("prescaled", [False, True])
@on_ranks(2, config=lambda a: config(2, a["prescaled"]))
def test_outermost_registered_module_wins_with_all_its_hooks(prescaled):
    """init_hook, forward_hook, return_hook and an option that overrides; parameters carried over by name."""
    smp.tp_register_with_module(
        Block,
        DistributedBlock,
        init_hook=lambda size, factor=2: ((size, factor * size), {"fused_softmax": True}),
        forward_hook=lambda x, scale=1.0: ((scale, x), {}),
        return_hook=lambda output: output["out"],
    )
    torch.manual_seed(1)
    block = Block(4, factor=3).double()
    whole = copy.deepcopy(block)
    smp.set_tensor_parallelism(block, fused_softmax=False)
    split = converted(block)
    assert type(split) is DistributedBlock
    assert split.fused_softmax is False
    assert type(split.norm) is nn.LayerNorm  # its own, outermost wins
    assert split._orig_forward == block.forward
    generator = torch.Generator().manual_seed(0 if prescaled else tp_group().rank)
    x = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(split(x, scale=2.0), whole(x, scale=2.0))
    assert torch.equal(split.up.weight, spec_of(split.up.weight).split(whole.up.weight))
    copied = copy.deepcopy(split)
    with torch.no_grad():
        copied.down.bias.add_(1.0)
    torch.testing.assert_close(copied(x) - split(x), torch.ones(3, 4, dtype=torch.float64))


@on_two
def test_decorator_registers_and_later_registration_replaces():
    """`tp_register` on a class, arguments recorded when an instance is made, also through a subclass's own class."""

    class Twin(DistributedModule):
        def __init__(self, size, kind="a"):
            super().__init__()
            self.size, self.kind = size, kind
            self.create_parameter("weight", (size,), nn.init.ones_, dim=0)

        def forward(self, x):
            return x

    @smp.tp_register(Twin)
    class Mine(nn.Module):
        def __init__(self, size, kind="b"):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(float(size)))

    class Sub(Mine):
        pass

    with smp.tensor_parallelism():
        model = nn.ModuleList([Mine(4), Mine(4, kind="c"), Sub(4)])
    model = converted(model)
    assert [m.kind for m in model[:2]] == ["a", "c"]
    assert type(model[2]) is Sub
    rank = tp_group().rank
    assert model[0].weight.tolist() == [2.0 * rank, 2.0 * rank + 1]


@on_two
def test_wrong_registrations_are_refused():
    """With the class in the message."""
    with pytest.raises(UsageError, match="DistributedModule"):
        smp.tp_register(nn.Linear)(Block)
    with pytest.raises(UsageError, match="only classes"):
        smp.tp_register_with_module(3, DistributedBlock)
    with pytest.raises(UsageError, match="init_hook"):
        smp.tp_register_with_module(Block, DistributedBlock, init_hook=3)

    class Late(nn.Module):
        pass

    late = Late()
    smp.tp_register_with_module(Late, DistributedBlock)
    smp.set_tensor_parallelism(late)
    with pytest.raises(UsageError, match="made before its class Late was registered"):
        converted(late)
    linear = nn.Linear(4, 4)
    smp.set_tensor_parallelism(linear, fused_sotfmax=True)
    with pytest.raises(UsageError, match="did you mean 'fused_softmax'"):
        converted(linear)


# What stays whole


@on_two
def test_what_does_not_divide_is_left_whole_with_one_warning():
    """One warning for each reason, which names the modules; the model works."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3), nn.Embedding(5, 3), nn.Embedding(4, 4, sparse=True))
    model.append(nn.Linear(3, 5))
    smp.set_tensor_parallelism(model)
    with log_lines() as lines:
        model = converted(model)
    assert [type(m) for m in model] == [nn.Linear, nn.Linear, nn.Embedding, nn.Embedding, nn.Linear]
    lines = [line for line in lines if "whole" in line]
    if tp_group().rank == 0:
        assert len(lines) == 4
        assert "0, 4 whole: out_features 5, in_features 3" in lines[0]
        assert "sparse" in lines[3]
    else:
        assert not lines


@on_two
def test_modules_that_share_weights_are_left_whole():
    """A weight shared by name, and one said to be shared by register_parameter."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Bilinear(4, 4, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[1].extra = model[0].weight
    smp.register_parameter(model[3], model[2].weight)
    smp.set_tensor_parallelism(model)
    with log_lines() as lines:
        model = converted(model)
    assert [type(m) for m in model[:5:2]] == [nn.Linear, nn.Linear, DistributedLinear]
    if tp_group().rank == 0:
        text = "\n".join(lines)
        assert "leaves 0 whole: it shares weights with 1" in text
        assert "leaves 2 whole: it shares weights with 3" in text


class Tied(nn.Module):
    def __init__(self, vocabulary=12, size=4, second=False):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.other = nn.Embedding(vocabulary, size)
        self.inner = nn.Linear(size, size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        if second:
            self.other.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.inner(self.embedding(ids) + self.other(ids)).tanh())


@pytest.mark.parametrize("prescaled", [False, True])
@on_ranks(2, config=lambda a: config(2, a["prescaled"]))
def test_embedding_and_head_stay_tied_and_are_both_cut(prescaled):
    """One Parameter, cut once along the vocabulary; gradients of all uses add up as in the whole model."""
    for second in (False, True):
        torch.manual_seed(1)
        model = Tied(second=second).double()
        ids = [torch.randint(12, (2, 3), generator=torch.Generator().manual_seed(k)) for k in range(6)]
        batches = [[ids[k], ids[k if prescaled else k + 3]] for k in range(3)]
        model = assert_trains_like_its_twin(model, batches, make_optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
        assert model.head.weight is model.embedding.weight
        assert model.head.weight.shape == (6, 4)
        assert spec_of(model.head.weight).dim == 0
        assert spec_of(model.other.weight).dim == (0 if second else 1)


@on_two
def test_tied_modules_of_which_one_is_not_marked_stay_whole():
    """And those whose vocabulary does not divide: all or none."""
    for model, name in [(Tied(), "head"), (Tied(vocabulary=13), None)]:
        smp.set_tensor_parallelism(model)
        if name:
            smp.set_tensor_parallelism(getattr(model, name), False)
        model = converted(model)
        assert type(model.embedding) is nn.Embedding
        assert type(model.head) is nn.Linear
        assert type(model.inner) is DistributedLinear
        assert model.head.weight is model.embedding.weight


@on_two
def test_a_module_used_twice_is_replaced_once():
    """In both places, by the same twin."""
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared])})
    smp.set_tensor_parallelism(model)
    model = converted(model)
    assert model["a"] is model["b"][0]
    assert type(model["a"]) is DistributedLinear


@on_two
def test_hooks_flags_and_marks_move_with_the_module():
    """A user's forward hook still fires and can still be removed; eval stays eval."""
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    model[0]._smp_stage = 3
    fired = []
    handle = model[0].register_forward_hook(lambda module, args, output: fired.append(type(module)))
    smp.set_tensor_parallelism(model)
    model = converted(model)
    model(torch.zeros(1, 4))
    handle.remove()
    model(torch.zeros(1, 4))
    assert fired == [DistributedLinear]
    assert not model[0].training
    assert model[0]._smp_stage == 3


@on_two
def test_full_backward_hooks_change_gradients_as_on_the_whole_module():
    """Taken for the old kind of hook, they would get other gradients, and what they return would be put elsewhere."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).double()
    model[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    model[2].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))
    batches = [[torch.randn(3, 4, dtype=torch.float64) for _ in range(2)] for _ in range(2)]
    assert_trains_like_its_twin(model, batches, make_optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


@on_two
def test_a_module_whose_instance_was_changed_is_left_whole():
    """A forward or parameters of its own: the distributed module would compute something else, without a word."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    plain = model[0].forward
    model[0].forward = lambda x: plain(2 * x)
    nn.utils.spectral_norm(model[1])
    model[2].add_module("adapter", nn.Linear(4, 4).double())
    smp.set_tensor_parallelism(model)
    x = torch.randn(3, 4, dtype=torch.float64)
    model.eval()
    expected = model(x)
    with log_lines() as lines:
        model = converted(model)
    assert [type(m) for m in model] == [nn.Linear, nn.Linear, nn.Linear, DistributedLinear]
    torch.testing.assert_close(model(x), expected)
    if smp.rank() == 0:
        text = "\n".join(lines)
        assert "leaves 0 whole: its forward was replaced on the instance" in text
        assert "leaves 1 whole: it has the parameters weight_orig, which DistributedLinear has not" in text
        assert "leaves 2 whole: it has the parameters adapter.bias, adapter.weight" in text


@on_two
def test_attributes_that_users_set_on_a_layer_of_torch_stay():
    """Code around the layer reads them: a scale, a flag for the initialisation."""
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].scale = 0.5
    smp.set_tensor_parallelism(model)
    model = converted(model)
    assert isinstance(model[0], DistributedLinear)
    assert model[0].scale == 0.5


@on_two
def test_ranks_seeded_differently_start_from_tp_rank_0():
    """Parts and whole tensors, buffers too."""
    torch.manual_seed(tp_group().rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[1].running_mean.fill_(tp_group().rank + 1.0)
    smp.set_tensor_parallelism(model[0])
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model = converted(model)
    for param, whole in zip(model.parameters(), reference.parameters()):
        assert torch.equal(param, spec_of(param).split(whole) if spec_of(param) else whole)
    assert model[1].running_mean.eq(1.0).all()


@on_two
def test_ranks_that_mark_different_modules_are_told_so():
    """Before anything is sent."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    smp.set_tensor_parallelism(model[tp_group().rank])
    with pytest.raises(UsageError, match="1 split as Linear"):
        converted(model)
    with pytest.raises(UsageError, match="must build and mark the same model"):
        converted(nn.Linear(4, 4 + tp_group().rank))


@on_two
def test_fused_encoder_layers_do_not_read_parts_as_wholes():
    """nn.TransformerEncoderLayer bypasses its linears in evaluation, unless told otherwise."""
    torch.manual_seed(1)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    whole = copy.deepcopy(model)
    smp.set_tensor_parallelism(model)
    model = converted(model)
    assert type(model.layers[0].linear1) is DistributedLinear
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(model(x), whole(x))
        mask = torch.tensor([[False, False, True], [False, False, False]])
        torch.testing.assert_close(
            model(x, src_key_padding_mask=mask)[~mask], whole(x, src_key_padding_mask=mask)[~mask]
        )


@on_ranks(1, config={})
def test_without_tensor_parallelism_nothing_is_replaced():
    """Degree 1."""
    model = nn.Linear(4, 4)
    smp.set_tensor_parallelism(model)
    assert converted(model) is model
    assert type(model) is nn.Linear


@on_two
def test_register_parameter_checks_its_arguments():
    """And remembers each parameter once."""
    module, param = nn.ReLU(), nn.Parameter(torch.zeros(1))
    smp.register_parameter(module, param)
    smp.register_parameter(module, param)
    assert len(module._smp_used_parameters) == 1
    with pytest.raises(UsageError, match="Parameter second"):
        smp.register_parameter(module, torch.zeros(1))
    with pytest.raises(UsageError, match="Module first"):
        smp.register_parameter(param, param)
