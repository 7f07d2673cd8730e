"""T5, MT5 and UMT5: every block becomes one that is cut inside (t5_block.py), the rest of the model stays as it is."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from smp.errors import PartitionError, StepError
from smp.nn.huggingface.arguments import parameters_of, record_as, refuse_attentions
from smp.nn.huggingface.t5_block import DistributedT5Block, DistributedUMT5Block, Sizes
from smp.tp.families import Arguments, Family, Place, Replacement, Rule
from smp.tp.layouts import FUSED_KV, FUSED_QKV


def sizes_of(block: Any) -> Sizes:
    """Reads a block of transformers.

    Raises:
        PartitionError: heads were pruned, or the activation has parameters.
    """
    first, dense = block.layer[0], block.layer[-1].DenseReluDense
    attention = first.SelfAttention
    attentions = [attention, *(layer.EncDecAttention for layer in block.layer[1:-1])]
    if any(getattr(part, "pruned_heads", None) for part in attentions):
        raise PartitionError("heads of its attention were pruned")
    if next(dense.act.parameters(), None) is not None:
        raise PartitionError(f"dense_act_fn: {type(dense.act).__name__} has parameters")
    return Sizes(
        d_model=attention.d_model,
        num_heads=attention.n_heads,
        d_kv=attention.key_value_proj_dim,
        d_ff=dense.wo.in_features,
        is_decoder=block.is_decoder,
        has_bias=attention.has_relative_attention_bias,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
        attention_dropout=attention.dropout,
        dropout=first.dropout.p,
        inner_dropout=dense.dropout.p,
        epsilon=first.layer_norm.variance_epsilon,
        gated=hasattr(dense, "wi_0"),
        activation=dense.act,
        layer_idx=attention.layer_idx,
        parameters=parameters_of(block),
        since_v5=not hasattr(attention, "pruned_heads"),
    )


def _arguments(block: Any, twin: type[DistributedT5Block]) -> Arguments:
    record_as(block, twin)
    return (sizes_of(block),), {}


def _surroundings(block: DistributedT5Block, around: Sequence[Any]) -> None:
    """What the models around a block refuse: attention probabilities, where the block has none to give, and blocks of
    which only some are split, where one hands its position bias to the next."""
    if block.sizes.since_v5:
        refuse_attentions(block, around)
    if isinstance(block, DistributedUMT5Block):
        return
    for stack in around:
        blocks = getattr(stack, "block", None)
        if isinstance(blocks, nn.ModuleList) and _refuse_mixed not in stack._forward_pre_hooks.values():
            stack.register_forward_pre_hook(_refuse_mixed)


def _refuse_mixed(stack: Any, args: Any) -> None:
    split = [isinstance(block, DistributedT5Block) for block in stack.block]
    if len(set(split)) > 1:
        raise StepError(
            f"block {split.index(True)} of an encoder or decoder of T5 is split over the tensor-parallel group, block "
            f"{split.index(False)} is whole, and one cannot take over the other's position bias: mark all of its "
            "blocks for tensor parallelism, or none of them"
        )


def _same(*names: str) -> tuple[Rule, ...]:
    return tuple(Rule(name, name) for name in names)


RULES = (
    Rule(tuple(f"layer.0.SelfAttention.{x}.weight" for x in "qkv"), "layer.0.SelfAttention.qkv.weight", FUSED_QKV),
    Rule(
        tuple(f"layer.1.EncDecAttention.{x}.weight" for x in "kv"), "layer.1.EncDecAttention.key_value.weight", FUSED_KV
    ),
    Rule(
        ("layer.{n}.DenseReluDense.wi_0.weight", "layer.{n}.DenseReluDense.wi_1.weight"),
        "layer.{n}.DenseReluDense.wi_01.weight",
        FUSED_KV,
    ),
    *_same("layer.0.SelfAttention.o.weight", "layer.0.SelfAttention.relative_attention_bias.weight"),
    *_same("layer.1.EncDecAttention.q.weight", "layer.1.EncDecAttention.o.weight", "layer.{n}.layer_norm.weight"),
    *_same("layer.{n}.DenseReluDense.wi.weight", "layer.{n}.DenseReluDense.wo.weight"),
)


def _replacement(cls: str, twin: type[DistributedT5Block]) -> Replacement:
    return Replacement(
        cls=f"transformers.models.{cls}",
        twin=twin,
        arguments=lambda block: _arguments(block, twin),
        rules=RULES,
        config=lambda block: None,
        around=_surroundings,
    )


_STACKS = ("encoder.", "decoder.", "transformer.encoder.", "transformer.decoder.", "")
FAMILY = Family(
    name="t5",
    model_types=("t5", "mt5", "umt5"),
    replaced=(
        _replacement("t5.modeling_t5.T5Block", DistributedT5Block),
        _replacement("mt5.modeling_mt5.MT5Block", DistributedT5Block),
        _replacement("umt5.modeling_umt5.UMT5Block", DistributedUMT5Block),
    ),
    places=tuple(Place(f"{stack}block.{{n}}.", f"{stack}block.{{n}}.", RULES) for stack in _STACKS),
)
translate_hf_state_dict_to_smdistributed = FAMILY.hf_to_smp
translate_hf_state_dict_to_smdistributed_t5 = FAMILY.hf_to_smp
translate_state_dict_to_hf_t5 = FAMILY.smp_to_hf
