"""Cutting a step's arguments into microbatches and putting its outputs back together."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from smp.errors import StepError
from smp.nested import Spec, flatten, unflatten


class StepOutput:
    """One tensor that a step function returned, once per microbatch.

    `outputs` is the list of tensors in microbatch order. All methods give plain tensors, except `detach`.
    """

    def __init__(self, outputs: Iterable[torch.Tensor]) -> None:
        self.outputs: list[torch.Tensor] = list(outputs)

    def reduce_mean(self) -> torch.Tensor:
        """Mean over microbatches, elementwise; shape of one output."""
        return self.reduce_sum() / len(self.outputs)

    def reduce_sum(self) -> torch.Tensor:
        """Sum over microbatches, elementwise; shape of one output."""
        return torch.stack(self.outputs).sum(dim=0)

    def concat(self) -> torch.Tensor:
        """The outputs one after the other on dimension 0; 0-dim outputs become a vector."""
        if self.outputs[0].dim() == 0:
            return torch.stack(self.outputs)
        return torch.cat(self.outputs, dim=0)

    def stack(self) -> torch.Tensor:
        """The outputs along a new dimension 0."""
        return torch.stack(self.outputs)

    def detach(self) -> "StepOutput":
        """The same outputs outside any autograd graph."""
        return StepOutput(output.detach() for output in self.outputs)

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(output.shape)) for output in self.outputs)
        return f"StepOutput({len(self.outputs)} microbatches: {shapes})"


def split_arguments(
    arguments: dict[str, Any], num_microbatches: int, non_split: Sequence[str], axes: dict[str, int]
) -> list[dict[str, Any]]:
    """Cut every argument (name -> value) into `num_microbatches` parts; returns one dict of arguments per microbatch.

    Tensors are cut into equal contiguous parts on axis 0 (or `axes[name]`), also inside containers. 0-dim tensors,
    arguments named in `non_split` and everything that is no tensor go whole to each microbatch. An object with
    `smp_slice(num_mb, mb, axis)` cuts itself. Raises `StepError` naming argument, shape and count when an axis does not
    divide or does not exist, and for an object that hides a batch in an attribute: its parts would all be the whole.
    """
    if num_microbatches > 1:
        _refuse_hidden_batches(arguments, non_split, axes)
    parts: list[dict[str, Any]] = [{} for _ in range(num_microbatches)]
    for name, value in arguments.items():
        if name in non_split:
            for part in parts:
                part[name] = value
            continue
        axis = axes.get(name, 0)
        leaves, spec = flatten(value, keep_tensorless=True)
        columns = [_split_leaf(name, leaf, num_microbatches, axis) for leaf in leaves]
        for index, part in enumerate(parts):
            part[name] = unflatten(spec, [column[index] for column in columns])
    return parts


def _refuse_hidden_batches(arguments: dict[str, Any], non_split: Sequence[str], axes: dict[str, int]) -> None:
    split = {name: flatten(value)[0] for name, value in arguments.items() if name not in non_split}
    tensors = [(x, axes.get(name, 0)) for name, leaves in split.items() for x in leaves if isinstance(x, torch.Tensor)]
    lengths = {x.shape[axis] for x, axis in tensors if -x.dim() <= axis < x.dim()}
    for name, leaves in split.items():
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor | torch.nn.Module | type) or hasattr(leaf, "smp_slice"):
                continue
            for attribute, held in getattr(leaf, "__dict__", {}).items():
                if isinstance(held, torch.Tensor) and held.dim() and held.shape[0] in lengths:
                    raise StepError(
                        f"step argument '{name}' is, or holds, a {type(leaf).__qualname__} whose attribute "
                        f"'{attribute}' is a tensor of shape {tuple(held.shape)}, as long as the batch, but such an "
                        "object cannot be split into microbatches. Pass tensors themselves, or in a list, tuple, dict "
                        "or dataclass; give the class a method smp_slice(num_mb, mb, axis); or pass the object whole "
                        f"with smp.step(non_split_inputs=['{name}'])."
                    )


def _split_leaf(name: str, leaf: Any, count: int, axis: int) -> Sequence[Any]:
    if hasattr(leaf, "smp_slice"):
        return [leaf.smp_slice(count, index, axis) for index in range(count)]
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or count == 1:
        return [leaf] * count
    if not -leaf.dim() <= axis < leaf.dim():
        raise StepError(
            f"step argument '{name}' has shape {tuple(leaf.shape)}, which has no axis {axis} to split into {count} "
            f"microbatches. Name its batch axis with smp.step(input_split_axes={{'{name}': axis}}) or pass it whole "
            f"with smp.step(non_split_inputs=['{name}'])."
        )
    length = leaf.shape[axis]
    if length % count:
        raise StepError(
            f"step argument '{name}' has shape {tuple(leaf.shape)}: axis {axis} of length {length} does not divide "
            f"into {count} microbatches. Use a batch that is a multiple of {count}, another 'microbatches', or pass "
            f"the argument whole with smp.step(non_split_inputs=['{name}'])."
        )
    return leaf.split(length // count, dim=axis)


def merge_outputs(outputs: list[Any]) -> Any:
    """One nested object from the returned objects of all microbatches.

    The structure is kept; each tensor becomes a `StepOutput`, each other leaf a list over microbatches. When
    microbatches returned different structures, the result is the plain list of what they returned.
    """
    flat: list[list[Any]] = []
    specs: list[Spec] = []
    for output in outputs:
        leaves, spec = flatten(output)
        flat.append(leaves)
        specs.append(spec)
    if outputs and all(output is None for output in outputs):
        return None
    if any(spec != specs[0] for spec in specs):
        return outputs
    merged = [_merge_leaf(list(column)) for column in zip(*flat, strict=True)]
    return unflatten(specs[0], merged)


def _merge_leaf(column: list[Any]) -> Any:
    if all(isinstance(leaf, torch.Tensor) for leaf in column):
        return StepOutput(column)
    return column
