"""Files of whole tensors that other programs wrote, read into a job."""

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp import runtime
from smp.checkpoint import streamed
from smp.checkpoint.whole import read_safetensors
from smp.errors import CheckpointError
from tests.harness import on_ranks
from tests.stateful import shared_directory


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    with path.open("wb") as out:
        promises = {n: streamed.Promise(tuple(t.shape), t.dtype, lambda t=t: t) for n, t in tensors.items()}
        streamed.write_safetensors(out, promises)


def test_safetensors_are_mapped_and_read_to_the_last_bit(tmp_path):
    """Scalars, empty ones, and values that lie askew in the file."""
    tensors = {
        "half": torch.randn(3, dtype=torch.bfloat16),
        "askew": torch.randn(2, 5),
        "flag": torch.tensor([True]),
        "double": torch.randn(2, dtype=torch.float64),
        "one": torch.tensor(7),
        "none": torch.empty(0, 4),
    }
    write_safetensors(tmp_path / "x.safetensors", tensors)
    read = read_safetensors(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert read[name].dtype == value.dtype and torch.equal(read[name], value)


@pytest.mark.parametrize(
    "content",
    [b"", b"x" * 7, struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 4) + b"null", struct.pack("<Q", 2) + b"[]"],
)
def test_what_is_no_safetensors_is_named(tmp_path, content):
    """Whatever is in it."""
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="x.safetensors cannot be read as safetensors"):
        read_safetensors(tmp_path / "x.safetensors")


def test_safetensors_that_are_cut_short_are_named(tmp_path):
    """They would be read as whatever lies behind them."""
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": torch.ones(3), "b": torch.ones(3)})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut short"):
        read_safetensors(path)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def model_of(module: nn.Module) -> Any:
    runtime.reset()
    smp.init({})
    return smp.DistributedModel(module)


def negated(state: dict[str, Any]) -> dict[str, Any]:
    return {name: -value if value.is_floating_point() else value for name, value in state.items()}


@on_ranks(1, config={})
def test_any_file_of_torch_or_safetensors_is_loaded():
    """Saved by torch of today or of long ago, or beside the name that was asked for."""
    wanted = negated(net().state_dict())
    with shared_directory() as path:
        torch.save(wanted, path / "new.pt")
        torch.save(wanted, path / "old.pt", _use_new_zipfile_serialization=False)
        write_safetensors(path / "model.safetensors", wanted)
        for tag in ("new.pt", "old.pt", "model.safetensors", "pytorch_model.bin"):
            model = model_of(net())
            assert smp.resume_from_checkpoint(path, tag, partial=False) is None
            state = model.state_dict()
            assert all(torch.equal(state[name], value) for name, value in wanted.items()), tag


@on_ranks(1, config={})
def test_names_go_through_the_scripts_function_and_hooks():
    """Old names are the script's to translate; a module that repairs its own does so."""
    wanted = negated(net().state_dict())
    old = {f"model.{name}": value for name, value in wanted.items()}

    def rename(state: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): value for name, value in state.items()}

    def repair(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in list(state):
            state[name.removeprefix("model.")] = state.pop(name)

    with shared_directory() as path:
        torch.save(old, path / "old")
        model = model_of(net())
        with pytest.raises(CheckpointError, match="unexpected: model.0.bias"):
            smp.resume_from_checkpoint(path, "old", partial=False)
        smp.resume_from_checkpoint(path, "old", partial=False, translate_function=rename)
        assert torch.equal(model.state_dict()["0.weight"], wanted["0.weight"])
        module = net()
        module.register_load_state_dict_pre_hook(repair)
        model = model_of(module)
        smp.resume_from_checkpoint(path, "old", partial=False)
        assert torch.equal(model.state_dict()["0.weight"], wanted["0.weight"])


@on_ranks(1, config={})
def test_what_does_not_fit_is_named_before_anything_is_changed():
    """Other shapes and names, parts of one rank, damage, and what is no state dict."""
    good = negated(net().state_dict())
    bad: dict[str, tuple[Any, str]] = {
        "shape": ({**good, "0.bias": torch.ones(4)}, r"0.bias has shape \[4\], the model has \[3\]"),
        "missing": ({name: value for name, value in good.items() if name != "0.bias"}, "missing: 0.bias"),
        "more": ({**good, "2.bias": torch.ones(1)}, "unexpected: 2.bias"),
        "part": ({**good, "_smp_is_partial": True}, "is the part of one rank"),
        "list": ([torch.ones(1)], "holds no state dict"),
    }
    with shared_directory() as path:
        model = model_of(net())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for tag, (obj, says) in bad.items():
            torch.save(obj, path / tag)
            with pytest.raises(CheckpointError, match=says):
                smp.resume_from_checkpoint(path, tag, partial=False)
        torch.save(good, path / "damaged")
        content = (path / "damaged").read_bytes()
        place = content.index(good["0.weight"].numpy().tobytes())
        (path / "damaged").write_bytes(content[:place] + b"?" + content[place + 1 :])
        (path / "cut").write_bytes(content[:-30])
        for tag in ("damaged", "cut"):
            with pytest.raises(CheckpointError, match=f"{tag} "):
                smp.resume_from_checkpoint(path, tag, partial=False)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        smp.resume_from_checkpoint(path, "more", partial=False, strict=False)
        assert torch.equal(model.state_dict()["0.bias"], good["0.bias"])
