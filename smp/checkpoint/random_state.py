"""Where a rank's random generators stand, put into plain values and back: torch's, Python's and numpy's.

A rank of more degrees than were saved has no state of its own; it gets seeds from a saved one and from its coordinates,
so that the same resume repeats itself and no two ranks draw the same numbers.
"""

import random
import sys
from array import array
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from smp import rng
from smp.bootstrap import default_generators
from smp.checkpoint.layout import Place
from smp.checkpoint.reader import Checkpoint


def random_state() -> dict[str, Any]:
    """Tensors and plain values: a file of it loads with `weights_only=True`."""
    (version, words, gauss), numpy = rng.shared_states()
    return {
        "torch": [generator.get_state() for generator in default_generators()],
        "seed": default_generators()[0].initial_seed(),
        "python": (version, torch.tensor(words), gauss),
        "numpy": None if numpy is None else (numpy[0], torch.tensor([*memoryview(numpy[1]).cast("I")]), *numpy[2:]),
    }


def restore(state: Mapping[str, Any]) -> None:
    """Go on where `random_state` was asked. A job with more devices or fewer restores what there is of both."""
    for generator, saved in zip(default_generators(), state["torch"], strict=False):
        generator.set_state(saved)
    (version, words, gauss), numpy = state["python"], state["numpy"]
    if numpy is not None:
        numpy = (numpy[0], array("I", numpy[1].tolist()).tobytes(), *numpy[2:]) if "numpy" in sys.modules else None
    rng.restore_shared(((version, tuple(words.tolist()), gauss), numpy))


def reseed(state: Mapping[str, Any], place: Place) -> None:
    """Seeds of a rank without a saved state: a function of another rank's saved seed and of its own coordinates."""
    seed = int(state["seed"])
    for number in (place.pp, place.tp, place.rdp):
        seed = rng.mix(seed, number)
    for generator in default_generators():
        generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % (1 << 32))


def saved_random_state(checkpoint: Checkpoint, place: Place) -> Callable[[], None]:
    """What puts a rank's generators where they stood when the checkpoint was saved.

    Raises:
        CheckpointError: the file cannot be read.
    """
    names = {
        file.place: name
        for name, file in checkpoint.manifest.files.items()
        if name.startswith("random_") and file.place is not None
    }
    if not names:
        return lambda: None
    source, goes_on = nearest(names, place)
    state = checkpoint.load(names[source])
    return partial(restore, state) if goes_on else partial(reseed, state, place)


def nearest(saved: Collection[Place], place: Place) -> tuple[Place, bool]:
    """The saved place whose state a rank takes, and whether it goes on with it (else it is reseeded from it).

    All stages of a pipeline work on the same data: a new stage goes on with the first one's state.
    """
    for same in (place, Place(0, place.tp, place.rdp)):
        if same in saved:
            return same, True
    return min(saved, key=lambda other: (other.rdp, other.tp, other.pp)), False
