"""Which module goes to which stage: a pure function of the tree, its pins and the order of calls."""

import itertools
import random

import pytest
import torch
from torch import nn

import smp
from smp import PartitionError, runtime
from smp.pp.cost import Costs
from smp.pp.partition import Balance, assign
from smp.pp.split import contiguous
from tests.harness import on_ranks


def largest(costs, parts):
    return max(sum(c for c, p in zip(costs, parts) if p == k) for k in set(parts))


def best_by_trying_all(costs, num_parts):
    """Smallest largest part over all ways to cut into exactly min(num_parts, len) contiguous non-empty parts."""
    count = len(costs)
    pieces = min(num_parts, count)
    found = []
    for cuts in itertools.combinations(range(1, count), pieces - 1):
        edges = [0, *cuts, count]
        found.append(max(sum(costs[a:b]) for a, b in itertools.pairwise(edges)))
    return min(found)


def test_contiguous_cut_is_the_best_of_all_cuts():
    """The slowest stage sets the pace: a cut that is not optimal costs that much of every step."""
    generator = random.Random(3)
    for _ in range(300):
        count, stages = generator.randint(1, 9), generator.randint(1, 5)
        costs = [generator.choice([0, 0, 1, 2, 3, 5, 8, 50]) for _ in range(count)]
        parts = contiguous(costs, stages)
        assert len(parts) == count
        assert parts == sorted(parts) and parts[0] == 0  # contiguous, in order
        assert set(parts) == set(range(min(stages, count)))  # no stage empty while there are items
        assert largest(costs, parts) == best_by_trying_all(costs, stages), (costs, stages, parts)


def test_contiguous_cut_of_drawn_lists():
    """The same by hand, and the corners."""
    assert contiguous([1, 1, 1, 1], 2) == [0, 0, 1, 1]
    assert contiguous([9, 1, 1, 1], 2) == [0, 1, 1, 1]
    assert contiguous([1, 1, 1, 9], 3) == [0, 0, 1, 2] or contiguous([1, 1, 1, 9], 3) == [0, 1, 1, 2]
    assert contiguous([5], 4) == [0]
    assert contiguous([], 2) == []
    assert contiguous([0, 0, 0], 2) in ([0, 0, 1], [0, 1, 1])


def linear(cost):
    """A module with exactly `cost` parameters."""
    return nn.Linear(cost, 1, bias=False)


class Tree(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def called(*names):
    """Costs that say nothing but the order of calls."""
    return Costs(names, {}, {})


def stages_of(assignment, *names):
    return [assignment.modules[name] for name in names]


def test_units_follow_execution_order_not_definition_order():
    """Cutting in the order of definition would send every activation back and forth."""
    tree = Tree(last=linear(10), first=linear(10), middle=linear(10), other=linear(10))
    order = called("", "first", "middle", "other", "last")
    assert stages_of(assign(tree, 2, True, 0, order), "first", "middle", "other", "last") == [0, 0, 1, 1]
    assert stages_of(assign(tree, 2, True, 0, None), "last", "first", "middle", "other") == [0, 0, 1, 1]
    assert stages_of(assign(tree, 4, True, 0, order), "first", "middle", "other", "last") == [0, 1, 2, 3]


def test_a_container_that_is_never_called_has_the_place_of_what_is_inside():
    """A ModuleList is not called itself; without a position it would be put at the end."""
    tree = Tree(head=linear(1), layers=nn.ModuleList([linear(9), linear(9)]), embedding=linear(9))
    order = called("", "embedding", "layers.0", "layers.1", "head")
    got = stages_of(assign(tree, 2, True, 0, order), "embedding", "layers.0", "layers.1", "head")
    assert got == [0, 0, 1, 1] or got == [0, 1, 1, 1]
    got = stages_of(assign(tree, 3, True, 0, order), "embedding", "layers.0", "layers.1", "head")
    assert got == [0, 1, 2, 2]


def test_nested_modules_are_opened_where_they_are_too_large():
    """A model whose weight sits in one child (every transformer) must still be spread over all stages."""
    body = nn.Sequential(*[nn.Sequential(linear(10), linear(10)) for _ in range(4)])
    tree = Tree(embedding=linear(4), body=body, head=linear(4))
    got = assign(tree, 4, True, 0, None)
    assert got.modules[""] is None and got.modules["body"] is None
    assert stages_of(got, *[f"body.{i}" for i in range(4)]) == [0, 1, 2, 3]
    for i in range(4):  # below a module that lives on a stage, everything does
        assert stages_of(got, f"body.{i}.0", f"body.{i}.1") == [i, i]


def test_parameters_of_glue_modules_have_a_stage():
    """A position embedding held by the model itself must be trained by exactly one stage."""
    tree = Tree(a=linear(10), b=linear(10))
    tree.position = nn.Parameter(torch.zeros(3))
    got = assign(tree, 2, True, 0, called("", "a", "b"))
    assert got.modules[""] is None
    assert got.own[""] in (0, 1)
    assert sorted(stages_of(got, "a", "b")) == [0, 1]


def test_pins_are_kept_and_reach_down():
    """set_partition is a promise, also for what is inside, unless that has a pin of its own."""
    tree = Tree(a=linear(10), b=nn.Sequential(linear(10), linear(10)), c=linear(10), d=linear(10))
    tree.a.__dict__["_smp_pinned_to_stage"] = 1
    tree.b.__dict__["_smp_pinned_to_stage"] = 0
    tree.b[1].__dict__["_smp_pinned_to_stage"] = 2
    for auto in (True, False):
        got = assign(tree, 3, auto, 2, None)
        assert stages_of(got, "a", "b.0", "b.1") == [1, 0, 2], f"auto {auto}"
        assert got.modules["b"] is None
    assert stages_of(assign(tree, 3, False, 2, None), "c", "d") == [2, 2]
    assert set(stages_of(assign(tree, 3, True, 0, None), "c", "d")) <= {0, 1, 2}


def test_a_pin_that_does_not_exist_is_named():
    """Silently moving it elsewhere would be the opposite of what was asked."""
    tree = Tree(a=linear(1), b=linear(1))
    tree.b.__dict__["_smp_pinned_to_stage"] = 5
    with pytest.raises(PartitionError, match=r"module 'b' is placed on stage 5, but there are 2 stages"):
        assign(tree, 2, True, 0, None)


def test_modules_that_share_a_parameter_live_together():
    """Two stages with a copy each would train two weights."""
    tree = Tree(embedding=nn.Embedding(5, 4), a=linear(20), b=linear(20), head=nn.Linear(4, 5, bias=False))
    tree.head.weight = tree.embedding.weight
    got = assign(tree, 2, True, 0, None)
    assert got.modules["head"] == got.modules["embedding"] == 0
    tree.head.__dict__["_smp_pinned_to_stage"] = 1  # the pin of either one takes both
    got = assign(tree, 2, True, 0, None)
    assert got.modules["head"] == got.modules["embedding"] == 1


def test_a_module_lives_where_the_parameter_is_that_it_was_registered_for():
    """`smp.register_parameter`: a use that the module tree does not show."""
    tree = Tree(embedding=nn.Embedding(5, 4), a=linear(20), head=linear(20), bare=nn.Tanh())
    smp.register_parameter(tree.head, tree.embedding.weight)
    smp.register_parameter(tree.bare, tree.embedding.weight)
    got = assign(tree, 2, True, 0, None)
    assert got.modules["head"] == got.modules["embedding"] == 0
    assert got.modules["bare"] in (None, 0)


def test_sharing_is_transitive():
    """a-b and b-c share: all three are one group, in whatever order they are found."""
    tree = Tree(a=nn.ParameterList([]), b=nn.ParameterList([]), c=nn.ParameterList([]), d=linear(9))
    one, two = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    tree.a.append(one)
    tree.c.append(two)
    tree.b.append(one)
    tree.b.append(two)
    for pinned in "abc":
        for name in "abc":
            getattr(tree, name).__dict__.pop("_smp_pinned_to_stage", None)
        getattr(tree, pinned).__dict__["_smp_pinned_to_stage"] = 1
        got = assign(tree, 2, False, 0, None)
        assert stages_of(got, "a", "b", "c", "d") == [1, 1, 1, 0], pinned


def test_one_module_under_two_names_has_one_stage():
    """A module reached by two paths is one module."""
    shared = linear(10)
    tree = Tree(a=shared, b=linear(10), c=shared)
    got = assign(tree, 2, True, 0, None)
    assert got.modules["a"] == got.modules["c"]


def test_more_stages_than_modules_is_an_error_that_names_both_counts():
    """A rank that would never do anything is a mistake of the configuration, unless modules were placed by hand."""
    tree = Tree(a=linear(10), b=linear(10), drop=nn.Dropout())
    with pytest.raises(PartitionError, match=r"the model has 2 modules .* too few for pipeline_parallel_degree 4"):
        assign(tree, 4, True, 0)
    with pytest.raises(PartitionError, match=r"the model has 1 module that .* too few for pipeline_parallel_degree 3"):
        assign(linear(10), 3, True, 0)
    with pytest.raises(PartitionError, match=r"2 modules .* pipeline_parallel_degree 2 x virtual_stages 2 = 4 parts"):
        assign(tree, 2, True, 0, None, Balance(virtual_stages=2))
    tree.a.__dict__["_smp_pinned_to_stage"] = 3
    assert stages_of(assign(tree, 4, True, 0), "a", "b") == [3, 0]
    no_parameters = nn.Sequential(nn.ReLU(), nn.Dropout())
    assert set(assign(no_parameters, 2, True, 0).modules.values()) <= {None, 0, 1}


def test_parameterless_modules_follow_their_surroundings():
    """A dropout inside a stage's module runs there; one in glue has no stage and runs where its input lies."""
    tree = Tree(a=nn.Sequential(linear(10), nn.ReLU()), drop=nn.Dropout(), b=linear(10))
    got = assign(tree, 2, True, 0, None)
    assert got.modules["a.1"] == got.modules["a"] == 0
    assert got.modules["b"] == 1
    assert got.modules["drop"] in (None, 0, 1)


def test_the_result_depends_on_the_tree_alone():
    """Every rank computes its partition itself: an order that depends on memory addresses would split the ranks."""

    def build():
        generator = random.Random(7)
        return nn.Sequential(*[nn.Sequential(*[linear(generator.randint(1, 30)) for _ in range(3)]) for _ in range(6)])

    results = [assign(build(), 4, True, 0, None) for _ in range(5)]
    assert all(result == results[0] for result in results)


@on_ranks(2, config={"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 1})
def test_partition_contexts_nest_and_the_rest_goes_to_the_default():
    """The innermost context wins; what was made outside of all goes to default_partition; set_partition beats both."""
    with smp.partition(0):
        a = nn.Linear(2, 2)
        with smp.partition(1):
            b = nn.Sequential(nn.Linear(2, 2))
        c = nn.Linear(2, 2)
        late = nn.Linear(2, 2)
    d = nn.Linear(2, 2)
    smp.set_partition(late, 1)
    tree = Tree(a=a, b=b, c=c, d=d, late=late)
    got = assign(tree, 2, False, 1, None)
    assert stages_of(got, "a", "b", "b.0", "c", "d", "late") == [0, 1, 1, 0, 1, 1]
    assert set(stages_of(assign(tree, 2, True, 1, None), "a", "b", "c", "d")) == {0, 1}  # ignored by auto_partition
    for wrong in (2, -1, True, "0", None, 1.0):
        with pytest.raises(PartitionError, match="a stage is a number from 0 to 1"):
            smp.set_partition(a, wrong)
        with pytest.raises(PartitionError, match="a stage is a number from 0 to 1"):
            with smp.partition(wrong):
                pass
    model = smp.DistributedModel(nn.Sequential(a, b))

    @smp.step
    def step(x):
        model.backward(model(x).sum())

    step(torch.ones(2, 2))
    with pytest.raises(PartitionError, match="after the model was partitioned"):
        smp.set_partition(a, 1)
    smp.set_partition(nn.Linear(1, 1), 1)  # of no model
    runtime.reset()
