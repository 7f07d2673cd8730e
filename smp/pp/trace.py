"""What one microbatch does in a model, found by running it once on fake tensors: order of calls, shapes and costs.

    real model, parameters on any device, also without memory
      1. a copy of the module tree whose parameters and buffers are fake: nothing that the model does to itself stays
      2. its forward, under a meter (see meter.py) that charges each operation to a module
      3. `Costs`

A module that fails on fake tensors is opaque: it is taken to return something like its first tensor argument, is not
taken apart, and is estimated from the size of its parameters. When its caller fails too, because of that guess or by
itself, the caller is opaque in turn. A model of which more than half would be opaque cannot be traced.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from smp import log
from smp.bootstrap import default_generators
from smp.nested import map_leaves
from smp.pp.cost import ZERO, Costs, ModuleCost
from smp.pp.intercept import checkpoint_replaced
from smp.pp.meter import Ledger, Meter, survey
from smp.pp.placed import Placed
from smp.pp.tree import ancestors, is_inside
from smp.rng import restore_shared, shared_states

_tracing = False
_TORCH_LOG = logging.getLogger("torch._subclasses.fake_tensor")

# Says of a module whether its activations are recomputed in the backward (activation checkpointing).
Recomputed = Callable[[nn.Module], bool]


def is_tracing() -> bool:
    """Whether the model is being run to learn its structure and its costs (`smp.is_tracing`)."""
    return _tracing


@contextmanager
def tracing() -> Iterator[None]:
    """Inside, `is_tracing` holds; random generators stand afterwards where they stood before."""
    global _tracing
    states = [(generator, generator.get_state()) for generator in default_generators()]
    shared = shared_states()
    level = _TORCH_LOG.level
    _TORCH_LOG.setLevel(logging.CRITICAL)  # what fails is dealt with, and told in one line
    _tracing = True
    try:
        yield
    finally:
        _tracing = False
        _TORCH_LOG.setLevel(level)
        restore_shared(shared)
        for generator, state in states:
            generator.set_state(state)


@log.long_phase("trace")
def trace(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device | None = None,
    recomputed: Recomputed = lambda module: False,
) -> Costs | None:
    """The costs of one call `module(*args, **kwargs)`, training; None, with a warning, when it cannot run on fake
    tensors.

    Needs no memory for parameters and takes none. The result is the same on every rank and in every run.

    Args:
        module: the model. Its parameters may be anywhere, also on the meta device.
        args, kwargs: real tensors (of which only shapes count) or placed ones.
        device: where the model will run; None: where its first parameter is, the CPU if that is the meta device.
        recomputed: which modules recompute their activations.
    """
    device = _device_of(module) if device is None else device
    error: Exception | None = None
    for with_grad in (True, False):  # what was written for no_grad may write to what autograd protects
        try:
            with tracing():
                costs = _run(module, args, kwargs, device, recomputed, with_grad)
        except Exception as caught:
            error = error or caught
            continue
        if costs.opaque:
            log.info_rank0("%s", _describe_opaque(costs.opaque))
        return costs
    assert error is not None
    log.warn_once(
        "trace",
        "the model cannot be traced on fake tensors (%s: %s); it is partitioned by the sizes of its parameters, in the "
        "order of their definition",
        type(error).__name__,
        str(error).splitlines()[0] if str(error) else "",
    )
    return None


def _run(
    module: nn.Module, args: Any, kwargs: Any, device: torch.device, recomputed: Recomputed, with_grad: bool
) -> Costs:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.inference_mode(False):
        with mode:
            known = {id(t): _fake_twin(t, device) for t in _tensors(module)}
        twin = twin_of(module, known)
        args, kwargs = map_leaves(own_copy, (args, kwargs))
    with mode, torch.inference_mode(False):
        names = {name for name, part in module.named_modules() if recomputed(part)}
        ledger = Ledger(survey(twin), device.type, names.__contains__)
        for name, child in list(twin.named_modules()):
            child.__dict__["_call_impl"] = _metered(ledger, name, child)
        fake_args, fake_kwargs = map_leaves(lambda leaf: _fake(mode, leaf), (args, kwargs))
        saving = torch.autograd.graph.saved_tensors_hooks(ledger.save, lambda tensor: tensor)
        with torch.set_grad_enabled(with_grad), saving, checkpoint_replaced(ledger.checkpoint), Meter(ledger):
            output = twin(*fake_args, **fake_kwargs)
        ledger.finish(output)
    return replace(_settled(ledger, list(module.named_modules()), with_grad), recomputed=frozenset(names))


def _metered(ledger: Ledger, name: str, module: nn.Module) -> Callable[..., Any]:
    """A module's call, entered in the ledger; what it returns is guessed when it fails."""
    inner = type(module)._call_impl.__get__(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        depth, recomputing = len(ledger.stack), ledger.recomputing
        ledger.enter(name, (args, kwargs))
        try:
            output = inner(*args, **kwargs)
        except Exception as error:
            guess = _first_tensor(args, kwargs)
            if guess is None or 2 * ledger.modules.sizes.get(name, 0) > ledger.modules.sizes.get("", 0):
                raise
            ledger.cannot_see(name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            output = guess
        ledger.leave(name, output, depth)
        ledger.recomputing = recomputing
        return output

    return call


def _first_tensor(args: Any, kwargs: Any) -> Tensor | None:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return next((t for t in tensors if t.is_floating_point()), None)


def _settled(ledger: Ledger, modules: list[tuple[str, nn.Module]], with_grad: bool) -> Costs:
    own, charged = ledger.frozen()
    if not with_grad:  # as if it were trained
        own, charged = ({n: _as_if_trained(c) for n, c in table.items()} for table in (own, charged))
    sizes = ledger.modules.sizes
    opaque = {
        name: reason
        for name, reason in ledger.opaque.items()
        if sizes.get(name) and not any(above in ledger.opaque for above in ancestors(name))
    }
    _estimate_opaque(own, charged, list(opaque))
    whole = set(opaque)
    for reader, owner in ledger.reads:  # takes its children's parameters instead of calling them
        if owner not in ledger.order and is_inside(owner, reader) and 2 * sizes[reader] <= sizes[""]:
            whole.add(reader)
    order = [name for name in ledger.order if not any(above in opaque for above in ancestors(name))]
    known = {name for name, _ in modules}
    near = {name: leaf for name, leaf in ledger.near.items() if name in known}
    return Costs(tuple(order), own, charged, near, frozenset(whole), opaque, shapes=ledger.shapes)


def _as_if_trained(cost: ModuleCost) -> ModuleCost:
    weight = cost.forward if cost.parameter_bytes else 0.0
    return replace(cost, backward=2 * cost.forward, weight=weight)


def _estimate_opaque(own: dict[str, ModuleCost], charged: dict[str, ModuleCost], opaque: list[str]) -> None:
    """What could not be seen costs, for each byte of its parameters, what the rest of the model does."""
    inside = {name for name in {*own, *charged} if any(is_inside(name, outer) for outer in opaque)}
    seen = [cost for name, cost in charged.items() if name not in inside and cost.flops]
    total = sum(seen, ZERO)
    for name in inside:
        calls = own[name].calls if name in own else 0
        out = own[name].output_bytes if name in own else 0
        nbytes = (own.get(name) or charged[name]).parameter_bytes
        share = nbytes / total.parameter_bytes if total.parameter_bytes else 0.0
        estimate = replace(
            total.scaled(share, share),
            parameter_bytes=nbytes,
            activation_bytes=int(total.activation_bytes * share),
            flops=int(total.flops * share),
            output_bytes=out,
            calls=calls,
        )
        own[name] = estimate
        if name in charged:
            charged[name] = estimate


def _describe_opaque(opaque: dict[str, str]) -> str:
    first, reason = next(iter(opaque.items()))
    more = f" and {len(opaque) - 1} more" if len(opaque) > 1 else ""
    return (
        f"trace: module '{first}'{more} cannot be looked into ({reason}): each stays on one stage, and its cost is "
        "estimated from the size of its parameters"
    )


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _held_tensors(module: nn.Module) -> list[Tensor]:
    """Those in plain attributes of modules: a real tensor cannot be copied among fake ones."""
    return [value for child in module.modules() for value in vars(child).values() if isinstance(value, Tensor)]


def _device_of(module: nn.Module) -> torch.device:
    device = next((t.device for t in _tensors(module)), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _fake_twin(tensor: Tensor, device: torch.device) -> Tensor:
    fake = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def twin_of(module: nn.Module, known: dict[int, Any]) -> nn.Module:
    """A copy of a module tree that has the tensors of `known`, by id of the original, in their places.

    Results of earlier computations that modules keep as attributes are copied without their history.
    """
    for part in module.modules():
        for value in part.__dict__.values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                known[id(value)] = value.detach().clone()
    return copy.deepcopy(module, known)


def own_copy(leaf: Any) -> Any:
    """An object that the model may write to (a cache), copied; as it is where it cannot be copied. Tensors are not
    copied."""
    if isinstance(leaf, Tensor):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:  # anything can go wrong in a stranger's __deepcopy__
        return leaf


def _fake(mode: FakeTensorMode, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if type(leaf) is Placed:
        value = leaf.value
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.program.device)
    if leaf.layout is not torch.strided or type(leaf) not in (Tensor, nn.Parameter):
        return mode.from_tensor(leaf.detach())
    fake = torch.empty_strided(tuple(leaf.shape), leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return fake.requires_grad_(leaf.requires_grad)
