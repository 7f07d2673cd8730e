"""Nested containers are opened and rebuilt without loss."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch

from smp.nested import flatten, map_leaves, unflatten

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Node:
    value: object
    rest: object = None


@dataclass(frozen=True)
class Frozen:
    value: object


@dataclass
class Checked:
    """Its constructor does something; rebuilding must not run it again."""

    value: torch.Tensor
    count: int = field(default=0, init=False)

    def __post_init__(self):
        self.count += 1


T = torch.zeros(2)


@pytest.mark.parametrize(
    "nested",
    [
        [T, 1, "a", None],
        (T,),
        (),
        [],
        {},
        {"a": T, 3: [T, {"b": (T, None)}]},
        Pair(T, [1]),
        OrderedDict([("z", T), ("a", 1)]),
        defaultdict(list, {"a": T}),
        UserDict({"a": T}),
        frozenset({1, 2}),
        Frozen(T),
        Node(T, Node([T], "x")),
        T,
        5,
        None,
        torch.Size([1, 2]),
        "text",
    ],
    ids=lambda value: type(value).__name__,
)
def test_unflatten_undoes_flatten(nested):
    """A batch that comes back in another shape is another batch."""
    leaves, spec = flatten(nested)
    again = unflatten(spec, leaves)
    assert type(again) is type(nested)
    assert again is nested or again == nested
    hash(spec)  # part of every call's signature


def test_mapping_keeps_its_order_and_spec_tells_types_apart():
    """Two calls with different structure must not share one remembered result."""
    first, second = flatten({"a": 1, "b": 2})[1], flatten({"b": 2, "a": 1})[1]
    assert first != second
    assert list(unflatten(second, [2, 1])) == ["b", "a"]
    assert flatten([1])[1] != flatten((1,))[1]
    assert flatten(Pair(1, 2))[1] != flatten((1, 2))[1]
    assert flatten([1, [2]])[1] != flatten([[1], 2])[1]
    assert flatten({"a": 1})[1] != flatten(OrderedDict(a=1))[1]


def test_dataclass_is_rebuilt_without_its_constructor():
    """A __post_init__ that counts, copies or checks must not run once per microbatch."""
    (again,) = map_leaves(lambda leaf: leaf, [Checked(T)])
    assert again.count == 1 and again.value is T


def test_dataclass_without_tensors_is_a_leaf():
    """A settings object keeps its identity and its other attributes."""
    settings = Node(1, "x")
    settings.other = 5
    assert flatten([settings])[0] == [settings]
    assert map_leaves(lambda leaf: leaf, [settings])[0] is settings
    assert flatten(Node)[0] == [Node]  # the class itself


def test_containers_without_tensors_can_be_kept_whole():
    """The list that the user's function appends to."""
    collected, empty = [1, [2]], {}
    leaves, spec = flatten({"c": collected, "e": empty, "x": [T]}, keep_tensorless=True)
    assert leaves[0] is collected and leaves[1] is empty and leaves[2] is T
    again = unflatten(spec, leaves)
    assert again["c"] is collected and again["x"][0] is T


def test_model_outputs_and_encodings():
    """Hugging Face's mappings: fields that are None stay attributes, not keys."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import BaseModelOutputWithPast

    output = BaseModelOutputWithPast(last_hidden_state=T, hidden_states=(T, T))
    doubled = map_leaves(lambda leaf: leaf + 1 if isinstance(leaf, torch.Tensor) else leaf, output)
    assert type(doubled) is BaseModelOutputWithPast
    assert doubled.past_key_values is None and list(doubled) == ["last_hidden_state", "hidden_states"]
    assert torch.equal(doubled[0], T + 1) and torch.equal(doubled.hidden_states[1], T + 1)
    encoding = transformers.BatchEncoding({"input_ids": T})
    again = map_leaves(lambda leaf: leaf, encoding)
    assert type(again) is transformers.BatchEncoding and again.input_ids is T


def test_map_leaves_sees_every_leaf_in_order():
    """Order is what pairs leaves of two ranks."""
    seen = []
    map_leaves(seen.append, {"a": [1, (2, None)], "b": {"c": 3}})
    assert seen == [1, 2, None, 3]
