"""`smp.state`: what scripts read of the running job. (A module named `state` would shadow the object.)"""

from collections.abc import Callable
from typing import Any

from smp import runtime
from smp.config import Config
from smp.errors import UsageError

StateDict = dict[str, Any]


class ModuleManager:
    """What scripts read of the model's families.

    Attributes:
        translate_functions: (smp_to_hf, hf_to_smp) for each family in the model whose state dicts can be translated.
    """

    def __init__(self) -> None:
        self.translate_functions: list[tuple[Callable[[StateDict], StateDict], Callable[[StateDict], StateDict]]] = []


class State:
    """A view of the Runtime; it holds nothing itself that a new `smp.init` would have to renew."""

    def __init__(self) -> None:
        self.module_manager = ModuleManager()

    @property
    def initialized(self) -> bool:
        """Whether `smp.init` has been called."""
        return runtime.is_initialized()

    @property
    def cfg(self) -> Config:
        """The resolved configuration, readable by attribute.

        Raises:
            UsageError: before `smp.init`.
        """
        return runtime.get().config

    @property
    def model(self) -> Any:
        """The DistributedModel, or None while there is none."""
        return runtime.get().model

    @property
    def optimizer(self) -> Any:
        """The DistributedOptimizer, or None while there is none."""
        return runtime.get().optimizer

    @property
    def param_index_to_name_tp_group(self) -> list[dict[int, str]]:
        """By tp_rank: parameter names by their number in the optimizer's `local_state_dict()`. The ranks of a
        tensor-parallel group run one program on modules of one structure, so all entries are alike.

        Raises:
            UsageError: there is no DistributedModel with a DistributedOptimizer yet.
        """
        current = runtime.get()
        if current.model is None or current.optimizer is None:
            raise UsageError("make a DistributedModel and a DistributedOptimizer before asking for parameter numbers")
        names = (name for group in current.optimizer.stage_layout() for name in group)
        return [dict(enumerate(names))] * current.tp_size

    @property
    def param_name_to_index_tp_group(self) -> list[dict[str, int]]:
        """By tp_rank: the inverse of `param_index_to_name_tp_group`."""
        return [{name: number for number, name in part.items()} for part in self.param_index_to_name_tp_group]


state = State()
