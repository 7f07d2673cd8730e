"""The manifest of a checkpoint: what it holds, in which file and at which place, with sizes and checksums.

    path/{tag}_partial/manifest.json      path/{tag}.manifest.json (of a full checkpoint)

JSON, so that a person can read it; its first line holds the checksum of the others. It is written last: a directory
with a manifest is complete.
"""

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from smp.checkpoint.layout import Degrees, Place
from smp.errors import CheckpointError
from smp.tp.origin import Block

FORMAT = 1
NAME = "manifest.json"
SUFFIX = f".{NAME}"  # of a full checkpoint's, behind its tag

Kind = Literal["model", "master", "optimizer"]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor, or plain value, in a file.

    Attributes:
        kind: `model` (parameters and buffers), `master` (fp32 masters of half precision), `optimizer` (its state).
        name: the local name in the model that was saved, of the parameter for optimizer state.
        key: which state of the optimizer, as `exp_avg`; else empty.
        dtype: as `float32`; `object` for a plain value (a step counted in a Python number).
        shape: as it lies in the file.
        file: name of the file in the checkpoint.
        record: name of the archive's record with its bytes; empty for a plain value.
        blocks: what the parameter holds of the user's tensors.
        like: whether the tensor has the parameter's shape, so that the blocks say where its values belong.
    """

    kind: Kind
    name: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    record: str
    blocks: tuple[Block, ...]
    like: bool = True

    @property
    def sources(self) -> tuple[str, ...]:
        """The user's tensors that it is of."""
        return tuple(dict.fromkeys(block.source for block in self.blocks))


@dataclass(frozen=True)
class StoredFile:
    """One file.

    Attributes:
        size: its bytes.
        place: coordinates of the rank whose part it is; None for what is the same for all.
        records: bytes and CRC-32 of each record of the archive, by its name there, and of what is around them.
    """

    size: int
    place: Place | None
    records: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class StoredGroup:
    """A parameter group of the optimizer: the user's tensors in it, and its options as text, to be shown."""

    names: tuple[str, ...]
    options: Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        full: whether it is a full checkpoint (whole tensors) or a partial one.
        translated: whether the names of a full one are those of another library's model, not of the user's module.
        save_id: differs from save to save.
        written: seconds since 1970.
        degrees: those of the job that saved it.
        sharded: whether optimizer state was sharded over replicas.
        half: `float16` or `bfloat16` when masters were kept, else None.
        partition: stage of each module, by name.
        shapes: whole shapes of the user's tensors.
        groups: the optimizer's groups; None when no optimizer was saved.
        tied: names in the user's model that stand for one tensor.
        files: by name.
        tensors: everything in the files, but for plain values beside the optimizer's state.
    """

    full: bool
    tag: str
    save_id: str
    written: float
    degrees: Degrees
    sharded: bool = False
    half: str | None = None
    translated: bool = False
    partition: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    groups: tuple[StoredGroup, ...] | None = None
    tied: tuple[tuple[str, ...], ...] = ()
    files: Mapping[str, StoredFile] = field(default_factory=dict)
    tensors: tuple[StoredTensor, ...] = ()

    def to_json(self) -> str:
        """The text of the manifest."""
        origins = _Origins()
        tensors = [
            [t.kind, t.name, t.key, t.dtype, list(t.shape), t.file, t.record, origins.number(t.blocks), t.like]
            for t in self.tensors
        ]
        raw = {
            "format": FORMAT,
            **{name: getattr(self, name) for name in _PLAIN},
            "degrees": asdict(self.degrees),
            "groups": None if self.groups is None else [asdict(group) for group in self.groups],
            "files": {name: asdict(file) for name, file in self.files.items()},
            "blocks": origins.raw,
            "tensors": tensors,
        }
        return sealed("\n".join(_lines(raw)))

    @staticmethod
    def from_json(text: str) -> "Manifest":
        """Raises ValueError when the text is no manifest that this version knows, or is not as it was written."""
        try:
            raw = json.loads(text)
            found = raw["format"]
            if not isinstance(found, int) or found > FORMAT or found < 1:
                newer = "a newer version of smp wrote it" if isinstance(found, int) and found > FORMAT else "unknown"
                raise ValueError(f"its format is {found} ({newer}), this version reads format {FORMAT}")
            if not is_whole(text):
                raise ValueError("it is damaged, or was edited: the checksum in its first line is not that of the rest")
            return _manifest(raw)
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"it is no manifest of a checkpoint: {type(error).__name__} {error}") from error


def read(path: Path) -> Manifest:
    """The manifest in a file.

    Raises:
        CheckpointError: it cannot be read; names the file.
    """
    try:
        return Manifest.from_json(path.read_text())
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def sealed(text: str) -> str:
    """A JSON object, which begins with a line `{`, with the checksum of all its other lines in the first one."""
    body = text.removeprefix("{\n")
    return f'{{"crc32": {zlib.crc32(body.encode())},\n{body}'


def is_whole(text: str) -> bool:
    """Whether a manifest, of any format, is as it was written."""
    first, _, body = text.partition("\n")
    found = re.fullmatch(r'\{"crc32": (\d+),', first)
    return found is not None and int(found[1]) == zlib.crc32(body.encode())


_PLAIN = ("full", "tag", "save_id", "written", "sharded", "half", "translated", "partition", "shapes", "tied")


class _Origins:
    """Numbers lists of blocks, as a parameter shares its own with all its state."""

    def __init__(self) -> None:
        self.raw: list[list[list[Any]]] = []
        self._numbers: dict[tuple[Block, ...], int] = {}

    def number(self, blocks: tuple[Block, ...]) -> int:
        if blocks not in self._numbers:
            self._numbers[blocks] = len(self.raw)
            self.raw.append([[b.source, list(b.start), list(b.size), list(b.at), b.transposed] for b in blocks])
        return self._numbers[blocks]


def _lines(raw: Mapping[str, Any]) -> Iterator[str]:
    """JSON with a line for each entry of the two long lists."""
    yield "{"
    for number, (key, value) in enumerate(raw.items()):
        comma = "," if number < len(raw) - 1 else ""
        if isinstance(value, list) and value:
            yield f"{json.dumps(key)}: ["
            yield ",\n".join(json.dumps(item) for item in value)
            yield f"]{comma}"
        else:
            yield f"{json.dumps(key)}: {json.dumps(value)}{comma}"
    yield "}\n"


def _manifest(raw: Mapping[str, Any]) -> Manifest:
    groups = raw["groups"]
    blocks = [
        tuple(Block(source, tuple(a), tuple(b), tuple(c), bool(t)) for source, a, b, c, t in entry)
        for entry in raw["blocks"]
    ]
    return Manifest(
        full=bool(raw["full"]),
        tag=str(raw["tag"]),
        save_id=str(raw["save_id"]),
        written=float(raw["written"]),
        degrees=Degrees(**raw["degrees"]),
        sharded=bool(raw["sharded"]),
        half=raw["half"],
        translated=bool(raw["translated"]),
        partition={str(name): int(stage) for name, stage in raw["partition"].items()},
        shapes={str(name): tuple(shape) for name, shape in raw["shapes"].items()},
        groups=None if groups is None else tuple(StoredGroup(tuple(g["names"]), dict(g["options"])) for g in groups),
        tied=tuple(tuple(names) for names in raw["tied"]),
        files={str(name): _file(entry) for name, entry in raw["files"].items()},
        tensors=tuple(
            StoredTensor(kind, name, key, dtype, tuple(shape), file, record, blocks[number], bool(like))
            for kind, name, key, dtype, shape, file, record, number, like in raw["tensors"]
        ),
    )


def _file(raw: Mapping[str, Any]) -> StoredFile:
    place = None if raw["place"] is None else Place(**raw["place"])
    return StoredFile(int(raw["size"]), place, {name: (int(n), int(crc)) for name, (n, crc) in raw["records"].items()})
