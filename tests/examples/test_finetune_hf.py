"""Fine-tuning a model of transformers: the loss falls, and what is saved is what plain transformers loads (a9-5)."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import smp
from smp import runtime
from tests.examples.test_train_gpt import load_example
from tests.harness import ROOT, on_ranks

transformers = pytest.importorskip("transformers")

FROZEN = ["--steps", "1", "--lr", "0"]
SIZES = "--layers 2 --width 16 --heads 4 --vocabulary 101 --context 12 --batch 8".split()


def finetune(out: Path, tensor: int, pipeline: int, *more: str) -> tuple[Any, Any, list[float]]:
    """One run as a process of its own would do it: the example, the model and the losses."""
    sys.path.insert(0, str(ROOT / "examples"))  # as it is when the script is started
    try:
        example = load_example("finetune_hf")
    finally:
        sys.path.pop(0)
    args = example.parse([*SIZES, "--out", str(out), "--tensor", str(tensor), "--pipeline", str(pipeline), *more])
    runtime.reset()
    degrees = {"tensor_parallel_degree": tensor, "pipeline_parallel_degree": pipeline}
    smp.init({**degrees, "microbatches": args.microbatches, "ddp": True})
    return example, *example.train(args)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
@on_ranks(4, config=None, timeout=180)
def test_what_is_saved_loads_in_plain_transformers(model, tied, tmp_path):
    """No key is missing, unexpected or of another shape, all weights are those that were trained, the logits are those
    of the training model up to the order of sums; and it goes on from there on other degrees."""
    kind = ["--model", model, *(["--tied"] if tied else [])]
    example, trained, losses = finetune(tmp_path / "saved", 2, 2, "--steps", "8", *kind)
    assert losses[-1] < losses[0]
    weights = trained.state_dict()
    for to_transformers, _ in smp.state.module_manager.translate_functions:
        weights = to_transformers(weights)
    plain, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    for kind_of_keys in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind_of_keys]
    loaded = plain.state_dict()
    assert plain.config.vocab_size == 101
    assert set(weights) == set(loaded)
    for name, value in loaded.items():
        assert value.shape == weights[name].shape
        assert torch.equal(value, weights[name]), name
    assert (plain.lm_head.weight is plain.get_input_embeddings().weight) == tied
    ids = torch.randint(0, 101, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain.eval()(input_ids=ids).logits
    got = example.logits_of(trained, ids)
    assert float((got - expected).norm() / expected.norm()) < 1e-5

    smp.barrier()
    example, again, _ = finetune(tmp_path / "again", 4, 1, *FROZEN, "--start", str(tmp_path / "saved"))
    got = example.logits_of(again, ids)
    assert float((got - expected).norm() / expected.norm()) < 1e-5


@on_ranks(2, config=None, timeout=120)
def test_logits_over_stages_are_those_of_the_saved_model_bit_by_bit(tmp_path):
    """Without tensor parallelism every sum is made in the order of one process."""
    example, trained, _ = finetune(tmp_path, 1, 2, "--steps", "2")
    ids = torch.arange(24).view(2, 12)
    assert example.check(trained, tmp_path, ids) == 0
