"""What distributed transformer modules can be told beyond their sizes, in one place for all of them."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from smp.errors import UsageError

Norm = Literal["layer", "rms"]
HiddenRows = Literal["nothing", "visible", "all"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Keyword arguments that every distributed transformer module takes; it ignores those it has no use for.

    Args:
        num_key_value_heads: heads of keys and values, each used by as many query heads (grouped queries); None: as many
            as there are query heads.
        use_qkv_bias, use_attention_dense_bias, use_mlp_bias: which linears have a bias.
        rotary_dim: how many places of each head's vectors are rotated by position, an even number; None: none.
        rotary_interleaved: whether the pairs that are rotated together are neighbours (0, 1), (2, 3), .. or lie half a
            rotary_dim apart.
        rotary_base: the slowest pair's wavelength is 2 pi times nearly this.
        rotary_in_fp32: angles are computed in float32 whatever the inputs' dtype, as other libraries have it; else in
            float32 at least.
        scale_attention_scores: divide scores by the square root of the head size.
        scale_attn_by_layer_idx: divide them by `layer_idx + 1` too.
        layer_idx: the layer's number, from 0; a transformer sets it.
        attention_window: a place sees that many places, itself included; needs the causal mask. For a transformer it
            may be a sequence, one for each layer.
        use_alibi, alibi_bias_max: scores get -distance * 2^(-alibi_bias_max * k / heads) for head k = 1, 2, ..
        hidden_rows: what a place attends to all of whose keys a bool mask hides: "nothing"; "visible": to all of them
            alike that causality lets it see; "all": to all places alike. Libraries differ here. Where an additive mask
            hides all keys it is the second one. Such attention is computed by its definition: torch's fused kernel for
            the CPU has other gradients there.
        parallel_attention: attention and MLP both read the layer's input: x + attention(x) + mlp(x).
        single_pre_layernorm: with parallel_attention: both read the same normalised input.
        norm: layer norm or root mean square norm.
        norm_bias: whether layer norms have a shift.
        gated_mlp: activation(gate) * up instead of activation(up).
        attention_in_fp32: scores, softmax and weighted sums in float32 whatever the inputs' dtype.
        fp32_residual_addition: residuals are added in float32.
        zero_init: the matrices that write to the residual start at zero, so that a layer starts as the identity.
        query_key_layer_scaling: accepted; it divides scores by the layer's number and multiplies them back, which
            matters only to kernels that hold scores in half precision.
        flash_attention: whether attention goes through torch's fused kernel; False: by its definition.
        fused_softmax, fused_bias_gelu, fused_dropout, distribute_embedding: accepted.

    Raises:
        UsageError: a value that makes no sense.
    """

    num_key_value_heads: int | None = None
    use_qkv_bias: bool = True
    use_attention_dense_bias: bool = True
    use_mlp_bias: bool = True
    rotary_dim: int | None = None
    rotary_interleaved: bool = False
    rotary_base: float = 10000.0
    rotary_in_fp32: bool = False
    scale_attention_scores: bool = True
    scale_attn_by_layer_idx: bool = False
    layer_idx: int | None = None
    attention_window: Any = None
    use_alibi: bool = False
    alibi_bias_max: float = 8
    hidden_rows: HiddenRows = "nothing"
    parallel_attention: bool = False
    single_pre_layernorm: bool = False
    norm: Norm = "layer"
    norm_bias: bool = True
    gated_mlp: bool = False
    attention_in_fp32: bool = False
    fp32_residual_addition: bool = False
    zero_init: bool = False
    query_key_layer_scaling: bool = False
    fused_softmax: bool = True
    fused_bias_gelu: bool = False
    fused_dropout: bool = False
    flash_attention: bool = True
    distribute_embedding: bool = False

    def __post_init__(self) -> None:
        if self.rotary_dim is not None and (self.rotary_dim < 0 or self.rotary_dim % 2):
            raise UsageError(f"rotary_dim must be an even number, got {self.rotary_dim}")
        if self.norm not in ("layer", "rms"):
            raise UsageError(f"norm must be 'layer' or 'rms', got {self.norm!r}")
        if self.hidden_rows not in ("visible", "all", "nothing"):
            raise UsageError(f"hidden_rows must be 'visible', 'all' or 'nothing', got {self.hidden_rows!r}")
        if self.scale_attn_by_layer_idx and self.layer_idx is None:
            raise UsageError("scale_attn_by_layer_idx needs layer_idx, the layer's number from 0")
        if self.single_pre_layernorm and not self.parallel_attention:
            raise UsageError("single_pre_layernorm needs parallel_attention: attention and MLP read the same input")

    @classmethod
    def of(cls, given: Mapping[str, Any], owner: str) -> "Options":
        """Reads keyword arguments.

        Raises:
            UsageError: `owner` has no such argument, or a value makes no sense.
        """
        known = {field.name for field in fields(cls)}
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; its options are {', '.join(sorted(known))}"
                raise UsageError(f"{owner} has no argument {name!r}{hint}")
        return cls(**given)


def check_norms(pre_layernorm: bool, post_layernorm: bool) -> None:
    """Raises `UsageError` where there is no norm at all."""
    if not (pre_layernorm or post_layernorm):
        raise UsageError("pre_layernorm and post_layernorm are both False; at least one of them must be True")
