"""Point-to-point messages between ranks: one interface, two implementations (mpi.py, gloo.py).

Every tensor travels as a header and its bytes. The header holds dtype, size and whether there is a tensor at all, so
that a receive which expected something else says so: MPI by itself takes a shorter message silently.
"""

import io
import pickle
import queue
import struct
import threading
import zlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from smp.bootstrap import World
from smp.errors import CommError
from smp.failures import Monitor
from smp.groups import Group

MAX_TAG = 2**30


class Channel(Enum):
    """Messages of different channels never meet, whatever their tags."""

    USER = 0
    MOVE = 1
    CONTROL = 2


class Request(ABC):
    """A message in flight. It keeps its buffers alive."""

    @abstractmethod
    def test(self) -> bool:
        """Whether it is complete; never blocks. For a receive the buffer holds the data from then on.

        Raises:
            CommError: what arrived has another dtype or size than the buffer.
        """

    def value(self) -> Tensor | None:
        """Of a completed `irecv_optional`: the buffer, or None when the sender had no tensor."""
        raise CommError("only an optional receive has a value")


class Moves(Protocol):
    """What the pipeline needs to move tensors."""

    in_order: bool

    def isend(self, tensor: Tensor, dest: int, tag: int = ..., channel: Channel = ...) -> Request: ...

    def irecv(self, buffer: Tensor, source: int, tag: int = ..., channel: Channel = ...) -> Request: ...

    def isend_optional(self, tensor: Tensor | None, dest: int, tag: int = ..., channel: Channel = ...) -> Request: ...

    def irecv_optional(self, buffer: Tensor, source: int, tag: int = ..., channel: Channel = ...) -> Request: ...

    def progress(self) -> bool: ...


class Transport(ABC):
    """Messages between world ranks. Tags are below 2**30; messages of one pair, channel and tag keep their order."""

    in_order = False  # whether order alone matches messages, so that they must be received as they are sent

    def __init__(self, world: World, monitor: Monitor) -> None:
        self.num_microbatches = 0  # that steps of any model have begun: each has tags of its own
        self.world = world
        self.monitor = monitor
        self.rank = world.rank

    # Tensors

    def isend(self, tensor: Tensor, dest: int, tag: int = 0, channel: Channel = Channel.MOVE) -> Request:
        """Starts sending. The tensor must not be written before the request is complete; the request may be dropped."""
        return self._isend(tensor, dest, tag, channel)

    def irecv(self, buffer: Tensor, source: int, tag: int = 0, channel: Channel = Channel.MOVE) -> Request:
        """Starts receiving into `buffer`, which says what is expected."""
        return self._irecv(buffer, source, tag, channel, optional=False)

    def isend_optional(
        self, tensor: Tensor | None, dest: int, tag: int = 0, channel: Channel = Channel.MOVE
    ) -> Request:
        """As isend, for a tensor that may be None. The other side calls irecv_optional."""
        return self._isend(tensor, dest, tag, channel)

    def irecv_optional(self, buffer: Tensor, source: int, tag: int = 0, channel: Channel = Channel.MOVE) -> Request:
        """As irecv; `.value()` of the completed request is the buffer or None."""
        return self._irecv(buffer, source, tag, channel, optional=True)

    @abstractmethod
    def _isend(self, tensor: Tensor | None, dest: int, tag: int, channel: Channel) -> Request: ...

    @abstractmethod
    def _irecv(self, buffer: Tensor, source: int, tag: int, channel: Channel, optional: bool) -> Request: ...

    # Objects

    def send_object(self, obj: Any, dest: int, tag: int = 0, channel: Channel = Channel.USER) -> None:
        """Sends any picklable object. It is copied at once; the call does not wait for the receiver."""
        self._send_bytes(pack(obj), dest, tag, channel)

    def recv_object(self, source: int, tag: int = 0, channel: Channel = Channel.USER, call: str = "recv_object") -> Any:
        """Waits for an object.

        Raises:
            CommError: nothing arrived before the deadline, or the source failed or left.
        """
        return unpack(self._recv_bytes(source, tag, channel, call), self.world.device)

    @abstractmethod
    def _send_bytes(self, data: bytes, dest: int, tag: int, channel: Channel) -> None: ...

    @abstractmethod
    def _recv_bytes(self, source: int, tag: int, channel: Channel, call: str) -> Any: ...

    # Groups

    def prepare(self, groups: Sequence[Group]) -> None:
        """Makes what messages in these groups need. Every rank calls it with its groups of all kinds in one order."""
        _ = groups  # nothing, unless the transport overrides this

    def broadcast_object(self, obj: Any, group: Group, source: int, call: str | None = None) -> Any:
        """The object of world rank `source`, on every member. Collective over the group; others pass anything."""
        tag = group_tag(group.ranks, 0)
        if self.rank != source:
            return self.recv_object(source, tag, Channel.CONTROL, call or f"broadcast_object({group.kind.name})")
        data = pack(obj)
        for rank in group.ranks:
            if rank != source:
                self._send_bytes(data, rank, tag, Channel.CONTROL)
        return obj

    @abstractmethod
    def all_gather_object(self, obj: Any, group: Group, call: str | None = None) -> list[Any]:
        """The members' objects, by their rank in the group. Collective over the group."""

    @abstractmethod
    def barrier(self, group: Group, call: str | None = None) -> None:
        """Returns when every member has called it."""

    def comm(self, group: Group) -> Any:
        """The mpi4py communicator of the group for collectives on tensors; None where the transport has none."""
        return None

    def wait(self, request: Request, call: str, ranks: Sequence[int]) -> None:
        """Waits for a request under the monitor's deadline."""
        self.monitor.wait(request.test, call, ranks)

    # Bookkeeping

    def advance(self) -> None:
        """Lets the receives that are posted advance. Every wait calls it again and again, whatever it waits for: two
        ranks that both wait for their sends would otherwise wait for ever."""
        return  # nothing, unless the transport overrides this

    @abstractmethod
    def progress(self) -> bool:
        """Lets outstanding sends advance; whether there are any."""

    @abstractmethod
    def idle(self) -> bool:
        """Whether no message that this rank started is outstanding (tests)."""

    def unexpected(self) -> bool:
        """Whether messages have arrived that nobody has asked for (tests); False where that cannot be known."""
        return False


def group_tag(ranks: Sequence[int], salt: int) -> int:
    """A tag that every member computes alike and other groups, as a rule, do not share."""
    return zlib.crc32(repr((tuple(ranks), salt)).encode()) % MAX_TAG


# Header

_DTYPES: list[torch.dtype] = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_HEADER = struct.Struct("<BBxxxxxxQ")
HEADER_BYTES = _HEADER.size


def encode_header(tensor: Tensor | None) -> bytearray:
    """Dtype, presence and number of bytes of a tensor."""
    header = bytearray(HEADER_BYTES)
    if tensor is not None:
        _HEADER.pack_into(header, 0, _CODES[tensor.dtype], 1, tensor.numel() * tensor.element_size())
    return header


def payload_size(header: bytes | bytearray) -> int:
    """Number of bytes that follow a header."""
    return int(_HEADER.unpack(header)[2])


class Expected:
    """What a receive expects; compares it with the header that arrives."""

    __slots__ = ("dtype", "numel", "nbytes", "optional", "source", "tag")

    def __init__(self, buffer: Tensor, source: int, tag: int, optional: bool) -> None:
        self.dtype, self.numel = buffer.dtype, buffer.numel()
        self.nbytes = self.numel * buffer.element_size()
        self.optional, self.source, self.tag = optional, source, tag

    def check(self, header: bytearray | bytes) -> bool:
        """Whether a tensor follows.

        Raises:
            CommError: dtype, size or presence differ from what is expected.
        """
        code, present, nbytes = _HEADER.unpack(header)
        if not present:
            if self.optional:
                return False
            raise CommError(f"{self}, but rank {self.source} sent none")
        if nbytes != self.nbytes or _DTYPES[code] != self.dtype:
            dtype = _DTYPES[code]
            raise CommError(f"{self}, but rank {self.source} sent {nbytes // dtype.itemsize} elements of {dtype}")
        return True

    def __str__(self) -> str:
        return f"expected {self.numel} elements of {self.dtype} from rank {self.source} (tag {self.tag})"


def sendable(tensor: Tensor) -> Tensor:
    """The tensor's elements in contiguous host memory (the tensor itself where it is that already)."""
    if tensor.layout != torch.strided:
        raise CommError(f"only dense tensors travel between ranks, got layout {tensor.layout}")
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def receivable(buffer: Tensor) -> Tensor:
    """Contiguous host memory to receive into: the buffer itself, or one of its size whose elements are copied later."""
    direct = buffer.device.type == "cpu" and buffer.is_contiguous()
    return buffer.detach() if direct else torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


# Objects


class _Pickler(pickle.Pickler):
    """Tensors travel as their own elements: not with the whole storage that a view keeps, and off the device."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in (Tensor, torch.nn.Parameter) or obj.layout != torch.strided or obj.is_quantized:
            return NotImplemented
        if obj.is_meta:
            return NotImplemented
        flat = (
            sendable(obj).reshape(-1).view(torch.uint8)
            if obj.numel()
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        data: Any = pickle.PickleBuffer(flat.numpy())  # type: ignore[arg-type]
        device = obj.device.type
        return _rebuild, (type(obj) is Tensor, data, obj.dtype, tuple(obj.shape), obj.requires_grad, device)


_receiving_device = torch.device("cpu")


def _rebuild(
    plain: bool, data: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, device: str
) -> Tensor:
    if len(data):
        memory = data if isinstance(data, bytearray) else bytearray(data)
        tensor = torch.frombuffer(memory, dtype=dtype).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if device != "cpu":
        tensor = tensor.to(_receiving_device)
    if not plain:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def pack(obj: Any) -> bytes:
    """Pickles an object for another rank of this job."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(obj)
    return stream.getvalue()


def unpack(data: Any, device: torch.device) -> Any:
    """The inverse of pack. Tensors that were on an accelerator land on `device`."""
    global _receiving_device
    _receiving_device = device
    return pickle.loads(data)


class Loopback:
    """Messages of a rank to itself."""

    def __init__(self) -> None:
        self._queues: defaultdict[Any, queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()

    def put(self, key: Any, message: Any) -> None:
        """Leaves a message."""
        with self._lock:
            self._queues[key].put(message)

    def take(self, key: Any) -> Any:
        """Waits for the next message."""
        with self._lock:
            waiting = self._queues[key]
        return waiting.get()
