"""The manifest is read back as it was written; what is no manifest of this version is refused."""

import json

import pytest

from smp.checkpoint.layout import Degrees, Place
from smp.checkpoint.manifest import FORMAT, Manifest, StoredFile, StoredGroup, StoredTensor, is_whole, sealed
from smp.tp.origin import Block

BLOCKS = (Block("h.0.q.weight", (0, 4), (8, 4), (0, 0), True), Block("h.0.k.weight", (0, 0), (8, 4), (4, 0)))
MANIFEST = Manifest(
    full=False,
    tag="step 300",
    save_id="ab12",
    written=1700000000.25,
    degrees=Degrees(2, 2, 1),
    sharded=True,
    half="bfloat16",
    partition={"": 0, "h.0": 1},
    shapes={"h.0.q.weight": (8, 8), "scale": ()},
    groups=(StoredGroup(("h.0.q.weight",), {"lr": "0.1"}), StoredGroup((), {})),
    tied=(("wte.weight", "lm_head.weight"),),
    files={
        "model_1_0.pt": StoredFile(900, Place(1, 0, 0), {"data/0": (256, 77), "data.pkl": (30, 5)}),
        "user_content.pt": StoredFile(90, None, {}),
    },
    tensors=(
        StoredTensor("model", "h.0.qkv.weight", "", "bfloat16", (8, 8), "model_1_0.pt", "data/0", BLOCKS),
        StoredTensor("optimizer", "h.0.qkv.weight", "step", "float32", (), "model_1_0.pt", "data/1", BLOCKS, False),
        StoredTensor("model", "scale", "", "float32", (), "model_1_0.pt", "data/2", (Block("scale", (), (), ()),)),
    ),
)


def test_a_manifest_survives_the_file():
    """A tuple that came back as a list, or a lost field, would make the reader look in the wrong places."""
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    assert MANIFEST.tensors[0].sources == ("h.0.q.weight", "h.0.k.weight")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw | {"format": FORMAT + 1}, f"format is {FORMAT + 1} .a newer version of smp"),
        (lambda raw: raw | {"format": "x"}, "format is x"),
        (lambda raw: {key: value for key, value in raw.items() if key != "files"}, "no manifest"),
        (lambda raw: raw | {"degrees": {"pp": 1}}, "no manifest"),
        (lambda raw: raw | {"tensors": [["model"]]}, "manifest|unpack"),
        (lambda raw: [raw], "no manifest"),
        (lambda raw: None, "no manifest"),
    ],
)
def test_what_is_no_manifest_of_this_version_is_refused(change, says):
    """A newer format read with today's eyes could load half of a checkpoint without a word."""
    text = json.dumps(change(json.loads(MANIFEST.to_json())))
    with pytest.raises(ValueError, match=says):
        Manifest.from_json(sealed(text.replace("{", "{\n", 1)) if text.startswith("{") else text)
    if f"{FORMAT + 1}" in says:  # whose checksum, if it has any, may lie elsewhere
        with pytest.raises(ValueError, match=says):
            Manifest.from_json(text)


def test_an_edited_manifest_is_refused():
    """A dtype or a place that is another one than was written would make wrong weights of right bytes."""
    text = MANIFEST.to_json()
    assert json.loads(text)["format"] == FORMAT and is_whole(text)
    for old, new in [("bfloat16", "float16"), ("[0, 4]", "[4, 0]"), ('"step"', '"stop"'), ("\n}", "\n }"), ("\n", "")]:
        edited = text.replace(old, new, 1)
        assert edited != text and json.loads(edited)
        with pytest.raises(ValueError, match="damaged, or was edited"):
            Manifest.from_json(edited)


def test_a_torn_manifest_is_refused():
    """A manifest cut off anywhere is no manifest."""
    text = MANIFEST.to_json()
    for length in range(len(text)):
        assert not is_whole(text[:length])
        with pytest.raises(ValueError):
            Manifest.from_json(text[:length])
