"""What the GPT families share: a causal language model and its layers, called and answering as the originals do."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from smp.errors import PartitionError, StepError
from smp.nn.huggingface.arguments import (
    filled_in,
    parameters_of,
    record_as,
    refuse,
    refuse_attentions,
    refuse_filled_cache,
)
from smp.tp.families import Arguments, Family, Place, Replacement, Rule, inside, weight_and_bias
from smp.tp.lm_head import DistributedTransformerLMHead
from smp.tp.transformer import DistributedTransformerLayer

Returns = Literal["hidden", "tuple", "pair"]
CACHES = ("past_key_values", "layer_past", "cache")  # how arguments are called, in one layer or version or another
PER_LAYER = ("layer_idx", "attention_window")  # arguments in which the layers of one model may differ


class DistributedDecoderLayer(DistributedTransformerLayer):
    """A DistributedTransformerLayer with the arguments and results of a layer of a GPT.

    Args:
        parameters: names of the original's positional arguments.
        returns: what the original returns: "hidden" states, a "tuple" of them, or a "pair" of them and attention
            probabilities, of which the twin has none to give.
        always_masked: whether the model around it passes a mask also where there is nothing to hide.
        sizes: arguments of DistributedTransformerLayer.
    """

    def __init__(self, parameters: Sequence[str], returns: Returns, always_masked: bool, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.parameters_of_original = tuple(parameters)
        self.returns, self.always_masked = returns, always_masked

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """hidden_states [N, S, H], attention_mask [N, 1, S, S], additive or bool (True: seen), and what else the
        original takes -> the new hidden states, as the original returns them.

        Raises:
            StepError: a head mask, a cache with something in it, attention probabilities that are asked for, or an
                encoder's states without cross attention.
        """
        given = dict(zip(self.parameters_of_original, args)) | kwargs
        hidden, mask = given["hidden_states"], given.get("attention_mask")
        cross = given.get("encoder_hidden_states")
        refuse(head_mask=given.get("head_mask"), output_attentions=given.get("output_attentions"))
        for name in CACHES:
            refuse_filled_cache(self, given.get(name))
        if cross is not None and not self.add_cross_attention:
            raise StepError("encoder_hidden_states: the layers were made without config.add_cross_attention")
        cross_mask = given.get("encoder_attention_mask")
        if not self.always_masked:
            mask, cross_mask = filled_in(self, hidden, [(mask, True), (cross_mask, False)])
        inputs = (hidden, cross, mask, cross_mask) if self.add_cross_attention else (hidden, mask)
        out = super().forward(inputs, given.get("position_ids"))[0]
        if self.returns == "hidden":
            return out
        return (out,) if self.returns == "tuple" else (out, None)


@dataclass(frozen=True)
class Call:
    """How the original of a DistributedCausalLM is called.

    Args:
        output: class of what it returns, in `transformers.modeling_outputs`.
        types_are_words: whether token types are looked up in the table of words; else there are none.
    """

    output: str
    types_are_words: bool


class DistributedCausalLM(DistributedTransformerLMHead):
    """A DistributedTransformerLMHead with the arguments and results of a GPT with a language model's head.

    In training with labels the result holds the loss alone: whole logits would have to be gathered for nothing.
    Otherwise it holds logits, and the loss where there are labels.

    Args:
        parameters: names of the original's positional arguments.
        call: how the original is called.
        sizes: arguments of DistributedTransformerLMHead.
    """

    config: Any  # the original's, put there when the model is made

    def __init__(self, parameters: Sequence[str], call: Call, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.parameters_of_original, self.call = tuple(parameters), call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """input_ids [N, S], attention_mask [N, S], labels [N, S], .., as the original -> its output class with `loss`
        and `logits`, or a tuple where `return_dict` is False.

        Raises:
            StepError: arguments that the twin does not know, or has no use for: what only an undistributed model can
                do is not left out silently.
        """
        given = dict(zip(self.parameters_of_original, args)) | kwargs
        ids, mask, types = (given.pop(name, None) for name in ("input_ids", "attention_mask", "token_type_ids"))
        positions, labels = given.pop("position_ids", None), given.pop("labels", None)
        cross, cross_mask = given.pop("encoder_hidden_states", None), given.pop("encoder_attention_mask", None)
        return_dict, keep = given.pop("return_dict", None), given.pop("logits_to_keep", 0)
        items = given.pop("num_items_in_batch", None)
        given.pop("use_cache", None)  # there is none
        for name in CACHES:
            refuse_filled_cache(self, given.pop(name, None))
        refuse(**given)
        if cross is not None and not self.add_cross_attention:
            raise StepError("encoder_hidden_states: the model was made without config.add_cross_attention")
        crossed = (cross, cross_mask) if self.add_cross_attention else ()
        out = super().forward((ids, mask, types, positions, *crossed, labels), items)
        loss, logits = out if isinstance(out, tuple) else (out, None) if labels is not None else (None, out)
        if isinstance(keep, Tensor) or keep:
            if labels is not None:
                raise StepError("logits_to_keep: leave it out where there are labels")
            logits = logits[:, keep if isinstance(keep, Tensor) else slice(-keep, None)]
        if return_dict is False or (return_dict is None and not getattr(self.config, "use_return_dict", True)):
            return tuple(value for value in (loss, logits) if value is not None)
        from transformers import modeling_outputs

        return getattr(modeling_outputs, self.call.output)(loss=loss, logits=logits)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: there is no cache of keys and values, and no logits of parts of a sequence."""
        raise StepError(
            "generate: a language model that is split as a whole does not generate text. Save its weights under the "
            "names of transformers (smp.state.module_manager.translate_functions) and generate with the plain model, "
            "or leave the model whole with smp.set_tensor_parallelism(model, False)"
        )

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: the weights here are parts, under names of ours."""
        raise StepError(
            "save_pretrained: this is one part of a model. Translate its whole state dict "
            "(smp.state.module_manager.translate_functions) and give it to a plain model: "
            "plain.save_pretrained(folder, state_dict=translated)"
        )

    @property
    def takes_token_types(self) -> bool:
        return self.call.types_are_words

    def _summed(self, ids: Tensor, types: Tensor | None, positions: Tensor | None, dim: int | None) -> Tensor:
        hidden = super()._summed(ids, None, positions, dim)
        return hidden if types is None else hidden + self.word_embedding(types, dim)


# From a model to arguments


def same(values: Iterable[Any], what: str) -> Any:
    """The one value that all have.

    Raises:
        PartitionError: they differ.
    """
    different = list(dict.fromkeys(values))
    if len(different) > 1:
        raise PartitionError(f"{what} differ: {', '.join(map(str, different[:4]))}; the twin has one for all")
    return different[0]


def check_config(config: Any) -> None:
    """Raises PartitionError for switches of any configuration that no twin can honour."""
    for switch in ("output_attentions", "output_hidden_states"):
        if getattr(config, switch, False):
            raise PartitionError(f"config.{switch} is True, and the twin has none to give")


def together(layers: Sequence[Arguments]) -> dict[str, Any]:
    """Arguments of a DistributedTransformerLMHead out of those of its layers.

    Raises:
        PartitionError: layers differ in what the twin has once.
    """
    if not layers:
        raise PartitionError("it has no layers")
    kinds = [kwargs for _, kwargs in layers]
    own = {"parameters", "returns", "always_masked", *PER_LAYER}
    sizes = {name: same((kind[name] for kind in kinds), name) for name in kinds[0] if name not in own}
    if [kind["layer_idx"] for kind in kinds] != list(range(len(kinds))):
        raise PartitionError("its layers were put in another order than they were made in")
    return {**sizes, "num_layers": len(kinds), "attention_window": [kind.get("attention_window") for kind in kinds]}


# Declarations


@dataclass(frozen=True)
class Names:
    """Where the pieces of a model stand.

    Args:
        base, layers, words, places, dropout, norm: of the model without a head, relative to the model with one.
        places: None: there is no table of places.
        heads: of the language model's head, one name or several, where versions differ; what is translated without a
            model gets the first one, which all read.
    """

    base: str
    layers: str
    words: str
    places: str | None
    dropout: str
    norm: str
    heads: tuple[str, ...]


def model_arguments(model: Any, call: Call, names: Names, layer_arguments: Callable[[Any], Arguments]) -> Arguments:
    """From a model with a language model's head to the arguments of its twin.

    Raises:
        PartitionError: something that the twin does not know.
    """
    base, head = model.get_submodule(names.base), model.get_output_embeddings()
    layers = together([layer_arguments(layer) for layer in base.get_submodule(names.layers)])
    norm, words = base.get_submodule(names.norm), base.get_submodule(names.words)
    places = None if names.places is None else base.get_submodule(names.places)
    if not isinstance(norm, nn.LayerNorm) or not isinstance(head, nn.Linear):
        raise PartitionError("its last norm, or its head, is not of the class its model has it of")
    same((norm.eps, layers["layernorm_epsilon"]), "epsilons of norms")
    for table in (words, places):
        if table is not None and (table.padding_idx is not None or table.max_norm is not None):
            raise PartitionError("a table of embeddings has padding_idx or max_norm")
    return (), {
        **layers,
        "parameters": parameters_of(model),
        "call": call,
        "vocab_size": words.num_embeddings,
        "num_positions": 0 if places is None else places.num_embeddings,
        "initializer_range": model.config.initializer_range,
        "use_normal_initialization": True,
        "embedding_dropout_prob": base.get_submodule(names.dropout).p,
        "tie_word_embeddings": head.weight is words.weight,
        "lm_head_bias": head.bias is not None,
        "logits_with_loss": None,
    }


def _model_rules(names: Names, tables: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Of a model with a head; `tables` are those of the model without one."""
    tied_to = f"{names.base}.{names.words}.weight"
    return (
        *inside(f"{names.base}.", "", tables),
        *(Rule(f"{theirs}.weight", "lm_head.weight", tied_to=tied_to) for theirs in names.heads),
        *(Rule(f"{theirs}.bias", "lm_head.bias") for theirs in names.heads),
    )


def _model_modules(names: Names, modules: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Counterparts of the modules of a model with a head; `modules` are those of a layer."""
    blocks = f"{names.base}.{names.layers}"
    pieces = ((names.words, "word_embedding"), (names.dropout, "embedding_dropout"), (names.norm, "layernorm"))
    return (
        *((f"{names.base}.{theirs}", ours) for theirs, ours in pieces),
        *(() if names.places is None else ((f"{names.base}.{names.places}", "position_embedding"),)),
        (names.base, "transformer"),
        (blocks, "transformer.seq_layers"),
        (f"{blocks}.{{n}}", "transformer.seq_layers.{n}"),
        *((f"{blocks}.{{n}}.{theirs}", f"transformer.seq_layers.{{n}}.{ours}") for theirs, ours in modules),
        *((theirs, "lm_head") for theirs in names.heads),
    )


def family_of(
    name: str,
    model_type: str,
    path: str,
    classes: tuple[str, str],
    call: Call,
    layer_arguments: Callable[[Any], Arguments],
    config: Callable[[Any], Any],
    names: Names,
    rules: tuple[Rule, ...],
    modules: tuple[tuple[str, str], ...],
) -> Family:
    """A GPT: the model with a language model's head becomes a DistributedCausalLM, layers in other models become
    DistributedDecoderLayers.

    Args:
        name, model_type: see Family.
        path: module of transformers.
        classes: of the model and of a layer, there.
        call: how the model is called.
        layer_arguments, config: read from a layer.
        names: where pieces stand.
        rules, modules: of a layer.
    """

    def recorded_layer_arguments(layer: Any) -> Arguments:
        record_as(layer, DistributedDecoderLayer)
        return layer_arguments(layer)

    tables = (
        Rule(f"{names.words}.weight", "word_embedding.weight"),
        *(() if names.places is None else (Rule(f"{names.places}.weight", "position_embedding.weight"),)),
        *inside(f"{names.layers}.{{n}}.", "transformer.seq_layers.{n}.", rules),
        *weight_and_bias(names.norm, "layernorm"),
    )
    model_rules = _model_rules(names, tables)
    model = Replacement(
        cls=f"{path}.{classes[0]}",
        twin=DistributedCausalLM,
        arguments=lambda model: model_arguments(model, call, names, layer_arguments),
        rules=model_rules,
        modules=_model_modules(names, modules),
        attributes=("config", "generation_config"),
    )
    layer = Replacement(
        cls=f"{path}.{classes[1]}",
        twin=DistributedDecoderLayer,
        arguments=recorded_layer_arguments,
        rules=rules,
        modules=modules,
        config=config,
        around=refuse_attentions,
    )
    prefixes = (f"{names.base}.{names.layers}.{{n}}.", f"{names.layers}.{{n}}.")
    places = (Place("", "", model_rules), Place("", "", tables), *(Place(p, p, rules) for p in prefixes))
    return Family(name, (model_type,), (model, layer), places)
