"""A step's arguments and results between the stages of one pipeline.

pp_rank 0's batch is the batch: its integer tensors go to every stage at the start of the step, its floating ones stay
there as placed values and travel only where they are used. The other ranks' own arguments serve as structure. What the
step function returns reaches every stage at the end of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smp.comm.transport import Channel
from smp.errors import StepError
from smp.nested import flatten, unflatten
from smp.pp.engine import Engine, Written
from smp.pp.placed import Placed, Value
from smp.pp.program import Program, contiguous_stride
from smp.pp.tape import CallNode

# Above every microbatch's own tags.
_INPUT_TAG = 1 << 29
_OUTPUT_TAG = _INPUT_TAG + (1 << 20)
_WRITTEN_TAG = _INPUT_TAG + (1 << 21)


@dataclass(frozen=True)
class _Description:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Header:
    """What pp_rank 0 tells the other stages about a step: what is wrong with it, what all ranks have to agree on, and
    the tensors of its arguments in order."""

    problem: str | None
    agreed: Any
    tensors: tuple[Any, ...]  # _Description, or an object that slices itself


class Unsent(torch.Tensor):
    """Stands on the other stages for a floating-point argument; splitting it splits its shape."""


def is_replicated(tensor: torch.Tensor) -> bool:
    """Whether an argument goes to every stage: masks, token ids, labels."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def share_arguments(
    engine: Engine, group: Any, arguments: dict[str, Any], problem: str | None, agreed: Any
) -> tuple[dict[str, Any], Any]:
    """The batch of pp_rank 0 on every stage, and its `agreed`. Raises `StepError` on every stage alike if it has a
    problem.

    On the other stages, tensors that are not replicated become `Unsent` stand-ins on the meta device.
    """
    leaves, spec = flatten(arguments, keep_tensorless=True)
    slots = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) or hasattr(x, "smp_slice")]
    mine = None
    if engine.rank == 0:
        mine = Header(problem, agreed, tuple(_describe(leaves[i]) for i in slots))
    header: Header = engine.transport.broadcast_object(mine, group, group.ranks[0], "smp.step")
    if header.problem is not None:
        raise StepError(header.problem)
    if len(header.tensors) != len(slots):
        raise StepError(
            f"the step function was given {len(header.tensors)} tensors on pp_rank 0 and {len(slots)} on pp_rank "
            f"{engine.rank}. All ranks of a pipeline must call it with arguments of the same structure; the data of "
            "pp_rank 0 is used."
        )
    requests = []
    for position, (index, described) in enumerate(zip(slots, header.tensors, strict=True)):
        tag = _INPUT_TAG + position
        if not isinstance(described, _Description):
            leaves[index] = described
        elif engine.rank == 0:
            if is_replicated(leaves[index]):
                data = leaves[index].to(engine.device)
                leaves[index] = data
                requests += [engine.moves.isend(data, rank, tag, Channel.MOVE) for rank in engine.ranks[1:]]
        elif described.dtype.is_floating_point or described.dtype.is_complex:
            stand_in = torch.empty(described.shape, dtype=described.dtype, device="meta")
            leaves[index] = stand_in.requires_grad_(described.requires_grad).as_subclass(Unsent)
        else:
            buffer = torch.empty(described.shape, dtype=described.dtype, device=engine.device)
            requests.append(engine.moves.irecv(buffer, engine.ranks[0], tag, Channel.MOVE))
            leaves[index] = buffer
    for request in requests:
        engine.monitor.wait(request.test, "smp.step, the batch from pp_rank 0", [engine.ranks[0]])
    return unflatten(spec, leaves), header.agreed


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _Description(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    return leaf


def place_arguments(program: Program, arguments: dict[str, Any]) -> dict[str, Any]:
    """One microbatch's arguments as glue code sees them: what was not sent everywhere is placed on stage 0."""
    leaves, spec = flatten(arguments, keep_tensorless=True)
    with torch._C.DisableTorchFunction():
        placed = [_place(program, leaf) for leaf in leaves]
    return unflatten(spec, placed)


def _place(program: Program, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or is_replicated(leaf):
        return leaf
    here = program.rank == 0
    local = leaf.to(program.device).detach() if here else None
    requires_grad = leaf.requires_grad
    shape = tuple(leaf.shape)
    value = Value(0, program, shape, contiguous_stride(shape), leaf.dtype, requires_grad, local)
    if requires_grad:
        if local is not None:
            local.requires_grad_()
        program.tape.add(CallNode("the argument", 0, [], [value], [leaf] if here else None))
    return Placed(value)


def share_written(engine: Engine, group: Any, programs: Sequence[Program], written: Sequence[Written]) -> None:
    """After a step: plain tensors of the user's that placed values were written into get their data on every stage.

    Most of them were temporary; which still exist is agreed by all stages.
    """
    if not written:
        return
    for program in programs:
        program.forget()
    tensors = [entry.tensor() for entry in written]
    alive = engine.transport.all_gather_object([t is not None for t in tensors], group, "smp.step")
    sends = []
    for index, (entry, tensor) in enumerate(zip(written, tensors, strict=True)):
        if tensor is None or not all(flags[index] for flags in alive):
            continue
        tag = _WRITTEN_TAG + index
        data = tensor.detach()
        if entry.owner == engine.rank:
            others = [rank for rank in engine.ranks if rank != engine.ranks[engine.rank]]
            sends += [engine.moves.isend(data, rank, tag, Channel.MOVE) for rank in others]
        else:
            received = torch.empty(data.shape, dtype=data.dtype, device=engine.device)
            request = engine.moves.irecv(received, engine.ranks[entry.owner], tag, Channel.MOVE)
            engine.monitor.wait(request.test, "smp.step, a tensor written in it", [engine.ranks[entry.owner]])
            data.copy_(received)
    for request in sends:
        engine.monitor.wait(request.test, "smp.step, the end of a send", engine.ranks)


def share_outputs(engine: Engine, programs: Sequence[Program], outputs: list[Any]) -> list[Any]:
    """What each microbatch returned, with every placed tensor as a plain, detached one on every stage."""
    flat = [flatten(output) for output in outputs]
    sends, receives = [], []
    tag = _OUTPUT_TAG
    for program, (leaves, _) in zip(programs, flat, strict=True):
        for index, leaf in enumerate(leaves):
            value = leaf.value if type(leaf) is Placed else program.known_value(leaf)
            if value is None:
                leaves[index] = leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
                continue
            value.check_fresh()
            tag += 1
            if value.owner == engine.rank:
                assert value.local is not None
                data = value.local.detach()
                others = [rank for rank in engine.ranks if rank != engine.ranks[engine.rank]]
                sends += [engine.moves.isend(data, rank, tag, Channel.MOVE) for rank in others]
            else:
                data = torch.empty(value.shape, dtype=value.dtype, device=engine.device)
                source = engine.ranks[value.owner]
                receives.append((engine.moves.irecv(data, source, tag, Channel.MOVE), source, program.index))
            leaves[index] = data
    for request, source, microbatch in receives:
        engine.monitor.wait(request.test, f"smp.step, a result of microbatch {microbatch}", [source])
    for request in sends:
        engine.monitor.wait(request.test, "smp.step, the end of a send", engine.ranks)
    return [unflatten(spec, leaves) for leaves, spec in flat]
