"""Distributed transformer layers with stages, replicas, microbatches and checkpointing, against one plain process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp
from smp import runtime
from smp.tp.transformer import DistributedTransformer, DistributedTransformerLayer
from tests.harness import on_ranks
from tests.parity.compare import Setup, assert_close, check, sgd, smp_run
from tests.parity.zoo import VOCABULARY, Case, tokens
from tests.tp.transformer_twin import Twin

H, LENGTH = 16, 6
SIZES = {"num_attention_heads": 4, "attention_head_size": 4, "hidden_size": H, "intermediate_size": 24}
OPTIONS = {"pre_layernorm": True, "post_layernorm": False, "causal_mask_size": 8, "rotary_dim": 4}
NO_DROPOUT = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}


class Half(nn.Module):
    """Names of one half of a layer."""

    def __init__(self, **sizes: tuple[int, int]) -> None:
        super().__init__()
        self.pre_layernorm = nn.LayerNorm(H)
        for name, (inputs, outputs) in sizes.items():
            self.add_module(name, nn.Linear(inputs, outputs))


class PlainLayer(nn.Module):
    """A layer that knows nothing of other processes, with the names of the distributed one."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.attention = Half(qkv=(H, 3 * H), dense=(H, H))
        self.output = Half(dense1=(H, 24), dense2=(24, H))

    def forward(self, inputs: Any) -> Any:
        twin = Twin(dict(self.named_parameters()), **SIZES, **OPTIONS)
        return twin.layer(*inputs), inputs[1]


class PlainTransformer(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.seq_layers = nn.Sequential(*(PlainLayer(index) for index in range(num_layers)))

    def forward(self, inputs: Any) -> Any:
        return self.seq_layers(inputs)


ARGUMENTS = {**SIZES, **OPTIONS, **NO_DROPOUT}
smp.tp_register_with_module(PlainLayer, DistributedTransformerLayer, lambda index=0: ((), ARGUMENTS))
smp.tp_register_with_module(PlainTransformer, DistributedTransformer, lambda num_layers: ((num_layers,), ARGUMENTS))


class Language(nn.Module):
    """Embedding, transformer, head. Padding at the end of some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, H)
        self.transformer = PlainTransformer(3)
        self.norm, self.head = nn.LayerNorm(H), nn.Linear(H, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = (1.0 - attention_mask[:, None, None, :]) * -10000.0
        hidden = self.transformer((self.embedding(ids), mask))[0]
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


def batch(rows: int, generator: torch.Generator) -> dict[str, Any]:
    lengths = torch.randint(2, LENGTH + 1, (rows, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).to(torch.get_default_dtype())
    return {**tokens(rows, generator, LENGTH), "attention_mask": mask}


PLACES = [("embedding", 0.0), *((f"transformer.seq_layers.{k}", (k + 1) / 5) for k in range(3)), ("head", 0.9)]
CASE = Case(Language, batch, [*PLACES, ("norm", 0.9)])


def split_layers(module: nn.Module) -> None:
    """Each layer is replaced by itself and keeps its stage."""
    for child in module.modules():
        if isinstance(child, PlainLayer):
            smp.set_tensor_parallelism(child)


def split_transformer(module: nn.Module) -> None:
    """The whole sequence is replaced."""
    smp.set_tensor_parallelism(module.transformer)  # type: ignore[arg-type]


def split_everything(module: nn.Module) -> None:
    split_transformer(module)
    smp.set_tensor_parallelism(module)


def checkpointed(split: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    def prepare(module: nn.Module) -> None:
        split(module)
        for child in module.modules():
            if isinstance(child, PlainLayer):
                smp.set_activation_checkpointing(child)

    return prepare


MODES = [("speed", False), ("memory", True), ("speed", True), ("memory", False)]
HALVES = pytest.mark.parametrize("modes", [MODES[:2], pytest.param(MODES[2:], marks=pytest.mark.slow)], ids=["1", "2"])


def setups(modes: list[tuple[str, bool]] = MODES, **options: Any) -> list[Setup]:
    both: dict[str, Any] = {"dtype": torch.float64, **options}
    return [Setup(prescaled=shared, config={"optimize": mode}, **both) for mode, shared in modes]


@pytest.mark.parametrize("split", [split_layers, split_transformer, split_everything])
@on_ranks(2)
def test_two_parts_train_as_one_process(split):
    """Several microbatches and passes."""
    for each in setups(tp=2, microbatches=2, passes=2):
        check(CASE, each, sgd, split)


@on_ranks(4)
def test_four_parts_train_as_one_process():
    """A sequence that four ranks do not divide is kept whole."""
    for each in setups(MODES[:2], tp=4, microbatches=2):
        check(CASE, each, sgd, split_transformer)


@HALVES
@pytest.mark.parametrize("split", [split_layers, split_transformer])
@on_ranks(4)
def test_parts_and_replicas_train_as_one_process(split, modes):
    """Cut parameters are averaged over the replicas, whole ones over all ranks."""
    for each in setups(modes, tp=2, microbatches=2):
        check(CASE, each, sgd, split)


@HALVES
@on_ranks(4)
def test_layers_on_stages_chosen_by_hand_train_as_one_process(modes):
    """Each layer enters and leaves by itself."""
    for each in setups(modes, tp=2, pp=2, microbatches=2):
        check(CASE, each, sgd, split_layers)


@HALVES
@pytest.mark.parametrize("split", [split_layers, split_transformer, split_everything])
@on_ranks(4)
def test_layers_on_stages_chosen_by_cost_train_as_one_process(split, modes):
    """With a boundary inside of the sequence of layers: what passes there is laid out as inside."""
    for each in setups(modes, tp=2, pp=2, microbatches=2, auto=True):
        check(CASE, each, sgd, split)


@on_ranks(4)
def test_a_boundary_lies_inside_of_the_sequence_of_layers():
    """Or the test above shows nothing."""
    for each in setups(tp=2, pp=2, microbatches=2, auto=True, steps=1):
        runtime.reset()
        _, model = smp_run(CASE, each, sgd, split_transformer)
        layers = [name for name, _ in model.module.named_modules() if name.endswith("attention.dense")]
        here = [name for name in layers if model.owned(f"{name}.weight")]
        assert 0 < len(here) < len(layers) == 3
        runtime.reset()


@HALVES
@pytest.mark.parametrize("pp", [1, 2])
@on_ranks(lambda a: 2 * a["pp"])
def test_checkpointed_layers_train_as_one_process(pp, modes):
    """Collectives run again in the backward pass, on all ranks alike."""
    for each in setups(modes, tp=2, pp=pp, microbatches=2, auto=True):
        check(CASE, each, sgd, checkpointed(split_layers))


@HALVES
@on_ranks(4)
def test_weights_may_be_put_off(modes):
    """The schedule that puts gradients of weights off, and chunks of stages."""
    for each in setups(modes, tp=2, pp=2, microbatches=4, auto=True):
        each.config["pipeline"] = "zero_bubble"
        check(CASE, each, sgd, split_transformer)


@on_ranks(2, launcher="torchrun")
def test_two_parts_train_as_one_process_over_process_groups():
    """Without MPI."""
    for each in setups(tp=2, microbatches=2):
        check(CASE, each, sgd, split_transformer)


class Halves(nn.Module):
    """Distributed layers whose halves lie on different stages."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.transformer = DistributedTransformer(2, **{**ARGUMENTS, **options})

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.transformer((x, mask))[0].square().mean()


@HALVES
@pytest.mark.parametrize("options", [{}, {"parallel_attention": True}, {"hidden_dropout_prob": 0.5}])
@on_ranks(4, timeout=120)
def test_a_boundary_inside_of_a_layer_changes_nothing(options, modes):
    """What the layer does between its halves runs on every stage, and its messages go over the owner's ranks."""
    torch.set_default_dtype(torch.float64)
    try:
        for mode, shared in modes:
            losses = []
            for pp in (1, 2):
                runtime.reset()
                smp.init(Setup(tp=2, pp=pp, microbatches=2, prescaled=shared, config={"optimize": mode}).smp_config())
                torch.manual_seed(3)
                module = Halves(**options)
                for index in range(2):
                    smp.set_partition(module.transformer.seq_layers[index].output, pp - 1)
                losses.append(train(smp.DistributedModel(module)))
            # The second replica of the run without stages draws other masks.
            steps = 3 if "hidden_dropout_prob" not in options else 1 if smp.rank() < 2 else 0
            assert_close(losses[1][:steps], losses[0][:steps], 1e-9, f"losses, {mode}, prescaled {shared}")
    finally:
        torch.set_default_dtype(torch.float32)
        runtime.reset()


def train(model: Any) -> Tensor:
    """The losses of three steps on this tensor-parallel rank's batch."""
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    part = 0 if smp.state.cfg.prescaled_batch else smp.tp_rank()
    torch.manual_seed(4)

    @smp.step
    def step(x: Tensor, mask: Tensor) -> Tensor:
        loss = model(x, mask)
        model.backward(loss)
        return loss

    losses = []
    for number in range(3):
        generator = torch.Generator().manual_seed(10 * number + part)
        x = torch.randn(4, LENGTH, H, generator=generator)
        optimizer.zero_grad()
        losses.append(step(x, torch.zeros(4, 1, 1, LENGTH)).stack().detach())
        optimizer.step()
    return torch.stack(losses)
