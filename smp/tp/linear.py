"""DistributedLinear: one matrix, cut along its outputs or along its inputs."""

import math
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from smp.comm.autograd import (
    all_to_all,
    copy_in_linear,
    gather_batch,
    gather_slices,
    own_slice,
    scatter_sum,
    sum_out,
)
from smp.errors import PartitionError
from smp.tp.module import DistributedModule

Split = Literal["auto", "out", "in"]


class DistributedLinear(DistributedModule):
    """The twin of nn.Linear, [N, .., in_features] -> [N, .., out_features]; a single vector counts as a batch of one.

        cut along    own batch of each rank                         batch that all ranks share
        "out"        gather batches, x W_k^T + b_k, all_to_all      x W_k^T + b_k, gather features
        "in"         all_to_all, x_k W_k^T, reduce_scatter, + b     own features, x_k W_k^T, all_reduce, + b

    Sent are the inputs and 1/tp of the outputs, or the other way round, so "auto" cuts along the larger of the two
    (along the other one if only that divides). The bias is cut with the outputs; with "in" it is whole.

    Args:
        in_features, out_features: sizes of the whole matrix.
        bias: whether there is one.
        split: along what to cut.

    Raises:
        PartitionError: the size to be cut does not divide by the tensor-parallel degree.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, split: Split = "auto") -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.split: Split = choose_split(in_features, out_features, self.tp_group.size, split)
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        dim = 0 if self.split == "out" else 1
        self.create_parameter(
            "weight", (out_features, in_features), lambda t: nn.init.kaiming_uniform_(t, a=math.sqrt(5)), dim=dim
        )
        if bias:
            bias_dim = 0 if self.split == "out" else None
            self.create_parameter("bias", (out_features,), lambda t: nn.init.uniform_(t, -bound, bound), dim=bias_dim)
        else:
            self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> Tensor:
        """[N, .., in_features] -> [N, .., out_features]."""
        if self.tp_group.size == 1:
            return F.linear(input, self.weight, self.bias)
        if input.dim() == 1:
            return self.forward(input.unsqueeze(0)).squeeze(0)
        return self._cut_outputs(input) if self.split == "out" else self._cut_inputs(input)

    def _cut_outputs(self, x: Tensor) -> Tensor:
        group = self.tp_group
        if self.shared_batch:
            return gather_slices(copy_in_linear(x, self.weight, self.bias, group), group, -1)
        out = F.linear(gather_batch(x, group, checked=self._smp_path or True), self.weight, self.bias)
        return all_to_all(out, group, 0, out.dim() - 1)

    def _cut_inputs(self, x: Tensor) -> Tensor:
        group = self.tp_group
        if self.shared_batch:
            out = sum_out(F.linear(own_slice(x, group, -1), self.weight), group)
        else:
            out = scatter_sum(
                F.linear(all_to_all(x, group, x.dim() - 1, 0, checked=self._smp_path or True), self.weight), group
            )
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, split={self.split}"


def choose_split(in_features: int, out_features: int, num_parts: int, split: Split = "auto") -> Split:
    """Along what a linear is cut; see DistributedLinear."""
    divides = {"out": out_features % num_parts == 0, "in": in_features % num_parts == 0}
    wanted: list[Split] = ["out", "in"] if out_features >= in_features else ["in", "out"]
    if split != "auto":
        wanted = [split]
    for choice in wanted:
        if divides[choice]:
            return choice
    sizes = {"out": f"out_features {out_features}", "in": f"in_features {in_features}"}
    refused = ", ".join(sizes[choice] for choice in wanted)
    raise PartitionError(f"{refused}: not a multiple of tensor_parallel_degree {num_parts}")
