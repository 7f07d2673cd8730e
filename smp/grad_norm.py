"""The norm of a whole model's gradient, though each rank holds only a part of it, and clipping by it.

Every logical parameter counts once:

    parameter                       lies on                               counted by
    whole                           all tp ranks of its stage, equal      tp_rank 0
    distributed (`_smp_shard`)      one part on each tp rank              each rank its part
    of another stage                that stage's ranks                    those
    tied, of several stages         all ranks of these, equal             those of the first of the stages

The sum runs over the mp group, one whole replica. Replicas hold equal gradients once these are reduced, so they all
find the same norm. With sharded optimizer state a gradient is on its parameter's owner alone, one of several replicas:
then the owners count, and the sum runs over the world.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad

from smp import runtime
from smp.dp.ownership import counts, ownership_of
from smp.dp.reduction import all_reduce
from smp.errors import UsageError
from smp.groups import Group
from smp.runtime import Runtime
from smp.topology import CommGroup


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales gradients in place so that the norm of all `parameters`, over the whole model, is at most `max_norm`.

    Like `torch.nn.utils.clip_grad_norm_`, but `parameters` are this rank's part (`model.parameters()`), possibly none.
    Collective over the mp group: all ranks of a model replica call it; with sharded optimizer state over the world: all
    ranks call it, also one that owns no parameter. Gradients that `backward_passes_per_step` left
    unreduced are reduced first, which is collective over the DP group too.

    Returns:
        The norm before clipping, the same on every rank.

    Raises:
        UsageError: parameters that are not the DistributedModel's, or a `norm_type` that is not above 0.
        RuntimeError: `error_if_nonfinite` and the norm is not finite.
    """
    rt = runtime.get()
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    flush(rt)
    _refuse_scaled(rt, params)
    own = _own_parameters(rt)
    foreign = [param for param in params if id(param) not in own and param.grad is not None]
    if foreign and _norm_group(rt).size > 1:
        raise UsageError(
            f"clip_grad_norm_: {len(foreign)} of {len(params)} parameters are not the DistributedModel's on this "
            "rank; pass model.parameters() or some of it"
        )
    entries = [(param, param.grad) for param in params if param.grad is not None]
    total = global_norm(rt, entries, norm_type, error_if_nonfinite)
    clip_grad._clip_grads_with_norm_(params, max_norm, total, foreach)
    return total


@torch.no_grad()
def global_norm(
    rt: Runtime, entries: Sequence[tuple[Tensor, Tensor]], norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """The norm of gradients over one model replica; collective over the mp group, with sharded optimizer state over the
    world; entries may be none.

    `entries`: (parameter, gradient) on this rank; the parameter tells how the gradient counts. Half precision is
    summed in float32. Returns a scalar, float64 if the model has a parameter in float64, else float32, on the runtime's
    device: the same on every rank.
    """
    norm_type = float(norm_type)
    module = getattr(rt.model, "module", None)
    in_double = module is not None and any(p.dtype in (torch.float64, torch.complex128) for p in module.parameters())
    entries = [(param, grad) for param, grad in entries if counts(rt, param)]
    if not norm_type > 0:
        raise UsageError(f"clipping: norm_type is {norm_type}; it must be a number above 0, or inf (the maximum)")
    whole = [grad for param, grad in entries if _shard(param) is None]
    weighted = [(_norm(rt, whole, norm_type), 1.0)]
    for num_parts in sorted({_shard(param).num_parts for param, _ in entries if _shard(param) is not None}):
        cut = [(_shard(param), grad) for param, grad in entries if _shard(param) is not None]
        parts = [spec.without_padding(grad) for spec, grad in cut if spec.num_parts == num_parts]
        # A parameter cut into fewer parts than there are tp ranks (key/value heads) lies on several of them.
        weighted.append((_norm(rt, parts, norm_type), num_parts / rt.tp_size))
    if math.isinf(norm_type):
        largest = torch.stack([norm for norm, _ in weighted]).amax()
        # The maximum of gloo may lose a NaN, so it travels beside the number.
        message = torch.stack([largest.nan_to_num(posinf=math.inf), largest.isnan().to(largest.dtype)])
        largest, is_nan = _reduce(rt, message, dist.ReduceOp.MAX)
        total = torch.where(is_nan > 0, math.nan, largest)
    else:
        powers = [weight * norm.pow(norm_type) for norm, weight in weighted]
        total = _reduce(rt, torch.stack(powers).sum(0, True), dist.ReduceOp.SUM)[0].pow(1.0 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} of the whole model's gradients is {total.item()}, so it cannot be "
            "clipped. To scale the gradients by it anyway, set `error_if_nonfinite=False`"
        )
    return total if in_double else total.float()


def _norm_group(rt: Runtime) -> Group:
    """The ranks that hold the gradients of one replica."""
    return rt.group(CommGroup.MP_GROUP if ownership_of(rt) is None else CommGroup.WORLD)


def flush(rt: Runtime) -> None:
    """Reduces what the passes of a short accumulation window have left unreduced."""
    reducer = getattr(rt.model, "reducer", None)
    if reducer is not None:
        reducer.flush()


def intercept_torch() -> None:
    """Makes torch's own `clip_grad_norm_` and `get_total_norm` global for gradients of the DistributedModel."""
    original = clip_grad._get_total_norm
    if getattr(original, "_smp_original", None) is None:
        patched = _intercepted(original)
        clip_grad._get_total_norm = patched
        torch.nn.utils.get_total_norm = patched


def _intercepted(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        rt = runtime.get() if runtime.is_initialized() else None
        entries = _entries_of(rt, tensors) if rt is not None and rt.model is not None else None
        if rt is None or entries is None:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        return global_norm(rt, entries, norm_type, error_if_nonfinite)

    get_total_norm._smp_original = original  # type: ignore[attr-defined]
    return get_total_norm


def _entries_of(rt: Runtime, grads: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]] | None:
    """(parameter, gradient) for the gradients that torch's clipping was given; None: it is not about our model.

    No gradient at all, with a model spread over several ranks, is taken for a stage without parameters.
    """
    given = {id(grad) for grad in grads}
    if (
        given
        and not rt.model.partitioned
        and not any(id(param.grad) in given for param in rt.model.module.parameters())
    ):
        return None
    before = _holders_of_gradients(rt)
    chosen = [param for param in before if id(param.grad) in given]
    _refuse_scaled(rt, chosen)
    if len(chosen) < len(grads):
        if not chosen or _norm_group(rt).size == 1:
            return None
        raise UsageError(
            f"clipping: {len(grads) - len(chosen)} of {len(grads)} gradients do not belong to the DistributedModel on "
            "this rank, so a common norm is not defined; clip them in a call of their own"
        )
    if not grads and _norm_group(rt).size == 1:
        return None
    flush(rt)
    if len(chosen) == len(before):  # all that there were: also those which only other replicas had
        chosen = _holders_of_gradients(rt)
    return [(param, param.grad) for param in chosen if param.grad is not None]


def _own_parameters(rt: Runtime) -> dict[int, Tensor]:
    """The model's parameters on this rank, and their fp32 masters."""
    if rt.model is None:
        raise UsageError("clipping needs the DistributedModel: make it first")
    masters = rt.optimizer.master_params if rt.optimizer is not None and rt.model.partitioned else []
    return {id(param): param for param in [*rt.model.local_parameters(), *masters]}


def _holders_of_gradients(rt: Runtime) -> list[Tensor]:
    """One of our parameters for each gradient; a master may share that of its parameter."""
    return list({id(param.grad): param for param in _own_parameters(rt).values() if param.grad is not None}.values())


def _refuse_scaled(rt: Runtime, params: Iterable[Tensor]) -> None:
    """Gradients of the model's parameters are no gradients of the loss while they are multiplied by a loss scale, and
    none that the update works on once masters have taken copies of them."""
    optimizer = rt.optimizer
    if optimizer is None or optimizer.loss_scaler is None:
        return
    masters = {id(param) for param in optimizer.master_params}
    instead = (
        "Call optimizer.clip_master_grads(max_norm) instead, which clips the gradients of the fp32 masters and returns "
        "their norm"
    )
    if optimizer.loss_scaler.scales and any(p.grad is not None and id(p) not in masters for p in params):
        raise UsageError(
            f"clipping: these gradients are multiplied by the loss scale, {optimizer.loss_scale:g}. {instead}"
        )
    if any(optimizer.has_copied_gradient(param) for param in params):
        raise UsageError(
            "clipping: the fp32 masters have copies of these gradients since optimizer.update_master_grads(), and "
            f"step() works on the copies. {instead}"
        )


def _shard(param: Tensor) -> Any:
    """The parameter's ShardSpec, None when it is whole."""
    return getattr(param, "_smp_shard", None)


def _norm(rt: Runtime, grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of some of this rank's gradients, as a float64 scalar."""
    norms: list[Tensor] = []
    for dtype in {grad.dtype for grad in grads}:
        members = [grad for grad in grads if grad.dtype == dtype and grad.numel() > 0]
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        norms += torch._foreach_norm(members, norm_type, dtype=wide) if members else []
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=rt.device)
    stacked = torch.stack([norm.to(rt.device, torch.float64) for norm in norms])
    return torch.linalg.vector_norm(stacked, norm_type)


def _reduce(rt: Runtime, message: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    return all_reduce(message, op, "norm of all gradients", _norm_group(rt))
