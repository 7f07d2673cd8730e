"""GPT-J: GPTJForCausalLM becomes a DistributedTransformerLMHead, layers of other models DistributedTransformerLayer."""

from typing import Any

from smp.errors import PartitionError
from smp.nn.huggingface.arguments import activation_of, parameters_of
from smp.nn.huggingface.decoder import Call, Names, check_config, family_of, same
from smp.tp.families import Arguments, Rule, weight_and_bias
from smp.tp.layouts import FUSED_QKV

CALL = Call("CausalLMOutputWithPast", types_are_words=True)


def layer_arguments(layer: Any) -> Arguments:
    """From an instance of GPTJBlock to the arguments of its twin.

    Raises:
        PartitionError: something that the twin does not know.
    """
    attention, mlp = layer.attn, layer.mlp
    config = attention.config
    check_config(config)
    since_v5 = "head_mask" not in parameters_of(layer)
    eager = config._attn_implementation == "eager"
    if attention.rotary_dim is None and attention.num_attention_heads > 1:
        raise PartitionError("rotary_dim None fits one head only")
    return (), {
        "parameters": parameters_of(layer),
        "returns": "hidden" if since_v5 else "pair",
        "always_masked": not since_v5,
        "num_attention_heads": attention.num_attention_heads,
        "attention_head_size": attention.head_dim,
        "hidden_size": attention.embed_dim,
        "intermediate_size": mlp.fc_in.out_features,
        "attention_dropout_prob": attention.attention_dropout if since_v5 else attention.attn_dropout.p,
        "hidden_dropout_prob": same((attention.resid_dropout.p, mlp.dropout.p), "dropouts"),
        "activation": activation_of(mlp.act, "activation_function"),
        "layernorm_epsilon": layer.ln_1.eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings,
        "pre_layernorm": True,
        "post_layernorm": False,
        "parallel_attention": True,
        "single_pre_layernorm": True,
        "use_qkv_bias": False,
        "use_attention_dense_bias": False,
        "rotary_dim": attention.rotary_dim or attention.head_dim,
        "rotary_interleaved": True,
        "attention_in_fp32": eager,
        "rotary_in_fp32": True,
        "hidden_rows": "all" if eager else "nothing",
        "layer_idx": attention.layer_idx,
    }


RULES = (
    *weight_and_bias("ln_1", "attention.pre_layernorm"),
    Rule(tuple(f"attn.{piece}_proj.weight" for piece in "qkv"), "attention.qkv.weight", FUSED_QKV),
    Rule("attn.out_proj.weight", "attention.dense.weight"),
    *weight_and_bias("mlp.fc_in", "output.dense1"),
    *weight_and_bias("mlp.fc_out", "output.dense2"),
    Rule("attn.bias", None),
    Rule("attn.masked_bias", None),
)
FAMILY = family_of(
    "gptj",
    "gptj",
    "transformers.models.gptj.modeling_gptj",
    ("GPTJForCausalLM", "GPTJBlock"),
    CALL,
    layer_arguments,
    lambda layer: layer.attn.config,
    Names("transformer", "h", "wte", None, "drop", "ln_f", ("lm_head",)),
    RULES,
    (("attn", "attention"), ("mlp", "output")),
)
translate_hf_state_dict_to_smdistributed = FAMILY.hf_to_smp
translate_hf_state_dict_to_smdistributed_gptj = FAMILY.hf_to_smp
translate_hf_gptj_state_dict_to_smdistributed_gptj = FAMILY.hf_to_smp
translate_state_dict_to_hf_gptj = FAMILY.smp_to_hf
