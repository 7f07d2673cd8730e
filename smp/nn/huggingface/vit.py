"""ViT: every layer becomes a DistributedTransformerLayer that normalises its inputs.

transformers 5 has other names for the parts of a layer than transformers 4.
"""

from typing import Any

from torch import Tensor

from smp.errors import PartitionError
from smp.nn.huggingface.arguments import activation_of, bound, parameters_of, record_as, refuse, refuse_attentions
from smp.nn.huggingface.bert import fused
from smp.tp.families import Arguments, Family, Place, Replacement, weight_and_bias
from smp.tp.transformer import DistributedTransformerLayer


class DistributedViTLayer(DistributedTransformerLayer):
    """A DistributedTransformerLayer with the arguments and results of ViTLayer.

    Args:
        parameters: names of the original's arguments.
        sizes: arguments of DistributedTransformerLayer.
    """

    def __init__(self, parameters: tuple[str, ...], **sizes: Any) -> None:
        super().__init__(**sizes)
        self.parameters_of_original = parameters

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """`hidden_states` [N, S, H], `attention_mask` [N, 1, S or 1, S] where the original takes one -> [N, S, H].

        Raises:
            StepError: an argument that the twin does not know, as a head mask.
        """
        given = bound(self.parameters_of_original, args, kwargs)
        hidden, mask = given.pop("hidden_states"), given.pop("attention_mask", None)
        refuse(**given)
        out: Tensor = super().forward((hidden, mask))[0]
        return out


def layer_arguments(layer: Any) -> Arguments:
    """From an instance of ViTLayer to the arguments of its twin.

    Raises:
        PartitionError: something that the twin does not know.
    """
    since_v5 = hasattr(layer, "mlp")
    inner = layer.attention if since_v5 else layer.attention.attention
    dense = layer.mlp.fc1 if since_v5 else layer.intermediate.dense
    query = inner.q_proj if since_v5 else inner.query
    chunk = getattr(layer, "chunk_size_feed_forward", 0)
    if chunk:
        raise PartitionError(f"chunk_size_feed_forward {chunk} is not known, only 0")
    if getattr(layer.attention, "pruned_heads", None):
        raise PartitionError("heads of its attention were pruned")
    activation = layer.mlp.activation_fn if since_v5 else layer.intermediate.intermediate_act_fn
    record_as(layer, DistributedViTLayer)
    return (), {
        "parameters": parameters_of(layer),
        "num_attention_heads": inner.num_attention_heads,
        "attention_head_size": query.out_features // inner.num_attention_heads,
        "hidden_size": dense.in_features,
        "intermediate_size": dense.out_features,
        "attention_dropout_prob": inner.attention_dropout if since_v5 else inner.dropout_prob,
        "hidden_dropout_prob": (layer if since_v5 else layer.output).dropout.p,
        "activation": activation_of(activation, "hidden_act"),
        "layernorm_epsilon": layer.layernorm_before.eps,
        "pre_layernorm": True,
        "post_layernorm": False,
        "use_qkv_bias": query.bias is not None,
        "flash_attention": inner.config._attn_implementation != "eager",
    }


_NORMS = (
    *weight_and_bias("layernorm_before", "attention.pre_layernorm"),
    *weight_and_bias("layernorm_after", "output.pre_layernorm"),
)
RULES_V4 = (
    *fused("attention.attention", ("query", "key", "value"), "attention.qkv"),
    *weight_and_bias("attention.output.dense", "attention.dense"),
    *weight_and_bias("intermediate.dense", "output.dense1"),
    *weight_and_bias("output.dense", "output.dense2"),
    *_NORMS,
)
RULES_V5 = (
    *fused("attention", ("q_proj", "k_proj", "v_proj"), "attention.qkv"),
    *weight_and_bias("attention.o_proj", "attention.dense"),
    *weight_and_bias("mlp.fc1", "output.dense1"),
    *weight_and_bias("mlp.fc2", "output.dense2"),
    *_NORMS,
)


_PLACES_V4 = ("vit.encoder.layer.{n}.", "encoder.layer.{n}.", "layer.{n}.")
_PLACES_V5 = ("vit.layers.{n}.", "layers.{n}.")
FAMILY = Family(
    name="vit",
    model_types=("vit",),
    replaced=(
        Replacement(
            cls="transformers.models.vit.modeling_vit.ViTLayer",
            twin=DistributedViTLayer,
            arguments=layer_arguments,
            rules=(*RULES_V4, *RULES_V5[: -len(_NORMS)]),
            modules=(("attention", "attention"),),
            config=lambda layer: None,
            around=refuse_attentions,
        ),
    ),
    places=(
        *(Place(prefix, prefix, RULES_V4) for prefix in _PLACES_V4),
        *(Place(prefix, prefix, RULES_V5) for prefix in _PLACES_V5),
    ),
)
translate_hf_state_dict_to_smdistributed = FAMILY.hf_to_smp
translate_hf_state_dict_to_smdistributed_vit = FAMILY.hf_to_smp
translate_state_dict_to_hf_vit = FAMILY.smp_to_hf
