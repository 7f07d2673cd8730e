"""One tensor file: written aside, flushed, renamed; damage is seen; nothing runs code from it."""

import argparse
import collections
import os
import pathlib
import pickle

import numpy as np
import pytest
import torch

from smp.checkpoint.files import FileWriter, read_file, read_header
from smp.checkpoint.layout import Degrees, Header, Place
from smp.checkpoint.safe_load import load_file
from smp.errors import CheckpointError

HEADER = Header(Degrees(2, 1, 1), Place(0, 0, 0), False, "one save")


def written(path, obj, header=HEADER):
    writer = FileWriter(path, 0)
    writer.write(obj, header)
    writer.commit()
    return path


def test_a_file_with_header_is_an_ordinary_torch_file(tmp_path):
    """Users open partial files by hand: the header must not be in their way, mmap included."""
    path = written(tmp_path / "f", {"w": torch.arange(1000.0), "_smp_is_partial": True})
    for loaded in (torch.load(path), torch.load(path, mmap=True), read_file(path)):
        assert torch.equal(loaded["w"], torch.arange(1000.0))
        assert loaded["_smp_is_partial"] is True
    assert read_header(path) == HEADER


def test_a_file_of_another_program_has_no_header(tmp_path):
    """Partial files written by other programs are still read."""
    torch.save([1], tmp_path / "new")
    torch.save([1], tmp_path / "old", _use_new_zipfile_serialization=False)
    assert read_header(tmp_path / "new") is None
    assert read_header(tmp_path / "old") is None
    assert read_file(tmp_path / "old") == [1]


def test_until_commit_the_old_file_stays(tmp_path):
    """A crash while saving must leave the previous checkpoint loadable, and no name that a pattern `f*` would find."""
    path = written(tmp_path / "f", "old")
    writer = FileWriter(path, 0)
    writer.write("new")
    assert read_file(path) == "old"
    assert [p.name for p in tmp_path.glob("f*")] == ["f"]
    writer.commit()
    assert read_file(path) == "new"
    assert os.listdir(tmp_path) == ["f"]


def test_a_failed_write_leaves_nothing(tmp_path):
    """An object that cannot be pickled must not leave a torn file behind."""
    path = written(tmp_path / "f", "old")
    with pytest.raises(Exception, match="pickle|lambda"):
        FileWriter(path, 0).write(lambda: None)
    assert os.listdir(tmp_path) == ["f"]
    with pytest.raises(CheckpointError, match="missing/f"):
        FileWriter(tmp_path / "missing" / "f", 0).write("x")


def test_truncated_and_altered_files_are_named(tmp_path):
    """torch itself does not notice a flipped bit: training would go on from wrong weights."""
    tensor = torch.randn(100)
    whole = written(tmp_path / "f", {"w": tensor}).read_bytes()
    at = whole.find(tensor.numpy().tobytes()[:16])
    altered = bytearray(whole)
    altered[at + 5] ^= 0xFF
    for name, content in {"cut": whole[: len(whole) // 2], "flipped": bytes(altered), "text": b"hello world"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            read_file(tmp_path / name)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        read_file(tmp_path / "nowhere")


class _Runs:
    def __reduce__(self):
        return os.system, ("true",)


def test_code_in_a_file_is_not_run(tmp_path):
    """Nothing unpickles code from a tensor file; the message says how to load a trusted one."""
    path = written(tmp_path / "f", {"x": _Runs()})
    with pytest.raises(CheckpointError, match="f holds an object of a class that is not allowed.*weights_only=False"):
        read_file(path)
    assert read_file(path, weights_only=False)["x"] == 0


@pytest.mark.parametrize(
    "value",
    [
        argparse.Namespace(lr=0.1, path=pathlib.PurePosixPath("a")),
        {"counts": collections.Counter("aab"), "kinds": frozenset("ab"), "part": slice(1, 2)},
        np.float64(3.0),
        {"state": np.random.RandomState(0).get_state()[2], "flags": {1, 2}},
    ],
    ids=["namespace", "containers", "scalar", "random"],
)
def test_plain_values_of_training_scripts_are_allowed(tmp_path, value):
    """What a script keeps beside its weights must come back without weights_only=False."""
    assert read_file(written(tmp_path / "f", value)) == value


def test_numpy_arrays_are_allowed(tmp_path):
    """Random states of numpy are arrays."""
    keys = np.random.RandomState(0).get_state()[1]
    assert np.array_equal(read_file(written(tmp_path / "f", keys)), keys)


def test_a_custom_pickle_module_needs_weights_only_false(tmp_path):
    """torch refuses the pair; the message must say which argument to change."""
    path = written(tmp_path / "f", [1])
    with pytest.raises(CheckpointError, match="weights_only=False"):
        load_file(path, pickle_module=pickle)
    assert load_file(path, weights_only=False, pickle_module=pickle) == [1]
