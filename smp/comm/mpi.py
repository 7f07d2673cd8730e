"""Messages over MPI: nonblocking requests that are polled, so that every wait has a deadline."""

import threading
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smp.bootstrap import World
from smp.comm.transport import (
    HEADER_BYTES,
    Channel,
    Expected,
    Request,
    Transport,
    encode_header,
    pack,
    payload_size,
    receivable,
    sendable,
    unpack,
)
from smp.errors import CommError
from smp.failures import Monitor
from smp.groups import Group

PART = 2**30  # bytes; MPI's counts end at 2**31 - 1


class _Send(Request):
    """A header and the bytes, both on their way."""

    __slots__ = ("_requests", "_buffers", "_lock")

    def __init__(self, requests: list[Any], buffers: tuple[Any, ...], lock: threading.Lock) -> None:
        self._requests = requests
        self._buffers = buffers
        self._lock = lock

    def test(self) -> bool:
        if self._requests:
            with self._lock:  # the monitor thread pushes sends too, and two threads may not test one request
                return self.advance()
        return True

    def advance(self) -> bool:
        """test(), by a caller that holds the lock."""
        while self._requests:
            if not self._requests[-1].Test():
                return False
            self._requests.pop()
        self._buffers = ()
        return True


class _Receive(Request):
    """Receives a header, compares it with what is expected, and only then lets the bytes come: MPI writes beyond the
    end of a buffer that is shorter than a large message. A few bytes come with the header.

    Receives of one source, tag and channel stand in a queue, so that bytes follow their own header whichever of the
    receives is tested first:

        HEADER --head of the queue, header here--> BYTES --all here--> DONE
    """

    def __init__(self, transport: "MpiTransport", buffer: Tensor, expected: Expected, channel: Channel) -> None:
        self._buffer, self._memory = buffer, receivable(buffer)
        self._expected = expected
        self._transport = transport
        headers, self._payloads, _ = transport.comms[channel]
        self._key = (expected.source, expected.tag, channel)
        self._header = bytearray(HEADER_BYTES + INLINE)
        self.header_request = headers.Irecv(self._header, expected.source, expected.tag)
        transport.waiting.setdefault(self._key, deque()).append(self)
        self._parts: list[Any] = []
        self._bytes_may_come = False
        self._present = False
        self._error: CommError | None = None
        self._done = False

    def test(self) -> bool:
        if self._done:
            return True
        if not self._bytes_may_come:
            self._transport.take_headers(self._key)
            if not self._bytes_may_come:
                return False
        while self._parts:
            if not self._parts[-1].Test():
                return False
            self._parts.pop()
        self._transport.arriving.discard(self)
        if self._error is not None:
            raise self._error
        self._done = True
        if self._present and self._memory.data_ptr() != self._buffer.data_ptr():
            with torch.no_grad():
                self._buffer.copy_(self._memory)
        return True

    def accept_header(self) -> None:
        """The header has come: say where its bytes shall go."""
        header = bytes(self._header[:HEADER_BYTES])
        try:
            self._present = self._expected.check(header)
            memory = self._memory if self._present else torch.empty(0, device="cpu")
        except CommError as error:
            self._error = error
            # So that the sender is done with it.
            memory = torch.empty(payload_size(header), dtype=torch.uint8, device="cpu")
        self._memory = memory
        source, tag = self._expected.source, self._expected.tag
        nbytes = payload_size(header)
        if nbytes <= INLINE:
            if self._present and nbytes:
                data = memoryview(self._header)[HEADER_BYTES : HEADER_BYTES + nbytes]
                memoryview(memory_of(self._transport.mpi, memory)[0][0])[:] = data
        else:
            parts = memory_of(self._transport.mpi, memory)
            self._parts = [self._payloads.Irecv(part, source, tag) for part in parts]
        self._bytes_may_come = True
        self._transport.arriving.add(self)

    def value(self) -> Tensor | None:
        assert self._done, "value() of a receive that is not complete"
        return self._buffer if self._present else None


def memory_of(mpi: Any, tensor: Tensor) -> list[Any]:
    """The bytes of a contiguous host tensor as mpi4py takes them, in parts that MPI can count. At least one part."""
    address, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    if nbytes <= PART:
        return [[mpi.buffer.fromaddress(address, nbytes), mpi.BYTE]]
    return [
        [mpi.buffer.fromaddress(address + start, min(PART, nbytes - start)), mpi.BYTE]
        for start in range(0, nbytes, PART)
    ]


INLINE = 1024  # bytes of a tensor that travel with their header
_Key = tuple[int, int, Channel]  # source, tag, channel


class MpiTransport(Transport):
    """Messages over mpi4py. Each channel has three communicators: headers, bytes of tensors, objects."""

    def __init__(self, world: World, monitor: Monitor) -> None:
        super().__init__(world, monitor)
        self.mpi = world.mpi
        everyone = self.mpi.COMM_WORLD
        self._any_thread = self.mpi.Query_thread() == self.mpi.THREAD_MULTIPLE  # the user may have initialised MPI
        self.comms = {channel: tuple(everyone.Dup() for _ in range(3)) for channel in Channel}
        self._group_comms: dict[tuple[int, ...], tuple[Any, Any]] = {}
        self._sends: list[_Send] = []
        # Receives live here until they are complete, whoever drops them: first those whose header has not come.
        self.waiting: dict[_Key, deque[_Receive]] = {}
        self.arriving: set[_Receive] = set()
        self._lock = threading.Lock()
        self._headers_lock = threading.Lock()

    def _isend(self, tensor: Tensor | None, dest: int, tag: int, channel: Channel) -> Request:
        headers, payloads, _ = self.comms[channel]
        header = encode_header(tensor)
        memory = sendable(tensor) if tensor is not None else torch.empty(0, device="cpu")
        parts = memory_of(self.mpi, memory)
        requests = []
        if memory.nbytes <= INLINE:
            header += bytes(parts[0][0])
        else:
            requests = [payloads.Isend(part, dest, tag) for part in parts]
        requests.append(headers.Isend(header, dest, tag))
        return self._keep(_Send(requests, (header, memory), self._lock))

    def _keep(self, send: _Send) -> _Send:
        """Buffers of a send live until it is complete, whoever drops the request."""
        if not send.test():
            with self._lock:
                self._sends.append(send)
        return send

    def _irecv(self, buffer: Tensor, source: int, tag: int, channel: Channel, optional: bool) -> Request:
        return _Receive(self, buffer, Expected(buffer, source, tag, optional), channel)

    def take_headers(self, *keys: _Key) -> None:
        """Works off the queues of those receives as far as headers have come."""
        with self._headers_lock:
            for key in keys:
                queue = self.waiting.get(key)
                while queue and queue[0].header_request.Test():
                    queue.popleft().accept_header()
                    if not queue:
                        del self.waiting[key]

    def advance(self) -> None:
        if self.waiting and self._may_call():
            self.take_headers(*self.waiting)

    def _send_bytes(self, data: bytes, dest: int, tag: int, channel: Channel) -> None:
        """In parts; the first one that is shorter than PART is the last."""
        comm, view = self.comms[channel][2], memoryview(data)
        parts = [view[start : start + PART] for start in range(0, len(data) + 1, PART)]
        self._keep(_Send([comm.Isend([part, self.mpi.BYTE], dest, tag) for part in parts], (data,), self._lock))

    def _recv_bytes(self, source: int, tag: int, channel: Channel, call: str) -> Any:
        data = part = self._recv_part(source, tag, channel, call)
        while len(part) == PART:
            part = self._recv_part(source, tag, channel, call)
            data += part
        return data

    def _recv_part(self, source: int, tag: int, channel: Channel, call: str) -> bytearray:
        comm = self.comms[channel][2]
        status = self.mpi.Status()
        found: list[Any] = []

        def arrived() -> bool:
            message = comm.Improbe(source, tag, status)
            if message is not None:
                found.append(message)
            return message is not None

        self.monitor.wait(arrived, call, [source])
        data = bytearray(status.Get_count(self.mpi.BYTE))
        request = found[0].Irecv([data, self.mpi.BYTE])
        self.monitor.wait(request.Test, call, [source])
        return data

    def prepare(self, groups: Sequence[Group]) -> None:
        everyone = self.mpi.COMM_WORLD
        for group in groups:
            if group.ranks not in self._group_comms:
                members = everyone.Get_group().Incl(list(group.ranks))
                pair = (everyone.Create_group(members, 1), everyone.Create_group(members, 2))
                self._group_comms[group.ranks] = pair

    def _comm_pair(self, group: Group) -> tuple[Any, Any]:
        """Communicators of a group: for tensors, and for objects and barriers."""
        return self._group_comms[group.ranks]

    def comm(self, group: Group) -> Any:
        return self._comm_pair(group)[0]

    def all_gather_object(self, obj: Any, group: Group, call: str | None = None) -> list[Any]:
        if group.size == 1:
            return [unpack(pack(obj), self.world.device)]
        call = call or f"all_gather_object({group.kind.name})"
        comm = self._comm_pair(group)[1]
        data = pack(obj)
        mine, counts = array("q", [len(data)]), array("q", [0] * group.size)
        self._finish(comm.Iallgather(mine, counts), call, group.ranks)
        sizes = counts.tolist()
        if sum(sizes) >= 2**31:
            raise CommError(f"{call}: the objects take {sum(sizes)} bytes together; more than 2 GiB cannot be gathered")
        everything = bytearray(sum(sizes))
        receive = [everything, sizes, _offsets(sizes), self.mpi.BYTE]
        self._finish(comm.Iallgatherv([data, self.mpi.BYTE], receive), call, group.ranks)
        view = memoryview(everything)
        return [unpack(view[start : start + n], self.world.device) for start, n in zip(_offsets(sizes), sizes)]

    def barrier(self, group: Group, call: str | None = None) -> None:
        if group.size > 1:
            request = self._comm_pair(group)[1].Ibarrier()
            self._finish(request, call or f"barrier({group.kind.name})", group.ranks)

    def _finish(self, request: Any, call: str, ranks: Sequence[int]) -> None:
        self.monitor.wait(request.Test, call, ranks)

    def _may_call(self) -> bool:
        """The monitor's thread may use MPI only where it was initialised for several threads at a time."""
        return self._any_thread or threading.current_thread() is not self.monitor.thread

    def progress(self) -> bool:
        if not self._sends or not self._may_call():
            return bool(self._sends)
        with self._lock:
            self._sends = [send for send in self._sends if not send.advance()]
            return bool(self._sends)

    def idle(self) -> bool:
        return not (self.progress() or self.arriving or self.waiting)

    def unexpected(self) -> bool:
        anyone, any_tag = self.mpi.ANY_SOURCE, self.mpi.ANY_TAG
        return any(comm.Iprobe(anyone, any_tag) for comms in self.comms.values() for comm in comms)


def _offsets(sizes: list[int]) -> list[int]:
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += size
    return offsets
