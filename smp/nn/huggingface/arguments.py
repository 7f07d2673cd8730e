"""What distributed twins of transformers' layers do with arguments that they have no use for, and the like."""

import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

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
            if type(layer) in recorders and twin not in recorders:
                records[key] = [*recorders, twin]
