"""What libraries of others find through the wrapper, and what they are told about devices and batches."""

import dataclasses
import functools
import inspect
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

import smp
from smp import cpu_trainer
from smp.cpu_trainer import Dealing
from tests.harness import on_ranks
from tests.parity.models import gpt2, llama, t5

transformers = pytest.importorskip("transformers")


@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_the_wrapper_looks_like_the_model_it_wraps():
    """A Trainer reads the forward's signature to decide which columns to keep, and asks what class the model is of."""
    plain, net = gpt2(), gpt2()
    model = smp.DistributedModel(net)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert model.config is net.config
    assert model.generation_config is net.generation_config
    assert isinstance(model, transformers.PreTrainedModel) and isinstance(model, transformers.GPT2LMHeadModel)
    assert isinstance(model, smp.DistributedModel) and isinstance(model, nn.Module)
    assert not isinstance(model, transformers.BertPreTrainedModel)
    assert model.can_generate() and model.main_input_name == "input_ids"
    assert repr(model).startswith("DistributedModel(")


@on_ranks(1, config={})
def test_the_wrapper_of_one_of_torchs_classes_is_only_itself():
    """A Sequential can be indexed, the wrapper cannot."""
    model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2)))
    assert not isinstance(model, nn.Sequential) and isinstance(model, smp.DistributedModel)


@pytest.mark.parametrize("build", [gpt2, llama, t5])
@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_text_is_generated_over_stages(build):
    """Each stage keeps the cache of its own layers; the same tokens as on one process, and training goes on."""
    torch.manual_seed(0)
    net = build()
    torch.manual_seed(0)
    plain = build()
    for module in (net, plain):
        module.eval()
        module.generation_config.pad_token_id = 0
    model = smp.DistributedModel(net)
    model.eval()
    ids = torch.randint(1, 37, (2, 4), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}

    @smp.step(microbatches=1)
    def generate(ids: Any) -> Any:
        return model.generate(ids, **options)

    @smp.step(microbatches=2)
    def train(ids: Any) -> Any:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    with torch.no_grad():
        assert torch.equal(generate(ids).outputs[0], plain.generate(ids, **options))
    model.train()
    assert torch.isfinite(train(ids).reduce_mean())


def trainer_module(finished: bool) -> Any:
    """A stand-in for `transformers.training_args`, whole or as it is while it is being imported."""
    module: Any = types.ModuleType("transformers.training_args")
    module.dataclass = dataclasses.dataclass
    module.is_sagemaker_mp_enabled = lambda: module.enabled
    module.enabled = True

    def define() -> None:
        class TrainingArguments:
            @functools.cached_property
            def _setup_devices(self) -> str:
                return "cuda"

        TrainingArguments.accelerator_config = types.SimpleNamespace(dispatch_batches=None)  # type: ignore[attr-defined]
        module.TrainingArguments = module.dataclass(TrainingArguments)

    if finished:
        define()
    return module, define


@pytest.mark.parametrize("finished", [True, False], ids=["after the import", "during the import"])
def test_arguments_of_the_trainer_ask_for_the_device_of_the_runtime(monkeypatch, finished):
    """`transformers` calls `smp.init()` before its class exists; a script may also call it earlier or later."""
    accelerate = pytest.importorskip("accelerate")
    module, define = trainer_module(finished)
    monkeypatch.setitem(sys.modules, "transformers.training_args", module)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    dealing: list[Dealing | None] = [Dealing(torch.device("cpu"), 1, 2, 3, False)]
    for _ in range(2):  # a second call does nothing
        cpu_trainer.prepare(lambda: dealing[0])
    if not finished:
        define()
    assert module.dataclass is dataclasses.dataclass
    arguments = module.TrainingArguments()
    assert arguments._setup_devices == torch.device("cpu")
    assert arguments.distributed_state is None and arguments.accelerator_config.dispatch_batches is False
    state = accelerate.PartialState()
    assert (state.num_processes, state.process_index, state.local_process_index) == (2, 1, 3)
    assert state.distributed_type == accelerate.DistributedType.NO
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    dealing[0] = None  # no runtime, or one on other devices
    assert module.TrainingArguments()._setup_devices == "cuda"
    dealing[0] = Dealing(torch.device("cpu"), 0, 1, 0, True)
    module.enabled = False  # the script uses smp, but not through the trainer
    assert module.TrainingArguments()._setup_devices == "cuda"
