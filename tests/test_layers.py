"""Imports point one way: a module imports only from entries above it in this list, and never in a circle."""

import ast
from pathlib import Path

import smp

# Lowest layer first. An entry stands for a module, or for a package with all its modules; the longest one that fits
# counts. Modules of one entry may import each other as long as no circle arises.
LAYERS = """
    errors log coming topology config
    bootstrap failures groups cpu_trainer
    comm.transport comm.mpi comm.gloo comm.pairs
    runtime state_mod
    rng nested
    comm
    offload activation
    tp
    pp
    dp
    fp16
    grad_norm model_state model_views model optimizer
    checkpoint
    nn
    amp optimizers patches utils exceptions fsdp sharded_data_parallel_checkpoint
    launch
""".split()

ROOT = Path(smp.__file__).parent


def module_name(path: Path) -> str:
    """`smp/tp/linear.py` -> `tp.linear`, `smp/tp/__init__.py` -> `tp`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py")) if module_name(path)}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports_of(name: str) -> set[str]:
    """Modules of smp that `name` imports anywhere, also inside functions, except for type checkers only."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(FILES[name].read_text())]
    while pending:
        node = pending.pop()
        if is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
        pending.extend(ast.iter_child_nodes(node))
    modules = {full.removeprefix("smp.") for full in found if full.startswith("smp.")}
    # `from smp.comm import objects` names a module, `from smp.comm.objects import send` a function in one.
    return {module for module in modules if module in FILES} - {name}


def layer_of(name: str) -> int:
    """The index of the longest entry that is `name` or a package above it."""
    fitting = [entry for entry in LAYERS if name == entry or name.startswith(f"{entry}.")]
    assert fitting, f"smp.{name} is in no layer: add it to the list, above everything that imports it"
    return LAYERS.index(max(fitting, key=len))


def test_imports_point_upwards_in_the_list() -> None:
    """A failure means that a lower layer depends on a higher one; move the shared piece down instead."""
    wrong = [
        f"smp.{name} imports smp.{other}"
        for name in FILES
        for other in sorted(imports_of(name))
        if layer_of(other) > layer_of(name)
    ]
    assert wrong == []


def test_no_module_imports_itself_through_others() -> None:
    """A circle makes the order of imports matter, and the pieces impossible to read one at a time."""
    # A package's __init__ is imported by every module below it without being named; only written imports count here.
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in sorted(imports_of(name)):
                visit(other, (*path, name))
            done.add(name)

    for name in FILES:
        visit(name, ())
