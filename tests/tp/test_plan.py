"""What a model's tensor-parallel plan comes to: what is cut, what is refused, what units take and give back."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp import runtime
from smp.comm import collectives
from smp.errors import StepError
from smp.nn import DistributedEmbedding, DistributedLinear, DistributedModule
from smp.tp.convert import convert
from smp.tp.plan import find_units
from smp.tp.planned import PlannedUnit
from smp.tp.shard import spec_of
from tests.harness import on_ranks
from tests.logs import log_lines
from tests.tp.test_plan_models import MODELS, MORE, SIZES, all_in_float64, model
from tests.tp.twins import config, tp_group

transformers = pytest.importorskip("transformers")


def both(name: str, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    """A model that is split, and the same one whole, in float64."""
    torch.manual_seed(seed)
    build = {**MODELS, **MORE}[name] if not options else model(name, **options)
    whole = build().double()
    split = copy.deepcopy(whole)
    smp.set_tensor_parallelism(split)
    return convert(split, runtime.get()), whole


def tokens(rows: int, length: int = 6, seed: int = 1) -> Tensor:
    return torch.randint(1, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def own(joined: Tensor) -> Tensor:
    """This rank's part of a batch; with a shared batch all of it."""
    group = tp_group()
    return joined if runtime.get().config.prescaled_batch else joined.chunk(group.size)[group.rank]


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def each_batch(n: int = 2) -> Any:
    def decorate(body: Any) -> Any:
        ranked = on_ranks(n, config=lambda a: config(n, a["prescaled"]), timeout=180)(body)
        return pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])(ranked)

    return decorate


# What is cut


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, config=config(2, False), timeout=180)
def test_every_attention_and_mlp_is_a_unit_and_nothing_is_refused(name):
    """With two parts each rank has half of their weights; norms and routers stay, tables are cut as everywhere."""
    split, whole = both(name)
    units = [module for module in split.modules() if isinstance(module, PlannedUnit)]
    assert len(units) == 2 * whole.config.num_hidden_layers
    weights = [p for unit in units for p in unit.parameters()]
    cut = [p for p in weights if spec_of(p) is not None]
    assert sum(p.numel() for p in cut) > 0.9 * sum(p.numel() for p in weights)
    names = [name for name, _ in whole.named_parameters()]
    assert [name for name, _ in split.named_parameters()] == names
    for (_, a), (_, b) in zip(split.named_parameters(), whole.named_parameters()):
        spec = spec_of(a)
        assert tuple(b.shape) == (spec.global_shape if spec else tuple(a.shape))
        close(a, spec.split(b) if spec else b)
    assert isinstance(split.model.embed_tokens, DistributedEmbedding | nn.Embedding)
    norms = [module for module in split.modules() if "Norm" in type(module).__name__]
    assert not any(isinstance(norm, DistributedModule) for norm in norms)


@on_ranks(2, config=config(2, False), timeout=180)
def test_units_keep_their_class_and_can_be_copied():
    """Hooks of transformers look for the class; deepcopy and pickle find their way to the derived one."""
    split, whole = both("llama")
    attention = split.model.layers[0].self_attn
    assert isinstance(attention, type(whole.model.layers[0].self_attn))
    assert isinstance(attention, DistributedModule)
    assert type(attention).__name__ == type(whole.model.layers[0].self_attn).__name__
    for again in (copy.deepcopy(split), pickle.loads(pickle.dumps(split))):
        assert isinstance(again.model.layers[0].self_attn, PlannedUnit)
        ids = own(tokens(4))
        close(again(input_ids=ids).logits, split(input_ids=ids).logits)


@on_ranks(2, config=config(2, False), timeout=180)
def test_the_rest_of_such_a_model_is_split_as_everywhere():
    """Table and head, also where only some layers are marked."""
    split, _ = both("llama")
    assert isinstance(split.model.embed_tokens, DistributedEmbedding)
    assert isinstance(split.lm_head, DistributedLinear)
    some = MODELS["llama"]()
    smp.set_tensor_parallelism(some.model.layers[1])
    convert(some, runtime.get())
    kinds = [isinstance(layer.mlp, PlannedUnit) for layer in some.model.layers]
    assert kinds == [False, True]
    assert not isinstance(some.lm_head, DistributedLinear)


# What is refused


def refused(name: str, change: Any = lambda module: None, num_parts: int = 2) -> dict[str, str]:
    module = MODELS[name]()
    change(module)
    smp.set_tensor_parallelism(module)
    return find_units(module, num_parts, lambda module: False).whole


def test_heads_that_do_not_divide_are_refused_by_name():
    """a1-3: before any weight is cut, with the name of the field and both numbers. The MLPs beside are cut."""
    for why in refused("llama", num_parts=4).values():
        assert why == "num_key_value_heads 2 does not divide by tensor_parallel_degree 4"
    assert set(refused("llama", num_parts=4)) == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    assert "num_attention_heads 4" in next(iter(refused("llama", num_parts=3).values()))


def test_styles_that_are_not_known_are_refused_by_name():
    """A plan of a later version may mean something else by it."""

    def change(module: Any) -> None:
        plan = {**module.config.base_model_tp_plan, "layers.*.self_attn.k_proj": "diagonal"}
        module.config.base_model_tp_plan = plan

    found = refused("llama", change)
    assert list(found) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert "'diagonal' (of k_proj)" in found["model.layers.0.self_attn"]


REFUSED = {
    "a column without its row": ({"layers.*.mlp.down_proj": None}, "not columns and then rows"),
    "an adapter": ({}, "lora.weight"),
    "a weight of others": ({}, "shares weights"),
    "a patched forward": ({}, "its forward was replaced"),
    "an odd size": ({}, "down_proj has 25 features"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_unit_holds_beside_its_plan_is_refused(kind):
    """It would compute with parts without knowing."""
    changes, why = REFUSED[kind]

    def change(module: Any) -> None:
        plan = {**module.config.base_model_tp_plan, **changes}
        module.config.base_model_tp_plan = {key: style for key, style in plan.items() if style is not None}
        mlp = module.model.layers[0].mlp
        if kind == "an adapter":
            mlp.lora = nn.Linear(16, 4, bias=False)
        elif kind == "a weight of others":
            mlp.gate_proj.weight = module.model.layers[1].mlp.gate_proj.weight
        elif kind == "a patched forward":
            mlp.forward = lambda x: x
        elif kind == "an odd size":
            mlp.gate_proj, mlp.up_proj = nn.Linear(16, 25), nn.Linear(16, 25)
            mlp.down_proj = nn.Linear(25, 16)

    found = refused("llama", change)
    assert why in found["model.layers.0.mlp"]
    assert "model.layers.0.self_attn" not in found


def test_a_fused_matrix_is_cut_only_where_its_pieces_are_known():
    """`colwise` alone would cut through queries, keys and values; Phi-3's plan says that they are gathered."""

    def change(module: Any) -> None:
        plan = {**module.config.base_model_tp_plan, "layers.*.self_attn.qkv_proj": "colwise"}
        module.config.base_model_tp_plan = plan

    assert "qkv_proj is fused" in refused("phi3", change)["model.layers.0.self_attn"]
    assert not refused("phi3")


def test_code_over_features_is_refused():
    """Gemma 3n takes the mean over an MLP's features, of which each rank would have a part."""
    if not hasattr(transformers, "Gemma3nTextConfig"):
        pytest.skip("no such model")
    text = transformers.Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 2, "num_kv_shared_layers": 0, "head_dim": 8, "intermediate_size": 24},
        **{"vocab_size_per_layer_input": 38, "hidden_size_per_layer_input": 4, "laurel_rank": 2},
    )
    module = transformers.models.gemma3n.modeling_gemma3n.Gemma3nTextModel(text)
    smp.set_tensor_parallelism(module)
    whole = find_units(module, 2, lambda module: False).whole
    assert "over features" in whole["layers.0.mlp"]


@on_ranks(2, config=config(2, False), timeout=180)
def test_a_model_without_plan_is_split_module_by_module():
    """One warning for what stays whole, and the numbers of one process either way."""
    torch.manual_seed(0)
    whole = model("Llama")().double()
    whole.config.base_model_tp_plan = None
    split = copy.deepcopy(whole)
    smp.set_tensor_parallelism(split)
    split = convert(split, runtime.get())
    assert isinstance(split.model.layers[0].mlp.up_proj, DistributedLinear)
    assert not any(isinstance(module, PlannedUnit) for module in split.modules())
    ids = tokens(4)
    close(split(input_ids=own(ids)).logits, own(whole(input_ids=ids).logits))


@on_ranks(4, config=config(4, False), timeout=180)
def test_refused_units_are_whole_with_one_warning():
    """Their linears are not split one by one either."""
    with log_lines() as lines:
        split, whole = both("llama")
    if smp.rank() == 0:
        (line,) = lines
        assert "model.layers.0.self_attn, model.layers.1.self_attn whole: num_key_value_heads 2 does not" in line
    assert type(split.model.layers[0].self_attn.q_proj) is nn.Linear
    ids = tokens(4)
    with all_in_float64():
        close(split(input_ids=own(ids)).logits, own(whole(input_ids=ids).logits))


# What goes in and out


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@each_batch()
def test_batches_with_padding_on_some_ranks_only(prescaled, attention):
    """Without padding transformers makes no mask at all; the rank whose batch has none takes part nevertheless."""
    split, whole = both("mistral")
    for each in (split, whole):
        each.config._attn_implementation = attention
    ids = tokens(4, 9)
    mask = torch.ones_like(ids)
    mask[3, :4] = 0
    with all_in_float64():
        for kept in (mask, torch.ones_like(mask)):
            got = split(input_ids=own(ids), attention_mask=own(kept)).logits
            close(got, own(whole(input_ids=ids, attention_mask=kept).logits))


@each_batch()
def test_positions_may_differ_by_rank(prescaled):
    """One row of positions stands for all rows of a batch, but not for those of another rank."""
    split, whole = both("llama")
    ids = tokens(4)
    positions = torch.arange(6).repeat(4, 1) + torch.tensor([[0], [0], [3], [3]])
    with all_in_float64():
        want = own(whole(input_ids=ids, position_ids=positions).logits)
        close(split(input_ids=own(ids), position_ids=own(positions)).logits, want)
        if not prescaled:
            close(split(input_ids=own(ids), position_ids=own(positions)[:1]).logits, want)


@each_batch()
def test_attentions_and_router_scores_come_back_whole(prescaled):
    """All heads of the own batch's rows, with gradients."""
    for name in ("llama", "mixtral"):
        split, whole = both(name)
        for each in (split, whole):
            each.config._attn_implementation = "eager"
        ids = tokens(4)
        options = {"output_attentions": True, "output_hidden_states": True}
        with all_in_float64():
            got = split(input_ids=own(ids), **options)
            want = whole(input_ids=ids, **options)
        for a, b in zip([*got.attentions, *got.hidden_states], [*want.attentions, *want.hidden_states]):
            close(a, own(b))
        loss = sum((a**2).sum() for a in got.attentions)
        sum((a**2).sum() for a in want.attentions).backward()
        loss.backward()
        for a, b in zip(split.parameters(), whole.parameters()):
            spec = spec_of(a)
            if a.grad is not None and spec is not None:
                close(a.grad, spec.split(b.grad))


@each_batch()
def test_router_scores_are_those_of_the_own_batch_or_refused(prescaled):
    """Where a model gathers them inside of a unit (transformers 5: from routers, not from what has one) they are those
    of all ranks, and their gradients would count once for each rank. There experts stay whole where the configuration
    asks for them."""
    split, whole = both("mixtral")
    ids = tokens(4)
    if not isinstance(next(part for name, part in whole.named_modules() if name.endswith(".gate")), nn.Linear):
        for ask in ({"output_router_logits": True}, {}):
            with pytest.raises(StepError, match="output_router_logits"):
                split(input_ids=own(ids), **ask)
            split(input_ids=own(ids), output_router_logits=False)
            split.config.output_router_logits = True
        with log_lines() as lines:
            split, whole = both("mixtral-balanced")
        assert tp_group().rank or any("mlp" in line and "output_router_logits" in line for line in lines), lines
    with all_in_float64():
        got, want = (each(input_ids=own(ids), output_router_logits=True) for each in (split, whole))
    for a, b in zip([got.logits, *got.router_logits], [want.logits, *want.router_logits], strict=True):
        close(a, b)


@each_batch()
def test_generation_with_a_cache(prescaled):
    """Each rank holds the keys and values of its own heads, of all rows."""
    split, whole = both("llama")
    ids = tokens(4)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with all_in_float64():
        got = split.eval().generate(own(ids), attention_mask=torch.ones_like(own(ids)), **options)
        want = whole.eval().generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(got, own(want))
    assert split.model.layers[0].self_attn.k_proj.weight.shape[0] == 4


@on_ranks(2, config=config(2, False), timeout=180)
def test_beam_search_on_joined_batches_is_refused():
    """It picks rows of the cache by the numbers that they have on one rank."""
    split, _ = both("llama")
    with pytest.raises(StepError, match="prescaled_batch"):
        split.eval().generate(own(tokens(4)), num_beams=2, max_new_tokens=3, do_sample=False, pad_token_id=0)


@each_batch()
def test_a_unit_sends_its_batch_once_and_its_result_once(prescaled, monkeypatch):
    """Forward and backward of a layer: 2 + 2 messages that hold the hidden states, by the arithmetic of its scheme."""
    split, _ = both("llama")
    layer = split.model.layers[0]
    hidden = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
    angles = split.model.rotary_emb(hidden, torch.arange(6)[None])
    sent: list[str] = []
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        real = getattr(collectives, kind)

        def counted(tensor: Tensor, *args: Any, real: Any = real, kind: str = kind, **kwargs: Any) -> Tensor:
            if tensor.requires_grad or tensor.dim() == 3 and tensor.shape[-1] == 16:
                sent.append(kind)
            return real(tensor, *args, **kwargs)

        monkeypatch.setattr(collectives, kind, counted)
    out = layer(hidden, position_embeddings=angles)
    out = out[0] if isinstance(out, tuple) else out
    there = list(sent)
    out.sum().backward()
    back = sent[len(there) :]
    if prescaled:
        assert there == ["all_reduce"] * 2
        assert back == ["all_reduce"] * 2
    else:
        assert there == ["all_gather", "reduce_scatter"] * 2
        assert back == ["all_gather", "reduce_scatter"] * 2


# Random numbers


@on_ranks(2, config={**config(2, True), "microbatches": 2}, timeout=180)
def test_dropout_on_a_shared_batch():
    """a1-1: what all ranks have is dropped alike, also after the sum; probabilities of different heads are not."""
    torch.manual_seed(0)
    module = model("Starcoder2", attention_dropout=0.5, residual_dropout=0.5, embedding_dropout=0.5)()
    module.config._attn_implementation = "eager"
    smp.set_tensor_parallelism(module)
    split = smp.DistributedModel(module)
    seen: list[Tensor] = []
    drop = nn.functional.dropout

    def recording(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        out = drop(x, p, training)
        if training and p > 0:
            seen.append((out == 0).float())
        return out

    nn.functional.dropout = recording
    try:

        @smp.step
        def train(ids: Tensor) -> Tensor:
            loss = split(input_ids=ids, labels=ids).loss
            split.backward(loss)
            return loss

        torch.rand(7 if smp.rank() == 0 else 1)
        train(tokens(4))
    finally:
        nn.functional.dropout = drop
    assert seen
    for mask in seen:
        other = smp.allgather(mask, smp.TP_GROUP)
        assert torch.equal(other[0], other[1]) == (mask.dim() == 3)
    weights = [module.model.layers[k].input_layernorm.weight.grad for k in range(2)]
    for weight in weights:
        close(*smp.allgather(weight.double(), smp.TP_GROUP))
