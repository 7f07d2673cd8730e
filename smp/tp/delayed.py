"""Parameters that take no memory until it is known where they live.

    with smp.delay_param_initialization():      1. each parameter moves to the meta device when its module registers it
        model = Net()
    convert(model, ...)                         2. those of split modules take the shape of a part, still without memory
    materialize(model, ...)                     3. one whole tensor at a time: initialise, cut out the part, let go

The Parameter objects stay the same through all of it, since optimizers hold them.

A parameter is initialised by the module it belongs to (`reset_parameters`, as torch's modules have it), then by modules
around that one which set the values of what they contain (`reset_parameters`, `_reset_parameters`, or `_init_weights`
as in `transformers`). Each of these runs with this one parameter real and every other one on the meta device. The
random stream is keyed by (seed, name of the parameter), so all ranks, on any degrees, arrive at one and the same model.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from smp import runtime
from smp.errors import UsageError
from smp.topology import CommGroup
from smp.tp.shard import spec_of

_ATTRIBUTE = "_smp_delayed"
_ORIGINALS = "_smp_originals"
_ROOT = "_smp_original_root"
_INITIALISERS = "_smp_initialisers"
_SOURCES = "_smp_sources"
_RESETS = ("reset_parameters", "_reset_parameters")

Initialiser = Callable[[Tensor], Any]
Original = tuple[nn.Module, str, nn.Module]  # parent, name of the child, the child that was replaced

_contexts: list[bool] = []  # innermost last
_register_parameter = nn.Module.register_parameter


def is_delayed(param: Tensor) -> bool:
    """Whether a parameter still waits for its memory."""
    return param.is_meta and hasattr(param, _ATTRIBUTE)


def has_delayed(module: nn.Module) -> bool:
    """Whether a module has parameters that wait for their memory."""
    return any(is_delayed(param) for param in module.parameters())


def delaying() -> bool:
    """Whether parameters created now are to be delayed."""
    return bool(_contexts) and _contexts[-1]


def remember_initialiser(module: nn.Module, name: str, initialise: Initialiser) -> None:
    """Says how the whole tensor of a delayed parameter is initialised, where no `reset_parameters` does it."""
    module.__dict__.setdefault(_INITIALISERS, {})[name] = initialise


def forget_initialisers(module: nn.Module) -> None:
    """No parameter in the module is delayed any more. (They are closures, which cannot be pickled.)"""
    for part in module.modules():
        part.__dict__.pop(_INITIALISERS, None)


@contextmanager
def shells() -> Iterator[None]:
    """Inside, `DistributedModule.create_parameter` makes shells: their values come from elsewhere right afterwards."""
    _contexts.append(True)
    try:
        yield
    finally:
        _contexts.pop()


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Parameters of modules created inside take no memory until the model is made, and are then initialised once.

    Those of a module that has no `reset_parameters` are kept as they are created: nothing else knows their values.
    Values given to delayed parameters otherwise (a loop over `model.modules()` in the script) are lost; load or set
    them after the model is made. Buffers are never delayed. Contexts nest, the innermost counts.
    """
    _contexts.append(enabled)
    nn.Module.register_parameter = _delaying_register  # type: ignore[method-assign]
    try:
        yield
    finally:
        _contexts.pop()
        if not _contexts:
            nn.Module.register_parameter = _register_parameter  # type: ignore[method-assign]


def _delaying_register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
    # A parameter that replaces another one holds values from elsewhere: a checkpoint, or a module it is tied to.
    first = self.__dict__.get("_parameters", {}).get(name) is None
    _register_parameter(self, name, param)
    if param is None or not (first and delaying()) or param.is_meta:
        return
    if nn.Module.register_parameter is not _delaying_register:
        return  # somebody else's context is on top, as in `from_pretrained`: it knows where the values will come from
    if any(callable(getattr(self, reset, None)) for reset in _RESETS):
        delay(param, param.shape)


def delay(param: nn.Parameter, shape: Iterable[int]) -> None:
    """Gives a parameter's memory back, in place; it keeps its dtype and takes the given shape."""
    replace_content(param, torch.empty(tuple(shape), dtype=param.dtype, device="meta"))
    mark_delayed(param)


def mark_delayed(param: nn.Parameter) -> None:
    """Says that a parameter on the meta device waits for its memory. It remembers under which seed it was made."""
    setattr(param, _ATTRIBUTE, torch.initial_seed())


def replace_content(param: nn.Parameter, tensor: Tensor) -> None:
    """Makes the same Parameter object hold another tensor, of any shape, on any device.

    Raises:
        UsageError: somebody holds the parameter in a way that torch cannot move (a weak reference, a graph).
    """
    if param.device == tensor.device:
        param.data = tensor
        return
    attributes = dict(param.__dict__)
    try:
        torch.utils.swap_tensors(param, nn.Parameter(tensor, requires_grad=param.requires_grad))
    except RuntimeError as error:
        raise UsageError(f"a delayed parameter cannot be given memory while it is in use elsewhere: {error}") from error
    param.__dict__.update(attributes)


def remember_sources(
    param: nn.Parameter, shells: Sequence[nn.Parameter], merge: Callable[[Sequence[Tensor]], Tensor]
) -> None:
    """Says that a delayed parameter is made from others, which are left in a module that was replaced.

    Args:
        param: the parameter, a shell of the whole.
        shells: those that the old module initialises; they become delayed ones.
        merge: from their values to the whole value of `param`.
    """
    for shell in shells:
        setattr(shell, _ATTRIBUTE, getattr(param, _ATTRIBUTE))
    setattr(param, _SOURCES, (tuple(shells), merge))


def remember_original(root: nn.Module, originals: list[Original], whole: nn.Module | None = None) -> None:
    """Keeps the modules that were replaced below `root`, or the `whole` of it: they know how to initialise their
    parameters."""
    if whole is not None:
        root.__dict__[_ROOT] = whole
    if originals:
        root.__dict__[_ORIGINALS] = [*root.__dict__.get(_ORIGINALS, []), *originals]


def materialize(
    module: nn.Module,
    *,
    owned: Callable[[str], bool] | None = None,
    device: torch.device | str = "cpu",
    seed: int | None = None,
) -> None:
    """Gives every delayed parameter its memory and its initial value, in place. One whole tensor exists at a time.

    Args:
        module: the model, after `convert`.
        owned: whether this rank owns the parameter of that name (`module.named_parameters()`); the others are
            hollow. None: all are owned.
        device: where the parameters shall live.
        seed: of their values; the same on all ranks. None: world rank 0's `torch.initial_seed()` when the parameters
            were made (collective).

    Raises:
        UsageError: a module's `reset_parameters` leaves a parameter untouched, or needs the values of others.
    """
    delayed = {id(param): name for name, param in module.named_parameters() if is_delayed(param)}
    if not delayed:
        return
    seed = _agreed_seed(next(filter(is_delayed, module.parameters()))) if seed is None else seed
    wanted = {key for key, name in delayed.items() if owned is None or owned(name)}
    params: dict[int, nn.Parameter] = {id(param): param for param in module.parameters()}
    values: dict[int, Tensor] = {}
    state = torch.get_rng_state()
    try:
        with _original_tree(module) as original:
            _initialise_all(original, wanted, seed, device, values)
            _make_from_sources(original, [params[key] for key in wanted - values.keys()], seed, device, values)
        _initialise_all(module, wanted - values.keys(), seed, device, values)  # what only the twins have
    finally:
        torch.set_rng_state(state)
    for key in delayed:
        param = params[key]
        replace_content(param, values.pop(key).to(param.dtype) if key in values else hollow(param, device))
        delattr(param, _ATTRIBUTE)
        param.__dict__.pop(_SOURCES, None)
    module.__dict__.pop(_ORIGINALS, None)
    module.__dict__.pop(_ROOT, None)
    forget_initialisers(module)


def _initialise_all(
    root: nn.Module, wanted: Set[int], seed: int, device: torch.device | str, values: dict[int, Tensor]
) -> None:
    """Fills in the values of those wanted parameters that are in the tree."""
    if not wanted:
        return
    with _Shield(root) as shield:
        for key, (name, owner_path, attribute) in shield.places.items():
            if key in wanted:
                part = _initialise(root, shield, key, owner_path, attribute, _seed_of(seed, name))
                values[key] = part.to(device)


def _make_from_sources(
    root: nn.Module,
    params: Iterable[nn.Parameter],
    seed: int,
    device: torch.device | str,
    values: dict[int, Tensor],
) -> None:
    """Fills in the values of parameters that are made from others in the tree."""
    with _Shield(root) as shield:
        for param in params:
            if not hasattr(param, _SOURCES):
                continue
            shells, merge = getattr(param, _SOURCES)
            parts = []
            for shell in shells:
                name, owner_path, attribute = shield.places[id(shell)]
                parts.append(_initialise(root, shield, id(shell), owner_path, attribute, _seed_of(seed, name)))
            whole, spec = merge(parts), spec_of(param)
            values[id(param)] = (spec.split(whole) if spec else whole).to(device)


def hollow(like: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the same shape and dtype with the memory of one element: what a rank keeps of another stage's
    parameter. It is NaN (zero for integers) all over, so that reading it shows and writing it raises; a storage resized
    to nothing would crash the process on the first touch."""
    filler = float("nan") if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), filler, dtype=like.dtype, device=device).expand(like.shape)


def _agreed_seed(param: Tensor) -> int:
    seed = int(getattr(param, _ATTRIBUTE))
    if not runtime.is_initialized():
        return seed
    current = runtime.get()
    return int(current.transport.broadcast_object(seed, current.group(CommGroup.WORLD), 0))


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def _original_tree(root: nn.Module) -> Iterator[nn.Module]:
    """Puts the modules that were replaced back into their places for a while: names, ancestors and
    `reset_parameters` are theirs. Gives the root."""
    originals: list[Original] = root.__dict__.get(_ORIGINALS, [])
    replaced = [parent._modules[name] for parent, name, _ in originals]
    for parent, name, original in originals:
        parent._modules[name] = original
    try:
        yield root.__dict__.get(_ROOT, root)
    finally:
        for (parent, name, _), module in zip(originals, replaced):
            parent._modules[name] = module


class _Shield:
    """While it is up, every parameter of the tree is a meta tensor of its global shape, so that initialisation code can
    neither touch nor read real values. `show` makes one of them real.

    Attributes:
        places: by id of the real parameter: its first name, the path of its owner, the attribute's name.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._saved: list[tuple[nn.Module, dict[str, nn.Parameter | None]]] = []
        self._where: dict[int, list[tuple[nn.Module, str]]] = {}
        self._real: dict[int, nn.Parameter] = {}
        self.places: dict[int, tuple[str, str, str]] = {}

    def __enter__(self) -> "_Shield":
        placeholders: dict[int, nn.Parameter] = {}
        for path, module in self._root.named_modules():
            self._saved.append((module, module._parameters))
            shown: dict[str, nn.Parameter | None] = {}
            for name, param in module._parameters.items():
                if param is None:
                    shown[name] = None
                    continue
                key = id(param)
                if key not in placeholders:
                    placeholders[key] = nn.Parameter(_whole(param, "meta"), requires_grad=param.requires_grad)
                    self.places[key] = (f"{path}.{name}" if path else name, path, name)
                    self._real[key] = param
                self._where.setdefault(key, []).append((module, name))
                shown[name] = placeholders[key]
            module._parameters = shown
        return self

    def __exit__(self, *error: object) -> None:
        for module, parameters in self._saved:
            module._parameters = parameters

    def real(self, key: int) -> nn.Parameter:
        """The real parameter."""
        return self._real[key]

    @contextmanager
    def show(self, key: int, tensor: nn.Parameter) -> Iterator[None]:
        """Shows a tensor wherever this parameter belongs."""
        hidden = [(module, name, module._parameters[name]) for module, name in self._where[key]]
        for module, name, _ in hidden:
            module._parameters[name] = tensor
        try:
            yield
        finally:
            for module, name, placeholder in hidden:
                module._parameters[name] = placeholder


def _whole(param: Tensor, device: str) -> Tensor:
    """Room for the whole tensor; in float32 for half precision, whose initial values are rounded ones: not every
    initialisation works in half precision, and none should depend on it."""
    spec = spec_of(param)
    dtype = torch.promote_types(param.dtype, torch.float32) if param.is_floating_point() else param.dtype
    return torch.empty(spec.global_shape if spec else param.shape, dtype=dtype, device=device)


@torch.no_grad()
def _initialise(root: nn.Module, shield: _Shield, key: int, owner_path: str, attribute: str, seed: int) -> Tensor:
    """This rank's part of one parameter's initial value."""
    param = shield.real(key)
    whole = nn.Parameter(_whole(param, "cpu"), requires_grad=param.requires_grad)
    if whole.is_floating_point():
        whole.fill_(float("nan"))  # whatever is still there afterwards was forgotten
    chain = _ancestors(root, owner_path)
    with shield.show(key, whole):
        torch.default_generator.manual_seed(seed)
        try:
            _run_initialisers(chain, attribute)
        except (NotImplementedError, RuntimeError) as error:
            raise UsageError(
                f"{_described(chain[0], owner_path)} cannot initialise its parameter {attribute!r} alone: {error}. "
                "Create it outside of smp.delay_param_initialization()"
            ) from error
        value = chain[0]._parameters[attribute]
    if value is None or value.is_meta or (value.is_floating_point() and bool(value.isnan().any())):
        raise UsageError(
            f"reset_parameters of {_described(chain[0], owner_path)} does not initialise its parameter {attribute!r}. "
            "Let it do so, or create the module outside of smp.delay_param_initialization()"
        )
    spec = spec_of(param)
    return spec.split(value.data) if spec else value.data.clone()


def _described(module: nn.Module, path: str) -> str:
    return f"{type(module).__name__} ({path or 'the model'})"


def _ancestors(root: nn.Module, path: str) -> list[nn.Module]:
    """The module of that path and those around it, innermost first."""
    chain = [root]
    for part in filter(None, path.split(".")):
        chain.append(chain[-1]._modules[part])  # type: ignore[arg-type]
    return chain[::-1]


def _run_initialisers(chain: list[nn.Module], attribute: str) -> None:
    owner = chain[0]
    own: dict[str, Initialiser] = owner.__dict__.get(_INITIALISERS, {})
    if attribute in own:
        own[attribute](owner._parameters[attribute])  # type: ignore[arg-type]
    for module in chain:
        for reset in _RESETS:
            method = getattr(module, reset, None)
            if callable(method):
                method()
                break
    for index, module in enumerate(chain):
        initialise = getattr(module, "_init_weights", None)
        if callable(initialise) and len(inspect.signature(initialise).parameters) == 1:
            for part in chain[: index + 1]:
                initialise(part)
            break
