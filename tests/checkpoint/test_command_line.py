"""`python -m smp.checkpoint`, called as a user would, on checkpoints as jobs of several degrees write them."""

import errno
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from smp.checkpoint import consolidate as consolidation
from smp.checkpoint.__main__ import main
from smp.checkpoint.reader import Checkpoint
from smp.checkpoint.streamed import Promise, write_torch
from tests.checkpoint.tiny_model import TIED, save, user_state
from tests.harness import ROOT
from tests.test_state_dict import LiveBytes


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit status, and what was printed to both."""
    status = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def flip_a_byte(file: Path, record: str) -> None:
    """In the middle of a record's bytes; the file keeps its size."""
    with zipfile.ZipFile(file) as archive:
        name = next(name for name in archive.namelist() if name.endswith(record))
        begin = file.read_bytes().index(archive.read(name))
        middle = begin + archive.getinfo(name).file_size // 2
    with file.open("r+b") as opened:
        opened.seek(middle)
        (old,) = opened.read(1)
        opened.seek(middle)
        opened.write(bytes([old ^ 1]))


# inspect


def test_a_directory_is_listed_with_what_is_usable_and_newest(tmp_path, capsys):
    """Otherwise one would resume from what a killed save has left."""
    save(tmp_path, "200", written=2.0)
    save(tmp_path, "100", tp=4, pp=1, half=True, written=1.0, newest=False)
    (tmp_path / ".300_partial.writing").mkdir()
    (tmp_path / "400_partial").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    status, text = run(capsys, "inspect", tmp_path)
    assert status == 0 and "2 complete checkpoints; newest names 200_partial" in text
    rows = {line.strip("* ").split()[0]: line for line in text.splitlines()[2:]}
    assert list(rows) == ["100_partial", "200_partial", "400_partial", ".300_partial.writing"]
    assert "pp 1 tp 4 rdp 1" in rows["100_partial"] and "bfloat16" in rows["100_partial"]
    assert [name for name, line in rows.items() if line.startswith("*")] == ["200_partial"]
    assert "not usable" in rows["400_partial"] and "not usable" in rows[".300_partial.writing"]


def test_one_checkpoint_is_described(tmp_path, capsys):
    """Degrees, precision, optimizer, what lies on which stage, and with --tensors every tensor of the user's module."""
    path = save(tmp_path, half=True)
    status, text = run(capsys, "inspect", path)
    assert status == 0
    for wanted in (
        "partial checkpoint '300'",
        "pipeline degree 2, tensor degree 2",
        "bfloat16 with fp32 masters",
        "exp_avg       5 tensors, 92 values of float32",
        "stage 1       layers.1, norm",
        "lr 0.1",
        "table.weight = head.weight",
        "model_1_0.pt",
    ):
        assert wanted in text, wanted
    assert "layers.0.turned" not in text
    status, text = run(capsys, "inspect", path, "--tensors")
    (line,) = [line for line in text.splitlines() if "layers.0.turned" in line]
    assert line.split() == [
        "layers.0.turned",
        "4x8",
        "bfloat16",
        "model_0_0.pt",
        "model_0_1.pt",
        "master",
        "step",
        "exp_avg",
    ]


# verify


def test_one_flipped_bit_is_found_wherever_it_is(tmp_path, capsys):
    """torch.load would load it."""
    path = save(tmp_path, half=True)
    assert run(capsys, "verify", path)[0] == 0
    for file in ("model_1_0.pt", "fp16_states_0_1.pt", "optimizer_1_1.pt", "user_content.pt"):
        record = "data.pkl" if file == "user_content.pt" else "data/0"
        good = (path / file).read_bytes()
        flip_a_byte(path / file, record)
        status, text = run(capsys, "verify", tmp_path)
        assert status == 1 and file in text and record in text
        (path / file).write_bytes(good)
    assert run(capsys, "verify", tmp_path)[0] == 0


def test_missing_and_cut_files_are_named(tmp_path, capsys):
    """Other checkpoints of the directory are still looked at."""
    path = save(tmp_path)
    save(tmp_path, "400")
    content = (path / "model_0_1.pt").read_bytes()
    (path / "model_0_1.pt").write_bytes(content[:-5])
    status, text = run(capsys, "verify", tmp_path)
    assert status == 1 and "model_0_1.pt is cut short" in text and "400_partial: every record of 9 files" in text
    (path / "model_0_1.pt").unlink()
    status, text = run(capsys, "verify", tmp_path)
    assert status == 1 and "model_0_1.pt is missing" in text


# consolidate


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (4, 1)])
def test_one_file_holds_the_users_state_dict(tmp_path, capsys, tp, pp):
    """Whatever the degrees: names, shapes, bits, ties. Plain torch reads it, mapped into memory too, and the archive's
    checksums are right."""
    save(tmp_path, tp=tp, pp=pp, extra={"layers.0._extra_state": {"scale": [1, 2]}})
    out = tmp_path / "new" / "model.pt"
    status, text = run(capsys, "consolidate", tmp_path, out)
    assert status == 0 and "6 tensors" in text
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
    for mapped in (False, True):
        loaded = torch.load(out, weights_only=True, mmap=mapped)
        assert loaded.pop("layers.0._extra_state") == {"scale": [1, 2]}
        assert loaded.keys() == user_state().keys()
        for name, value in user_state().items():
            assert loaded[name].dtype == value.dtype and torch.equal(loaded[name], value), name
        assert loaded[TIED[0]] is loaded[TIED[1]]
    assert os.listdir(out.parent) == ["model.pt"]


def test_masters_are_preferred_and_other_precisions_on_demand(tmp_path, capsys):
    """The half precision weights of a mixed precision run have lost bits; integers are not cast."""
    save(tmp_path, half=True)
    loaded: dict[str, Any] = {}
    for dtype in (None, "float16", "stored"):
        arguments = [] if dtype is None else ["--dtype", dtype]
        assert run(capsys, "consolidate", tmp_path, tmp_path / f"{dtype}.pt", *arguments)[0] == 0
        loaded[str(dtype)] = torch.load(tmp_path / f"{dtype}.pt")
    for name, value in user_state().items():
        floating = value.is_floating_point()
        assert torch.equal(loaded["None"][name], value)
        assert torch.equal(loaded["float16"][name], value.half() if floating else value)
        assert torch.equal(loaded["stored"][name], value.bfloat16() if floating else value)
        assert loaded["stored"][name].dtype == (torch.bfloat16 if floating else torch.int64)


@pytest.mark.parametrize("out", ["model.safetensors", "export", "v1.0/"])
def test_safetensors_are_as_their_library_reads_them(tmp_path, capsys, out):
    """A tied tensor stands under its first name, as Hugging Face has it."""
    safetensors = pytest.importorskip("safetensors.torch")
    save(tmp_path)
    assert run(capsys, "consolidate", tmp_path, f"{tmp_path}/{out}")[0] == 0
    file = tmp_path / out if out.endswith(".safetensors") else tmp_path / out / "model.safetensors"
    loaded = safetensors.load_file(file)
    assert loaded.keys() == user_state().keys() - {TIED[1]}
    assert all(torch.equal(value, user_state()[name]) for name, value in loaded.items())
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_large_models_are_written_in_several_files_with_an_index(tmp_path, capsys):
    """Every tensor once; none in a file larger than asked for, but one that is larger by itself."""
    safetensors = pytest.importorskip("safetensors.torch")
    save(tmp_path)
    out = tmp_path / "export"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"old")
    status, text = run(capsys, "consolidate", tmp_path, out, "--shard-size", "130")
    assert status == 2 and "exists already" in text
    assert run(capsys, "consolidate", tmp_path, out, "--shard-size", "130", "--overwrite")[0] == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (6 * 4 + 32 + 16 + 16 + 4) + 8
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"model-0000{k}-of-00004.safetensors" for k in (1, 2, 3, 4)]
    assert sorted(os.listdir(out)) == sorted([*names, "model.safetensors.index.json"])
    for name in names:
        loaded = safetensors.load_file(out / name)
        assert loaded.keys() == {key for key, file in index["weight_map"].items() if file == name}
        assert all(torch.equal(value, user_state()[key]) for key, value in loaded.items())


@pytest.mark.parametrize("out", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_one_tensor_is_in_memory_at_a_time(tmp_path, out, dtype):
    """Models are larger than the machine on which one looks at them."""
    state = {name: torch.randn(64, 64) for name in ("layers.1.k.weight", "layers.1.v.weight")}
    state |= {"table.weight": torch.randn(96, 64), "layers.0.turned": torch.randn(64, 64)}
    path = save(tmp_path, state=user_state() | state)
    checkpoint = Checkpoint.open(path)
    for name in checkpoint.manifest.files:
        checkpoint.load(name)  # mapped: no memory, but the counter would take it for some
    with LiveBytes() as live:
        consolidation.consolidate(checkpoint, tmp_path / out, dtype=dtype)
    largest = 96 * 64 * (4 if dtype is None else 2)
    assert largest <= live.peak <= largest + 64


def test_a_full_disk_leaves_nothing_half_written(tmp_path, capsys):
    """What was at OUT stays."""
    save(tmp_path)
    out = tmp_path / "model.pt"
    out.write_bytes(b"old")
    with patch.object(Promise, "write", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        status, text = run(capsys, "consolidate", tmp_path, out, "--overwrite")
    assert status == 2 and "model.pt cannot be written: No space left on device" in text
    assert out.read_bytes() == b"old"
    assert not list(tmp_path.glob(".model*"))


def test_damaged_weights_are_not_exported(tmp_path, capsys):
    """Unless one insists; damage elsewhere does not matter."""
    path = save(tmp_path)
    flip_a_byte(path / "optimizer_0_0.pt", "data/0")
    assert run(capsys, "consolidate", path, tmp_path / "1.pt")[0] == 0
    flip_a_byte(path / "model_1_0.pt", "data/0")
    status, text = run(capsys, "consolidate", path, tmp_path / "2.pt")
    assert status == 2 and "model_1_0.pt is damaged" in text and not (tmp_path / "2.pt").exists()
    assert run(capsys, "consolidate", path, tmp_path / "2.pt", "--no-verify")[0] == 0


def test_large_records_keep_their_alignment(tmp_path):
    """Sizes beyond 2 GiB take another form in an archive."""
    values = torch.arange(40.0)
    with patch.object(zipfile, "ZIP64_LIMIT", 100), open(tmp_path / "x.pt", "wb") as out:
        write_torch(out, {"x": Promise((40,), torch.float32, lambda: values), "y": [torch.ones(2)]})
    loaded = torch.load(tmp_path / "x.pt", mmap=True, weights_only=True)
    assert torch.equal(loaded["x"], values) and torch.equal(loaded["y"][0], torch.ones(2))
    assert loaded["x"].data_ptr() % 64 == 0
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None


# diff


def test_equal_checkpoints_are_equal_whatever_their_degrees(tmp_path, capsys):
    """Weights, masters and optimizer state, each counted once."""
    a, b = save(tmp_path / "a", half=True), save(tmp_path / "b", tp=1, pp=1, half=True)
    status, text = run(capsys, "diff", a, b)
    assert status == 0
    assert "model: 6 equal, 0 different" in text and "master: 5 equal, 0 different" in text
    assert "optimizer exp_avg: 5 equal, 0 different" in text and "optimizer step: 5 equal" in text


def test_differences_are_named_with_their_size(tmp_path, capsys):
    """One value of one tensor; NaN at the same place is none."""

    def change(kind: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if (kind, name) == ("model", "layers.1.key_value.weight"):
            tensor[5, 2] += 0.25  # row 1 of the user's v
        if (kind, name) == ("exp_avg", "norm.bias"):
            tensor[:] = torch.nan
        return tensor

    state = user_state()
    state["norm.bias"] = torch.tensor([1.0, torch.nan, torch.inf, 2.0])
    a, b = save(tmp_path / "a", state=state), save(tmp_path / "b", state=state, tp=4, pp=1, change=change)
    status, text = run(capsys, "diff", a, b)
    assert status == 1
    assert "layers.1.v.weight: 1 of 16 values differ, by at most 0.25" in text
    assert "norm.bias: 3 of 4 values differ, by at most inf" in text
    assert "model: 5 equal, 1 different" in text and "optimizer exp_avg: 4 equal, 1 different" in text
    assert run(capsys, "diff", a, b, "--only", "model", "--tolerance", "0.3")[0] == 0
    assert run(capsys, "diff", a, b, "--only", "model", "--tolerance", "0.2")[0] == 1


def test_what_only_one_of_them_has_is_named(tmp_path, capsys):
    """Masters of one, another shape in the other; newest of a directory."""
    save(tmp_path / "a", half=True)
    other = user_state() | {"layers.0.turned": torch.zeros(4, 4)}
    save(tmp_path / "b", state=other)
    status, text = run(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert "norm.bias: only in A" in text and "layers.0.turned: shape [4, 8] in A, [4, 4] in B" in text


# As a user meets it


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["inspect", "nowhere"], "nowhere does not exist"),
        (["verify", "empty"], "empty holds no checkpoint"),
        (["consolidate", "empty", "x.pt"], "empty holds no file `newest`"),
        (["consolidate", "run", "x.zip"], "x.zip: its ending does not say what to write"),
        (["diff", "run", "run/100_partial"], "does not exist"),
        (["inspect", "newer_partial"], "a newer version of smp wrote it"),
    ],
)
def test_errors_say_what_is_wrong_without_a_traceback(tmp_path, capsys, monkeypatch, arguments, says):
    """Exit status 2."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "newer_partial").mkdir()
    (tmp_path / "newer_partial" / "manifest.json").write_text('{"format": 99}')
    status, text = run(capsys, *arguments)
    assert status == 2 and says in text and text.count("\n") == 1


@pytest.mark.parametrize("size", ["", "0", "5 apples", "3XB"])
def test_sizes_that_are_none_are_refused(capsys, size):
    """Before anything is read."""
    with pytest.raises(SystemExit) as stopped:
        main(["consolidate", "run", "out", "--shard-size", size])
    assert stopped.value.code == 2 and "5GB" in capsys.readouterr().err


def test_the_command_runs_by_its_name(tmp_path):
    """In a process of its own, without a job."""
    path = save(tmp_path)

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "smp.checkpoint", *arguments]
        return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60)

    done = call("verify", str(path))
    assert done.returncode == 0 and "300_partial: every record of 9 files is as it was written" in done.stdout
    assert done.stderr == ""
    done = call("inspect", str(tmp_path / "other"))
    assert (done.returncode, done.stdout) == (2, "") and done.stderr == f"inspect: {tmp_path}/other does not exist\n"
