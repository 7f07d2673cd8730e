"""Which stage owns what, and what that does to the module tree.

During a step the `_call_impl` of every module that matters is replaced on the instance: a module that lives on one
stage becomes one node, a module that may draw random numbers gets a stream of its own. After the step the tree is the
user's own again (it can be copied and pickled). Parameters of other stages keep their object, shape and device and lose
their memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from smp.errors import StepError, UsageError
from smp.pp.call import GROUP
from smp.pp.observe import Observers, recording_forward
from smp.pp.placed import Placed, current, user_line
from smp.rng import DETERMINISTIC_MODULES
from smp.tp.delayed import hollow
from smp.tp.registry import used_parameters


class NodeKey(NamedTuple):
    """Identifies the call of one module in signatures, with the flags its result's structure depends on."""

    name: str
    training: bool
    flags: int
    deterministic: bool
    variant: str = ""


class StageMap:
    """The partition of one module tree.

    `assignment` maps the name of every module to its stage, or to None for glue (a module whose children lie on several
    stages, and a parameterless one below glue). `own_stage` gives the stage of a glue module's own parameters.

    A parameter that modules of several stages use lives on all of these, its holders; the first of them is its stage.
    """

    def __init__(
        self, root: nn.Module, assignment: dict[str, int | None], own_stage: dict[str, int], rank: int
    ) -> None:
        self.root = root
        self.assignment = assignment
        self.own_stage = own_stage
        self.rank = rank
        self.stage_of: dict[str, int] = {}  # name of parameter or buffer -> stage
        self.holders: dict[str, tuple[int, ...]] = {}  # name of parameter -> the stages that have its memory
        self._owner: dict[int, int] = {}  # id of parameter or adopted buffer -> stage
        self._holders = self._find_holders(own_stage)  # id of parameter -> stages, ascending
        self._tied: list[tuple[str, nn.Parameter, tuple[int, ...]]] | None = None
        self._tied_versions: list[tuple[str, nn.Parameter, int]] = []
        self._stride: dict[int, tuple[int, ...]] = {}  # as it was before another stage's memory was given back
        self._keep: list[torch.Tensor] = []
        self._buffer_names: dict[int, str] = {}  # by the id of the tensor that the buffer is now
        self._buffers: dict[str, torch.Tensor] = {}
        self._buffer_at: dict[str, nn.Module] = {}
        self._trainable: dict[str, list[torch.Tensor]] = {}
        self._flags: dict[str, int] = {}
        self._groups: dict[str, tuple[str, ...]] = {}  # names of modules that run as one node, by the node's name
        self._made_for: Any = None  # what the two were made for
        self.modes: Any = None  # which modules train and which parameters require gradients, as of this step
        self._names = {id(module): name for name, module in root.named_modules()}
        for prefix, module in root.named_modules(remove_duplicate=False):
            stage = self._stage_for(prefix, own_stage)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    holders = self.holders[_join(prefix, name)] = self._holders[id(parameter)]
                    self._owner[id(parameter)] = self.stage_of[_join(prefix, name)] = holders[0]
                    self._stride[id(parameter)] = parameter.stride()
                    self._keep.append(parameter)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self.stage_of[_join(prefix, name)] = stage
                    self._buffer_at[_join(prefix, name)] = module
                    self._know_buffer(_join(prefix, name), buffer)

    def _find_holders(self, own_stage: dict[str, int]) -> dict[int, tuple[int, ...]]:
        found: dict[int, set[int]] = {}
        for prefix, module in self.root.named_modules():  # one with several names lives where the first name says
            own = [parameter for parameter in module._parameters.values() if parameter is not None]
            used = used_parameters(module) if self.assignment.get(prefix) is not None else []
            for parameter in [*own, *used]:
                found.setdefault(id(parameter), set()).add(self._stage_for(prefix, own_stage))
        return {key: tuple(sorted(stages)) for key, stages in found.items()}

    def of_module(self, name: str) -> int:
        """The stage of a module; of one whose children lie on several, that of its own parameters."""
        return self._stage_for(name, self.own_stage)

    def _stage_for(self, prefix: str, own_stage: dict[str, int]) -> int:
        stage = self.assignment.get(prefix)
        if stage is None:
            stage = own_stage.get(prefix)
        while stage is None:  # parameterless below glue: with its parent
            prefix = prefix.rpartition(".")[0]
            stage = self.assignment.get(prefix)
            stage = own_stage.get(prefix, 0) if stage is None else stage
        return stage

    def owner_of(self, tensor: torch.Tensor) -> int | None:
        return self._owner.get(id(tensor))

    def holders_of(self, tensor: torch.Tensor | None) -> tuple[int, ...]:
        """The stages that have a parameter's memory; none for any other tensor."""
        return self._holders.get(id(tensor), ())

    def tied_parameters(self) -> list[tuple[str, nn.Parameter, tuple[int, ...]]]:
        """Name, parameter and holders of those that more than one stage has, in the order of the module tree."""
        if self._tied is None:
            named = ((name, p, self._holders[id(p)]) for name, p in self.root.named_parameters())
            self._tied = [(name, parameter, holders) for name, parameter, holders in named if len(holders) > 1]
        return self._tied

    def stride_of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The stride that the tensor has on its owner."""
        return self._stride.get(id(tensor), tensor.stride())

    def is_buffer(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._buffer_names

    def adopt_buffer(self, tensor: torch.Tensor, owner: int) -> bool:
        name = self._buffer_names.get(id(tensor))
        if name is None:
            return False
        self._owner[id(tensor)] = self.stage_of[name] = owner
        return True

    def _know_buffer(self, name: str, tensor: torch.Tensor) -> None:
        """`tensor` is from now on the buffer of that name."""
        old = self._buffers.get(name)
        if old is not None and old is not tensor and self._buffer_names.get(id(old)) == name:
            del self._buffer_names[id(old)]
            self._owner.pop(id(old), None)
        self._buffers[name] = tensor
        self._buffer_names[id(tensor)] = name

    def replace_buffer(self, name: str, tensor: torch.Tensor, owner: int) -> None:
        """The buffer of that name was set to another tensor, which lives on `owner`."""
        self._know_buffer(name, tensor)
        self._owner[id(tensor)] = self.stage_of[name] = owner

    def buffer_versions(self, key: Any) -> dict[str, tuple[torch.Tensor, int]]:
        """The buffers of the module that a call is of, with their versions."""
        if not isinstance(key, NodeKey):
            return {}
        found = {}
        for member in self._groups.get(key.name, (key.name,)):
            for prefix, module in self.root.get_submodule(member).named_modules(prefix=member):
                for name, buffer in module._buffers.items():
                    if buffer is not None and _join(prefix, name) in self._buffer_at:
                        found[_join(prefix, name)] = (buffer, 0 if buffer.is_inference() else buffer._version)
        return found

    def buffers_written(self, key: Any, before: dict[str, tuple[torch.Tensor, int]]) -> tuple[str, ...]:
        """Names of those that the call has changed: set anew, written, or moved by a normalisation's kernel."""
        written = []
        for name, (buffer, version) in before.items():
            module = self._buffer_at[name]
            now = module._buffers.get(name.rpartition(".")[2])
            moved = isinstance(module, nn.modules.batchnorm._NormBase) and module.training
            if now is not None and (now is not buffer or moved or (not now.is_inference() and now._version != version)):
                written.append(name)
        return tuple(written)

    def buffers_at_risk(self, key: Any, written: tuple[str, ...] | None) -> list[torch.Tensor]:
        """The buffers of the called module that it writes (None: not known yet).

        Not those of normalisations, whose backward does not read them.
        """
        names = list(self.buffer_versions(key)) if written is None else written
        found = []
        for name in names:
            module = self._buffer_at[name]
            buffer = module._buffers.get(name.rpartition(".")[2])
            if buffer is not None and not isinstance(module, nn.modules.batchnorm._NormBase):
                found.append(buffer)
        return found

    def adopt_written(self, name: str, owner: int) -> list[int]:
        """A module on `owner` has written that buffer: whoever reads it elsewhere has to ask for it."""
        old, now = self._buffers[name], self._buffer_at[name]._buffers.get(name.rpartition(".")[2])
        if now is not None:
            self.replace_buffer(name, now, owner)
        return [id(old), id(now)]

    def observed(self, key: Any, observers: Observers) -> list[tuple[int, nn.Module]]:
        """Those modules inside the called one that are observed, with their positions there."""
        inside = enumerate(m for part in self._parts(key) for m in part.modules())
        return [(position, module) for position, module in inside if id(module) in observers]

    def _parts(self, key: Any) -> list[nn.Module]:
        """The modules that run as the node of that key."""
        names = self._groups.get(key.name, (key.name,)) if isinstance(key, NodeKey) else ()
        return [self.root.get_submodule(name) for name in names]

    def is_local(self, name: str) -> bool:
        """Whether the parameter or buffer of that name lives on this rank's stage."""
        return self.rank in self.holders[name] if name in self.holders else self.stage_of[name] == self.rank

    def parameters_of(self, key: Any) -> list[torch.Tensor]:
        return self._trainable.get(key.name, []) if isinstance(key, NodeKey) else []

    # -- memory --------------------------------------------------------------------------------------------------------

    def free_others(self) -> None:
        """Give back the memory of parameters that live on other stages.

        The Parameter objects stay the same ones, with their shape, dtype and device.
        """
        for parameter in dict.fromkeys(self.root.parameters()):
            if self.rank not in self._holders[id(parameter)] and not parameter.is_meta:
                parameter.grad = None
                parameter.data = hollow(parameter, parameter.device)

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """See which parameters require gradients and which modules train: results' structures depend on it."""
        parameters = list(self.root.parameters())
        self.modes = (
            tuple(module.training for module in self.root.modules()),
            tuple(parameter.requires_grad for parameter in parameters),
        )
        made_for = (self.modes, tuple(map(id, parameters)))
        if made_for != self._made_for:
            self._made_for = made_for
            self._trainable.clear()
            self._flags.clear()
        self._tied_versions = [(name, p, p._version) for name, p, _ in self.tied_parameters()]
        for name, module in self.root.named_modules():
            if self.assignment.get(name) is None and (module._backward_hooks or module._backward_pre_hooks):
                raise StepError(
                    f"module '{name or type(module).__name__}' has full backward hooks, but its children lie on "
                    "several stages, so no rank sees all of its gradients. Register the hook on a module that lives "
                    "on one stage."
                )

    def check_tied(self) -> None:
        """After a step: a tied parameter must be as it was, or its copies are no longer equal."""
        for name, parameter, version in self._tied_versions:
            if parameter._version != version:
                raise StepError(
                    f"parameter '{name}' was changed in place inside the step, on stage {self.rank} only, but the "
                    f"stages {list(self.holders[name])} hold it. Change it outside of the step function, on every "
                    "rank, or set 'replicate_tied' to False."
                )
        self._tied_versions = []

    def nodes(self) -> Iterator[tuple[str, nn.Module]]:
        """The outermost modules that live on one stage, as far as they can be called."""
        inside: set[str] = set()  # nodes and what is in them
        for name, module in self.root.named_modules():
            if name and name.rpartition(".")[0] in inside:
                inside.add(name)
            elif self.assignment.get(name) is not None and _can_be_called(module):
                inside.add(name)
                yield name, module

    def replacements(self) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """Each module whose calls the engine takes, with what takes them."""
        for name, module in self.root.named_modules():
            stage = self.assignment.get(name)
            if stage is not None or not _has_parameters(module):
                yield module, self._node_call(name, module, stage)
            elif type(module) not in DETERMINISTIC_MODULES:
                yield module, glue_call(module)

    def recording(self) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """Each module over several stages that gathers what its layers return, with what takes its forward."""
        for name, module in self.root.named_modules():
            if self.assignment.get(name) is None and _has_parameters(module):
                forward = recording_forward(module)
                if forward is not None:
                    yield module, forward

    def _node_call(self, name: str, module: nn.Module, stage: int | None) -> Callable[..., Any]:
        deterministic = type(module) in DETERMINISTIC_MODULES
        inner = type(module)._call_impl.__get__(module) if deterministic else scoped_call(module)
        label = name or type(module).__name__

        def call(*args: Any, **kwargs: Any) -> Any:
            program = current.program
            if program is None:
                raise UsageError(
                    f"module '{label}' lives on a pipeline stage and can only be called inside an @smp.step function."
                )
            if program.in_node:
                if stage is not None and stage != self.rank:
                    raise StepError(
                        f"module '{label}' of stage {stage} is called at {user_line()} from inside {program.in_node}, "
                        f"which runs on stage {self.rank}. Place both on one stage (smp.set_partition)."
                    )
                return inner(*args, **kwargs)
            if stage is None and any(isinstance(x, nn.Module) for x in args):
                return inner(*args, **kwargs)
            return program.call_module(label, stage, inner, self._key(name, module), args, kwargs)

        return call

    def _key(self, name: str, module: nn.Module) -> NodeKey:
        flags = self._flags.get(name)
        if flags is None:
            used = [p for part in module.modules() for p in used_parameters(part)]
            parameters = dict.fromkeys([*module.parameters(), *used])
            requires_grad = tuple(p.requires_grad for p in parameters)
            flags = self._flags[name] = hash((requires_grad, tuple(m.training for m in module.modules())))
            if self.assignment.get(name) == self.rank:
                self._trainable[name] = [p for p in parameters if p.requires_grad]
        return NodeKey(name, module.training, flags, type(module) in DETERMINISTIC_MODULES)

    def node_of(self, module: nn.Module) -> tuple[NodeKey, int | None] | None:
        """Key and stage of a module that can run as one node; None for one whose children lie on several stages."""
        name = self._names.get(id(module))
        if name is None:
            return None
        stage = self.assignment.get(name)
        return None if stage is None and _has_parameters(module) else (self._key(name, module), stage)

    def group_of(self, modules: tuple[nn.Module, ...]) -> tuple[NodeKey, int | None]:
        """Key and stage of modules that run as one node, one after another. None of them is split over stages."""
        nodes = [self.node_of(module) for module in modules]
        found = [node for node in nodes if node is not None]
        assert len(found) == len(modules)
        keys = tuple(key for key, _ in found)
        name = GROUP.join(key.name for key in keys)
        self._groups[name] = tuple(key.name for key in keys)
        members = [self._trainable.get(key.name, []) for key in keys]
        self._trainable[name] = list(dict.fromkeys(p for parameters in members for p in parameters))
        stage = next((stage for _, stage in found if stage is not None), None)
        return NodeKey(name, any(key.training for key in keys), hash(keys), True, "group"), stage

    def name_of(self, module: nn.Module) -> str:
        """The module's name in the model; empty for the model itself, and for a module that is not in it."""
        return self._names.get(id(module), "")

    def stages_in(self, module: nn.Module) -> dict[str, int]:
        """The stages of the parts of a module that have parameters of their own: of their names inside it."""
        name = self._names.get(id(module))
        if name is None or self.assignment.get(name) is not None:
            return {}
        found: dict[str, int] = {}
        for inner, part in module.named_modules():
            for parameter in part._parameters.values():
                if parameter is not None and id(parameter) in self._owner:
                    found[inner or "itself"] = self._owner[id(parameter)]
        return found


def scoped_call(module: nn.Module) -> Callable[..., Any]:
    """The module's call in a random stream of its own."""
    plain = type(module)._call_impl.__get__(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        streams = current.streams
        if streams is None:
            return plain(*args, **kwargs)
        seed = streams.enter()
        try:
            return plain(*args, **kwargs)
        finally:
            streams.leave(seed)

    return call


def glue_call(module: nn.Module) -> Callable[..., Any]:
    """The call of a module whose children lie on several stages: in a random stream of its own, seen by observers."""
    scoped = scoped_call(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        output = scoped(*args, **kwargs)
        program = current.program
        if program is not None and id(module) in program.observers:
            for observer in list(program.observers[id(module)]):
                observer.note(observer.pick(args, output))
        return output

    return call


def scopes(root: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """The replacements of a model that is not cut into stages: only random streams."""
    for module in root.modules():
        if type(module) not in DETERMINISTIC_MODULES:
            yield module, scoped_call(module)


@contextmanager
def replaced_calls(
    replacements: Iterator[tuple[nn.Module, Callable[..., Any]]], attribute: str = "_call_impl"
) -> Iterator[None]:
    """Let the given functions take the modules' calls inside this context."""
    changed = []
    try:
        for module, call in replacements:
            module.__dict__[attribute] = call
            changed.append(module)
        yield
    finally:
        for module in changed:
            module.__dict__.pop(attribute, None)


def settle_buffers(stages: StageMap) -> None:
    """After a step: a glue buffer that was rebound to a placed value becomes a plain tensor that its stage owns."""
    stages.check_tied()
    for prefix, module in stages.root.named_modules():
        if stages.assignment.get(prefix) is not None:
            continue
        for name, buffer in module._buffers.items():
            if type(buffer) is Placed:
                value = buffer.value
                local = value.local.detach() if value.local is not None else torch.zeros(value.shape, dtype=value.dtype)
                module._buffers[name] = local
                stages.replace_buffer(_join(prefix, name), local, value.owner)


def _can_be_called(module: nn.Module) -> bool:
    """Not so for a list of modules: its members are called. A scripted module's class does not tell its forward."""
    return isinstance(module, torch.jit.ScriptModule) or type(module).forward is not nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
