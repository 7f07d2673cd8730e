"""Which module goes to which stage: a pure function of the tree, its pins and what a trace found out."""

import itertools
import random
import time

import pytest
import torch
from torch import nn

import smp
from smp import PartitionError, runtime
from smp.pp.cost import Costs, ModuleCost
from smp.pp.partition import Balance, assign, units_of
from smp.pp.split import Sequel, balanced, contiguous, stage_of_chunk
from smp.pp.trace import trace
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


def loads_of(root, assignment, num_stages, costs, memory_weight=0.8):
    """The load of each stage, by the units that lie there."""
    loads = [0.0] * num_stages
    for unit in units_of(root, num_stages, costs, memory_weight):
        stages = {assignment.modules[n] if assignment.modules[n] is not None else assignment.own[n] for n in unit.names}
        assert len(stages) == 1, unit
        loads[stages.pop()] += unit.load
    return loads


def random_tree(generator, depth=0):
    """A tree of modules with its costs, in an order of execution that is not that of definition."""
    kind = generator.choice([nn.ModuleList, nn.Sequential, Tree]) if depth < 3 else None
    if kind is None or depth and generator.random() < 0.3:
        return linear(generator.randint(1, 40))
    children = [random_tree(generator, depth + 1) for _ in range(generator.randint(1, 4))]
    if kind is nn.ModuleList:
        return kind(children)
    return kind(*children) if kind is nn.Sequential else kind(**{f"c{i}": c for i, c in enumerate(children)})


def random_costs(generator, root):
    names = [name for name, _ in root.named_modules()]
    leaves = [name for name, m in root.named_modules() if isinstance(m, nn.Linear)]
    seconds = {name: generator.choice([0.0, 0.1, 1.0, 2.0, 7.0]) for name in leaves}
    own = {
        name: ModuleCost(s, 2 * s, s, 4, generator.randint(0, 99), generator.randint(0, 9))
        for name, s in seconds.items()
    }
    generator.shuffle(names)
    return Costs(tuple(names), own, own)


def test_the_largest_stage_is_within_one_percent_of_the_best_of_all_cuts():
    """The promise of the partition. Every way to cut the units, in execution order, is tried."""
    generator = random.Random(11)
    tried = 0
    for _ in range(120):
        root = random_tree(generator)
        costs = random_costs(generator, root)
        num_stages, weight = generator.randint(1, 4), generator.choice([0.0, 0.2, 0.8, 1.0])
        units = units_of(root, num_stages, costs, weight)
        if not num_stages <= len(units) <= 13:
            continue
        tried += 1
        got = assign(root, num_stages, True, 0, costs, Balance(memory_weight=weight))
        best = best_by_trying_all([unit.load for unit in units], num_stages)
        assert max(loads_of(root, got, num_stages, costs, weight)) <= 1.01 * best + 1e-12
        stages = [got.modules[unit.names[0]] for unit in units]
        assert stages == sorted(stages)  # contiguous in execution order
    assert tried > 60


def real_models():
    """Name -> model without memory, arguments of a call."""
    transformers = pytest.importorskip("transformers")
    text = torch.zeros(2, 16, dtype=torch.long)
    small = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 64}
    with torch.device("meta"):
        gpt2 = transformers.GPT2Config(n_layer=5, n_embd=32, n_head=4, vocab_size=300)
        t5 = transformers.T5Config(vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4)
        bert = transformers.BertConfig(vocab_size=300, **small)
        vit = transformers.ViTConfig(image_size=16, patch_size=8, **small)
        return {
            "GPT-2": (transformers.GPT2LMHeadModel(gpt2), {"input_ids": text, "labels": text}),
            "T5": (transformers.T5ForConditionalGeneration(t5), {"input_ids": text, "decoder_input_ids": text}),
            "BERT": (transformers.BertForMaskedLM(bert), {"input_ids": text, "labels": text}),
            "ViT": (transformers.ViTForImageClassification(vit), {"pixel_values": torch.zeros(2, 3, 16, 16)}),
        }


def test_real_models_are_cut_within_one_percent_of_the_best():
    """Their trees have lists in lists, tied weights, parameters of their own in the middle, and unused modules."""
    for name, (model, batch) in real_models().items():
        costs = trace(model, (), batch, torch.device("cpu"))
        assert costs is not None, name
        for num_stages, weight in itertools.product((2, 3, 4, 7), (0.0, 0.2, 0.8, 1.0)):
            units = units_of(model, num_stages, costs, weight)
            best = max_of_best_cut([unit.load for unit in units], num_stages)
            got = assign(model, num_stages, True, 0, costs, Balance(memory_weight=weight))
            assert max(loads_of(model, got, num_stages, costs, weight)) <= 1.01 * best, (name, num_stages, weight)
            stages = [got.own[unit.names[0]] for unit in units]
            assert stages == sorted(stages)


def max_of_best_cut(costs, parts):
    """As `best_by_trying_all`, by dynamic programming."""
    prefix = [0.0, *itertools.accumulate(costs)]
    best = list(prefix)
    for _ in range(parts - 1):
        best = [min(max(best[j], prefix[i] - prefix[j]) for j in range(i + 1)) for i in range(len(prefix))]
    return best[-1]


def test_pinned_units_are_part_of_their_stages_load():
    """What is pinned is there whatever the rest does: the rest has to leave it room."""
    generator = random.Random(4)
    for _ in range(200):
        costs = [generator.choice([1, 2, 3, 5]) for _ in range(generator.randint(1, 7))]
        base = [generator.choice([0, 0, 4, 9]) for _ in range(generator.randint(1, 4))]
        parts = contiguous(costs, len(base), base)
        assert parts == sorted(parts)
        loads = [load + sum(c for c, p in zip(costs, parts) if p == k) for k, load in enumerate(base)]
        best = None
        for cuts in itertools.combinations_with_replacement(range(len(costs) + 1), len(base) - 1):
            edges = [0, *cuts, len(costs)]
            sums = [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]
            empty = sum(1 for load, a, b in zip(base, edges, edges[1:]) if not load and a == b)
            if empty > max(0, base.count(0) - len(costs)):
                continue
            largest_load = max(load + s for load, s in zip(base, sums))
            best = largest_load if best is None else min(best, largest_load)
        assert max(loads) == best, (costs, base, parts)


def test_a_module_is_torn_only_for_more_than_one_percent():
    """Tearing costs overhead: the torn module's code runs on every rank, and more values travel."""
    block = [Tree(a=linear(50), b=linear(50)) for _ in range(8)]
    tree = Tree(blocks=nn.ModuleList(block))
    got = assign(tree, 4, True, 0)
    assert [got.modules[f"blocks.{i}"] for i in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    tree.blocks.append(linear(3))  # evening this out is worth less than 1 %
    got = assign(tree, 4, True, 0)
    assert None not in [got.modules[f"blocks.{i}"] for i in range(9)]
    got = assign(Tree(blocks=nn.ModuleList(block[:3])), 2, True, 0)  # 150 + 150 instead of 200 + 100
    assert [got.modules[f"blocks.{i}"] for i in range(3)] == [0, None, 1]
    got = assign(Tree(blocks=nn.ModuleList(block[:3])), 2, True, 0, None, Balance(tolerance=0.5))
    assert None not in [got.modules[f"blocks.{i}"] for i in range(3)]


def test_a_module_that_reads_its_childrens_weights_is_never_torn():
    """torch's attention uses its output projection without calling it; apart, the weight would travel every time."""
    net = nn.Sequential(*[nn.MultiheadAttention(16, 2) for _ in range(3)])
    names = ["", "0", "1", "2"]
    costs = Costs(tuple(names), {}, {}, whole=frozenset({"0", "1", "2"}))
    got = assign(net, 2, True, 0, costs)
    assert None not in [got.modules[name] for name in ("0", "1", "2")]


def test_a_checkpointed_module_is_not_torn_while_it_fits_on_a_stage():
    """Only a module on one stage can be recomputed as a whole: torn, it keeps everything that was to be given up."""
    tree = Tree(blocks=nn.ModuleList([Tree(a=linear(50), b=linear(50)) for _ in range(3)]))
    got = assign(tree, 2, True, 0, Costs(("",), {}, {}))
    assert [got.modules[f"blocks.{i}"] for i in range(3)] == [0, None, 1]
    costs = Costs(("",), {}, {}, recomputed=frozenset({"blocks.0", "blocks.1", "blocks.2", "blocks", ""}))
    got = assign(tree, 2, True, 0, costs)
    assert None not in [got.modules[f"blocks.{i}"] for i in range(3)]


def gpt(vocabulary, layers=8, width=64, length=32):
    """Plain modules in the proportions of a GPT: a lookup, equal layers, a head over the vocabulary."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = (
                nn.LayerNorm(width),
                nn.Linear(width, 6 * width),
                nn.Linear(6 * width, width),
            )

        def forward(self, x):
            return x + self.down(self.up(self.norm(x)).relu())

    return nn.Sequential(
        nn.Embedding(vocabulary, width), *[Block() for _ in range(layers)], nn.Linear(width, vocabulary, bias=False)
    ), torch.zeros(2, length, dtype=torch.long)


@pytest.mark.parametrize("memory_weight", [0.0, 0.2, 0.8])
def test_a_large_vocabulary_moves_whole_layers_off_the_last_stage(memory_weight):
    """Counting parameters takes the lookup for as dear as the head, and stage 1 waits for stage 0's half of nothing."""
    net, text = gpt(vocabulary=64 * 64)
    costs = trace(net, (text,), {})
    got = assign(net, 2, True, 0, costs, Balance(memory_weight=memory_weight))
    seconds = [0.0, 0.0]
    equal = [0.0, 0.0]
    for name, cost in costs.charged.items():
        seconds[got.modules[name] if got.modules[name] is not None else got.own[name]] += cost.seconds
        equal[0 if name.partition(".")[0] in "01234" else 1] += cost.seconds
    assert max(seconds) <= 0.95 * max(equal)
    assert sum(got.modules[str(i)] == 0 for i in range(1, 9)) > 4
    assert got.modules["0"] == 0 and got.modules["9"] == 1


def test_memory_weight_says_what_is_balanced():
    """1: parameters and activations; 0: time."""
    tree = Tree(wide=linear(1000), slow=linear(10), quick=linear(10), last=linear(990))
    own = {"slow": ModuleCost(5.0, 10.0, 5.0), "quick": ModuleCost(1.0, 2.0, 1.0), "wide": ModuleCost(1.0, 2.0, 1.0)}
    own["last"] = ModuleCost(1.0, 2.0, 1.0)
    costs = Costs(("", "wide", "slow", "quick", "last"), own, own)
    by_memory = assign(tree, 2, True, 0, costs, Balance(memory_weight=1.0))
    assert stages_of(by_memory, "wide", "slow", "quick", "last") == [0, 0, 1, 1] or stages_of(
        by_memory, "wide", "slow", "quick", "last"
    ) == [0, 1, 1, 1]
    by_time = assign(tree, 3, True, 0, costs, Balance(memory_weight=0.0))
    assert stages_of(by_time, "wide", "slow", "quick", "last") == [0, 1, 2, 2]


def test_chunks_go_round_the_stages():
    """Several chunks on a stage shorten the pipeline's fill: chunk c has to follow chunk c - 1 on the next stage."""
    assert [stage_of_chunk(c, 3, "loop") for c in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [stage_of_chunk(c, 3, "v") for c in range(7)] == [0, 1, 2, 2, 1, 0, 0]
    tree = nn.Sequential(*[linear(10) for _ in range(8)])
    for placement, expected in (("loop", [0, 0, 1, 1, 0, 0, 1, 1]), ("v", [0, 0, 1, 1, 1, 1, 0, 0])):
        got = assign(tree, 2, True, 0, None, Balance(virtual_stages=2, placement=placement))
        assert [got.modules[str(i)] for i in range(8)] == expected
    got = assign(tree, 4, True, 0, None, Balance(virtual_stages=2))
    assert [got.modules[str(i)] for i in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_stages_of_several_chunks_are_even_where_single_chunks_cannot_be():
    """A dear head makes its chunk the largest; the stage's other chunk has to make up for it."""
    sequel = Sequel((1.0,) * 12 + (3.0,), (0.0,) * 13)
    chunks = balanced(sequel, 2, 2)
    assert chunks == sorted(chunks) and set(chunks) == {0, 1, 2, 3}
    loads = [0.0, 0.0]
    for cost, chunk in zip(sequel.costs, chunks):
        loads[chunk % 2] += cost
    assert max(loads) <= 8.0  # 15 in all
    generator = random.Random(2)
    for _ in range(30):
        count = generator.randint(8, 14)
        costs = tuple(float(generator.choice([1, 1, 2, 3, 6])) for _ in range(count))
        stages, turns = generator.choice([(2, 2), (2, 3), (3, 2)])
        chunks = balanced(Sequel(costs, (0.0,) * count), stages, turns)
        assert chunks == sorted(chunks) and set(chunks) == set(range(stages * turns))
        got = max(sum(c for c, k in zip(costs, chunks) if k % stages == s) for s in range(stages))
        best = min(
            max(
                sum(sum(costs[a:b]) for a, b in itertools.islice(itertools.pairwise(edges), s, None, stages))
                for s in range(stages)
            )
            for cuts in itertools.combinations(range(1, count), stages * turns - 1)
            for edges in [(0, *cuts, count)]
        )
        assert got <= 1.25 * best  # found by moving edges, not by trying all


def test_two_hundred_layers_are_cut_in_seconds():
    """a10-3: an hour of start-up without a word. The trace alone runs every layer."""
    net = nn.Sequential(*[nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)) for _ in range(200)])
    begin = time.monotonic()
    costs = trace(net, (torch.zeros(2, 8),), {})
    for stages, turns in ((4, 1), (16, 1), (4, 4)):
        assign(net, stages, True, 0, costs, Balance(virtual_stages=turns))
    assert time.monotonic() - begin < 10


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
