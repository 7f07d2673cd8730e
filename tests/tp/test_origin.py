"""Origins: every value of the user's model is found in the parts of the converted one, by name and place."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import smp
from examples import train_gpt
from smp import runtime
from smp.tp.convert import convert
from smp.tp.delayed import materialize
from smp.tp.layouts import FUSED_KV, FUSED_QKV, SAME, TRANSPOSED, Fused, HeadMajor, Layout
from smp.tp.origin import Block, Origin, origins, tied_names
from smp.tp.shard import ShardSpec
from tests.harness import on_ranks
from tests.tp import hf_models, test_hf_decoders, test_plan_models
from tests.tp.test_custom_attention import OwnedAttention
from tests.tp.twins import tp_group

# Pure


@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        (SAME, [(6, 4)]),
        (SAME, [()]),
        (TRANSPOSED, [(6, 4)]),
        (FUSED_QKV, [(4, 3)] * 3),
        (FUSED_KV, [(5,)] * 2),
        (Fused((2, 1, 1)), [(8, 3), (4, 3), (4, 3)]),
        (HeadMajor(3, "heads"), [(24, 2)]),
        (HeadMajor(3, "heads"), [(24,)]),
    ],
)
def test_blocks_of_layouts_say_what_merge_does(layout: Layout, shapes: list[tuple[int, ...]]) -> None:
    """Each value of the sources is numbered; a block in the wrong place would make checkpoints mix up weights."""
    sources = {f"source {index}": torch.rand(shape) for index, shape in enumerate(shapes)}
    config = SimpleNamespace(heads=4)
    merged = layout.merge(list(sources.values()), config)
    rebuilt = torch.full(merged.shape, torch.nan)
    for block in layout.blocks(list(sources), shapes, config):
        assert block.in_local(rebuilt).isnan().all(), "blocks overlap"
        block.in_local(rebuilt).copy_(block.in_source(sources[block.source]))
    assert torch.equal(rebuilt, merged)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_parts_of_a_block_are_cut_along_any_dimension(dim: int, transposed: bool) -> None:
    """Also along a dimension that is swapped, in sections, and of three dimensions (experts)."""
    source = torch.arange(4 * 8 * 12).reshape(4, 8, 12)
    whole = source.transpose(1, 2) if transposed else source
    origin = Origin((Block("w", (0, 0, 0), (4, 8, 12), (0, 0, 0), transposed),), {"w": (4, 8, 12)})
    length = whole.shape[dim]
    for part in range(2):
        spec = ShardSpec(tuple(whole.shape), dim, part, 2, sections=(length // 2, length // 2))
        local = torch.full(spec.local_shape, -1)
        for block in origin.part(spec).blocks:
            block.in_local(local).copy_(block.in_source(source))
        assert torch.equal(local, spec.split(whole))


def test_padding_has_no_origin() -> None:
    """Three rows over two parts: the second part has one, and one of padding."""
    origin = Origin.whole("table", (3, 2))
    last = origin.part(ShardSpec((3, 2), 0, 1, 2, padded=True))
    assert last.blocks == (Block("table", (2, 0), (1, 2), (0, 0)),)
    empty = Origin.whole("table", (1, 2)).part(ShardSpec((1, 2), 0, 1, 2, padded=True))
    assert empty.blocks == ()


# Every kind of model


def found(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of the user's module, put together from the parts of all tp_ranks; NaN where nothing was."""
    state = module.state_dict()
    own = origins(module)
    assert own.keys() == {name for name, value in state.items() if isinstance(value, Tensor)}
    group = tp_group()
    mine = {name: (origin, state[name].detach().clone()) for name, origin in own.items()}
    whole: dict[str, Tensor] = {}
    for parts in runtime.get().transport.all_gather_object(mine, group):
        filled: dict[str, Tensor] = {}
        for origin, local in {id(origin): (origin, local) for origin, local in parts.values()}.values():
            for block in origin.blocks:
                shape = origin.shapes[block.source]
                times = filled.setdefault(block.source, torch.zeros(shape, dtype=torch.int))
                block.in_source(times).add_(1)
                target = whole.setdefault(block.source, torch.full(shape, torch.nan, dtype=torch.float64))
                block.in_source(target).copy_(block.in_local(local))
        assert all(times.max() <= 1 for times in filled.values()), "a place is covered twice by one rank"
    return whole


def check(build: Callable[[], nn.Module], prepare: Callable[[nn.Module], object] = smp.set_tensor_parallelism) -> bool:
    """Whether anything was replaced under another name."""
    torch.manual_seed(runtime.get().rank)  # ranks that start from different values, of which tp_rank 0's count
    module = build()
    group = tp_group()
    expected = {name: value.double().clone() for name, value in module.state_dict().items()}
    expected = runtime.get().transport.broadcast_object(expected, group, group.ranks[0])
    first = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    prepare(module)
    module = convert(module, runtime.get())
    got = found(module)
    assert got.keys() == expected.keys() & first  # of tied names the first
    for name, value in got.items():
        assert torch.equal(value, expected[name]), name
    return not module.state_dict().keys() <= expected.keys()


def settings(arguments: dict[str, int]) -> dict[str, object]:
    return {"tensor_parallel_degree": arguments["tp"], "ddp": True}


DEGREES = pytest.mark.parametrize("tp", [1, 2, 4])
TWO = {"tensor_parallel_degree": 2, "ddp": True}
HEADS = {"num_attention_heads": 4}
ENCODERS = {
    "bert": hf_models.bert("BertForSequenceClassification", **HEADS),
    "bert cross attention": hf_models.bert("BertLMHeadModel", **hf_models.CROSS, **HEADS),
    "roberta": hf_models.bert("RobertaForMaskedLM", **HEADS),
    "vit": hf_models.vit(**HEADS),
    "vit without bias": hf_models.vit(qkv_bias=False, **HEADS),
    "t5": hf_models.t5(num_heads=4),
    "t5 gated": hf_models.t5(num_heads=4, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "umt5": hf_models.t5("UMT5", num_heads=4),
}


@DEGREES
@on_ranks(lambda arguments: arguments["tp"], config=settings, timeout=120)
def test_encoders_are_found_again_value_by_value(tp: int) -> None:
    """Fused queries, keys and values and gates; also of families that are replaced at tensor degree 1."""
    for name, build in ENCODERS.items():
        assert check(build), name


@DEGREES
@on_ranks(lambda arguments: arguments["tp"], config=settings, timeout=120)
def test_language_models_are_found_again_value_by_value(tp: int) -> None:
    """Transposed matrices, heads one after the other, tied and untied heads, a vocabulary that does not divide."""
    assert test_hf_decoders.VOCABULARY % 4
    variants = {name: (name, {}) for name in test_hf_decoders.MODELS}
    variants |= {name: (model, more) for name, (model, _, more) in test_hf_decoders.SWITCHES.items()}
    for name, (model, switches) in variants.items():
        assert check(partial(test_hf_decoders.MODELS[model], **switches)), name


@DEGREES
@on_ranks(lambda arguments: arguments["tp"], config=settings, timeout=120)
def test_layers_alone_are_found_again_value_by_value(tp: int) -> None:
    """Of models that stay as they are around them."""

    def layers(model: nn.Module) -> None:
        for layer in model.get_submodule("gpt_neox.layers" if hasattr(model, "gpt_neox") else "transformer.h"):
            smp.set_tensor_parallelism(layer)

    for build in test_hf_decoders.MODELS.values():
        assert check(build, layers)


@DEGREES
@on_ranks(lambda arguments: arguments["tp"], config=settings, timeout=120)
def test_models_split_by_their_plan_are_found_again_value_by_value(tp: int) -> None:
    """Linears cut in place, fused ones in sections, experts in three dimensions. Names stay."""
    for name, build in test_plan_models.MODELS.items():
        assert not check(build), name


# Users' classes


@DEGREES
@on_ranks(lambda arguments: arguments["tp"], config=settings)
def test_a_users_carry_over_may_rename(tp: int) -> None:
    """The Parameter objects tell."""
    assert check(lambda: train_gpt.GPT(2, 16, 4, 8)) == (tp > 1)


@on_ranks(2, config=TWO)
def test_a_parameter_that_a_user_made_anew_is_its_own_origin() -> None:
    """Nothing says where its values come from."""
    module = nn.Sequential(nn.Linear(8, 8), OwnedAttention(8, 2))
    smp.set_tensor_parallelism(module)
    got = origins(convert(module, runtime.get()))
    assert got["1.qkv.weight"].shapes == {"1.qkv.weight": (24, 8)}
    assert got["1.dense.weight"].shapes == {"1.out.weight": (8, 8)}


class Tied(nn.Module):
    """A buffer under two names, a scalar, one that is in no state dict, and a table that two modules use."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("first", torch.arange(3.0))
        self.register_buffer("second", self.first)
        self.register_buffer("lost", torch.zeros(1), persistent=False)
        self.scale = nn.Parameter(torch.tensor(2.0))


@on_ranks(2, config=TWO)
def test_tied_names_have_one_origin_and_buffers_their_own() -> None:
    """Stored once, read once."""
    module = Tied()
    smp.set_tensor_parallelism(module)
    module = convert(module, runtime.get())
    got = origins(module)
    assert "lost" not in got and got["scale"] == Origin.whole("scale", ()) and "norm.num_batches_tracked" in got
    assert got["second"] is got["first"] and got["head.weight"] is got["table.weight"]
    assert tied_names(module) == (("first", "second"), ("table.weight", "head.weight"))
    (block,) = got["table.weight"].blocks
    rank = runtime.get().tp_rank
    assert block == Block("table.weight", (3 * rank, 0), (3, 4), (0, 0))


@on_ranks(2, config=TWO)
def test_tied_names_are_those_of_the_users_module() -> None:
    """A full file of weights has an entry for each; also where the twin has other names."""
    module = test_hf_decoders.gpt2()
    smp.set_tensor_parallelism(module)
    module = convert(module, runtime.get())
    assert "lm_head.weight" in module.state_dict() and "transformer.wte.weight" not in module.state_dict()
    assert tied_names(module) == (("transformer.wte.weight", "lm_head.weight"),)
    whole = origins(module, whole=True)["word_embedding.weight"]
    assert whole == Origin.whole("transformer.wte.weight", (test_hf_decoders.VOCABULARY, 16))


@DEGREES
@on_ranks(lambda arguments: arguments["tp"], config=settings)
def test_delayed_parameters_keep_their_origin(tp: int) -> None:
    """Fused from shells that the old module initialises."""
    with smp.delay_param_initialization():
        module = test_hf_decoders.gptneox(tie_word_embeddings=True)
    plain = copy.deepcopy(module)
    smp.set_tensor_parallelism(module)
    module = convert(module, runtime.get())
    materialize(module, seed=3)
    got = found(module)
    for name, value in got.items():
        assert value.isfinite().all(), name
    assert got.keys() == {name for name, _ in plain.named_parameters()}
