"""python -m smp.checkpoint: looks at checkpoints, proves them, makes one full file of them, compares them. No job."""

import argparse
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from smp.checkpoint.compare import Difference, compare
from smp.checkpoint.consolidate import SAFETENSORS, SHARD_BYTES, TORCH_ENDINGS, consolidate
from smp.checkpoint.describe import checkpoint_lines, directory_lines, in_bytes
from smp.checkpoint.found import Found, checkpoints_in, is_checkpoint, single
from smp.checkpoint.manifest import Kind
from smp.errors import CheckpointError, SmpError

_DIR = "a checkpoint (RUN/TAG_partial, or the file RUN/TAG of a full one), or the directory RUN that holds several"
_NEWEST = f"{_DIR}: the newest one then"
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_KINDS: tuple[Kind, ...] = ("model", "master", "optimizer")
_EXAMPLES = """\
examples:
  python -m smp.checkpoint inspect run/                       which checkpoints there are, and which is the newest
  python -m smp.checkpoint inspect run/300_partial --tensors  everything about one
  python -m smp.checkpoint verify run/                        every byte of all of them
  python -m smp.checkpoint consolidate run/ model.pt          one file that torch.load reads
  python -m smp.checkpoint consolidate run/ export/ --dtype bfloat16
                                                              safetensors as `from_pretrained` reads them
  python -m smp.checkpoint diff run/300_partial other/300_partial

exit status: 0 well; 1 damage was found, or a difference; 2 it could not be done
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except SmpError as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # no right to read a directory, say
        print(f"{options.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m smp.checkpoint",
        description="Looks at checkpoints of smp.save_checkpoint, without starting a job.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    one = commands.add_parser("inspect", help="degrees, tensors, sizes and health of one or all")
    one.add_argument("dir", type=Path, metavar="DIR", help=_DIR)
    one.add_argument("--tensors", action="store_true", help="with a line for every tensor")
    one.set_defaults(run=_inspect)

    one = commands.add_parser("verify", help="compare every checksum; exit status 1 if one is wrong")
    one.add_argument("dir", type=Path, metavar="DIR", help=f"{_DIR}: all of them then")
    one.set_defaults(run=_verify)

    one = commands.add_parser("consolidate", help="write the whole model into one file, or as safetensors")
    one.add_argument("dir", type=Path, metavar="DIR", help=_NEWEST)
    one.add_argument(
        "out",
        metavar="OUT",
        help=f"a file ending in {', '.join(TORCH_ENDINGS)} for torch.load, or in {SAFETENSORS}; or a directory (no "
        "ending, or a slash behind it) for model.safetensors as Hugging Face lays it out",
    )
    one.add_argument(
        "--dtype",
        choices=[*_DTYPES, "stored"],
        help="of floating point tensors; `stored`: the weights as the model had them. Without it fp32 masters where "
        "there are any, else the weights as the model had them",
    )
    one.add_argument(
        "--shard-size", type=_bytes, default=SHARD_BYTES, metavar="SIZE", help="largest file in a directory (5GB)"
    )
    one.add_argument("--overwrite", action="store_true", help="replace what is at OUT")
    one.add_argument("--no-verify", action="store_true", help="do not compare checksums before")
    one.set_defaults(run=_consolidate)

    one = commands.add_parser("diff", help="compare two checkpoints tensor by tensor, whatever their degrees")
    one.add_argument("a", type=Path, metavar="A", help=_NEWEST)
    one.add_argument("b", type=Path, metavar="B", help="as A")
    one.add_argument("--only", action="append", choices=_KINDS, metavar="KIND", help=f"of {', '.join(_KINDS)}")
    one.add_argument("--tolerance", type=float, default=0.0, metavar="X", help="largest difference that is none (0)")
    one.add_argument("--all", action="store_true", help="name every tensor, not the first twenty that differ")
    one.set_defaults(run=_diff)
    return parser


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB, 500MB, 2GiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


# inspect and verify


def _all(path: Path) -> list[Found]:
    """The one at a path, or all of a directory."""
    if is_checkpoint(path):
        return [Found(path, single(path))]
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    found = checkpoints_in(path)
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint of smp.save_checkpoint")
    return found


def _inspect(options: argparse.Namespace) -> int:
    found = _all(options.dir)
    if not is_checkpoint(options.dir):
        print(*directory_lines(options.dir, found), sep="\n")
    for one in found:
        if one.checkpoint is not None and (options.tensors or is_checkpoint(options.dir)):
            print(*checkpoint_lines(one.checkpoint, options.tensors), sep="\n")
    return 0


def _verify(options: argparse.Namespace) -> int:
    damaged = False
    for one in _all(options.dir):
        wrong = [one.problem] if one.checkpoint is None else one.checkpoint.damage()
        damaged |= bool(wrong) and not one.path.name.startswith(".")  # what is left of a save was never complete
        files = 0 if one.checkpoint is None else len(one.checkpoint.manifest.files)
        print(f"{one.path}: {'; '.join(wrong) if wrong else f'every record of {files} files is as it was written'}")
    return int(damaged)


# consolidate


def _consolidate(options: argparse.Namespace) -> int:
    out, directory = Path(options.out), options.out.endswith(os.sep)
    taken = list(out.glob("model*.safetensors*")) if out.is_dir() else [out] if out.exists() else []
    if taken and not options.overwrite:
        raise CheckpointError(f"{taken[0]} exists already; --overwrite replaces it")
    checkpoint = single(options.dir)
    if not options.no_verify:
        wrong = checkpoint.damage(checkpoint.records(("model", "master")))
        if wrong:
            raise CheckpointError("\n".join(wrong))
    written = consolidate(
        checkpoint,
        out,
        dtype=_DTYPES.get(options.dtype),
        masters=options.dtype != "stored",
        shard_bytes=options.shard_size,
        directory=directory,
    )
    for old in set(taken) - set(written.files):
        old.unlink()
    if written.left_out:
        print(f"left out, as safetensors holds tensors only: {', '.join(written.left_out)}", file=sys.stderr)
    shown = ", ".join(map(str, written.files[:4])) + (" …" if len(written.files) > 4 else "")
    print(f"{checkpoint.path}: {written.tensors} tensors, {in_bytes(written.nbytes)}, written to {shown}")
    return 0


# diff


def _diff(options: argparse.Namespace) -> int:
    a, b = single(options.a), single(options.b)
    print(f"A  {a.path} ({a.manifest.degrees})\nB  {b.path} ({b.manifest.degrees})")
    kinds = tuple(options.only or _KINDS)
    equal: Counter[str] = Counter()
    different: dict[str, list[Difference]] = defaultdict(list)
    for found in compare(a, b, kinds, options.tolerance):
        label = f"optimizer {found.key}" if found.kind == "optimizer" else found.kind
        equal[label] += not found.what
        if found.what:
            different[label].append(found)
    for label, count in equal.items():
        others = different[label]
        print(f"{label}: {count} equal, {len(others)} different")
        for one in others if options.all else others[:20]:
            print(f"  {one.name}: {one.what}")
        if len(others) > 20 and not options.all:
            print(f"  and {len(others) - 20} more (--all)")
    return int(any(different.values()))


if __name__ == "__main__":
    sys.exit(main())
