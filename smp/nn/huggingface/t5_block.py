"""Blocks of T5, MT5 and UMT5, cut inside; their parts stay where transformers has them.

    part of a block                       how it is cut
    q, k, v; qkv, key_value fused         by heads, rows of the matrices
    o                                     by heads, columns
    relative_attention_bias               by heads, columns of the table
    wi; wi_01, the gate's and wi fused    by features, rows
    wo                                    by features, columns
    layer_norm                            whole

A block has the arguments and results of the one it replaces. Only what one block hands to the next besides hidden
states, position biases with the masks in them, stays as a block has it inside: this rank's heads, the rows of all
batches that it works on. Those have a fifth dimension, so that a block that is whole cannot take them for its own.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smp.comm.autograd import all_to_all, gather_slices
from smp.errors import PartitionError, StepError
from smp.nn.huggingface.arguments import additive, bound, causal_mask, refuse
from smp.tp.module import DistributedModule
from smp.tp.region import Region


@dataclass(frozen=True)
class Sizes:
    """What a block is made from.

    Attributes:
        d_model, num_heads, d_kv, d_ff: of hidden states, all heads, one head, the feed-forward part inside.
        is_decoder: whether there is a cross attention, and whether biases tell later places apart.
        has_bias: whether the block has a table of position biases.
        num_buckets, max_distance: of that table.
        attention_dropout, dropout, inner_dropout: of probabilities, of what is added to hidden states, of the
            feed-forward part inside.
        epsilon: of the norms.
        gated: whether the feed-forward part has a gate.
        activation: of the feed-forward part, element by element.
        layer_idx: under which number the block keeps keys and values in a cache.
        parameters: names of the arguments of the block that is replaced.
        since_v5: whether it is one of transformers 5: masks are bool, or left out where they hide nothing; softmax is
            in the dtype of the scores; results are (hidden states, position bias, that of cross attention or None).
    """

    d_model: int
    num_heads: int
    d_kv: int
    d_ff: int
    is_decoder: bool
    has_bias: bool
    num_buckets: int
    max_distance: int
    attention_dropout: float
    dropout: float
    inner_dropout: float
    epsilon: float
    gated: bool
    activation: nn.Module
    layer_idx: int | None
    parameters: tuple[str, ...]
    since_v5: bool


def buckets(distance: Tensor, num_buckets: int, max_distance: int, *, bidirectional: bool) -> Tensor:
    """Which entry of the table of biases a distance (position of the key - position of the query) has.

    Half of the buckets stand for one distance each, the others for ranges that grow logarithmically up to
    `max_distance`. `bidirectional`: one half of all is for later keys; otherwise these count as distance 0. (Raffel et
    al., "Exploring the limits of transfer learning with a unified text-to-text transformer", 2020, section 2.1.)
    """
    later = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        later = (distance > 0).long() * num_buckets
        distance = distance.abs()
    else:
        distance = -distance.clamp(max=0)
    exact = num_buckets // 2
    # In float32 and in this order, as transformers computes it: rounding decides at the border of a bucket.
    far = torch.log(distance.float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    return later + torch.where(distance < exact, distance, (exact + far.long()).clamp(max=num_buckets - 1))


class _Matrix(DistributedModule):
    """Holds one weight."""

    weight: nn.Parameter

    def __init__(self, *shape: int, dim: int | None, sections: tuple[int, ...] = (), std: float = 0.0) -> None:
        super().__init__()

        def initialise(whole: Tensor) -> None:
            nn.init.normal_(whole, 0.0, std) if std else nn.init.ones_(whole)

        self.create_parameter("weight", shape, initialise, dim=dim, sections=sections)


class _Attention(nn.Module):
    """The weights of an attention of `sizes`; `cross`: to the encoder's states."""

    def __init__(self, sizes: Sizes, cross: bool) -> None:
        super().__init__()
        s, inner = sizes, sizes.num_heads * sizes.d_kv
        query, other = (s.d_model * s.d_kv) ** -0.5, s.d_model**-0.5
        if cross:
            self.q = _Matrix(inner, s.d_model, dim=0, std=query)
            self.key_value = _Matrix(2 * inner, s.d_model, dim=0, sections=(inner, inner), std=other)
        else:
            self.qkv = _Matrix(3 * inner, s.d_model, dim=0, sections=(inner, inner, inner), std=other)
        self.o = _Matrix(s.d_model, inner, dim=1, std=inner**-0.5)
        if s.has_bias and not cross:
            self.relative_attention_bias = _Matrix(s.num_buckets, s.num_heads, dim=1, std=other)


class _FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        wide, std = sizes.d_ff, sizes.d_model**-0.5
        if sizes.gated:
            self.wi_01 = _Matrix(2 * wide, sizes.d_model, dim=0, sections=(wide, wide), std=std)
        else:
            self.wi = _Matrix(wide, sizes.d_model, dim=0, std=std)
        self.wo = _Matrix(sizes.d_model, wide, dim=1, std=wide**-0.5)


class _Layer(nn.Module):
    """One of `SelfAttention`, `EncDecAttention`, `DenseReluDense` with the norm before it."""

    def __init__(self, sizes: Sizes, name: str, inside: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inside)
        self.layer_norm = _Matrix(sizes.d_model, dim=None)


class DistributedT5Block(DistributedModule):
    """The twin of T5Block and MT5Block, cut as the table above says. Works in a Region, as distributed
    transformer layers do; attention has no fused kernel, since a gradient flows to the position bias.

    A cache that is handed in is filled with this rank's heads, of all batches that the block works on; it is of use to
    this block only.

    Args:
        sizes: see there.

    Raises:
        PartitionError: the heads or d_ff do not divide by the tensor-parallel degree.
    """

    on_one_stage = True  # it computes with the weights of the modules in it

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, self.is_decoder = sizes, sizes.is_decoder
        self.num_heads = sizes.num_heads // self.tp_group.size
        if sizes.num_heads % self.tp_group.size:
            raise PartitionError(
                f"num_heads {sizes.num_heads}: not a multiple of tensor_parallel_degree {self.tp_group.size}"
            )
        self.activation = sizes.activation
        self.layer = nn.ModuleList([_Layer(sizes, "SelfAttention", _Attention(sizes, cross=False))])
        if sizes.is_decoder:
            self.layer.append(_Layer(sizes, "EncDecAttention", _Attention(sizes, cross=True)))
        self.layer.append(_Layer(sizes, "DenseReluDense", _FeedForward(sizes)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the block of transformers: `hidden_states` [N, S, d_model], additive or bool masks [N, 1, S or 1, K] ->
        (hidden states, position bias, attention probabilities if asked for, and both of the cross attention).

        Raises:
            StepError: an argument that the twin does not know, as a head mask, the position bias of a whole block, or
                attention probabilities are asked for in transformers 5.
        """
        run = _Run(self, bound(self.sizes.parameters, args, kwargs), kwargs.get("cache_position"))
        return self._result(run.region.leave(run.hidden), run)

    def _result(self, hidden: Tensor, run: "_Run") -> Any:
        """In the form in which the original returns it."""
        if not self.sizes.since_v5:
            told = zip(run.biases, run.probabilities) if run.probabilities else zip(run.biases)
            return hidden, *(value for pair in told for value in pair)
        return hidden, run.biases[0], run.biases[1] if len(run.biases) > 1 else None


class _Run:
    """One forward of a block.

    Args:
        block: the block.
        given: arguments by the original's names.
        cache_position: [S], which places of the sequence these are; None: those behind what is in the cache.

    Attributes:
        region: where the block works.
        hidden: hidden states inside of it.
        seen: how many places the cache holds already.
        biases: position biases of self attention and cross attention, to be handed on.
        probabilities: those of both attentions, if they are asked for.
    """

    def __init__(self, block: DistributedT5Block, given: dict[str, Any], cache_position: Tensor | None) -> None:
        self.block, self.sizes = block, block.sizes
        hidden, mask = given.pop("hidden_states"), given.pop("attention_mask", None)
        states, cross_mask = given.pop("encoder_hidden_states", None), given.pop("encoder_attention_mask", None)
        bias = given.pop("position_bias", None)
        cross_bias = given.pop("encoder_decoder_position_bias", None)
        # Models of transformers 5 look for attentions that are whole, so there it is refused.
        self.tell = not self.sizes.since_v5 and bool(given.pop("output_attentions", False))
        caches = [given.pop(name, None) for name in ("cache", "past_key_values")]
        self.cache: Any = next((cache for cache in caches if cache is not None), None)
        refuse(**given)
        self.region = Region.of(block, hidden)
        self.rows, self.length = hidden.shape[0], hidden.shape[1]
        self.cache_position = cache_position
        self.seen = 0 if self.cache is None else self.cache.get_seq_length(self.sizes.layer_idx)
        self.biases: list[Tensor] = []
        self.probabilities: list[Tensor] = []
        if self.sizes.since_v5:
            mask = self._mask(mask, hidden, self.seen + self.length, self.sizes.is_decoder)
            if states is not None:
                cross_mask = self._mask(cross_mask, hidden, states.shape[1], False)
        self.hidden = self.region.enter(hidden)
        layers: list[Any] = list(block.layer)
        self._norms = iter(self.region.whole(*(layer.layer_norm.weight for layer in layers)))
        self.attend(layers[0], None, mask, bias)
        if self.sizes.is_decoder and states is not None:
            self.attend(layers[1], states, cross_mask, cross_bias)
        elif self.sizes.is_decoder:
            next(self._norms)
        self.feed_forward(layers[-1])

    def _mask(self, mask: Tensor | None, hidden: Tensor, num_keys: int, causal: bool) -> Tensor | None:
        """A mask of transformers 5, which is bool, or left out where it hides nothing in this rank's batch. Joined with
        those of other ranks it always has one shape: another rank's batch may have something to hide."""
        if mask is None and causal and self.length > 1:
            mask = causal_mask(hidden)
        joined = not self.region.shared and self.region.group.size > 1
        if mask is None:
            mask = hidden.new_zeros(1, 1, 1, num_keys) if joined else None
        if mask is not None:
            mask = additive(mask, hidden.dtype)
        return mask.expand(self.rows, 1, self.length, mask.shape[-1]) if joined and mask is not None else mask

    def _normed(self) -> Tensor:
        """Root mean square norm of the hidden states; the square in float32, whatever they are."""
        weight = next(self._norms)
        assert weight is not None
        square = self.hidden.float().pow(2).mean(-1, keepdim=True)
        normed = self.hidden * torch.rsqrt(square + self.sizes.epsilon)
        if weight.dtype in (torch.float16, torch.bfloat16):
            normed = normed.to(weight.dtype)
        return weight * normed

    def _add(self, out: Tensor) -> None:
        self.hidden = self.hidden + self.region.dropout(out, self.sizes.dropout, self.block.training)
        if self.hidden.dtype == torch.float16:  # infinities would become NaN in the next norm
            finite = torch.finfo(torch.float16).max
            largest = torch.where(torch.isinf(self.hidden).any(), finite - 1000, finite)
            self.hidden = torch.clamp(self.hidden, min=-largest, max=largest)

    def _inner_dropout(self, x: Tensor, p: float) -> Tensor:
        """Of what each rank has other parts of."""
        if not self.block.training or p == 0:
            return x
        with self.region.drawing(x, equal=False):
            return F.dropout(x, p)

    def feed_forward(self, layer: Any) -> None:
        dense, normed = layer.DenseReluDense, self._normed()
        if self.sizes.gated:
            gate, up = self.region.column(normed, dense.wi_01.weight, None).chunk(2, -1)
            inner = self.block.activation(gate) * up
        else:
            inner = self.block.activation(self.region.column(normed, dense.wi.weight, None))
        inner = self._inner_dropout(inner, self.sizes.inner_dropout)
        self._add(
            self.region.row(inner.to(dense.wo.weight.dtype), dense.wo.weight, None)
        )  # transformers keeps wo in fp32

    def attend(self, layer: Any, states: Tensor | None, mask: Tensor | None, bias: Tensor | None) -> None:
        """Self attention, or cross attention to `states` [N, K, d_model], with the norm, the bias and the residual."""
        attention = layer.SelfAttention if states is None else layer.EncDecAttention
        query, key, value = self._query_key_value(attention, states)
        scores = query @ key.transpose(-1, -2)
        bias = self._bias(attention, mask, key.shape[2]) if bias is None else _taken_over(bias)
        self.biases.append(bias.unsqueeze(2))
        scores = scores + bias
        probabilities = scores.softmax(-1) if self.sizes.since_v5 else scores.float().softmax(-1).to(scores.dtype)
        probabilities = self._inner_dropout(probabilities, self.sizes.attention_dropout)
        context = (probabilities @ value).transpose(1, 2).flatten(2)
        self._add(self.region.row(context, attention.o.weight, None))
        if self.tell:
            self.probabilities.append(self._of_all_heads(probabilities))

    def _query_key_value(self, attention: Any, states: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, own heads, S or K, d_kv] each; rows of all batches that the block works on."""
        normed = self._normed()
        if states is None:
            query, key, value = self._heads(self.region.column(normed, attention.qkv.weight, None), 3)
            return query, *self._kept(key, value)
        (query,) = self._heads(self.region.column(normed, attention.q.weight, None), 1)
        idx, updated = self.sizes.layer_idx, getattr(self.cache, "is_updated", None)
        if updated is not None and updated.get(idx):
            kept = self.cache.cross_attention_cache.layers[idx]
            return query, kept.keys, kept.values
        region = Region.of(self.block, states)
        key, value = self._heads(region.column(region.enter(states), attention.key_value.weight, None), 2)
        return query, *self._kept(key, value, cross=True)

    def _heads(self, x: Tensor, number: int) -> list[Tensor]:
        return [part.unflatten(-1, (self.block.num_heads, -1)).transpose(1, 2) for part in x.chunk(number, -1)]

    def _kept(self, key: Tensor, value: Tensor, cross: bool = False) -> tuple[Tensor, Tensor]:
        """Keys and values behind those that a cache has already."""
        cache, idx = self.cache, self.sizes.layer_idx
        if cache is None:
            return key, value
        if hasattr(cache, "is_updated"):  # a pair of caches
            cache = cache.cross_attention_cache if cross else cache.self_attention_cache
        more = () if cross or self.cache_position is None else ({"cache_position": self.cache_position},)
        key, value = cache.update(key, value, idx, *more)
        if cross and hasattr(self.cache, "is_updated"):
            self.cache.is_updated[idx] = True
        return key, value

    def _bias(self, attention: Any, mask: Tensor | None, num_keys: int) -> Tensor:
        """[1 or rows, own heads or 1, S or 1, K] to be added to scores."""
        mask = self.region.batch(mask, self.rows)
        mask = mask[..., :num_keys] if mask is not None else self.hidden.new_zeros(1, 1, 1, num_keys)
        if not hasattr(attention, "relative_attention_bias"):
            return mask
        keys, queries = torch.arange(num_keys, device=mask.device), self.cache_position
        if queries is None:
            queries = torch.arange(self.length, device=mask.device) + self.seen
        entries = buckets(
            keys[None, :] - queries[:, None].to(mask.device),
            self.sizes.num_buckets,
            self.sizes.max_distance,
            bidirectional=not self.sizes.is_decoder,
        )
        return F.embedding(entries, attention.relative_attention_bias.weight).permute(2, 0, 1).unsqueeze(0) + mask

    def _of_all_heads(self, probabilities: Tensor) -> Tensor:
        """[rows, own heads, S, K] -> [N, heads, S, K] of this rank's batch, as transformers tells them."""
        group = self.region.group
        if self.region.shared:
            return gather_slices(probabilities, group, 1)
        return all_to_all(probabilities, group, 0, 1)


def _taken_over(bias: Tensor) -> Tensor:
    """The position bias from the block before.

    Raises:
        StepError: that block is whole.
    """
    if bias.dim() == 4:
        raise StepError(
            "a block of T5 that is split got the position bias of one that is whole: mark all blocks of an encoder or "
            "decoder for tensor parallelism, or none of them"
        )
    return bias.squeeze(2)


class DistributedUMT5Block(DistributedT5Block):
    """The twin of UMT5Block: every block has position biases of its own and hands none on."""

    def _result(self, hidden: Tensor, run: _Run) -> Any:
        if self.sizes.since_v5:
            return hidden
        if not run.tell:
            return (hidden,)
        return hidden, run.probabilities[0], run.probabilities[1] if len(run.probabilities) > 1 else None
