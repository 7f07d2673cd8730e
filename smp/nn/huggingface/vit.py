"""ViT: every layer becomes a DistributedTransformerLayer that normalises its inputs and has no mask."""

from typing import Any

from torch import Tensor

from smp.errors import PartitionError
from smp.nn.huggingface.arguments import activation_of, record_as, refuse
from smp.nn.huggingface.bert import fused
from smp.tp.families import Arguments, Family, Place, Replacement, weight_and_bias
from smp.tp.transformer import DistributedTransformerLayer


class DistributedViTLayer(DistributedTransformerLayer):
    """A DistributedTransformerLayer with the arguments and results of ViTLayer."""

    def forward(self, hidden_states: Tensor, head_mask: Tensor | None = None) -> Tensor:
        """[N, S, H] -> [N, S, H].

        Raises:
            StepError: a head mask.
        """
        refuse(head_mask=head_mask)
        hidden: Tensor = super().forward((hidden_states, None))[0]
        return hidden


def layer_arguments(layer: Any) -> Arguments:
    """From an instance of ViTLayer to the arguments of its twin.

    Raises:
        PartitionError: something that the twin does not know.
    """
    inner, dense = layer.attention.attention, layer.intermediate.dense
    if layer.chunk_size_feed_forward:
        raise PartitionError(f"chunk_size_feed_forward {layer.chunk_size_feed_forward} is not known, only 0")
    if layer.attention.pruned_heads:
        raise PartitionError("heads of its attention were pruned")
    record_as(layer, DistributedViTLayer)
    return (), {
        "num_attention_heads": inner.num_attention_heads,
        "attention_head_size": inner.attention_head_size,
        "hidden_size": dense.in_features,
        "intermediate_size": dense.out_features,
        "attention_dropout_prob": inner.dropout_prob,
        "hidden_dropout_prob": layer.output.dropout.p,
        "activation": activation_of(layer.intermediate.intermediate_act_fn, "hidden_act"),
        "layernorm_epsilon": layer.layernorm_before.eps,
        "pre_layernorm": True,
        "post_layernorm": False,
        "use_qkv_bias": inner.query.bias is not None,
        "flash_attention": inner.config._attn_implementation != "eager",
    }


RULES = (
    *fused("attention.attention", ("query", "key", "value"), "attention.qkv"),
    *weight_and_bias("attention.output.dense", "attention.dense"),
    *weight_and_bias("layernorm_before", "attention.pre_layernorm"),
    *weight_and_bias("layernorm_after", "output.pre_layernorm"),
    *weight_and_bias("intermediate.dense", "output.dense1"),
    *weight_and_bias("output.dense", "output.dense2"),
)
_LAYERS = ("vit.encoder.layer.{n}.", "encoder.layer.{n}.", "layer.{n}.")
FAMILY = Family(
    name="vit",
    model_types=("vit",),
    replaced=(
        Replacement(
            cls="transformers.models.vit.modeling_vit.ViTLayer",
            twin=DistributedViTLayer,
            arguments=layer_arguments,
            rules=RULES,
            modules=(("attention", "attention"),),
            config=lambda layer: None,
        ),
    ),
    places=tuple(Place(prefix, prefix, RULES) for prefix in _LAYERS),
)
translate_hf_state_dict_to_smdistributed = FAMILY.hf_to_smp
translate_hf_state_dict_to_smdistributed_vit = FAMILY.hf_to_smp
translate_state_dict_to_hf_vit = FAMILY.smp_to_hf
