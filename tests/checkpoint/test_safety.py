"""What may stand in `user_content`: plain values and a short list of classes; nothing else is read, nothing is run."""

import argparse
import datetime
import io
import pathlib

import numpy
import pytest
import torch

from smp.checkpoint.safe_load import configurations, load_file, serialize
from smp.errors import CheckpointError

transformers = pytest.importorskip("transformers")


class Scheduler:
    """A class of the script's own."""

    def __init__(self):
        self.step = 3


def round_trip(obj):
    return load_file(io.BytesIO(serialize(obj, "user_content")))


def test_what_scripts_keep_is_allowed():
    """Arguments, paths, random states, schedulers' states and configurations are what scripts want to find again."""
    model = torch.nn.Linear(2, 2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(torch.optim.AdamW(model.parameters()), 0.1, 10)
    content = {
        "arguments": argparse.Namespace(path=pathlib.Path("/data"), lr=0.1, since=datetime.date(2024, 1, 2)),
        "scheduler": {key: value for key, value in scheduler.state_dict().items() if not callable(value)},
        "numpy": numpy.random.get_state(),
        "scalar": numpy.float32(1.5),
        "words": numpy.array(["a", "b"]),
        "tensor": torch.arange(3),
    }
    back = round_trip(content)
    assert back["arguments"] == content["arguments"]
    assert back["scheduler"] == content["scheduler"]
    assert (back["numpy"][1] == content["numpy"][1]).all()
    assert back["scalar"] == 1.5
    assert list(back["words"]) == ["a", "b"]
    assert torch.equal(back["tensor"], content["tensor"])


def test_configurations_of_transformers_are_allowed():
    """The one object that every Hugging Face script carries along."""
    config = transformers.GPT2Config(n_embd=24)
    back = round_trip({"config": config, "generation": transformers.GenerationConfig(max_length=9)})
    assert back["config"].to_dict() == config.to_dict()
    assert back["generation"].max_length == 9


def test_another_class_is_named_when_it_is_saved_with_the_two_ways_forward():
    """Found out at the first resume, weeks later, the content would be lost."""
    with pytest.raises(CheckpointError, match="user_content holds .*Scheduler") as caught:
        serialize({"scheduler": Scheduler()}, "user_content")
    assert "Save plain values instead" in str(caught.value)
    assert "torch.serialization.add_safe_globals" in str(caught.value)
    with torch.serialization.safe_globals([Scheduler]):
        assert round_trip({"scheduler": Scheduler()})["scheduler"].step == 3
    with pytest.raises(CheckpointError, match="cannot be saved"):
        serialize(lambda: 0, "user_content")


class Runs:
    """What an attacker's file would hold."""

    def __reduce__(self):
        return (eval, ("1 + 1",))


def test_nothing_else_can_be_reached_through_the_list(tmp_path):
    """What is allowed is a class of configurations, not whatever stands in their modules; and nothing is run."""
    of_gpt2 = "transformers.models.gpt2.configuration_gpt2"
    names = [f"{of_gpt2}.GPT2Config", f"{of_gpt2}.logging", f"{of_gpt2}.no_such", "os.system", "transformers.GPT2Model"]
    assert configurations(names) == [transformers.GPT2Config]
    path = tmp_path / "content.pt"
    torch.save(Runs(), path)
    with pytest.raises(CheckpointError, match=r"content.pt holds an object of a class that is not allowed.*eval"):
        load_file(str(path))
