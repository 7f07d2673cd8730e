"""Measured costs in place of nominal ones: one microbatch, module by module, on this rank's real parameters.

    copy of the module tree that shares the parameters (no memory) and has buffers of its own
      each leaf call:  forward, timed  ->  backward of its outputs into its inputs and parameters, timed
                       ->  detached outputs for what comes next

Nothing that the run does stays: gradients are computed aside, buffers are copies, and random generators are set back.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from smp import log
from smp.nested import map_leaves
from smp.pp.cost import ZERO, Costs, ModuleCost
from smp.pp.meter import storage_key
from smp.pp.placed import Placed
from smp.pp.trace import own_copy, tracing, twin_of
from smp.pp.tree import has_parameters, is_inside

_REPEATS = 2  # the first run of an operation also reserves memory and loads code; the faster one counts


@log.long_phase("trace (measuring)")
def measure(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], costs: Costs, times: bool, memory: bool
) -> Costs | None:
    """Costs with measured seconds and activation bytes; None, with a warning, when the model cannot be run.

    What leaves do is measured; what the code around them does keeps its nominal cost, scaled as the leaves were.
    Modules that a trace could not look into are measured as a whole.

    Args:
        module: the model, with all of its parameters.
        args, kwargs: of one call.
        costs: nominal ones of the same call.
        times: whether seconds are measured.
        memory: whether the bytes kept for the backward are.
    """
    if any(t.is_meta for t in module.parameters()):
        log.warn_once(
            "measure",
            "trace_execution_times and trace_memory_usage need parameters with memory, and those of this model are "
            "delayed: costs are computed, not measured",
        )
        return None
    found: dict[str, list[ModuleCost]] = {}
    try:
        with tracing(), torch.inference_mode(False), torch.enable_grad():
            twin = twin_of(module, {id(p): p for p in module.parameters()})
            for name, part in _measured_parts(twin, costs):
                part.__dict__["_call_impl"] = _timed(name, part, found)
            device = next((p.device for p in module.parameters()), torch.device("cpu"))
            given = map_leaves(lambda leaf: _real(leaf, device), (args, kwargs))
            twin(*given[0], **given[1])
    except Exception as error:
        log.warn_once(
            "measure",
            "the model cannot be measured module by module (%s: %s): costs are computed, not measured",
            *(type(error).__name__, str(error).splitlines()[0] if str(error) else ""),
        )
        return None
    return _merged(costs, {name: sum(calls, ZERO) for name, calls in found.items()}, times, memory)


def _measured_parts(root: nn.Module, costs: Costs) -> list[tuple[str, nn.Module]]:
    """The modules that a partition moves as one piece: leaves, and what it does not take apart."""
    parts: list[tuple[str, nn.Module]] = []
    for name, module in root.named_modules():
        if any(is_inside(name, outer) for outer, _ in parts) or not has_parameters(module):
            continue
        if name in costs.whole or not any(has_parameters(child) for child in module.children()):
            if type(module).forward is not nn.Module.forward:
                parts.append((name, module))
    return parts


def _timed(name: str, module: nn.Module, found: dict[str, list[ModuleCost]]) -> Callable[..., Any]:
    inner = type(module)._call_impl.__get__(module)
    weights = [p for p in module.parameters() if p.requires_grad]

    def call(*args: Any, **kwargs: Any) -> Any:
        runs: list[ModuleCost] = []
        states = torch.get_rng_state()
        for _ in range(_REPEATS):
            torch.set_rng_state(states)
            inputs: list[Tensor] = []
            given = tree_map(functools.partial(_leaf, inputs), (args, kwargs))
            kept = _Kept(module)
            _wait()
            begin = time.perf_counter()
            with torch.autograd.graph.saved_tensors_hooks(kept.save, lambda tensor: tensor):
                output = inner(*given[0], **given[1])
            _wait()
            forward = time.perf_counter() - begin
            backward, weight = _backward_times(output, inputs, weights)
            runs.append(ModuleCost(forward, backward, weight, activation_bytes=kept.total))
        fastest = min(runs, key=lambda run: run.seconds)
        found.setdefault(name, []).append(replace(fastest, calls=1))
        return tree_map(
            lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if _floating(leaf) else leaf, output
        )

    return call


def _leaf(inputs: list[Tensor], leaf: Any) -> Any:
    """A tensor as an input that is no leaf (it may be written to), noted when it needs a gradient."""
    if not isinstance(leaf, Tensor):
        return leaf
    fresh = leaf.detach()
    if _floating(leaf) and leaf.requires_grad:
        inputs.append(fresh.requires_grad_())
    return fresh.clone()


def _backward_times(output: Any, inputs: list[Tensor], weights: list[nn.Parameter]) -> tuple[float, float]:
    """Seconds of the backward, and the part of them that is gradients of parameters."""
    results = [t for t in tree_leaves(output) if _floating(t) and t.requires_grad]
    if not results:
        return 0.0, 0.0
    seeds = [torch.ones_like(t) for t in results]
    whole = _time_of_gradients(results, [*inputs, *weights], seeds)
    if not inputs:
        return whole, whole
    return whole, max(0.0, whole - _time_of_gradients(results, list(inputs), seeds))


def _time_of_gradients(results: list[Tensor], wanted: list[Tensor], seeds: list[Tensor]) -> float:
    _wait()
    begin = time.perf_counter()
    torch.autograd.grad(results, wanted, seeds, retain_graph=True, allow_unused=True)
    _wait()
    return time.perf_counter() - begin


class _Kept:
    """Counts what the forward keeps, parameters apart."""

    def __init__(self, module: nn.Module) -> None:
        self._known = {storage_key(p) for p in module.parameters()}
        self._held: list[Tensor] = []
        self.total = 0

    def save(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in self._known:
            self._known.add(key)
            self._held.append(tensor)
            self.total += tensor.untyped_storage().nbytes()
        return tensor


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _real(leaf: Any, device: torch.device) -> Any:
    """The argument on the model's device; one that lives on another stage is made up."""
    if type(leaf) is Placed:
        value = leaf.value
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device).fill_(1)
    return leaf.detach().to(device) if isinstance(leaf, Tensor) else own_copy(leaf)


def _merged(costs: Costs, found: dict[str, ModuleCost], times: bool, memory: bool) -> Costs:
    """`costs` with what was found; each measured piece hands its share down to the modules in it."""
    piece_of = {name: next((at for at in found if is_inside(name, at)), None) for name in {*costs.own, *costs.charged}}
    inside = _sums(costs.own, piece_of)
    all_nominal = sum((cost for at, cost in inside.items() if at is not None), ZERO)
    all_found = sum(found.values(), ZERO)
    scale = _ratio(all_found.forward, all_nominal.forward), _ratio(all_found.backward, all_nominal.backward)

    def renewed(table: dict[str, ModuleCost]) -> dict[str, ModuleCost]:
        totals = _sums(table, piece_of)
        return {
            name: _renewed(cost, totals[piece_of[name]], inside.get(piece_of[name], ZERO), piece_of[name])
            for name, cost in table.items()
        }

    def _renewed(cost: ModuleCost, total: ModuleCost, within: ModuleCost, piece: str | None) -> ModuleCost:
        if piece is None:
            return cost.scaled(*scale) if times else cost
        now = found[piece]
        # What a piece is charged for beyond its own work, the code around it, keeps its nominal cost.
        if times:
            forward = now.forward + scale[0] * max(0.0, total.forward - within.forward)
            backward = now.backward + scale[1] * max(0.0, total.backward - within.backward)
            part = _ratio(cost.backward, total.backward)
            cost = replace(
                cost,
                forward=forward * _ratio(cost.forward, total.forward),
                backward=backward * part,
                weight=now.weight * part,
            )
        if memory:
            kept = now.activation_bytes + max(0, total.activation_bytes - within.activation_bytes)
            cost = replace(cost, activation_bytes=int(kept * _ratio(cost.activation_bytes, total.activation_bytes)))
        return cost

    return replace(costs, own=renewed(costs.own), charged=renewed(costs.charged), measured=times)


def _sums(table: dict[str, ModuleCost], piece_of: dict[str, str | None]) -> dict[str | None, ModuleCost]:
    sums: dict[str | None, ModuleCost] = {}
    for name, cost in table.items():
        sums[piece_of[name]] = sums.get(piece_of[name], ZERO) + cost
    return sums


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
