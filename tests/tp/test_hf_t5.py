"""T5 and its kin, their blocks cut inside, against the original models in one process."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import smp
from smp import runtime
from smp.errors import StepError
from smp.nn.huggingface import t5 as family
from smp.nn.huggingface.t5_block import DistributedT5Block, buckets
from smp.tp.convert import convert
from smp.tp.delayed import materialize
from smp.tp.shard import spec_of
from tests.harness import on_ranks
from tests.logs import log_lines
from tests.parity.compare import assert_close, build, job_batch, rows_of
from tests.tp import hf_models
from tests.tp.hf_models import MODES, T5S, TWO_MODES, check_split, dropout_by_value, setup_of, t5
from tests.tp.twins import config, tp_group

EVERY = pytest.mark.parametrize("name", T5S)
BLOCKS = 2 * hf_models.LAYERS


def converted(module: nn.Module) -> nn.Module:
    smp.set_tensor_parallelism(module)
    return convert(module, runtime.get())


def split_blocks(module: nn.Module) -> list[DistributedT5Block]:
    return [part for part in module.modules() if isinstance(part, DistributedT5Block)]


@pytest.mark.parametrize("bidirectional", [False, True])
def test_distances_fall_into_the_buckets_of_transformers(bidirectional):
    """Rounding decides at their borders."""
    theirs = hf_models.transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket
    distance = torch.arange(-300, 300)[None, :]
    for number, largest in ((32, 128), (8, 5), (16, 20), (128, 1000)):
        got = buckets(distance, number, largest, bidirectional=bidirectional)
        assert torch.equal(got, theirs(distance, bidirectional, number, largest))


@EVERY
def test_names_and_values_survive_both_translations(name):
    """Only what is fused has another name."""
    theirs = build(T5S[name]).state_dict()
    ours = family.translate_hf_state_dict_to_smdistributed(theirs)
    assert "encoder.block.0.layer.0.SelfAttention.qkv.weight" in ours
    assert "decoder.block.1.layer.1.EncDecAttention.key_value.weight" in ours
    back = family.translate_state_dict_to_hf_t5(ours)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[key], value) for key, value in theirs.items())


# Training


@MODES
@EVERY
@on_ranks(2, timeout=120)
def test_split_blocks_train_as_whole_ones(name, prescaled, optimize):
    """Loss, gradients and weights after two steps: position biases handed on, cross attention, gates, heads."""
    check_split(T5S[name], setup_of(prescaled, optimize, microbatches=2))


@MODES
@pytest.mark.parametrize("name", ["tied", "gated, untied", "umt5"])
@on_ranks(4, timeout=180)
def test_split_blocks_train_over_two_stages(name, prescaled, optimize):
    """tp 2 x pp 2, placed by hand and automatically; a position bias goes over a stage boundary."""
    for auto in (False, True):
        setup = setup_of(prescaled, optimize, pp=2, microbatches=2, auto=auto)
        check_split(T5S[name], setup)


@TWO_MODES
@on_ranks(4, timeout=120)
def test_split_blocks_train_with_replicas(prescaled, optimize):
    """tp 2 x rdp 2."""
    check_split(T5S["gated, untied"], setup_of(prescaled, optimize, steps=1))


@TWO_MODES
@on_ranks(2, timeout=120)
def test_a_cache_that_is_left_on_changes_nothing(prescaled, optimize):
    """As models of transformers come; they fill it in training too."""
    case = replace(T5S["tied"], build=t5(use_cache=True))
    check_split(case, setup_of(prescaled, optimize))


@MODES
@pytest.mark.parametrize("gated", [False, True])
@on_ranks(2, timeout=120)
def test_dropout_stands_where_it_stood(gated, prescaled, optimize):
    """On probabilities, inside of the feed-forward part and on what is added, with the same probability."""
    projection = "gated-gelu" if gated else "relu"
    case = replace(T5S["tied"], build=t5(dropout_rate=0.2, feed_forward_proj=projection, attn_implementation="eager"))
    with dropout_by_value():
        check_split(case, setup_of(prescaled, optimize, steps=1))


@pytest.mark.parametrize("optimize", ["speed", "memory"])
@on_ranks(2, config=lambda a: config(2, True, optimize=a["optimize"]))
def test_dropout_leaves_ranks_of_a_shared_batch_alike(optimize):
    """Each rank drops other heads and features, all drop the same hidden states; generators that have parted do not
    matter."""
    torch.manual_seed(0)
    module = converted(t5(dropout_rate=0.3)())
    torch.manual_seed(tp_group().rank)
    block = module.encoder.block[0]
    hidden = torch.randn(2, 6, hf_models.WIDTH, generator=torch.Generator().manual_seed(3))
    out, bias, *_ = block(hidden)
    assert not torch.equal(out, block(hidden)[0])
    assert bias.shape == (1, 1, 1, 6, 6)
    first, *others = smp.allgather(out.detach(), smp.TP_GROUP)
    assert all(torch.equal(first, other) for other in others)


# Values and outputs


@TWO_MODES
@EVERY
@on_ranks(2, config=lambda a: config(2, a["prescaled"], optimize=a["optimize"]))
def test_outputs_are_those_of_the_original(name, prescaled, optimize):
    """Scores, hidden states, probabilities of all heads of both attentions."""
    case = T5S[name]
    module = build(case, torch.float64).eval()
    whole = copy.deepcopy(module)
    module = converted(module)
    assert len(split_blocks(module)) == BLOCKS
    rank = 0 if prescaled else tp_group().rank
    batch = rows_of(job_batch(case, 4, 0, torch.float64), 2 * rank, 2 * rank + 2)
    tell = not split_blocks(module)[0].sizes.since_v5  # transformers 5 looks for attentions that are whole
    got = module(**batch, output_hidden_states=True, output_attentions=tell)
    want = whole(**batch, output_hidden_states=True, output_attentions=tell)
    assert got.keys() == want.keys()
    assert_close(got.logits, want.logits, 1e-9, "scores")
    attentions = ["encoder_attentions", "decoder_attentions", "cross_attentions"] if tell else []
    for key in ("encoder_hidden_states", "decoder_hidden_states", *attentions):
        assert len(got[key]) == len(want[key])
        for a, b in zip(got[key], want[key]):
            assert_close(a, b, 1e-7 if "attentions" in key else 1e-9, key)  # transformers rounds them to float32


@pytest.mark.parametrize("name", ["tied", "umt5"])
@on_ranks(2, config=config(2, True, optimize="speed"))
def test_text_is_generated_with_a_cache(name):
    """Each rank keeps the keys and values of its heads."""
    module = build(T5S[name]).eval()
    whole = copy.deepcopy(module)
    module = converted(module)
    ids = hf_models.text(2, torch.Generator().manual_seed(0))["input_ids"]
    for cached in (True, False):
        got = module.generate(input_ids=ids, max_new_tokens=6, use_cache=cached, do_sample=False)
        want = whole.generate(input_ids=ids, max_new_tokens=6, use_cache=cached, do_sample=False)
        assert torch.equal(got, want)


@on_ranks(2, config=config(2, False))
def test_values_of_from_pretrained_are_kept(tmp_path):
    """And the Parameter objects are those of the model that was loaded."""
    source = build(T5S["tied"])
    if tp_group().rank == 0:
        source.save_pretrained(tmp_path)
    smp.barrier()
    module = type(source).from_pretrained(tmp_path)
    parameters = dict(module.named_parameters())
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    assert len(split_blocks(module)) == BLOCKS
    state = family.translate_state_dict_to_hf_t5(model.state_dict(gather_to_rank0=False))
    want = source.state_dict()
    for key in parameters:
        assert torch.equal(state[key], want[key]), key
    assert {id(param) for param in module.parameters()} <= {id(param) for param in parameters.values()}
    assert spec_of(module.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight).dim == 1


@on_ranks(2)
def test_a_delayed_model_starts_as_a_whole_one():
    """Fused matrices as their parts are."""
    runtime.reset()
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    torch.manual_seed(5 + 100 * smp.rank())
    with smp.model_creation(tensor_parallelism=True):
        module = T5S["gated, untied"].build()
    model = smp.DistributedModel(module)
    assert len(split_blocks(module)) == BLOCKS
    state = family.translate_state_dict_to_hf_t5(model.state_dict(gather_to_rank0=False))
    torch.manual_seed(5)
    with smp.delay_param_initialization():
        whole = T5S["gated, untied"].build()
    materialize(whole, seed=5)
    for key, value in whole.state_dict().items():
        assert torch.equal(state[key], value), key
    runtime.reset()


# What is refused


@pytest.mark.parametrize(("switches", "reason"), [({"num_heads": 3}, "num_heads 3"), ({"d_ff": 33}, "33")])
@on_ranks(2, config=config(2, False))
def test_sizes_that_do_not_divide_leave_blocks_whole(switches, reason):
    """All of them, with one warning."""
    module = t5(**switches)()
    with log_lines() as lines:
        module.encoder = converted(module.encoder)
    assert not split_blocks(module)
    named = [line for line in lines if "block.0" in line and reason in line]
    assert len(named) == (1 if tp_group().rank == 0 else 0)


@on_ranks(2, config=config(2, True))
def test_mixed_blocks_and_head_masks_are_refused():
    """Never a wrong number: a position bias of all heads is no bias for a part of them."""
    batch = hf_models.two_texts(2, torch.Generator().manual_seed(0))
    module = t5()()
    heads = torch.ones(hf_models.LAYERS, 2)
    split = converted(copy.deepcopy(module))
    with pytest.raises(StepError, match="head_mask"):
        split(**batch, head_mask=heads, decoder_head_mask=heads)
    if split_blocks(split)[0].sizes.since_v5:
        with pytest.raises(StepError, match="output_attentions"):
            split(**batch, output_attentions=True)
        with pytest.raises(StepError, match="output_attentions"):
            split_blocks(split)[0](torch.randn(2, 6, hf_models.WIDTH), output_attentions=True)
    for whole in (0, 1):
        mixed = copy.deepcopy(module)
        smp.set_tensor_parallelism(mixed)
        smp.set_tensor_parallelism(mixed.encoder.block[whole], False)
        mixed = convert(mixed, runtime.get())
        with pytest.raises(StepError, match=f"block {1 - whole} .* is split .* block {whole} is whole.* position bias"):
            mixed(**batch)
    mixed = T5S["umt5"].build()
    smp.set_tensor_parallelism(mixed)
    smp.set_tensor_parallelism(mixed.encoder.block[1], False)
    assert torch.isfinite(convert(mixed, runtime.get())(**batch).loss)  # each has a bias of its own
