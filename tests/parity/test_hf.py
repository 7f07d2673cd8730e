"""Unmodified models of `transformers` over stages."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.harness import on_ranks
from tests.parity.compare import Setup, assert_close, build, check, job_batch, rows_of
from tests.parity.test_tensor_parallel import split_everything, split_some
from tests.parity.zoo import Case

transformers = pytest.importorskip("transformers")

VOCABULARY = 37
LENGTH = 7
SIZES = {"vocab_size": VOCABULARY, "num_attention_heads": 2}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=4, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    sizes = {**SIZES, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def bert() -> nn.Module:
    sizes = {**SIZES, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "max_position_embeddings": 16}
    config = transformers.BertConfig(**sizes, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def batch(rows: int, generator: torch.Generator) -> dict[str, Any]:
    ids = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def spread(pattern: str, count: int) -> list[tuple[str, float]]:
    return [(pattern.format(k), k / count) for k in range(count)]


def loss_of(output: Any) -> Tensor:
    return output.loss


MODELS = {
    "gpt2": Case(
        gpt2, batch, [("transformer.wte", 0), *spread("transformer.h.{}", 4), ("transformer.ln_f", 0.9)], loss_of
    ),
    "llama": Case(llama, batch, [*spread("model.layers.{}", 4), ("model.norm", 0.9), ("lm_head", 0.9)], loss_of),
    "bert": Case(bert, batch, [*spread("bert.encoder.layer.{}", 4), ("cls", 0)], loss_of, "key.bias"),
    "t5": Case(
        t5,
        batch,
        [("encoder.block.0", 0), ("encoder.block.1", 0.3), ("decoder.block.0", 0.6), ("decoder.block.1", 0.9)],
        loss_of,
    ),
}


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_transformers_models_train_on_two_stages(name):
    """Nothing of the model is rewritten, so it has to train exactly as it does alone."""
    check(MODELS[name], Setup(pp=2, microbatches=3))
    check(MODELS[name], Setup(pp=2, microbatches=1, passes=2, auto=True))


@pytest.mark.parametrize("name", MODELS)
@on_ranks(4)
def test_transformers_models_train_on_four_stages(name):
    """Every layer, embedding and head on a stage of its own, and with two replicas."""
    check(MODELS[name], Setup(pp=4, microbatches=2))
    check(MODELS[name], Setup(pp=4, microbatches=5, auto=True))
    check(MODELS[name], Setup(pp=2, microbatches=2, auto=True))


@pytest.mark.parametrize("auto", [False, True], ids=["placed", "auto"])
@pytest.mark.parametrize("name", MODELS)
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
