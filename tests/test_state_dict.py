"""Full and partial state dicts of a model cut into stages and parts."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import smp
from smp import model_state, runtime
from smp.errors import CheckpointError, UsageError
from smp.tp.shard import spec_of
from tests.harness import on_ranks
from tests.stateful import HandMade, cut


class Net(nn.Module):
    """Tied weights, buffers that are kept and not kept, a batch norm whose count is an integer."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.embedding = nn.Embedding(12, 4)
        self.middle = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(4, 12)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


STAGES = {"middle": 1}
PIPELINE = {"pipeline_parallel_degree": 2, "ddp": True}
GRID = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True}


def cut_parts(net):
    if smp.tp_size() > 1:
        cut(net.embedding.weight, 0)
        cut(net.middle[0].weight, 1)
        cut(net.head.bias, 0)
    return net


def made(seed=0, partitioned=True):
    """The model of that seed over the ranks, and the whole module it was made from."""
    net = Net(seed)
    return HandMade(cut_parts(copy.deepcopy(net)), STAGES, partitioned), net


def assert_holds(model, whole):
    """This rank's live tensors, the copies of buffers included, are the parts of `whole`."""
    names = dict(whole.state_dict())
    for name, tensor in model.module.state_dict(keep_vars=True).items():
        if model.owned(name) or not isinstance(tensor, nn.Parameter):
            spec = spec_of(tensor)
            assert torch.equal(tensor, names[name] if spec is None else spec.split(names[name])), name


def assert_full(state, whole):
    assert list(state) == list(whole.state_dict())
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("config", [PIPELINE, GRID, {"tensor_parallel_degree": 4, "ddp": True}, {"ddp": True}])
@on_ranks(4, config=None)
def test_full_state_dict_is_that_of_the_whole_module(config):
    """A user who saves it must be able to load it into the plain module: names, order, values, versions, ties."""
    smp.init(config)
    model, whole = (HandMade(cut_parts(Net()), STAGES if smp.pp_size() > 1 else {}), Net())
    state = model_state.full_state_dict(model)
    assert_full(state, whole)
    assert state["head.weight"] is state["embedding.weight"]
    assert "scratch" not in state
    plain = Net(seed=5)
    assert plain.load_state_dict(state) == ([], [])
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if model.owned(name):
                parameter.zero_()
    if smp.mp_size() > 1:
        assert state["head.weight"].any(), "a snapshot changed with the model"


@on_ranks(4, config=GRID)
def test_gathering_to_rank_0_gives_the_others_nothing():
    """The other ranks would otherwise hold the whole model in memory for nothing."""
    model, whole = made()
    state = model_state.full_state_dict(model, gather_to_rank0=True)
    if smp.rank() == 0:
        assert_full(state, whole)
    else:
        assert state == {}


@on_ranks(4, config=PIPELINE)
def test_full_state_dict_works_on_one_replica_alone():
    """The guard `if smp.rdp_rank() == 0` is allowed, so no message may leave the replica."""
    model, whole = made()
    if smp.rdp_rank() == 0:
        assert_full(model_state.full_state_dict(model), whole)
    if smp.dp_rank() == 0:
        assert_full(model_state.full_state_dict(model), whole)


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
@pytest.mark.parametrize("config", [PIPELINE, GRID])
@on_ranks(4, config=None, launcher=lambda arguments: arguments["launcher"])
def test_local_and_full_state_dicts_load_back(config, launcher):
    """Loading what was saved must restore every value, from the partial and from the full dict."""
    smp.init(config)
    model, whole = made(seed=1)
    local, full = model_state.local_state_dict(model), model_state.full_state_dict(model)
    assert local["_smp_is_partial"] is True
    assert set(local) == {"_smp_is_partial", *(name for name in whole.state_dict() if model.owned(name))}
    for state in (local, full, {**full, "_smp_is_partial": False}):
        other, _ = made(seed=2)
        assert model_state.load_state_dict(other, state) == ([], [])
        assert_holds(other, whole)


@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_a_partial_dict_follows_modules_that_moved_to_another_stage():
    """The partition may differ from the one saved; with same_partition_load that is an error, not a wrong model."""
    model, whole = made(seed=1)
    local = model_state.local_state_dict(model)
    moved = HandMade(Net(2), {"embedding": 1, "head": 1})
    assert model_state.load_state_dict(moved, local) == ([], [])
    assert_holds(moved, whole)
    with pytest.raises(CheckpointError, match=r"missing: .*middle\.0\.weight"):
        model_state.load_state_dict(HandMade(Net(2), {"embedding": 1, "head": 1}), local, same_partition_load=True)


@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_keys_are_counted_over_the_whole_model_and_agreed():
    """Each rank sees only its own part; the error must be the same everywhere, and nothing may be changed."""
    model, before = made(seed=1)
    state = Net(2).state_dict()
    del state["middle.0.bias"]  # of stage 1
    del state["scale"]  # of stage 0
    state["extra"] = torch.zeros(1)
    with pytest.raises(
        CheckpointError, match=r"missing: middle\.0\.bias, scale|missing: scale, middle\.0\.bias"
    ) as caught:
        model_state.load_state_dict(model, state)
    assert "unexpected: extra" in str(caught.value)
    assert_holds(model, before)
    result = model_state.load_state_dict(model, state, strict=False)
    assert sorted(result.missing_keys) == ["middle.0.bias", "scale"]
    assert result.unexpected_keys == ["extra"]


@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_a_key_missing_on_one_rank_is_missing_on_all():
    """Files of two ranks may differ; a rank that goes on alone would hang in the next step."""
    model, _ = made()
    local = model_state.local_state_dict(model)
    if smp.pp_rank() == 1:
        del local["middle.0.weight"]
    with pytest.raises(CheckpointError, match=r"missing: middle\.0\.weight"):
        model_state.load_state_dict(model, local)
    result = model_state.load_state_dict(model, local, strict=False)
    assert result.missing_keys == ["middle.0.weight"]


@on_ranks(4, config=GRID)
def test_a_wrong_shape_is_named_even_when_not_strict():
    """A tensor of another shape is never right; the message needs its name and both shapes."""
    model, before = made(seed=1)
    state = Net(2).state_dict()
    state["middle.0.weight"] = torch.zeros(8, 5)
    with pytest.raises(CheckpointError, match=r"middle\.0\.weight has shape \[8, 5\], the model has \[8, 4\]"):
        model_state.load_state_dict(model, state, strict=False)
    local = model_state.local_state_dict(model)
    if smp.pp_rank() == 0:
        local["head.bias"] = torch.zeros(12)
    with pytest.raises(CheckpointError, match=r"head\.bias has shape \[12\], the model has \[6\] \(part of \[12\]\)"):
        model_state.load_state_dict(model, local)
    assert_holds(model, before)


@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_one_name_of_a_tied_tensor_is_enough():
    """Files from which duplicates were removed hold one of the names."""
    model, _ = made(seed=1)
    whole = Net(2)
    state = whole.state_dict()
    del state["head.weight"]
    assert model_state.load_state_dict(model, state) == ([], [])
    assert_holds(model, whole)


@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_what_is_loaded_before_partition_is_applied_then():
    """Scripts load before the first step; the first step must run with those weights."""
    model, _ = made(seed=1, partitioned=False)
    with pytest.raises(UsageError, match="before the model is partitioned"):
        model_state.local_state_dict(model)
    assert_full(model_state.full_state_dict(model), Net(1))
    whole = Net(2)
    model_state.load_state_dict(model, whole.state_dict())
    with pytest.raises(UsageError, match="between load_state_dict"):
        model_state.full_state_dict(model)
    model.partition()
    runtime.get().run_waiting_loads()
    assert_holds(model, whole)
    assert_full(model_state.full_state_dict(model), whole)


@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_ranks_that_load_different_kinds_are_told():
    """Rank 0 with the full file, rank 1 with its part: each would wait for what the other never sends."""
    model, whole = made()
    state = whole.state_dict() if smp.rank() == 0 else model_state.local_state_dict(model)
    with pytest.raises(CheckpointError, match=r"ranks \[1\] load a partial state dict"):
        model_state.load_state_dict(model, state)


class Renamed(nn.Linear):
    """Reads a name of an older version, as modules of other libraries do."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self._register_load_state_dict_pre_hook(self._rename)

    def _rename(self, state, prefix, *_):
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")


@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_hooks_that_rename_old_keys_run():
    """Modules repair state dicts of older versions in load hooks; without them old files would not load."""
    model = HandMade(nn.Sequential(nn.Linear(4, 4), Renamed()), {"1": 1})
    state = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
    weight = state["1.weight"]
    state["1.kernel"] = state.pop("1.weight")
    assert model_state.load_state_dict(model, state) == ([], [])
    if smp.pp_rank() == 1:
        assert torch.equal(model.module[1].weight, weight)
    assert "1.kernel" in state, "the caller's dict was changed"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages made inside it: now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in given | self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


@on_ranks(4, config=GRID)
def test_a_rank_that_only_sends_holds_no_more_than_one_tensor_besides_its_own():
    """Gathering everything before writing runs out of memory where the model just fits."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    for layer in net:
        cut(layer.weight, 0)
    model = HandMade(net, {str(k): 1 for k in range(4, 8)})
    with LiveBytes() as live:
        state = model_state.full_state_dict(model, gather_to_rank0=True)
    largest = 64 * 64 * 4
    if smp.rank() == 0:
        assert live.peak <= 8 * largest + 2 * largest, "the writer holds the model, and one tensor with its parts"
        assert len(state) == 8
    else:
        assert live.peak <= largest
