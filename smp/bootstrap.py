"""Who am I, where are the others, which device: everything about the process that outlives a configuration.

    1. identify     rank and size from mpirun's variables, torchrun's, or one process
    2. connect      mpirun: MPI_Init; torchrun: its store
    3. side store   a TCPStore that carries failures, positions and agreements (failures.py) and the rendezvous of torch

The port of the side store is chosen by the kernel and bound before its number is told to anyone, so any number of jobs
can start on one host. This is the one place that knows devices and launchers.
"""

import contextlib
import faulthandler
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from smp.errors import CommError, ConfigError, UsageError

Launcher = Literal["mpi", "torchrun", "single"]
CONNECT_TIMEOUT = timedelta(seconds=60)
DEFAULT_TIMEOUT = 600.0  # seconds


def seconds_from_environment(name: str, default: float) -> float:
    """A duration that an environment variable may set.

    Raises:
        ConfigError: it is set to something else than a positive number.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(f"environment variable {name}: got {text!r}, expected a positive number of seconds")
    return seconds


def timeout_seconds() -> float:
    """How long a rank waits for others: `SMP_TIMEOUT`, in seconds."""
    return seconds_from_environment("SMP_TIMEOUT", DEFAULT_TIMEOUT)


class Identity(NamedTuple):
    """What the launcher says about this process."""

    launcher: Launcher
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def identify(environ: Mapping[str, str] = os.environ) -> Identity:
    """Reads the launcher's variables. A world of one process needs no launcher and is `single`."""

    def read(launcher: Launcher, rank: str, size: str, local_rank: str, local_size: str) -> Identity | None:
        if rank not in environ or size not in environ or int(environ[size]) == 1:
            return None
        number, count = int(environ[rank]), int(environ[size])
        return Identity(
            launcher, number, count, int(environ.get(local_rank, number)), int(environ.get(local_size, count))
        )

    mpi = read(
        "mpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    torchrun = read("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" in environ:  # torchrun may itself have been started by mpirun, once per host
        return torchrun or Identity("single")
    if mpi or torchrun:
        return mpi or torchrun  # type: ignore[return-value]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Identity("torchrun", dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size())
    return Identity("single")


@dataclass
class World:
    """The processes of this job, for as long as they live.

    Attributes:
        rank, size, local_rank, local_size: this process among all, and among those of its host.
        launcher: `mpi`, `torchrun` or `single`.
        device: where this rank computes.
        store: key-value store of the job, for agreements and for the rendezvous of torch.
        side_store: a second connection to it, so that the monitor never waits behind the main thread.
        mpi: the module mpi4py.MPI under mpirun, else None.
        owns_mpi: whether smp initialised MPI, and so has to finalise it.
        entries: collective entries made so far, by ranks (comm/entry.py); they number keys of the store.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: Launcher
    device: torch.device
    store: dist.Store
    side_store: dist.Store
    mpi: Any = None
    owns_mpi: bool = False
    entries: Counter[tuple[int, ...]] = field(default_factory=Counter)

    @classmethod
    def start(cls) -> "World":
        """Connects this process to the others. Collective over the job.

        Raises:
            CommError: rank 0 cannot be reached.
            UsageError: torch.distributed was initialised for a world of another size.
        """
        me = identify()
        if dist.is_initialized() and dist.get_world_size() != me.size:
            raise UsageError(
                f"torch.distributed was initialised with {dist.get_world_size()} processes, but this job has {me.size} "
                f"({me.launcher}); initialise it with all of them, or leave it to smp.init"
            )
        mpi, owns_mpi = _start_mpi(me) if me.launcher == "mpi" else (None, False)
        store, side_store = _connect(me, mpi)
        return cls(*me[1:], me.launcher, _device(me), store, side_store, mpi, owns_mpi)


def _start_mpi(me: Identity) -> tuple[Any, bool]:
    """Imports and initialises MPI. Finalising is ours: it has to come after the exit handshake (failures.py)."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    owns = not MPI.Is_initialized()
    if owns:
        _wait_until_all_ranks_have_called_smp_init(MPI)
    if MPI.COMM_WORLD.Get_size() != me.size:
        raise CommError(
            f"mpirun started {me.size} processes but MPI sees {MPI.COMM_WORLD.Get_size()}: mpi4py is linked to another "
            "MPI than the mpirun in use"
        )
    return MPI, owns


def _wait_until_all_ranks_have_called_smp_init(mpi: Any) -> None:
    """MPI_Init, which waits for all ranks without letting any Python thread run. When one never comes, only a watchdog
    in C can end this process; the stack that it prints shows this function's name."""
    watched = False
    with contextlib.suppress(Exception):  # stderr may be no file
        faulthandler.dump_traceback_later(timeout_seconds(), exit=True, file=sys.__stderr__ or sys.stderr)
        watched = True
    mpi.Init_thread(mpi.THREAD_MULTIPLE)
    if watched:
        faulthandler.cancel_dump_traceback_later()


def _connect(me: Identity, mpi: Any) -> tuple[dist.Store, dist.Store]:
    """Two connections to the job's store."""
    if me.launcher == "single":
        store = dist.HashStore()
        return store, store
    if me.launcher == "mpi":
        server = open_store("0.0.0.0", 0) if me.rank == 0 else None
        address = mpi.COMM_WORLD.bcast((_host_address(me), server.port) if server else None)
        return server or _client(*address), _client(*address)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restarted job meets its predecessor's keys
    if dist.is_initialized():
        base = dist.distributed_c10d._get_default_store()
        return dist.PrefixStore(f"smp/{attempt}", base), dist.PrefixStore(f"smp/{attempt}", base.clone())  # type: ignore[attr-defined]
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    serve = me.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    first = open_store(host, port) if serve else _client(host, port)
    return dist.PrefixStore(f"smp/{attempt}", first), dist.PrefixStore(f"smp/{attempt}", _client(host, port))


def open_store(host: str, port: int) -> dist.TCPStore:
    """Opens a store in this process; port 0 takes a free one.

    Raises:
        CommError: the port is taken, with its number and host.
    """
    try:
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
    except dist.DistNetworkError as error:
        raise CommError(
            f"port {port} on host {socket.gethostname()} ({host}) cannot be opened: {str(error).splitlines()[0]}"
        ) from None


def _client(host: str, port: int) -> dist.TCPStore:
    try:
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise CommError(f"rank 0's store at {host}:{port} cannot be reached: {error}") from None


def _host_address(me: Identity) -> str:
    """An address of this host that the other ranks can reach."""
    if me.local_size == me.size:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing; the kernel picks the interface
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def _device(me: Identity) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", me.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def start_torch_distributed(world: World, port: int | None, backend: str, timeout: timedelta) -> None:
    """Initialises torch.distributed over the world, unless the user did.

    Args:
        port: where rank 0 shall open torch's store (`ddp_port`); None: the job's own store serves.
        backend: `auto`, `gloo` or `nccl`.

    Raises:
        CommError: on every rank, when rank 0 cannot open the port.
    """
    if dist.is_initialized():
        return
    store: dist.Store = dist.PrefixStore("torch", world.store)
    if port is not None:
        store = _store_on_port(world, port)
    if backend == "auto":
        backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    elif backend == "nccl":
        backend = "cpu:gloo,cuda:nccl"  # objects and barriers are host side whatever tensors use
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)


def _store_on_port(world: World, port: int) -> dist.Store:
    key = f"ddp_port/{port}"
    if world.rank == 0:
        try:
            server = open_store("0.0.0.0", port)
        except CommError as error:
            world.store.set(key, f"ddp_port: {error}; choose a free port, or leave ddp_port out")
            raise CommError(world.store.get(key).decode()) from None
        me = Identity(world.launcher, world.rank, world.size, world.local_rank, world.local_size)
        world.store.set(key, f"={_host_address(me)}")
        return server
    answer = world.store.get(key).decode()
    if not answer.startswith("="):
        raise CommError(answer)
    return _client(answer[1:], port)


# What the rest of the package asks about devices

AUTOCAST_DEVICES = ("cpu", "cuda")


def default_generators() -> list[torch.Generator]:
    """The default generators that a script draws from: the host's and, on CUDA, the current device's."""
    found = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def device_state() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """This thread's current device and stream, as a context that another thread can enter."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return contextlib.nullcontext
    stream = torch.cuda.current_stream()

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield

    return entered


def moves_over_process_groups(device: torch.device) -> bool:
    """Whether tensors between stages travel over process groups (NCCL), not over the host's transport."""
    return device.type == "cuda"


class HostCopies:
    """Copies between a device and host memory. On a host device each is a plain copy into new memory.

    `to_host` and `to_device` return the copy and a token that says when it is complete; `to_device` takes the token of
    the copy it reads from, `wait` makes the current stream wait for one.
    """

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.clone(), None

    def to_device(self, host: torch.Tensor, ready: Any) -> tuple[torch.Tensor, Any]:
        return host.clone(), None

    def wait(self, tensor: torch.Tensor, ready: Any) -> None:
        pass


class _CudaCopies(HostCopies):
    """Through pinned memory, on a stream of their own, so that neither host nor compute waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if tensor.device.type != "cuda":
            return tensor.clone(), None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)  # its memory is not used for anything else before the copy is done
            return host, self._stream.record_event()

    def to_device(self, host: torch.Tensor, ready: Any) -> tuple[torch.Tensor, Any]:
        if ready is None:
            return host.clone(), None
        with torch.cuda.stream(self._stream):  # after the copy to the host, which ran on this stream
            tensor = torch.empty_like(host, device=self._device, pin_memory=False)
            tensor.copy_(host, non_blocking=True)
            return tensor, self._stream.record_event()

    def wait(self, tensor: torch.Tensor, ready: Any) -> None:
        if ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(ready)
            tensor.record_stream(stream)


def host_copies(device: torch.device) -> HostCopies:
    """How tensors of `device` are put away in host memory."""
    return _CudaCopies(device) if device.type == "cuda" else HostCopies()
