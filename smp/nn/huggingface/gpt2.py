"""GPT-2: GPT2LMHeadModel becomes a DistributedTransformerLMHead, layers of other models DistributedTransformerLayer."""

from typing import Any

from smp.errors import PartitionError
from smp.nn.huggingface.arguments import activation_of, parameters_of
from smp.nn.huggingface.decoder import Call, Names, check_config, family_of, same
from smp.tp.families import Arguments, Rule, weight_and_bias
from smp.tp.layouts import TRANSPOSED

CALL = Call("CausalLMOutputWithCrossAttentions", types_are_words=True)


def layer_arguments(layer: Any) -> Arguments:
    """From an instance of GPT2Block to the arguments of its twin.

    Of two kernels that transformers has for this attention only "eager" heeds the switches for scaling and precision;
    the twin computes what the model computes.

    Raises:
        PartitionError: something that the twin does not know.
    """
    attention, mlp = layer.attn, layer.mlp
    config = attention.config
    cross = getattr(layer, "crossattention", None)
    check_config(config)
    since_v5 = "head_mask" not in parameters_of(layer)
    if any(getattr(part, "pruned_heads", None) for part in (attention, cross)):
        raise PartitionError("heads of its attention were pruned")
    eager = config._attn_implementation == "eager"
    heeded = eager or hasattr(attention, "scaling")
    norms = [layer.ln_1, layer.ln_2, *([] if cross is None else [layer.ln_cross_attn])]
    attentions = [attention, *([] if cross is None else [cross])]
    return (), {
        "parameters": parameters_of(layer),
        "returns": "hidden" if since_v5 else "tuple",
        "always_masked": eager and not since_v5,
        "num_attention_heads": attention.num_heads,
        "attention_head_size": attention.head_dim,
        "hidden_size": attention.embed_dim,
        "intermediate_size": mlp.c_fc.weight.shape[1],
        "attention_dropout_prob": same((a.attn_dropout.p for a in attentions), "dropouts of attention"),
        "hidden_dropout_prob": same((m.p for m in [mlp.dropout, *(a.resid_dropout for a in attentions)]), "dropouts"),
        "activation": activation_of(mlp.act, "activation_function"),
        "layernorm_epsilon": same((norm.eps for norm in norms), "epsilons of norms"),
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings,
        "add_cross_attention": cross is not None,
        "pre_layernorm": True,
        "post_layernorm": False,
        "scale_attention_scores": attention.scale_attn_weights or not heeded,
        "scale_attn_by_layer_idx": attention.scale_attn_by_inverse_layer_idx and heeded,
        "attention_in_fp32": attention.reorder_and_upcast_attn and eager,
        "hidden_rows": "nothing" if not eager else "all" if since_v5 else "visible",
        "layer_idx": attention.layer_idx,
    }


RULES = (
    *weight_and_bias("ln_1", "attention.pre_layernorm"),
    *weight_and_bias("attn.c_attn", "attention.qkv", TRANSPOSED),
    *weight_and_bias("attn.c_proj", "attention.dense", TRANSPOSED),
    *weight_and_bias("ln_cross_attn", "cross_attention.pre_layernorm"),
    *weight_and_bias("crossattention.q_attn", "cross_attention.query", TRANSPOSED),
    *weight_and_bias("crossattention.c_attn", "cross_attention.key_value", TRANSPOSED),
    *weight_and_bias("crossattention.c_proj", "cross_attention.dense", TRANSPOSED),
    *weight_and_bias("ln_2", "output.pre_layernorm"),
    *weight_and_bias("mlp.c_fc", "output.dense1", TRANSPOSED),
    *weight_and_bias("mlp.c_proj", "output.dense2", TRANSPOSED),
    *(Rule(f"{part}.{mask}", None) for part in ("attn", "crossattention") for mask in ("bias", "masked_bias")),
)
FAMILY = family_of(
    "gpt2",
    "gpt2",
    "transformers.models.gpt2.modeling_gpt2",
    ("GPT2LMHeadModel", "GPT2Block"),
    CALL,
    layer_arguments,
    lambda layer: layer.attn.config,
    Names("transformer", "h", "wte", "wpe", "drop", "ln_f", ("lm_head",)),
    RULES,
    (("attn", "attention"), ("crossattention", "cross_attention"), ("mlp", "output")),
)
translate_hf_state_dict_to_smdistributed = FAMILY.hf_to_smp
translate_hf_state_dict_to_smdistributed_gpt2 = FAMILY.hf_to_smp
translate_state_dict_to_hf_gpt2 = FAMILY.smp_to_hf
