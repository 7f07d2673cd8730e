"""What a DistributedModel shows of its module: names, parameters, buffers and modules, local ones after partition."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import Parameter

from smp.errors import UsageError
from smp.pp.engine import Engine
from smp.pp.placed import current
from smp.tp.module import DistributedModule


def _in_glue() -> bool:
    """Whether the calling thread is in the code of a step function or of glue modules, on several stages."""
    return current.program is not None and not current.program.in_node


class ModelViews(nn.Module):
    """Base of `DistributedModel`. `module` is the user's module; `engine.stages` is set once it is partitioned."""

    module: nn.Module
    engine: Engine

    def _is_local(self, name: str) -> bool:
        return self.engine.stages is None or self.engine.stages.is_local(name)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Parameters under the names of the user's module; after partition, those of this rank.

        In the code of a step function, which is the same on every rank, all of them.
        """
        for name, parameter in self.module.named_parameters("", recurse, remove_duplicate):
            if self._is_local(name) or _in_glue():
                yield f"{prefix}.{name}" if prefix else name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers under the names of the user's module; after partition, those of this rank. In a step, all of them."""
        for name, buffer in self.module.named_buffers("", recurse, remove_duplicate):
            if self._is_local(name) or _in_glue():
                yield f"{prefix}.{name}" if prefix else name, buffer

    def local_named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, Parameter]]:
        """Names and parameters that live on this rank.

        Raises `UsageError` before partition, as all `local_` methods do.
        """
        self._need_partition("local_named_parameters")
        return ((name, p) for name, p in self.module.named_parameters("", recurse) if self._is_local(name))

    def local_parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Parameters that live on this rank."""
        return (parameter for _, parameter in self.local_named_parameters(recurse))

    def local_named_buffers(self, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Names and buffers that live on this rank."""
        self._need_partition("local_named_buffers")
        return ((name, b) for name, b in self.module.named_buffers("", recurse) if self._is_local(name))

    def local_buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Buffers that live on this rank."""
        return (buffer for _, buffer in self.local_named_buffers(recurse))

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Names and modules that live on this rank's stage."""
        self._need_partition("local_named_modules")
        stages = self.engine.stages
        assert stages is not None
        for name, module in self.module.named_modules():
            if stages.assignment.get(name) == stages.rank:
                yield name, module

    def local_modules(self) -> Iterator[nn.Module]:
        """Modules that live on this rank's stage."""
        return (module for _, module in self.local_named_modules())

    def virtual_named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """The same as `local_named_parameters`: parameters here are never split or merged behind the module's back."""
        return self.local_named_parameters()

    def _need_partition(self, call: str) -> None:
        if self.engine.stages is None:
            raise UsageError(f"{call} was called before the model is partitioned; run the first step before it.")

    def get_module(self) -> nn.Module:
        """The user's module."""
        return self.module

    def distributed_modules(self) -> Iterator[nn.Module]:
        """The tensor-parallel modules of the model."""
        return (module for module in self.module.modules() if isinstance(module, DistributedModule))

    def is_distributed_parameter(self, parameter: Tensor) -> bool:
        """Whether this rank holds only a part of the parameter."""
        return getattr(parameter, "_smp_shard", None) is not None

    def is_distributed_buffer(self, buffer: Tensor) -> bool:
        """Whether this rank holds only a part of the buffer."""
        return getattr(buffer, "_smp_shard", None) is not None

    def is_scaled_batch_parameter(self, parameter: Tensor) -> bool:
        """Whether the parameter's module works on the joined batch of the tensor-parallel group."""
        return bool(getattr(parameter, "_smp_scaled_batch", False))

    def is_scaled_batch_buffer(self, buffer: Tensor) -> bool:
        """Whether the buffer's module works on the joined batch of the tensor-parallel group."""
        return bool(getattr(buffer, "_smp_scaled_batch", False))

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Local parameters whose gradients are averaged over DP_GROUP."""
        return ((n, p) for n, p in self.local_named_parameters() if not self.is_scaled_batch_parameter(p))

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Local parameters whose gradients are averaged over RDP_GROUP."""
        return ((n, p) for n, p in self.local_named_parameters() if self.is_scaled_batch_parameter(p))
