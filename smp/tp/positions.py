"""What attention knows of places: rotary angles, ALiBi, causal masks and local windows. Pure functions."""

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from smp.comm.collectives import is_structure
from smp.tp.options import HiddenRows

_HIDDEN = -1e4  # what an additive mask has where a place is not to be seen, or less


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first 2 * r places of vectors [rows, S, heads, d] by the angles [rows or 1, S, 1, r] (Su et al.,
    "RoFormer", 2021). `interleaved`: pairs are neighbours, (0, 1), (2, 3), ..; else (0, r), (1, r + 1), .."""
    r = cos.shape[-1]
    turned, rest = x[..., : 2 * r], x[..., 2 * r :]
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned.split(r, -1)
    first, second = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def angles(positions: Tensor | None, like: Tensor, dim: int, base: float, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [rows or 1, S, 1, dim / 2] for vectors `like` [rows, S, ..], in its dtype.

    Angles are computed in `exact`: in half precision neighbouring places could not be told apart.
    """
    if positions is None and not is_structure(like):
        return _usual_angles(like.shape[1], dim, base, exact, like.dtype, like.device)
    if positions is None:
        positions = torch.arange(like.shape[1], device=like.device).unsqueeze(0)
    return _angles(positions, dim, base, exact, like.dtype)


@lru_cache(maxsize=32)
def _usual_angles(
    length: int, dim: int, base: float, exact: torch.dtype, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # tensors made under it could not be used in training later
        return _angles(torch.arange(length, device=device).unsqueeze(0), dim, base, exact, dtype)


def _angles(positions: Tensor, dim: int, base: float, exact: torch.dtype, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rates = 1.0 / base ** (torch.arange(0, dim, 2, device=positions.device).to(exact) / dim)
    turned = positions.to(exact)[..., None, None] * rates
    return turned.cos().to(dtype), turned.sin().to(dtype)


def alibi_slopes(num_heads: int, largest: float = 8) -> list[float]:
    """How much a step of distance takes from each head's scores (Press et al., "Train short, test long", 2022): with a
    power of two heads 2^(-largest * k / num_heads), k = 1, 2, ..; else every second one of the next power of two first.
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-largest * k / power) for k in range(1, power + 1)]
    return slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


def alibi(slopes: Tensor, num_queries: int, num_keys: int, causal: bool) -> Tensor:
    """-slope * distance: [heads] -> [1, heads, num_queries or 1, num_keys]; with the causal mask counted from the last
    place, which changes all scores of a query alike."""
    keys = torch.arange(num_keys, device=slopes.device)
    if causal:
        distance = (num_keys - 1 - keys).view(1, 1, num_keys)
    else:
        queries = torch.arange(num_queries, device=slopes.device)
        distance = (queries.unsqueeze(1) - keys).abs().unsqueeze(0)
    return (-slopes.view(-1, 1, 1) * distance.to(slopes.dtype)).unsqueeze(0)


def visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys a query sees under the causal mask: [num_queries, num_keys], True for the `window` last ones up to its
    own place."""
    ahead = torch.arange(num_keys, device=device) - torch.arange(num_queries, device=device).unsqueeze(1)
    return (ahead <= 0) if window is None else (ahead <= 0) & (ahead > -window)


def score_mask(
    mask: Tensor | None,
    bias: Tensor | None,
    seen: Tensor | None,
    dtype: torch.dtype,
    hidden_rows: HiddenRows = "nothing",
) -> Tensor | None:
    """One tensor for scaled_dot_product_attention out of the user's mask, a bias of scores and what causality shows.

    Args:
        mask: additive, or bool where True is seen; [N, 1 or heads, 1 or Sq, Sk].
        bias: [1, heads, 1 or Sq, Sk].
        seen: [Sq, Sk].
        dtype: of the queries.
        hidden_rows: see Options.

    An additive mask counts as at least the smallest finite number, causality as minus infinity: where a query sees only
    places that the user has masked, it looks at all of those. A bool mask is such a number too, or with "nothing" minus
    infinity; with "all" causality is that number.
    """
    if mask is None and bias is None:
        return seen
    smallest = torch.finfo(dtype).min
    if mask is not None and mask.dtype == torch.bool and hidden_rows == "nothing":
        seen = mask if seen is None else mask & seen
        if bias is None:
            return seen
    elif mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, smallest)
        else:
            mask = mask.to(dtype).clamp(min=smallest)
        bias = mask if bias is None else (mask + bias.to(dtype)).clamp(min=smallest)
    assert bias is not None
    if seen is not None:
        bias = bias.masked_fill(~seen, smallest if hidden_rows == "all" else -math.inf)
    return bias.to(dtype)


def weights_of(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """What attention weighs values with, by definition: softmax(scale * q k' + bias), [N, heads, Sq, Sk].

    Args:
        q, k: [N, heads, Sq or Sk, d].
        bias: as out of `score_mask`.
        is_causal: there is no bias but the causal mask.
    """
    scores = q @ k.transpose(-1, -2) * scale
    if is_causal:
        bias = visible(q.shape[2], k.shape[2], None, q.device)
    if bias is None:
        return scores.softmax(-1)
    if bias.dtype == torch.bool:  # a row that sees nothing is 0
        return scores.masked_fill(~bias, torch.finfo(q.dtype).min).softmax(-1).masked_fill(~bias, 0.0)
    nothing = (bias == -math.inf).all(-1, keepdim=True)
    return (scores + bias.masked_fill(nothing, 0.0)).softmax(-1).masked_fill(nothing, 0.0)


# One mask goes to all layers, so it is looked at once: what it came to, by the mask's version and the other arguments.
_looked_at: WeakIdKeyDictionary = WeakIdKeyDictionary()


def hides_everything(mask: Tensor | None, num_queries: int, num_keys: int, causal: bool, window: int | None) -> bool:
    """Whether some query sees only places that the user's mask hides, see `Options.hidden_rows`.

    Kernels cannot be trusted with such a query: they keep the log of the sum of exponentials, in which the log of the
    number of places is lost beside the mask's value, and weigh each place with 1 in backward.

    Args:
        mask: as for `score_mask`; the others as for `visible`.
    """
    if mask is None or is_structure(mask):
        return False
    how = (num_queries, num_keys, causal, window)
    if mask.is_inference():  # it has no version
        return _hides_everything(mask.detach(), *how)
    known: dict[object, bool] = _looked_at.setdefault(mask, {})
    key = (mask._version, *how)
    if key not in known:
        known[key] = _hides_everything(mask.detach(), *how)
    return known[key]


def _hides_everything(mask: Tensor, num_queries: int, num_keys: int, causal: bool, window: int | None) -> bool:
    hidden = ~mask if mask.dtype == torch.bool else mask <= _HIDDEN
    if causal:
        hidden = hidden | ~visible(num_queries, num_keys, window, mask.device)
    return bool(hidden.all(-1).any())
