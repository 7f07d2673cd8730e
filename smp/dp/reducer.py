"""The gradient reducer: mean over the data-parallel ranks, overlapped with the backward pass.

A **pass** is one backward over all microbatches of a batch. A **window** is `backward_passes_per_step` passes; the last
pass of a window is reduced, the others only accumulate.

    IDLE --begin(reduce=False)--> ACCUMULATING --finish--> IDLE         `pending` from here on
    IDLE --begin(reduce=True)---> REDUCING ------finish--> IDLE
                                     | a parameter is done: its bucket has one open member less
                                     | bucket `head` has none left: launch it, go on to the next

Buckets are launched strictly by number on every rank, whatever order parameters become done in, since the ranks'
collectives must meet. Who says that a parameter is done:

- the pipeline engine, with `mark_done`, from the tape;
- without a pipeline, hooks on the parameters: one is done when it has received as many gradients in the pass's last
  microbatch as in the pass before of the same step function. Until that is known, and for parameters that got none, at
  the end of the pass.

Gradients are means at rest: reducing `old + new`, where `old` is already the same everywhere, leaves `old` as it is.
For parameters of distributed modules, whose local gradient is the sum over the tensor-parallel group's batches, that
holds because the missing factor is applied to what arrives, not to what is there (`_scale_arriving`).

The gradient of a tied weight that several stages hold is summed over them as well, in buckets of their own. These come
last, in the same order on all stages, and only when the pass ends: until then a stage must not wait for another one.
At rest the sum is on every holder; so when a window begins, all but the first holder drop what is there, else it would
count once for each of them.

With sharded optimizer state a gradient is reduced to the parameter's owner alone, in buckets of one owner each, and
the others drop theirs. At rest the mean is on one rank, so it is set aside while a window runs and added afterwards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from smp import log, runtime
from smp.dp.aside import Aside
from smp.dp.bucket_plan import content, is_agreed, plan_buckets
from smp.dp.buckets import completion_order
from smp.dp.comm_hook import Hook, HookedReduction
from smp.dp.ownership import Ownership
from smp.dp.reduction import Member, Reduction, all_reduce, wait
from smp.dp.tied import TiedGroup
from smp.dp.uneven import Kind, UnevenInputs
from smp.errors import StepError, UsageError
from smp.groups import Group
from smp.pp.weights import TAKES_NONE


class Phase(Enum):
    IDLE = auto()
    ACCUMULATING = auto()
    REDUCING = auto()


class Reducer:
    """Reduces the gradients of `named_parameters`: this stage's, each once, in the same order on all ranks of `dp`.

    A parameter with `_smp_scaled_batch` is summed over `rdp`, the others over `dp`. Both end up as the mean over `dp`
    of the gradients that each rank's own batch gives; with `prescaled_batch` the ranks of a tensor-parallel group share
    their batch. `overlap=False` reduces everything at the end of a pass. `tied`: by the id of each parameter that other
    stages hold too, over whom it is summed. `ownership`: who alone keeps the result (sharded optimizer state).
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Parameter]],
        *,
        dp: Group,
        rdp: Group,
        bucket_cap_mb: float = 25,
        overlap: bool = True,
        gradient_as_bucket_view: bool = False,
        prescaled_batch: bool = False,
        backward_passes_per_step: int = 1,
        uneven: UnevenInputs | None = None,
        tied: Mapping[int, TiedGroup] | None = None,
        ownership: Ownership | None = None,
        on_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self._names = [name for name, _ in named_parameters]
        self._params = [param for _, param in named_parameters]
        self._index = {id(param): index for index, param in enumerate(self._params)}
        # Over whom a parameter's gradient is averaged, and over whom it is summed for that.
        self._mean_over = [rdp if getattr(param, "_smp_scaled_batch", False) else dp for param in self._params]
        self._tied = {index: tied[id(p)] for index, p in enumerate(self._params) if tied and id(p) in tied}
        self._ownership = ownership
        self._on_pass = on_pass
        self._members = [self._member(index, name, param) for index, (name, param) in enumerate(named_parameters)]
        self._aside = Aside()
        self._agreed_tied: dict[tuple[int, ...], str] = {}  # by the ranks of each tied group
        self.dp, self.rdp = dp, rdp
        self._arriving_scale = 1.0 if prescaled_batch else rdp.size / dp.size
        self._cap = int(bucket_cap_mb * 2**20)
        self._overlap = overlap
        self._as_views = gradient_as_bucket_view
        self._passes_per_step = backward_passes_per_step
        self._hook: tuple[Any, Hook] | None = None
        self.uneven = uneven if uneven is not None else UnevenInputs(dp, rdp)
        self.uneven.reducer = self

        self._phase = Phase.IDLE
        self._passes = 0  # of the current window, so far
        self._pending = False
        self._sync = True
        self._driven_by_hooks = False
        self._in_step = False
        self._handles: list[list[RemovableHandle]] = [[] for _ in self._params]
        self._nodes: list[Node] = []  # which parameters hold weakly, and which have hooks of ours

        self._order = list(reversed(range(len(self._params))))
        self._order_is_observed = False
        self._live: tuple[bool, ...] | None = None  # which parameters can have a gradient to reduce
        self._ever_live: set[int] = set()
        self._buckets: list[Reduction] = []
        self._num_early = 0  # buckets that may be launched while the pass runs: all but those of tied weights
        self._bucket_of: dict[int, tuple[int, int]] = {}  # parameter index -> (bucket, member)
        self._plan_is_agreed = False

        self._head = 0  # the bucket to be launched next
        self._open: list[int] = []  # members of each bucket that are not done yet
        self._done: list[bool] = [False] * len(self._params)
        self._finished: dict[int, None] = {}  # indices by the time at which they became complete, an ordered set
        self._is_last_microbatch = False
        self._fires = [0] * len(self._params)
        self._expected_fires = [0] * len(self._params)
        # Each step function has its own number of backwards; `self` stands for those outside of one.
        self._function: Any = self
        self._seen_fires: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        self._ends_with_backward = False
        self.refresh()

    def _member(self, index: int, name: str, param: Parameter) -> Member:
        if index in self._tied:
            return Member(name, param, self._tied[index].group, None, self._owns(param))
        root = self._ownership.owner(param) if self._ownership is not None else None
        return Member(name, param, self._mean_over[index], root, self._owns(param))

    def _owns(self, param: Parameter) -> bool:
        return self._ownership is None or self._ownership.owns(param)

    # ---- what the model calls

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters whose gradients it reduces."""
        return self._params

    def has_reduced(self, param: Tensor) -> bool:
        """Whether passes have been planned that reduce the parameter's gradient. That may still be there, with sharded
        state at its owner, though the parameter is frozen now."""
        return self._index.get(id(param), -1) in self._ever_live

    @property
    def pending(self) -> bool:
        """True while gradients are accumulated that are not reduced yet."""
        return self._pending

    @property
    def reduces_next(self) -> bool:
        """Whether the next pass will be reduced, by `backward_passes_per_step` and `no_sync`."""
        return self._sync and self._passes + 1 >= self._passes_per_step

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Passes inside only accumulate; the first one after it reduces what is there."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Lets `hook(state, bucket) -> Future` reduce the buckets of the DP group; those of RDP are not touched, nor
        those of tied weights that several stages hold, which a warning names.

        `bucket` is a `GradBucket`; the future's value, flat like `bucket.buffer()`, becomes the gradient. Once only.
        """
        if self._hook is not None:
            raise UsageError("register_comm_hook: a hook is registered already; only one is possible")
        if not callable(hook):
            raise UsageError(f"register_comm_hook: the hook must be callable as hook(state, bucket), got {hook!r}")
        assert self._phase is Phase.IDLE
        self._hook = (state, hook)
        if self._tied:
            log.warn_rank0(
                "register_comm_hook: the gradient of %s, which several stages hold, does not go through the hook; it "
                "is averaged over the data-parallel ranks and summed over those stages",
                ", ".join(self._names[index] for index in self._tied),
            )
        self._plan()

    def attach(self) -> None:
        """No pipeline: hooks on the parameters tell what is done, and when passes outside of a step start and end."""
        self._driven_by_hooks = True

    def refresh(self) -> None:
        """Call before the forward of every pass. Follows parameters whose `requires_grad` was changed."""
        if self._ends_with_backward and torch._C._current_graph_task_id() == -1:
            self.abort()  # the backward raised, so its end was never reached
        live = tuple(param.requires_grad for param in self._params)
        if self._live is not None and self._pending:  # one frozen within a window has passes that count
            live = tuple(now or before for now, before in zip(live, self._live))
        if live != self._live:
            self._live = live
            self._ever_live.update(index for index, is_live in enumerate(live) if is_live)
            self._attach_hooks()
            self._plan()

    def begin(self, reduce: bool | None = None) -> None:
        """A pass starts: call before its first backward. `reduce=None`: as `reduces_next` says."""
        self.refresh()
        reduce = self.reduces_next if reduce is None else reduce
        self._on_pass()
        with torch._C.DisableTorchFunction():  # a pass begins in glue code, to which parameters are placed values
            (self._aside.pass_begins if self._pending else self._set_means_aside)()
        if reduce:
            self.uneven.announce(Kind.REDUCTION)
        self._start(Phase.REDUCING if reduce else Phase.ACCUMULATING)

    def _set_means_aside(self) -> None:
        """A window begins: what is there is a mean, or a sum over stages, which only one of the ranks may hand in."""
        if self._ownership is None:
            for index, tied in self._tied.items():
                if not tied.counts and index in self._bucket_of:
                    self._params[index].grad = None
            return
        params = [self._params[index] for index in self._bucket_of]
        for param in params:
            if not self._owns(param):
                param.grad = None
        self._aside.put(filter(self._owns, params), copy=self._as_views)

    def _start(self, phase: Phase) -> None:
        assert self._phase is Phase.IDLE, "a pass starts inside of a pass"
        self._phase = phase
        self._fires = [0] * len(self._params)
        self._expected_fires = self._seen_fires.get(self._function, self._fires[:])
        self._finished = {}
        if phase is Phase.REDUCING:
            self._head = 0
            self._open = [len(bucket.params) for bucket in self._buckets]
            self._done = [False] * len(self._params)
            for bucket in self._buckets:
                bucket.begin()
            self._agree_on_plan()

    def mark_done(self, param: Parameter) -> None:
        """Nothing in this pass can reach `param` any more. Launches what has become complete."""
        index = self._index.get(id(param))
        if index is not None:
            self._finished.setdefault(index)
            if self._phase is Phase.REDUCING and self._overlap:
                self._mark_done(index)

    def finish(self) -> None:
        """The pass ends: if it reduces, every gradient is the mean over its group when this returns."""
        assert self._phase is not Phase.IDLE, "finish() outside of a pass"
        if self._phase is Phase.ACCUMULATING:
            self._aside.pass_ended()
            self._passes += 1
            self._pending = True
            self._is_last_microbatch = False
            self._phase = Phase.IDLE
            return
        while self._head < self._num_early:
            self._launch_next()
        self._agree_on_tied()
        while self._head < len(self._buckets):
            self._launch_next()
        for bucket in self._buckets:
            bucket.complete()
        self._complete_hooked()
        self._aside.add()
        self._passes, self._pending = 0, False
        self._phase = Phase.IDLE
        if self._is_last_microbatch and any(self._fires):  # torch.autograd.grad is a pass without any
            self._seen_fires[self._function] = self._fires
        self._is_last_microbatch = False
        if self._overlap and not self._order_is_observed:
            self._learn_order()

    def flush(self) -> None:
        """Reduces what earlier passes have accumulated and starts a new window; collective if `pending`."""
        if self._pending:
            self.begin(reduce=True)
            self.finish()
        self._passes = 0

    def follow(self) -> None:
        """join: this rank has no more batches and takes part in a reduction of the others, as if all its were zero.

        Gradients of a window that it began and could not end still count.
        """
        self.refresh()
        if not self._pending:
            self._drop_gradients()
        self._start(Phase.REDUCING)
        self.finish()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for param in self._params:
            param.grad = None

    def abort(self) -> None:
        """Leaves a pass that failed; what was launched is waited for and dropped."""
        for bucket in self._buckets[: self._head] if self._phase is Phase.REDUCING else []:
            bucket.complete()
        if self._phase is Phase.IDLE:
            self._aside.pass_begins()
        self._aside.add()
        self._phase = Phase.IDLE
        self._in_step = self._ends_with_backward = self._is_last_microbatch = False
        self._function = self
        self._passes, self._pending = 0, False

    def detach(self) -> None:
        """Takes all hooks off the parameters: the end of this reducer."""
        for handles in self._handles:
            for handle in handles:
                handle.remove()

    # ---- without a pipeline

    def open_step(self, function: Any = None) -> None:
        """A step function starts: all backwards until `close_step` are one pass. `function` tells which one it is."""
        self._in_step = True
        self._function = self if function is None else function

    def last_microbatch(self) -> None:
        """The step's last microbatch starts: gradients are final when they have arrived as often as last time."""
        self._is_last_microbatch = True

    def close_step(self) -> None:
        """The step function has ended; if there was a backward in it, this is the end of the pass."""
        self._in_step = False
        if self._phase is not Phase.IDLE:
            self.finish()
        self._is_last_microbatch = False
        self._function = self

    def backward_starts(self) -> None:
        """A backward starts, on this thread: begins a pass if there is none.

        Outside of a step the pass lasts as long as that backward; then this must be called while it runs, in a hook. It
        is also called for the first gradient that reaches a parameter, but where backwards nest (reentrant checkpoints)
        that may be in an inner one; a hook on the model's output (`watch`) is always in the outermost.
        """
        if self._phase is not Phase.IDLE or self.dp.size == 1 or not self._driven_by_hooks:
            return
        self.begin()
        if not self._in_step:
            self._is_last_microbatch = self._ends_with_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        if self._ends_with_backward:  # False after abort()
            self._ends_with_backward = False
            self.finish()

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """A backward that reaches one of the model's `outputs` begins a pass."""
        if self.dp.size > 1:
            for output in outputs:
                if output.requires_grad and not output.is_leaf:
                    output.register_hook(lambda grad: self.backward_starts())

    # ---- buckets

    def _plan(self) -> None:
        """Cuts the parameters that can get a gradient into buckets, in the order in which they become complete."""
        options: Any = {"cap": self._cap, "as_views": self._as_views, "hook": self._hook, "hooked": self.dp}
        assert self._live is not None
        live = [index for index in self._order if self._live[index]]
        plan = plan_buckets(self._members, live, list(self._tied), **options)
        self._buckets, self._num_early, self._bucket_of = plan
        self._plan_is_agreed = False

    def _agree_on_plan(self) -> None:
        """Once for each plan: ranks that would reduce different buckets are told so instead of mixing them up."""
        if self._plan_is_agreed or self.dp.size == 1:
            return
        self._plan_is_agreed = True
        if not is_agreed(self.dp, content(self._buckets), self._device):
            raise StepError(
                f"the ranks {list(self.dp.ranks)} of one data-parallel group do not hold the same trainable parameters "
                f"(this rank has {len(self._bucket_of)} in {len(self._buckets)} buckets): names, order, shapes, "
                "dtypes and requires_grad must be equal on all of them"
            )

    def _agree_on_tied(self) -> None:
        """The same for the stages that hold a weight together."""
        for group in {tied.group.ranks: tied.group for tied in self._tied.values()}.values():
            held = content([bucket for bucket in self._buckets if bucket.group is group])
            if self._agreed_tied.get(group.ranks) == held:
                continue  # the other stages have not planned anew when only this stage's own parameters changed
            self._agreed_tied[group.ranks] = held
            if not is_agreed(group, held, self._device):
                raise StepError(
                    f"the ranks {list(group.ranks)} hold tied weights together and differ in their dtype, shape or "
                    f"requires_grad (this rank: {held}); change those on all ranks alike"
                )

    def _learn_order(self) -> None:
        """Cuts buckets anew, by the order in which rank 0 of the DP group saw parameters become complete."""
        if self.dp.size == 1:
            return
        order = completion_order(list(self._finished), len(self._params))
        message = self._small([len(self._finished), *order])
        work = dist.broadcast(message, self.dp.ranks[0], group=self.dp.process_group, async_op=True)
        wait(work, "agreement on the order of gradient buckets", self.dp)
        num_observed, *order = message.tolist()
        if num_observed:  # a flush sees nothing: ask again after the next pass
            self._order_is_observed = True
            if order != self._order:
                self._order = order
                self._plan()

    @property
    def _device(self) -> torch.device:
        return self._params[0].device if self._params else runtime.get().device

    def _small(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _mark_done(self, index: int) -> None:
        if self._done[index] or index not in self._bucket_of:
            return
        self._done[index] = True
        number, member = self._bucket_of[index]
        self._open[number] -= 1
        if number == self._head:
            self._buckets[number].stage(member, self.uneven.scale(self._mean_over[index]))
        while self._head < self._num_early and self._open[self._head] == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._buckets[self._head]
        self._head += 1
        bucket.launch(self.uneven.scale(self._mean_over[bucket.bucket.members[0]]))

    def _complete_hooked(self) -> None:
        """Waits for all hooks, agrees on which members have a gradient anywhere, and writes the results."""
        hooked = [bucket for bucket in self._buckets if isinstance(bucket, HookedReduction)]
        if not hooked:
            return
        results = [bucket.wait() for bucket in hooked]
        flags = self._small([int(present) for bucket in hooked for present in bucket.present()])
        all_reduce(flags, dist.ReduceOp.SUM, "agreement on unused parameters", self.dp)
        for bucket, result, part in zip(hooked, results, flags.split([len(bucket.params) for bucket in hooked])):
            bucket.write_results(result, part)

    # ---- hooks on parameters

    def _attach_hooks(self) -> None:
        for index, param in enumerate(self._params):
            if param.requires_grad and not self._handles[index] and (self.dp.size > 1 or index in self._tied):
                on_gradient = partial(self._on_gradient, index)
                setattr(on_gradient, TAKES_NONE, True)
                self._handles[index].append(param.register_post_accumulate_grad_hook(on_gradient))
                if self._ownership is not None:  # a pass begins before its first gradient is added to a mean
                    self._nodes.append(node := get_gradient_edge(param).node)
                    self._handles[index].append(node.register_prehook(lambda _: self.backward_starts()))
                if self._mean_over[index] is self.rdp and self._arriving_scale != 1.0:
                    self._handles[index].append(param.register_hook(self._scale_arriving))

    def _scale_arriving(self, grad: Tensor | None) -> Tensor | None:
        """Turns the sum over the tensor-parallel group's batches into their mean, before it meets what is there. None
        arrives when the gradient is put off."""
        return None if grad is None else grad * self._arriving_scale

    setattr(_scale_arriving, TAKES_NONE, True)

    def _on_gradient(self, index: int, param: Tensor) -> None:
        """`param.grad` has just received a gradient."""
        self.backward_starts()
        if self._phase is Phase.IDLE or index not in self._bucket_of:
            return
        bucket, member = self._bucket_of[index]
        if self._phase is Phase.REDUCING and bucket < self._head:
            raise StepError(
                f"{self._names[index]} received a gradient after its bucket had been reduced: the program has changed "
                "since the pass before. Use DistributedModel(..., overlapping_allreduce=False) for such a model"
            )
        self._buckets[bucket].adopt(member)
        if self._is_last_microbatch and self._driven_by_hooks:
            self._fires[index] += 1
            self._finished.pop(index, None)
            self._finished[index] = None  # now the last one
            if self._phase is Phase.REDUCING and self._overlap and self._fires[index] == self._expected_fires[index]:
                self._mark_done(index)
