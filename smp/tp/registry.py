"""Which class is the distributed twin of which, and which module uses parameters of another one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from torch import nn

from smp.errors import UsageError
from smp.tp import families
from smp.tp.embedding import DistributedEmbedding
from smp.tp.families import Arguments, Family, Replacement
from smp.tp.layernorm import DistributedLayerNorm
from smp.tp.linear import DistributedLinear
from smp.tp.module import DistributedModule

ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module])
_ARGUMENTS = "_smp_arguments"
_USED = "_smp_used_parameters"


@dataclass(frozen=True)
class Registration:
    """How a module of one class is replaced.

    Attributes:
        cls: the class; subclasses are not meant.
        dist_cls: its twin.
        arguments: reads the constructor arguments from an instance; None: they are recorded when it is made.
        init_hook: from the class's constructor arguments to the twin's.
        forward_hook: from the forward arguments of the class to those of the twin.
        return_hook: from what the twin returns to what the class returns.
        family, replacement: where the class belongs to a declared family of another library.
    """

    cls: type[nn.Module]
    dist_cls: type[DistributedModule]
    arguments: Callable[[Any], Arguments] | None = None
    init_hook: Callable[..., Any] | None = None
    forward_hook: Callable[..., Any] | None = None
    return_hook: Callable[[Any], Any] | None = None
    family: Family | None = None
    replacement: Replacement | None = None

    @property
    def built_in(self) -> bool:
        """Whether it is for a class of torch, whose instances may hold anything beyond their arguments."""
        return self.arguments is not None and self.family is None


def _linear_arguments(module: nn.Linear) -> Arguments:
    return (module.in_features, module.out_features), {"bias": module.bias is not None}


def _embedding_arguments(module: nn.Embedding) -> Arguments:
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    return (module.num_embeddings, module.embedding_dim), {name: getattr(module, name) for name in names}


def _layer_norm_arguments(module: nn.LayerNorm) -> Arguments:
    affine = module.elementwise_affine
    return (module.normalized_shape, module.eps), {"elementwise_affine": affine, "bias": module.bias is not None}


# Classes of torch whose instances tell their own arguments: they may have been made before anything was registered.
_READERS: dict[type[nn.Module], Callable[[Any], Arguments]] = {
    nn.Linear: _linear_arguments,
    nn.Embedding: _embedding_arguments,
    nn.LayerNorm: _layer_norm_arguments,
}
_registry: dict[type[nn.Module], Registration] = {
    nn.Linear: Registration(nn.Linear, DistributedLinear, _linear_arguments),
    nn.Embedding: Registration(nn.Embedding, DistributedEmbedding, _embedding_arguments),
    nn.LayerNorm: Registration(nn.LayerNorm, DistributedLayerNorm, _layer_norm_arguments),
}


def registration_of(module: nn.Module) -> Registration | None:
    """How this module would be replaced; None: its class is not registered, nor part of a declared family."""
    registration = _registry.get(type(module))
    if registration is not None:
        return registration
    found = families.replacement_of(type(module))
    if found is None:
        return None
    family, replacement = found
    hooks = replacement.forward_hook, replacement.return_hook
    return Registration(
        type(module), replacement.twin, replacement.arguments, None, *hooks, family=family, replacement=replacement
    )


def registered_twins() -> set[type[DistributedModule]]:
    """All classes that replace others."""
    return {registration.dist_cls for registration in _registry.values()}


def tp_register(
    dist_cls: type[DistributedModule],
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[[Any], Any] | None = None,
) -> Callable[[ModuleClass], ModuleClass]:
    """A decorator for a module class: where tensor parallelism is on, its instances are replaced by `dist_cls`.

    Args:
        dist_cls: a `smp.nn.DistributedModule`.
        init_hook: `(*constructor arguments of the class) -> (args, kwargs)` for `dist_cls`; None: the same arguments.
        forward_hook: `(*forward arguments of the class) -> (args, kwargs)` for the forward of `dist_cls`.
        return_hook: `(output of dist_cls) -> output` as the class returns it.

    Parameters are carried over by name, see DistributedModule.carry_over.

    Raises:
        UsageError: `dist_cls` is not a DistributedModule, or what is decorated is not a module class.
    """

    def decorate(cls: ModuleClass) -> ModuleClass:
        tp_register_with_module(cls, dist_cls, init_hook, forward_hook, return_hook)
        return cls

    return decorate


def tp_register_with_module(
    cls: type[nn.Module],
    dist_cls: type[DistributedModule],
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[[Any], Any] | None = None,
) -> None:
    """As `tp_register`, for a class that one does not own. To be called before instances are made.

    Raises:
        UsageError: as for `tp_register`.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise UsageError(f"only classes of torch.nn.Module can be registered, got {cls!r}")
    if not (isinstance(dist_cls, type) and issubclass(dist_cls, DistributedModule)):
        raise UsageError(f"{cls.__name__} can only be replaced by a smp.nn.DistributedModule, got {dist_cls!r}")
    for name, hook in {"init_hook": init_hook, "forward_hook": forward_hook, "return_hook": return_hook}.items():
        if hook is not None and not callable(hook):
            raise UsageError(f"{name} of {cls.__name__} must be callable, got {hook!r}")
    reader = _READERS.get(cls)
    if reader is None:
        _record_arguments(cls)
    _registry[cls] = Registration(cls, dist_cls, reader, init_hook, forward_hook, return_hook)


def _record_arguments(cls: type[nn.Module]) -> None:
    """Makes instances remember what they were made from."""
    original = cls.__init__
    if "__init__" in vars(cls) and getattr(original, "_smp_records", False):
        return

    @wraps(original)
    def recording_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if type(self) is cls:
            self.__dict__.setdefault(_ARGUMENTS, (args, kwargs))
        original(self, *args, **kwargs)

    recording_init._smp_records = True  # type: ignore[attr-defined]
    cls.__init__ = recording_init  # type: ignore[method-assign]


def recorded_arguments(module: nn.Module) -> Arguments | None:
    """The constructor arguments of a module of a registered class; None: it was made before that."""
    return module.__dict__.get(_ARGUMENTS)


def register_parameter(module: nn.Module, param: nn.Parameter) -> None:
    """Says that `module` uses a parameter that another module owns, other than by having it as an attribute.

    Both modules then live on one pipeline stage, or each on its own with the parameter on both (`replicate_tied`), and
    the owner is not split over the tensor-parallel group.

    Raises:
        UsageError: an argument has the wrong type.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"register_parameter takes a torch.nn.Module first, got {type(module).__name__}")
    if not isinstance(param, nn.Parameter):
        raise UsageError(f"register_parameter takes a torch.nn.Parameter second, got {type(param).__name__}")
    used = module.__dict__.setdefault(_USED, [])
    if not any(param is other for other in used):
        used.append(param)


def used_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that were registered for a module (those of modules inside it not included)."""
    return module.__dict__.get(_USED, [])
