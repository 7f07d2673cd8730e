"""The tape of one microbatch: what its program called and moved, and the walk back over it.

       stage 0                         stage 1
       CallNode embed  -> x
       MoveNode x -> x'   ......tag......>  x'
                                       CallNode head(x') -> loss
                                       backward(loss): seed its gradient
                                       CallNode head: autograd from loss to x'
       x.grad  <..........tag + 1......  MoveNode: send x'.grad
       CallNode embed: autograd from x

Calls of one stage that follow each other without a move between them are one run: their autograd graphs stay connected,
and one small autograd backward goes through all of them. So nothing ever waits for a message inside the autograd
engine. Which nodes take part is decided from structure alone, the same on every rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from smp.errors import StepError
from smp.pp.placed import Value, user_line


class Run:
    """Identifies calls whose graphs are connected."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class CallNode:
    """One call. On its owner `real` are the outputs with their autograd graph, or where gradients enter that, elsewhere
    None."""

    name: str
    owner: int
    inputs: list[Value]
    outputs: list[Value]
    real: list[torch.Tensor | GradientEdge] | None
    parameters: list[torch.Tensor] = field(default_factory=list)
    run: Run = field(default_factory=Run)
    open: bool = False  # later calls may join its run


@dataclass(slots=True, eq=False)
class MoveNode:
    """One value sent to another stage. Its gradient comes back under `tag` + 1."""

    source: Value
    copy: Value
    tag: int
    parameters: list[torch.Tensor] = field(default_factory=list)
    released: bool = False


Node = CallNode | MoveNode


class Backward(Protocol):
    """What a walk back over the tape asks its program for."""

    def meets(self, node: MoveNode) -> None:
        """Ahead of every gradient that goes from stage to stage, on every rank."""

    def runs(self, node: CallNode) -> None:
        """Ahead of every call's backward, on every rank."""

    def send(self, node: MoveNode, gradient: torch.Tensor | None) -> None:
        """Return a moved value's gradient to where it came from."""

    def receive(self, node: MoveNode) -> torch.Tensor | None:
        """Wait for it there."""


SMALL = 1 << 14  # bytes of a result for which letting go would take longer than it is worth


class Tape:
    """Nodes in program order. `on_release(node)` is told of every node that can produce no more gradients."""

    def __init__(self, rank: int, on_release: Callable[[Node], None]) -> None:
        self._rank = rank
        self._on_release = on_release
        self._nodes: list[Node] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, node: Node) -> None:
        self._nodes.append(node)

    def open_run(self, owner: int) -> Run | None:
        """The run that the next call on `owner` continues, if there is one."""
        last = self._nodes[-1] if self._nodes else None
        return last.run if isinstance(last, CallNode) and last.open and last.owner == owner else None

    def forget_data(self) -> None:
        """The forward is over: let go of results that nobody can ask for. Their gradients still find their way.

        What a backward needs of them, autograd has saved itself, or will compute again, or has put away.
        """
        for node in self._nodes:
            if isinstance(node, CallNode) and node.real is not None:
                for k, (value, real) in enumerate(zip(node.outputs, node.real, strict=True)):
                    if not isinstance(real, torch.Tensor) or real.nbytes < SMALL:
                        continue
                    if real.requires_grad and not value.is_wanted():
                        node.real[k] = get_gradient_edge(real)
                        value.graph = value.local = None

    def backward(self, seeds: list[tuple[Value, torch.Tensor | None]], program: "Backward") -> None:
        """Walk from the end; `seeds` are values with their gradients (None on ranks that do not own the value).

        Nodes that no seed reaches stay on the tape for a later backward.
        """
        reached: set[Value] = set()
        for value, gradient in seeds:
            self._reach(reached, value)
            if value.owner == self._rank and gradient is not None:
                _accumulate(value, gradient)
        kept: list[Node] = []
        run: list[CallNode] = []  # reached calls of one run, last first
        while self._nodes:
            node = self._nodes.pop()
            if run and (isinstance(node, MoveNode) or node.run is not run[0].run):
                self._finish_run(run)
            if reached.isdisjoint(node.outputs if isinstance(node, CallNode) else (node.copy,)):
                kept.append(node)
            elif isinstance(node, CallNode):
                for value in node.inputs:
                    self._reach(reached, value)
                for value in node.outputs:
                    value.spent = True
                program.runs(node)
                run.append(node)
            else:
                self._reach(reached, node.source)
                program.meets(node)
                if self._rank == node.copy.owner:
                    program.send(node, final_gradient(node.copy))
                    _free(node.copy)
                elif self._rank == node.source.owner:
                    gradient = program.receive(node)
                    if gradient is not None:
                        _accumulate(node.source, gradient)
                if node.source.parameter is None:
                    node.copy.spent = True
                else:
                    kept.append(node)  # a leaf: another backward may reach it through another use of the copy
                self._release(node)
        if run:
            self._finish_run(run)
        self._nodes = kept[::-1]

    def _finish_run(self, run: list[CallNode]) -> None:
        if run[0].real is not None:
            _run(run)
        for node in run:
            self._release(node)
        run.clear()

    @staticmethod
    def _reach(reached: set[Value], value: Value) -> None:
        if value.spent:
            raise StepError(
                f"backward at {user_line()} goes through a part of the step that an earlier backward has gone through; "
                "its graph is freed. Add the losses and call backward once, or detach what the second one shares with "
                "the first."
            )
        reached.add(value)

    def _release(self, node: Node) -> None:
        if isinstance(node, MoveNode):
            if node.released:
                return
            node.released = True
        self._on_release(node)

    def clear(self) -> None:
        """Forget what no backward will reach."""
        for node in self._nodes:
            self._release(node)
            if isinstance(node, CallNode):
                for value in node.outputs:
                    value.graph = None
        self._nodes = []


@contextmanager
def saving_copies_of(tensors: list[torch.Tensor]) -> Iterator[None]:
    """What autograd saves of these is copied, so that another microbatch may write to them before the backward.

    Everything else is saved with its version, which is checked as autograd does without hooks.
    """
    memory = {_memory(tensor) for tensor in tensors}

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        if _memory(tensor) in memory:
            tensor = tensor.detach().clone()
        return tensor, tensor._version

    def unpack(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
        tensor, version = saved
        if tensor._version != version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that is needed for a gradient was changed in place after it "
                "was saved."
            )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def final_gradient(value: Value) -> torch.Tensor | None:
    """The gradient of a value that no later node will add to; its hooks have run."""
    gradient = value.grad
    if value.is_leaf and value.local is not None and value.local.grad is not None:
        gradient = value.local.grad if gradient is None else gradient + value.local.grad
    if gradient is not None:
        for hook in value.hooks:
            replaced = hook(gradient)
            gradient = gradient if replaced is None else replaced
    return gradient


def _run(nodes: list[CallNode]) -> None:
    """The backward of connected calls: from the gradients that came from outside to parameters and inputs."""
    roots: list[Any] = []
    gradients: list[torch.Tensor] = []
    for node in nodes:
        assert node.real is not None
        for value, real in zip(node.outputs, node.real, strict=True):
            gradient = final_gradient(value)
            if gradient is not None and (isinstance(real, GradientEdge) or real.requires_grad):
                roots.append(real)
                gradients.append(gradient)
            value.graph = None
            _free(value)
        node.real = None
    if roots:
        torch.autograd.backward(roots, gradients)


def _accumulate(value: Value, gradient: torch.Tensor) -> None:
    if value.parameter is not None and value.local is not None and value.local.is_leaf:
        torch.autograd.backward(value.local.view_as(value.local), gradient)  # so that the parameter's hooks run
    elif value.grad is None:
        value.grad = gradient.detach()
    else:
        # Out of place: somebody else may hold that tensor.
        value.grad = value.grad + gradient


def _free(value: Value) -> None:
    value.grad = None
    if value.is_leaf and value.parameter is None and value.local is not None:
        value.local.grad = None
