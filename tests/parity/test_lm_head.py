"""DistributedTransformerLMHead with stages and replicas, against its undistributed twin in one process."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from smp import runtime
from smp.comm.autograd import copy_in, gather_batch
from smp.nn import DistributedModule, DistributedTransformerLMHead, vocabulary_parallel_cross_entropy
from smp.tp.delayed import materialize
from smp.tp.shard import spec_of
from tests.harness import on_ranks
from tests.parity.compare import TOLERANCE, Setup, assert_close, assert_same, batch_parts, plain_run, sgd, smp_run
from tests.parity.zoo import Case
from tests.tp.lm_twin import GPT2, distributed, twin_of

UNTIED = {**GPT2, "tie_word_embeddings": False, "lm_head_bias": True, "num_token_types": 2}
CROSS = {**GPT2, "add_cross_attention": True}
LENGTH = 4
PLACES = [
    *[("body.word_embedding", 0.0), ("body.position_embedding", 0.0), ("body.embedding_dropout", 0.0)],
    *[("body.transformer.seq_layers.0", 0.0), ("body.transformer.seq_layers.1", 0.5)],
    *[("body.layernorm", 0.75), ("body.lm_head", 0.75)],
]


class Model(nn.Module):
    """Takes the batch by name, as compare.py gives it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor, states: Tensor | None = None) -> Tensor:
        cross = () if states is None else (states, None)
        return self.body((ids, mask, None, None, *cross, labels))


def cases(options: dict[str, Any]) -> tuple[Case, Case]:
    """The distributed model and its twin, from the same weights."""

    def batch(rows: int, generator: torch.Generator) -> dict[str, Any]:
        ids = torch.randint(options["vocab_size"], (rows, LENGTH), generator=generator)
        mask = torch.randint(2, (rows, LENGTH), generator=generator)
        mask[:, 0] = 1
        labels = ids.masked_fill(torch.rand(rows, LENGTH, generator=generator) < 0.2, -100)
        labels[:, 1] = ids[:, 1]
        given = {"ids": ids, "mask": mask, "labels": labels}
        if options.get("add_cross_attention"):
            given["states"] = torch.randn(rows, 6, options["hidden_size"], generator=generator)
        return given

    twin = Case(lambda: Model(twin_of(options)), batch)
    return Case(lambda: Model(distributed(twin_of(options))), batch, PLACES), twin


def check(options: dict[str, Any], setup: Setup) -> None:
    runtime.reset()
    try:
        case, twin = cases(options)
        got, model = smp_run(case, setup)
        want = plain_run(twin, setup, sgd, *batch_parts(setup))
        assert_same(got, want, model, TOLERANCE[setup.dtype], f"{setup}:")
    finally:
        runtime.reset()


MODES = pytest.mark.parametrize("optimize", ["speed", "memory"])
TWO_MODES = pytest.mark.parametrize(
    ("prescaled", "optimize"),
    [
        *[(False, "memory"), (True, "speed")],
        *[pytest.param(*mode, marks=pytest.mark.slow) for mode in ((False, "speed"), (True, "memory"))],
    ],
)
BATCHES = pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])


@TWO_MODES
@pytest.mark.parametrize("name", ["tied", "untied", "cross"])
@on_ranks(4)
def test_two_stages_of_two_parts_train_as_one_process(name, prescaled, optimize):
    """A boundary inside `seq_layers`, by hand and found by the automatic partition, and replicas instead of stages."""
    options = {"tied": GPT2, "untied": UNTIED, "cross": CROSS}[name]
    common: dict[str, Any] = {"tp": 2, "microbatches": 2, "prescaled": prescaled, "dtype": torch.float64}
    common["config"] = {"optimize": optimize}
    check(options, Setup(pp=2, passes=2, **common))
    check(options, Setup(pp=2, auto=True, **common))
    check(options, Setup(pp=1, **common))


@MODES
@on_ranks(4)
def test_four_parts_train_as_one_process_in_float32(optimize):
    """Thirteen words over four parts, of which the last holds one and three rows that are no words."""
    for prescaled in (False, True):
        config = {"optimize": optimize}
        check(GPT2, Setup(tp=4, microbatches=2, passes=2, prescaled=prescaled, config=config))
        check(UNTIED, Setup(tp=4, prescaled=prescaled, config=config))


class OwnColumns(DistributedModule):
    """A user's column-parallel head: logits of the rank's classes, for the joined batch."""

    def __init__(self) -> None:
        super().__init__()
        self.create_parameter("weight", (12, 8), nn.init.normal_, dim=0)

    def forward(self, x: Tensor) -> Tensor:
        joined = copy_in(x, self.tp_group) if self.shared_batch else gather_batch(x, self.tp_group)
        return F.linear(joined, self.weight)


class Classifier(nn.Module):
    def __init__(self, split: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        nn.init.normal_(self.head.weight)
        if split:
            whole, self.head = self.head.weight.detach(), OwnColumns()
            spec = spec_of(self.head.weight)
            self.head.weight.data.copy_(spec.split(whole) if spec else whole)
        self.split = split

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.table(ids))
        if self.split:
            return vocabulary_parallel_cross_entropy(logits, labels, label_smoothing=0.1)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


@BATCHES
@on_ranks(4)
def test_the_loss_can_be_taken_outside_of_any_layer(prescaled):
    """In code between modules, of logits that another stage has computed."""

    def batch(rows: int, generator: torch.Generator) -> dict[str, Any]:
        return {name: torch.randint(12, (rows, LENGTH), generator=generator) for name in ("ids", "labels")}

    for pp, auto in [(2, False), (2, True), (1, False)]:
        runtime.reset()
        setup = Setup(pp=pp, tp=2, auto=auto, microbatches=2, prescaled=prescaled, dtype=torch.float64)
        case = Case(lambda: Classifier(split=True), batch, [("table", 0.0), ("head", 0.5)])
        got, model = smp_run(case, setup)
        want = plain_run(Case(lambda: Classifier(split=False), batch), setup, sgd, *batch_parts(setup))
        assert_same(got, want, model, 1e-9, f"{setup}:")
    runtime.reset()


def whole_model(options: dict[str, Any], pp: int, tp: int, **config: Any) -> Any:
    runtime.reset()
    smp.init({"pipeline_parallel_degree": pp, "tensor_parallel_degree": tp, "ddp": True, **config})
    model = smp.DistributedModel(cases(options)[0].build())
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


@smp.step
def train(model: Any, batch: dict[str, Any]) -> Tensor:
    loss = model(**batch)
    model.backward(loss)
    return loss


@MODES
@on_ranks(4)
def test_tied_head_on_another_stage_is_one_weight(optimize):
    """a2-2, a5-3: after three steps both copies are equal, and the norm of gradients that are all one counts every
    logical element once: neither the copy, nor rows that are no words, nor whole parameters on each rank."""
    runtime.reset()
    setup = Setup(pp=2, tp=2, dtype=torch.float64, steps=3, config={"optimize": optimize})
    case, twin = cases(GPT2)
    _, model = smp_run(case, setup)
    body = model.module.body
    assert model.holders("body.word_embedding.weight") == (0, 1)
    copies = smp.allgather(body.word_embedding.weight.detach(), smp.PP_GROUP)
    assert torch.equal(*copies)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    logical = sum(parameter.numel() for parameter in twin.build().parameters())
    assert float(smp.clip_grad_norm_(model.parameters(), 1e9)) ** 2 == pytest.approx(logical, rel=1e-12)
    assert float(smp.clip_grad_norm_(model.parameters(), 1e9, float("inf"))) == 1.0
    runtime.reset()


@pytest.mark.parametrize("options", [GPT2, UNTIED], ids=["tied", "untied"])
@on_ranks(4)
def test_state_dicts_have_no_padded_rows_and_move_between_degrees(options, tmp_path):
    """a9-5: thirteen words on pp 2 x tp 2, saved whole, go on as trained, on tp 4 and on pp 4, Adam's moments too."""
    batch = cases(options)[1].batch(4, torch.Generator().manual_seed(1))
    model, optimizer = whole_model(options, 2, 2)
    train(model, batch)
    optimizer.step()
    optimizer.zero_grad()
    state, moments = model.state_dict(), optimizer.state_dict()
    twin = Model(twin_of(options))
    assert set(state) == set(twin.state_dict())
    for name, value in twin.state_dict().items():
        assert state[name].shape == value.shape, name
        assert state[name].is_contiguous()
    shared = state["body.lm_head.weight"] is state["body.word_embedding.weight"]
    assert shared == (options == GPT2)
    assert twin.double().load_state_dict(state, strict=True)
    expected = twin(**batch).item()
    after = train(model, batch).reduce_mean().item()
    optimizer.step()
    assert after == pytest.approx(expected, rel=1e-9)
    want = model.state_dict()
    for pp, tp in [(1, 4), (4, 1), (1, 1)]:
        model, optimizer = whole_model(options, pp, tp)
        model.load_state_dict(state)
        optimizer.load_state_dict(copy.deepcopy(moments))  # torch keeps the tensors it is given
        assert train(model, batch).reduce_mean().item() == pytest.approx(after, rel=1e-9)
        optimizer.step()
        for name, value in model.state_dict().items():
            assert_close(value, want[name], 1e-9, f"{name} on pp {pp} x tp {tp}")
    runtime.reset()


@pytest.mark.parametrize("options", [GPT2, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 2), (1, 4), (4, 1)])
@on_ranks(4)
def test_delayed_model_is_the_same_on_all_degrees(options, pp, tp):
    """Made without memory: every parameter arrives at one value that depends on seed and name only."""
    runtime.reset()
    smp.init({"pipeline_parallel_degree": pp, "tensor_parallel_degree": tp, "ddp": True})
    torch.manual_seed(5 + 100 * smp.rank())
    with smp.delay_param_initialization():
        module = Model(DistributedTransformerLMHead(**options))
    assert all(parameter.is_meta for parameter in module.body.parameters())
    model = smp.DistributedModel(module)
    batch = cases(options)[1].batch(2, torch.Generator().manual_seed(1))
    train(model, batch)
    state = model.state_dict()
    runtime.reset()
    smp.init({"ddp": True})
    torch.manual_seed(5)
    with smp.delay_param_initialization():
        whole = Model(DistributedTransformerLMHead(**options))
    materialize(whole, seed=5)
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name], value), name
    runtime.reset()
