"""What modules cost: seconds and bytes of one microbatch.

Seconds are nominal: a pure function of floating-point operations, bytes moved and the kind of device, so that the
decisions made from them are the same on every rank and in every run. `smp.pp.measure` puts measured ones in their
place where the user asks for it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch

from smp.pp.tree import ancestors


@dataclass(frozen=True)
class ModuleCost:
    """What one microbatch costs in a module: all of its calls together, and everything inside.

    Attributes:
        forward: seconds of the forward.
        backward: seconds of the backward, with the forward's recomputation where activations are checkpointed.
        weight: the part of `backward` that is gradients of parameters, which nothing later in the backward waits for.
        parameter_bytes: size of the parameters, each counted once.
        activation_bytes: what the forward keeps for the backward.
        output_bytes: size of the tensors that the calls return.
        flops: floating-point operations of the forward.
        calls: how often the module is called.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    parameter_bytes: int = 0
    activation_bytes: int = 0
    output_bytes: int = 0
    flops: int = 0
    calls: int = 0

    def __add__(self, other: "ModuleCost") -> "ModuleCost":
        return ModuleCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    def scaled(self, forward: float, backward: float) -> "ModuleCost":
        """The same with its seconds multiplied."""
        return replace(
            self, forward=self.forward * forward, backward=self.backward * backward, weight=self.weight * backward
        )


ZERO = ModuleCost()


@dataclass(frozen=True)
class Costs(Mapping[str, ModuleCost]):
    """The costs of one microbatch by module name; what a trace of the model found out. A mapping of inclusive costs.

    Attributes:
        order: names of modules in the order of their first call.
        own: what a module costs outside of the modules in it.
        charged: the same total laid on the modules that have parameters: what a module's surroundings do after its call
            (residual additions, the loss) is done where its result lives, so it is charged to it.
        near: modules whose own parameters are used right after the call of a module inside them: which one.
        whole: modules that must not be taken apart: they read the parameters of their children themselves, or could
            not be looked into.
        opaque: those of `whole` that could not be looked into, with the reason.
        recomputed: modules whose activations are recomputed in the backward.
        shapes: shapes of the tensors that the first call of a module returned.
        measured: whether seconds were measured, not computed.
    """

    order: tuple[str, ...]
    own: dict[str, ModuleCost]
    charged: dict[str, ModuleCost]
    near: dict[str, str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    opaque: dict[str, str] = field(default_factory=dict)
    recomputed: frozenset[str] = frozenset()
    shapes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    measured: bool = False

    def __post_init__(self) -> None:
        inclusive = dict(self.own)
        for name, cost in self.own.items():
            for above in ancestors(name):
                old = inclusive.get(above, ZERO)
                inclusive[above] = replace(old + cost, output_bytes=old.output_bytes, calls=old.calls)
        object.__setattr__(self, "_inclusive", inclusive)

    def __getitem__(self, name: str) -> ModuleCost:
        inclusive: dict[str, ModuleCost] = self.__dict__["_inclusive"]
        return inclusive[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__["_inclusive"])

    def __len__(self) -> int:
        return len(self.__dict__["_inclusive"])

    @property
    def total(self) -> ModuleCost:
        """The whole model."""
        return self[""]


class Speed(NamedTuple):
    """A nominal device: floating-point operations and bytes in a second, and seconds that any operation takes."""

    flops: Mapping[torch.dtype, float]
    bandwidth: float
    overhead: float


# Only ratios matter for the partition. CPU: one core of a current server; CUDA: a current data-center GPU.
_SPEEDS = {
    "cpu": Speed({torch.float64: 4e10, torch.bfloat16: 1.6e11, torch.float16: 8e9}, 1e10, 5e-6),
    "cuda": Speed({torch.float64: 3e13, torch.bfloat16: 4e14, torch.float16: 4e14}, 2e12, 5e-6),
}
_DEFAULT_FLOPS = {"cpu": 8e10, "cuda": 5e13}


def nominal_seconds(flops: float, nbytes: float, dtype: torch.dtype, device: str) -> float:
    """How long an operation takes on a nominal device: it computes or moves memory, whichever takes longer.

    Args:
        flops: its floating-point operations.
        nbytes: the bytes it reads and writes.
        dtype: what it computes in.
        device: the kind of device, "cpu" or "cuda"; others count as "cuda".
    """
    kind = device if device in _SPEEDS else "cuda"
    speed = _SPEEDS[kind]
    return max(flops / speed.flops.get(dtype, _DEFAULT_FLOPS[kind]), nbytes / speed.bandwidth) + speed.overhead


def nominal_bytes_seconds(nbytes: float, device: str) -> float:
    """How long a nominal device takes to read or write so many bytes as part of another operation."""
    return nbytes / _SPEEDS.get(device, _SPEEDS["cuda"]).bandwidth


def parameter_bytes(parameters: Any) -> int:
    """Size of parameters, each counted once."""
    return sum(p.numel() * p.element_size() for p in dict.fromkeys(parameters))
