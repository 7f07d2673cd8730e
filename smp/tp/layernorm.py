"""Layer norms: DistributedLayerNorm, with scale and shift cut and the batch not joined, and FusedLayerNorm."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp.comm.autograd import gather_batch, gather_slices
from smp.errors import PartitionError
from smp.tp.module import DistributedModule


class DistributedLayerNorm(DistributedModule):
    """The twin of nn.LayerNorm, [.., *normalized_shape] -> the same.

    Normalising needs whole rows and few parameters. So each rank normalises its own batch with scale and shift gathered
    from the group (one all_gather of 2 x normalized_shape elements; joining the batch would send all activations). The
    gradient of a part is the sum over the group's batches, as if the batch had been joined.

    Args:
        normalized_shape, eps, elementwise_affine, bias: as for nn.LayerNorm.

    Raises:
        PartitionError: no dimension of normalized_shape divides by the tensor-parallel degree.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape: tuple[int, ...] = shape
        self.eps, self.elementwise_affine = eps, elementwise_affine
        num_parts = self.tp_group.size
        dims = [dim for dim, size in enumerate(shape) if size % num_parts == 0]
        if elementwise_affine and not dims:
            raise PartitionError(f"normalized_shape {shape}: no multiple of tensor_parallel_degree {num_parts}")
        self.dim = dims[-1] if dims else 0
        if elementwise_affine:
            self.create_parameter("weight", shape, nn.init.ones_, dim=self.dim)
        else:
            self.register_parameter("weight", None)
        if elementwise_affine and bias:
            self.create_parameter("bias", shape, nn.init.zeros_, dim=self.dim)
        else:
            self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> Tensor:
        """[.., *normalized_shape] -> the same shape."""
        weight, bias = self._gathered()
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)

    def _gathered(self) -> tuple[Tensor | None, Tensor | None]:
        """Whole scale and shift, in one message."""
        if self.weight is None or self.tp_group.size == 1:
            return self.weight, self.bias
        parts = self.weight.unsqueeze(0) if self.bias is None else torch.stack([self.weight, self.bias])
        gather = gather_slices if self.shared_batch else gather_batch
        whole = gather(parts, self.tp_group, self.dim + 1)
        return whole[0], whole[1] if self.bias is not None else None

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class FusedLayerNorm(nn.LayerNorm):
    """nn.LayerNorm under the name that scripts know from apex, without apex: torch's own kernel is a fused one.

    Half-precision inputs are normalised in float32 and rounded once, also where scale and shift are in float32, as they
    are in mixed-precision models. torch's kernel for CUDA does that by itself where all is of one dtype; the one for
    the CPU keeps means for the backward in half precision, so there inputs are converted.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[.., *normalized_shape] -> the same shape and dtype."""
        one_dtype = self.weight is None or self.weight.dtype == input.dtype
        dtype = torch.promote_types(input.dtype, torch.float32)
        if torch.is_autocast_enabled(input.device.type) or (one_dtype and (dtype == input.dtype or input.is_cuda)):
            return super().forward(input)
        weight, bias = (None if part is None else part.to(dtype) for part in (self.weight, self.bias))
        return F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps).to(input.dtype)
