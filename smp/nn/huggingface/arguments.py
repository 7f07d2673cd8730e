"""What distributed twins of transformers' layers do with arguments that they have no use for, and the like."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smp import runtime
from smp.comm import collectives
from smp.errors import PartitionError, StepError
from smp.tp.module import DistributedModule

_ACTIVATIONS = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_new",
    "GELUTanh": "gelu_new",
    "PytorchGELUTanh": "gelu_new",
    "ReLU": "relu",
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "QuickGELUActivation": "quick_gelu",
}
_FUNCTIONS: dict[Any, str] = {F.gelu: "gelu", F.relu: "relu", torch.relu: "relu", F.silu: "silu"}
_NO_DIFFERENCE = frozenset(
    ["cache_position", "position_ids", "use_cache", "return_dict", "output_hidden_states", "num_items_in_batch"]
)
_GIVEN_TO = "_smp_given_to"


def activation_of(function: Any, switch: str) -> str:
    """What distributed layers call an activation of transformers, a module or a function.

    Args:
        switch: how the configuration calls it.

    Raises:
        PartitionError: they do not know it.
    """
    name = _ACTIVATIONS.get(type(function).__name__) or _FUNCTIONS.get(function)
    if isinstance(function, nn.GELU):
        name = "gelu" if function.approximate == "none" else "gelu_new"
    if name is None:
        shown = type(function).__name__ if isinstance(function, nn.Module) else getattr(function, "__name__", function)
        raise PartitionError(f"{switch} {shown} is not known, only {', '.join(sorted(set(_ACTIVATIONS.values())))}")
    return name


def parameters_of(layer: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a layer's forward, in order: they differ between versions of transformers."""
    return tuple(inspect.signature(type(layer).forward).parameters)[1:]


def bound(parameters: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, without those that make no difference to what a layer computes."""
    given = {**dict(zip(parameters, args)), **kwargs}
    return {name: value for name, value in given.items() if name not in _NO_DIFFERENCE}


def filled_in(layer: DistributedModule, hidden: Tensor, masks: Sequence[tuple[Tensor | None, bool]]) -> list[Any]:
    """Masks of a call, also where there is none while another rank of the tensor-parallel group has one for its batch.

    Models leave out a mask that hides nothing in their own batch, but the masks of joined batches are joined.

    Args:
        hidden: [N, S, H], of this rank's batch.
        masks: each with whether leaving it out means that places see no later ones.
    """
    group = layer.tp_group
    own = [mask for mask, _ in masks]
    if group.size == 1 or layer.shared_batch or collectives.is_structure(hidden):
        return own
    mine = [None if mask is None else (tuple(mask.shape[2:]), mask.dtype) for mask in own]
    told = runtime.get().transport.all_gather_object(mine, group, "telling which masks there are")
    for index, (mask, causal) in enumerate(masks):
        others = [answer[index] for answer in told if answer[index] is not None]
        if mask is None and others:
            (queries, keys), dtype = others[0]
            seen = torch.ones(hidden.shape[0], 1, queries, keys, dtype=torch.bool, device=hidden.device)
            seen = seen.tril(keys - queries) if causal and queries > 1 else seen
            own[index] = seen if dtype == torch.bool else additive(seen, dtype)
    return own


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that says what is seen (bool) as what is added to scores; any other as it is."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def causal_mask(hidden: Tensor) -> Tensor:
    """[1, 1, S, S], True where a place sees no later one, for hidden states [N, S, H]."""
    length = hidden.shape[1]
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=hidden.device).tril()


def refuse(**given: Any) -> None:
    """Raises `StepError` that names the first argument that is neither None nor False."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise StepError(
                f"{name}: a layer that is split over the tensor-parallel group does not take it. Leave it out, or "
                "leave the layers whole with smp.set_tensor_parallelism(layer, False)"
            )


def refuse_filled_cache(layer: nn.Module, cache: Any) -> None:
    """Accepts the empty cache that models make by themselves, once; the layer puts nothing into it.

    Raises:
        StepError: there is something in it, or the layer should have put something into it in an earlier call.
    """
    if cache is None:
        return
    given_to: frozenset[int] = getattr(cache, _GIVEN_TO, frozenset())
    if id(layer) in given_to or cache.get_seq_length() > 0:
        raise StepError(
            "past_key_values: a layer that is split over the tensor-parallel group keeps no keys and values. Pass "
            "whole sequences with use_cache=False, or leave the layers whole with "
            "smp.set_tensor_parallelism(layer, False)"
        )
    setattr(cache, _GIVEN_TO, given_to | {id(layer)})  # a new set: a recomputed call sees the old one again


def record_as(layer: nn.Module, twin: type[DistributedModule]) -> None:
    """Lets models that gather what their layers return (`_can_record_outputs`) know the layers' twin too."""
    for model in vars(sys.modules[type(layer).__module__]).values():
        records: dict[str, Any] = (isinstance(model, type) and getattr(model, "_can_record_outputs", None)) or {}
        for key, known in records.items():
            recorders = known if isinstance(known, list) else [known]
            for recorder in [r for r in recorders if type(layer) in (r, getattr(r, "target_class", None))]:
                more = twin if isinstance(recorder, type) else replace(recorder, target_class=twin)
                if more not in recorders:
                    recorders = [*recorders, more]
            records[key] = recorders if len(recorders) > 1 else known


def refuse_attentions(twin: nn.Module, around: Sequence[nn.Module]) -> None:
    """For `Replacement.around`: models around a twin that has no attention probabilities to give refuse to be asked for
    them. Not all models pass the wish on to their layers; some look for whole attentions, and would tell of none."""
    for model in around:
        if hasattr(model, "config") and _refuse_attentions not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(_refuse_attentions, with_kwargs=True)


def _refuse_attentions(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    for name in ("output_attentions", "output_cross_attentions"):
        asked = kwargs.get(name)
        refuse(**{name: getattr(model.config, name, None) if asked is None else asked})
