"""FlashAttentionLayer: attention on a fused q, k, v tensor, through torch's kernels."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp import log
from smp.errors import UsageError
from smp.tp.positions import alibi, alibi_slopes, hides_everything, score_mask, visible, weights_of


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
        use_alibi: adds a bias that falls with the distance, see `positions.alibi_slopes`.

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
        heads, length = query.shape[1], query.shape[2]
        bias = None
        if self.use_alibi:
            exact = torch.promote_types(query.dtype, torch.float32)  # half precision has no distance of 257
            slopes = torch.tensor(alibi_slopes(heads), dtype=exact, device=query.device)
            bias = alibi(slopes, length, length, causal=False)  # by distance, which is small where it matters
        kernel_mask = None
        if attn_mask is not None or bias is not None:
            seen = visible(length, length, None, query.device) if causal else None
            kernel_mask = score_mask(attn_mask, bias, seen, query.dtype)
        p, scale = self.attention_dropout_prob if self.training else 0.0, self.score_scale(qkv.shape[4])
        bool_mask = kernel_mask is None or kernel_mask.dtype == torch.bool  # with which kernels are right
        if not bool_mask and hides_everything(attn_mask, length, length, causal, None):
            return F.dropout(weights_of(query, key, kernel_mask, False, scale), p) @ value
        return F.scaled_dot_product_attention(
            *(query, key, value, kernel_mask),
            dropout_p=p,
            is_causal=causal and kernel_mask is None,
            scale=scale,
        )

    def score_scale(self, head_size: int) -> float:
        """What scores are multiplied by."""
        if self.scale is not None:
            return self.scale
        scale = 1 / math.sqrt(head_size) if self.scale_attention_scores else 1.0
        return scale / (self.layer_idx + 1) if self.scale_attn_by_layer_idx and self.layer_idx is not None else scale

    def extra_repr(self) -> str:
        return f"attention_dropout_prob={self.attention_dropout_prob}, use_alibi={self.use_alibi}"
