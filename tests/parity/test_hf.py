"""Unmodified models of `transformers` over stages."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.harness import on_ranks
from tests.parity.compare import Setup, assert_close, build, check, job_batch, rows_of
from tests.parity.models import MODELS, TEXT_MODELS, gpt2, loss_of, qwen2, text
from tests.parity.test_tensor_parallel import split_everything, split_some
from tests.parity.zoo import Case

transformers = pytest.importorskip("transformers")

IN_THREE = ("gpt2", "t5", "resnet")  # a chain, an encoder and decoder, and statistics; all models lie on 2 and 4 stages


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_models_train_on_two_stages(name):
    """Nothing of the model is rewritten, so it has to train exactly as it does alone."""
    check(MODELS[name], Setup(pp=2, microbatches=3, dtype=torch.float64))
    check(MODELS[name], Setup(pp=2, microbatches=1, passes=2, auto=True))


@pytest.mark.parametrize(
    "name", [name if name in IN_THREE else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
@on_ranks(3)
def test_models_train_on_three_stages(name):
    """A number of stages that divides neither layers nor modules."""
    check(MODELS[name], Setup(pp=3, microbatches=2, steps=1))
    check(MODELS[name], Setup(pp=3, microbatches=2, steps=1, auto=True, dtype=torch.float64))


@pytest.mark.parametrize("name", MODELS)
@on_ranks(4)
def test_models_train_on_four_stages(name):
    """Every layer, embedding and head on a stage of its own, and with two replicas."""
    check(MODELS[name], Setup(pp=4, microbatches=2, dtype=torch.float64))
    check(MODELS[name], Setup(pp=4, microbatches=3, steps=1, auto=True))
    if name != "resnet":  # each replica has the statistics of its own batches
        check(MODELS[name], Setup(pp=2, microbatches=2, auto=True, dtype=torch.float64))


SCHEDULES = [{"pipeline": "zero_bubble"}, {"virtual_stages": 2}, {"pipeline": "auto"}, {"pipeline": "simple"}]


@pytest.mark.slow
@pytest.mark.parametrize("config", SCHEDULES, ids=lambda config: "-".join(map(str, config.values())))
@pytest.mark.parametrize("name", MODELS)
@on_ranks(3)
def test_models_train_under_every_schedule(name, config):
    """The order of work is planned in the first step and followed from the second on; it may change no number."""
    check(MODELS[name], Setup(pp=3, microbatches=4, steps=3, auto=True, dtype=torch.float64, config=config))


def seen_from(ids: Tensor) -> Tensor:
    """[rows, 1, LENGTH, LENGTH] bool: what each place may look at; the first two of row 0 are padding."""
    visible = torch.ones(len(ids), 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    visible[0, :, :, :2] = False
    return visible | torch.eye(ids.shape[1], dtype=torch.bool)


def additive(ids: Tensor) -> Tensor:
    return torch.zeros(len(ids), 1, ids.shape[1], ids.shape[1]).masked_fill(~seen_from(ids), -1e9)


MASKS = {
    "int64": lambda batch: batch["attention_mask"],
    "bool": lambda batch: batch["attention_mask"].bool(),
    "additive": lambda batch: additive(batch["input_ids"]),
    "none": lambda batch: None,
    "dict": lambda batch: {"full_attention": additive(batch["input_ids"])},
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("build", [gpt2, qwen2])
@on_ranks(2)
def test_models_take_masks_of_every_kind_under_any_name(build, kind):
    """a9-1. Nothing may depend on what a class is called, nor on the type that a mask has at a stage's border."""
    if kind == "dict" and build is gpt2:
        return

    def renamed() -> nn.Module:
        module = build()
        for part in module.modules():
            part.__class__ = type("Anything", (type(part),), {})
        return module

    def batch(rows: int, generator: torch.Generator) -> dict[str, Any]:
        made = text(rows, generator)
        return {**made, "attention_mask": MASKS[kind](made)}

    places = MODELS["gpt2" if build is gpt2 else "llama"].places
    for built in (build, renamed):
        check(Case(built, batch, places, loss_of), Setup(pp=2, microbatches=3, steps=1))


@on_ranks(3)
def test_experts_of_one_layer_may_lie_on_several_stages():
    """Routing in glue code has shapes that depend on data; slow, but it must not go wrong."""
    if not hasattr(MODELS["mixtral"].build().model.layers[1], "block_sparse_moe"):
        return  # transformers 5 has one module for all experts of a layer
    torn = [("model.layers.1.block_sparse_moe.experts.0", 0), ("model.layers.1.block_sparse_moe.experts.1", 0.4)]
    torn += [("model.layers.1.block_sparse_moe.experts.2", 0.9), ("model.layers.2", 0.5), ("lm_head", 0.9)]
    check(replace(MODELS["mixtral"], places=torn), Setup(pp=3, microbatches=2, dtype=torch.float64))


def seen_inside(output: Any) -> Tensor:
    """A loss of everything that a model tells of its layers."""
    inner = [*output.hidden_states, *output.attentions]
    return torch.stack([(tensor.double() ** 2).mean() for tensor in inner]).sum()


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "t5", "vit"])
@pytest.mark.parametrize("auto", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["placed", "auto"])
@on_ranks(4)
def test_hidden_states_and_attentions_of_every_layer_can_be_had(name, auto):
    """Newer models gather them on the side: what layers of other stages tell must be there, with gradients."""
    case = MODELS[name]

    def telling() -> nn.Module:
        module = case.build()
        for config in {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}.values():
            config._attn_implementation = "eager"  # the others do not tell attentions
            config.output_hidden_states = config.output_attentions = True
        return module

    def loss_of(output: Any) -> Tensor:
        if name == "t5":
            inner = [*output.decoder_hidden_states, *output.cross_attentions, *output.encoder_attentions]
            return torch.stack([(tensor**2).mean() for tensor in inner]).sum()
        return seen_inside(output)

    check(replace(case, build=telling, loss_of=loss_of), Setup(pp=4, microbatches=4, steps=3, auto=auto))


@pytest.mark.parametrize("auto", [False, True], ids=["placed", "auto"])
@pytest.mark.parametrize("name", TEXT_MODELS)
@on_ranks(3, config=None)
def test_steps_as_trainers_write_them(name, auto):
    """A dict of tensors in, `loss /= n` in place, a `ModelOutput` of an evaluation step out, scores put together."""
    case = MODELS[name]
    smp.init(Setup(pp=3, microbatches=2, auto=auto).smp_config())
    module, plain = build(case, torch.float32), build(case, torch.float32)
    for path, stage in [] if auto else case.stages(3).items():
        smp.set_partition(module.get_submodule(path), stage)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    @smp.step()
    def train(model: Any, inputs: Any, accumulation: int) -> Tensor:
        loss = model(**inputs)["loss"]
        loss /= accumulation
        model.backward(loss)
        return loss

    @smp.step()
    def evaluate(model: Any, inputs: Any) -> Any:
        return model(**inputs)

    for number in range(2):
        inputs = transformers.BatchEncoding(job_batch(case, 4, number, torch.float32))
        model.train()
        loss = train(model, inputs, 2).reduce_mean().detach()
        optimizer.step()
        optimizer.zero_grad()
        want = torch.zeros(())
        for part in (rows_of(dict(inputs), 0, 2), rows_of(dict(inputs), 2, 4)):
            plain_loss = plain(**part).loss / 2
            (plain_loss / 2).backward()
            want += plain_loss.detach() / 2
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        assert_close(loss, want, 1e-5, "loss")

        model.eval()
        with torch.no_grad():
            output = evaluate(model, inputs)
            scores = plain(**inputs).logits
        assert isinstance(output, transformers.utils.ModelOutput)
        assert_close(output.logits.concat(), scores, 1e-5, "scores")
        assert output["loss"].stack().shape == (2,)


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
@on_ranks(4)
def test_linears_of_transformers_models_are_split_within_stages(name):
    """Each distributed module computes what its twin does, so any model may be split module by module."""
    check(MODELS[name], Setup(pp=2, tp=2, microbatches=2, steps=1), prepare=split_everything)
    check(MODELS[name], Setup(pp=2, tp=2, microbatches=2, steps=1, auto=True, prescaled=True), prepare=split_some)
