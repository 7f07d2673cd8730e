"""FlashAttentionLayer: attention on a fused q, k, v tensor, through torch's kernels."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp import log
from smp.errors import UsageError


class FlashAttentionLayer(nn.Module):
    """softmax(scale * q k^T + mask) v, with dropout on the probabilities; nothing of the size of the scores is kept.

    torch's `scaled_dot_product_attention` chooses the kernel (flash, memory-efficient, cuDNN, or plain operations), on
    every device and for every dtype. Outside of training there is no dropout.

    Args:
        attention_dropout_prob: probability with which an attention probability is dropped.
        attention_head_size: d; None: that of the tensor.
        scale_attention_scores: whether scores are divided by sqrt(d).
        scale_attn_by_layer_idx: whether they are divided by layer_idx + 1, as GPT-2 may.
        layer_idx: the layer's number, from 0.
        scale: what scores are multiplied by, instead of the two above.
        triton_flash_attention: has no effect: torch chooses the kernel.
        use_alibi: adds a bias that falls with the distance, see `alibi_slopes`.

    Raises:
        UsageError: scaling by a layer's number without one, or an argument out of range.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        if not 0.0 <= attention_dropout_prob <= 1.0:
            raise UsageError(f"attention_dropout_prob is {attention_dropout_prob}; it must be between 0 and 1")
        if scale_attn_by_layer_idx and layer_idx is None and scale is None:
            raise UsageError("scale_attn_by_layer_idx=True needs layer_idx, the number of the layer")
        if triton_flash_attention:
            log.warn_once("triton_flash_attention", "triton_flash_attention has no effect: torch chooses the kernel")
        self.attention_dropout_prob, self.attention_head_size = attention_dropout_prob, attention_head_size
        self.scale_attention_scores, self.scale_attn_by_layer_idx = scale_attention_scores, scale_attn_by_layer_idx
        self.layer_idx, self.scale, self.use_alibi = layer_idx, scale, use_alibi

    def forward(self, qkv: Tensor, attn_mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """qkv [N, S, 3, heads, d] -> [N, heads, S, d].

        Args:
            qkv: queries, keys and values.
            attn_mask: broadcasts to [N, heads, S, S]: added to the scores, or bool, False where a place is not seen.
            causal: whether each place sees itself and those before it only.

        Raises:
            UsageError: qkv has another shape.
        """
        head_size = self.attention_head_size
        if qkv.dim() != 5 or qkv.shape[2] != 3 or head_size not in (None, qkv.shape[4]):
            size = head_size if head_size is not None else "head size"
            raise UsageError(f"qkv must be [batch, length, 3, heads, {size}], got {tuple(qkv.shape)}")
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.use_alibi:
            bias = alibi_bias(qkv.shape[3], qkv.shape[1], query)
            attn_mask = bias if attn_mask is None else bias + additive(attn_mask, query.dtype)
        if causal and attn_mask is not None:
            seen = torch.ones(qkv.shape[1], qkv.shape[1], dtype=torch.bool, device=qkv.device).tril()
            attn_mask = additive(attn_mask, query.dtype).masked_fill(~seen, -math.inf)
        elif attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.to(query.dtype)
        return F.scaled_dot_product_attention(
            *(query, key, value, attn_mask),
            dropout_p=self.attention_dropout_prob if self.training else 0.0,
            is_causal=causal and attn_mask is None,
            scale=self.score_scale(qkv.shape[4]),
        )

    def score_scale(self, head_size: int) -> float:
        """What scores are multiplied by."""
        if self.scale is not None:
            return self.scale
        scale = 1 / math.sqrt(head_size) if self.scale_attention_scores else 1.0
        return scale / (self.layer_idx + 1) if self.scale_attn_by_layer_idx and self.layer_idx is not None else scale

    def extra_repr(self) -> str:
        return f"attention_dropout_prob={self.attention_dropout_prob}, use_alibi={self.use_alibi}"


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to be added to scores: bool ones become 0 where True and -inf where False."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


def alibi_slopes(heads: int, bias_max: float = 8.0) -> list[float]:
    """How much each head's bias falls per place of distance: 2^(-bias_max i / heads), i = 1 .. heads, for a power of
    two; for other numbers those of the next larger power, every second one first.
    (Press et al., "Train Short, Test Long", 2022.)"""
    power = 2 ** math.ceil(math.log2(heads)) if heads > 1 else 1
    slopes = [2.0 ** (-bias_max * i / power) for i in range(1, power + 1)]
    return slopes if power == heads else (slopes[1::2] + slopes[::2])[:heads]


def alibi_bias(heads: int, length: int, like: Tensor) -> Tensor:
    """[1, heads, length, length]: minus slope times distance, in the dtype and on the device of `like`."""
    exact = torch.promote_types(like.dtype, torch.float32)  # half precision has no distance of 257
    place = torch.arange(length, device=like.device)
    distance = (place.unsqueeze(0) - place.unsqueeze(1)).abs().to(exact)
    slopes = torch.tensor(alibi_slopes(heads), dtype=exact, device=like.device)
    return -(slopes.view(1, heads, 1, 1) * distance).to(like.dtype)
