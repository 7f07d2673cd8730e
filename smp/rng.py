"""Random numbers that depend neither on the schedule nor on the number of stages.

Inside a step, every module call draws from a stream of its own, split off its caller's stream: on entry the generator
is seeded with mix(s, 0), on return with mix(s, 1), where s is the seed of the caller's stream. What a call draws
therefore never shifts what comes after it, so a rank that skips a call stays in step with the rank that runs it, and
because the seed lives in the generator itself, activation checkpointing restores it with the generator's state.
(Splittable streams: Claessen and Palka, "Splittable pseudorandom number generators using cryptographic hashing", 2013.)
"""

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from smp.bootstrap import default_generators

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(seed: int, salt: int) -> int:
    """A well-spread 64-bit integer from a seed and a small number (the finalizer of SplitMix64)."""
    z = (seed + (salt + 1) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def part_salt(part: int) -> int:
    """What tells apart the streams of ranks that work on different data; part 0 has none."""
    return mix(_GOLDEN, part) if part else 0


class Streams:
    """Moves the default generators from stream to stream. One per step.

    `salt` is laid over every seed and taken off before a seed is split further: ranks that work on different data have
    different streams, and code that works on data they share finds the stream they share by `salted(0)`.
    """

    def __init__(self, salt: int = 0) -> None:
        self._first, *self._others = default_generators()
        self.salt = salt

    def seed(self, seed: int) -> None:
        # Seeding a generator costs about 1 us, torch.manual_seed 140 us.
        self._first.manual_seed(seed ^ self.salt)
        for generator in self._others:
            generator.manual_seed(seed ^ self.salt)

    def current(self) -> int:
        return self._first.initial_seed() ^ self.salt

    def enter(self) -> int:
        """Start a call's own stream; returns what `leave` needs."""
        seed = self._first.initial_seed() ^ self.salt
        self.seed(mix(seed, 0))
        return seed

    @contextmanager
    def salted(self, salt: int) -> Iterator[None]:
        """The current stream under another salt; afterwards the caller's stream goes on."""
        seed, outer = self.enter(), self.salt
        self.salt = salt
        self.seed(mix(seed, 0))
        try:
            yield
        finally:
            self.salt = outer
            self.leave(seed)

    def snapshot(self) -> list[torch.Tensor]:
        """The generators' states, for `moved_since` and `restore`."""
        return [generator.get_state() for generator in (self._first, *self._others)]

    def restore(self, snapshot: list[torch.Tensor]) -> None:
        """Go on where `snapshot` was taken."""
        for generator, state in zip((self._first, *self._others), snapshot, strict=True):
            generator.set_state(state)

    def moved_since(self, snapshot: list[torch.Tensor]) -> bool:
        """Whether random numbers were drawn since `snapshot`."""
        return any(not torch.equal(a, b) for a, b in zip(snapshot, self.snapshot(), strict=True))

    def leave(self, seed: int) -> None:
        """Go on with the caller's stream."""
        self.seed(mix(seed, 1))


class _Drawing(threading.local):
    streams: Streams | None = None


_drawing = _Drawing()


def current_streams() -> Streams | None:
    """The streams from which the calling thread draws; None outside of a step."""
    return _drawing.streams


def set_current_streams(streams: Streams | None) -> None:
    """The calling thread draws from these."""
    _drawing.streams = streams


def draw_seed() -> int:
    """A seed drawn from the user's own generator: the same script, seeded the same, repeats itself."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def shared_states() -> tuple[Any, Any]:
    """Where the generators of Python and numpy (if it is there) stand, to be compared or for `restore_shared`. They are
    the same for all microbatches: steps have streams of torch's only. Cheap: asked at every edge of first steps."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    name, key, *rest = numpy.random.get_state()
    return random.getstate(), (name, key.tobytes(), *rest)


def restore_shared(states: tuple[Any, Any]) -> None:
    """Go on where `shared_states` was asked."""
    random.setstate(states[0])
    if states[1] is not None:
        numpy, (name, key, *rest) = sys.modules["numpy"], states[1]
        numpy.random.set_state((name, numpy.frombuffer(key, numpy.uint32), *rest))


@contextmanager
def preserved_after_draw() -> Iterator[int]:
    """A seed for one step; afterwards the user's generators stand just behind that draw, whatever the step drew."""
    seed = draw_seed()
    states = [(generator, generator.get_state()) for generator in default_generators()]
    try:
        yield seed
    finally:
        for generator, state in states:
            generator.set_state(state)


# Modules of torch that never draw a random number: no stream of their own, so no cost. The set is fixed (not learned),
# because every rank has to split streams at the same calls.
DETERMINISTIC_MODULES: frozenset[type] = frozenset(
    getattr(torch.nn, name)
    for name in (
        "Linear Bilinear Identity Embedding EmbeddingBag LayerNorm RMSNorm GroupNorm BatchNorm1d BatchNorm2d "
        "BatchNorm3d InstanceNorm1d InstanceNorm2d Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d "
        "ConvTranspose3d ReLU ReLU6 GELU SiLU Mish Tanh Sigmoid Softmax LogSoftmax Softplus ELU CELU SELU LeakyReLU "
        "PReLU Hardswish Hardsigmoid Hardtanh Flatten Unflatten MaxPool1d MaxPool2d AvgPool1d AvgPool2d "
        "AdaptiveAvgPool1d AdaptiveAvgPool2d CrossEntropyLoss MSELoss L1Loss NLLLoss BCELoss BCEWithLogitsLoss "
        "ZeroPad2d Upsample PixelShuffle"
    ).split()
)
