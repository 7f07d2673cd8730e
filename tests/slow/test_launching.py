"""Jobs start: several at once, as root, more ranks than cores, beside a torch.distributed that is there already."""

import contextlib
import os
import re
import socket
import subprocess
import textwrap
import threading
from collections.abc import Iterator

import pytest

from tests.harness import launch, launcher_command

pytestmark = pytest.mark.slow

LAUNCHERS = ["mpi", "torchrun"]

SMALL = """
import smp
smp.init({"ddp": True})
assert smp.allgather(smp.rank()) == list(range(smp.size()))
print(f"finished {smp.rank()}\\n", end="", flush=True)
"""


@contextlib.contextmanager
def listener(port: int = 0) -> Iterator[int]:
    """Somebody else's server on a port of this host (or nobody's, when the port is taken already)."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            server.bind(("0.0.0.0", port))
            server.listen()
        yield server.getsockname()[1]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_five_jobs_at_once_find_free_ports(launcher: str) -> None:
    """a8-2. A failure means that the second job on a host dies with `address in use`."""
    results: list[subprocess.CompletedProcess[str]] = []
    with listener(29500):
        threads = [
            threading.Thread(target=lambda: results.append(launch(SMALL, 2, launcher, timeout=300))) for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 5
    for done in results:
        assert done.returncode == 0, done.stdout
        assert done.stdout.count("finished") == 2, done.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_busy_port_that_the_user_gave_is_named(launcher: str) -> None:
    """a8-2. A failure means a hang, or a message that does not say which port on which host."""
    with listener() as port:
        script = f"""
            import time
            import torch
            import smp
            start = time.monotonic()
            try:
                smp.init({{"ddp": True, "ddp_port": {port}}})
            except smp.CommError:
                print(f"refused after {{int(time.monotonic() - start)}}\\n", end="", flush=True)
                raise
        """
        done = launch(textwrap.dedent(script), 2, launcher)
    assert done.returncode != 0
    seconds = [int(number) for number in re.findall(r"refused after (\d+)", done.stdout)]
    assert len(seconds) == 2 and max(seconds) < 10, done.stdout
    assert f"port {port} on host {socket.gethostname()}" in done.stdout, done.stdout
    assert done.stdout.count("smp.errors.CommError") == 1, done.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_free_port_that_the_user_gave_is_used(launcher: str) -> None:
    """A failure means that ddp_port does nothing."""
    with listener() as port:
        pass
    script = f"""
        import socket
        import smp
        smp.init({{"ddp": True, "ddp_port": {port}}})
        socket.create_connection(("127.0.0.1", {port})).close()
        print("finished", smp.allgather(smp.rank()), flush=True)
    """
    done = launch(textwrap.dedent(script), 2, launcher)
    assert done.returncode == 0 and done.stdout.count("finished [0, 1]") == 2, done.stdout


def test_the_documented_line_starts_more_ranks_than_cores_as_root() -> None:
    """a8-3. A failure means that the first command a user copies is refused by mpirun."""
    command = launcher_command(4, "mpi")
    assert {"--allow-run-as-root", "--oversubscribe"} < set(command)
    assert ["--bind-to", "none"] == command[command.index("--bind-to") :][:2]
    done = launch(SMALL, 4, command=command)
    assert done.returncode == 0 and done.stdout.count("finished") == 4, done.stdout


THREADS = """
import os, torch
if PIN:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["OMPI_COMM_WORLD_RANK"]) % CORES]})
import smp
smp.init({"ddp": True})
print("threads", torch.get_num_threads(), flush=True)
"""


@pytest.mark.parametrize("asked", [None, "1", "2"])
def test_threads_default_to_the_cores_of_the_host_shared_by_its_ranks(asked: str | None) -> None:
    """a8-3. A failure means that ranks fight for cores, or that OMP_NUM_THREADS is ignored."""
    cores = len(os.sched_getaffinity(0))
    script = THREADS.replace("PIN", "False").replace("CORES", str(cores))
    env = {"OMP_NUM_THREADS": asked} if asked else {}
    done = launch(script, 2, env=env, unset=() if asked else ("OMP_NUM_THREADS",))
    expected = int(asked) if asked else max(1, cores // 2)
    assert done.stdout.count(f"threads {expected}") == 2, done.stdout
    if expected <= cores:
        assert "--bind-to none" not in done.stdout, done.stdout


def test_a_process_bound_to_one_core_is_told_so_once() -> None:
    """a8-3. A failure means that four threads on one core look like a slow library."""
    cores = len(os.sched_getaffinity(0))
    script = THREADS.replace("PIN", "True").replace("CORES", str(cores))
    done = launch(script, 2, env={"OMP_NUM_THREADS": "4"})
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"WARNING: .*1 of \d+ cores.*--bind-to none", done.stdout)) == 1, done.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_torch_distributed_that_is_already_there_is_used(launcher: str) -> None:
    """A failure means that scripts which initialise torch.distributed themselves cannot use smp."""
    with listener() as port:
        pass
    script = f"""
        import os
        import torch.distributed as dist
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK")))
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        group = dist.group.WORLD
        import smp
        smp.init({{"ddp": True}})
        assert smp.get_world_process_group() is group
        smp.send(("from", rank), 1 - rank)
        assert smp.recv_from(1 - rank) == ("from", 1 - rank)
        smp.barrier()
        print("finished", flush=True)
    """
    done = launch(textwrap.dedent(script), 2, launcher)
    assert done.returncode == 0 and done.stdout.count("finished") == 2, done.stdout


def test_a_torch_distributed_of_another_size_is_refused() -> None:
    """A failure means that ranks meet in groups of the wrong size."""
    script = """
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        import smp
        smp.init({"ddp": True})
    """
    done = launch(textwrap.dedent(script), 2)
    assert done.returncode != 0
    assert "was initialised with 1 processes, but this job has 2" in done.stdout, done.stdout


def test_processes_started_by_hand_need_only_torchs_variables() -> None:
    """A failure means that other launchers which set RANK and MASTER_ADDR cannot be used."""
    with listener() as port:
        pass
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    results: list[subprocess.CompletedProcess[str]] = []
    threads = [
        threading.Thread(target=lambda rank=rank: results.append(launch(SMALL, 1, env=env | {"RANK": str(rank)})))
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [done.returncode for done in results] == [0, 0], [done.stdout for done in results]


@pytest.mark.parametrize("n", [1, 2])
def test_a_script_needs_no_more_than_its_interpreter_at_exit(n: int) -> None:
    """A failure means that jobs end late, noisily, or with another status than the script's own."""
    script = SMALL + "import sys; sys.exit(0 if smp.size() == 1 else 3)\n"
    done = launch(script, n)
    assert done.returncode == (0 if n == 1 else 3), done.stdout
    assert "Traceback" not in done.stdout, done.stdout
