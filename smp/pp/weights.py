"""Gradients of weights put off: a backward that computes input gradients first.

Nothing later in a backward waits for the gradient of a weight, so a schedule may compute it where a stage would idle
(Qi et al., "Zero Bubble Pipeline Parallelism", 2023). Here the linear layers of a stage put theirs off; what they need
for it, their input and the gradient of their output, is kept until then. All other gradients are computed as usual.

    y = x w' + b      backward of a turn:  x.grad = g w            kept: (x, g)
                      later, a W turn:     w.grad += g' x    b.grad += sum g

Not put off, but computed at once: under autocast, where a weight is no leaf (a parametrization computes it) or has
hooks, and in any backward but the pipeline's own (a gradient penalty inside a module).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from smp.pp.placed import current

TAKES_NONE = "_smp_takes_none"  # of a hook on a parameter that may be called without a gradient


class Late(NamedTuple):
    """Gradients of a weight (in its parameter's layout when `transposed` is False) and bias, to be computed."""

    weight: Tensor
    bias: Tensor | None
    inputs: Tensor
    gradient: Tensor
    transposed: bool

    def accumulate(self) -> None:
        """Add them to the parameters; their hooks run as after any backward."""
        roots, gradients = [], []
        with torch.no_grad():
            if self.weight.requires_grad:
                roots.append(self.weight)
                gradients.append(_to_weight(self.inputs, self.gradient, self.transposed))
            if self.bias is not None and self.bias.requires_grad:
                roots.append(self.bias)
                gradients.append(_rows(self.gradient).sum(0))
        with torch.enable_grad():
            torch.autograd.backward([root.view_as(root) for root in roots], gradients)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _to_weight(inputs: Tensor, gradient: Tensor, transposed: bool) -> Tensor:
    return _rows(inputs).t() @ _rows(gradient) if transposed else _rows(gradient).t() @ _rows(inputs)


class PutOff:
    """What one program's backward has put off, turn by turn.

    `release(node)` is told of nodes whose backward has run, once none of their gradients is put off any more.

    Attributes:
        active: gradients of weights are put off; else they are computed with the others.
        runs: the program's backward runs, as opposed to one inside a module.
        late: what the present turn has put off.
    """

    def __init__(self, release: Callable[[Any], None]) -> None:
        self.active = self.runs = False
        self.late: list[Late] = []
        self._release = release
        self._nodes: list[Any] = []
        self._turns: dict[int, tuple[list[Late], list[Any]]] = {}

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Around the program's backward."""
        self.runs = True
        try:
            yield
        finally:
            self.runs = False

    def release(self, node: Any) -> None:
        """The node's backward has run."""
        if self.active:
            self._nodes.append(node)
        else:
            self._release(node)

    def end_turn(self, segment: int) -> None:
        """What was put off since the last turn is that of this segment."""
        if self.active:
            self._turns[segment] = self.late, self._nodes
            self.late, self._nodes = [], []

    def run(self, segment: int) -> None:
        """Compute what a segment has put off."""
        late, nodes = self._turns.pop(segment, ((), ()))
        for gradients in late:
            gradients.accumulate()
        for node in nodes:
            self._release(node)


class _Linear(torch.autograd.Function):
    """`x w' + b` (or `x w + b`, transposed), whose weight and bias gradients can wait."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, program: Any, transposed: bool) -> Tensor:
        ctx.program, ctx.transposed = program, transposed
        ctx.recomputed = program.weights.runs  # what runs backward through a recomputation is somebody else's
        ctx.parameters = weight, bias  # themselves: under checkpointing, what is saved comes back as a copy
        ctx.save_for_backward(x, weight)
        if transposed:
            assert bias is not None
            return _plain_addmm(bias, x, weight)
        return _plain_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_input = None
        if ctx.needs_input_grad[0]:
            to_input = gradient @ (weight.t() if ctx.transposed else weight)
        put_off: PutOff = ctx.program.weights
        if put_off.active and put_off.runs and not ctx.recomputed:
            parameter, bias = ctx.parameters
            put_off.late.append(Late(parameter, bias, x, gradient, ctx.transposed))
            return to_input, None, None, None, None
        to_weight = to_bias = None
        if ctx.needs_input_grad[1]:
            to_weight = _to_weight(x, gradient, ctx.transposed)
        if ctx.needs_input_grad[2]:
            to_bias = _rows(gradient).sum(0)
        return to_input, to_weight, to_bias, None, None


_plain_linear = F.linear
_plain_addmm = torch.addmm


def _can_wait(x: Any, weight: Any, bias: Any) -> Any:
    """The program in one of whose nodes this layer runs, if it may put its gradients off."""
    program = current.program
    if program is None or not program.in_node or type(weight) is not Parameter or not torch.is_grad_enabled():
        return None
    trains = weight.requires_grad or (bias is not None and bias.requires_grad)
    if not trains or (bias is not None and type(bias) is not Parameter) or x.device.type == "meta":
        return None
    if torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling():
        return None
    if _has_hooks(weight) or (bias is not None and _has_hooks(bias)):
        return None
    return program if torch._C._functorch.peek_interpreter_stack() is None else None


def _has_hooks(parameter: Parameter) -> bool:
    """Whether somebody wants to see its gradients: hooks run when they are put off, too, and then without them."""
    for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
        if hooks and not all(getattr(hook, TAKES_NONE, False) for hook in hooks.values()):
            return True
    return False


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    program = _can_wait(input, weight, bias)
    if program is None:
        return _plain_linear(input, weight, bias)
    return _Linear.apply(input, weight, bias, program, False)


def _addmm(input: Any, *args: Any, **kwargs: Any) -> Tensor:
    if len(args) == 2 and not kwargs and isinstance(input, Tensor) and input.dim() == 1:
        program = _can_wait(args[0], args[1], input)
        if program is not None:
            return _Linear.apply(args[0], args[1], input, program, True)
    return _plain_addmm(input, *args, **kwargs)


@contextmanager
def late_weights() -> Iterator[None]:
    """Linear layers (`F.linear`, and `torch.addmm` as GPT-2 uses it) put their weights' gradients off inside it, in
    programs whose `weights` are active."""
    F.linear = _linear
    torch.addmm = _addmm  # type: ignore[assignment]
    try:
        yield
    finally:
        F.linear = _plain_linear
        torch.addmm = _plain_addmm
