"""The `Trainer` of `transformers`, one script that knows nothing of this package, on two ranks and on one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import launch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow

SCRIPT = """
import inspect, json, os, sys

SMP = SETTINGS
if SMP:
    os.environ["SM_HP_MP_PARAMETERS"] = json.dumps(SMP)
    os.environ["SM_FRAMEWORK_PARAMS"] = json.dumps({"sagemaker_mpi_enabled": True})

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=97, n_positions=32, n_embd=32, n_layer=4, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
plain, net = GPT2LMHeadModel(config), GPT2LMHeadModel(config)


class Lines(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        ids = torch.randint(0, 97, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids, "line": index}


arguments = TrainingArguments(
    OUTPUT, max_steps=5, per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH, logging_steps=1,
    gradient_accumulation_steps=ACCUMULATION, eval_strategy="steps", eval_steps=5, save_strategy="steps", save_steps=3,
    save_safetensors=False, report_to=[], use_cpu=USE_CPU, disable_tqdm=True, learning_rate=1e-2, optim="sgd",
)
trainer = Trainer(net, arguments, train_dataset=Lines(36), eval_dataset=Lines(16))
# A plain Trainer divides by all labels, of which a causal loss counts one less per line; its step function for this
# runtime takes the mean.
trainer.model_accepts_loss_kwargs = False
trainer.train()
columns = sorted(trainer._signature_columns)
same = inspect.signature(trainer.model_wrapped.forward) == inspect.signature(plain.forward)
if trainer.is_world_process_zero():
    print("RESULT" + json.dumps({"history": trainer.state.log_history, "columns": columns, "signature": same}))
"""


def train(output: Path, ranks: int, settings: dict[str, Any], batch: int, accumulation: int, use_cpu: bool) -> Any:
    """What the script's first rank found out."""
    given = {
        "SETTINGS": settings,
        "OUTPUT": str(output),
        "BATCH": batch,
        "ACCUMULATION": accumulation,
        "USE_CPU": use_cpu,
    }
    script = SCRIPT
    for name, value in given.items():
        script = script.replace(name, repr(value))
    done = launch(script, ranks, timeout=240)
    assert done.returncode == 0, done.stdout
    (found,) = [line.partition("RESULT")[2] for line in done.stdout.splitlines() if "RESULT" in line]
    return json.loads(found)


def figures(result: Any, key: str) -> list[float]:
    return [entry[key] for entry in result["history"] if key in entry]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    output = tmp_path_factory.mktemp("one")
    return output, {a: train(output / str(a), 1, {}, 4, a, True) for a in (1, 2)}


@pytest.mark.parametrize(
    ("settings", "batch", "accumulation", "use_cpu"),
    [
        ({"partitions": 2, "microbatches": 2, "ddp": True}, 4, 1, True),
        ({"partitions": 2, "microbatches": 2, "ddp": True}, 4, 2, False),
        ({"partitions": 1, "microbatches": 2, "ddp": True}, 2, 1, False),
        ({"partitions": 1, "microbatches": 1, "ddp": True}, 2, 2, False),
    ],
    ids=["two stages", "two stages, accumulated", "two replicas", "two replicas, accumulated"],
)
def test_the_trainer_trains_as_on_one_process(
    one_process: tuple[Path, dict[int, Any]],
    tmp_path: Path,
    settings: dict[str, Any],
    batch: int,
    accumulation: int,
    use_cpu: bool,
) -> None:
    """Five steps of an unchanged script: the same losses, gradient norms, columns, evaluation and weights."""
    directory, references = one_process
    want = references[accumulation]
    got = train(tmp_path, 2, settings, batch, accumulation, use_cpu)
    assert got["columns"] == want["columns"] and got["signature"]
    assert len(figures(want, "loss")) == 5 and len(figures(want, "eval_loss")) == 1
    for key in ("loss", "grad_norm", "eval_loss", "epoch"):
        expected = figures(want, key)
        if accumulation == 2 and key in ("loss", "grad_norm"):
            # Nine batches: the last window has one, which the Trainer's step function for this runtime still halves.
            expected[-1] /= 2
        if accumulation == 1 or key != "eval_loss":
            assert figures(got, key) == pytest.approx(expected, rel=1e-4 if key == "loss" else 1e-5), key

    saved = torch.load(tmp_path / "checkpoint-3" / "pytorch_model.bin", weights_only=True)
    reference = torch.load(directory / str(accumulation) / "checkpoint-3" / "pytorch_model.bin", weights_only=True)
    assert saved.keys() == reference.keys()
    for name, tensor in reference.items():
        assert torch.allclose(saved[name], tensor, rtol=1e-5, atol=1e-6), name
    parts = sorted(path.name for path in (tmp_path / "checkpoint-3").glob("optimizer.pt_*"))
    assert parts == [f"optimizer.pt_{stage}_0" for stage in range(settings["partitions"])]
