"""Optimizers that scripts know from apex, without apex: each layer's step is scaled by norms of the whole layer.

A parameter that is cut over the tensor-parallel group has its norm in parts:

    tp_rank 0   |part|**2 --+
                            +-- one sum over the group, of all parameters' norms at once --> the same step on all ranks
    tp_rank 1   |part|**2 --+

A parameter that was put together from several of the user's (query, key and value of an attention) has a norm for each
of them, as in one process.

Both also work without `smp.init`. In half precision use them through `smp.DistributedOptimizer`, which gives them fp32
masters.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from smp import grad_norm, runtime
from smp.dp.reduction import all_reduce
from smp.errors import UsageError
from smp.runtime import Runtime
from smp.topology import CommGroup
from smp.tp.origin import Block, boxes_by_source
from smp.tp.shard import ShardSpec, spec_of


@dataclass(frozen=True)
class Layer:
    """What has one norm: a parameter, or what was one in the user's module and is part of one here.

    `place`: the parameter's in a list; `spec`: how that is cut; `boxes`: where in its local tensor, None: all of it.
    """

    place: int
    spec: ShardSpec | None
    boxes: tuple[Block, ...] | None = None

    def of(self, tensor: Tensor) -> list[Tensor]:
        """Views of the layer in a tensor of the parameter's local shape; none where this rank holds nothing of it."""
        return [tensor] if self.boxes is None else [box.in_local(tensor) for box in self.boxes]

    def values(self, tensor: Tensor) -> list[Tensor]:
        """`of`, without padding."""
        if self.boxes is None and self.spec is not None:
            return [self.spec.without_padding(tensor)]
        return self.of(tensor)


def layers_of(params: Sequence[Tensor]) -> list[Layer]:
    """The layers of all `params`, in their order."""
    layers = []
    for place, param in enumerate(params):
        boxes: Sequence[tuple[Block, ...] | None] = boxes_by_source(param) or (None,)
        layers += [Layer(place, spec_of(param), of_layer) for of_layer in boxes]
    return layers


class _Layerwise(Optimizer):
    """What both have in common: groups that count their steps, first moments, decay inside or outside of them."""

    def __init__(self, params: Any, defaults: dict[str, Any], amsgrad: bool, set_grad_none: bool) -> None:
        name, (beta1, beta2) = type(self).__name__, defaults["betas"]
        if amsgrad:
            raise UsageError(f"{name}: amsgrad got True; there is no AMSGrad variant of it, leave it False")
        for key in ("lr", "eps", "weight_decay", "max_grad_norm"):
            if not defaults.get(key, 0.0) >= 0.0:
                raise UsageError(f"{name}: {key} got {defaults[key]!r}; it must be 0 or above")
        if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
            raise UsageError(f"{name}: betas got {defaults['betas']!r}; both must be from 0 to below 1")
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops gradients, or zeroes them; None: as `set_grad_none` says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient. Collective over the ranks of a model replica.

        `closure`: computes gradients anew and returns the loss, which is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        members = []
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if any(param.grad.layout is not torch.strided for param in params):
                raise UsageError(f"{type(self).__name__} takes dense gradients only (sparse=False in the module)")
            members.append(params)
        self._update(members)
        return loss

    @abstractmethod
    def _update(self, members: list[list[Tensor]]) -> None:
        """Updates parameters, given by group."""

    def _states(self, params: Sequence[Tensor], key: str) -> list[Tensor]:
        """State of the parameters' shapes, zero at first."""
        for param in params:
            if key not in self.state[param]:
                self.state[param][key] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return [self.state[param][key] for param in params]


class FusedLAMB(_Layerwise):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning", 2019): Adam's step, as long as the layer demands.

        g = gradient / max(1, |all gradients of the model| / max_grad_norm)
        m = beta1 m + (1 - beta1) g                  v = beta2 v + (1 - beta2) g g
        u = m^ / (sqrt(v^) + eps) + weight_decay p   (m^, v^: corrected for their start from zero)
        p = p - lr |p| / |u| u                       (lr u where |p| or |u| is 0)

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: correct the moments for their start from zero.
        betas: decay of the two moments per step.
        eps: added to the denominator.
        weight_decay: decay of parameters.
        amsgrad: must be False.
        adam_w_mode: add the decay to the step, as above; False: to the gradient.
        grad_averaging: weight the gradient by 1 - beta1 in the first moment; False: by 1.
        set_grad_none: `zero_grad()` drops gradients instead of zeroing them.
        max_grad_norm: largest norm of all gradients, over the whole model; 0: they are not clipped.
        use_nvlamb: scale steps of groups without weight decay by norms, too.

    Raises:
        UsageError: an argument out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        defaults = {
            **{"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            **{"grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm},
        }
        super().__init__(params, defaults, amsgrad, set_grad_none)
        self.adam_w_mode, self.use_nvlamb = adam_w_mode, use_nvlamb

    def _update(self, members: list[list[Tensor]]) -> None:
        scales = self._clipping(members)
        steps = [
            self._directions(group, params, scale) if params else []
            for group, params, scale in zip(self.param_groups, members, scales)
        ]
        adapted = [
            (params, step)
            for group, params, step in zip(self.param_groups, members, steps)
            if group["weight_decay"] != 0 or self.use_nvlamb
        ]
        all_params = [param for params, _ in adapted for param in params]
        all_steps = [step for _, of_group in adapted for step in of_group]
        if all_params:
            layers = layers_of(all_params)
            of_params, of_steps = whole_norms(layers, [all_params, all_steps])
            ratios = torch.where((of_params > 0) & (of_steps > 0), of_params / of_steps, 1.0)
            views = [layer.of(all_steps[layer.place]) for layer in layers]
            factors = [[ratio.to(view) for view in of_layer] for ratio, of_layer in zip(ratios, views)]
            torch._foreach_mul_([*chain(*views)], [*chain(*factors)])
        for group, params, step in zip(self.param_groups, members, steps):
            if params:
                torch._foreach_add_(params, step, alpha=-group["lr"])

    def _clipping(self, members: list[list[Tensor]]) -> list[Tensor | None]:
        """By group, what to multiply gradients with; None: nothing."""
        if not any(group["max_grad_norm"] > 0 for group in self.param_groups):
            return [None] * len(members)
        entries = [(param, param.grad) for params in members for param in params if param.grad is not None]
        rt = _runtime()
        if rt is not None and self._trains_the_model(rt):
            norm = grad_norm.global_norm(rt, entries)
        else:
            norm = torch.nn.utils.get_total_norm([grad for _, grad in entries])
        limits = [group["max_grad_norm"] for group in self.param_groups]
        return [(limit / norm).clamp(max=1.0) if limit > 0 else None for limit in limits]

    def _trains_the_model(self, rt: Runtime) -> bool:
        """Whether its parameters are those of the DistributedModel, or masters of these; with none, they are
        elsewhere."""
        if rt.optimizer is not None and rt.optimizer.optimizer is self:
            return True
        params = [param for group in self.param_groups for param in group["params"]]
        of_model = {id(param) for param in rt.model.module.parameters()}
        return not params or any(id(param) in of_model for param in params)

    def _directions(self, group: dict[str, Any], params: list[Tensor], scale: Tensor | None) -> list[Tensor]:
        """The steps before they are scaled, in memory of their own."""
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        grads = _gradients(params)
        if scale is not None:
            grads = list(torch._foreach_mul(grads, scale.to(grads[0])))
        if not self.adam_w_mode and decay != 0:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        first, second = self._states(params, "exp_avg"), self._states(params, "exp_avg_sq")
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, grads, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)
        correction1 = correction2 = 1.0
        if group["bias_correction"]:
            correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
        steps = torch._foreach_sqrt(second)
        torch._foreach_div_(steps, math.sqrt(correction2))
        torch._foreach_add_(steps, group["eps"])
        torch._foreach_reciprocal_(steps)
        torch._foreach_mul_(steps, first)
        torch._foreach_div_(steps, correction1)
        if self.adam_w_mode and decay != 0:
            torch._foreach_add_(steps, params, alpha=decay)
        return list(steps)


class FusedNovoGrad(_Layerwise):
    """NovoGrad (Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments", 2019): the second
    moment is one number per layer, the running norm of its gradient.

        n = sqrt(beta2 n n + (1 - beta2) |g|**2)     (norm_type 0: beta2 n + (1 - beta2) max |g|)
        m = beta1 m + (1 - beta1) g
        p = p - lr (m^ / (n^ + eps) + weight_decay p)

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: correct the moments for their start from zero.
        betas: decay of the first moment and of the norm per step.
        eps: added to the denominator.
        weight_decay: decay of parameters.
        amsgrad: must be False.
        reg_inside_moment: the first moment is that of g / (n^ + eps) + weight_decay p, and the step is lr m^.
        grad_averaging: weight the gradient by 1 - beta1 in the first moment; False: by 1.
        norm_type: 2: the norm; 0: the largest absolute value.
        init_zero: the running norm starts from 0; False: from the first gradient's norm.
        set_grad_none: `zero_grad()` drops gradients instead of zeroing them.

    Raises:
        UsageError: an argument out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if norm_type not in (0, 2):
            raise UsageError(f"FusedNovoGrad: norm_type got {norm_type!r}; it must be 2 (the norm) or 0 (the maximum)")
        defaults = {
            **{"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            **{"grad_averaging": grad_averaging, "norm_type": norm_type, "init_zero": init_zero},
        }
        super().__init__(params, defaults, amsgrad, set_grad_none)
        self.reg_inside_moment = reg_inside_moment

    def _update(self, members: list[list[Tensor]]) -> None:
        norms = self._norms(members)
        for group, params in zip(self.param_groups, members):
            if params:
                running = self._running_norms(group, params, norms)
                self._update_group(group, params, running)

    def _norms(self, members: list[list[Tensor]]) -> dict[int, list[Tensor]]:
        """By the id of each parameter, the norms of its layers' gradients."""
        found: dict[int, list[Tensor]] = {}
        for norm_type, order in ((2, 2.0), (0, math.inf)):
            of_type = [g["norm_type"] == norm_type for g in self.param_groups]
            params = [param for params, fits in zip(members, of_type) if fits for param in params]
            if params:
                layers = layers_of(params)
                (norms,) = whole_norms(layers, [_gradients(params)], order)
                for layer, norm in zip(layers, norms):
                    found.setdefault(id(params[layer.place]), []).append(norm)
        return found

    def _running_norms(
        self, group: dict[str, Any], params: list[Tensor], norms: dict[int, list[Tensor]]
    ) -> list[Tensor]:
        """A scalar for each parameter; of one with several layers a tensor of its shape, with each layer's number."""
        beta2, layers = group["betas"][1], layers_of(params)
        now = torch.stack([norm for param in params for norm in norms[id(param)]])
        start = now * (not group["init_zero"])
        kept = [self.state[params[layer.place]].get("exp_avg_norm") for layer in layers]
        before = torch.stack([_number(layer, old, new) for layer, old, new in zip(layers, kept, start)])
        if group["norm_type"] == 2:
            after = (beta2 * before.square() + (1 - beta2) * now.square()).sqrt()
        else:
            after = beta2 * before + (1 - beta2) * now
        running: dict[int, Tensor] = {}
        for layer, norm in zip(layers, after):
            param = params[layer.place]
            if layer.boxes is None:
                running[layer.place] = norm.to(param)
                continue
            if layer.place not in running:
                running[layer.place] = torch.zeros_like(param)
            for view in layer.of(running[layer.place]):
                view.fill_(norm)
        for place, param in enumerate(params):
            self.state[param]["exp_avg_norm"] = running[place]
        return list(running.values())

    def _update_group(self, group: dict[str, Any], params: list[Tensor], running: list[Tensor]) -> None:
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        correction1 = correction2 = 1.0
        if group["bias_correction"]:
            correction1, correction2 = 1 - beta1 ** group["step"], math.sqrt(1 - beta2 ** group["step"])
        denominators = [norm / correction2 + group["eps"] for norm in running]
        grads = _gradients(params)
        if self.reg_inside_moment:
            grads = list(torch._foreach_div(grads, denominators))
            torch._foreach_add_(grads, params, alpha=decay)
        first = self._states(params, "exp_avg")
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, grads, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        steps = torch._foreach_div(first, correction1)
        if not self.reg_inside_moment:
            torch._foreach_div_(steps, denominators)
            torch._foreach_add_(steps, params, alpha=decay)
        torch._foreach_add_(params, steps, alpha=-group["lr"])


def _number(layer: Layer, kept: Tensor | None, otherwise: Tensor) -> Tensor:
    """The number that was kept for a layer: as a scalar, or throughout a tensor of its parameter's shape."""
    if kept is None:
        return otherwise
    views = [kept] if kept.dim() == 0 else layer.of(kept)
    return next((view.flatten()[0].to(otherwise) for view in views if view.numel()), otherwise)


@torch.no_grad()
def whole_norms(layers: Sequence[Layer], values: Sequence[Sequence[Tensor]], order: float = 2.0) -> list[Tensor]:
    """Norms of whole layers in tensors that lie beside their parameters, the gradients for instance, each cut as its
    parameter is.

    `values`: lists of tensors of the parameters' local shapes. `order`: 2 or inf. Returns for each list its norms
    [number of layers], float64. When a parameter is cut: collective over the tensor-parallel group, one all-reduce.
    """
    norms = torch.stack([_local_norms(layers, tensors, order) for tensors in values])
    # Only of those that are cut: which other parameters a rank updates may differ when optimizer state is sharded.
    cut = [place for place, layer in enumerate(layers) if layer.spec is not None]
    rt = _runtime()
    if rt is None or rt.tp_size == 1 or not cut:
        return list(norms)
    group = rt.group(CommGroup.TP_GROUP)
    is_max = math.isinf(order)
    message = norms[:, cut]
    if not is_max:
        # A parameter cut into fewer parts than there are ranks (key/value heads) lies on several of them.
        shares = [layer.spec.num_parts / rt.tp_size for layer in layers if layer.spec is not None]
        message = message.square() * message.new_tensor(shares)
    op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    all_reduce(message, op, "norms of distributed parameters", group)
    norms[:, cut] = message if is_max else message.sqrt()
    return list(norms)


def _local_norms(layers: Sequence[Layer], tensors: Sequence[Tensor], order: float) -> Tensor:
    """Norms of this rank's parts, without padding."""
    parts = [layer.values(tensors[layer.place]) or [tensors[layer.place].new_zeros(1)] for layer in layers]
    flat = [view if view.numel() else view.new_zeros(1) for view in chain(*parts)]
    wide = torch.float32 if any(view.dtype in (torch.float16, torch.bfloat16) for view in flat) else None
    norms = iter([norm.double() for norm in torch._foreach_norm(flat, order, dtype=wide)])
    of_layers = [torch.stack([next(norms) for _ in views]) for views in parts]
    return torch.stack([of[0] if len(of) == 1 else torch.linalg.vector_norm(of, order) for of in of_layers])


def _gradients(params: Sequence[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def _runtime() -> Runtime | None:
    """The runtime, when there is a model that is spread over its ranks."""
    rt = runtime.get() if runtime.is_initialized() else None
    return rt if rt is not None and rt.model is not None else None
