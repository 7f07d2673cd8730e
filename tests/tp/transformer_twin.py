"""A transformer layer on whole weights, written from the contract's formulas one term at a time, and what compares the
distributed one with it: outputs, gradients of inputs, gradients of parameters as the reducer leaves them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import smp
from smp import runtime
from smp.comm import collectives
from smp.tp.shard import spec_of
from tests.tp.twins import config, tp_group

ACTIVATIONS = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_new": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
}


class Twin:
    """The maths of a layer on a dictionary of whole weights `w`, named as the distributed module names them."""

    def __init__(self, w: dict[str, Tensor], **options: Any) -> None:
        self.w, self.o = w, options
        self.heads, self.d = options["num_attention_heads"], options["attention_head_size"]
        self.kv_heads = options.get("num_key_value_heads") or self.heads

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps, scale, shift = self.o.get("layernorm_epsilon", 1e-5), self.w[f"{name}.weight"], self.w.get(f"{name}.bias")
        if self.o.get("norm") == "rms":
            return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * scale
        centred = x - x.mean(-1, keepdim=True)
        out = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * scale
        return out if shift is None else out + shift

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.w[f"{name}.weight"].t()
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """[N, S, heads, d], one pair after another."""
        size = self.o.get("rotary_dim")
        if not size:
            return x
        out = x.clone()
        for pair in range(size // 2):
            a, b = (2 * pair, 2 * pair + 1) if self.o.get("rotary_interleaved") else (pair, pair + size // 2)
            angle = (positions * self.o.get("rotary_base", 10000.0) ** (-2 * pair / size)).to(x.dtype).unsqueeze(-1)
            out[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
            out[..., b] = x[..., b] * angle.cos() + x[..., a] * angle.sin()
        return out

    def scores(self, q: Tensor, k: Tensor, mask: Tensor | None, own: bool) -> Tensor:
        """[N, heads, S, Sk]; `own`: of self-attention."""
        scores = q @ k.transpose(-1, -2)
        if self.o.get("scale_attention_scores", True):
            scores = scores / math.sqrt(self.d)
        if self.o.get("scale_attn_by_layer_idx"):
            scores = scores / (self.o["layer_idx"] + 1)
        places = torch.arange(scores.shape[-2]).unsqueeze(1), torch.arange(scores.shape[-1])
        if own and self.o.get("use_alibi"):
            slopes = [2 ** (-self.o.get("alibi_bias_max", 8) * (h + 1) / self.heads) for h in range(self.heads)]
            distance = (places[0] - places[1]).abs().to(scores.dtype)
            scores = scores - torch.tensor(slopes, dtype=scores.dtype).view(-1, 1, 1) * distance
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        if own and self.o.get("causal_mask_size"):
            scores = scores.masked_fill(places[0] < places[1], -math.inf)
        if own and self.o.get("attention_window"):
            scores = scores.masked_fill(places[0] - places[1] >= self.o["attention_window"], -math.inf)
        return scores

    def attention(
        self, x: Tensor, mask: Tensor | None, name: str = "", cross: Tensor | None = None, ids: Tensor | None = None
    ) -> Tensor:
        """Without residual and norms: the change."""
        q_size, kv_size = self.heads * self.d, self.kv_heads * self.d
        if cross is None:
            q, k, v = self.linear(x, f"{name}qkv").split([q_size, kv_size, kv_size], -1)
        else:
            q = self.linear(x, f"{name}query")
            k, v = self.linear(cross, f"{name}key_value").split([kv_size, kv_size], -1)
        q, k, v = (t.view(*t.shape[:2], -1, self.d) for t in (q, k, v))
        if cross is None:
            ids = torch.arange(x.shape[1]).unsqueeze(0) if ids is None else ids
            q, k = self.rotate(q, ids), self.rotate(k, ids)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        context = torch.softmax(self.scores(q, k, mask, cross is None), -1) @ v
        return self.linear(context.transpose(1, 2).flatten(2), f"{name}dense")

    def mlp(self, x: Tensor, name: str = "") -> Tensor:
        act = ACTIVATIONS[self.o.get("activation", "gelu")]
        up = self.linear(x, f"{name}dense1")
        if self.o.get("gated_mlp"):
            gate, up = up.chunk(2, -1)
            return self.linear(act(gate) * up, f"{name}dense2")
        return self.linear(act(up), f"{name}dense2")

    def around(self, x: Tensor, name: str, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Norms and residual around a change."""
        normed = self.norm(x, f"{name}pre_layernorm") if self.o.get("pre_layernorm") else x
        out = x + change(normed)
        return self.norm(out, f"{name}layernorm") if self.o.get("post_layernorm", True) else out

    def layer(
        self,
        x: Tensor,
        mask: Tensor | None,
        name: str = "",
        cross: Tensor | None = None,
        cross_mask: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        if self.o.get("parallel_attention"):
            first = self.norm(x, f"{name}attention.pre_layernorm")
            single = self.o.get("single_pre_layernorm")
            second = first if single else self.norm(x, f"{name}output.pre_layernorm")
            return x + self.attention(first, mask, f"{name}attention.", ids=ids) + self.mlp(second, f"{name}output.")
        path = f"{name}attention."
        x = self.around(x, path, lambda t: self.attention(t, mask, path, ids=ids))
        if cross is not None:
            other = f"{name}cross_attention."
            x = self.around(x, other, lambda t: self.attention(t, cross_mask, other, cross))
        return self.around(x, f"{name}output.", lambda t: self.mlp(t, f"{name}output."))


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter put together from all ranks' parts, as leaves."""
    whole = {}
    for name, param in module.named_parameters():
        spec = spec_of(param)
        value = param.detach()
        if spec is not None:
            value = spec.merge(collectives.all_gather(value.unsqueeze(0), tp_group()).unbind(0))
        whole[name] = value.clone().requires_grad_()
    return whole


def randomise(module: nn.Module) -> None:
    """Values that show a mistake: norms that scale and shift, biases that are not zero; the same on all ranks."""
    generator = torch.Generator().manual_seed(3)
    for param in module.parameters():
        spec = spec_of(param)
        shape = spec.global_shape if spec else param.shape
        size = 0.3 if len(shape) > 1 else 0.5
        value = torch.randn(shape, generator=generator, dtype=torch.float64) * size + (len(shape) == 1)
        with torch.no_grad():
            param.copy_(spec.split(value) if spec else value)


def assert_equals_twin(
    make: Callable[[], nn.Module],
    inputs: Callable[[torch.Generator], tuple[Any, ...]],
    run: Callable[[nn.Module, tuple[Any, ...]], Tensor],
    twin: Callable[[dict[str, Tensor], tuple[Any, ...]], Tensor],
    *,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-9,
) -> Any:
    """Makes a distributed module, runs it as users do, and compares everything with the twin.

    Args:
        make: the module.
        inputs: one rank's arguments; floating ones get gradients.
        run: the module on them -> an output.
        twin: the same on whole weights.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        module = make()
        randomise(module)
        weights = whole_weights(module)
        model = smp.DistributedModel(module)
        shared, group = runtime.get().config.prescaled_batch, tp_group()
        generator = torch.Generator().manual_seed(7)
        parts = [inputs(generator)] * group.size if shared else [inputs(generator) for _ in group.ranks]
        mine, theirs = _leaves(parts[group.rank]), [_leaves(part) for part in (parts[:1] if shared else parts)]
        own = 0 if shared else group.rank
        out = run(model, mine)
        loss = loss_of(out, own)
        loss.backward()
        outputs = [twin(weights, part) for part in theirs]
        losses = [loss_of(output, index) for index, output in enumerate(outputs)]
        torch.stack(losses).mean().backward()
        close(out, outputs[own], tolerance, "output")
        for index, (got, want) in enumerate(zip(mine, theirs[own])):
            if isinstance(got, Tensor) and got.is_floating_point():
                close(got.grad, want.grad * len(theirs), tolerance, f"gradient of input {index}")
        for name, param in module.named_parameters():
            spec, want = spec_of(param), weights[name].grad
            close(param.grad, spec.split(want) if spec else want, tolerance, f"gradient of {name}")
        _check_reduction_groups(model)
        return model
    finally:
        torch.set_default_dtype(before)


def _check_reduction_groups(model: Any) -> None:
    """Cut parameters are reduced over the replicas, whole ones over all data-parallel ranks."""
    over_rdp = {name for name, _ in model.scaled_batch_reducer_named_parameters()}
    over_dp = {name for name, _ in model.default_reducer_named_parameters()}
    cut = {name for name, param in model.local_named_parameters() if spec_of(param) is not None}
    assert over_rdp == cut
    assert over_dp == {name for name, _ in model.local_named_parameters()} - cut


def loss_of(out: Tensor, part: int) -> Tensor:
    """Different for each element, and for each part of a joined batch."""
    weight = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape) + part
    return (out * out * weight).sum() / out.numel()


def _leaves(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in inputs)


def close(got: Tensor | None, want: Tensor | None, tolerance: float, what: str) -> None:
    assert got is not None and want is not None, f"{what}: {got} instead of {want}"
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} instead of {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: {got.dtype} instead of {want.dtype}"
    difference = float((got.detach() - want.detach()).norm() / want.detach().norm().clamp_min(1e-12))
    assert difference <= tolerance, f"{what} differs by {difference:.2e}"


def setup(tp: int, prescaled: bool, optimize: str, **others: object) -> None:
    """A runtime of its own for each comparison: a process has one model."""
    runtime.reset()
    smp.init(config(tp, prescaled, optimize=optimize, **others))
