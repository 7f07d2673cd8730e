"""The loss scale: a factor on the loss that keeps small half precision gradients from vanishing. No tensors.

                 overflow, and hysteresis is used up: scale / factor, not below min
               +--------------------------------------------------------------------+
               |                                                                    v
    good step -+-> counts good steps in a row; each `scale_window` of them: scale * factor, not above max
               |
               +-- overflow, hysteresis left: the scale stays, hysteresis - 1

Every rank keeps a scaler of its own and tells it the same, so all have the same scale.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from smp.errors import CheckpointError, UsageError

MAX_SCALE = 2.0**32
# Skipped steps in a row after which the user is told; a static scale, which cannot fall, ends the run then.
WARN_AFTER = 20


@dataclass
class LossScaler:
    """A loss scale and how it changes.

    Args:
        scale: the scale now.
        dynamic: whether it changes at all.
        scale_factor: by what it is divided after an overflow, and multiplied after good steps.
        scale_window: good steps in a row after which it grows.
        min_scale, max_scale: it never leaves these.
        delayed_shift: overflows until it falls: 1 at the first one, 2 at the second one, ...
        consecutive_hysteresis: whether these overflows have to be consecutive. If not, they are counted from the last
            time the scale grew.
    """

    scale: float
    dynamic: bool = False
    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0
    max_scale: float = MAX_SCALE
    delayed_shift: int = 1
    consecutive_hysteresis: bool = False
    hysteresis: int = field(init=False)
    good_steps: int = field(default=0, init=False)
    skips: int = field(default=0, init=False)  # in a row
    skips_at_min: int = field(default=0, init=False)  # in a row

    def __post_init__(self) -> None:
        self.hysteresis = self.delayed_shift

    @property
    def loss_scale(self) -> float:
        """The factor on the loss."""
        return self.scale

    @property
    def scales(self) -> bool:
        """Whether gradients are, or may become, multiplied by anything but 1."""
        return self.dynamic or self.scale != 1.0

    @property
    def is_stuck(self) -> bool:
        """Whether steps are skipped again and again though the scale cannot fall any more."""
        return self.skips_at_min >= 2 if self.dynamic else self.skips >= WARN_AFTER

    def update(self, overflow: bool) -> None:
        """A step has been made, or was skipped because of an overflow."""
        self.skips = self.skips + 1 if overflow else 0
        at_min = overflow and self.scale <= self.min_scale
        self.skips_at_min = self.skips_at_min + 1 if at_min else 0
        self.good_steps = 0 if overflow else self.good_steps + 1
        if not self.dynamic:
            return
        if overflow and self.hysteresis > 1:
            self.hysteresis -= 1
        elif overflow:
            self.scale = max(self.scale / self.scale_factor, self.min_scale)
        else:
            grows = self.good_steps % self.scale_window == 0
            if grows:
                self.scale = min(self.scale * self.scale_factor, self.max_scale)
            if grows or self.consecutive_hysteresis:
                self.hysteresis = self.delayed_shift

    def state_dict(self) -> dict[str, Any]:
        """All that makes the scale what it is and will be, as plain numbers."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict()`. The state moves only; how it changes stays as it was made here.

        Raises:
            CheckpointError: something is missing in it.
        """
        keys = ("scale", "hysteresis", "good_steps", "skips", "skips_at_min")
        if missing := [key for key in keys if key not in state]:
            raise CheckpointError(f"a loss scaler's state has no {', '.join(missing)}; it has {sorted(state)}")
        scale = float(state["scale"]) if self.dynamic else self.scale
        self.scale = min(max(scale, self.min_scale), self.max_scale)
        self.hysteresis = min(int(state["hysteresis"]), self.delayed_shift)
        self.good_steps, self.skips = int(state["good_steps"]), int(state["skips"])
        self.skips_at_min = int(state["skips_at_min"])


_DYNAMIC = ("init_scale", "scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")


def make_scaler(static: float | None, dynamic: bool, dynamic_args: Mapping[str, Any] | None) -> LossScaler:
    """A scaler from what scripts give to the optimizer.

    Args:
        static: the scale when it is not dynamic; None is 1. Not looked at when it is dynamic.
        dynamic: whether the scale is dynamic.
        dynamic_args: `init_scale` (2**32), `scale_factor` (2), `scale_window` (1000), `min_scale` (1), `delayed_shift`
            (1), `consecutive_hysteresis` (False).

    Raises:
        UsageError: an argument that does not exist, or a value that cannot work.
    """
    if not dynamic:
        scale = 1.0 if static is None else static
        _check({"static": scale})
        return LossScaler(float(scale), min_scale=0.0, max_scale=max(float(scale), MAX_SCALE))
    args = {"init_scale": 2.0**32, **(dynamic_args or {})}
    if unknown := sorted(set(args) - set(_DYNAMIC)):
        raise UsageError(f"dynamic_loss_args: unknown {', '.join(unknown)}; known are {', '.join(_DYNAMIC)}")
    _check(args)
    init = float(args.pop("init_scale"))
    scaler = LossScaler(init, True, max_scale=max(init, MAX_SCALE), **args)
    if init < scaler.min_scale:
        raise UsageError(f"loss scale: init_scale must be at least min_scale, {scaler.min_scale!r}, got {init!r}")
    return scaler


def _is_factor(value: Any, above: float = 0.0) -> bool:
    return isinstance(value, int | float) and above < value < math.inf


def _is_count(value: Any) -> bool:
    return _is_factor(value) and value >= 1 and value == int(value)  # scripts parse a window as a float


_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "static": ("static_loss_scale must be a finite number above 0", _is_factor),
    "init_scale": ("init_scale must be a finite number above 0", _is_factor),
    "scale_factor": ("scale_factor must be a finite number above 1", lambda value: _is_factor(value, 1.0)),
    "scale_window": ("scale_window must be a whole number, at least 1", _is_count),
    "min_scale": ("min_scale must be a finite number above 0", _is_factor),
    "delayed_shift": ("delayed_shift must be a whole number, at least 1", _is_count),
    "consecutive_hysteresis": ("consecutive_hysteresis must be True or False", lambda value: isinstance(value, bool)),
}


def _check(values: Mapping[str, Any]) -> None:
    if wrong := [f"{_ALLOWED[key][0]}, got {value!r}" for key, value in values.items() if not _ALLOWED[key][1](value)]:
        raise UsageError("loss scale: " + "; ".join(wrong))
