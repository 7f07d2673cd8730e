"""Messages over MPI: nonblocking requests that are polled, so that every wait has a deadline."""

import threading
from collections import defaultdict, deque
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
    end of a buffer that is shorter than a large message.

    Receives of one source, tag and channel stand in a queue, so that bytes follow their own header whichever of the
    receives is tested first:

        HEADER --head of the queue, header here--> BYTES --all here--> DONE
    """

    def __init__(self, buffer: Tensor, expected: Expected, mpi: Any, payloads: Any, queue: "deque[_Receive]") -> None:
        self._buffer, self._memory = buffer, receivable(buffer)
        self._expected = expected
        self._mpi, self._payloads = mpi, payloads
        self._queue = queue
        self.header = bytearray(HEADER_BYTES)
        self.header_request: Any = None
        self._payload_request: Any = None
        self._present = False
        self._error: CommError | None = None
        self._done = False

    def test(self) -> bool:
        if self._done:
            return True
        if self._payload_request is None and not self._let_bytes_come():
            return False
        if not self._payload_request.Test():
            return False
        if self._error is not None:
            raise self._error
        self._done = True
        if self._present and self._memory.data_ptr() != self._buffer.data_ptr():
            with torch.no_grad():
                self._buffer.copy_(self._memory)
        return True

    def _let_bytes_come(self) -> bool:
        """Works off the queue as far as headers have come; whether this receive is among them."""
        while self._payload_request is None:
            head = self._queue[0]
            if not head.header_request.Test():
                return False
            head._accept_header()
            self._queue.popleft()
        return True

    def _accept_header(self) -> None:
        try:
            self._present = self._expected.check(self.header)
            memory = self._memory if self._present else torch.empty(0)
        except CommError as error:
            self._error = error
            memory = torch.empty(payload_size(self.header), dtype=torch.uint8)  # so that the sender is done with it
        self._memory = memory
        self._payload_request = self._payloads.Irecv(
            memory_of(self._mpi, memory), self._expected.source, self._expected.tag
        )

    def value(self) -> Tensor | None:
        assert self._done, "value() of a receive that is not complete"
        return self._buffer if self._present else None


def memory_of(mpi: Any, tensor: Tensor) -> Any:
    """The bytes of a contiguous host tensor as mpi4py takes them."""
    return [mpi.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size()), mpi.BYTE]


class MpiTransport(Transport):
    """Messages over mpi4py. Each channel has three communicators: headers, bytes of tensors, objects."""

    def __init__(self, world: World, monitor: Monitor) -> None:
        super().__init__(world, monitor)
        self._mpi = world.mpi
        everyone = self._mpi.COMM_WORLD
        self._any_thread = self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE  # the user may have initialised MPI
        self._comms = {channel: tuple(everyone.Dup() for _ in range(3)) for channel in Channel}
        self._group_comms: dict[tuple[int, ...], tuple[Any, Any]] = {}
        self._sends: list[_Send] = []
        self._receives: defaultdict[tuple[int, int, Channel], deque[_Receive]] = defaultdict(deque)
        self._lock = threading.Lock()

    def _isend(self, tensor: Tensor | None, dest: int, tag: int, channel: Channel) -> Request:
        headers, payloads, _ = self._comms[channel]
        header = encode_header(tensor)
        memory = sendable(tensor) if tensor is not None else torch.empty(0)
        requests = [
            payloads.Isend(memory_of(self._mpi, memory), dest, tag),
            headers.Isend(header, dest, tag),
        ]
        return self._keep(_Send(requests, (header, memory), self._lock))

    def _keep(self, send: _Send) -> _Send:
        """Buffers of a send live until it is complete, whoever drops the request."""
        if not send.test():
            with self._lock:
                self._sends.append(send)
        return send

    def _irecv(self, buffer: Tensor, source: int, tag: int, channel: Channel, optional: bool) -> Request:
        headers, payloads, _ = self._comms[channel]
        queue = self._receives[source, tag, channel]
        receive = _Receive(buffer, Expected(buffer, source, tag, optional), self._mpi, payloads, queue)
        receive.header_request = headers.Irecv(receive.header, source, tag)
        queue.append(receive)
        return receive

    def _send_bytes(self, data: bytes, dest: int, tag: int, channel: Channel) -> None:
        comm = self._comms[channel][2]
        self._keep(_Send([comm.Isend([data, self._mpi.BYTE], dest, tag)], (data,), self._lock))

    def _recv_bytes(self, source: int, tag: int, channel: Channel, call: str) -> Any:
        comm = self._comms[channel][2]
        status = self._mpi.Status()
        found: list[Any] = []

        def arrived() -> bool:
            message = comm.Improbe(source, tag, status)
            if message is not None:
                found.append(message)
            return message is not None

        self.monitor.wait(arrived, call, [source])
        data = bytearray(status.Get_count(self._mpi.BYTE))
        request = found[0].Irecv([data, self._mpi.BYTE])
        self.monitor.wait(request.Test, call, [source])
        return data

    def prepare(self, groups: Sequence[Group]) -> None:
        everyone = self._mpi.COMM_WORLD
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
        mine, counts = torch.tensor([len(data)]), torch.empty(group.size, dtype=torch.int64)
        self._finish(comm.Iallgather(mine.numpy(), counts.numpy()), call, group.ranks)
        sizes = counts.tolist()
        if sum(sizes) >= 2**31:
            raise CommError(f"{call}: the objects take {sum(sizes)} bytes together; more than 2 GiB cannot be gathered")
        everything = bytearray(sum(sizes))
        receive = [everything, sizes, _offsets(sizes), self._mpi.BYTE]
        self._finish(comm.Iallgatherv([data, self._mpi.BYTE], receive), call, group.ranks)
        view = memoryview(everything)
        return [unpack(view[start : start + n], self.world.device) for start, n in zip(_offsets(sizes), sizes)]

    def barrier(self, group: Group, call: str | None = None) -> None:
        if group.size > 1:
            request = self._comm_pair(group)[1].Ibarrier()
            self._finish(request, call or f"barrier({group.kind.name})", group.ranks)

    def _finish(self, request: Any, call: str, ranks: Sequence[int]) -> None:
        self.monitor.wait(request.Test, call, ranks)

    def progress(self) -> bool:
        if not self._sends or not (self._any_thread or threading.current_thread() is threading.main_thread()):
            return bool(self._sends)
        with self._lock:
            self._sends = [send for send in self._sends if not send.advance()]
            return bool(self._sends)

    def idle(self) -> bool:
        return not (self.progress() or any(self._receives.values()))

    def unexpected(self) -> bool:
        anyone, any_tag = self._mpi.ANY_SOURCE, self._mpi.ANY_TAG
        return any(comm.Iprobe(anyone, any_tag) for comms in self._comms.values() for comm in comms)


def _offsets(sizes: list[int]) -> list[int]:
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += size
    return offsets
