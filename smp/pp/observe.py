"""What a model wants to see of calls that happen inside its parts.

Models of `transformers` gather the router scores, attentions and hidden states of their layers by putting another
`forward` on inner modules while they run. Across stages that fails twice: what happens inside a module of one stage
happens on that rank only, and a changed `forward` is seen by every microbatch that is under way. So inside a step the
gathering is done here: observers belong to one microbatch, and what they pick becomes a further result of the call that
it happened in, known on every stage and differentiated like any other.
"""

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from smp.pp.placed import current


class Observer(NamedTuple):
    """`pick(args, output)` runs where the observed module runs; `note` is given its result on every stage."""

    pick: Callable[[tuple[Any, ...], Any], Any]
    note: Callable[[Any], None]


Observers = dict[int, list[Observer]]  # by the id of the observed module


def picking(call: Callable[..., Any], modules: list[nn.Module], observers: Observers) -> Callable[..., Any]:
    """`call`, with what the observers of `modules` pick from calls inside it: returns (result, picked).

    `picked` holds, in the order of the calls, one `{position in modules: what its observers picked}` each: keys are
    part of a result's structure, so other stages know them.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        picked: list[dict[int, list[Any]]] = []

        def observed(position: int, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
            def with_pick(*args: Any, **kwargs: Any) -> Any:
                output = forward(*args, **kwargs)
                picked.append({position: [o.pick(args, output) for o in observers[id(module)]]})
                return output

            return with_pick

        before = [module.__dict__.get("forward") for module in modules]
        for position, module in enumerate(modules):
            module.__dict__["forward"] = observed(position, module, module.forward)
        try:
            return call(*args, **kwargs), picked
        finally:
            for module, own in zip(modules, before, strict=True):
                del module.__dict__["forward"]
                if own is not None:
                    module.__dict__["forward"] = own

    return run


def note_picked(modules: list[nn.Module], observers: Observers, picked: list[dict[int, list[Any]]]) -> None:
    """Hand what was picked to the observers."""
    for entry in picked:
        for position, values in entry.items():
            for observer, value in zip(observers[id(modules[position])], values, strict=True):
                observer.note(value)


@contextmanager
def observing(observers: Observers, wanted: list[tuple[nn.Module, Observer]]) -> Iterator[None]:
    """Add observers for the length of a call."""
    for module, observer in wanted:
        observers.setdefault(id(module), []).append(observer)
    try:
        yield
    finally:
        for module, observer in wanted:
            observers[id(module)].remove(observer)
            if not observers[id(module)]:
                del observers[id(module)]


# -- transformers ------------------------------------------------------------------------------------------------------


_GATHERERS = ("transformers.utils.output_capturing", "transformers.utils.generic")  # of transformers 5 and 4


def recording_forward(module: nn.Module) -> Callable[..., Any] | None:
    """What stands in for the forward of a model whose layers lie on several stages, if it gathers its layers' outputs.

    It does what the decorators `capture_outputs` and `check_model_inputs` of `transformers` do, with observers instead
    of hooks or changed forwards. None for any other module.
    """
    decorated = type(module).forward
    if "forward" in module.__dict__:
        return None
    for name in _GATHERERS:
        gatherer = sys.modules.get(name)
        registry = getattr(gatherer, "_CAN_RECORD_REGISTRY", None)
        held = _closure_of(decorated, getattr(gatherer, "__file__", ""), "tie_last_hidden_states")
        if registry is not None and held is not None:
            flags = dict.get(registry, str(type(module))) or {}
            if "transformers.utils.output_capturing" == name:
                return _beside_hooks(module, flags, held["tie_last_hidden_states"])
            return _instead_of_forwards(module, flags, held["func"], held["tie_last_hidden_states"])
    return None


def _closure_of(function: Any, file: str, name: str) -> dict[str, Any] | None:
    """What a decorator's wrapper holds: of those around a function the one that is from `file` and has `name`."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and code.co_filename == file and name in code.co_freevars:
            cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
            return {variable: cell.cell_contents for variable, cell in cells}
        function = getattr(function, "__wrapped__", None)
    return None


def _beside_hooks(module: Any, flags: dict[str, Any], tie: bool) -> Callable[..., Any]:
    """transformers 5: its hooks gather in a list of their own, on each stage what happens there; that is set right."""
    decorated = type(module).forward

    def run(observers: Observers, keys: list[str], args: Any, kwargs: dict[str, Any]) -> Any:
        gathered: dict[str, tuple[Any, ...]] = dict.fromkeys(keys, ())
        with observing(observers, _observers(module, flags, keys, gathered)):
            outputs = decorated(module, *args, return_dict=True, **kwargs)
        _add(outputs, gathered, flags, getattr(module.config, "tie_last_hidden_states", None) is not False and tie)
        return outputs

    return _when_asked(module, flags, run)


def _instead_of_forwards(module: Any, flags: dict[str, Any], inner: Any, tie: bool) -> Callable[..., Any]:
    """transformers 4 would put other forwards on the modules inside."""

    def run(observers: Observers, keys: list[str], args: Any, kwargs: dict[str, Any]) -> Any:
        gathered: dict[str, tuple[Any, ...]] = defaultdict(tuple)
        kwargs["use_cache"] = _use_cache(module, kwargs)
        if kwargs["use_cache"] is None:
            del kwargs["use_cache"]
        with observing(observers, _observers(module, flags, keys, gathered)):
            outputs = inner(module, *args, **kwargs)
        _add(outputs, gathered, flags, tie)
        return outputs

    return _when_asked(module, flags, run)


def _when_asked(module: Any, flags: dict[str, Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """The module's forward, but `run(observers, keys, args, kwargs)` where outputs of layers, `keys`, are wanted."""
    decorated = type(module).forward

    @functools.wraps(decorated.__get__(module))
    def forward(*args: Any, **kwargs: Any) -> Any:
        program = current.program
        keys = [key for key in flags if _asked_for(module.config, key, kwargs)]
        if program is None or not keys:
            return decorated(module, *args, **kwargs)
        return_dict = kwargs.pop("return_dict", None)
        outputs = run(program.observers, keys, args, kwargs)
        wants_dict = getattr(module.config, "return_dict", True) if return_dict is None else return_dict
        return outputs if wants_dict else outputs.to_tuple()

    return forward


def _asked_for(config: Any, key: str, kwargs: dict[str, Any]) -> bool:
    attentions = kwargs.get("output_attentions", getattr(config, "output_attentions", False))
    return bool(kwargs.get(f"output_{key}", getattr(config, f"output_{key}", attentions)))


def _use_cache(module: Any, kwargs: dict[str, Any]) -> bool | None:
    use_cache = kwargs.get("use_cache")
    use_cache = getattr(module.config, "use_cache", None) if use_cache is None else use_cache
    return False if use_cache and module.training and getattr(module, "gradient_checkpointing", False) else use_cache


def _observers(
    module: nn.Module, flags: dict[str, Any], keys: list[str], gathered: dict[str, tuple[Any, ...]]
) -> list[tuple[nn.Module, Observer]]:
    wanted = []
    for name, inner in module.named_modules():
        for key in keys:
            for recorder in flags[key] if isinstance(flags[key], list) else [flags[key]]:
                if _matches(recorder, name, inner):
                    wanted.append((inner, _observer(key, getattr(recorder, "index", None), gathered)))
    return wanted


def _matches(recorder: Any, name: str, module: nn.Module) -> bool:
    """A recorder is a class, the end of a name, or holds one of them and a part of the name."""
    if isinstance(recorder, str):
        return name.endswith(recorder)
    if isinstance(recorder, type):
        return isinstance(module, recorder)
    by_class = recorder.target_class is not None and isinstance(module, recorder.target_class)
    by_name = recorder.class_name is not None and name.endswith(recorder.class_name)
    return (by_class or by_name) and (recorder.layer_name is None or recorder.layer_name in name)


def _observer(key: str, index: int | None, gathered: dict[str, tuple[Any, ...]]) -> Observer:
    position = index if index is not None else 0 if "hidden_states" in key else 1

    def pick(args: tuple[Any, ...], output: Any) -> Any:
        entering = args[0] if key == "hidden_states" else None
        return entering, output if not isinstance(output, tuple) else output[position]

    def note(picked: Any) -> None:
        entering, value = picked
        if key == "hidden_states" and not gathered[key]:
            gathered[key] += (entering,)
        if value is not None:
            gathered[key] += (value,)

    return Observer(pick, note)


def _add(outputs: Any, gathered: dict[str, tuple[Any, ...]], flags: dict[str, Any], tie: bool) -> None:
    for key, values in gathered.items():
        if key == "hidden_states" and tie:
            last = getattr(outputs, "vision_hidden_states", None)
            last = getattr(outputs, "last_hidden_state", None) if last is None else last
            outputs[key] = values if last is None else (*values[:-1], last)
        elif key == "attentions" and isinstance(flags[key], list) and len(flags[key]) == 2:
            outputs[key], outputs[f"cross_{key}"] = values[0::2], values[1::2]
        else:
            outputs[key] = values
