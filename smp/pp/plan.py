"""Decides the order of a step's work, and remembers it.

    first step of its kind     phase order, every program recorded
    after it                   journals -> segments -> simulate -> plan, agreed by all ranks of the model
    later steps                the plan; a program that does something else is parked, and the kind recorded anew

Steps are of one kind when the same function gets tensors of the same shapes in the same modes. What a step must not do
to be planned: let microbatches depend on each other while their forwards run (`StateWatch`, `StepContext.entangle`).
Such steps keep the phase order, in which the forward of a microbatch is never interrupted.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from types import CellType, FunctionType, ModuleType, NoneType
from typing import Any

import torch
from torch import nn

from smp import log
from smp.bootstrap import AUTOCAST_DEVICES
from smp.nested import flatten
from smp.pp.choose import best_plan
from smp.pp.journal import Journal
from smp.pp.schedule import ActionKind, index_programs
from smp.pp.segments import Cut, cut
from smp.pp.simulate import Plan, Policy
from smp.pp.stages import StageMap
from smp.rng import shared_states
from smp.runtime import Runtime
from smp.topology import CommGroup

MAX_KINDS = 256
# So many plans may fail on a kind of step before it keeps the phase order.
MAX_FAILURES = 3


@dataclass
class Known:
    """What is known of one kind of step: its plan, or none while it keeps the phase order.

    `single_backward`: every microbatch of the last one had one backward and no forward after it. Then a parameter that
    no unfinished node reaches is done, and its reduction may start while the step still runs.
    """

    plan: Plan | None
    cuts: list[Cut] = field(default_factory=list)
    single_backward: bool = False


class Planner:
    """The plans of one step function on this rank.

    Attributes:
        left: whether in the step before a program did something else than planned: on all stages of a pipeline alike,
            but not on all its tensor ranks, which have their own data.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: dict[Any, Known] = {}
        self._failures: dict[Any, int] = {}
        self._last: Any = None
        self.left = False

    def find(self, kind: Any) -> Known | None:
        """What is known of steps of this kind; None: to be recorded."""
        return self._known.get(kind)

    def note(self, kind: Any, single_backward: bool, left: bool) -> None:
        """A step of this kind has run; see `Known` and `left`."""
        self._last, self.left = kind, left
        if (known := self._known.get(kind)) is not None:
            known.single_backward = single_backward

    def learn(
        self, kind: Any, rt: Runtime, journals: Sequence[Journal], entangled: str, policies: Sequence[Policy]
    ) -> None:
        """Plan steps of this kind by the best of `policies`. A collective over the ranks of one model, which agree."""
        cuts: list[Cut] = []
        cached: dict[tuple[Any, ...], Cut] = {}
        for journal in journals:
            key = tuple(journal)
            if key not in cached:
                cached[key] = cut(journal, rt.topology.pp_size)
            cuts.append(cached[key])
        plan = None
        if not entangled and len(cuts) > 1:
            plan = best_plan([c.cost for c in cuts], rt, policies)
        digest = hashlib.sha256(repr((plan and plan.actions, [c.stops for c in cuts])).encode()).hexdigest()
        answers = rt.transport.all_gather_object(
            (digest, entangled), rt.group(CommGroup.MP_GROUP), "smp.step, the plan"
        )
        reason = next((answer[1] for answer in answers if answer[1]), "")
        if not reason and any(answer[0] != digest for answer in answers):
            reason = "ranks do different things in it"
        if not reason and plan is not None and rt.moves.in_order and not keeps_order(plan, cuts):
            reason = "values would be received in another order than they are sent, which this device cannot"
        if reason:
            log.info_rank0(
                "%s: microbatches run one phase after the other, which leaves stages idle, because %s",
                self._name,
                reason,
            )
        self._known[kind] = Known(None if reason else plan, cuts)
        if len(self._known) > MAX_KINDS:
            del self._known[next(iter(self._known))]

    def settle(self, left: bool) -> None:
        """Ahead of a step: `left` says whether any rank of the model left its plan in the step before. The others drop
        that plan with it, as all of them make the new one together.
        """
        self.left = False
        if not left:
            return
        kind = self._last
        self._failures[kind] = self._failures.get(kind, 0) + 1
        if self._failures[kind] < MAX_FAILURES:
            self._known.pop(kind, None)
            return
        self._known[kind] = Known(None)
        log.info_rank0(
            "%s: what it does changes from step to step, so its microbatches run one phase after the other", self._name
        )


def keeps_order(plan: Plan, cuts: Sequence[Cut]) -> bool:
    """Whether on every ordered pair of stages messages are received in the order in which they are sent.

    Messages without tags (NCCL's) are matched by their order alone.
    """
    indices = index_programs([c.cost for c in cuts])
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
    received: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for stage, row in enumerate(plan.actions):
        for kind, microbatch, number in row:
            if kind is ActionKind.WEIGHT:
                continue
            segment = indices[microbatch].segments[indices[microbatch].lookup[stage, kind, number]]
            messages = cuts[microbatch].cost.messages
            for message in segment.waits:
                received.setdefault((messages[message].source, stage), []).append((microbatch, message))
            for message, _ in segment.sends:
                sent.setdefault((stage, messages[message].dest), []).append((microbatch, message))
    return sent == received


def plain_values(arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What the plan of a step depends on among the arguments that are no tensors: flags, modes given by name, types.

    Not text inside of containers: that comes with the data. Ranks may differ in these (`verbose`, a logger), so the
    first one's count.
    """
    return tuple(
        value if isinstance(value, str) else tuple(_plain(leaf) for leaf in flatten(value, keep_tensorless=True)[0])
        for value in arguments.values()
    )


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return "tensor"
    return leaf if isinstance(leaf, bool | None) else f"{type(leaf).__module__}.{type(leaf).__qualname__}"


def kind_of(arguments: dict[str, Any], plain: tuple[Any, ...], count: int, stages: StageMap | None) -> Any:
    """What a plan depends on beside the step function; equal on all ranks of a pipeline."""
    leaves, spec = flatten(arguments, keep_tensorless=True)
    shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))
    autocast = [torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in AUTOCAST_DEVICES]
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast)
    return (count, spec, plain, shapes, None if stages is None else stages.modes, modes)


class StateWatch:
    """Sees whether the code between modules keeps state in the modules while a microbatch's forward runs, or draws from
    generators that steps know nothing of.

    If it does, another microbatch whose turn comes in the middle of that forward would see it. Looks at attributes, at
    globals and closures of the code of forwards, and at what lists, dicts, sets and other objects in them hold,
    to a depth. Modules of this stage are left out: running changes them, which is no matter. What the code between
    modules writes into them, another stage sees.
    """

    def __init__(self, stages: StageMap) -> None:
        self._modules: list[tuple[nn.Module, dict[str, Any]]] = []
        self._held: list[tuple[str, Any, Any]] = []  # what it is of, the container, what that held, or how much
        self._globals: list[tuple[str, dict[str, Any], dict[str, Any]]] = []  # of which code, all, those that it names
        self._seen: set[int] = set()
        self._draws = shared_states()
        for name, module in stages.root.named_modules():
            if stages.assignment.get(name) != stages.rank:
                self._note_module(module)

    def changed(self) -> str:
        """The name of what is another one than when the watch began; empty when there is none."""
        for module, before in self._modules:
            if _same(module.__dict__, before):
                continue
            now, before = _attributes(module.__dict__), _attributes(before)
            if not _same(now, before):
                names = [n for n in {**before, **now} if not _is(now.get(n, self), before.get(n, self))]
                return f"{type(module).__name__}.{' and '.join(names)} changes in its forward"
        if self._draws != shared_states():
            return "it draws random numbers from Python's or numpy's generator, which all microbatches share"
        for label, variables, named in self._globals:
            if not all(_is(variables.get(name), value) for name, value in named.items()):
                return f"a global variable that {label} uses changes in its forward"
        return next((f"{label} changes in its forward" for label, now, old in self._held if not _same(now, old)), "")

    def _note_module(self, module: nn.Module) -> None:
        attributes = module.__dict__.copy()
        self._modules.append((module, attributes))
        for name, value in _attributes(attributes).items():
            if isinstance(value, FunctionType):
                self._note_code(f"{type(module).__name__}.{name}", value, _DEPTH)
            elif name in _CHILDREN or name not in _OF_EVERY_MODULE:
                self._note(f"{type(module).__name__}.{name}", value, _DEPTH)
        if isinstance(getattr(type(module), "forward", None), FunctionType):  # a scripted module has none
            self._note_code(f"{type(module).__name__}.forward", type(module).forward, _DEPTH)

    def _note_code(self, label: str, function: Any, depth: int) -> None:
        """Global variables and closures of a function, and of those that it calls in the same package."""
        package = _package(function)
        if id(function.__code__) in self._seen or package in ("torch", "smp"):
            return
        self._seen.add(id(function.__code__))
        variables, code = function.__globals__, function.__code__
        named = {name: variables[name] for name in code.co_names if name in variables}
        self._globals.append((label, variables, named))
        cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
        for value in [*named.values(), *cells]:
            if not isinstance(value, FunctionType):
                self._note(f"what {label} uses", value, _DEPTH)
            elif depth and _package(value) == package:
                self._note_code(label, value, depth - 1)

    def _note(self, label: str, value: Any, depth: int) -> None:
        held = value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", None)
        if not isinstance(held, _CONTAINERS) or isinstance(value, _NOT_FOLLOWED) or id(held) in self._seen:
            return
        self._seen.add(id(held))
        large = len(held) > _MAX_HELD
        self._held.append((label, held, len(held) if large else held.copy()))
        if depth and not large:
            for entry in held.values() if isinstance(held, dict) else held:
                if type(entry) not in _PLAIN:
                    self._note(label, entry, depth - 1)


_DEPTH = 4
_MAX_HELD = 1000  # of more than so many things only the number is watched
_CONTAINERS = (list, dict, set, deque)
_PLAIN = frozenset((int, float, str, bool, NoneType))  # hold nothing
_CHILDREN = ("_parameters", "_buffers", "_modules")
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_OURS = frozenset(("_call_impl", "forward", "_orig_forward"))  # put there by steps and by checkpointing
_NOT_FOLLOWED = (torch.Tensor, nn.Module, type, ModuleType, FunctionType, logging.Logger)


def _package(function: FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]


def _attributes(of_module: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in of_module.items() if name not in _OURS}


def _same(now: Any, before: Any) -> bool:
    if isinstance(before, int):
        return len(now) == before
    if len(now) != len(before):
        return False
    # Mostly nothing has changed, and loops in C see that: this runs at every edge of the first steps.
    if isinstance(now, dict):
        if all(map(is_, now, before)) and all(map(is_, now.values(), before.values())):
            return True
        return now.keys() == before.keys() and all(_is(value, before[name]) for name, value in now.items())
    if isinstance(now, set):
        return {*map(id, now)} == {*map(id, before)}
    return all(map(is_, now, before)) or all(map(_is, now, before))


def _is(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)
