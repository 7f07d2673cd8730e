"""Saving step by step: cut short anywhere, what was there before or what is new is found whole."""

import os

import pytest

from smp.checkpoint import writer
from smp.checkpoint.__main__ import main
from smp.checkpoint.finder import find, newest_in
from smp.checkpoint.reader import Checkpoint
from smp.errors import CheckpointError
from tests.checkpoint.hand_made import factor, save, save_full


class Killed(BaseException):
    """Stands for a process that is gone: nothing of ours handles it."""


def killed_at(monkeypatch, number, work):
    """Runs `work`, cut short before step `number`, or the one of that name; whether it had such a step."""
    seen = []

    def step(name):
        seen.append(name)
        if number in (len(seen), name):
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(writer, "on_step", step)
        try:
            work()
        except Killed:
            return True
    return False


def found_value(path, partial):
    """What a resume without a tag would load, every byte of it verified."""
    found = find(path, None, partial)
    checkpoint = Checkpoint.open(found.path)
    checkpoint.verify()
    value = factor(checkpoint.read("model", "w"))
    if partial:
        assert factor(-checkpoint.read("optimizer", "w", "exp_avg")) == value
    else:
        assert checkpoint.load(f"optimizer_{found.tag}")["value"] == value
    checkpoint.close()
    return value


def hidden(path):
    return [name for name in os.listdir(path) if name.startswith(".")]


@pytest.mark.parametrize("tag", ["20", "10"])
@pytest.mark.parametrize("partial", [True, False])
def test_a_save_cut_short_anywhere_leaves_a_whole_checkpoint(tmp_path, monkeypatch, tag, partial):
    """A job that dies while it saves must find the checkpoint before, or the new one, never a mixture; also when both
    have one tag. The next save leaves nothing of the dead one behind."""
    store = save if partial else save_full
    values, cut = [], True
    while cut:
        path = tmp_path / str(len(values))
        store(path, "10", 1)
        cut = killed_at(monkeypatch, len(values) + 1, lambda path=path: store(path, tag, 2))
        values.append(found_value(path, partial))
        store(path, "30", 3)
        assert found_value(path, partial) == 3
        assert hidden(path) == []
    assert len(values) > 8
    assert values[0] == 1
    assert values[-1] == 2
    assert values == sorted(values)  # once the new one counts it stays


def test_old_checkpoints_are_removed_and_the_only_one_never(tmp_path):
    """Retention that removes what is resumed from, or what it does not know, is worse than a full disk."""
    foreign = tmp_path / "0_partial"
    foreign.mkdir()
    (foreign / "model_0_0.pt").write_bytes(b"made by hand")
    for number in range(1, 5):
        save(tmp_path, f"{number}", number, num_kept=2)
        kept = [f"{n}_partial" for n in range(max(1, number - 1), number + 1)]
        assert sorted(os.listdir(tmp_path)) == ["0_partial", *kept, "newest"]
    reading = Checkpoint.open(tmp_path / "3_partial")
    save(tmp_path, "5", 5, num_kept=1)
    assert sorted(os.listdir(tmp_path)) == ["0_partial", "3_partial", "5_partial", "newest"]
    assert factor(reading.read("model", "w")) == 3
    reading.close()
    save(tmp_path, "5", 6, num_kept=1)  # the only complete one, replaced by itself
    assert sorted(os.listdir(tmp_path)) == ["0_partial", "5_partial", "newest"]
    assert found_value(tmp_path, partial=True) == 6


@pytest.mark.parametrize("step", ["remove 1_partial", "retention"])
def test_retention_cut_short_leaves_no_half_checkpoint(tmp_path, monkeypatch, step):
    """One of which half is removed must not be taken for a checkpoint."""
    save(tmp_path, "1", 1)
    assert killed_at(monkeypatch, step, lambda: save(tmp_path, "2", 2, num_kept=1))
    assert found_value(tmp_path, partial=True) == 2
    save(tmp_path, "3", 3, num_kept=1)
    assert sorted(os.listdir(tmp_path)) == ["3_partial", "newest"]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="only Linux can be told")
def test_what_is_about_to_be_replaced_leaves_the_cache_and_stays_on_the_disk(tmp_path, monkeypatch):
    """Otherwise the machine's memory holds two checkpoints while one is written."""
    (tmp_path / "new").mkdir()
    (tmp_path / "old.pt").write_bytes(b"old")
    left = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *rest: left.append((os.pread(file, 3, 0), *rest)))
    replaced = [tmp_path / "old.pt", tmp_path / "there is none"]
    writer.write_files(tmp_path / "new", {"a.pt": {}}, {"a.pt": None}, replaced)
    assert left == [(b"old", 0, 0, os.POSIX_FADV_DONTNEED)]
    assert (tmp_path / "old.pt").read_bytes() == b"old"


@pytest.mark.parametrize("before", [True, False])
def test_a_disk_that_refuses_is_named_and_leaves_the_old_one(tmp_path, monkeypatch, before):
    """A full disk must cost the save, not the checkpoint before it."""
    save(tmp_path, "10", 1)
    original = os.replace

    def refuse(source, target):
        if os.path.basename(source) == (".10_partial.writing" if before else ".manifest.json"):
            raise OSError(28, "No space left on device")
        original(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(CheckpointError, match="10_partial cannot be written.*No space left"):
        save(tmp_path, "10", 2)
    monkeypatch.undo()
    writer.discard(tmp_path / "10_partial")
    assert found_value(tmp_path, partial=True) == 1
    save(tmp_path, "10", 3)
    assert found_value(tmp_path, partial=True) == 3
    assert hidden(tmp_path) == []


def edit(manifest):
    """Another dtype: the text stays JSON, and every tensor's bytes right."""
    text = manifest.read_text()
    assert "float32" in text
    manifest.write_text(text.replace("float32", "float16", 1))


@pytest.mark.parametrize("step", ["move the old one aside", "rename", "newest"])
def test_a_save_cut_short_whose_manifest_is_damaged_gives_way_to_what_was_there(tmp_path, monkeypatch, step):
    """Its files cannot be read without it; what they were to replace is whole."""
    save(tmp_path, "10", 1)
    assert killed_at(monkeypatch, step, lambda: save(tmp_path, "10", 2))
    if step == "newest":  # it has its name
        edit(tmp_path / "10_partial" / "manifest.json")
        with pytest.raises(CheckpointError, match=r"10_partial/manifest.json cannot be read: it is damaged, or was ed"):
            found_value(tmp_path, partial=True)
        return
    edit(tmp_path / ".10_partial.writing" / "manifest.json")
    assert found_value(tmp_path, partial=True) == 1
    save(tmp_path, "20", 3)
    assert hidden(tmp_path) == []
    assert found_value(tmp_path, partial=True) == 3
    (tmp_path / "newest").write_text("10")
    assert found_value(tmp_path, partial=True) == 1


def test_a_damaged_journal_of_a_full_checkpoint_is_named(tmp_path, monkeypatch, capsys):
    """It says which files are new and which are not yet: without it nobody can tell, so nothing may be removed."""
    save_full(tmp_path, "10", 1)
    assert killed_at(monkeypatch, "rename optimizer_10", lambda: save_full(tmp_path, "10", 2))
    edit(tmp_path / ".10.commit")
    before = sorted(os.listdir(tmp_path))
    for call in (lambda: found_value(tmp_path, partial=False), lambda: save_full(tmp_path, "20", 3)):
        with pytest.raises(CheckpointError, match=r"\.10\.commit cannot be read: it is damaged"):
            call()
    assert sorted(os.listdir(tmp_path)) == before
    assert main(["verify", str(tmp_path)]) == 1
    assert ".10.commit cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("name", ["newest", ""])
def test_what_is_in_the_way_is_named_before_anything_is_written(tmp_path, partial, name):
    """Found out at the end it would leave a checkpoint of which the script was told that it was not saved."""
    store = save if partial else save_full
    path = tmp_path / (name or ("10_partial" if partial else "10"))
    if name or not partial:
        path.mkdir()
        (path / "mine").touch()
    else:
        path.touch()
    with pytest.raises(CheckpointError, match=f"{path} is in the way"):
        store(tmp_path, "10", 1)
    assert list(tmp_path.iterdir()) == [path]
    assert path.is_file() or os.listdir(path) == ["mine"]


def test_a_link_in_the_place_of_the_old_one_is_replaced_and_what_it_points_to_stays(tmp_path):
    """Users move checkpoints to other disks and leave links."""
    save(tmp_path, "10", 1)
    (tmp_path / "10_partial").rename(tmp_path / "moved")
    (tmp_path / "10_partial").symlink_to("moved")
    assert found_value(tmp_path, partial=True) == 1
    save(tmp_path, "10", 2)
    assert found_value(tmp_path, partial=True) == 2
    assert sorted(os.listdir(tmp_path)) == ["10_partial", "moved", "newest"]
    assert (tmp_path / "moved" / "manifest.json").is_file()


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    """The error says where, so that the user can look."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/.10_partial.writing cannot be made"):
        save(tmp_path / "file", "10", 1)


def test_without_a_tag_the_newest_is_found_and_what_was_skipped_is_said(tmp_path):
    """Guessing wrong silently loses days of training."""
    with pytest.raises(CheckpointError, match="no complete partial checkpoint, and no other one"):
        find(tmp_path, None, partial=True)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        find(tmp_path / "nowhere", None, partial=True)
    save(tmp_path, "10", 1)
    save(tmp_path, "9", 2)
    assert find(tmp_path, None, partial=True).path == newest_in(tmp_path) == tmp_path / "9_partial"
    (tmp_path / ".20_partial.writing").mkdir()
    assert find(tmp_path, None, partial=True).notes == ["a save of the checkpoint '20' was cut short; it is skipped"]
    (tmp_path / "newest").write_text("11")
    assert "`newest` names '11', which is not there; resuming from '9'" in find(tmp_path, None, partial=True).notes[-1]
    (tmp_path / "newest").unlink()
    assert find(tmp_path, None, partial=True).tag == "9"
    with pytest.raises(
        CheckpointError, match="no complete partial checkpoint with the tag '8'; partial ones: '10', '9'"
    ):
        find(tmp_path, "8", partial=True)
    with pytest.raises(CheckpointError, match="no complete full checkpoint; partial ones"):
        find(tmp_path, None, partial=False)


def test_a_checkpoint_that_lost_its_manifest_is_not_taken_for_an_old_one(tmp_path):
    """It would resume without its fp32 masters, its random numbers and any checksum, and nobody would notice."""
    directory = tmp_path / "a_partial"
    directory.mkdir()
    (directory / "model_0_0.pt").touch()
    assert find(tmp_path, "a", True).path == directory  # made by an old script
    (directory / "random_0_0_0.pt").touch()
    with pytest.raises(CheckpointError, match="no complete partial checkpoint.*a_partial is without a manifest"):
        find(tmp_path, "a", True)
    (tmp_path / "b_partial").touch()
    with pytest.raises(CheckpointError, match="no complete partial checkpoint.*b_partial is something else"):
        find(tmp_path, "b", True)
