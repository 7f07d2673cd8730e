"""Figures of tracing, partitioning and planning; nothing is trained. Run as a program, it plans the big GPT."""

import json
import resource
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import smp
from benchmarks import models
from smp.pp.partition import Assignment, Balance, assign, units_of
from smp.pp.schedule import ActionKind, Message, ProgramCost, Segment
from smp.pp.simulate import Policy, simulate
from smp.pp.trace import trace

HUGE = {"vocabulary": 32000, "length": 2048, "width": 8192, "layers": 86}
HUGE_STAGES, HUGE_MICROBATCHES = 16, 64
WEIGHTS = (0.0, 0.2, 0.8, 1.0)  # of memory


def smallest_largest(costs: list[float], parts: int) -> float:
    """The largest part of the best contiguous partition, over all of them (by dynamic programming)."""
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    best = list(prefix)
    for _ in range(parts - 1):
        best = [min(max(best[j], prefix[i] - prefix[j]) for j in range(i + 1)) for i in range(len(prefix))]
    return best[-1]


def largest_stage(root: nn.Module, assignment: Assignment, stages: int, units: list[Any]) -> float:
    """What the most loaded stage of an assignment costs."""
    loads = [0.0] * stages
    for unit in units:
        loads[assignment.own[unit.names[0]]] += unit.load
    return max(loads)


def partition_quality() -> list[dict[str, Any]]:
    """Real models over 2, 3 and 4 stages: the automatic partition's largest stage over the best contiguous one."""
    found = []
    for name, (model, arguments, named) in _models().items():
        costs = trace(model, arguments, named)
        assert costs is not None, f"{name} cannot be traced"
        for stages in (2, 3, 4):
            for weight in WEIGHTS:
                units = units_of(model, stages, costs, weight)
                assignment = assign(model, stages, True, 0, costs, Balance(memory_weight=weight))
                best = smallest_largest([unit.load for unit in units], stages)
                ratio = largest_stage(model, assignment, stages, units) / best
                found.append({"model": name, "stages": stages, "memory_weight": weight, "ratio": ratio})
    return found


def _models() -> dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Name -> model on the meta device, arguments."""
    text = torch.zeros(2, 64, dtype=torch.long)
    found: dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}
    with torch.device("meta"):
        for vocabulary in (2048, 16384):
            gpt = models.GPT(vocabulary, 128, 256, 8)
            found[f"GPT, vocabulary {vocabulary}"] = gpt, (text,), {}
        try:
            import transformers
        except ImportError:
            return found
        gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=12, use_cache=False))
        t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(use_cache=False))
        llama = transformers.LlamaConfig(
            num_hidden_layers=10, hidden_size=512, intermediate_size=1536, num_attention_heads=8, use_cache=False
        )
        found["GPT-2"] = gpt2, (), {"input_ids": text}
        found["T5"] = t5, (), {"input_ids": text, "decoder_input_ids": text}
        found["Llama"] = transformers.LlamaForCausalLM(llama), (), {"input_ids": text}
    return found


def chain(seconds: list[tuple[float, float]], nbytes: int) -> ProgramCost:
    """One microbatch through stages of these (forward, backward) seconds, with messages of `nbytes` between them."""
    count = len(seconds)
    segments = [
        Segment(s, ActionKind.FORWARD, f, (s - 1,) if s else (), ((s, f),) if s + 1 < count else ())
        for s, (f, _) in enumerate(seconds)
    ]
    messages = [Message(s, s + 1, nbytes) for s in range(count - 1)]
    for s in reversed(range(count)):
        waits = () if s + 1 == count else (len(messages) - 1,)
        sends = ((len(messages), seconds[s][1]),) if s else ()
        segments.append(Segment(s, ActionKind.BACKWARD, seconds[s][1], waits, sends))
        if s:
            messages.append(Message(s, s - 1, nbytes))
    return ProgramCost(tuple(segments), tuple(messages))


def plan_huge() -> dict[str, Any]:
    """Trace, partition and plan a 70-billion-parameter GPT in this process; seconds and the process's peak memory."""
    start_bytes = _peak_bytes()
    begin = time.perf_counter()
    with smp.delay_param_initialization():
        model = models.GPT(HUGE["vocabulary"], HUGE["length"], HUGE["width"], HUGE["layers"])
    text: Tensor = torch.zeros(1, HUGE["length"], dtype=torch.long)
    costs = trace(model, (text,), {}, torch.device("cpu"))
    assert costs is not None
    traced = time.perf_counter()
    assignment = assign(model, HUGE_STAGES, True, 0, costs)
    stages = [[0.0, 0.0] for _ in range(HUGE_STAGES)]
    for name, cost in costs.charged.items():
        stage = assignment.own[name]
        stages[stage][0] += cost.forward
        stages[stage][1] += cost.backward
    partitioned = time.perf_counter()
    program = chain([(f, b) for f, b in stages], 4 * HUGE["length"] * HUGE["width"])
    plan = simulate([program] * HUGE_MICROBATCHES, HUGE_STAGES, HUGE_STAGES + 2, Policy.INTERLEAVED)
    end = time.perf_counter()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": end - begin,
        "trace": traced - begin,
        "partition": partitioned - traced,
        "simulate": end - partitioned,
        "peak_bytes": _peak_bytes(),
        "after_imports_bytes": start_bytes,
        "forecast_bubble": plan.bubble,
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    json.dump(plan_huge(), sys.stdout)
