"""What a person wants to know about checkpoints, as lines of text."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from time import localtime, strftime

from smp.checkpoint.finder import newest_in
from smp.checkpoint.found import Found
from smp.checkpoint.layout import Degrees
from smp.checkpoint.manifest import Kind, Manifest
from smp.checkpoint.reader import Checkpoint

_SHOWN = 8  # of a long list


def directory_lines(directory: Path, found: Sequence[Found]) -> Iterator[str]:
    """The checkpoints in a directory, a line for each; the newest has a star."""
    newest = newest_in(directory)
    complete = [one for one in found if one.checkpoint is not None]
    pointer = f"newest names {newest.name}" if newest is not None else "no file `newest` names one of them"
    yield f"{directory}: {len(complete)} complete {'checkpoint' if len(complete) == 1 else 'checkpoints'}; {pointer}"
    yield from table(
        ["", "name", "saved", "degrees", "half", "optimizer", "size", "state"],
        [_row(one, one.path == newest) for one in found],
    )


def _row(found: Found, newest: bool) -> list[str]:
    star = "*" if newest else ""
    if found.checkpoint is None:
        return [star, found.path.name, "", "", "", "", "", f"not usable: {found.problem}"]
    manifest = found.checkpoint.manifest
    return [
        *(star, found.path.name, _time(manifest), _short_degrees(manifest.degrees), manifest.half or "-"),
        *(_optimizer(manifest), in_bytes(_size(manifest)), "complete"),
    ]


def _time(manifest: Manifest) -> str:
    return strftime("%Y-%m-%d %H:%M:%S", localtime(manifest.written))


def _short_degrees(degrees: Degrees) -> str:
    return f"pp {degrees.pp} tp {degrees.tp} rdp {degrees.rdp}"


def _optimizer(manifest: Manifest) -> str:
    if manifest.groups is None:
        return "none"
    return "sharded" if manifest.sharded else "saved"


def _size(manifest: Manifest) -> int:
    return sum(file.size for file in manifest.files.values())


def checkpoint_lines(checkpoint: Checkpoint, all_tensors: bool = False) -> Iterator[str]:
    """One checkpoint at length.

    Args:
        checkpoint: opened, so its files are there with the right sizes.
        all_tensors: with a line for every tensor of the user's module.
    """
    manifest = checkpoint.manifest
    kind = "full" if manifest.full else "partial"
    translated = ", names translated for Hugging Face" if manifest.translated else ""
    yield f"{checkpoint.path}: {kind} checkpoint {manifest.tag!r}, saved {_time(manifest)}{translated}"
    yield f"degrees       {manifest.degrees}"
    yield f"precision     {f'{manifest.half} with fp32 masters' if manifest.half else 'as the weights are'}"
    yield f"optimizer     {_optimizer(manifest)}"
    yield "health        complete, all files have the right sizes (`verify` compares checksums)"
    yield from _value_lines(checkpoint)
    yield from _stage_lines(manifest)
    yield from _group_lines(manifest)
    for names in _limited([" = ".join(names) for names in manifest.tied], all_tensors):
        yield f"tied          {names}"
    yield f"files         {len(manifest.files)}, {in_bytes(_size(manifest))}"
    yield from (f"  {line}" for line in table(None, [[n, in_bytes(f.size)] for n, f in manifest.files.items()]))
    if all_tensors:
        yield "tensors"
        yield from (f"  {line}" for line in table(None, [_tensor_row(checkpoint, n) for n in manifest.shapes]))


def _value_lines(checkpoint: Checkpoint) -> Iterator[str]:
    shapes = checkpoint.manifest.shapes
    labels: dict[tuple[Kind, str], str] = {("model", ""): "weights", ("master", ""): "masters"}
    labels |= {("optimizer", key): key for key in checkpoint.keys()}
    for (kind, key), label in labels.items():
        sources = checkpoint.sources(kind, key)
        stored = {name: checkpoint.stored(kind, name, key)[0] for name in sources}
        dtypes = " ".join(sorted({one.dtype for one in stored.values()}))
        values = sum(prod(shapes[name] if one.like else one.shape) for name, one in stored.items())
        if sources:
            yield f"{label:<13} {len(sources)} tensors, {values:,} values of {dtypes}"


def _stage_lines(manifest: Manifest) -> Iterator[str]:
    for stage, count in sorted(Counter(manifest.partition.values()).items()):
        names = [name or "(the model)" for name, where in manifest.partition.items() if where == stage]
        heads = [name for name in names if name.rpartition(".")[0] not in names]
        more = f", … ({count} modules)" if len(heads) > _SHOWN else ""
        yield f"stage {stage:<7} {', '.join(heads[:_SHOWN])}{more}"


def _group_lines(manifest: Manifest) -> Iterator[str]:
    for number, group in enumerate(manifest.groups or ()):
        options = ", ".join(f"{name} {value}" for name, value in group.options.items())
        yield f"group {number:<7} {len(group.names)} parameters: {options}"


def _limited(lines: Sequence[str], everything: bool) -> Iterator[str]:
    yield from lines if everything else lines[:_SHOWN]
    if not everything and len(lines) > _SHOWN:
        yield f"and {len(lines) - _SHOWN} more"


def _tensor_row(checkpoint: Checkpoint, name: str) -> list[str]:
    manifest = checkpoint.manifest
    kinds = [("model", ""), ("master", ""), *(("optimizer", key) for key in checkpoint.keys())]
    stored = {pair: checkpoint.stored(pair[0], name, pair[1]) for pair in kinds}  # type: ignore[arg-type]
    parts = stored["model", ""]
    files = list(dict.fromkeys(one.file for one in parts))
    also = [key or kind for (kind, key), found in stored.items() if found and kind != "model"]
    shape = "x".join(map(str, manifest.shapes[name])) or "scalar"
    return [name, shape, parts[0].dtype if parts else "-", " ".join(files), " ".join(also)]


def table(header: list[str] | None, rows: Sequence[list[str]]) -> Iterator[str]:
    """Columns as wide as their longest entry."""
    rows = [*([header] if header is not None and rows else []), *rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        yield "  ".join(entry.ljust(width) for entry, width in zip(row, widths)).rstrip()


def in_bytes(size: int) -> str:
    """A number of bytes for people: `1.5 MiB`."""
    value, unit = float(size), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
