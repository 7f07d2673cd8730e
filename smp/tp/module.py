"""DistributedModule: a module whose parameters are split over the tensor-parallel group."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from smp import log, runtime
from smp.comm import collectives
from smp.errors import PartitionError
from smp.groups import Group
from smp.topology import CommGroup
from smp.tp import delayed
from smp.tp.shard import ShardSpec, spec_of

FORWARD_HOOKS = "_smp_forward_hooks"


class DistributedModule(nn.Module):
    """Base of modules that are split over the tensor-parallel group. Sizes in their arguments are global ones.

    Such a module computes what its undistributed twin computes on the same batch. With `prescaled_batch` that is the
    batch each rank passes in, the same on all tp_ranks. Otherwise each tp_rank passes its own batch: the module works
    on the batches of the group joined along dimension 0 and hands each rank its own part back. All tp_ranks then have
    to bring the same shape. What is computed outside of such modules (the mean of a loss, statistics of a batch norm,
    the balance of a router) is that of the rank's own batch, as in data parallelism.

    Subclasses make their parameters with `create_parameter`.

    Raises:
        UsageError: `smp.init` has not been called.
    """

    on_one_stage = False  # whether the automatic partition has to keep its children together
    _smp_path = ""  # the module's name in the model, where it has replaced another one

    def __init__(self) -> None:
        super().__init__()
        runtime.get()

    @property
    def tp_group(self) -> Group:
        """The group over which this module is split."""
        return runtime.get().group(CommGroup.TP_GROUP)

    @property
    def shared_batch(self) -> bool:
        """Whether all tp_ranks pass the same batch in (`prescaled_batch`)."""
        return runtime.get().config.prescaled_batch

    def create_parameter(
        self,
        name: str,
        shape: Sequence[int],
        initialise: delayed.Initialiser,
        *,
        dim: int | None = None,
        sections: Sequence[int] = (),
        padded: bool = False,
        requires_grad: bool = True,
    ) -> nn.Parameter:
        """Registers a parameter, this rank's part of a whole one.

        The whole tensor exists for a moment; tp_rank 0's is cut for all. Under `delay_param_initialization` nothing
        exists until the model is made.

        Args:
            name: attribute.
            shape: global shape.
            initialise: sets the values of the whole tensor in place.
            dim: along which dimension it is cut; None: each rank has all of it, and its own batch's gradient for it.
            sections, padded: how it is cut, see ShardSpec.
            requires_grad: as usual.

        Raises:
            PartitionError: the dimension, or a section of it, does not divide by the tensor-parallel degree.
        """
        group = self.tp_group
        spec = None
        if dim is not None and group.size > 1:
            try:
                spec = ShardSpec(tuple(shape), dim, group.rank, group.size, tuple(sections), padded)
            except ValueError as error:
                raise PartitionError(f"parameter {name} of {type(self).__name__}: {error}") from error
        dtype = _dtype_of_new()
        if delayed.delaying():
            local = torch.empty(spec.local_shape if spec else tuple(shape), dtype=dtype, device="meta")
        else:
            with torch.no_grad():
                whole = torch.empty(tuple(shape), dtype=torch.promote_types(dtype, torch.float32))
                initialise(whole)
                whole = collectives.broadcast(whole, group, 0)
                local = (spec.split(whole) if spec else whole).to(dtype)
        param = nn.Parameter(local, requires_grad=requires_grad)
        if delayed.delaying():
            delayed.mark_delayed(param)
            delayed.remember_initialiser(self, name, initialise)
        self.register_parameter(name, param)
        _describe(param, spec)
        return param

    def hooked_forward(self, *args: Any, **kwargs: Any) -> Any:
        """`forward` of a module that replaced another one: takes that one's arguments and returns what it returned."""
        translate, restore = self.__dict__[FORWARD_HOOKS]
        if translate is not None:
            args, kwargs = translate(*args, **kwargs)
        output = type(self).forward(self, *args, **kwargs)
        return restore(output) if restore is not None else output

    def carry_over(self, module: nn.Module) -> None:
        """Takes the parameters and buffers of the module that this one replaces, by name.

        The Parameter objects become this module's, holding this rank's part of tp_rank 0's values. Override it where
        names or layouts differ; `adopt` does the work for one parameter.
        """
        theirs = dict(module.named_parameters(remove_duplicate=False))
        mine = dict(self.named_parameters(remove_duplicate=False))
        missing = [name for name in theirs if name not in mine]
        if missing:
            log.warn_once(
                f"carry_over {type(module).__name__}",
                "%s has no counterpart for %s of %s: their values are not carried over",
                *(type(self).__name__, ", ".join(missing), type(module).__name__),
            )
        for name in mine:
            if name in theirs:
                self.adopt(name, theirs[name])
        buffers = dict(module.named_buffers(remove_duplicate=False))
        for name, buffer in self.named_buffers(remove_duplicate=False):
            if name in buffers and buffers[name].shape == buffer.shape:
                path, _, leaf = name.rpartition(".")
                self.get_submodule(path)._buffers[leaf] = buffers[name]

    def adopt(self, name: str, param: nn.Parameter) -> None:
        """Makes a Parameter object of the replaced module this module's parameter `name`.

        If it is to be cut, its values are replaced by this rank's part of what tp_rank 0 has; `requires_grad` and dtype
        stay. A parameter that an earlier replacement has cut in the same way is shared.

        Raises:
            ValueError: it has another shape than the whole parameter, or is cut in another way already.
        """
        path, _, leaf = name.rpartition(".")
        owner = self.get_submodule(path)
        spec = spec_of(owner._parameters[leaf])  # type: ignore[arg-type]
        if spec_of(param) is None:
            _cut(param, spec, self.tp_group)
        elif spec_of(param) != spec:
            raise ValueError(f"parameter {name} is cut as {spec_of(param)}, but {type(self).__name__} needs {spec}")
        owner._parameters[leaf] = param
        _describe(param, spec)


def cut_parameter(param: nn.Parameter, spec: ShardSpec, group: Group) -> None:
    """Makes a whole parameter, in place, this rank's part of what tp_rank 0 has. Collective over the group.

    Raises:
        ValueError: it has another shape than the whole parameter.
    """
    _cut(param, spec, group)
    _describe(param, spec)


def _dtype_of_new() -> torch.dtype:
    """Of parameters that distributed modules create: torch's default, with `fp16_params` half precision."""
    config = runtime.get().config
    if config.fp16_params:
        return torch.bfloat16 if config.bf16 else torch.float16
    return torch.get_default_dtype()


def _describe(param: nn.Parameter, spec: ShardSpec | None) -> None:
    """Leaves on the parameter what gradients, norms and checkpoints have to know about it."""
    if spec is not None:
        attributes: Any = param
        attributes._smp_shard = spec
        attributes._smp_scaled_batch = True


@torch.no_grad()
def _cut(param: nn.Parameter, spec: ShardSpec | None, group: Group) -> None:
    """Replaces a parameter's values, and its gradient if it has one, by this rank's part."""
    shape = spec.global_shape if spec else tuple(param.shape)
    if tuple(param.shape) != shape:
        raise ValueError(f"expected a parameter of shape {shape}, got {tuple(param.shape)}")
    if delayed.is_delayed(param):
        param.data = torch.empty(spec.local_shape if spec else shape, dtype=param.dtype, device="meta")
        return
    if spec is None:
        return
    grad, param.grad = param.grad, None
    param.data = spec.split(collectives.broadcast(param.data, group, 0))
    if grad is not None:
        param.grad = spec.split(grad)
