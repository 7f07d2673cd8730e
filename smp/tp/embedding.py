"""DistributedEmbedding: one table, cut along the embedding dimension or along the vocabulary."""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp import runtime
from smp.comm import collectives
from smp.comm.autograd import all_to_all, gather_slices, scatter_sum, sum_out
from smp.errors import PartitionError
from smp.tp.module import DistributedModule

Split = Literal["auto", "embedding", "vocabulary"]


class DistributedEmbedding(DistributedModule):
    """The twin of nn.Embedding, ids [N, ..] -> [N, .., embedding_dim].

        cut along       own batch of each rank                          batch that all ranks share
        "embedding"     gather ids, look up columns, all_to_all         look up columns, gather them
        "vocabulary"    gather ids, look up own rows, reduce_scatter    look up own rows, all_reduce

    Along "embedding" every rank looks up all ids, the cut sends 1/tp of what the other one does, and adds nothing up:
    "auto" takes it when `embedding_dim` divides. Along "vocabulary" the table is cut as that of a DistributedLinear
    with split "out", so the two can share it.

    `scale_grad_by_freq` counts ids in the batch the module works on, which is the joined one.

    Args:
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq: as for nn.Embedding.
        sparse: sparse gradients are refused.
        _weight: values of the whole table.
        initializer_range: standard deviation of the initial values otherwise.
        split: along what to cut.

    Raises:
        PartitionError: the size to be cut does not divide; or sparse; or max_norm or scale_grad_by_freq with the
            vocabulary cut; or max_norm with several replicas, whose tables would drift apart.
    """

    weight: nn.Parameter
    padding_idx: int | None
    max_norm: float | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        initializer_range: float = 0.02,
        *,
        split: Split = "auto",
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx {padding_idx} is not within num_embeddings {num_embeddings}")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx % num_embeddings if padding_idx is not None else None
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.split: Split = self._choose_split(split)

        def initialise(table: Tensor) -> None:
            if _weight is not None:
                table.copy_(_weight)
                return
            nn.init.normal_(table, 0.0, initializer_range)
            if self.padding_idx is not None:
                table[self.padding_idx].zero_()

        dim = 1 if self.split == "embedding" else 0
        self.create_parameter("weight", (num_embeddings, embedding_dim), initialise, dim=dim)

    def _choose_split(self, split: Split) -> Split:
        num_parts = self.tp_group.size
        if num_parts == 1:
            return "embedding" if split == "auto" else split
        plain = self.max_norm is None and not self.scale_grad_by_freq
        sizes = {"embedding": self.embedding_dim, "vocabulary": self.num_embeddings}
        wanted: list[Split] = ["embedding", *(["vocabulary"] if plain else [])] if split == "auto" else [split]  # type: ignore[list-item]
        if self.sparse:
            raise PartitionError("sparse=True: sparse gradients cannot be reduced over the tensor-parallel group")
        if self.max_norm is not None and runtime.get().rdp_size > 1:
            raise PartitionError("max_norm rewrites the rows that a batch looks up, so replicas would drift apart")
        if not plain and wanted == ["vocabulary"]:
            raise PartitionError("max_norm and scale_grad_by_freq need the table cut along the embedding dimension")
        for choice in wanted:
            if sizes[choice] % num_parts == 0:
                return choice
        names = {"embedding": "embedding_dim", "vocabulary": "num_embeddings"}
        refused = ", ".join(f"{names[choice]} {sizes[choice]}" for choice in wanted)
        raise PartitionError(f"{refused}: not a multiple of tensor_parallel_degree {num_parts}")

    def forward(self, input: Tensor) -> Tensor:
        """ids [N, ..] -> [N, .., embedding_dim]."""
        group = self.tp_group
        if group.size > 1 and input.dim() == 0:
            return self.forward(input.unsqueeze(0)).squeeze(0)
        joined = not self.shared_batch
        ids = collectives.all_gather(input, group, checked=self._smp_path or True) if joined else input
        if self.split == "embedding":
            out = self._look_up_columns(ids)
            return all_to_all(out, group, 0, out.dim() - 1) if joined else gather_slices(out, group, -1)
        start = group.rank * self.weight.shape[0]
        out = look_up_own_rows(ids, self.weight, start, self.num_embeddings, self.padding_idx)
        return scatter_sum(out, group) if joined else sum_out(out, group)

    def _look_up_columns(self, ids: Tensor) -> Tensor:
        if self.max_norm is not None:
            self._renormalise(ids, self.max_norm)
        return F.embedding(
            ids, self.weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq, sparse=self.sparse
        )

    @torch.no_grad()
    def _renormalise(self, ids: Tensor, max_norm: float) -> None:
        """Shortens the rows that are looked up to max_norm; each rank has some columns of every row."""
        if collectives.is_structure(ids) or collectives.is_structure(self.weight):
            return
        used = ids.unique()
        rows = self.weight[used]
        largest = math.isinf(self.norm_type)
        own = rows.abs().amax(1) if largest else rows.abs().pow(self.norm_type).sum(1)
        whole = collectives.all_reduce(own, self.tp_group, "max" if largest else "sum")
        norms = whole if largest else whole.pow(1 / self.norm_type)
        scale = torch.where(norms > max_norm, max_norm / (norms + 1e-7), 1.0)
        self.weight[used] = rows * scale.unsqueeze(1).to(rows.dtype)

    def extra_repr(self) -> str:
        options: dict[str, Any] = {
            "padding_idx": self.padding_idx,
            "max_norm": self.max_norm,
            "scale_grad_by_freq": self.scale_grad_by_freq or None,
            "split": self.split,
        }
        shown = [f"{name}={value}" for name, value in options.items() if value is not None]
        return ", ".join([str(self.num_embeddings), str(self.embedding_dim), *shown])


def look_up_own_rows(
    ids: Tensor, weight: Tensor, start: int, num_embeddings: int, padding_idx: int | None = None
) -> Tensor:
    """ids [..], weight [rows, H] -> [.., H], this rank's share of a sum over the ranks.

    The table has `num_embeddings` rows, of which `weight` holds those from `start` on. Rows of other ranks are zero.
    What is no id at all is looked up at -1, so that it fails as in one process.
    """
    rows = weight.shape[0]
    own = (ids >= start) & (ids < start + rows)
    padding = padding_idx - start if padding_idx is not None else None
    if padding is not None and not 0 <= padding < rows:
        padding = None
    others = torch.where((ids < 0) | (ids >= num_embeddings), -1, 0)
    out = F.embedding(torch.where(own, ids - start, others), weight, padding)
    return out.masked_fill(~own.unsqueeze(-1), 0)
