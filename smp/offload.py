"""Activations in host memory between forward and backward.

    forward   region 0   region 1   region 2          every region of checkpointed code puts away what it keeps:
              parcel 0   parcel 1   parcel 2          copied to the host on a stream of its own, device memory freed
    backward                        parcel 2          on first use of a parcel the `horizon` ones before it start to
                         parcel 1   <- loading        come back, on that stream again
              parcel 0   <- loading

A pipeline knows further ahead: `prefetch` brings back all parcels of the microbatches whose backward comes soon.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from smp.bootstrap import HostCopies, host_copies


class Offload:
    """Keeps tensors that autograd saves in host memory.

    Args:
        device: where they come from and go back to.
        horizon: how many parcels ahead of use to load.
        microbatch: which microbatch the calling thread works on.
    """

    def __init__(self, device: torch.device, horizon: int, microbatch: Callable[[], int] = lambda: 0) -> None:
        self._copies = host_copies(device)
        self._horizon = horizon
        self._microbatch = microbatch
        self.used = False
        self._parcels: dict[int, list[weakref.ref[Parcel]]] = {}
        # A tensor that several regions keep, such as a mask, is copied once: with the version that was copied.
        self._put_away: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def saving(self) -> AbstractContextManager[None]:
        """What autograd saves inside goes into one new parcel."""
        self.used = True
        parcel = Parcel(self, self._microbatch())
        line = self._parcels.setdefault(parcel.microbatch, [])
        while line and line[-1]() is None:  # used up
            line.pop()
        line.append(weakref.ref(parcel))
        return torch.autograd.graph.saved_tensors_hooks(parcel.pack, unpack)

    def put_away(self, tensor: Tensor) -> "Packed":
        """The tensor's copy on the host."""
        version = 0 if tensor.is_inference() else tensor._version
        earlier, packed = self._put_away.get(tensor, (None, None))
        packed = None if packed is None or earlier != version else packed()
        if packed is None:
            packed = Packed(self._copies, tensor)
            self._put_away[tensor] = version, weakref.ref(packed)
        return packed

    def prefetch(self, microbatches: Iterable[int]) -> None:
        """Start to load all parcels of these microbatches."""
        for microbatch in microbatches:
            for parcel in self._living(microbatch):
                parcel.load()

    def load_before(self, used: "Parcel") -> None:
        """A parcel is used: start to load the ones that the backward comes to next."""
        line = self._living(used.microbatch)
        at = line.index(used)
        for parcel in line[at + 1 : at + 1 + self._horizon]:
            parcel.load()

    def _living(self, microbatch: int) -> "list[Parcel]":
        """The parcels of a microbatch in the order of the backward."""
        found = [ref() for ref in self._parcels.get(microbatch, ())]
        return [parcel for parcel in found if parcel is not None][::-1]


class Parcel:
    """What one region of checkpointed code keeps. It lives as long as autograd may ask for it."""

    def __init__(self, owner: Offload, microbatch: int) -> None:
        self._owner = owner
        self.microbatch = microbatch
        self._packed: list[weakref.ref[Packed]] = []

    def pack(self, tensor: Tensor) -> Any:
        """Copies to the host. Parameters stay where they are: they are not given up anyway."""
        if isinstance(tensor, nn.Parameter) or tensor.layout is not torch.strided or not tensor.numel():
            return tensor
        packed = self._owner.put_away(tensor)
        self._packed.append(weakref.ref(packed))
        return self, packed

    def load(self) -> None:
        """Start to copy back to the device what is not there yet."""
        for packed in (ref() for ref in self._packed):
            if packed is not None:
                packed.load()

    def take(self, packed: "Packed") -> Tensor:
        """One of the tensors, for use on the current stream."""
        self.load()
        tensor = packed.take()
        self._owner.load_before(self)
        return tensor


class Packed:
    """One tensor in host memory, and on the device while it is wanted there."""

    def __init__(self, copies: HostCopies, tensor: Tensor) -> None:
        self._copies = copies
        self._host, self._ready = copies.to_host(tensor.detach())
        self._loaded: tuple[Tensor, Any] | None = None

    def load(self) -> None:
        """Start to copy to the device."""
        if self._loaded is None:
            self._loaded = self._copies.to_device(self._host, self._ready)

    def take(self) -> Tensor:
        """The tensor on the device; it is not kept there."""
        self.load()
        assert self._loaded is not None
        (tensor, ready), self._loaded = self._loaded, None
        self._copies.wait(tensor, ready)
        return tensor


def unpack(saved: Any) -> Tensor:
    """What `Parcel.pack` gave, as a tensor again."""
    if isinstance(saved, Tensor):
        return saved
    parcel, packed = saved
    return parcel.take(packed)
