"""`smp.step`: one call of the user's function per microbatch."""

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from smp import activation, log, rng, runtime
from smp.errors import StepError
from smp.nested import flatten, map_leaves
from smp.pp import stages as stages_mod
from smp.pp.choose import policies_of
from smp.pp.engine import Engine, Reach, StepContext
from smp.pp.executor import Turns
from smp.pp.forecast import forecast
from smp.pp.inputs import place_arguments, share_arguments, share_outputs, share_written
from smp.pp.intercept import intercepted
from smp.pp.microbatch import merge_outputs, split_arguments
from smp.pp.placed import current
from smp.pp.plan import Known, Planner, StateWatch, kind_of, plain_values
from smp.pp.program import Program
from smp.pp.schedule import Action, ActionKind, phase_order
from smp.pp.simulate import Policy
from smp.runtime import Runtime
from smp.topology import CommGroup
from smp.tp.watch import PartWatch


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: dict[str, int] | None = None,
    detach_outputs: bool = True,
    microbatches: int | None = None,
) -> Any:
    """Decorator: run `function` once per microbatch.

    Only inside it may a pipelined model be called, and only there `model.backward`. Tensor arguments, also inside
    containers, are split into equal parts on axis 0.

    Args:
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: argument name -> the axis it is split on, where that is not 0.
        detach_outputs: take returned tensors out of the autograd graph. False has an effect with pipeline degree 1
            only: with more stages no graph outlives the step.
        microbatches: how many, for this function; by default the configured number.

    Returns:
        The decorated function. It returns what `function` returns, each tensor as a `StepOutput`, each other leaf as a
        list over microbatches; every rank of a pipeline group gets the same.

    Raises:
        StepError: an argument that does not divide, a step inside a step, a name that is no parameter of `function`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        stepped = _StepFunction(function, non_split_inputs, input_split_axes, detach_outputs, microbatches)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return stepped(args, kwargs)

        return call

    return decorate if function is None else decorate(function)


class _StepFunction:
    def __init__(
        self,
        function: Callable[..., Any],
        non_split: Sequence[str] | None,
        axes: dict[str, int] | None,
        detach_outputs: bool,
        microbatches: int | None,
    ) -> None:
        self._function = function
        self._signature = inspect.signature(function)
        self._non_split = tuple(non_split or ())
        self._axes = dict(axes or {})
        self._detach = detach_outputs
        self._microbatches = microbatches
        self._check_names()
        self._planner = Planner(function.__qualname__)
        self._watched = False  # for parts of split parameters, in the first run
        self._durations: list[float] = []  # of the first three training steps, in seconds

    def _check_names(self) -> None:
        parameters = self._signature.parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return
        unknown = [name for name in (*self._non_split, *self._axes) if name not in parameters]
        if unknown:
            raise StepError(
                f"smp.step was given the argument names {unknown}, but {self._function.__qualname__} has "
                f"{list(parameters)}."
            )
        if self._microbatches is not None and self._microbatches < 1:
            raise StepError(f"smp.step(microbatches={self._microbatches}): must be at least 1.")

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rt = runtime.get()
        if current.streams is not None:
            raise StepError("a step function was called inside a step function.")
        count = self._microbatches or rt.config.microbatches
        bound = self._signature.bind(*args, **kwargs)
        variadic = next((p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        arguments = dict(bound.arguments)
        extra = arguments.pop(variadic, {}) if variadic else {}

        def body(parts: dict[str, Any]) -> Any:
            given: Any = {name: value for name, value in parts.items() if name not in extra}
            call = inspect.BoundArguments(self._signature, given)
            return self._function(*call.args, **call.kwargs, **{k: parts[k] for k in extra})

        begin = time.monotonic()
        with rng.preserved_after_draw() as seed, ExitStack() as stack:
            if not self._durations:
                stack.enter_context(log.long_phase("the first step"))
            try:
                if rt.topology.pp_size > 1:
                    outputs = self._run_pipeline(rt, {**arguments, **extra}, count, seed, body, stack)
                else:
                    outputs = self._run_plain(rt, {**arguments, **extra}, count, seed, body, stack)
            except BaseException:
                if rt.model is not None:
                    rt.model._step_failed()
                    if rt.model.engine.recorder is not None:
                        rt.model.engine.recorder.drop_step()
                raise
        result = merge_outputs(outputs)
        if rt.model is not None:
            rt.model._after_step()
            if rt.model._had_backward:
                self._note_duration(rt, time.monotonic() - begin)
        return result

    def _note_duration(self, rt: Runtime, seconds: float) -> None:
        """After the third training step, say what the first one cost beyond it."""
        if len(self._durations) < 3:
            self._durations.append(seconds)
            if len(self._durations) == 3:
                first, _, third = self._durations
                log.info_rank0("the first step took %.2f s, %.2f s more than the third", first, first - third)
                _report_forecast(rt, third)

    # -- one stage -----------------------------------------------------------------------------------------------------

    def _run_plain(
        self, rt: Runtime, arguments: dict[str, Any], count: int, seed: int, body: Callable[..., Any], stack: ExitStack
    ) -> list[Any]:
        parts = split_arguments(arguments, count, self._non_split, self._axes)
        _check_batch(rt, arguments)
        if rt.tp_size > 1:
            group = rt.group(CommGroup.TP_GROUP)
            seed = rt.transport.broadcast_object(seed, group, group.ranks[0], "smp.step")
        streams = rng.Streams(_salt(rt))
        seed = rng.mix(seed, rt.rdp_rank)
        model = rt.model
        recorder = None if model is None else model.engine.recorder
        if model is not None:
            stack.enter_context(stages_mod.replaced_calls(stages_mod.scopes(model.module)))
            stack.enter_context(intercepted(model._backward_tensors))
            model._begin_step(self, count)
        if rt.tp_size > 1 and not self._watched:
            stack.enter_context(PartWatch())
        outputs = []
        current.streams = streams
        try:
            for k, part in enumerate(parts):
                streams.seed(rng.mix(seed, k))
                if model is not None:
                    model._begin_microbatch(k)
                if recorder is not None:
                    recorder.begin_microbatch(k)
                output = body(part)
                if recorder is not None:
                    recorder.end_microbatch()
                outputs.append(_detached(output) if self._detach else output)
        finally:
            current.streams = None
        self._watched = True
        if model is not None:
            model._end_step()
        if recorder is not None:
            recorder.end_step()
        return outputs

    # -- several stages ------------------------------------------------------------------------------------------------

    def _run_pipeline(
        self, rt: Runtime, arguments: dict[str, Any], count: int, seed: int, body: Callable[..., Any], stack: ExitStack
    ) -> list[Any]:
        model = rt.model
        if model is None:
            raise StepError(
                "with pipeline_parallel_degree > 1, make the smp.DistributedModel before calling a step function."
            )
        engine: Engine = model.engine
        parts, seed, plain, first = self._share(rt, engine, arguments, count, seed)
        streams = rng.Streams(_salt(rt))
        reach = Reach(model._parameter_done)
        context = StepContext(engine, streams, rng.mix(seed, rt.rdp_rank), reach, first)
        programs = [Program(k, engine, context) for k in range(count)]
        # The last backward reduces gradients while it still runs: parameter by parameter, not stage by stage.
        programs[-1].joins_calls = rt.dp_size == 1
        model._begin_step(self, count)
        if engine.stages is not None:
            engine.stages.begin_step()
        stack.enter_context(intercepted(model._backward_tensors))
        model._calls_replaced = stack.enter_context(ExitStack())
        model._replace_calls()

        kind = kind_of(parts[0], plain, count, engine.stages)
        known = self._planner.find(kind)
        actions = self._prepare(rt, programs, known, count)
        backwards_only = max((i + 1 for i, a in enumerate(actions) if a.kind is ActionKind.FORWARD), default=0)

        def before(position: int) -> None:
            forwards_over = position >= backwards_only and all(p.had_one_backward for p in programs)
            if forwards_over and known is not None and known.single_backward and not (turns.left_plan or reach.sealed):
                model._seal(reach)  # not by the plan alone: where it has no work, a program may still do some
            if rt.config.offload_activations:
                soon = actions[position + 1 : position + 1 + rt.config.activation_loading_horizon]
                activation.prefetch([a.microbatch for a in soon if a.kind is ActionKind.BACKWARD])

        turns = Turns(programs, lambda k: body(place_arguments(programs[k], parts[k])), actions, before)
        context.turns = turns
        try:
            outputs = turns.run()
        finally:
            context.end_turns()
        engine.last_measured = turns.measured
        if known is None and engine.debug is None:
            kind = kind_of(parts[0], plain, count, engine.stages)  # the first step makes the stages
            journals = [program.course.journal or [] for program in programs]
            self._planner.learn(kind, rt, journals, context.entangled, _policies(rt, engine))
        self._planner.note(kind, all(p.had_one_backward for p in programs), turns.left_plan)
        for program in programs:
            program.leave_plan()
            program.tape.clear()
        shared = share_outputs(engine, programs, outputs)
        context.finish_sends()
        if engine.stages is not None:
            stages_mod.settle_buffers(engine.stages)
        share_written(engine, rt.group(CommGroup.PP_GROUP), programs, context.written)
        engine.end_step()
        model._end_step()
        if context.recorder is not None:
            context.recorder.end_step(engine.last_plan)
        return shared

    def _prepare(self, rt: Runtime, programs: list[Program], known: Known | None, count: int) -> Sequence[Action]:
        """Let the programs follow the plan, or be recorded for one. Returns the order of this rank's actions."""
        engine, context = programs[0].engine, programs[0].step
        engine.last_plan = known.plan if known is not None else None
        engine.last_costs = [cut.cost for cut in known.cuts] if known is not None else ()
        if known is not None and known.plan is not None:
            late = any(action.kind is ActionKind.WEIGHT for row in known.plan.actions for action in row)
            for program, cut in zip(programs, known.cuts, strict=True):
                program.follow(cut, late)
            return known.plan.actions[engine.rank]
        if known is None and engine.debug is None:
            for program in programs:
                program.course.journal = []
            context.watch_state = _Watch(context)
        return phase_order(count, rt.config.active_microbatches)

    def _share(
        self, rt: Runtime, engine: Engine, arguments: dict[str, Any], count: int, seed: int
    ) -> tuple[list[dict[str, Any]], int, tuple[Any, ...], int]:
        """The microbatches' arguments; the seed, the plain values and the first microbatch's number that all ranks go
        by. Settles whether the plan of the step before is dropped."""
        problem = None
        agreed = _Agreed(seed, plain_values(arguments), rt.transport.num_microbatches, self._planner.left)
        if engine.rank == 0:
            if rt.tp_size > 1:
                agreed = _agree(rt, agreed, arguments)
            try:
                _check_batch(rt, arguments)
                split_arguments(arguments, count, self._non_split, self._axes)
            except StepError as error:
                problem = str(error)
        group = rt.group(CommGroup.PP_GROUP)
        shared, agreed = share_arguments(engine, group, arguments, problem, agreed)
        self._planner.settle(agreed.left)
        rt.transport.num_microbatches = agreed.first + count
        parts = split_arguments(shared, count, self._non_split, self._axes)
        return parts, agreed.seed, agreed.plain, agreed.first


class _Agreed(NamedTuple):
    """What the ranks of a model go by in a step.

    Attributes:
        seed: of its random numbers.
        plain: what of the arguments a plan depends on.
        first: the number of its first microbatch.
        left: whether a program left the plan of the step before.
    """

    seed: int
    plain: tuple[Any, ...]
    first: int
    left: bool


def _agree(rt: Runtime, mine: _Agreed, arguments: dict[str, Any]) -> _Agreed:
    """The first tensor rank's, and what only all of them know: whether any has left the plan, and the shapes of their
    batches where these differ, so that what is a new kind of step to one of them is new to all.
    """
    leaves, _ = flatten(arguments, keep_tensorless=True)
    shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))
    answers = rt.transport.all_gather_object((mine, shapes), rt.group(CommGroup.TP_GROUP), "smp.step")
    given = tuple(shapes for _, shapes in answers)
    first = answers[0][0]
    plain = first.plain if len(set(given)) == 1 else (*first.plain, given)
    return first._replace(plain=plain, left=any(other.left for other, _ in answers))


def _policies(rt: Runtime, engine: Engine) -> list[Policy]:
    """What to plan steps by: under "auto", the one that the layout was chosen for, unless the simplest does as well."""
    return list(dict.fromkeys([policies_of(rt.config.pipeline)[0], engine.policy]))


def _report_forecast(rt: Runtime, seconds: float) -> None:
    """Say how well the plan of the step before explains the time it took."""
    planned = forecast(rt, rt.model.engine) if rt.topology.pp_size > 1 else None
    if planned is not None:
        log.info_rank0(
            "schedule %s: %.1f ms forecast from the times of its actions, %.1f ms measured; the busiest stage idles "
            "%.0f %% of it",
            planned.policy.value,
            1e3 * planned.step_time,
            1e3 * seconds,
            100 * planned.bubble,
        )


class _Watch:
    """Watches for state that the code between modules keeps, once there are stages.

    What the first microbatch sets up is there for all later ones; from then on nothing may change.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._state: StateWatch | None = None
        self._is_first = True

    def __call__(self, microbatch: int, passes_on: bool) -> None:
        """At every edge. `passes_on`: another microbatch may run next."""
        stages = self._context.engine.stages
        if self._context.entangled or stages is None:
            return
        self._is_first = self._is_first and microbatch == 0
        if self._is_first and not passes_on:
            return  # nobody else has run, and a watch takes long to make
        if self._is_first or self._state is None:
            self._state = StateWatch(stages)
        else:
            self._context.entangle(self._state.changed())


def _salt(rt: Runtime) -> int:
    """Ranks of a tensor-parallel group that have batches of their own draw from streams of their own."""
    return rng.part_salt(0 if rt.config.prescaled_batch else rt.tp_rank)


def _check_batch(rt: Runtime, arguments: dict[str, Any]) -> None:
    """Now and then, see that each rank was given the batch it should get (not where batches run out unevenly)."""
    if rt.model is not None and torch.is_grad_enabled() and not rt.model.joining:
        leaves, _ = flatten(arguments, keep_tensorless=True)
        rt.model.check_batch([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])


def _detached(output: Any) -> Any:
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output)
