"""What the programs of one pipeline share: the engine for the life of a model, and the context of one step."""

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from smp.comm.transport import Channel, Request
from smp.errors import CommError, StepError
from smp.pp.placed import current
from smp.pp.record import SpanKind
from smp.pp.simulate import Policy
from smp.pp.structure import Structure
from smp.rng import Streams, mix
from smp.topology import CommGroup

if TYPE_CHECKING:
    from smp.pp.cost import Costs
    from smp.pp.debug import Comparison
    from smp.pp.observe import Observers
    from smp.pp.placed import Value
    from smp.pp.program import Program
    from smp.pp.record import Measured, Recorder
    from smp.pp.schedule import ProgramCost
    from smp.pp.simulate import Plan
    from smp.pp.stages import StageMap
    from smp.pp.tape import Node
    from smp.runtime import Runtime


# Remembered results' structures. Python numbers are part of a signature, and some change with every step.
MAX_STRUCTURES = 1 << 14


class Engine:
    """Runs one model over the stages of this rank's pipeline group.

    `stages` says which stage owns which module, parameter and buffer; None until the model is partitioned, which the
    first call of the model, or the first use of one of its parameters, brings about through `partition`. `costs` are
    those of one microbatch, the same on every rank; None when the model was not or could not be traced.
    """

    def __init__(self, runtime: "Runtime", partition: Callable[[], "StageMap"], managed: Callable[[Any], bool]) -> None:
        self.rank = runtime.pp_rank
        self.num_stages = runtime.topology.pp_size
        self.device = runtime.device
        self.transport = runtime.transport
        self.moves = runtime.moves
        self.monitor = runtime.monitor
        self.ranks = runtime.group(CommGroup.PP_GROUP).ranks  # world rank of each stage
        self.stages: StageMap | None = None
        self.costs: Costs | None = None
        self.policy = Policy.INTERLEAVED
        self.forecast: str | None = None  # of a step, for people
        self.structures: dict[Any, Structure] = {}
        self._learned: list[Any] = []  # signatures of structures that the running step has added
        self.debug: Comparison | None = None
        self.recorder: Recorder | None = None  # while a timeline is active
        # Of the last step: its plan (None where it had none), what the plan was made from, how long actions took here.
        self.last_plan: Plan | None = None
        self.last_costs: Sequence[ProgramCost] = ()
        self.last_measured: Sequence[Measured] = ()
        self.backward: Callable[[list[Any], list[Any]], None] = _no_backward
        self._partition = partition
        self._managed = managed

    def owner_of(self, tensor: torch.Tensor) -> int | None:
        """The stage of a parameter or written buffer; None for any other tensor."""
        if self.stages is None:
            if not self._managed(tensor):
                return None
            self.stages = self._partition()
        return self.stages.owner_of(tensor)

    def holders_of(self, tensor: torch.Tensor | None) -> tuple[int, ...]:
        """The stages that have a parameter's memory; none for any other tensor."""
        return self.stages.holders_of(tensor) if self.stages is not None else ()

    def end_step(self) -> None:
        """A step is over. Every rank of the pipeline has learned the same structures, in the same order, so all forget
        the same ones when there are too many."""
        self._learned.clear()
        while len(self.structures) > MAX_STRUCTURES:
            del self.structures[next(iter(self.structures))]

    def remember(self, signature: Any, structure: Structure) -> None:
        """Keep a result's structure."""
        if signature not in self.structures:
            self._learned.append(signature)
        self.structures[signature] = structure

    def step_failed(self) -> None:
        """A step has failed, on all stages: what it has learned, not every stage knows."""
        for signature in self._learned:
            del self.structures[signature]
        self._learned.clear()

    def buffer_versions(self, key: Any) -> "dict[str, tuple[torch.Tensor, int]]":
        """The buffers of a called module, by name, for `buffers_written`."""
        return self.stages.buffer_versions(key) if self.stages is not None else {}

    def buffers_written(self, key: Any, before: "dict[str, tuple[torch.Tensor, int]]") -> tuple[str, ...]:
        """Names of the buffers that a call has changed since `before`."""
        return self.stages.buffers_written(key, before) if before and self.stages is not None else ()

    def buffers_at_risk(self, key: Any, known: Structure | None) -> list[torch.Tensor]:
        """Buffers of a called module that a later microbatch may write while this call's graph holds them."""
        if self.stages is None or (known is not None and not known.buffers):
            return []
        return self.stages.buffers_at_risk(key, None if known is None else known.buffers)

    def adopt_written(self, name: str, owner: int) -> list[int]:
        """A module on `owner` has written that buffer. Returns ids of tensors whose values are old now."""
        assert self.stages is not None
        return self.stages.adopt_written(name, owner)

    def moves_buffer(self, name: str, owner: int) -> bool:
        """Whether that buffer was another stage's before `owner` wrote it."""
        return self.stages is not None and self.stages.stage_of[name] != owner

    def is_own_buffer(self, tensor: torch.Tensor) -> bool:
        return self.stages is not None and self.stages.is_buffer(tensor)

    def adopt_buffer(self, tensor: torch.Tensor, owner: int) -> bool:
        """A buffer of glue code was written on `owner`: it lives there from now on. False when it is no buffer."""
        return self.stages is not None and self.stages.adopt_buffer(tensor, owner)

    def observed(self, key: Any, observers: "Observers") -> "list[tuple[int, torch.nn.Module]]":
        """Those modules inside a called one that are observed, with their positions there."""
        return self.stages.observed(key, observers) if self.stages is not None else []

    def parameters_of(self, key: Any) -> list[torch.Tensor]:
        """The trainable parameters that a call reaches by itself: those of its module."""
        return self.stages.parameters_of(key) if self.stages is not None else []


def _nothing_to_watch(microbatch: int, passes_on: bool) -> None:
    pass


class Turns(Protocol):
    """Who runs when (see `smp.pp.executor`)."""

    def pause(self, program: "Program") -> None:
        """The program stands at a stop."""

    def park(self, program: "Program") -> None:
        """The program leaves the plan."""


class _NoTurns:
    def pause(self, program: "Program") -> None:
        pass

    park = pause


def _no_backward(tensors: list[Any], gradients: list[Any]) -> None:
    raise StepError("there is no DistributedModel whose backward could run.")


class Reach:
    """Which parameters unfinished nodes of the step can still reach.

    Counts nodes for each parameter. Once `seal` has said that no new forward is to come, a parameter whose count falls
    to zero is done, and `on_done` may reduce it while the rest of the backward still runs.
    """

    def __init__(self, on_done: Callable[[torch.Tensor], None]) -> None:
        self._on_done = on_done
        self._counts: dict[int, int] = {}  # by the parameter's id: hashing a tensor itself is slow
        self.sealed = False

    def add(self, node: "Node") -> None:
        for parameter in node.parameters:
            self._counts[id(parameter)] = self._counts.get(id(parameter), 0) + 1

    def release(self, node: "Node") -> None:
        for parameter in node.parameters:
            self._counts[id(parameter)] -= 1
            if self.sealed and not self._counts[id(parameter)]:
                self._on_done(parameter)

    def seal(self, parameters: list[torch.Tensor]) -> None:
        """No node will be added any more: those of `parameters` that nothing reaches are done already."""
        self.sealed = True
        for parameter in parameters:
            if not self._counts.get(id(parameter)):
                self._on_done(parameter)


@dataclass(slots=True)
class Written:
    """A plain tensor that a placed value was written into, and the stage that has its data."""

    tensor: "weakref.ref[torch.Tensor]"
    owner: int


class StepContext:
    """One step on this rank: messages under the step's tags, random streams, and who may still reach a parameter.

    `first` is the number of its first microbatch among all that the job has begun, the same on every stage: messages of
    a step that failed are not taken for those of later ones.
    """

    def __init__(self, engine: Engine, streams: Streams, seed: int, reach: Reach, first: int) -> None:
        self.engine = engine
        self.first = first
        self.streams = streams
        self.seed = seed
        self.reach = reach
        self.turns: Turns = _NoTurns()
        self.recorder = engine.recorder
        self.waited = 0.0  # seconds spent waiting for messages
        self.watch_state: Callable[[int, bool], None] = _nothing_to_watch
        self.entangled = ""  # why
        self.written: list[Written] = []
        self._written_by_id: dict[int, Written] = {}
        self._sends: list[Request] = []

    def note_written(self, tensor: torch.Tensor, value: "Value") -> None:
        """A placed value was written into a plain tensor: it is known on `value.owner` only, until the step ends."""
        self.entangle("a tensor that a microbatch writes is one that others can read")
        entry = self._written_by_id.get(id(tensor))
        if entry is None or entry.tensor() is not tensor:
            entry = self._written_by_id[id(tensor)] = Written(weakref.ref(tensor), value.owner)
            self.written.append(entry)
        entry.owner = value.owner
        if value.local is not None and value.local.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(value.local.data)

    def writer_of(self, tensor: torch.Tensor) -> int | None:
        """The stage that knows a plain tensor's data because a placed value was written into it; None for any other."""
        entry = self._written_by_id.get(id(tensor))
        return None if entry is None or entry.tensor() is not tensor else entry.owner

    def entangle(self, reason: str) -> None:
        """Microbatches depend on each other beyond their gradients, so their forwards must not be interleaved."""
        self.entangled = self.entangled or reason

    def end_turns(self) -> None:
        """Let go of what saw the programs run."""
        self.turns = _NoTurns()
        self.watch_state = _nothing_to_watch

    def root_seed(self, microbatch: int) -> int:
        return mix(self.seed, microbatch)

    def send(self, tensor: torch.Tensor, stage: int, tag: int, what: str) -> None:
        began = time.perf_counter()
        self._keep(self.engine.moves.isend(tensor, self.engine.ranks[stage], tag, Channel.MOVE))
        self._note_send(began, stage, what, tensor)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, stage: int, tag: int, what: str) -> torch.Tensor:
        buffer = torch.empty(shape, dtype=dtype, device=self.engine.device)
        request = self.engine.moves.irecv(buffer, self.engine.ranks[stage], tag, Channel.MOVE)
        self._wait(request, stage, what)
        return buffer

    def send_gradient(self, gradient: torch.Tensor | None, stage: int, tag: int) -> None:
        began = time.perf_counter()
        self._keep(self.engine.moves.isend_optional(gradient, self.engine.ranks[stage], tag))
        self._note_send(began, stage, "a gradient", gradient)

    def receive_gradient(self, shape: tuple[int, ...], dtype: torch.dtype, stage: int, tag: int) -> torch.Tensor | None:
        buffer = torch.empty(shape, dtype=dtype, device=self.engine.device)
        request = self.engine.moves.irecv_optional(buffer, self.engine.ranks[stage], tag)
        self._wait(request, stage, "a gradient")
        return request.value()

    def send_object(self, obj: Any, stage: int, tag: int) -> None:
        self.engine.transport.send_object(obj, self.engine.ranks[stage], tag, Channel.MOVE)

    def receive_object(self, stage: int, tag: int, what: str) -> Any:
        began = time.perf_counter()
        call = f"smp.step, {_where()}{what} from stage {stage}"
        obj = self.engine.transport.recv_object(self.engine.ranks[stage], tag, Channel.MOVE, call)
        self._note_wait(began, stage, what)
        return obj

    def _note_send(self, began: float, stage: int, what: str, tensor: torch.Tensor | None) -> None:
        program = current.program
        if self.recorder is not None and program is not None:
            nbytes = 0 if tensor is None else tensor.numel() * tensor.element_size()
            self.recorder.add(SpanKind.MOVE, program.index, 0, began, time.perf_counter(), what, stage, nbytes)

    def finish_sends(self) -> None:
        """Wait until every message of the step has left its buffer."""
        for request in self._sends:
            self._wait(request, self.engine.rank, "the end of a send")
        self._sends.clear()

    def _keep(self, request: Request) -> None:
        self._sends.append(request)
        if len(self._sends) > 8:
            self._sends = [pending for pending in self._sends if not pending.test()]

    def _wait(self, request: Request, stage: int, what: str) -> None:
        source = self.engine.ranks[stage]
        began = time.perf_counter()
        try:
            self.engine.monitor.wait(request.test, f"smp.step, {_where()}{what} from stage {stage}", [source])
        except CommError as error:
            if what in str(error):
                raise
            raise CommError(f"{_where()}{what}: {error}") from error
        self._note_wait(began, stage, what)

    def _note_wait(self, began: float, stage: int, what: str) -> None:
        now = time.perf_counter()
        self.waited += now - began
        program = current.program
        if self.recorder is not None and program is not None:
            self.recorder.add(SpanKind.WAIT, program.index, 0, began, now, what, stage)


def _where() -> str:
    program = current.program
    return f"microbatch {program.index}: " if program is not None else ""
