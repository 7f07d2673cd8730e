"""A stand-in for `DistributedModel`: a module cut into stages by hand, its foreign parameters freed in place."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

import smp
from smp import runtime
from smp.tp.shard import ShardSpec


class HandMade:
    """Offers what `smp.model_state` asks of a model. `stages`: path of a module -> stage; the rest is on stage 0."""

    def __init__(self, module: nn.Module, stages: dict[str, int], partitioned: bool = True) -> None:
        self.module, self.partitioned = module, False
        self.stage_of = {}
        for name in dict(module.named_parameters(remove_duplicate=False)) | dict(
            module.named_buffers(remove_duplicate=False)
        ):
            fits = [path for path in stages if name.startswith(f"{path}.")]
            self.stage_of[name] = stages[max(fits, key=len)] if fits else 0
        if partitioned:
            self.partition()

    def owned(self, name: str) -> bool:
        return self.stage_of[name] == smp.pp_rank()

    def holders(self, name: str) -> tuple[int, ...]:
        return (self.stage_of[name],)

    def partition(self) -> None:
        kept = {id(p) for n, p in self.module.named_parameters(remove_duplicate=False) if self.owned(n)}
        for parameter in self.module.parameters():
            if id(parameter) not in kept:
                parameter.data.untyped_storage().resize_(0)
        self.partitioned = True


def cut(parameter: nn.Parameter, dim: int) -> None:
    """Make `parameter` this rank's part of itself along `dim`, over the tensor-parallel ranks."""
    rt = runtime.get()
    spec = ShardSpec(tuple(parameter.shape), dim, rt.tp_rank, rt.tp_size)
    parameter.data = spec.split(parameter.data)
    parameter._smp_shard = spec


@contextmanager
def shared_directory() -> Iterator[Path]:
    """A new directory, the same on every rank; removed when all ranks are through."""
    rt = runtime.get()
    world = rt.group(smp.CommGroup.WORLD)
    path = Path(rt.transport.broadcast_object(tempfile.mkdtemp() if rt.rank == 0 else None, world, 0))
    try:
        yield path
    finally:
        smp.barrier()
        if rt.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
