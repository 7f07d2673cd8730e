"""GPT-Neo: GPTNeoForCausalLM becomes a DistributedTransformerLMHead, layers of other models
DistributedTransformerLayer."""

from typing import Any

from smp.nn.huggingface.arguments import activation_of, parameters_of
from smp.nn.huggingface.decoder import Call, Names, check_config, family_of, same
from smp.tp.families import Arguments, Rule, weight_and_bias
from smp.tp.layouts import FUSED_QKV

CALL = Call("CausalLMOutputWithPast", types_are_words=True)


def layer_arguments(layer: Any) -> Arguments:
    """From an instance of GPTNeoBlock to the arguments of its twin.

    Raises:
        PartitionError: something that the twin does not know.
    """
    attention, mlp = layer.attn.attention, layer.mlp
    config = attention.config
    check_config(config)
    since_v5 = "head_mask" not in parameters_of(layer)
    return (), {
        "parameters": parameters_of(layer),
        "returns": "pair",
        "always_masked": not since_v5,
        "num_attention_heads": attention.num_heads,
        "attention_head_size": attention.head_dim,
        "hidden_size": attention.embed_dim,
        "intermediate_size": mlp.c_fc.out_features,
        "attention_dropout_prob": attention.attn_dropout.p,
        "hidden_dropout_prob": same((attention.resid_dropout.p, mlp.dropout.p), "dropouts"),
        "activation": activation_of(mlp.act, "activation_function"),
        "layernorm_epsilon": same((layer.ln_1.eps, layer.ln_2.eps), "epsilons of norms"),
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings,
        "pre_layernorm": True,
        "post_layernorm": False,
        "use_qkv_bias": False,
        "scale_attention_scores": False,
        "attention_in_fp32": True,
        "hidden_rows": "visible",
        "attention_window": config.window_size if layer.attn.attention_type == "local" else None,
        "layer_idx": layer.attn.layer_id,
    }


QKV = tuple(f"attn.attention.{piece}_proj.weight" for piece in "qkv")
RULES = (
    *weight_and_bias("ln_1", "attention.pre_layernorm"),
    Rule(QKV, "attention.qkv.weight", FUSED_QKV),
    *weight_and_bias("attn.attention.out_proj", "attention.dense"),
    *weight_and_bias("ln_2", "output.pre_layernorm"),
    *weight_and_bias("mlp.c_fc", "output.dense1"),
    *weight_and_bias("mlp.c_proj", "output.dense2"),
    Rule("attn.attention.bias", None),
    Rule("attn.attention.masked_bias", None),
)
FAMILY = family_of(
    "gptneo",
    "gpt_neo",
    "transformers.models.gpt_neo.modeling_gpt_neo",
    ("GPTNeoForCausalLM", "GPTNeoBlock"),
    CALL,
    layer_arguments,
    lambda layer: layer.attn.attention.config,
    Names("transformer", "h", "wte", "wpe", "drop", "ln_f", ("lm_head",)),
    RULES,
    (("attn", "attention"), ("mlp", "output")),
)
translate_hf_state_dict_to_smdistributed = FAMILY.hf_to_smp
translate_hf_state_dict_to_smdistributed_gptneo = FAMILY.hf_to_smp
translate_state_dict_to_hf_gptneo = FAMILY.smp_to_hf
