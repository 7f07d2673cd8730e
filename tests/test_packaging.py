"""The package as clients meet it: two names of the same modules, and an import that starts nothing."""

import importlib
import pkgutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import smp

ROOT = Path(__file__).parent.parent


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_both_names_are_the_same_modules() -> None:
    """A copy would have its own globals: two runtimes, two `state` objects, classes that fail isinstance."""
    import smdistributed.modelparallel.torch as alias

    assert alias is smp
    for info in pkgutil.walk_packages(smp.__path__, "smp."):
        second_name = f"smdistributed.modelparallel.torch.{info.name.removeprefix('smp.')}"
        real = importlib.import_module(info.name)
        assert importlib.import_module(second_name) is real
        assert real.__name__ == real.__spec__.name == info.name


@pytest.mark.parametrize(
    "name",
    [
        *["nn", "nn.huggingface.gpt2", "nn.huggingface.gptj", "amp", "optimizers", "patches.checkpoint", "state_mod"],
        *["utils", "sharded_data_parallel_checkpoint", "exceptions"],
    ],
)
def test_submodules_that_clients_import_by_path_exist(name: str) -> None:
    """Client scripts fail at their first lines otherwise, whatever they use."""
    alias = importlib.import_module(f"smdistributed.modelparallel.torch.{name}")
    assert alias is importlib.import_module(f"smp.{name}")


def test_names_still_to_come_say_so() -> None:
    """`smp.fsdp.FullyShardedDataParallel` must not look like a typo."""
    with pytest.raises(AttributeError, match=r"FullyShardedDataParallel is still to come, with sharded data parallel"):
        _ = importlib.import_module("smp.fsdp").FullyShardedDataParallel


def test_alias_works_before_smp_was_imported() -> None:
    """Client scripts know only the second name, and import submodules by path first."""
    code = """
        import smdistributed.modelparallel.torch.nn as nn
        from smdistributed.modelparallel.torch import exceptions, ConfigError
        import smdistributed.modelparallel.torch as second
        import smp, smp.nn, smp.exceptions
        print(nn is smp.nn, exceptions is smp.exceptions, second is smp, smp.ConfigError is ConfigError)
        print(smp.__spec__.name)
    """
    assert run_python(code) == "True True True True\nsmp"


def test_version_and_exceptions_that_launchers_read() -> None:
    """Clients parse the version; the launcher lists the exception classes of both modules."""
    import smdistributed.modelparallel
    from smdistributed.modelparallel.backend import exceptions

    assert smdistributed.modelparallel.__version__ == "1.15.0"
    assert exceptions is importlib.import_module("smp.exceptions")
    listed = {name for name in dir(exceptions) if isinstance(getattr(exceptions, name), type)}
    assert {"SmpError", "ConfigError", "StepError"} <= listed


def test_unknown_submodule_of_the_second_name_is_not_found() -> None:
    """The error must name the module that was asked for."""
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("smdistributed.modelparallel.torch.no_such_module")
    assert caught.value.name == "smdistributed.modelparallel.torch.no_such_module"


def test_every_public_name_exists() -> None:
    """The table of lazily resolved names holds only what can be resolved."""
    for name in dir(smp):
        assert getattr(smp, name) is not None, name


def test_import_starts_nothing_and_loads_nothing_heavy() -> None:
    """`import smp` in a tool or a notebook must not start MPI, threads or process groups, nor load big packages."""
    code = """
        import sys, threading
        import smp
        heavy = [m for m in ("mpi4py", "transformers", "torch", "numpy", "pydantic") if m in sys.modules]
        print(heavy, threading.active_count())
    """
    assert run_python(code) == "[] 1"
