"""Tensor parallelism by the plan that a model's configuration ships (`base_model_tp_plan` of `transformers`).

    "layers.*.self_attn.q_proj": "colwise"      what is cut, and how, by path below the model that the plan is for
    "layers.*.self_attn.o_proj": "rowwise"

The modules that own what is cut, attentions and MLPs, are the **units**: a unit joins the batches once when it is
entered and hands back its own part once (planned.py), its own forward works in between on local heads and features.
A mixture of experts is one unit with all of its experts.

    1. plans       which modules have one, outermost first
    2. units       the paths that a plan names, gathered by the unit that they belong to
    3. cuts        for each unit what is done to each of its parts, or why the unit is left whole

Everything here only looks. What a plan does not name stays whole, each rank with its own batch, as the plan means it.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from smp.errors import PartitionError
from smp.tp.contexts import mark_of
from smp.tp.module import DistributedModule

Kind = Literal["column", "gathered column", "row", "split row", "part", "whole"]

# The names of styles, of transformers 4 and 5; a style that is not here is refused.
STYLES: dict[str, Kind] = {
    "colwise": "column",
    "local_colwise": "column",
    "packed_colwise": "column",
    "colwise_rep": "gathered column",
    "colwise_gather_output": "gathered column",
    "rowwise": "row",
    "local_rowwise": "row",
    "rowwise_rep": "split row",
    "rowwise_split_input": "split row",
    "replicate": "whole",
    "replicated": "whole",
    "replicated_with_grad_allreduce": "whole",
    "sequence_parallel": "whole",  # a norm on parts of the sequence: here it has the rank's own batch
    "local": "whole",  # these three are about modules around what is cut: where partial sums are added up
    "gather": "whole",
    "local_params": "whole",
    "moe_tp_experts": "whole",
}
HEADS = ("num_heads", "num_attention_heads", "n_heads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
# What mixes the features of a row: in the code of an MLP it would see the rank's own features only.
_OVER_FEATURES = frozenset("mean std var norm topk sort cumsum softmax rms_norm layer_norm logsumexp amax max".split())

_OVER_HEADS = frozenset("topk sort scatter roll flip".split())  # in the code of an attention: across its heads
_FUSED_HEADS, _FUSED_GATES = ("qkv_proj", "qkv"), ("gate_up_proj", "up_gate_proj")  # gathered by plans, to be sliced


@dataclass(frozen=True)
class Cut:
    """What becomes of one part of a unit.

    Attributes:
        kind: what its forward does; a parameter of its own ("part") has none.
        dim: along which dimension weights are cut, None: not at all.
        sections: as in ShardSpec.
    """

    kind: Kind
    dim: int | None = None
    sections: tuple[int, ...] = ()


@dataclass
class Unit:
    """An attention or MLP that a plan is about.

    Attributes:
        name: path in the whole model.
        module: the module itself.
        styles: by path below it, what the plan says; "" is the unit itself.
        experts: it is a mixture of experts, whose partial sums are added up at its end.
        cuts: by path below it; see `decide`.
        local: attributes that count heads, with their local values; those with "config." before them are read there.
        why: it is left whole because of this.
        recorded: models, with what each of them gathers from modules inside of the unit when it is asked to
            ("router_logits"): inside, batches are joined and gradients partial, so it must not be asked.
    """

    name: str
    module: nn.Module
    styles: dict[str, str] = field(default_factory=dict)
    experts: bool = False
    cuts: dict[str, Cut] = field(default_factory=dict)
    local: dict[str, int] = field(default_factory=dict)
    why: str = ""
    recorded: list[tuple[nn.Module, str]] = field(default_factory=list)


@dataclass
class Plans:
    """What the plans in a model come to.

    Attributes:
        units: those that can be cut.
        whole: by path, what the plans are about but has to stay whole, and why.
        settled: ids of modules that no other rule of tensor parallelism may replace.
    """

    units: list[Unit] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)


def find_units(root: nn.Module, num_parts: int, claimed: Callable[[nn.Module], bool]) -> Plans:
    """The units of all plans in `root`, as far as they are marked for tensor parallelism.

    Args:
        root: the model.
        num_parts: the tensor-parallel degree.
        claimed: whether a module, and what is inside, is replaced as a whole by another rule.
    """
    found = Plans()
    users = _users(root)
    reach = set(_reachable(root, claimed))
    for prefix, base, plan in _plans(root):
        if id(base) not in reach:
            continue
        planned, layers = _units(prefix, base, plan)
        for unit in planned:
            mark = mark_of(unit.module)
            if id(unit.module) not in reach or id(unit.module) in found.settled or mark is None or not mark.enabled:
                continue
            found.settled |= {id(part) for part in unit.module.modules()}
            if isinstance(unit.module, DistributedModule):
                continue
            try:
                unit.recorded = list(_recorded_inside(root, unit))
                decide(unit, num_parts, users)
                found.units.append(unit)
            except PartitionError as why:
                found.whole[unit.name] = str(why)
        _settle_rest(layers, found, reach)
        found.settled |= {id(part) for part in base.modules() if isinstance(part, nn.LayerNorm) and id(part) in reach}
    return found


# 1. Plans


def _plans(root: nn.Module) -> Iterator[tuple[str, nn.Module, Mapping[str, str]]]:
    """Path, model and plan, outermost first. A model with a head around it has the same configuration, but the plan is
    for the one inside (`base_model`)."""
    for name, module in root.named_modules():
        plan: Any = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        is_base: bool = getattr(module, "base_model", None) is module
        if isinstance(plan, Mapping) and plan and is_base:
            yield f"{name}." if name else "", module, plan


def _reachable(root: nn.Module, claimed: Callable[[nn.Module], bool]) -> Iterator[int]:
    """Ids of modules that no other rule replaces as part of a larger one."""
    if claimed(root):
        return
    yield id(root)
    for child in root.children():
        yield from _reachable(child, claimed)


# 2. Units


def _units(prefix: str, base: nn.Module, plan: Mapping[str, str]) -> tuple[list[Unit], dict[str, nn.Module]]:
    """The units of one plan, and the numbered modules ("layers.0") that hold them, by path in the whole model."""
    patterns = [(re.compile(re.escape(key).replace(r"\*", "[^.]+") + "$"), style) for key, style in plan.items()]
    modules = dict(base.named_modules())
    styles: dict[str, str] = {}
    for path in [*modules, *(name for name, _ in base.named_parameters(remove_duplicate=False))]:
        style = next((style for pattern, style in patterns if pattern.match(path)), None)
        if style is not None:
            styles[path] = style
    units: dict[str, Unit] = {}
    layers: dict[str, nn.Module] = {}
    for path, style in styles.items():
        number = re.match(r"(.*?\.\d+)\.", path)
        if number is None:  # a table, a norm or a projection beside the layers
            continue
        layers[prefix + number[1]] = modules[number[1]]
        owner = _unit_of(path, styles, modules)
        if owner is None:
            continue
        unit = units.setdefault(owner, Unit(prefix + owner, modules[owner]))
        unit.styles[path[len(owner) + 1 :]] = style
        unit.experts |= _is_of_experts(path)
    return list(units.values()), layers


def _is_of_experts(path: str) -> bool:
    return "experts" in path.split(".")[:-1]


def _unit_of(path: str, styles: Mapping[str, str], modules: Mapping[str, nn.Module]) -> str | None:
    """The path of the unit to which a planned path belongs."""
    parts = path.split(".")
    if "experts" in parts:
        return ".".join(parts[: parts.index("experts")])
    owner = path if path in modules and not isinstance(modules[path], nn.Linear) and _holds(path, styles) else ""
    owner = owner or ".".join(parts[:-1])
    if owner not in modules or isinstance(modules[owner], nn.ModuleList):
        return None
    around = ".".join(owner.split(".")[:-1])  # `shared_experts` beside `experts`
    if any(other.startswith(f"{around}.experts") for other in styles):
        return around
    return owner


def _holds(path: str, styles: Mapping[str, str]) -> bool:
    return any(other.startswith(f"{path}.") for other in styles)


def _settle_rest(layers: Mapping[str, nn.Module], found: Plans, reach: set[int]) -> None:
    """The plan has the last word on its layers: what it does not name stays whole; a linear or a table is said so."""
    for name, layer in layers.items():
        for path, part in layer.named_modules():
            if id(part) in found.settled or id(part) not in reach:
                continue
            mark = mark_of(part)
            if isinstance(part, nn.Linear | nn.Embedding) and mark is not None and mark.enabled:
                found.whole.setdefault(f"{name}.{path}", "the model's tensor-parallel plan does not name it")
            found.settled.add(id(part))


def _recorded_inside(root: nn.Module, unit: Unit) -> Iterator[tuple[nn.Module, str]]:
    """Models of transformers gather some outputs by hooks on modules of certain classes (`_can_record_outputs`)."""
    inside = [(f"{unit.name}.{path}", part) for path, part in unit.module.named_modules() if path]
    for model in root.modules():
        if not any(part is unit.module for part in model.modules()):
            continue
        for key, recorders in (getattr(model, "_can_record_outputs", None) or {}).items():
            every = recorders if isinstance(recorders, list) else [recorders]
            if any(_records(recorder, path, part) for recorder in every for path, part in inside):
                yield model, key


def _records(recorder: Any, path: str, part: nn.Module) -> bool:
    """Whether the outputs of a module are gathered: by its class, the end of its path, and a piece of its path."""
    cls = recorder if isinstance(recorder, type) else getattr(recorder, "target_class", None)
    end = recorder if isinstance(recorder, str) else getattr(recorder, "class_name", None)
    named = (getattr(recorder, "layer_name", None) or "").strip(".") in path
    return named and ((cls is not None and isinstance(part, cls)) or (end is not None and path.endswith(end)))


def _users(root: nn.Module) -> dict[int, list[int]]:
    """By id of a parameter the ids of the modules that have it."""
    users: dict[int, list[int]] = {}
    for module in root.modules():
        for param in [*module._parameters.values(), *module.__dict__.get("_smp_used_parameters", [])]:
            if param is not None:
                users.setdefault(id(param), []).append(id(module))
    return users


# 3. Cuts


def decide(unit: Unit, num_parts: int, users: Mapping[int, list[int]]) -> None:
    """Fills in `cuts` and `local` of a unit.

    Raises:
        PartitionError: the unit has to stay whole; says why.
    """
    module = unit.module
    inside = {id(part) for part in module.modules()}
    if any(set(users[id(param)]) - inside for param in module.parameters()):
        raise PartitionError("it shares weights with modules outside of it")
    if any(_has_foreign_forward(part) for part in module.modules()):
        raise PartitionError("its forward was replaced on the instance")
    for model, key in unit.recorded:
        if getattr(getattr(model, "config", None), f"output_{key}", False):
            raise PartitionError(f"config.output_{key} is True, which would be gathered from inside of it")
    for path, style in unit.styles.items():
        if style not in STYLES:
            raise PartitionError(f"the plan's style {style!r} (of {path or 'the module itself'}) is not supported")
    heads_stay = not unit.experts and _norms_over_all(unit)
    if not unit.experts and not heads_stay:
        _check_heads(unit, num_parts)
    for path, style in unit.styles.items():
        cut = _cut_of(unit, path, style, heads_stay, num_parts)
        if cut is not None:
            unit.cuts[path] = cut
    _check_parts(unit, num_parts)


def _has_foreign_forward(module: nn.Module) -> bool:
    """transformers leaves a module's own forward on the instance after it has listened in."""
    forward = module.__dict__.get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def head_dim_of(module: nn.Module) -> int | None:
    """Features of one head, None in a module that has no heads."""
    for name in ("head_dim", "head_size"):
        size = getattr(module, name, None)
        if isinstance(size, int):
            return size
    return None


def _config_number(module: nn.Module, names: tuple[str, ...]) -> tuple[str, int] | None:
    """The first of several attributes that the module or its configuration has, and its value."""
    for place in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return name, value
    return None


def _check_heads(unit: Unit, num_parts: int) -> None:
    """Every part needs whole heads, of queries and of keys and values; says which attributes count them."""
    module = unit.module
    head_dim = head_dim_of(module)
    if head_dim is None:
        return
    counted = [_config_number(module, HEADS), _config_number(module, KEY_VALUE_HEADS)]
    for found in counted:
        if found is not None and found[1] % num_parts:
            raise PartitionError(f"{found[0]} {found[1]} does not divide by tensor_parallel_degree {num_parts}")
    config = getattr(module, "config", None)
    for name in (*HEADS, *KEY_VALUE_HEADS):
        if isinstance(module.__dict__.get(name), int):
            unit.local[name] = module.__dict__[name] // num_parts
        if isinstance(getattr(config, name, None), int) and f"config.{name}" in _reads(module):
            unit.local[f"config.{name}"] = getattr(config, name) // num_parts
    if counted[0] is not None and module.__dict__.get("hidden_size") == counted[0][1] * head_dim:
        unit.local["hidden_size"] = module.__dict__["hidden_size"] // num_parts  # to it the heads are put together


def _norms_over_all(unit: Unit) -> bool:
    """Whether a norm runs over the features of all heads: then all heads have to come together before it."""
    head_dim = head_dim_of(unit.module)
    if head_dim is None:
        return False
    weights = [getattr(child, "weight", None) for name, child in unit.module.named_children() if "norm" in name]
    return any(weight is not None and weight.dim() == 1 and len(weight) != head_dim for weight in weights)


def _cut_of(unit: Unit, path: str, style: str, heads_stay: bool, num_parts: int) -> Cut | None:
    kind = STYLES[style]
    if kind == "whole":
        return None
    part = _get(unit.module, path)
    name = path.rpartition(".")[2]
    if isinstance(part, nn.Parameter):
        return _cut_of_parameter(path, part, style)
    if not isinstance(part, nn.Linear):
        raise PartitionError(f"the plan cuts {path}, a {type(part).__name__}; only linears can be")
    if kind in ("row", "split row"):
        kind = "row" if not heads_stay else "split row"
        if _router(path):
            raise PartitionError(f"the plan cuts the router {path} along its inputs")
        return Cut(kind, 1)
    if _router(path):
        return None  # small, and needed whole: each rank computes it for itself
    if heads_stay:
        if kind == "column":
            raise PartitionError("a norm runs over the features of all heads, of which each rank would have a part")
        return Cut(kind, 0)
    if kind == "column" and name in (*_FUSED_HEADS, *_FUSED_GATES):
        raise PartitionError(f"{name} is fused, and the plan's style {style!r} does not say of which pieces")
    return Cut("column", 0, _sections(unit, name, part, num_parts))


def _router(path: str) -> bool:
    return path.rpartition(".")[2] in ("gate", "router", "router_gate")


def _cut_of_parameter(path: str, param: nn.Parameter, style: str) -> Cut:
    """Of a parameter that a module has itself: sinks [heads], experts' weights [experts, out, in]."""
    rows = STYLES[style] == "column"
    if param.dim() == 1:
        return Cut("part", 0)
    if param.dim() != 3:
        raise PartitionError(f"the plan cuts {path}, a parameter with {param.dim()} dimensions")
    length = param.shape[1 if rows else 2]
    sections = (length // 2, length // 2) if style == "packed_colwise" else ()
    return Cut("part", 1 if rows else 2, sections)


def _sections(unit: Unit, name: str, linear: nn.Linear, num_parts: int) -> tuple[int, ...]:
    """Pieces of a fused matrix that are cut one by one: gate and up, or queries, keys and values."""
    out = linear.out_features
    if name in _FUSED_GATES:
        return (out // 2, out // 2)
    head_dim = head_dim_of(unit.module)
    if head_dim is not None and name in _FUSED_HEADS:
        heads, key_values = (_config_number(unit.module, names) for names in (HEADS, KEY_VALUE_HEADS))
        if heads is None:
            raise PartitionError(f"{name} is fused, and nothing says of how many heads")
        queries, others = heads[1] * head_dim, (key_values or heads)[1] * head_dim
        if queries + 2 * others != out:
            raise PartitionError(f"{name} has {out} outputs, but its heads make {queries} + 2 x {others}")
        return (queries, others, others)
    if name == "query_key_value" and head_dim is not None and out // num_parts % (3 * head_dim):
        raise PartitionError(f"{name} has {out} outputs, no multiple of tensor_parallel_degree {num_parts} heads")
    if name != "query_key_value" and head_dim is not None and out // num_parts % head_dim and out % head_dim == 0:
        raise PartitionError(f"{name} has {out // head_dim} heads, not a multiple of {num_parts}")
    return ()


def _check_parts(unit: Unit, num_parts: int) -> None:
    """Sizes divide, and everything that a unit holds is understood."""
    rows = [path for path, cut in unit.cuts.items() if cut.kind in ("row", "split row")]
    columns = [path for path, cut in unit.cuts.items() if "column" in cut.kind]
    parts = [path for path, cut in unit.cuts.items() if cut.kind == "part"]
    if not unit.experts and (len(rows) != 1 or not columns):
        raise PartitionError(f"the plan cuts {', '.join(unit.cuts) or 'nothing of it'}: not columns and then rows")
    if any("." in path for path in (*rows, *columns)) and not unit.experts:
        raise PartitionError(f"the plan cuts {rows[0]} deep inside of it")
    for path in (*rows, *columns, *parts):
        part = _get(unit.module, path)
        weight = part if isinstance(part, nn.Parameter) else part.weight
        dim = unit.cuts[path].dim or 0
        sizes = unit.cuts[path].sections or (weight.shape[dim],)
        if weight.dim() <= dim or any(size % num_parts for size in sizes):
            shown = " + ".join(map(str, sizes))
            raise PartitionError(f"{path} has {shown} features, not a multiple of tensor_parallel_degree {num_parts}")
    _check_rest(unit, num_parts)
    mixed = (_OVER_FEATURES if head_dim_of(unit.module) is None else _OVER_HEADS) & _reads(unit.module)
    if not unit.experts and mixed:
        raise PartitionError(f"its code takes {sorted(mixed)[0]} over features of which each rank has a part")


def _check_rest(unit: Unit, num_parts: int) -> None:
    """Parameters that the plan does not cut: norms of single heads are the same for all; those with a row for each
    head are cut by heads; a mixture of experts may have a router."""
    head_dim = head_dim_of(unit.module)
    norms_over_all = not unit.experts and _norms_over_all(unit)
    named = {f"{path}.{name}" for path in unit.cuts for name in ("weight", "bias")} | set(unit.cuts)
    for path, param in unit.module.named_parameters():
        if path in named or param.numel() == 1:
            continue
        owner = path.rpartition(".")[0]
        if unit.experts:
            if not _router(owner) and not _router(path) and "correction" not in path:
                raise PartitionError(f"{path} is not in the plan")
        elif head_dim is not None and param.dim() == 1 and (len(param) == head_dim or norms_over_all):
            continue
        elif head_dim is not None and param.dim() == 2 and param.shape[1] == head_dim and "norm" in owner:
            if param.shape[0] % num_parts:
                raise PartitionError(f"{path} has {param.shape[0]} heads, not a multiple of {num_parts}")
            unit.cuts[path] = Cut("part", 0)
        else:
            raise PartitionError(f"{path} of shape {tuple(param.shape)} is not in the plan")


def _get(module: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(module.get_submodule(owner), name) if name else module


def _reads(module: nn.Module) -> set[str]:
    """Names that the code of a module's class mentions; those read from its configuration with "config." too."""
    names: set[str] = set()
    for cls in type(module).__mro__:
        if cls is nn.Module:
            break
        for value in vars(cls).values():
            function = inspect.unwrap(value) if callable(value) else None
            code = getattr(function, "__code__", None)
            if code is not None and code.co_name != "__init__":
                names.update(code.co_names)
                names.update(f"config.{name}" for name in code.co_names)
    return names
