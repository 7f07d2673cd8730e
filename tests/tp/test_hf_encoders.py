"""BERT, RoBERTa and ViT of `transformers`, their layers split, against the original models in one process."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp import runtime
from smp.errors import StepError
from smp.nn import DistributedTransformerLayer
from smp.nn.huggingface import bert as bert_family
from smp.nn.huggingface import roberta as roberta_family
from smp.nn.huggingface import vit as vit_family
from smp.tp.convert import convert
from smp.tp.delayed import materialize
from tests.harness import on_ranks
from tests.logs import log_lines
from tests.parity.compare import assert_close, build, job_batch, rows_of
from tests.tp import hf_models
from tests.tp.hf_models import (
    BERTS,
    MODES,
    ROBERTAS,
    TWO_MODES,
    VITS,
    bert,
    check_split,
    dropout_by_value,
    setup_of,
    vit,
)
from tests.tp.twins import config, tp_group

CASES = {
    **{f"bert: {name}": (case, bert_family.FAMILY) for name, case in BERTS.items()},
    **{f"roberta: {name}": (case, roberta_family.FAMILY) for name, case in ROBERTAS.items()},
    **{f"vit: {name}": (case, vit_family.FAMILY) for name, case in VITS.items()},
}
EVERY = pytest.mark.parametrize("name", CASES)
ONE_OF_EACH = pytest.mark.parametrize("name", ["bert: masked words", "bert: cross attention", "vit: classifier"])


def converted(module: nn.Module) -> nn.Module:
    smp.set_tensor_parallelism(module)
    return convert(module, runtime.get())


def distributed_layers(module: nn.Module) -> list[DistributedTransformerLayer]:
    return [part for part in module.modules() if isinstance(part, DistributedTransformerLayer)]


# Names


@EVERY
def test_names_and_values_survive_both_translations(name):
    """A checkpoint that is translated and back is the same one; what is split has our names."""
    case, family = CASES[name]
    theirs = build(case).state_dict()
    ours = family.hf_to_smp(theirs)
    assert any("attention.qkv.weight" in key for key in ours)
    assert not any(".query." in key and "cross_attention" not in key for key in ours)
    back = family.smp_to_hf(ours)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[key], value) for key, value in theirs.items())


def test_translate_functions_have_their_public_names():
    """Under which scripts import them."""
    assert bert_family.translate_state_dict_to_hf_bert({}) == {}
    assert bert_family.translate_hf_state_dict_to_smdistributed({}) == {}
    assert bert_family.translate_hf_state_dict_to_smdistributed_bert({}) == {}
    assert roberta_family.translate_state_dict_to_hf_roberta({}) == {}
    assert roberta_family.translate_state_dict_to_smdistributed({}) == {}
    assert roberta_family.translate_hf_state_dict_to_smdistributed_roberta({}) == {}
    assert vit_family.translate_hf_state_dict_to_smdistributed({}, config=None) == {}
    assert vit_family.translate_state_dict_to_hf_vit({}, max_seq_len=5) == {}


# Training


@MODES
@EVERY
@on_ranks(2, timeout=120)
def test_split_layers_train_as_whole_ones(name, prescaled, optimize):
    """Loss, gradients and weights after two steps; some batches are padded and some are not, on different ranks."""
    case, _ = CASES[name]
    check_split(case, setup_of(prescaled, optimize, microbatches=2))


@MODES
@ONE_OF_EACH
@on_ranks(4, timeout=180)
def test_split_layers_train_over_two_stages(name, prescaled, optimize):
    """tp 2 x pp 2, placed by hand and automatically."""
    case, _ = CASES[name]
    for auto in (False, True):
        setup = setup_of(prescaled, optimize, pp=2, microbatches=2, auto=auto)
        check_split(case, setup)


@TWO_MODES
@ONE_OF_EACH
@on_ranks(4, timeout=120)
def test_split_layers_train_with_replicas(name, prescaled, optimize):
    """tp 2 x rdp 2: each kind of parameter has its own group."""
    case, _ = CASES[name]
    check_split(case, setup_of(prescaled, optimize, steps=1))


@on_ranks(4, timeout=120)
def test_four_parts():
    """One head each."""
    case = replace(BERTS["masked words"], build=bert("BertForMaskedLM", num_attention_heads=4))
    for optimize in ("speed", "memory"):
        check_split(case, setup_of(False, optimize, tp=4, steps=1))


@TWO_MODES
@on_ranks(2, timeout=120)
def test_hidden_dropout_stands_where_it_stood(prescaled, optimize):
    """With its own probability, in training only."""
    builders = {
        "bert: masked words": bert("BertForMaskedLM", hidden_dropout_prob=0.3),
        "vit: classifier": vit(hidden_dropout_prob=0.3),
    }
    with dropout_by_value():
        for name, builder in builders.items():
            check_split(replace(CASES[name][0], build=builder), setup_of(prescaled, optimize, steps=1))


@on_ranks(2, config=lambda a: config(2, True))
def test_dropout_of_probabilities_is_that_of_the_configuration():
    """Both kinds, and in training only."""
    module = converted(bert("BertForMaskedLM", attention_probs_dropout_prob=0.25)())
    layer = distributed_layers(module)[0]
    assert layer.attention.attention_dropout_prob == 0.25
    assert layer.attention.hidden_dropout_prob == 0.0
    batch = hf_models.text(2, torch.Generator().manual_seed(0))
    assert float(module(**batch).loss) != float(module(**batch).loss)
    module.eval()
    assert float(module(**batch).loss) == float(module(**batch).loss)


# Values and outputs


@TWO_MODES
@EVERY
@on_ranks(2, config=lambda a: config(2, a["prescaled"], optimize=a["optimize"]))
def test_scores_and_hidden_states_are_those_of_the_original(name, prescaled, optimize):
    """In evaluation; hidden states of every layer, also where the model gathers them on the side."""
    case, _ = CASES[name]
    module = build(case, torch.float64).eval()
    whole = copy.deepcopy(module)
    module = converted(module)
    assert len(distributed_layers(module)) == hf_models.LAYERS
    rank = 0 if prescaled else tp_group().rank
    batch = rows_of(job_batch(case, 4, 0, torch.float64), 2 * rank, 2 * rank + 2)
    got, want = module(**batch, output_hidden_states=True), whole(**batch, output_hidden_states=True)
    assert got.keys() == want.keys()
    assert_close(got.logits, want.logits, 1e-9, "scores")
    assert len(got.hidden_states) == len(want.hidden_states) == hf_models.LAYERS + 1
    for number, (a, b) in enumerate(zip(got.hidden_states, want.hidden_states)):
        assert_close(a, b, 1e-9, f"hidden states {number}")


@pytest.mark.parametrize("name", ["bert: classifier", "vit: classifier"])
@on_ranks(2, config=config(2, False))
def test_values_of_from_pretrained_are_kept(name, tmp_path):
    """The model that was loaded is the one that trains, and the one that is saved."""
    case, family = CASES[name]
    source = build(case)
    if tp_group().rank == 0:
        source.save_pretrained(tmp_path)
    smp.barrier()
    module = type(source).from_pretrained(tmp_path)
    parameters = dict(module.named_parameters())
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    assert distributed_layers(module)
    state = family.smp_to_hf(model.state_dict(gather_to_rank0=False))
    want = source.state_dict()
    for key in parameters:
        assert torch.equal(state[key], want[key]), key
    held = {id(param) for param in parameters.values()}
    assert {id(param) for param in module.parameters()} <= held, "an optimizer would hold other parameters"


@pytest.mark.parametrize("name", ["bert: masked words", "vit: classifier"])
@on_ranks(2)
def test_an_optimizers_state_goes_over_between_orders_of_parameters(name):
    """An optimizer that is made before the model has the original's order of parameters, one made after it the twin's:
    training goes on alike in both."""
    case, _ = CASES[name]
    batch = job_batch(case, 2, 0, torch.float64)
    saved: dict[str, Any] = {}
    losses: dict[bool, list[float]] = {}
    for early in (True, False):
        runtime.reset()
        smp.init(config(2, True))
        module = build(case, torch.float64)
        smp.set_tensor_parallelism(module)
        plain = torch.optim.Adam(module.parameters(), lr=0.01) if early else None
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(plain or torch.optim.Adam(model.parameters(), lr=0.01))

        @smp.step
        def train(model: Any, batch: Any) -> Tensor:
            loss: Tensor = case.loss_of(model(**batch))
            model.backward(loss)
            return loss

        def run(steps: int, model: Any = model, optimizer: Any = optimizer, train: Any = train) -> list[float]:
            seen = []
            for _ in range(steps):
                optimizer.zero_grad()
                seen.append(float(train(model, batch).reduce_mean()))
                optimizer.step()
            return seen

        if early:
            run(2)
            saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        else:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        losses[early] = run(2)
    assert losses[True] == pytest.approx(losses[False], rel=1e-9)


@pytest.mark.parametrize("name", ["bert: masked words", "vit: classifier"])
@on_ranks(2)
def test_a_delayed_model_starts_as_a_whole_one(name):
    """Nothing is initialised twice, fused matrices as their parts are."""
    case, family = CASES[name]
    runtime.reset()
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    torch.manual_seed(5 + 100 * smp.rank())
    with smp.model_creation(tensor_parallelism=True):
        module = case.build()
    model = smp.DistributedModel(module)
    assert distributed_layers(module)
    state = family.smp_to_hf(model.state_dict(gather_to_rank0=False))
    torch.manual_seed(5)
    with smp.delay_param_initialization():
        whole = case.build()
    materialize(whole, seed=5)
    for key, value in whole.state_dict().items():
        assert torch.equal(state[key], value), key
    runtime.reset()


# What is refused


@pytest.mark.parametrize(
    ("switches", "reason"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"position_embedding_type": "relative_key_query"}, "position_embedding_type 'relative_key_query'"),
        ({"chunk_size_feed_forward": 7}, "chunk_size_feed_forward 7"),
        ({"hidden_act": "mish"}, "hidden_act MishActivation"),
        ({"num_attention_heads": 1}, "num_attention_heads 1"),
        ({"intermediate_size": 33}, "33"),
    ],
)
@on_ranks(2, config=config(2, False))
def test_switches_that_are_not_known_leave_layers_whole(switches, reason):
    """With one warning that names the switch, and right results."""
    if not all(hasattr(hf_models.bert_config(), name) for name in switches):
        return  # transformers 5 has no other positions
    module = bert("BertForSequenceClassification", **switches)().double()
    whole = copy.deepcopy(module)
    with log_lines() as lines:
        module.bert.encoder = converted(module.bert.encoder)
    assert not distributed_layers(module)
    named = [line for line in lines if "layer.0" in line and reason in line]
    assert len(named) == (1 if tp_group().rank == 0 else 0)
    batch = hf_models.sentences(2, torch.Generator().manual_seed(tp_group().rank))
    assert_close(module(**batch).logits, whole(**batch).logits, 1e-9, "scores")


@on_ranks(2, config=config(2, False))
def test_pruned_layers_stay_whole():
    """They have fewer heads than the model's configuration says."""
    module = bert("BertForSequenceClassification")()
    if not hasattr(module.bert.encoder.layer[1].attention, "prune_heads"):
        return  # transformers 5 prunes no more
    module.bert.encoder.layer[1].attention.prune_heads({0})
    images = vit()()
    images.vit.encoder.layer[1].attention.prune_heads({0})
    for model in (module, images):
        assert len(distributed_layers(converted(model))) == 1


@on_ranks(2, config=config(2, False))
def test_arguments_that_split_layers_do_not_take_are_refused():
    """By name and on every rank; a second call with a cache that was not filled would see half a sequence."""
    batch = hf_models.text(2, torch.Generator().manual_seed(0))
    module = converted(bert("BertLMHeadModel", is_decoder=True)())
    heads = torch.ones(hf_models.LAYERS, 2)
    for arguments, reason in [({"head_mask": heads}, "head_mask"), ({"output_attentions": True}, "output_attentions")]:
        with pytest.raises(StepError, match=reason):
            module(**batch, **arguments)
    first = module(input_ids=batch["input_ids"])
    with pytest.raises(StepError, match="past_key_values"):
        module(input_ids=batch["input_ids"][:, :1], past_key_values=first.past_key_values)
    cross: dict[str, Any] = {"encoder_hidden_states": torch.randn(2, 3, hf_models.WIDTH)}
    with pytest.raises(StepError, match="add_cross_attention"):
        module(**batch, **cross)
    images = converted(vit()())
    for arguments in ({"head_mask": heads}, {"output_attentions": True}):
        with pytest.raises(StepError, match=next(iter(arguments))):
            images(pixel_values=torch.randn(2, 3, 8, 8), **arguments)


@on_ranks(2, config=config(2, False))
def test_layers_take_masks_of_every_kind():
    """Additive, bool, none; a decoder's layer without a mask sees no later places."""
    for decoder in (False, True):
        whole = bert("BertLMHeadModel", is_decoder=decoder)().double().bert.encoder
        module = converted(copy.deepcopy(whole))
        generator = torch.Generator().manual_seed(tp_group().rank)
        hidden = torch.randn(2, 5, hf_models.WIDTH, generator=generator, dtype=torch.float64)
        seen = torch.rand(2, 1, 5, 5, generator=generator) > 0.3
        seen |= torch.eye(5, dtype=torch.bool)
        additive = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
        masks: list[Tensor | None] = [None, seen, seen[:, :, :1], additive, additive[:, :, :1]]
        for mask in masks:
            got, want = module(hidden, attention_mask=mask)[0], whole(hidden, attention_mask=mask)[0]
            assert_close(got, want, 1e-9, f"decoder {decoder}, mask {None if mask is None else mask.dtype}")
