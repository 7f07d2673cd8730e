"""How hidden states are laid out over the ranks inside of distributed transformer modules, and what moves them.

A region is the inside of the outermost such module. Two kinds of batch meet two ways to communicate (`optimize`):

                    joined batches (each tp_rank brings its own [N, S, H])    batch that all share (prescaled_batch)
    speed   WHOLE   enter: gather rows, leave: own rows                       enter, leave: identity
    memory  PARTS   enter, leave: identity (a part is the rank's own rows)    enter: own places of the sequence,
                                                                              leave: gather them

WHOLE: the hidden states are equal on every rank, and so are their gradients. A block sends one all_reduce forward and
one backward. PARTS: each rank has its part along `dim` (0: rows, 1: the sequence) and norms, dropouts and residuals
work on parts; a block gathers its input and scatters the sum of its outputs.

    WHOLE    x --copy_in--> columns .. rows --sum_out----> + x            (Shoeybi et al., "Megatron-LM", 2019)
    PARTS    x --gather---> columns .. rows --scatter_sum-> + x           (Korthikanti et al., "Reducing activation
                                                                          recomputation", 2022)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smp import log, rng, runtime
from smp.bootstrap import default_generators
from smp.comm import collectives
from smp.comm.autograd import (
    all_to_all,
    copy_in,
    copy_in_all,
    copy_in_linear,
    gather_batch,
    gather_linear,
    gather_slices,
    gathered_linear,
    own_slice,
    repeated,
    scatter_sum,
    sum_out,
)
from smp.errors import StepError
from smp.groups import Group
from smp.tp.module import DistributedModule


class Spread(NamedTuple):
    """Hidden states on every rank, out of `Region.spread`.

    Attributes:
        whole: of all rows and places.
        part: own part of them, where hidden states lie in parts.
    """

    whole: Tensor
    part: Tensor | None


@dataclass(frozen=True)
class Region:
    """The layout of one tensor of hidden states [N, S, H], and the operations that depend on it.

    Attributes:
        group: the tensor-parallel group.
        shared: all ranks brought the same batch.
        dim: along which dimension each rank has its part; None: every rank has the whole.
        path: name of the module, for messages.
    """

    group: Group
    shared: bool
    dim: int | None
    path: str = ""

    @classmethod
    def of(cls, module: DistributedModule, hidden: Tensor) -> "Region":
        """The region that opens when `hidden` [N, S, H], as the user passed it, comes to `module`.

        Where all share a batch whose sequence does not divide by the tensor-parallel degree it is whole: no rank could
        tell from its part how much the others have.
        """
        group, shared = module.tp_group, module.shared_batch
        if group.size == 1 or runtime.get().config.optimize == "speed":
            return cls(group, shared, None, module._smp_path)
        if not shared:
            return cls(group, shared, 0, module._smp_path)
        if hidden.shape[1] % group.size == 0:
            return cls(group, shared, 1, module._smp_path)
        log.warn_once(
            "sequence does not divide",
            "a sequence of length %d does not divide by tensor_parallel_degree %d, so %s keeps whole activations for "
            "it, as with optimize 'speed'; pad sequences to a multiple",
            *(hidden.shape[1], group.size, module._smp_path or type(module).__name__),
        )
        return cls(group, shared, None, module._smp_path)

    @classmethod
    def inside(cls, module: DistributedModule, dim: int | None) -> "Region":
        """The region that is open already and has that `dim`."""
        return cls(module.tp_group, module.shared_batch, dim, module._smp_path)

    @property
    def checked(self) -> bool | str:
        """How messages that meet other ranks' batches are checked, see collectives.all_gather."""
        return self.path or True

    def expect_same(self, hidden: Tensor, **arguments: Tensor | None) -> None:
        """Where batches are joined: sees that all ranks were given the same ones of these arguments.

        Raises:
            StepError: on every rank: one has an argument that another one has not.
        """
        if self.shared or self.group.size == 1 or collectives.is_structure(hidden):
            return
        given = ", ".join(name for name, argument in arguments.items() if argument is not None)
        collectives.check_alike(hidden, self.group, f"{self.path or 'a distributed module'} given {given or 'no more'}")

    # ---- hidden states

    def enter(self, x: Tensor) -> Tensor:
        """What the user passed in, [N, S, H] -> inside: [size * N, S, H], [N, S / size, H], or as it is."""
        if self.group.size == 1:
            return x
        if not self.shared:
            return x if self.dim is not None else gather_slices(x, self.group, 0, checked=self.checked)
        return x if self.dim is None else own_slice(x, self.group, self.dim)

    def leave(self, x: Tensor) -> Tensor:
        """Inside -> what the user gets, [N, S, H]. Inverse of `enter`."""
        if self.group.size == 1:
            return x
        if not self.shared:
            return own_slice(x, self.group, 0) if self.dim is None else x
        return x if self.dim is None else gather_slices(x, self.group, self.dim)

    def spread(self, x: Tensor) -> "Spread":
        """Hidden states that several `column`s are about to use: what each would send for its input, once."""
        if self.dim is None:
            return Spread(copy_in(x, self.group), None)
        return Spread(gather_batch(x, self.group, self.dim, checked=not self.shared and self.checked), x.detach())

    def column(self, x: "Tensor | Spread", weight: Tensor, bias: Tensor | None) -> Tensor:
        """Hidden states times own columns: inside [.., H], weight [out_k, H] -> [rows, S, out_k], whole rows.

        Forward: identity or all_gather. Backward: all_reduce, or reduce_scatter and the all_gather again.
        """
        if isinstance(x, Spread):
            if x.part is None or self.dim is None:
                return F.linear(x.whole, weight, bias)
            return gathered_linear(x.whole, x.part, weight, bias, self.group, self.dim)
        if self.dim is not None:
            checked = not self.shared and self.checked
            return gather_linear(x, weight, bias, self.group, self.dim, checked=checked)
        return copy_in_linear(x, weight, bias, self.group)

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Own rows of a matrix: [rows, S, in_k], weight [H, in_k] -> inside [.., H], the sum over the ranks, + bias.

        `bias` [H] is whole, out of `whole`.
        """
        return self.total(F.linear(x, weight), bias)

    def total(self, partial: Tensor, bias: Tensor | None) -> Tensor:
        """The sum over the ranks of what `row` multiplied: [rows, S, H] -> inside [.., H].

        Forward: all_reduce or reduce_scatter. Backward: identity or all_gather.
        """
        out = sum_out(partial, self.group) if self.dim is None else scatter_sum(partial, self.group, self.dim)
        return out if bias is None else out + bias.to(out.dtype)

    # ---- everything else

    def whole(self, *params: Tensor | None) -> tuple[Tensor | None, ...]:
        """Parameters that every rank has whole, to be used on hidden states; in place of the parameters themselves.

        Afterwards the mean over DP_GROUP is the right gradient of each of them, as of every parameter that is not cut:

            joined, WHOLE    each rank computes the joined batch's gradient         1 / size of it
            joined, PARTS    each rank computes that of its own batch               as it is
            shared, WHOLE    each rank computes the same                            as it is
            shared, PARTS    each rank computes that of its places                  all_reduce, one for all of them
        """
        joined_whole = not self.shared and self.dim is None
        if self.group.size == 1 or not (joined_whole or (self.shared and self.dim is not None)):
            return params
        live = [param for param in params if param is not None and param.requires_grad]
        used = iter(repeated(live, self.group) if joined_whole else copy_in_all(live, self.group))
        return tuple(next(used) if param is not None and param.requires_grad else param for param in params)

    def batch(self, x: Tensor | None, num_rows: int, num_heads: int | None = None) -> Tensor | None:
        """A mask, a bias of scores or ids, [N or 1, ..] -> those of the rows that attention sees, equal on every rank.

        With `num_heads`, [.., num_heads, S, S] at dimension 1 is cut to own heads. Gradients flow back.

        Args:
            num_rows: N, of the hidden states as the user passed them.
        """
        if x is None or self.group.size == 1:
            return x
        by_heads = num_heads is not None and num_heads > 1 and x.dim() == 4 and x.shape[1] == num_heads
        if self.shared:
            if by_heads:
                return own_slice(x, self.group, 1)
            return copy_in(x, self.group) if x.requires_grad else x
        if x.dim() and x.shape[0] == 1 and num_rows > 1:
            x = x.expand(num_rows, *x.shape[1:])
        if by_heads:
            return all_to_all(x, self.group, 1, 0, checked=self.checked)
        return gather_batch(x, self.group, checked=self.checked)

    @contextmanager
    def drawing(self, x: Tensor, *, equal: bool) -> Iterator[None]:
        """Around what draws random numbers for `x`: the same ones on every tp_rank, or different ones.

        In a step they come from the step's streams. Outside of one from a seed that tp_rank 0 draws, so that ranks
        agree whose generators have parted; afterwards it is as if that seed alone had been drawn.
        """
        salt = 0 if equal else rng.part_salt(self.group.rank)
        streams = rng.current_streams()
        if self.group.size == 1 or (streams is None and collectives.is_structure(x)):
            yield
        elif streams is not None:
            with streams.salted(salt):
                yield
        else:
            drawn = torch.tensor(rng.draw_seed())
            seed = int(collectives.broadcast(drawn, self.group, 0)) ^ salt
            states = [(generator, generator.get_state()) for generator in default_generators()]
            try:
                for generator, _ in states:
                    generator.manual_seed(seed)
                yield
            finally:
                for generator, state in states:
                    generator.set_state(state)

    def dropout(self, x: Tensor, p: float, training: bool) -> Tensor:
        """Dropout of hidden states inside: one mask for all ranks where they have the same, else one for each."""
        if not training or p == 0.0:
            return x
        with self.drawing(x, equal=self.dim is None):
            return F.dropout(x, p)


class States(NamedTuple):
    """What one layer passes to the next one inside of a region.

    Attributes:
        hidden: hidden states, inside.
        cross: those of the encoder, inside of a region of their own.
        mask, cross_mask: of the rows that attention sees, see `Region.batch`.
        positions: of the places, [rows, S]; None: 0, 1, 2, ..
        dim, cross_dim: `Region.dim` of both.
    """

    hidden: Tensor
    cross: Tensor | None
    mask: Tensor | None
    cross_mask: Tensor | None
    positions: Tensor | None
    dim: int | None
    cross_dim: int | None


def open_region(
    module: DistributedModule,
    inputs: Sequence[Any],
    *,
    cross: bool,
    num_heads: int,
    position_ids: Tensor | None = None,
) -> tuple[Region, States]:
    """What the user passed to the outermost module -> the region and what passes inside of it.

    Args:
        inputs: (hidden, mask), or with `cross` (hidden, cross_states, mask, cross_mask); masks may be None.
        cross: whether there are states of an encoder.
        num_heads: of the attention, for masks that have a dimension of heads.
        position_ids: [N or 1, S].

    Raises:
        StepError: `inputs` is not such a tuple, or other tp_ranks were given other ones of the arguments.
    """
    hidden, cross_states, mask, cross_mask = _taken_apart(module, inputs, cross)
    region = Region.of(module, hidden)
    region.expect_same(hidden, attention_mask=mask, cross_mask=cross_mask, position_ids=position_ids)
    rows = hidden.shape[0]
    cross_region = region if cross_states is None else Region.of(module, cross_states)
    return region, States(
        region.enter(hidden),
        None if cross_states is None else cross_region.enter(cross_states),
        region.batch(mask, rows, num_heads),
        region.batch(cross_mask, rows, num_heads),
        region.batch(position_ids, rows),
        region.dim,
        cross_region.dim,
    )


def _taken_apart(module: DistributedModule, inputs: Any, cross: bool) -> Any:
    expected = "(hidden, cross_states, mask, cross_mask)" if cross else "(hidden, mask)"
    if not isinstance(inputs, tuple | list):
        raise StepError(f"{type(module).__name__} takes one tuple {expected}, got {type(inputs).__name__}")
    if len(inputs) != (4 if cross else 2):
        raise StepError(f"{type(module).__name__} takes one tuple {expected}, got {len(inputs)} elements")
    hidden = inputs[0]
    if hidden.dim() != 3:
        raise StepError(f"{type(module).__name__} takes hidden states [N, S, H], got shape {tuple(hidden.shape)}")
    taken = inputs if cross else (hidden, None, inputs[1], None)
    for mask in taken[2:]:
        if mask is not None and not (mask.dim() == 4 and (mask.is_floating_point() or mask.dtype == torch.bool)):
            raise StepError(
                f"{type(module).__name__} takes masks [N, 1, 1, S] or [N, 1, S, S] that are added to scores, or bool "
                f"ones (True: seen); got {mask.dtype} {tuple(mask.shape)}"
            )
        if mask is not None and mask.shape[0] not in (1, hidden.shape[0]):
            raise StepError(
                f"{type(module).__name__} got a mask of {mask.shape[0]} rows for hidden states of {hidden.shape[0]}"
            )
    return taken
