"""DistributedTransformerLMHead: a language model from token ids to logits or to the loss, split as a whole.

    ids --word_embedding (+ position_embedding, token_type_embedding)--> [embedding_layernorm] --dropout-->
        transformer.seq_layers --> [layernorm] --lm_head--> logits of own columns --> loss, or logits of own batch

All of it is one region (region.py): hidden states are joined, or cut into parts, by the embedding's sum over the ranks,
and handed back as logits or as a loss; nothing is moved between for that alone. Each step of the drawing is a module of
its own, so that a pipeline may cut between any two.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp.comm import collectives
from smp.comm.autograd import all_to_all, gather_slices
from smp.errors import StepError
from smp.tp.cross_entropy import Columns, cross_entropy_of_part
from smp.tp.embedding import look_up_own_rows
from smp.tp.module import DistributedModule
from smp.tp.options import Options
from smp.tp.region import Region, States
from smp.tp.shard import spec_of
from smp.tp.transformer import DistributedTransformer

IGNORED = -100  # the label of places that have none


class DistributedTransformerLMHead(DistributedModule):
    """Token ids -> logits, or the loss, of a transformer; as GPT-2 with `pre_layernorm` and `causal_mask_size`.

    The vocabulary is cut over the tensor-parallel ranks. Where it does not divide, the last parts are filled up with
    rows that are never looked up, have no logits, and are in no whole state dict. No rank holds whole logits for the
    loss.

    Args:
        num_layers, num_attention_heads, attention_head_size, hidden_size, intermediate_size, attention_dropout_prob,
            hidden_dropout_prob, activation, layernorm_epsilon, causal_mask_size, add_cross_attention,
            use_normal_initialization, pre_layernorm, post_layernorm: as for DistributedTransformer.
        vocab_size: number of tokens.
        num_positions: size of the table of positions; 0: there is none (rotary, ALiBi).
        num_token_types: size of the table of token types; 0: there is none.
        add_lm_head: False: hidden states are returned.
        initializer_range: standard deviation of the initial values of tables and head, and, with
            `use_normal_initialization`, of all matrices.
        tie_word_embeddings: the head's matrix is the table of words: one parameter under two names.
        lm_head_bias: whether the head has a bias.
        final_layernorm: whether there is a norm behind the layers; None: with `pre_layernorm`.
        embedding_layernorm: whether there is one behind the embeddings, as in BERT.
        embedding_dropout_prob: of the embeddings; None: `hidden_dropout_prob`.
        shift_labels: whether a place's target is the label of the next place, so that `labels=input_ids` trains a
            causal language model as in transformers; False: the label of the place itself. None: with
            `causal_mask_size`.
        logits_with_loss: with labels (loss, logits) is returned. Gathers the logits. None: in evaluation only.
        options: see `Options`.

    Raises:
        PartitionError: a size other than that of the vocabulary does not divide by the tensor-parallel degree.
        UsageError: options that do not fit together.
    """

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        tie_word_embeddings: bool = True,
        lm_head_bias: bool = False,
        final_layernorm: bool | None = None,
        embedding_layernorm: bool = False,
        embedding_dropout_prob: float | None = None,
        shift_labels: bool | None = None,
        logits_with_loss: bool | None = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.add_cross_attention, self.add_lm_head = add_cross_attention, add_lm_head
        self.shift_labels = causal_mask_size is not None if shift_labels is None else shift_labels
        self.logits_with_loss = logits_with_loss
        self.tie_word_embeddings = tie_word_embeddings and add_lm_head
        known = Options.of({**options, "layer_idx": 0, "attention_window": None}, type(self).__name__)
        self.uses_positions = bool(known.rotary_dim)

        def norm(wanted: bool) -> HiddenNorm | None:
            return HiddenNorm(hidden_size, layernorm_epsilon, known) if wanted else None

        self.word_embedding = WordTable(vocab_size, hidden_size, initializer_range)
        self.position_embedding = PlaceTable(num_positions, hidden_size, initializer_range) if num_positions else None
        self.token_type_embedding = (
            TypeTable(num_token_types, hidden_size, initializer_range) if num_token_types else None
        )
        self.embedding_layernorm = norm(embedding_layernorm)
        self.embedding_dropout = HiddenDropout(
            hidden_dropout_prob if embedding_dropout_prob is None else embedding_dropout_prob
        )
        self.transformer = DistributedTransformer(
            *(num_layers, num_attention_heads, attention_head_size, hidden_size, intermediate_size),
            *(attention_dropout_prob, hidden_dropout_prob, activation, layernorm_epsilon, initializer_range),
            *(use_normal_initialization, causal_mask_size, add_cross_attention, pre_layernorm, post_layernorm),
            **options,
        )
        self.layernorm = norm(pre_layernorm if final_layernorm is None else final_layernorm)
        if add_lm_head:
            std = None if self.tie_word_embeddings else initializer_range
            self.lm_head = VocabularyHead(vocab_size, hidden_size, std, lm_head_bias)
            self._tie()

    def _tie(self) -> None:
        if self.tie_word_embeddings:
            self.lm_head._parameters["weight"] = self.word_embedding.weight

    def adopt(self, name: str, param: nn.Parameter) -> None:
        super().adopt(name, param)
        self._tie()

    @property
    def takes_token_types(self) -> bool:
        """Whether there is a table for them."""
        return self.token_type_embedding is not None

    def forward(self, inputs: Any, num_items: Any = None) -> Any:
        """(input_ids, attention_mask, token_type_ids, position_ids, labels) -> logits [N, S, V] of the rank's own
        batch, or with labels the loss alone.

        Args:
            inputs: int64 ids and labels [N, S], position_ids also [1, S]; all but input_ids may be None.
                attention_mask [N, S]: 0 or False where there is nothing to be seen; one of four dimensions is taken as
                a layer takes it. With cross attention cross_states [N, Sk, H] and cross_mask [N, Sk] come before the
                labels. Labels are shifted where `shift_labels` says so; places with label -100 do not count.
            num_items: what the sum of the places' losses is divided by, a number or a tensor of one; None: by the
                number of places that count.

        Raises:
            StepError: `inputs` is not such a tuple, or has what this model has no table for, or other tp_ranks were
                given other ones of these.
        """
        ids, mask, token_types, positions, cross, cross_mask, labels = self._taken_apart(inputs)
        region, rows = Region.of(self, ids), ids.shape[0]
        given = {"token_type_ids": token_types, "position_ids": positions, "labels": labels}
        region.expect_same(ids, attention_mask=mask, cross_mask=cross_mask, **given)
        cross_region = region if cross is None else Region.of(self, cross)
        states = States(
            self._embedded(ids, token_types, positions, region.dim),
            None if cross is None else cross_region.enter(cross),
            region.batch(_seen(mask), rows),
            region.batch(_seen(cross_mask), rows),
            region.batch(positions, rows) if self.uses_positions else None,
            region.dim,
            cross_region.dim,
        )
        hidden = self.transformer(states).hidden
        if self.layernorm is not None:
            hidden = self.layernorm(hidden, region.dim)
        if not self.add_lm_head:
            return region.leave(hidden)
        with_logits = not self.training if self.logits_with_loss is None else self.logits_with_loss
        return self.lm_head(hidden, labels, region.dim, self.shift_labels, with_logits, num_items)

    def _embedded(self, ids: Tensor, token_types: Tensor | None, positions: Tensor | None, dim: int | None) -> Tensor:
        """[N, S] -> hidden states inside of the region."""
        hidden = self._summed(ids, token_types, positions, dim)
        if self.embedding_layernorm is not None:
            hidden = self.embedding_layernorm(hidden, dim)
        return self.embedding_dropout(hidden, dim)

    def _summed(self, ids: Tensor, token_types: Tensor | None, positions: Tensor | None, dim: int | None) -> Tensor:
        """What the tables have for them."""
        hidden = self.word_embedding(ids, dim)
        if self.position_embedding is not None:
            hidden = hidden + self.position_embedding(positions, *ids.shape, dim)
        if self.token_type_embedding is not None:
            hidden = hidden + self.token_type_embedding(token_types, *ids.shape, dim)
        return hidden

    def _taken_apart(self, inputs: Any) -> tuple[Any, ...]:
        names = ["input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"]
        if self.add_cross_attention:
            names[4:4] = ["cross_states", "cross_mask"]
        if not isinstance(inputs, tuple | list) or len(inputs) != len(names):
            got = f"{len(inputs)} elements" if isinstance(inputs, tuple | list) else type(inputs).__name__
            raise StepError(f"{type(self).__name__} takes one tuple ({', '.join(names)}), got {got}")
        given = dict(zip(names, inputs))
        if given["input_ids"] is None or given["input_ids"].dim() != 2:
            raise StepError(f"{type(self).__name__} needs input_ids of shape [N, S]")
        if given["token_type_ids"] is not None and not self.takes_token_types:
            raise StepError("token_type_ids were given, but the model was made with num_token_types=0")
        if given["labels"] is not None and not self.add_lm_head:
            raise StepError("labels were given, but the model was made with add_lm_head=False")
        if self.add_cross_attention and given["cross_states"] is None:
            raise StepError("a model with add_cross_attention=True needs cross_states")
        *others, labels = inputs
        return (*others, labels) if self.add_cross_attention else (*others, None, None, labels)


def _seen(mask: Tensor | None) -> Tensor | None:
    """[N, S] of 0 and 1 -> [N, 1, 1, S] bool, True where there is something to be seen; others as they are."""
    return mask if mask is None or mask.dim() != 2 else (mask != 0)[:, None, None, :]


class WordTable(DistributedModule):
    """Vectors of words, the table cut along the vocabulary."""

    weight: nn.Parameter

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        shape = (num_embeddings, embedding_dim)
        self.create_parameter("weight", shape, lambda table: nn.init.normal_(table, 0.0, std), dim=0, padded=True)

    def forward(self, ids: Tensor, dim: int | None) -> Tensor:
        """[N, S] -> hidden states inside of the region with that `dim`: each rank looks up the rows it has."""
        region = Region.inside(self, dim)
        if region.group.size == 1:
            return F.embedding(ids, self.weight)
        if not region.shared:
            ids = collectives.all_gather(ids, region.group, checked=region.path or True)
        start = columns_of(self.weight, self.num_embeddings).start
        return region.total(look_up_own_rows(ids, self.weight, start, self.num_embeddings), None)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class WholeTable(DistributedModule):
    """A small table that every rank has whole, for ids inside of a region."""

    weight: nn.Parameter

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.create_parameter("weight", (num_embeddings, embedding_dim), lambda table: nn.init.normal_(table, 0.0, std))

    def forward(self, ids: Tensor | None, num_rows: int, length: int, dim: int | None) -> Tensor:
        """[N or 1, S] -> vectors that can be added to hidden states inside of the region with that `dim`.

        Args:
            ids: None: the usual ones, equal for all rows.
            num_rows, length: N and S of the batch as the user passed it.

        Raises:
            StepError: the usual ids reach beyond the table.
        """
        region = Region.inside(self, dim)
        (weight,) = region.whole(self.weight)
        if ids is None:
            ids = self.usual(length).unsqueeze(0)
        elif dim is None:
            ids = region.batch(ids, num_rows)
        if region.shared and dim is not None:
            ids = ids.chunk(region.group.size, dim)[region.group.rank]  # type: ignore[union-attr]
        return F.embedding(ids, weight)  # type: ignore[arg-type]

    def usual(self, length: int) -> Tensor:
        """Ids [S] where none are given."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class PlaceTable(WholeTable):
    """Vectors of places; without ids they are 0, 1, 2, .."""

    def usual(self, length: int) -> Tensor:
        if length > self.num_embeddings:
            raise StepError(f"a sequence of length {length} is longer than num_positions {self.num_embeddings}")
        return torch.arange(length, device=self.weight.device)


class TypeTable(WholeTable):
    """Vectors of token types; without ids all are of type 0."""

    def usual(self, length: int) -> Tensor:
        return torch.zeros(length, dtype=torch.long, device=self.weight.device)


class HiddenNorm(DistributedModule):
    """A norm of hidden states inside of a region, as a module of its own; every rank has its parameters whole."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, size: int, eps: float, options: Options) -> None:
        super().__init__()
        self.size, self.eps, self.is_rms = size, eps, options.norm == "rms"
        self.create_parameter("weight", (size,), nn.init.ones_)
        if options.norm_bias and not self.is_rms:
            self.create_parameter("bias", (size,), nn.init.zeros_)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor, dim: int | None) -> Tensor:
        """[.., size] -> the same shape."""
        weight, bias = Region.inside(self, dim).whole(self.weight, self.bias)
        if self.is_rms:
            return F.rms_norm(x, (self.size,), weight, self.eps)
        return F.layer_norm(x, (self.size,), weight, bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"


class HiddenDropout(DistributedModule):
    """Dropout of hidden states inside of a region."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, dim: int | None) -> Tensor:
        """[.., H] -> the same shape."""
        return Region.inside(self, dim).dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class VocabularyHead(DistributedModule):
    """Hidden states -> logits of own columns -> the loss, or whole logits.

    Args:
        num_classes: V.
        hidden_size: H.
        std: of the initial values; None: `weight` is another module's, to be set.
        bias: whether there is one.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, num_classes: int, hidden_size: int, std: float | None, bias: bool) -> None:
        super().__init__()
        self.num_classes, self.hidden_size = num_classes, hidden_size
        if std is not None:
            shape, spread = (num_classes, hidden_size), std
            self.create_parameter("weight", shape, lambda t: nn.init.normal_(t, 0.0, spread), dim=0, padded=True)
        if bias:
            self.create_parameter("bias", (num_classes,), nn.init.zeros_, dim=0, padded=True)
        else:
            self.register_parameter("bias", None)

    def forward(
        self, x: Tensor, labels: Tensor | None, dim: int | None, shifted: bool, both: bool, num_items: Any = None
    ) -> Any:
        """Hidden states inside of the region with that `dim` -> logits [N, S, V], the loss, or both.

        Args:
            labels: [N, S]; None: logits are returned.
            shifted: a place's target is the label of the next one.
            both: with labels (loss, logits) is returned.
            num_items: what the sum of the losses is divided by; None: the number of places that count.
        """
        region = Region.inside(self, dim)
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.weight.dtype)
        own = region.column(x, self.weight, self.bias)
        if labels is None:
            return self._whole(region, own)
        target = F.pad(labels[:, 1:], (0, 1), value=IGNORED) if shifted else labels
        joined = not region.shared and region.group.size > 1
        columns = columns_of(self.weight, self.num_classes)
        how: dict[str, Any] = {"joined": joined, "ignore_index": IGNORED}
        loss = cross_entropy_of_part(
            own, target, columns, region.group, **how, reduction="mean" if num_items is None else "sum"
        )
        if num_items is not None:
            loss = loss / num_items
        return (loss, self._whole(region, own)) if both else loss

    def _whole(self, region: Region, own: Tensor) -> Tensor:
        """Own columns [rows, S, V_k] -> all columns of the rank's own rows [N, S, V]."""
        group = region.group
        if group.size == 1:
            return own
        whole = gather_slices(own, group, -1) if region.shared else all_to_all(own, group, 0, own.dim() - 1)
        return whole[..., : self.num_classes]

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, {self.num_classes}, bias={self.bias is not None}"


def columns_of(weight: Tensor, num_classes: int) -> Columns:
    """Which rows of a table, or columns of logits, this rank has; later ones are padding."""
    spec = spec_of(weight)
    start, stop = spec.ranges[0] if spec is not None else (0, num_classes)
    return Columns(start, stop - start, num_classes)
