"""Names of partial files and the header inside them: pure values, no processes, nothing read but directory listings.

The path f that a script gives becomes

    f_{pp_rank}_{tp_rank}              written by rdp_rank 0
    f_{pp_rank}_{tp_rank}_{rdp_rank}   v3: the state differs over rdp ranks, all of them write
    f_{mp_rank}                        written long ago, read with back_compat=True

and a checkpoint with a tag lies in a directory that a script gives:

    {tag}_partial/              a partial one: {kind}_{pp}_{tp}.pt of rdp_rank 0, {kind}_{pp}_{tp}_{rdp}.pt of all ranks
    {tag}, optimizer_{tag},     a full one
    user_content_{tag}
    newest                      the tag saved last
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

FORMAT = 1


@dataclass(frozen=True)
class Degrees:
    """How many parts a checkpoint is cut into. `rdp` matters only to v3 files."""

    pp: int
    tp: int
    rdp: int

    def __str__(self) -> str:
        return f"pipeline degree {self.pp}, tensor degree {self.tp}, reduced-data-parallel degree {self.rdp}"


@dataclass(frozen=True)
class Place:
    """Coordinates of the rank that a partial file belongs to."""

    pp: int
    tp: int
    rdp: int


@dataclass(frozen=True)
class Header:
    """What a partial file says about itself; stands in the file as one more record of the archive.

    `save_id` is the same in all files of one save, so that files of different saves are not mixed unnoticed.
    """

    degrees: Degrees
    place: Place
    v3: bool
    save_id: str

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)})

    @staticmethod
    def from_json(text: str) -> "Header":
        """Raises ValueError when the text is no header that this version knows."""
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT:
                raise ValueError(f"its format is {raw['format']}, this version reads format {FORMAT}")
            return Header(Degrees(**raw["degrees"]), Place(**raw["place"]), bool(raw["v3"]), str(raw["save_id"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"its header cannot be understood: {error}") from error


def partial_path(f: str, place: Place, v3: bool) -> Path:
    """The partial file of a rank: `f_{pp}_{tp}`, with v3 `f_{pp}_{tp}_{rdp}`."""
    return Path(f"{f}_{place.pp}_{place.tp}_{place.rdp}" if v3 else f"{f}_{place.pp}_{place.tp}")


def old_path(f: str, mp_rank: int) -> Path:
    """The partial file of a rank in the oldest naming: `f_{mp_rank}`."""
    return Path(f"{f}_{mp_rank}")


def part_name(kind: str, place: Place, each_replica: bool = False) -> str:
    """Name of a rank's file in a partial checkpoint; `each_replica`: the replicas have different ones."""
    numbers = (place.pp, place.tp, place.rdp) if each_replica else (place.pp, place.tp)
    return f"{kind}_{'_'.join(map(str, numbers))}.pt"


def existing_parts(f: str) -> dict[Path, tuple[int, ...]]:
    """Files named `f_<n>[_<n>[_<n>]]`, in numeric order, each with its numbers."""
    directory, name = Path(f).parent, re.escape(Path(f).name)
    if not directory.is_dir():
        return {}
    matches = [(path, re.fullmatch(rf"{name}_(\d+)(?:_(\d+))?(?:_(\d+))?", path.name)) for path in directory.iterdir()]
    parts = {path: tuple(int(n) for n in m.groups() if n is not None) for path, m in matches if m}
    return dict(sorted(parts.items(), key=lambda item: (len(item[1]), item[1])))


def describe_existing(f: str) -> str:
    """What lies at `f` and beside it, for error messages: at most eight names, then a count."""
    path = Path(f)
    if not path.parent.is_dir():
        return f"the directory {path.parent} does not exist"
    names = [part.name for part in existing_parts(f)]
    if path.is_file():
        names.insert(0, f"{path.name} (a whole file: load it with partial=False)")
    if not names:
        return f"{path.parent} holds no file whose name begins with {path.name}_"
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{path.parent} holds {', '.join(names[:8])}{more}"


def foreign_part(f: str, degrees: Degrees, v3: bool) -> Path | None:
    """The first existing part whose numbers do not occur with these degrees; None when all fit.

    For files without a header, written by other programs: a part `f_3_0` says that there were four stages.
    """
    limits = (degrees.pp, degrees.tp, degrees.rdp) if v3 else (degrees.pp, degrees.tp)
    for path, numbers in existing_parts(f).items():
        if len(numbers) == len(limits) and any(n >= limit for n, limit in zip(numbers, limits)):
            return path
    return None
