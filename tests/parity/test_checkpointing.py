"""With activation checkpointing a run computes what it computes without."""

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp
from smp import runtime
from smp.patches.checkpoint import checkpoint, checkpoint_sequential
from tests.harness import on_ranks
from tests.parity.compare import Setup, assert_close, check
from tests.parity.test_hf import MODELS
from tests.parity.test_random_programs import case_of
from tests.parity.zoo import VOCABULARY, WIDTH, ZOO, Block

TOLERANCE = 1e-9  # float64


def stages(arguments: dict[str, Any]) -> int:
    return int(arguments["pp"])


def mark_places(case: str) -> Callable[[nn.Module], None]:
    """Marks every module of the case that is placed by hand, as far as it is called itself."""

    def prepare(module: nn.Module) -> None:
        for path, _ in ZOO[case].places:
            part = module.get_submodule(path)
            for called in part if isinstance(part, nn.ModuleList) else [part]:
                smp.set_activation_checkpointing(called)

    return prepare


CASES = {
    1: ["chain", "skip", "twice", "tied", "encoder_decoder", "dicts", "keywords", "recurrent", "norms", "bare"],
    2: [
        "chain",
        "twice",
        "encoder_decoder",
        "dicts",
        "flag",
        "recurrent",
        "experts",
        "norms",
        "listed",
        "value_branch",
    ],
    3: ["chain", "skip", "tied"],
}


@pytest.mark.parametrize("pp", [1, 2, 3])
@on_ranks(stages)
def test_models_of_every_shape(pp: int) -> None:
    """A failure means that a kind of call (nested, by keyword, twice, in place, with buffers) does not come through a
    second run."""
    for case in CASES[pp]:
        setup = Setup(pp=pp, microbatches=2, dtype=torch.float64, rows=3)
        check(ZOO[case], replace(setup, passes=2) if case == "chain" else setup, prepare=mark_places(case))


@on_ranks(4)
def test_with_replicas_and_tensor_parallel_parts() -> None:
    """Collectives inside a module run a second time in the backward; every rank has to come to them."""

    def split(module: nn.Module) -> None:
        smp.set_tensor_parallelism(module)
        mark_places("chain")(module)

    setup = Setup(pp=2, microbatches=2, dtype=torch.float64)
    for strategy in ("each", "contiguous"):  # gradients are reduced when no node can reach them any more
        check(
            ZOO["chain"],
            setup,
            prepare=lambda module, strategy=strategy: smp.set_activation_checkpointing(module.body, strategy=strategy),  # type: ignore[misc]
        )
    check(ZOO["chain"], replace(setup, tp=2), prepare=split)
    check(ZOO["chain"], replace(setup, pp=1, tp=2), prepare=split)


# Random numbers: the reference is the same script without checkpointing


class Noisy(nn.Module):
    """Dropout and batch norm in a sequence, in a module of its own, and a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(
            *[nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), Block(), nn.Sequential(Block(), nn.Dropout(0.4))],
            *[nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Dropout(0.2), Block()],
        )
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
        self.by_call = ""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = F.dropout(self.embedding(ids), 0.1, self.training)
        if self.by_call:
            hidden = checkpoint_sequential(self.body, hidden, strategy=self.by_call)
            hidden = checkpoint(self.inner, checkpoint(self.inner, hidden))
        else:
            hidden = self.inner(self.inner(self.body(hidden)))
        return F.cross_entropy(F.linear(hidden, self.embedding.weight).flatten(0, 1), ids.flatten())


PLACES = {"embedding": 0, "body.0": 0, "body.2": 0.3, "body.3": 0.3, "body.4": 0.6, "body.7": 0.9, "inner": 0.6}


def members(module: Noisy) -> None:
    for part in (*module.body, module.inner, module.inner[0]):  # one inside another
        smp.set_activation_checkpointing(part)


def by_call(strategy: str) -> Callable[[Noisy], None]:
    return lambda module: setattr(module, "by_call", strategy)


def by_strategy(strategy: str) -> Callable[[Noisy], None]:
    return lambda module: smp.set_activation_checkpointing(module.body, strategy=strategy)


WAYS: dict[str, Callable[[Noisy], None]] = {
    "nothing": lambda module: None,
    "members": members,
    **{f"strategy {name}": by_strategy(name) for name in ("each", "contiguous", "group_3")},
    **{f"call {name}": by_call(name) for name in ("each", "contiguous", "group_2")},
}


def trained(pp: int, way: str, auto: bool = False, **config: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Two steps, one under autocast: losses, and all tensors that this rank has then, with gradients."""
    runtime.reset()
    placement = {} if auto else {"auto_partition": False, "default_partition": 0}
    smp.init({"pipeline_parallel_degree": pp, "microbatches": 2, **placement, **config})
    torch.manual_seed(3)
    module = Noisy().double()
    for name, part in [] if auto else PLACES.items():
        smp.set_partition(module.get_submodule(name), int(part * pp))
    WAYS[way](module)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(7)

    @smp.step
    def train(ids: Tensor) -> Tensor:
        loss = model(ids)
        model.backward(loss)
        return loss

    losses = []
    for n in range(2):
        ids = torch.randint(0, VOCABULARY, (6, 5), generator=torch.Generator().manual_seed(n))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if n else nullcontext():
            losses.append(train(ids).stack().detach())
        optimizer.step()
    tensors = {name: t.detach().clone() for name, t in owned_tensors(model)}
    runtime.reset()
    return losses, tensors


def owned_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.local_named_parameters():
        yield name, parameter
        yield f"gradient of {name}", parameter.grad
    yield from model.local_named_buffers()


@pytest.mark.parametrize("pp", [1, 2, 3])
@on_ranks(stages)
def test_masks_statistics_and_autocast(pp: int) -> None:
    """The second run draws the masks of the first, under the same autocast, and batches are counted once (a2-5): two
    microbatches in each of two steps."""
    losses, tensors = trained(pp, "nothing")
    for way in list(WAYS)[1:]:
        got_losses, got = trained(pp, way, offload_activations=way in ("members", "call group_2"))
        for n, (a, b) in enumerate(zip(got_losses, losses, strict=True)):
            assert_close(a, b, TOLERANCE, f"{way}: losses of step {n}")
        assert got.keys() == tensors.keys()
        for name, tensor in got.items():
            assert_close(tensor, tensors[name], TOLERANCE, f"{way}: {name}")
        if "body.4.num_batches_tracked" in got:
            assert int(got["body.4.num_batches_tracked"]) == 4


@on_ranks(2)
def test_random_programs_with_random_marks() -> None:
    """Combinations that nobody thought of."""
    for seed in range(300, 306):
        draw = random.Random(seed)

        def mark(module: nn.Module, draw: random.Random = draw) -> None:
            for part in module.modules():
                if part is not module and not isinstance(part, nn.ModuleList) and draw.random() < 0.7:
                    smp.set_activation_checkpointing(part)

        setup = Setup(pp=2, microbatches=2, rows=3, auto=seed % 3 == 0, config={"offload_activations": seed % 2 == 0})
        check(case_of(seed), setup, prepare=mark)


@on_ranks(2)
def test_several_chunks_per_stage() -> None:
    """A sequence goes from stage to stage and back; its groups follow the partition."""
    losses, tensors = trained(2, "nothing", auto=True, virtual_stages=2)
    for way in ("members", "strategy contiguous", "call group_2"):
        got_losses, got = trained(2, way, auto=True, virtual_stages=2, offload_activations=True)
        for a, b in zip(got_losses, losses, strict=True):
            assert_close(a, b, TOLERANCE, f"{way}: losses")
        for name in tensors.keys() & got.keys():  # the partition counts what is checkpointed, too
            assert_close(got[name], tensors[name], TOLERANCE, f"{way}: {name}")


@on_ranks(2)
def test_a_cache_that_is_left_on() -> None:
    """Models of transformers hand a key/value cache from block to block, also in training; a second run must not add to
    it. Their own switch works too."""
    transformers = pytest.importorskip("transformers")

    def mark(module: nn.Module) -> None:
        for part in module.transformer.h:  # type: ignore[union-attr]
            smp.set_activation_checkpointing(part)

    assert transformers.GPT2Config().use_cache
    setup = Setup(pp=2, microbatches=2)
    check(MODELS["gpt2"], setup, prepare=mark)
    check(MODELS["gpt2"], replace(setup, auto=True, steps=1), prepare=mark)
    check(MODELS["gpt2"], replace(setup, steps=1), prepare=lambda m: m.gradient_checkpointing_enable())  # type: ignore[operator]
    check(MODELS["gpt2"], replace(setup, pp=1, steps=1), prepare=mark)
