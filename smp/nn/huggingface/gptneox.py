"""GPT-NeoX: GPTNeoXForCausalLM becomes a DistributedTransformerLMHead, layers of other models
DistributedTransformerLayer."""

import sys
from typing import Any

from smp.errors import PartitionError
from smp.nn.huggingface.arguments import activation_of, parameters_of
from smp.nn.huggingface.decoder import Call, Names, check_config, family_of, same
from smp.tp.families import Arguments, Rule, weight_and_bias
from smp.tp.layouts import HeadMajor

HEADS = ("embed_out", "lm_head")  # in transformers 4 and 5; 5 reads files with either
CALL = Call("CausalLMOutputWithPast", types_are_words=False)


def layer_arguments(layer: Any) -> Arguments:
    """From an instance of GPTNeoXLayer to the arguments of its twin.

    Raises:
        PartitionError: something that the twin does not know.
    """
    attention, mlp = layer.attention, layer.mlp
    config = attention.config
    check_config(config)
    since_v5 = "head_mask" not in parameters_of(layer)
    rope = (config.rope_parameters if since_v5 else config.rope_scaling) or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise PartitionError(f"rope_scaling {kind!r} is not known, only 'default'")
    eager = config._attn_implementation == "eager"
    return (), {
        "parameters": parameters_of(layer),
        "returns": "hidden" if since_v5 else "tuple",
        "always_masked": eager and not since_v5,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": attention.head_size,
        "hidden_size": attention.dense.out_features,
        "intermediate_size": mlp.dense_h_to_4h.out_features,
        "attention_dropout_prob": attention.attention_dropout,
        "hidden_dropout_prob": same((layer.post_attention_dropout.p, layer.post_mlp_dropout.p), "dropouts"),
        "activation": activation_of(mlp.act, "hidden_act"),
        "layernorm_epsilon": same((layer.input_layernorm.eps, layer.post_attention_layernorm.eps), "epsilons of norms"),
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": sys.maxsize,  # the original has no limit
        "pre_layernorm": True,
        "post_layernorm": False,
        "parallel_attention": bool(layer.use_parallel_residual),
        "use_qkv_bias": attention.query_key_value.bias is not None,
        "use_attention_dense_bias": attention.dense.bias is not None,
        "rotary_dim": attention.rotary_ndims,
        "rotary_base": rope["rope_theta"] if since_v5 else config.rope_theta,
        "rotary_in_fp32": True,
        "hidden_rows": "all" if eager else "nothing",
        "layer_idx": attention.layer_idx,
    }


RULES = (
    *weight_and_bias("input_layernorm", "attention.pre_layernorm"),
    *weight_and_bias("attention.query_key_value", "attention.qkv", HeadMajor(3, "num_attention_heads")),
    *weight_and_bias("attention.dense", "attention.dense"),
    *weight_and_bias("post_attention_layernorm", "output.pre_layernorm"),
    *weight_and_bias("mlp.dense_h_to_4h", "output.dense1"),
    *weight_and_bias("mlp.dense_4h_to_h", "output.dense2"),
    *(Rule(f"attention.{name}", None) for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
)
FAMILY = family_of(
    "gptneox",
    "gpt_neox",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    ("GPTNeoXForCausalLM", "GPTNeoXLayer"),
    CALL,
    layer_arguments,
    lambda layer: layer.attention.config,
    Names("gpt_neox", "layers", "embed_in", None, "emb_dropout", "final_layer_norm", HEADS),
    RULES,
    (("attention", "attention"), ("mlp", "output")),
)
translate_hf_state_dict_to_smdistributed = FAMILY.hf_to_smp
translate_hf_state_dict_to_smdistributed_gptneox = FAMILY.hf_to_smp
translate_state_dict_to_hf_gptneox = FAMILY.smp_to_hf
