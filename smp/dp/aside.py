"""Means of gradients that their owner sets aside while more is added to them (sharded optimizer state).

    at rest        param.grad = mean of earlier windows, on the owner alone
    put            param.grad = 0                       the mean is aside
    passes         param.grad = this rank's new part    of the sum over ranks, to which the mean must not add twice
    reduced, add   param.grad = mean + new mean

A script may drop or zero gradients between two passes, by whatever way; then the mean goes, too. In place of one there
is a tensor all the time, so that one that is gone is noticed.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass
class _Entry:
    """`left`: what the last pass left as the parameter's gradient, at `version`."""

    param: Parameter
    mean: Tensor
    left: Tensor | None = None
    version: int = 0


class Aside:
    """The means that are aside now; none at rest."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def put(self, params: Iterable[Parameter], copy: bool) -> None:
        """A window begins. `copy`: the gradients' memory is needed for new ones."""
        for param in params:
            if param.grad is not None:
                self._entries.append(_Entry(param, param.grad.clone() if copy else param.grad))
                param.grad = torch.zeros_like(param.grad)
        self.pass_ended()

    def pass_ended(self) -> None:
        """Gradients are those of passes so far; whoever changes them from now on is a script."""
        for entry in self._entries:
            entry.left = entry.param.grad
            entry.version = -1 if entry.left is None else entry.left._version

    def pass_begins(self) -> None:
        """Forgets the means of gradients that have been dropped or zeroed since the last pass."""
        entries, self._entries = self._entries, []
        for entry in entries:
            grad = entry.param.grad
            if grad is None:
                continue
            if grad is not entry.left or grad._version != entry.version:
                entry.mean = entry.mean.masked_fill(~grad.any(), 0)
            self._entries.append(entry)

    def add(self) -> None:
        """The window has ended: means are part of gradients again."""
        for entry in self._entries:
            grad = entry.param.grad
            entry.param.grad = entry.mean if grad is None else grad.add_(entry.mean)
        self._entries = []
