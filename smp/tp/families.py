"""Families of models from another library: which of their modules have a distributed twin, and how names go over.

A family is declared in one file, `smp/nn/huggingface/<family>.py`, which is loaded when a module of that family is met
for the first time: nothing here imports `transformers`. Its table of names is read in both directions:

    Rule("h.{n}.attn.c_attn.weight", "seq_layers.{n}.attention.qkv.weight", TRANSPOSED)
                      |                                |
      theirs -> ours  |  a model's weights move to     |  ours -> theirs
      a state dict is |  their twin (carry.py)         |  a state dict is translated, to be read by plain `transformers`
      translated      |                                |
"""

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from smp.errors import CheckpointError
from smp.tp.layouts import SAME, TRANSPOSED, Layout
from smp.tp.module import DistributedModule

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
StateDict = dict[str, Any]

# Modules of `transformers` -> the module that declares their family. By name: families stand in a higher layer.
_DECLARED_IN = {
    "transformers.models.gpt2.modeling_gpt2": "smp.nn.huggingface.gpt2",
    "transformers.models.gpt_neo.modeling_gpt_neo": "smp.nn.huggingface.gptneo",
    "transformers.models.gptj.modeling_gptj": "smp.nn.huggingface.gptj",
    "transformers.models.gpt_neox.modeling_gpt_neox": "smp.nn.huggingface.gptneox",
    "transformers.models.bert.modeling_bert": "smp.nn.huggingface.bert",
    "transformers.models.roberta.modeling_roberta": "smp.nn.huggingface.roberta",
    "transformers.models.vit.modeling_vit": "smp.nn.huggingface.vit",
    "transformers.models.t5.modeling_t5": "smp.nn.huggingface.t5",
    "transformers.models.mt5.modeling_mt5": "smp.nn.huggingface.t5",
    "transformers.models.umt5.modeling_umt5": "smp.nn.huggingface.t5",
}


# Declarations


@dataclass(frozen=True)
class Rule:
    """One row of a table of names.

    Args:
        theirs: names of the other library, several if they become one; `{n}` stands for a number.
        ours: the name in the twin, with the same `{n}`; None: a buffer that is computed anew, which is dropped.
        layout: how the tensors differ.
        tied_to: a name of theirs, which may stand for the same tensor.
    """

    theirs: str | tuple[str, ...]
    ours: str | None
    layout: Layout = SAME
    tied_to: str | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """`theirs` as a tuple."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs


def inside(theirs: str, ours: str, rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules of a module inside another one, with the prefixes it has there."""
    return tuple(
        Rule(
            tuple(theirs + name for name in rule.sources),
            None if rule.ours is None else ours + rule.ours,
            rule.layout,
            None if rule.tied_to is None else theirs + rule.tied_to,
        )
        for rule in rules
    )


def weight_and_bias(theirs: str, ours: str, layout: Layout = SAME) -> tuple[Rule, ...]:
    """Rules for `<theirs>.weight` and `<theirs>.bias`; a bias has nothing to transpose."""
    bias = SAME if layout is TRANSPOSED else layout
    return Rule(f"{theirs}.weight", f"{ours}.weight", layout), Rule(f"{theirs}.bias", f"{ours}.bias", bias)


@dataclass(frozen=True)
class Replacement:
    """How modules of one class are replaced.

    Args:
        cls: path of the class.
        twin: its distributed twin.
        arguments: reads the twin's constructor arguments from an instance; raises PartitionError for what the twin
            cannot do, so that the module is left whole with a warning.
        rules: names of parameters, relative to the module.
        modules: (theirs, ours) names of modules inside, `{n}` as in rules: stages and activation checkpointing that
            users have asked for by then go over.
        config: reads the configuration from an instance.
        forward_hook, return_hook: as for `smp.tp_register`.
        attributes: what scripts read from an instance and should find on the twin.
        around: (twin, modules around it, the model first); adapts those to the twin.
    """

    cls: str
    twin: type[DistributedModule]
    arguments: Callable[[Any], Arguments]
    rules: tuple[Rule, ...]
    modules: tuple[tuple[str, str], ...] = ()
    config: Callable[[Any], Any] = lambda module: module.config
    forward_hook: Callable[..., Any] | None = None
    return_hook: Callable[[Any], Any] | None = None
    attributes: tuple[str, ...] = ()
    around: Callable[[Any, Sequence[nn.Module]], None] | None = None


@dataclass(frozen=True)
class Place:
    """Where in a state dict the names of a replaced module stand.

    Args:
        theirs, ours: prefixes, `{n}` as in rules.
        rules: names below them.
        config: of the model; None: not known.
        tied: whether names of `Rule.tied_to` are one tensor; None: not known.
    """

    theirs: str
    ours: str
    rules: tuple[Rule, ...]
    config: Any = None
    tied: bool | None = None


@dataclass(frozen=True)
class Family:
    """Models of one architecture.

    Args:
        name: how it is called in the names of the translate functions.
        model_types: `config.model_type` of its models.
        replaced: its modules that have twins.
        places: where names stand in a model whose places are not known otherwise; the first one that knows a name
            counts.
    """

    name: str
    model_types: tuple[str, ...]
    replaced: tuple[Replacement, ...]
    places: tuple[Place, ...]

    def hf_to_smp(self, state_dict: Mapping[str, Any], *, config: Any = None, consume: bool = False) -> StateDict:
        """Their names -> ours; see `to_ours`. `config` is taken from the DistributedModel if there is one."""
        return to_ours(state_dict, self._known_places(config), consume=consume)

    def smp_to_hf(
        self,
        state_dict: Mapping[str, Any],
        max_seq_len: int | None = None,
        *,
        config: Any = None,
        consume: bool = False,
    ) -> StateDict:
        """Our names -> theirs; see `to_theirs`.

        Args:
            state_dict: whole tensors by name.
            max_seq_len: has no effect: masks of that length are no part of the library's state dicts any more.
            config: of the model, taken from the DistributedModel if there is one.
            consume: see `to_theirs`.
        """
        return to_theirs(state_dict, self._known_places(config), consume=consume)

    def _known_places(self, config: Any) -> Sequence[Place]:
        if config is None and self.name in _in_model:
            return _in_model[self.name][1]
        return [Place(p.theirs, p.ours, p.rules, config, p.tied) for p in self.places]


# What is in the model


_in_model: dict[str, tuple[Family, list[Place]]] = {}  # by the family's name


def replacement_of(cls: type[nn.Module]) -> tuple[Family, Replacement] | None:
    """How modules of this class are replaced; None: it belongs to no family, or has no twin in it."""
    return _replacement_of(cls.__module__, cls.__qualname__)


@lru_cache(maxsize=1024)
def _replacement_of(module: str, name: str) -> tuple[Family, Replacement] | None:
    declared_in = _DECLARED_IN.get(module)
    if declared_in is None or find_spec(declared_in) is None:
        return None
    family: Family | None = getattr(import_module(declared_in), "FAMILY", None)
    for replacement in family.replaced if family is not None else ():
        if replacement.cls == f"{module}.{name}":
            assert family is not None
            return family, replacement
    return None


def forget_places() -> None:
    """A new model is made."""
    _in_model.clear()


def remember_place(path: str, module: nn.Module, family: Family, replacement: Replacement) -> None:
    """`module`, at `path` in the model, is replaced: state dicts are to be translated there."""
    prefix = f"{path}." if path else ""
    tied = any(
        _tensor_at(module, rule.sources[0]) is _tensor_at(module, rule.tied_to)
        for rule in replacement.rules
        if rule.tied_to is not None
    )
    rules = _in_use(replacement.rules, module)
    place = Place(prefix, prefix, rules, replacement.config(module), tied)
    _in_model.setdefault(family.name, (family, []))[1].append(place)


def translate_functions() -> list[tuple[Callable[..., StateDict], Callable[..., StateDict]]]:
    """(smp_to_hf, hf_to_smp) for each family in the model."""
    return [(family.smp_to_hf, family.hf_to_smp) for family, _ in _in_model.values()]


def _in_use(rules: Sequence[Rule], module: nn.Module) -> tuple[Rule, ...]:
    """Of rules for one name of ours, those for names that the module has."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    used = {rule for rule in rules if any(pattern_of(rule.sources[0]).fullmatch(name) for name in names)}
    replaced = {rule.ours for rule in used}
    return tuple(rule for rule in rules if rule in used or rule.ours is None or rule.ours not in replaced)


def _tensor_at(module: nn.Module, name: str) -> Tensor | None:
    return dict(module.named_parameters(remove_duplicate=False)).get(name)


# Translation


@dataclass(frozen=True)
class _Found:
    """The rule that knows a name: as which of its sources, and with which numbers in the places of `{n}`."""

    place: Place
    rule: Rule
    index: int
    numbers: tuple[str, ...]


@dataclass
class _Names:
    """The rules of places, ready to be asked for a name."""

    exact: dict[str, _Found] = field(default_factory=dict)
    patterns: list[tuple[re.Pattern[str], Place, Rule, int]] = field(default_factory=list)

    @classmethod
    def of_theirs(cls, places: Sequence[Place]) -> "_Names":
        names = cls()
        for place in places:
            for rule in place.rules:
                for index, name in enumerate(rule.sources):
                    names._add(place.theirs + name, place, rule, index)
        return names

    @classmethod
    def of_ours(cls, places: Sequence[Place]) -> "_Names":
        names = cls()
        for place in places:
            for rule in place.rules:
                if rule.ours is not None:
                    names._add(place.ours + rule.ours, place, rule, 0)
        return names

    def _add(self, template: str, place: Place, rule: Rule, index: int) -> None:
        if "{n}" in template:
            self.patterns.append((pattern_of(template), place, rule, index))
        else:
            self.exact.setdefault(template, _Found(place, rule, index, ()))

    def find(self, name: str) -> _Found | None:
        """The first place and rule that know the name."""
        if name in self.exact:
            return self.exact[name]
        for pattern, place, rule, index in self.patterns:
            match = pattern.fullmatch(name)
            if match is not None:
                return _Found(place, rule, index, match.groups())
        return None


@lru_cache(maxsize=4096)
def pattern_of(template: str) -> re.Pattern[str]:
    """The expression for a name with `{n}` in it; its groups are the numbers."""
    return re.compile(re.escape(template).replace(re.escape("{n}"), r"(\d+)"))


def fill(template: str, numbers: Sequence[str]) -> str:
    """A name from a template: the numbers take the places of `{n}`."""
    left = iter(numbers)
    return re.sub(r"\{n\}", lambda _: next(left), template)


def to_ours(state_dict: Mapping[str, Any], places: Sequence[Place], *, consume: bool = False) -> StateDict:
    """Their names -> ours. Names that no rule knows, of modules that are not replaced, stay as they are.

    Nothing is copied but what is fused or reordered (query, key, value); the rest are the same tensors, or views.

    Args:
        state_dict: whole tensors by name.
        places: where names stand. The names of a tied weight get one tensor, also where the file has but one of them.
        consume: take entries out of `state_dict` while they are translated, so that memory does not rise.

    Raises:
        CheckpointError: of tensors that are fused one is missing.
    """
    names = _Names.of_theirs(places)
    result: StateDict = {}
    translated: set[str] = set()
    waiting: dict[str, tuple[_Found, dict[int, Any]]] = {}
    for name, value in _entries(state_dict, consume):
        found = names.find(name)
        if found is None:
            result[name] = value
        elif found.rule.ours is not None:
            target = fill(found.place.ours + found.rule.ours, found.numbers)
            translated.add(target)
            _, parts = waiting.setdefault(target, (found, {}))
            parts[found.index] = value
            result.setdefault(target, None)  # in the order of the first parts
            if len(parts) == len(found.rule.sources):
                result[target] = found.rule.layout.merge([parts[k] for k in range(len(parts))], found.place.config)
                del waiting[target], parts
    for target, (found, parts) in waiting.items():
        sources = [found.place.theirs + source for source in found.rule.sources]
        missing = [fill(source, found.numbers) for k, source in enumerate(sources) if k not in parts]
        raise CheckpointError(f"{', '.join(missing)} is not in the state dict; {target} cannot be made without it")
    for place in places:
        ours = {source: rule.ours for rule in place.rules for source in rule.sources}
        for rule in place.rules:
            if rule.tied_to is not None and rule.ours is not None:
                first = ours[rule.tied_to]
                assert first is not None, "tied_to names another rule"
                _tie(result, place.ours + first, place.ours + rule.ours, place.tied, translated)
    return result


def _tie(result: StateDict, first: str, second: str, tied: bool | None, translated: Container[str]) -> None:
    """Gives both names of a weight one tensor; with `tied` None if both are there with the same values."""
    if tied is False or not (first in translated or second in translated):
        return
    if first in result and (tied or (second in result and _same(result[first], result[second]))):
        result[second] = result[first]
    elif tied and second in result:
        result[first] = result[second]


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape or a.is_meta or b.is_meta:
        return a is b
    return a.data_ptr() == b.data_ptr() or bool(torch.equal(a, b))


def to_theirs(state_dict: Mapping[str, Any], places: Sequence[Place], *, consume: bool = False) -> StateDict:
    """Our names -> theirs. Names that no rule knows, of modules that are not replaced, stay as they are.

    Args:
        state_dict: whole tensors by name.
        places: where names stand. The names of a tied weight get one tensor.
        consume: take entries out of `state_dict` while they are translated, and give the results memory of their own:
            what is to be written to a file. False: they are views into the tensors of `state_dict` where possible.
    """
    names = _Names.of_ours(places)
    result: StateDict = {}
    translated: set[str] = set()
    for name, value in _entries(state_dict, consume):
        found = names.find(name)
        if found is None:
            result[name] = value
            continue
        parts = found.rule.layout.split(value, found.place.config)
        for source, part in zip(found.rule.sources, parts):
            target = fill(found.place.theirs + source, found.numbers)
            own = part is value or not consume
            result[target] = part if own else part.clone(memory_format=torch.contiguous_format)
            translated.add(target)
        del value, parts
    for place in places:
        for rule in place.rules:
            if rule.tied_to is not None:
                first, second = place.theirs + rule.tied_to, place.theirs + rule.sources[0]
                _tie(result, first, second, place.tied, translated)
    return result


def _entries(state_dict: Mapping[str, Any], consume: bool) -> Iterator[tuple[str, Any]]:
    if not consume:
        yield from state_dict.items()
        return
    assert isinstance(state_dict, dict)
    for name in list(state_dict):
        yield name, state_dict.pop(name)
