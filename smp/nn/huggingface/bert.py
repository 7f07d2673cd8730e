"""BERT: every layer becomes a DistributedTransformerLayer, the rest of the model stays as it is.

RoBERTa's layers are the same under another name, see roberta.py.
"""

from collections.abc import Sequence
from typing import Any

from smp.errors import PartitionError, StepError
from smp.nn.huggingface.arguments import (
    activation_of,
    bound,
    causal_mask,
    filled_in,
    parameters_of,
    record_as,
    refuse,
    refuse_attentions,
    refuse_filled_cache,
)
from smp.tp.families import Arguments, Family, Place, Replacement, Rule, weight_and_bias
from smp.tp.layouts import FUSED_KV, FUSED_QKV
from smp.tp.region import States
from smp.tp.transformer import DistributedTransformerLayer


class DistributedBertLayer(DistributedTransformerLayer):
    """A DistributedTransformerLayer with the arguments and results of BertLayer.

    Args:
        parameters: names of the original's arguments.
        returns_tuple: whether it returns (hidden states,) rather than hidden states.
        causal_without_mask: where there is no mask, places do not see later ones.
        always_masked: whether the model around it passes a mask also where there is nothing to hide.
        sizes: arguments of DistributedTransformerLayer.
    """

    def __init__(
        self,
        parameters: tuple[str, ...],
        returns_tuple: bool,
        causal_without_mask: bool,
        always_masked: bool,
        **sizes: Any,
    ) -> None:
        super().__init__(**sizes)
        self.parameters_of_original, self.returns_tuple = parameters, returns_tuple
        self.causal_without_mask, self.always_masked = causal_without_mask, always_masked

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`hidden_states` [N, S, H], `attention_mask` [N, 1, S or 1, K], additive or bool (True: seen), with cross
        attention `encoder_hidden_states`, `encoder_attention_mask` -> hidden states [N, S, H], as the original.

        Raises:
            StepError: an argument that the twin does not know (a head mask, attention probabilities), a cache with
                something in it, or an encoder's states without cross attention.
        """
        given = bound(self.parameters_of_original, args, kwargs)
        hidden, mask = given.pop("hidden_states"), given.pop("attention_mask", None)
        cross, cross_mask = given.pop("encoder_hidden_states", None), given.pop("encoder_attention_mask", None)
        for name in ("past_key_values", "cache"):
            refuse_filled_cache(self, given.pop(name, None))
        refuse(**given)
        if cross is not None and not self.add_cross_attention:
            raise StepError("encoder_hidden_states: the layers were made without config.add_cross_attention")
        if not self.always_masked:
            mask, cross_mask = filled_in(self, hidden, [(mask, self.causal_without_mask), (cross_mask, False)])
        if mask is None and self.causal_without_mask and hidden.shape[1] > 1:
            mask = causal_mask(hidden)
        inputs = (hidden, cross, mask, cross_mask) if self.add_cross_attention else (hidden, mask)
        out = super().forward(inputs)[0]
        return (out,) if self.returns_tuple else out

    def inside(self, states: States) -> States:
        """Without an encoder's states there is no cross attention."""
        if not self.add_cross_attention or states.cross is not None:
            return super().inside(states)
        states = states._replace(hidden=self.attention(states))
        return states._replace(hidden=self.output(states))


def layer_arguments(layer: Any) -> Arguments:
    """From an instance of BertLayer or RobertaLayer to the arguments of DistributedBertLayer.

    Raises:
        PartitionError: something that the twin does not know.
    """
    attention, cross = layer.attention, getattr(layer, "crossattention", None)
    inner, dense = attention.self, layer.intermediate.dense
    positions = getattr(inner, "position_embedding_type", "absolute")
    if positions != "absolute":
        raise PartitionError(f"position_embedding_type {positions!r} is not known, only 'absolute'")
    if layer.chunk_size_feed_forward:
        raise PartitionError(f"chunk_size_feed_forward {layer.chunk_size_feed_forward} is not known, only 0")
    if any(getattr(part, "pruned_heads", None) for part in (attention, cross)):
        raise PartitionError("heads of its attention were pruned")
    since_v5 = not hasattr(inner, "position_embedding_type")
    fused = inner.config._attn_implementation != "eager" if since_v5 else hasattr(inner, "dropout_prob")
    record_as(layer, DistributedBertLayer)
    return (), {
        "parameters": parameters_of(layer),
        "returns_tuple": not since_v5,
        "causal_without_mask": fused and layer.is_decoder,
        "always_masked": not since_v5,
        "flash_attention": fused,
        "num_attention_heads": inner.num_attention_heads,
        "attention_head_size": inner.attention_head_size,
        "hidden_size": dense.in_features,
        "intermediate_size": dense.out_features,
        "attention_dropout_prob": getattr(inner, "dropout_prob", inner.dropout.p),
        "hidden_dropout_prob": layer.output.dropout.p,
        "activation": activation_of(layer.intermediate.intermediate_act_fn, "hidden_act"),
        "layernorm_epsilon": layer.output.LayerNorm.eps,
        "add_cross_attention": cross is not None,
        "pre_layernorm": False,
        "post_layernorm": True,
    }


def adapt_models(layer: Any, around: Sequence[Any]) -> None:
    """Models around a layer refuse to be asked for attention probabilities, and always pass masks.

    Where batches are joined, a model must not leave out a mask that hides nothing in its own batch: another rank's
    batch may have something to hide, and masks are joined. On their way for plain attention models pass them always.
    (Those of transformers 5 do not: see DistributedBertLayer's `always_masked`.)
    """
    refuse_attentions(layer, around)
    if layer.tp_group.size > 1 and not layer.shared_batch:
        for module in around:
            if getattr(module, "attn_implementation", None) == "sdpa":
                module.attn_implementation = "eager"


def fused(theirs: str, pieces: tuple[str, ...], ours: str) -> tuple[Rule, ...]:
    """Rules for linears inside of `theirs` that become one, one below the other."""
    layout = FUSED_QKV if len(pieces) == 3 else FUSED_KV
    return tuple(
        Rule(tuple(f"{theirs}.{piece}.{leaf}" for piece in pieces), f"{ours}.{leaf}", layout)
        for leaf in ("weight", "bias")
    )


RULES = (
    *fused("attention.self", ("query", "key", "value"), "attention.qkv"),
    *weight_and_bias("attention.output.dense", "attention.dense"),
    *weight_and_bias("attention.output.LayerNorm", "attention.layernorm"),
    *weight_and_bias("crossattention.self.query", "cross_attention.query"),
    *fused("crossattention.self", ("key", "value"), "cross_attention.key_value"),
    *weight_and_bias("crossattention.output.dense", "cross_attention.dense"),
    *weight_and_bias("crossattention.output.LayerNorm", "cross_attention.layernorm"),
    *weight_and_bias("intermediate.dense", "output.dense1"),
    *weight_and_bias("output.dense", "output.dense2"),
    *weight_and_bias("output.LayerNorm", "output.layernorm"),
)
MODULES = (
    ("attention", "attention"),
    ("crossattention", "cross_attention"),
)


def family_of(name: str, path: str, cls: str, model_types: tuple[str, ...]) -> Family:
    """BERT, or what differs from it in names only.

    Args:
        name: of the family, and of the encoder in its models.
        path: module of transformers.
        cls: class of a layer there.
        model_types: see Family.
    """
    layers = "encoder.layer.{n}."
    prefixes = (f"{name}.{layers}", layers, f"encoder.{layers}", f"decoder.{name}.{layers}", "layer.{n}.")
    return Family(
        name=name,
        model_types=model_types,
        replaced=(
            Replacement(
                cls=f"{path}.{cls}",
                twin=DistributedBertLayer,
                arguments=layer_arguments,
                rules=RULES,
                modules=MODULES,
                config=lambda layer: None,
                around=adapt_models,
            ),
        ),
        places=tuple(Place(prefix, prefix, RULES) for prefix in prefixes),
    )


FAMILY = family_of("bert", "transformers.models.bert.modeling_bert", "BertLayer", ("bert",))
translate_hf_state_dict_to_smdistributed = FAMILY.hf_to_smp
translate_hf_state_dict_to_smdistributed_bert = FAMILY.hf_to_smp
translate_state_dict_to_hf_bert = FAMILY.smp_to_hf
