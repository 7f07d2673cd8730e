"""Reading a checkpoint without a job, and refusing what is not whole."""

import json
import shutil

import pytest
import torch

from smp.checkpoint import reader
from smp.checkpoint.__main__ import main
from smp.checkpoint.reader import Checkpoint
from smp.errors import CheckpointError
from smp.tp.origin import Block
from tests.checkpoint.hand_made import WHOLE, factor, save, save_full


@pytest.fixture
def saved(tmp_path):
    save(tmp_path, "a", 2)
    return tmp_path / "a_partial"


def test_whole_tensors_are_put_together_from_parts(saved):
    """What the command line shows and exports must be what the job had."""
    checkpoint = Checkpoint.open(saved)
    assert factor(checkpoint.read("model", "w")) == 2
    assert factor(checkpoint.read("optimizer", "w", "exp_avg")) == -2
    assert checkpoint.read("optimizer", "w", "step") == torch.tensor(2.0)
    assert checkpoint.read("optimizer", "w", "count") == 2
    assert checkpoint.sources("model") == ("w",)
    assert checkpoint.keys() == ("exp_avg", "step", "count")
    assert checkpoint.manifest.groups[0].names == ("w",)
    checkpoint.verify()
    with pytest.raises(CheckpointError, match="holds no values of v"):
        checkpoint.read("model", "v")


def test_a_full_checkpoint_is_read_alike(tmp_path):
    """One reader for both kinds."""
    save_full(tmp_path, "f", 3)
    checkpoint = Checkpoint.open(tmp_path / "f")
    checkpoint.verify()
    assert factor(checkpoint.read("model", "w")) == 3


def test_only_what_is_wanted_is_read(saved):
    """A rank that reads the whole model to get its part needs the memory of the whole model."""
    checkpoint = Checkpoint.open(saved)
    before, wanted = reader.traffic.copied, torch.zeros(4, 2)
    checkpoint.fill(wanted, [Block("w", (3, 1), (2, 2), (1, 0))], [("model", "")], "w")
    assert reader.traffic.copied - before == 2 * 2 * 4
    assert torch.equal(wanted[1:3], 2 * WHOLE[3:5, 1:3])
    assert not wanted[0].any() and not wanted[3].any()
    with pytest.raises(CheckpointError, match="does not hold all of the values of w"):
        checkpoint.fill(torch.zeros(9, 4), [Block("w", (0, 0), (9, 4), (0, 0))], [("model", "")], "w")


def damage(path, how):
    whole = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "bit":
        whole[whole.index(b"_smp_")] ^= 4  # in what is unpickled
        path.write_bytes(whole)
    elif how == "missing":
        path.unlink()
    elif how == "longer":
        path.write_bytes(whole + b"\0")
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "noise":
        path.write_bytes(bytes(len(whole)))
    elif how == "edited":  # a manifest's: another dtype
        path.write_bytes(whole.replace(b"float", b"bfloat", 1))
    elif how == "directory":
        path.unlink()
        path.mkdir()
    elif how == "dangling":
        path.unlink()
        path.symlink_to("nowhere")


HOW = ["cut", "missing", "longer", "empty", "noise", "directory", "dangling"]


@pytest.mark.parametrize("how", [*HOW, "bit"])
@pytest.mark.parametrize("name", ["model_0_1.pt", "optimizer_0_0.pt"])
def test_a_damaged_file_is_named(saved, how, name):
    """The user restores one file, not a whole checkpoint; and nothing damaged is trained on."""
    damage(saved / name, how)
    with pytest.raises(CheckpointError, match=f"a_partial/{name} (is|has|cannot)"):
        Checkpoint.open(saved).verify()


@pytest.mark.parametrize("how", [*HOW, "edited"])
@pytest.mark.parametrize("full", [False, True])
def test_a_damaged_manifest_is_named_by_all_who_read_it(tmp_path, capsys, how, full):
    """With another dtype or place in it, right bytes become wrong weights."""
    (save_full if full else save)(tmp_path, "a", 2)
    path = tmp_path / ("a" if full else "a_partial")
    manifest = reader.manifest_path(path)
    damage(manifest, how)
    with pytest.raises(CheckpointError, match=f"{manifest} (cannot be read|does not exist)"):
        Checkpoint.open(path)
    for command in ("verify", "inspect", "consolidate"):
        out = [str(tmp_path / "out.pt")] if command == "consolidate" else []
        assert main([command, str(path), *out]) == 2
        assert f"{manifest} " in capsys.readouterr().err
    if not (full and how == "missing"):  # then it may be any file
        assert main(["verify", str(tmp_path)]) == 1
        assert f"{manifest} " in capsys.readouterr().out


def test_a_flipped_byte_anywhere_is_noticed_or_makes_no_difference(saved):
    """In the directory of an archive there are places and lengths, by which other code goes before it compares."""
    path = saved / "model_0_0.pt"
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x81]) + whole[at + 1 :])
        said = ""
        try:
            checkpoint = Checkpoint.open(saved)
            checkpoint.verify()
        except CheckpointError as error:
            said = str(error)
        assert "model_0_0.pt" in said if said else factor(checkpoint.read("model", "w")) == 2


def test_every_flipped_byte_of_a_tensor_is_noticed(saved):
    """Checksums that cover only part of the data give a false feeling of safety."""
    path = saved / "model_0_0.pt"
    whole = path.read_bytes()
    begin = whole.index((2 * WHOLE[:4]).numpy().tobytes())
    for at in range(begin, begin + 64, 9):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=r"model_0_0.pt is damaged: record data/0"):
            Checkpoint.open(saved).verify()


def test_a_file_of_another_checkpoint_is_noticed(tmp_path, saved):
    """Files that were copied together by hand load without a word otherwise."""
    save(tmp_path, "b", 5)
    shutil.copy(tmp_path / "b_partial" / "model_0_1.pt", saved)
    with pytest.raises(CheckpointError, match=r"model_0_1.pt is damaged: record data/0 is another than the manifest"):
        Checkpoint.open(saved).verify()


def test_manifests_that_cannot_be_used_are_named(saved):
    """Newer, torn, foreign or missing: the file is named before anything is loaded."""
    manifest = saved / "manifest.json"
    raw = json.loads(manifest.read_text())
    for text, says in [
        (json.dumps(raw | {"format": 99}), "manifest.json cannot be read: its format is 99 .a newer version"),
        (manifest.read_text()[:200], "manifest.json cannot be read"),
        ("[]", "manifest.json cannot be read: it is no manifest"),
        ("\udcff", "manifest.json cannot be read"),
    ]:
        manifest.write_text(text, errors="surrogateescape")
        with pytest.raises(CheckpointError, match=says):
            Checkpoint.open(saved)
    manifest.unlink()
    with pytest.raises(CheckpointError, match="is no complete checkpoint"):
        Checkpoint.open(saved)
    with pytest.raises(CheckpointError, match="no_partial does not exist"):
        Checkpoint.open(saved.parent / "no_partial")


def test_checksums_are_computed_of_each_byte_once(saved):
    """Verifying is what resuming costs on top: twice would be twice as much."""
    checkpoint = Checkpoint.open(saved)
    before = reader.traffic.verified
    assert checkpoint.damage() == []
    assert reader.traffic.verified - before == sum(size for _, _, size in checkpoint.records())
