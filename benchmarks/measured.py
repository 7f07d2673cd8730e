"""Figures of one stage that are measured inside its process: live tensor bytes, and what the engine itself costs."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

import smp
from benchmarks import models
from benchmarks.live_bytes import LiveBytes
from benchmarks.ours import _split_by_hand, _train, tensor_parallel
from smp import runtime
from smp.comm import collectives

Built = tuple[Callable[[], Any], dict[str, Any]]
MANY_STEPS = 30


def _nothing() -> None:
    return None


def block_bytes(sizes: dict[str, int], rows: int) -> int:
    """What one block keeps for its backward, of `rows` sequences.

    In units of one hidden state: both norms' inputs and outputs (4), q, k and v (3), what attention gives (1), the
    perceptron's inner layer before and after its activation (8); further the norms' mean and deviation and one number
    per head and position for attention.
    """
    positions = rows * sizes["length"]
    heads = max(1, sizes["width"] // 64)
    return 4 * positions * (16 * sizes["width"] + 4 + heads)


def microbatch_bytes(sizes: dict[str, int], rows: int, blocks: int, is_last: bool) -> int:
    """What a stage keeps of one microbatch: its blocks and its output; the last one the norm, and logits twice (as they
    are, and their log-probabilities, which are what the loss keeps)."""
    positions = rows * sizes["length"]
    head = sizes["width"] + 2 * sizes["vocabulary"] if is_last else 0
    return blocks * block_bytes(sizes, rows) + 4 * positions * (sizes["width"] + head)


def in_flight(model: Any, stage: int, config: Any) -> int:
    """The most microbatches that the plan of the last step has in flight on a stage."""
    plan = getattr(model.engine, "last_plan", None)
    if plan is not None:
        return int(plan.in_flight[stage])
    return min(config.microbatches, config.active_microbatches)


def memory(sizes: dict[str, int], batch: int, microbatches: int, stages: int, config: dict[str, Any]) -> Built:
    """Peak live bytes of forward and backward with Adam's states present, and the same by arithmetic."""
    smp.init({"pipeline_parallel_degree": stages, "microbatches": microbatches, **config})
    module = models.gpt(sizes)
    _split_by_hand(module, stages)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-4))
    x, y = models.text(sizes, batch)
    count = LiveBytes()
    for number in range(3):
        optimizer.zero_grad()
        if number == 2:
            parameters = list(model.local_parameters())
            states = [value for p in parameters for value in optimizer.optimizer.state[p].values()]
            for tensor in [*parameters, *model.local_buffers(), *states]:
                count.track(tensor)
            with count:
                _train(model, x, y)
        else:
            _train(model, x, y)
        optimizer.step()
    stage, rt = smp.pp_rank(), runtime.get()
    blocks = sum(index * stages // sizes["layers"] == stage for index in range(sizes["layers"]))
    flying = in_flight(model, stage, rt.config)
    one = microbatch_bytes(sizes, batch // microbatches, blocks, stage == stages - 1)
    weights = sum(p.numel() * p.element_size() for p in model.local_parameters())
    answer = {"stage": stage, "peak": count.peak, "arithmetic": 4 * weights + flying * one}
    return _nothing, {**answer, "weights": weights, "in_flight": flying, "microbatch": one}


def overhead(sizes: dict[str, int], microbatches: int, config: dict[str, Any]) -> Built:
    """Processor seconds per microbatch that the middle one of three stages spends, which owns nothing.

    What it spends in waiting is reported apart. The model is tiny: nobody computes for long.
    """
    smp.init({"pipeline_parallel_degree": 3, "microbatches": microbatches, **config})
    module = models.gpt(sizes)
    _split_by_hand(module, 2)
    for part in (*list(module.blocks)[sizes["layers"] // 2 :], module.norm, module.head):
        smp.set_partition(part, 2)
    model = smp.DistributedModel(module)
    x, y = models.text(sizes, microbatches)
    waiting = _timed_waits()

    def step() -> None:
        model.zero_grad()
        _train(model, x, y)

    for _ in range(3):
        step()
    waiting.clear()
    cpu, begin = time.process_time(), time.perf_counter()
    for _ in range(MANY_STEPS):
        step()
    per = MANY_STEPS * microbatches
    cpu, wall = (time.process_time() - cpu) / per, (time.perf_counter() - begin) / per
    parameters = sum(1 for _ in model.local_parameters())
    return step, {
        "stage": smp.pp_rank(),
        "parameters": parameters,
        "cpu": cpu - sum(waiting) / per,
        "waiting": sum(waiting) / per,
        "wall": wall,
    }


def sent(sizes: dict[str, int], batch: int, config: dict[str, Any]) -> Built:
    """Bytes that this rank's tensor-parallel collectives send in one step, and in two all-reduces forward and two
    backward in each layer: of n bytes, a ring of p ranks sends 2 n (p - 1) / p."""
    step, _ = tensor_parallel(sizes, batch, config)
    size = sizes["degree"]
    shares = {"start_all_reduce": 2 / size, "all_gather": 1.0, "reduce_scatter": 1 / size, "all_to_all": 1 / size}
    shares |= {"start_all_gather": 1.0, "start_reduce_scatter": 1 / size}
    total = 0.0

    def counting(name: str) -> Callable[..., Any]:
        plain = getattr(collectives, name)

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal total
            total += tensor.nbytes * shares[name] * (size - 1)
            return plain(tensor, *args, **kwargs)

        return call

    with ExitStack() as patched:
        for name in shares:
            patched.enter_context(mock.patch.object(collectives, name, counting(name)))
        step()
    hidden = 4 * batch * sizes["length"] * sizes["width"]
    minimum = sizes["layers"] * 4 * 2 * hidden * (size - 1) / size
    return step, {"stage": smp.tp_rank(), "sent": total, "minimum": minimum}


def _timed_waits() -> list[float]:
    """Processor seconds of each wait from now on."""
    monitor = runtime.get().monitor
    original = monitor.wait
    seconds: list[float] = []

    def wait(test: Any, call: str, ranks: Any) -> None:
        begin = time.thread_time()
        try:
            original(test, call, ranks)
        finally:
            seconds.append(time.thread_time() - begin)

    monitor.wait = wait  # type: ignore[method-assign]
    return seconds
