"""The decision which module goes to which stage: one for all ranks, kept in a file, shown as a table."""

import json
import os
import tempfile

import pytest
import torch
from torch import nn

import smp
from smp import PartitionError, log, runtime
from smp.pp.assignment import Decision, compressed, load, save, table
from smp.pp.partition import assign
from smp.pp.stages import StageMap
from smp.pp.trace import trace
from tests.harness import on_ranks
from tests.pp.reference import Net, check, linear, vectors

DEGREES = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 1, "virtual_stages": 1}
X = torch.zeros(3, 4)


def net(width=4, layers=4):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def decision_for(module, stages=2):
    costs = trace(module, (torch.zeros(3, module[0].in_features),), {})
    return Decision(assign(module, stages, True, 0, costs), costs)


def test_a_decision_comes_back_from_its_file_as_it_was(tmp_path):
    """A decision that changes on the way would part a resumed run from its checkpoint."""
    module, path = net(), tmp_path / "partition.json"
    decision = decision_for(module)
    save(path, module, DEGREES, decision)
    assert load(path, net(), DEGREES) == decision
    assert os.listdir(tmp_path) == ["partition.json"]  # nothing lies around
    untraced = Decision(decision.assignment, None)
    save(path, module, DEGREES, untraced)
    assert load(path, net(), DEGREES) == untraced
    content = json.loads(path.read_text())
    assert content["degrees"] == DEGREES and content["parameters"]["0.weight"] == [4, 4]


def test_a_file_of_another_model_is_refused_and_the_difference_named(tmp_path):
    """Applied silently, modules that the file does not know would all land on stage 0."""
    path = tmp_path / "partition.json"
    save(path, net(), DEGREES, decision_for(net()))
    with pytest.raises(PartitionError, match=r"belongs to another model: '4.weight' is not in the file; '4.bias'"):
        load(path, net(layers=5), DEGREES)
    with pytest.raises(PartitionError, match=r"'3.weight' is not in this model; '3.bias' is not in this model\."):
        load(path, net(layers=3), DEGREES)
    with pytest.raises(PartitionError, match=r"'0.weight' has shape \[5, 5\] and was \[4, 4\]; .* and 4 more"):
        load(path, net(width=5), DEGREES)
    with pytest.raises(
        PartitionError, match="was made for pipeline_parallel_degree 2; this run has .*degree 3, tensor"
    ):
        load(path, net(), DEGREES | {"pipeline_parallel_degree": 3})
    with pytest.raises(PartitionError, match="module '4' is not in the file"):
        load(path, nn.Sequential(*net(), nn.ReLU()), DEGREES)


def test_a_pin_against_the_file_is_an_error(tmp_path):
    """set_partition is always honoured, and the file is what the user asked for: one of them has to go."""
    path = tmp_path / "partition.json"
    save(path, net(), DEGREES, decision_for(net()))
    pinned = net()
    pinned[3].__dict__["_smp_pinned_to_stage"] = 0
    with pytest.raises(PartitionError, match="places module '3' on stage 1, smp.set_partition on stage 0"):
        load(path, pinned, DEGREES)
    pinned[3].__dict__["_smp_pinned_to_stage"] = 1
    load(path, pinned, DEGREES)


def test_a_damaged_or_missing_file_is_named(tmp_path):
    """A truncated file must not end in a KeyError from the depths."""
    path = tmp_path / "partition.json"
    with pytest.raises(PartitionError, match=r"partition_file '.*partition.json' cannot be read: .*No such file"):
        load(path, net(), DEGREES)
    save(path, net(), DEGREES, decision_for(net()))
    whole = path.read_text()
    for damaged in (
        whole[: len(whole) // 2],
        "[]",
        "{}",
        whole.replace('"own"', '"other"'),
        whole.replace("2", "x", 1),
    ):
        path.write_text(damaged)
        with pytest.raises(PartitionError, match="partition_file .* (is damaged|has format)"):
            load(path, net(), DEGREES)
    content = json.loads(whole)
    content["assignment"]["3"] = 7
    path.write_text(json.dumps(content))
    with pytest.raises(PartitionError, match="module '3' lies on stage 7"):
        load(path, net(), DEGREES)
    with pytest.raises(PartitionError, match="cannot be written"):
        save(tmp_path / "missing" / "p.json", net(), DEGREES, decision_for(net()))


def test_the_table_has_a_row_for_each_stage():
    """What a user looks at first when a stage is slow or out of memory."""
    module = nn.Sequential(nn.Embedding(8, 4), net(layers=6), nn.ReLU(), nn.Linear(4, 2))
    costs = trace(module, (torch.zeros(3, dtype=torch.long),), {})
    assignment = assign(module, 2, True, 0, costs)
    lines = table(module, StageMap(module, assignment.modules, assignment.own, 0), 2, costs).splitlines()
    assert lines[0] == "Partition assignments:"
    assert lines[1].split() == ["stage", "parameters", "compute", "memory", "modules"]
    cells = [line.split() for line in lines[2:4]]
    assert [row[0] for row in cells] == ["0", "1"]
    total = sum(p.numel() for p in module.parameters())
    assert sum(int(row[1].replace(",", "")) for row in cells) == total
    for column in (2, 4):
        assert sum(float(row[column]) for row in cells) == pytest.approx(100, abs=0.11)
    assert lines[2].endswith("0, 1.0-2") or lines[2].endswith("0, 1.0-3"), lines[2]
    assert lines[3].endswith("-5, 3")
    assert "nominal ms" in lines[4]
    stages = StageMap(module, assignment.modules, assignment.own, 0)
    assert table(module, stages, 2, costs, forecast="a step takes 3 s").endswith("forecast: a step takes 3 s")
    bare = table(module, stages, 2, None).splitlines()
    assert len(bare) == 4 and bare[2].split()[2] == "-"
    empty = table(module, StageMap(module, dict.fromkeys(assignment.modules, 0), {}, 0), 2, None).splitlines()
    assert empty[3].endswith("(no module)")


def test_runs_of_numbered_modules_are_one_word():
    """80 layers on a line are not read by anybody."""
    assert compressed(["wte", "h.0", "h.1", "h.2", "h.4", "ln", "g.0", "g.1"]) == ["wte", "h.0-2", "h.4", "ln", "g.0-1"]
    assert compressed(["0", "1", "a.1.b", "a.2.b"]) == ["0-1", "a.1.b", "a.2.b"]
    assert compressed([]) == []


def run(module, **config):
    """One step of a new world; returns the model."""
    runtime.reset()
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    model = smp.DistributedModel(module)

    @smp.step
    def step(x):
        loss = model(x).sum()
        model.backward(loss)
        return loss

    step(torch.ones(4, 4))
    return model


@on_ranks(2)
def test_one_decision_for_all_ranks_stored_and_used_again():
    """Ranks that differ in one module wait for each other for ever."""
    directory = os.path.join(tempfile.gettempdir(), f"smp-partition-{os.getppid()}")
    path = os.path.join(directory, "p.json")
    if smp_rank() == 0:
        os.makedirs(directory, exist_ok=True)
    try:
        model = run(net(), partition_file=path)
        assert os.path.exists(path) or smp.rank() == 1
        smp.barrier()
        decided = model.engine.stages.assignment
        assert smp.allgather(decided, smp.WORLD)[0] == decided
        content = json.load(open(path))
        content["assignment"].update({"1": 0, "2": 0})
        stored = dict(content["assignment"])
        smp.barrier()
        if smp.rank() == 0:
            json.dump(content, open(path, "w"))
        smp.barrier()
        model = run(net(), partition_file=path, load_partition=True)
        assert model.engine.stages.assignment == stored and model.engine.costs is not None
        with pytest.raises(PartitionError, match="belongs to another model"):  # on every rank
            run(net(layers=3), partition_file=path, load_partition=True)
        with pytest.raises(PartitionError, match="1 module that can be placed"):
            run(net(layers=1))
        run(net())  # the world is still usable
    finally:
        smp.barrier()
        if smp.rank() == 0:
            os.remove(path)
            os.rmdir(directory)


def smp_rank():
    smp.init({"pipeline_parallel_degree": 2})
    return smp.rank()


@on_ranks(2)
def test_configuration_keys_of_the_partition_have_an_effect():
    """A key that is accepted and ignored lets a user tune nothing."""
    seen = []

    class Noting(nn.Linear):
        def forward(self, x):
            if smp.is_tracing():
                seen.append(type(x).__name__)
            return super().forward(x)

    def layers():
        return nn.Sequential(*[Noting(4, 4) for _ in range(4)])

    model = run(layers(), virtual_stages=2)
    assert [model.engine.stages.assignment[str(i)] for i in range(4)] == [0, 1, 0, 1]
    assert seen == (["FakeTensor"] * 4 if smp.rank() == 0 else [])  # one rank traces for all
    seen.clear()
    model = run(layers(), skip_tracing=True)
    assert seen == [] and model.engine.costs is None
    assert [model.engine.stages.assignment[str(i)] for i in range(4)] == [0, 0, 1, 1]
    model = run(layers(), use_times=True)
    assert model.engine.costs.measured and (smp.rank() == 1 or "Tensor" in seen)
    wide = nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    by_memory = run(wide, memory_weight=1.0).engine.stages.assignment
    wide = nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    by_time = run(wide, memory_weight=0.0).engine.stages.assignment
    assert [by_memory[str(i)] for i in range(5)] == [0, 1, 1, 1, 1]
    assert by_time["1"] == 0
    log.forget_warnings()


@on_ranks(2)
def test_several_chunks_on_a_stage_train_like_one_process():
    """A value then passes every stage more than once; gradients have to find the whole way back."""

    def forward(net, x):
        for layer in (net.a, net.b, net.c, net.d, net.e):
            x = torch.tanh(layer(x)) + x
        return x.sum()

    layers = {name: linear(seed=i) for i, name in enumerate("abcde")}
    model = check(Net(forward, **layers), {}, vectors(8), count=4, virtual_stages=2)
    places = [model.engine.stages.assignment[name] for name in "abcde"]
    assert places[0] == 0 and places[-1] == 1 and sum(a != b for a, b in zip(places, places[1:])) == 3
