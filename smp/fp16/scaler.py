"""The loss scale: a factor on the loss that keeps small half precision gradients from vanishing. No tensors.

                 overflow, and hysteresis is used up: scale / factor, not below min
               +--------------------------------------------------------------------+
               |                                                                    v
    good step -+-> counts good steps in a row; each `scale_window` of them: scale * factor, not above max
               |
               +-- overflow, hysteresis left: the scale stays, hysteresis - 1

Every rank keeps a scaler of its own and tells it the same, so all have the same scale.
"""

from collections.abc import Mapping
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
        _check(static=(scale, scale > 0))
        return LossScaler(float(scale), min_scale=0.0, max_scale=max(float(scale), MAX_SCALE))
    args = dict(dynamic_args or {})
    if unknown := sorted(set(args) - set(_DYNAMIC)):
        raise UsageError(f"dynamic_loss_args: unknown {', '.join(unknown)}; known are {', '.join(_DYNAMIC)}")
    init = args.pop("init_scale", 2.0**32)
    scaler = LossScaler(float(init), True, max_scale=max(float(init), MAX_SCALE), **args)
    _check(
        init_scale=(init, init >= scaler.min_scale > 0),
        scale_factor=(scaler.scale_factor, scaler.scale_factor > 1),
        scale_window=(scaler.scale_window, scaler.scale_window >= 1),
        min_scale=(scaler.min_scale, scaler.min_scale > 0),
        delayed_shift=(scaler.delayed_shift, scaler.delayed_shift >= 1),
    )
    return scaler


_ALLOWED = {
    "static": "static_loss_scale must be above 0",
    "init_scale": "init_scale must be at least min_scale",
    "scale_factor": "scale_factor must be above 1",
    "scale_window": "scale_window must be at least 1",
    "min_scale": "min_scale must be above 0",
    "delayed_shift": "delayed_shift must be at least 1",
}


def _check(**values: tuple[Any, bool]) -> None:
    if wrong := [f"{_ALLOWED[name]}, got {value!r}" for name, (value, is_right) in values.items() if not is_right]:
        raise UsageError("loss scale: " + "; ".join(wrong))
