"""Units of a plan at work: attentions and MLPs whose own forward runs on this rank's heads and features.

                    joined batches                          shared batch (prescaled_batch)
    enter           gather_batch, also masks, ...           copy_in
    columns         own features, F.linear as ever          the same
    rows            scatter_sum, then the bias              sum_out, then the bias
    leave           own rows of whatever else there is      the same on every rank

Inside a unit every gradient is **partial**: the sum over the ranks counts. So what each rank computes alike (a norm of
single heads, a router) has in sum the right gradient with joined batches, where whole parameters are summed over the
ranks anyway, and with a shared batch through copy_in of the parameter. What is alike on all ranks and leaves the unit
gives its gradient back once. A mixture of experts has partial sums all through; they are added up where it is left.

Modules stay where they are, with their names and parameters; only their class becomes one derived from their own.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp import rng, runtime
from smp.comm import collectives
from smp.comm.autograd import (
    all_to_all,
    copy_in,
    copy_in_all,
    gather_batch,
    gather_slices,
    repeated,
    scatter_sum,
    sum_out,
)
from smp.errors import StepError
from smp.groups import Group
from smp.nested import flatten, unflatten
from smp.tp.module import DistributedModule, cut_parameter
from smp.tp.plan import Unit
from smp.tp.shard import ShardSpec, spec_of

_BATCH_ONLY = ("reorder_cache", "batch_repeat_interleave", "batch_select_indices")
_REFUSED = "_smp_refused_outputs"
_VARIABLE_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")


def distribute(unit: Unit, group: Group) -> None:
    """Cuts the parameters of a unit, in place, and makes its modules work on their parts. tp_rank 0's values count."""
    for path, cut in unit.cuts.items():
        owner_path, _, name = path.rpartition(".")
        part: Any = getattr(unit.module.get_submodule(owner_path), name)
        if isinstance(part, nn.Parameter):
            cut_parameter(part, _spec(part, cut.dim, cut.sections, group), group)
            continue
        cut_parameter(part.weight, _spec(part.weight, cut.dim, cut.sections, group), group)
        if cut.dim == 0:
            part.out_features //= group.size
            if part.bias is not None:
                cut_parameter(part.bias, _spec(part.bias, 0, cut.sections, group), group)
        else:
            part.in_features //= group.size
        if cut.kind == "gathered column":
            _become(part, PlannedGatheredColumns)
        elif cut.dim == 1:
            _become(part, PlannedRows)
            part.__dict__["_smp_how"] = ("experts" if unit.experts else "", cut.kind == "split row")
    for module in unit.module.modules():
        module.__dict__.pop("forward", None)  # their own, see `decide`: transformers leaves it there
    _set_local(unit)
    _become(unit.module, PlannedUnit)
    unit.module.__dict__["_smp_path"] = unit.name
    unit.module.__dict__["_smp_experts"] = unit.experts
    for model, key in unit.recorded:
        refused: set[str] = model.__dict__.setdefault(_REFUSED, set())
        if not refused:
            model.register_forward_pre_hook(_refuse_recorded, with_kwargs=True)
        refused.add(f"output_{key}")


def _refuse_recorded(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    for name in sorted(model.__dict__[_REFUSED]):
        asked = kwargs.get(name)
        if getattr(model.config, name, False) if asked is None else asked:
            raise StepError(
                f"{name}: it would be gathered from inside of modules that are split over the tensor-parallel group. "
                f"Leave it out, or set config.{name} before the model is made, which leaves those modules whole"
            )


def _spec(param: nn.Parameter, dim: int | None, sections: tuple[int, ...], group: Group) -> ShardSpec:
    assert dim is not None
    return ShardSpec(tuple(param.shape), dim, group.rank, group.size, sections)


def _set_local(unit: Unit) -> None:
    config = {name.removeprefix("config."): size for name, size in unit.local.items() if name.startswith("config.")}
    unit.module.__dict__.update({name: size for name, size in unit.local.items() if not name.startswith("config.")})
    if config:
        unit.module.__dict__["config"] = LocalConfig(unit.module.config, config)


class LocalConfig:
    """A model's configuration as one of its attentions sees it: with the numbers of heads that it has itself."""

    def __init__(self, config: Any, local: dict[str, int]) -> None:
        self.__dict__.update(_smp_config=config, **local)

    def __getattr__(self, name: str) -> Any:
        if name == "_smp_config":  # while it is being copied
            raise AttributeError(name)
        return getattr(self._smp_config, name)


# Classes


def _become(module: nn.Module, mixin: type["Planned"]) -> None:
    module.__class__ = _derived(mixin, type(module))


_derived_classes: dict[tuple[type, type], type[nn.Module]] = {}


def _derived(mixin: type["Planned"], cls: type[nn.Module]) -> type[nn.Module]:
    """A class of the same name that is both; hooks and users that ask for the model's own class still find it."""
    if (mixin, cls) not in _derived_classes:
        names: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__, "_smp_classes": (mixin, cls)}
        names["_smp_signature"] = inspect.signature(cls.forward)
        _derived_classes[mixin, cls] = type(cls.__name__, (mixin, cls), names)
    return _derived_classes[mixin, cls]


def _blank(mixin: type["Planned"], cls: type[nn.Module]) -> nn.Module:
    derived = _derived(mixin, cls)
    return derived.__new__(derived)


class Planned(DistributedModule):
    """A module of a model's own class that works on a part; made by `distribute`, never by its constructor."""

    _smp_classes: tuple[type["Planned"], type[nn.Module]]
    _smp_signature: inspect.Signature  # of the forward of the module's own class

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, self._smp_classes, self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__

    @property
    def _orig_forward(self) -> Callable[..., Any]:
        """The forward that the module had, bound to it."""
        return self._smp_classes[1].forward.__get__(self)


class PlannedGatheredColumns(Planned):
    """A linear cut along its outputs, of which every rank gets all: [.., in] -> [.., out]."""

    def forward(self, input: Tensor) -> Tensor:
        """Each rank's gradient of the output is partial."""
        return gather_batch(self._orig_forward(input), self.tp_group, input.dim() - 1)


class PlannedRows(Planned):
    """A linear cut along its inputs: [.., in / tp], or [.., in] that every rank has -> [.., out]."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    _smp_how: tuple[str, bool]

    def forward(self, input: Tensor) -> Tensor:
        """The sum over the ranks, this rank's rows of it with joined batches; for experts this rank's summand."""
        group = self.tp_group
        owner, split = self._smp_how
        if split:
            input = input.chunk(group.size, -1)[group.rank]
        if owner:  # one rank adds the bias, so that the sum has it once
            return F.linear(input, self.weight, self.bias if group.rank == 0 else None)
        partial = F.linear(input, self.weight)
        out = sum_out(partial, group) if self.shared_batch else scatter_sum(partial, group)
        if self.shared_batch:
            _draw_alike()
        return out if self.bias is None else out + self.bias.to(out.dtype)


# Random numbers: ranks draw different ones for their own heads, and the same ones for what they all have


@contextmanager
def _drawing_apart(part: int) -> Iterator[None]:
    streams = rng.current_streams()
    if streams is None:
        yield
        return
    with streams.salted(rng.part_salt(part)):
        yield


def _draw_alike() -> None:
    streams = rng.current_streams()
    if streams is not None and streams.salt:
        seed = streams.current()
        streams.salt = 0
        streams.seed(rng.mix(seed, 1))


class PlannedUnit(Planned):
    """An attention, an MLP or a mixture of experts: joins what it is given, runs its own forward, hands back."""

    on_one_stage = True  # what it sends is meant for ranks that hold values, not for glue code
    _smp_experts: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the forward of the module's own class, for this rank's batch."""
        shared = self.shared_batch
        args, kwargs = _copied_in(args, kwargs, self.tp_group) if shared else _Entry(self, args, kwargs).joined()
        apart = _drawing_apart(self.tp_group.rank) if shared and self.training else nullcontext()
        with self._whole_parameters(shared), apart:
            output = self._orig_forward(*args, **kwargs)
        leaves, spec = flatten(output)
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for index in tensors:
            leaves[index] = self._left(leaves[index], main=index == tensors[0], shared=shared)
        return unflatten(spec, leaves)

    @contextmanager
    def _whole_parameters(self, shared: bool) -> Iterator[None]:
        """With a shared batch the gradients of whole parameters are summed over the ranks, in one message."""
        places = list(self._uses_whole()) if shared and torch.is_grad_enabled() else []
        if not places:
            yield
            return
        params: list[Any] = [module._parameters[name] for module, name in places]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, param in enumerate(params):
            by_dtype.setdefault(param.dtype, []).append(index)
        for indexes in by_dtype.values():
            copies = copy_in_all([params[index] for index in indexes], self.tp_group)
            for index, copy in zip(indexes, copies):
                module, name = places[index]
                parameters: Any = module._parameters
                parameters[name] = copy
        try:
            yield
        finally:
            for (module, name), param in zip(places, params):
                module._parameters[name] = param

    def _uses_whole(self) -> Iterator[tuple[nn.Module, str]]:
        for module in self.modules():
            for name, param in module._parameters.items():
                after_sum = isinstance(module, PlannedRows) and not self._smp_experts
                if param is not None and param.requires_grad and spec_of(param) is None and not after_sum:
                    yield module, name

    def _left(self, tensor: Tensor, *, main: bool, shared: bool) -> Tensor:
        """What the caller gets of one tensor that the forward has returned."""
        group = self.tp_group
        if main and self._smp_experts:
            return sum_out(tensor, group) if shared else scatter_sum(tensor, group)
        if main:
            return tensor
        if tensor.dim() == 4 and not self._smp_experts:  # probabilities [batch, own heads, queries, keys]
            return gather_slices(tensor, group, 1) if shared else all_to_all(tensor, group, 0, 1)
        if shared:
            return repeated_once(tensor, group)
        if tensor.dim() == 0 or tensor.shape[0] % group.size:
            raise StepError(
                f"{self._smp_path} returns a tensor of shape {tuple(tensor.shape)}, of which it is not known which "
                "part belongs to this rank's batch; set prescaled_batch, or leave the module out of tensor parallelism"
            )
        return tensor.chunk(group.size)[group.rank]


def repeated_once(tensor: Tensor, group: Group) -> Tensor:
    """A value that every rank has computed alike: its gradient counts once, not once for each rank."""
    return repeated([tensor], group)[0]


def _copied_in(args: Any, kwargs: Any, group: Group) -> tuple[Any, Any]:
    leaves, spec = flatten((args, kwargs))
    return unflatten(
        spec, [copy_in(leaf, group) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves]
    )


# Joined batches: what a unit is given


class _Entry:
    """The arguments of one call, to be joined.

    The first tensor is the batch [n, ..]. Others may be missing on some ranks (a mask, where a batch has no padding),
    or be the same for all rows [1, ..]; so the ranks tell each other first what they have.
    """

    def __init__(self, unit: PlannedUnit, args: Any, kwargs: Any) -> None:
        self.unit, self.group = unit, unit.tp_group
        self.args, self.kwargs = args, kwargs
        signature = unit._smp_signature
        bound = signature.bind(unit, *args, **kwargs).arguments
        names = [name for name in signature.parameters if name != "self"]
        self.mask_place = names.index("attention_mask") if "attention_mask" in names else None
        for name in _VARIABLE_LENGTHS:
            if bound.get(name) is not None or bound.get("kwargs", {}).get(name) is not None:
                raise self._refused(f"the argument {name} (batches packed without padding)")

    def _refused(self, what: str) -> StepError:
        return StepError(
            f"{self.unit._smp_path} cannot join {what} with those of the other tensor-parallel ranks; set "
            "prescaled_batch"
        )

    def joined(self) -> tuple[Any, Any]:
        """The arguments with the batches of all ranks, in order of rank."""
        if len(self.args) == 1 and not self.kwargs and isinstance(self.args[0], Tensor) and self.mask_place is None:
            return (gather_batch(self.args[0], self.group, checked=self.unit._smp_path or True),), {}
        if self.mask_place is not None and len(self.args) <= self.mask_place:  # also where it was left out
            self.kwargs = {**self.kwargs, "attention_mask": self.kwargs.get("attention_mask")}
        leaves, spec = flatten((self.args, self.kwargs))
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        first = leaves[tensors[0]]
        rows = first.shape[0]
        joined: list[Any] = list(leaves)
        joined[tensors[0]] = gather_batch(first, self.group, checked=self.unit._smp_path or True)
        mask = self._mask_index(leaves, spec)
        others = [i for i, leaf in enumerate(leaves) if i != tensors[0] and (isinstance(leaf, Tensor) or i == mask)]
        if others:
            told = self._tell([leaves[i] for i in others], first)
            for place, index in enumerate(others):
                joined[index] = self._join(
                    leaves[index], [answer[place] for answer in told], rows, first, index == mask
                )
        for leaf in leaves:
            if hasattr(leaf, "update") and hasattr(leaf, _BATCH_ONLY[0]):
                _refuse_reordering(leaf)
        args, kwargs = unflatten(spec, joined)
        return args, kwargs

    def _mask_index(self, leaves: list[Any], spec: Any) -> int | None:
        if self.mask_place is None:
            return None
        marker = object()
        args, kwargs = list(self.args), dict(self.kwargs)
        if len(args) > self.mask_place:
            args[self.mask_place] = marker
        else:
            kwargs["attention_mask"] = marker
        marked, _ = flatten((tuple(args), kwargs))
        return next(i for i, leaf in enumerate(marked) if leaf is marker) if len(marked) == len(leaves) else None

    def _tell(self, leaves: list[Any], first: Tensor) -> list[list[Any]]:
        """For each rank what it has: shape, dtype, and whether it has joined this very tensor before."""
        mine = [
            (tuple(leaf.shape), str(leaf.dtype), _known(leaf) is not None) if isinstance(leaf, Tensor) else None
            for leaf in leaves
        ]
        if collectives.is_structure(first):
            return [mine] * self.group.size
        current = runtime.get()
        return current.transport.all_gather_object(mine, self.group, f"joining the batches of {self.unit._smp_path}")

    def _join(self, leaf: Any, told: list[Any], rows: int, first: Tensor, is_mask: bool) -> Any:
        present = [answer for answer in told if answer is not None]
        if not present:
            return None
        if len(present) < len(told):
            if not is_mask:
                raise self._refused("an argument that only some ranks have")
            if leaf is None:
                leaf = self._mask_of_nothing(present[0], rows, first)
        if leaf.dim() < 2:  # positions in the cache: the same for all rows
            return leaf
        dim = 1 if leaf.dim() >= 3 and leaf.shape[0] == 3 != rows and leaf.shape[1] in (1, rows) else 0
        if leaf.shape[dim] not in (1, rows):
            raise self._refused(f"an argument of shape {tuple(leaf.shape)} (the batch has {rows} rows)")
        if is_mask and leaf.dim() == 4 and leaf.shape[1] != 1:
            raise self._refused("a mask with a part for each head")
        complete = len(present) == len(told)
        if complete and all(answer[2] for answer in present):
            return _known(leaf)
        alike = complete and all(answer[0][dim] == 1 for answer in present)
        if leaf.shape[dim] == 1 != rows and not alike:
            leaf = leaf.expand(*leaf.shape[:dim], rows, *leaf.shape[dim + 1 :])
        if leaf.requires_grad:
            joined = gather_batch(leaf, self.group, dim, checked=True)
            return joined if leaf.shape[dim] == rows else _of_rows(joined, dim, rows)
        joined = collectives.all_gather(leaf, self.group, dim, checked=True)
        if alike and rows > 1:
            joined = leaf if _all_equal(joined, leaf, dim) else _of_rows(joined, dim, rows)
        _remember(leaf, joined)
        return joined

    def _mask_of_nothing(self, like: Any, rows: int, first: Tensor) -> Tensor:
        """The mask that leaving it out means: causal where the attention is."""
        shape, dtype_name, _ = like
        queries, keys = shape[-2:] if len(shape) == 4 else (1, shape[-1])
        dtype: torch.dtype = getattr(torch, dtype_name.removeprefix("torch."))
        seen = torch.ones(queries, keys, dtype=torch.bool, device=first.device)
        if len(shape) == 4 and queries > 1 and getattr(self.unit, "is_causal", False):
            seen = seen.tril(keys - queries)
        seen = seen.expand(rows, *[1] * (len(shape) - 3), queries, keys) if len(shape) == 4 else seen.expand(rows, keys)
        if dtype.is_floating_point:
            return torch.zeros(seen.shape, dtype=dtype, device=first.device).masked_fill(~seen, torch.finfo(dtype).min)
        return seen.to(dtype)


def _of_rows(joined: Tensor, dim: int, rows: int) -> Tensor:
    """[.., ranks, ..] -> [.., ranks * rows, ..], each rank's one for all of its rows."""
    return joined.repeat_interleave(rows, dim)


def _all_equal(joined: Tensor, leaf: Tensor, dim: int) -> bool:
    return collectives.is_structure(joined) or bool((joined == leaf).all() if joined.numel() else True)


# Masks and position embeddings are the same objects for all layers: they are joined once.
_joined: dict[int, tuple[ReferenceType[Tensor], int, Tensor]] = {}


def _known(leaf: Any) -> Tensor | None:
    entry = _joined.get(id(leaf))
    if not isinstance(leaf, Tensor) or entry is None or entry[0]() is not leaf or entry[1] != leaf._version:
        return None
    return entry[2]


def _remember(leaf: Tensor, joined: Tensor) -> None:
    key, forget = id(leaf), _joined.pop  # the interpreter's end takes modules' names away before it drops tensors
    if not collectives.is_structure(leaf) and not leaf.is_inference():
        _joined[key] = ref(leaf, lambda _: forget(key, None)), leaf._version, joined


def _refuse_reordering(cache: Any) -> None:
    """A cache that joined attentions have filled holds the rows of all ranks: nobody may pick rows from it."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise StepError(
            "the key/value cache holds the rows of all tensor-parallel ranks, so rows cannot be picked from it (beam "
            "search does); set prescaled_batch"
        )

    for name in _BATCH_ONLY:
        if hasattr(cache, name) and name not in cache.__dict__:
            cache.__dict__[name] = refused
