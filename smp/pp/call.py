"""One call of glue code, taken apart: its operands, where it runs, and what its result depends on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from smp.errors import StepError
from smp.log import warn_once
from smp.nested import Spec, flatten, unflatten
from smp.pp.cost import Costs, nominal_seconds
from smp.pp.placed import Placed, Value, user_line
from smp.pp.structure import signature_of, value_signature
from smp.pp.tape import Run

GROUP = " + "  # between the names of modules that run as one node
CALL = 20e-6  # seconds that a call takes however small it is
_PRODUCTS = frozenset(("linear", "matmul", "__matmul__", "mm", "bmm"))


class Estimate(NamedTuple):
    """Seconds of a call's forward and backward, and of the part of the backward that is gradients of weights."""

    forward: float
    backward: float
    weight: float


@dataclass(slots=True)
class Call:
    """`leaves` and `spec` are the flattened (args, kwargs); `values[i]` is the value of a placed leaf, else None.

    `key` says what is called, in signatures; `arrived` are the operands' values on the owner, once they are moved.
    """

    key: Any
    name: str
    function: Callable[..., Any]
    leaves: list[Any]
    spec: Spec
    values: list[Value | None]
    owner: int
    is_function: bool  # of torch, called by glue code; otherwise a module or other opaque code
    arrived: list[Value | None] = field(default_factory=list)
    run: Run | None = None  # the calls on the owner that this one follows without a move between them

    def check(self) -> None:
        """Raises `StepError` for an operand that is out of date, that comes from elsewhere with a history, or that is
        hidden in an object that cannot be moved."""
        for index, value in enumerate(self.values):
            if value is not None:
                value.check_fresh()
            elif isinstance(self.leaves[index], torch.Tensor):
                _check_history(self.leaves[index])
            elif _hides_placed(self.leaves[index]):
                raise self._hidden(index)

    def signature(self, device_type: str) -> Any:
        """Everything that the structure of the result may depend on; hashable."""
        operands = [
            signature_of(leaf) if value is None else value_signature(value)
            for leaf, value in zip(self.leaves, self.values, strict=True)
        ]
        modes = (torch.is_grad_enabled(), torch.is_autocast_enabled(device_type))
        return (self.key, self.spec, tuple(operands), *modes)

    def estimate(self, costs: Costs | None) -> "Estimate":
        """Nominal seconds of this call, the same on every rank: of a module from the trace, else from its operands."""
        name = getattr(self.key, "name", None)  # of a module, or several; functions of glue code have none
        names = [] if costs is None or name is None else name.split(GROUP)
        known = [costs[n] for n in names if n in costs and costs[n].calls] if costs is not None else []
        if known and len(known) == len(names):
            return Estimate(
                sum(cost.forward / cost.calls for cost in known) + CALL,
                sum(cost.backward / cost.calls for cost in known) + CALL,
                sum(cost.weight / cost.calls for cost in known),
            )
        operands = [value for value in self.values if value is not None]
        flops = 0
        if self.name in _PRODUCTS and len(operands) > 1:
            second = operands[1].shape
            flops = 2 * operands[0].numel * (second[0] if self.name == "linear" else second[-1] if second else 1)
        nbytes = sum(value.numel * value.dtype.itemsize for value in operands)
        first = operands[0] if operands else None
        forward = CALL
        if first is not None:
            forward += nominal_seconds(flops, nbytes, first.dtype, first.program.device.type)
        return Estimate(forward, 2 * forward, 0.0)

    def arguments(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with other leaves."""
        args, kwargs = unflatten(self.spec, leaves)
        return args, kwargs

    def inputs(self, shielded: bool) -> list[Any]:
        """On the owner: the leaves as plain tensors; behind an identity where the call may write to them."""
        return [
            leaf if value is None else _as_input(value, shielded, self.run)
            for leaf, value in zip(self.leaves, self.arrived, strict=True)
        ]

    def dummies(self, device: torch.device) -> list[Any]:
        """Elsewhere: stand-ins of the operands' shapes. They are ones, which are valid weights and probabilities; their
        strides decide how generators fill a tensor."""
        return [
            leaf if v is None else torch.empty_strided(v.shape, v.stride, dtype=v.dtype, device=device).fill_(1)
            for leaf, v in zip(self.leaves, self.arrived, strict=True)
        ]

    def warn_if_changed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After the call on the owner: its lists and dicts are copies of the caller's, which do not see a change."""
        if flatten((args, kwargs))[1] != self.spec:
            warn_once(
                f"changed {self.name}",
                "'%s' adds to or removes from a list or dict that it is given as an argument. Across stages the caller "
                "does not see that change; return what is new instead.",
                self.name,
            )

    def unstable(self) -> StepError:
        return StepError(
            f"'{self.name}' gave a result of another structure than before for arguments of the same shapes: the "
            "shape, dtype or gradient of what it returns depends on data. Let the module return tensors of a fixed "
            "shape, or place the code that produces and uses the varying tensor on one stage (smp.set_partition)."
        )

    def _hidden(self, index: int) -> StepError:
        args, kwargs = self.arguments(list(range(len(self.leaves))))
        named = {**{str(position): arg for position, arg in enumerate(args)}, **kwargs}
        argument = next(label for label, arg in named.items() if index in flatten(arg)[0])
        return StepError(
            f"argument '{argument}' of '{self.name}' at {user_line()} is a {type(self.leaves[index]).__qualname__} "
            "that holds a tensor of another call in an attribute; such a tensor cannot be moved between stages. Pass "
            "tensors themselves, or in a list, tuple, dict, mapping or dataclass."
        )


def _check_history(tensor: torch.Tensor) -> None:
    if tensor.requires_grad and tensor.grad_fn is not None and torch.is_grad_enabled():
        raise StepError(
            f"a tensor of shape {tuple(tensor.shape)} is used at {user_line()} that was computed inside a module of "
            "one stage and kept by a hook or an attribute, or outside the step: other stages have not got it, and its "
            "gradient would be lost. Return it from the module, or detach it if it is the same on every rank."
        )


def _hides_placed(leaf: Any) -> bool:
    """Whether an object that is no container holds a placed tensor in an attribute."""
    attributes = getattr(leaf, "__dict__", None)
    if not attributes or isinstance(leaf, torch.Tensor | nn.Module | type):
        return False
    return any(type(x) is Placed for x in attributes.values())


def _as_input(value: Value, shielded: bool, run: Run | None) -> torch.Tensor:
    """The tensor a call is given. Behind an identity where the call may write to it: a leaf could not be written to."""
    assert value.local is not None
    if value.parameter is not None:
        return value.local
    if not value.requires_grad:
        return value.local
    if not torch.is_grad_enabled():
        return value.local.detach()
    tensor = value.graph if value.graph is not None and value.run is run else value.local
    value.is_leaf |= tensor is value.local
    return _Identity.apply(tensor) if shielded else tensor


class _Identity(torch.autograd.Function):
    """Shares memory and version counter with its input; neither a leaf nor a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # no gradient is not a gradient of zero
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
