"""DistributedAttentionLayer: heads split over the tensor-parallel group."""

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp.errors import PartitionError, StepError, UsageError
from smp.tp.module import DistributedModule
from smp.tp.options import Options, check_norms
from smp.tp.positions import (
    alibi,
    alibi_slopes,
    angles,
    hides_everything,
    rotated,
    score_mask,
    visible,
    weights_of,
)
from smp.tp.region import Region, Spread, States, open_region


class Norm(nn.LayerNorm):
    """A norm of hidden states inside of a region. Its parameters are whole on every rank; they are passed to `forward`,
    out of `Region.whole`.

    Args:
        size: of the last dimension.
        eps: added to the variance.
        options: `norm`, `norm_bias`.
    """

    def __init__(self, size: int, eps: float, options: Options) -> None:
        super().__init__(size, eps, bias=options.norm_bias and options.norm == "layer")
        self.is_rms = options.norm == "rms"

    def forward(self, input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """[.., size] -> the same shape."""
        if weight is None:
            weight, bias = self.weight, self.bias
        if self.is_rms:
            return F.rms_norm(input, self.normalized_shape, weight, self.eps)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


def parameters_of(norm: Norm | None) -> tuple[Tensor | None, Tensor | None]:
    """Scale and shift, for `Region.whole`."""
    return (None, None) if norm is None else (norm.weight, norm.bias)


def add(x: Tensor, out: Tensor, options: Options) -> Tensor:
    """The residual plus a block's change, in the residual's dtype."""
    if options.fp32_residual_addition and x.dtype != torch.float64:
        return (x.float() + out.float()).to(x.dtype)
    return x + out


class Matrix(DistributedModule):
    """The parameters of one matrix inside of a layer; the layer computes with them."""

    weight: nn.Parameter
    bias: nn.Parameter | None


class Beside(NamedTuple):
    """What one of two parallel blocks hands to the layer.

    Attributes:
        out: its change of the residual, or, not `is_total`, this rank's part of it: [rows, S, H].
        bias: what is to be added to the sum of the parts.
        normed: its normalised input, for the other block.
        is_total: whether `out` is summed over the ranks.
    """

    out: Tensor
    bias: Tensor | None
    normed: Spread
    is_total: bool


class Block(DistributedModule):
    """What the two halves of a layer share: parameters, norms, what happens around the two matrices.

    x --[pre_layernorm]--> partial --sum over ranks, + bias, dropout--> + x --[post_layernorm]-->
    """

    pre_layernorm: Norm | None
    layernorm: Norm | None

    def __init__(
        self,
        hidden_size: int,
        hidden_dropout_prob: float,
        layernorm_epsilon: float,
        initializer_range: float | None,
        pre_layernorm: bool,
        post_layernorm: bool,
        options: Options,
    ) -> None:
        super().__init__()
        check_norms(pre_layernorm or options.single_pre_layernorm, post_layernorm)
        self.hidden_size, self.hidden_dropout_prob = hidden_size, hidden_dropout_prob
        self.initializer_range = initializer_range
        self.options = options
        self.pre_layernorm = Norm(hidden_size, layernorm_epsilon, options) if pre_layernorm else None
        self.layernorm = Norm(hidden_size, layernorm_epsilon, options) if post_layernorm else None

    def make_linear(
        self, name: str, out_features: int, in_features: int, bias: bool, *, dim: int, sections: tuple[int, ...] = ()
    ) -> None:
        """Registers `name` with `weight` [out, in] cut along `dim`, and `bias`, whole where the inputs are cut."""
        part = Matrix()
        self.add_module(name, part)
        bound = 1 / math.sqrt(in_features)
        std = self.initializer_range
        zero = self.options.zero_init and dim == 1

        def weight_values(weight: Tensor) -> None:
            if zero:
                nn.init.zeros_(weight)
            elif std is not None:
                nn.init.normal_(weight, 0.0, std)
            else:
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))

        def bias_values(values: Tensor) -> None:
            if zero or std is not None:
                nn.init.zeros_(values)
            else:
                nn.init.uniform_(values, -bound, bound)

        part.create_parameter("weight", (out_features, in_features), weight_values, dim=dim, sections=sections)
        if bias:
            bias_dim, bias_sections = (0, sections) if dim == 0 else (None, ())
            part.create_parameter("bias", (out_features,), bias_values, dim=bias_dim, sections=bias_sections)
        else:
            part.register_parameter("bias", None)

    @property
    def second(self) -> Matrix:
        """The matrix that writes to the residual."""
        raise NotImplementedError

    def partial(self, region: Region, x: Tensor | Spread, states: States) -> Tensor:
        """The normalised input -> this rank's part of the second matrix's product: inside [.., H] -> [rows, S, H]."""
        raise NotImplementedError

    def inside(self, states: States) -> Tensor:
        """The block inside of a region: its output, laid out as `states.hidden`."""
        region, x = Region.inside(self, states.dim), states.hidden
        pre_weight, pre_bias, bias, weight, shift = region.whole(
            *parameters_of(self.pre_layernorm), self.second.bias, *parameters_of(self.layernorm)
        )
        normed = x if self.pre_layernorm is None else self.pre_layernorm(x, pre_weight, pre_bias)
        total = region.total(self.partial(region, normed, states), bias)
        out = add(x, region.dropout(total, self.hidden_dropout_prob, self.training), self.options)
        return out if self.layernorm is None else self.layernorm(out, weight, shift)

    def beside(self, states: States, normed: Spread | None) -> Beside:
        """The block beside another one that reads the same input; the layer adds up. `normed`: that input, if it is
        normalised already."""
        region = Region.inside(self, states.dim)
        weight, shift, bias = region.whole(*parameters_of(self.pre_layernorm), self.second.bias)
        if normed is None:
            x = states.hidden if self.pre_layernorm is None else self.pre_layernorm(states.hidden, weight, shift)
            normed = region.spread(x)
        partial = self.partial(region, normed, states)
        if not self.training or self.hidden_dropout_prob == 0.0:
            return Beside(partial, bias, normed, False)
        out = region.dropout(region.total(partial, bias), self.hidden_dropout_prob, self.training)
        return Beside(out, None, normed, True)


class DistributedAttentionLayer(Block):
    """Self-attention, or attention on an encoder's states, with residual and norms: [N, S, H] -> [N, S, H].

        q, k, v = linears of the normalised input       one matrix, cut along heads
        scores = q k' / sqrt(d) + masks                 own heads only
        x + dropout(dense(softmax(scores) v))           cut along heads, summed over the ranks

    Args:
        num_attention_heads: of the whole layer; a multiple of the tensor-parallel degree.
        attention_head_size: d.
        hidden_size: H.
        attention_dropout_prob: of softmax(scores).
        hidden_dropout_prob: of the output, before the residual is added.
        layernorm_epsilon: of the norms.
        initializer_range: standard deviation of the initial weights with `use_normal_initialization`; otherwise they
            start as those of nn.Linear.
        cross_attention: keys and values come from other states.
        causal_mask_size: the longest sequence under the causal mask; None: no such mask.
        pre_layernorm, post_layernorm: norms of the input, and of the output with the residual; at least one.
        options: see `Options`.

    Raises:
        PartitionError: heads, or heads of keys and values, do not divide by the tensor-parallel degree.
        UsageError: options that do not fit together.
    """

    dense: Matrix
    qkv: Matrix
    query: Matrix
    key_value: Matrix

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        **options: Any,
    ) -> None:
        o = Options.of(options, type(self).__name__)
        own_mask_size = None if cross_attention else causal_mask_size
        _check(num_attention_heads, attention_head_size, own_mask_size, o, self.tp_group.size)
        std = initializer_range if use_normal_initialization else None
        super().__init__(hidden_size, hidden_dropout_prob, layernorm_epsilon, std, pre_layernorm, post_layernorm, o)
        self.num_attention_heads, self.attention_head_size = num_attention_heads, attention_head_size
        self.num_key_value_heads = num_attention_heads if o.num_key_value_heads is None else o.num_key_value_heads
        self.attention_dropout_prob = attention_dropout_prob
        self.cross_attention, self.causal_mask_size = cross_attention, causal_mask_size
        self.scale = 1 / math.sqrt(attention_head_size) if o.scale_attention_scores else 1.0
        if o.scale_attn_by_layer_idx and o.layer_idx is not None:
            self.scale /= o.layer_idx + 1
        q, kv = num_attention_heads * attention_head_size, self.num_key_value_heads * attention_head_size
        if cross_attention:
            self.make_linear("query", q, hidden_size, o.use_qkv_bias, dim=0)
            self.make_linear("key_value", 2 * kv, hidden_size, o.use_qkv_bias, dim=0, sections=(kv, kv))
        else:
            self.make_linear("qkv", q + 2 * kv, hidden_size, o.use_qkv_bias, dim=0, sections=(q, kv, kv))
        self.make_linear("dense", hidden_size, q, o.use_attention_dense_bias, dim=1)

    def forward(self, inputs: Any, position_ids: Tensor | None = None, *, parallel: bool = False) -> Any:
        """(hidden [N, S, H], attention_mask), with cross attention (hidden, cross_states [N, Sk, H], attention_mask) ->
        [N, S, H].

        Args:
            inputs: masks are additive or bool (True: seen), [N, 1, 1, Sk] or [N, 1, S, Sk], or None. Inside of a
                layer: `States`.
            position_ids: [N or 1, S], for rotary angles; None: 0, 1, 2, ..
            parallel: inside of a layer whose MLP reads the same input.
        """
        if isinstance(inputs, States):
            return self.beside(inputs, None) if parallel else self.inside(inputs)
        if self.cross_attention:
            inputs = _with_cross(self, inputs)
        heads = self.num_attention_heads
        region, states = open_region(
            self, inputs, cross=self.cross_attention, num_heads=heads, position_ids=position_ids
        )
        return region.leave(self.inside(states))

    @property
    def second(self) -> Matrix:
        return self.dense

    def partial(self, region: Region, x: Tensor | Spread, states: States) -> Tensor:
        d = self.attention_head_size
        if self.cross_attention:
            assert states.cross is not None
            other = Region.inside(self, states.cross_dim)
            q = region.column(x, self.query.weight, self.query.bias)
            k, v = other.column(states.cross, self.key_value.weight, self.key_value.bias).chunk(2, -1)
            mask = states.cross_mask
        else:
            kv = self.num_key_value_heads * d // self.tp_group.size
            together = region.column(x, self.qkv.weight, self.qkv.bias)
            q, k, v = together.split([together.shape[-1] - 2 * kv, kv, kv], -1)
            mask = states.mask
        q, k, v = (t.unflatten(-1, (-1, d)) for t in (q, k, v))
        if self.options.rotary_dim and not self.cross_attention:
            exact = torch.float32 if self.options.rotary_in_fp32 else torch.promote_types(q.dtype, torch.float32)
            cos, sin = angles(states.positions, q, self.options.rotary_dim, self.options.rotary_base, exact)
            q, k = (rotated(t, cos, sin, self.options.rotary_interleaved) for t in (q, k))
        context = self._attend(region, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return F.linear(context.transpose(1, 2).flatten(-2), self.dense.weight)

    def _attend(self, region: Region, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q [rows, heads, S, d], k, v [rows, own key-value heads, Sk, d] -> [rows, heads, S, d]."""
        if self.options.attention_in_fp32 and q.dtype != torch.float64:
            with nullcontext() if q.is_meta else torch.autocast(q.device.type, enabled=False):
                return self._attend_in(region, q.float(), k.float(), v.float(), mask).to(v.dtype)
        return self._attend_in(region, q, k, v, mask)

    def _attend_in(self, region: Region, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        causal = self.causal_mask_size is not None and not self.cross_attention
        if causal and q.shape[2] > self.causal_mask_size:  # type: ignore[operator]
            raise StepError(
                f"a sequence of length {q.shape[2]} is longer than causal_mask_size {self.causal_mask_size}"
            )
        bias, is_causal = self._score_mask(q, k, mask, causal)
        p = self.attention_dropout_prob if self.training else 0.0
        hides = bias is not None and bias.dtype != torch.bool  # under a bool mask kernels are right
        hides = hides and hides_everything(mask, q.shape[2], k.shape[2], causal, self.options.attention_window)
        if hides or not self.options.flash_attention:
            return self._attend_plainly(region, q, k, v, bias, is_causal, p)
        options: dict[str, Any] = {"is_causal": is_causal, "scale": self.scale, "enable_gqa": k.shape[1] != q.shape[1]}
        if p == 0.0:
            return F.scaled_dot_product_attention(q, k, v, bias, **options)
        with region.drawing(q, equal=False):
            return F.scaled_dot_product_attention(q, k, v, bias, p, **options)

    def _attend_plainly(
        self, region: Region, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, p: float
    ) -> Tensor:
        """What the fused kernel computes, by definition. Its gradient is right too where a mask hides every key, see
        `hides_everything`."""
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        weights = weights_of(q, k, bias, is_causal, self.scale)
        if p > 0.0:
            with region.drawing(q, equal=False):
                weights = F.dropout(weights, p)
        return weights @ v

    def _score_mask(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor | None, bool]:
        """What is added to scores, and whether the kernel's own causal mask is enough."""
        window, use_alibi = self.options.attention_window, self.options.use_alibi and not self.cross_attention
        if mask is None and not use_alibi and (window is None or window >= q.shape[2]):
            return None, causal
        sizes = q.shape[2], k.shape[2]
        bias = None
        if use_alibi:
            slopes = alibi_slopes(self.num_attention_heads, self.options.alibi_bias_max)
            exact = torch.promote_types(q.dtype, torch.float32)
            own = torch.tensor(slopes, dtype=exact, device=q.device).chunk(self.tp_group.size)[self.tp_group.rank]
            # Half precision keeps apart neighbours at hand, not those that are far from the last place.
            bias = alibi(own, *sizes, causal and q.dtype == exact)
        seen = visible(*sizes, window, q.device) if causal else None
        return score_mask(mask, bias, seen, q.dtype, self.options.hidden_rows), False

    def extra_repr(self) -> str:
        heads = f"num_attention_heads={self.num_attention_heads}"
        if self.num_key_value_heads != self.num_attention_heads:
            heads += f", num_key_value_heads={self.num_key_value_heads}"
        sizes = f"{heads}, attention_head_size={self.attention_head_size}, hidden_size={self.hidden_size}"
        return f"{sizes}, cross_attention={self.cross_attention}, causal_mask_size={self.causal_mask_size}"


def _check(heads: int, head_size: int, causal_mask_size: int | None, options: Options, num_parts: int) -> None:
    """Refuses what cannot be, before any weight exists."""
    key_heads = heads if options.num_key_value_heads is None else options.num_key_value_heads
    for name, number in {"num_attention_heads": heads, "num_key_value_heads": key_heads}.items():
        if number % num_parts or number < 1:
            raise PartitionError(f"{name} {number}: not a multiple of tensor_parallel_degree {num_parts}")
    if heads % key_heads:
        raise UsageError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {key_heads}")
    window = options.attention_window
    if window is not None and causal_mask_size is None:
        raise UsageError("attention_window needs the causal mask: set causal_mask_size")
    if window is not None and not (isinstance(window, int) and window > 0):
        raise UsageError(f"attention_window must be a positive number, got {window!r}")
    if (options.rotary_dim or 0) > head_size:
        raise UsageError(f"rotary_dim {options.rotary_dim} is more than attention_head_size {head_size}")


def _with_cross(module: DistributedModule, inputs: Any) -> tuple[Any, ...]:
    """(hidden, cross_states, mask of the cross states) as layers have it."""
    if not isinstance(inputs, tuple | list) or len(inputs) != 3:
        raise StepError(f"{type(module).__name__} takes one tuple (hidden, cross_states, attention_mask) here")
    hidden, cross_states, mask = inputs
    return hidden, cross_states, None, mask
