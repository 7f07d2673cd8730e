"""Counts the bytes of live tensors, by following storages from the operation that makes them to their end."""

import weakref
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While active, every storage that an operation returns counts until it is freed; views count once.

    Attributes:
        live, peak: bytes now and at most. Temporaries inside one operation are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.track(leaf)
        return result

    def track(self, tensor: torch.Tensor) -> None:
        """Count the storage of `tensor` from now on. Fake, meta and emptied ones have no bytes."""
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self._storages:
            self._storages[key] = weakref.ref(storage, partial(self._freed, key, size))
            self.live += size
            self.peak = max(self.peak, self.live)

    def reset_peak(self) -> None:
        """Forget what was at most live until now."""
        self.peak = self.live

    def _freed(self, key: int, size: int, _: Any) -> None:
        del self._storages[key]
        self.live -= size
