"""Communication hooks with the interface of DistributedDataParallel: `hook(state, bucket) -> Future[Tensor]`.

Hooks written for torch (`torch.distributed.algorithms.ddp_comm_hooks`) work unchanged; their `state` is or holds the
process group, which here is `smp.get_dp_process_group()`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from smp import runtime
from smp.dp.buckets import Bucket
from smp.dp.reduction import Member, Reduction, gradient_dtype

Hook = Callable[[Any, Any], "torch.futures.Future[Any]"]


class GradBucket:
    """What a hook sees of a bucket: torch's `GradBucket`."""

    def __init__(self, index: int, is_last: bool, buffer: Tensor, views: list[Tensor], params: list[Parameter]) -> None:
        self._index, self._is_last, self._buffer, self._views, self._params = index, is_last, buffer, views, params

    def index(self) -> int:
        """The bucket's number among those that go through hooks; 0 is reduced first."""
        return self._index

    def is_last(self) -> bool:
        """True for the last bucket of a pass."""
        return self._is_last

    def buffer(self) -> Tensor:
        """The members' gradients of this rank, flat, in the gradients' dtype; not divided by anything."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replaces what `buffer` gives from now on."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """The parts of the buffer, one per member, in the members' shapes."""
        return self._views

    def parameters(self) -> list[Tensor]:
        """The members."""
        return list(self._params)


class HookedReduction(Reduction):
    """A bucket whose reduction is the user's.

    The hook's result replaces the gradients as it is: averaging is the hook's business, as in torch. It is for all
    ranks, so with sharded optimizer state members of several owners share a bucket. Which members have a gradient
    anywhere is agreed apart from it (`flags`).
    """

    def __init__(self, index: int, bucket: Bucket, members: Sequence[Member], hook: Hook, state: Any) -> None:
        super().__init__(index, bucket, members)
        self._hook, self._state = hook, state
        self.is_last = False
        self.hook_index = 0
        self._buffer: Tensor | None = None
        self._future: torch.futures.Future[Any] | None = None

    @torch.no_grad()
    def launch(self, scale: float) -> None:
        if self._buffer is None:
            param = self.params[0]
            self._buffer = torch.empty(self.bucket.numel, dtype=gradient_dtype(param).to_real(), device=param.device)
        views = self.views(self._buffer)
        for member, view in enumerate(views):
            grad = self.gradient(member)
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad)
        self._future = self._hook(
            self._state, GradBucket(self.hook_index, self.is_last, self._buffer, views, self.params)
        )

    def complete(self) -> None:
        """Only `write_results` ends a hooked bucket: the flags are agreed when all hooks are through."""

    def wait(self) -> Tensor:
        """The hook's result [elements of the bucket]."""
        assert self._future is not None, "wait() before launch()"
        with runtime.get().monitor.blocking(self.call, self.group.ranks):
            result = self._future.wait()
        self._future = None
        return result if isinstance(result, Tensor) else result[0]

    @torch.no_grad()
    def write_results(self, result: Tensor, flags: Tensor) -> None:
        """Puts the hook's `result` into the gradients of those members whose flag [members] is not 0."""
        self.write_back(self.views(result.view(-1)), flags)
