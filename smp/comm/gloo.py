"""Messages over torch's gloo, for jobs started by torchrun, and inside a single process.

Gloo's send and receive cannot be polled (`is_completed()` of such a work stays False), so threads wait for them and
`Request.test()` looks at an event. A message that is longer than the buffer ends the process inside gloo; therefore a
receive for the bytes is posted only when the header has said how many there are.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp.bootstrap import World
from smp.comm.transport import (
    HEADER_BYTES,
    Channel,
    Expected,
    Loopback,
    Request,
    Transport,
    encode_header,
    group_tag,
    pack,
    payload_size,
    receivable,
    sendable,
    unpack,
)
from smp.errors import CommError
from smp.failures import Monitor
from smp.groups import Group

_OBJECT_TAG = 2**30  # added to the tags of object messages
_FOREVER = timedelta(days=365)  # deadlines are the monitor's: a receive may be posted long before anyone waits for it


class _Threads:
    """Threads that run blocking work; as many as there is work at a time, since each may wait for any of the others."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = 0
        self._lock = threading.Lock()

    def run(self, work: Callable[[], None]) -> None:
        """Runs `work` in a thread."""
        with self._lock:
            start = self._idle == 0
            if not start:
                self._idle -= 1
        self._work.put(work)
        if start:
            threading.Thread(target=self._loop, name="smp-gloo", daemon=True).start()

    def _loop(self) -> None:
        while True:
            self._work.get()()
            with self._lock:
                self._idle += 1


class _Threaded(Request):
    """A message that a thread takes care of."""

    def __init__(self) -> None:
        self.done = False
        self.error: BaseException | None = None

    def test(self) -> bool:
        if self.error is not None:
            raise CommError(str(self.error)) from self.error
        return self.done


class _Receive(_Threaded):
    def __init__(self, buffer: Tensor, expected: Expected) -> None:
        super().__init__()
        self.buffer, self.memory = buffer, receivable(buffer)
        self.expected = expected
        self.present = False
        self._copied = False

    def test(self) -> bool:
        if not super().test():
            return False
        if not self._copied:
            self._copied = True
            if self.present and self.memory.data_ptr() != self.buffer.data_ptr():
                with torch.no_grad():
                    self.buffer.copy_(self.memory)
        return True

    def value(self) -> Tensor | None:
        assert self.done, "value() of a receive that is not complete"
        return self.buffer if self.present else None


class _ReceiveBytes(_Threaded):
    """Of an object: as many bytes as the header says."""

    def __init__(self) -> None:
        super().__init__()
        self.data = torch.empty(0, dtype=torch.uint8, device="cpu")

    def allocate(self, header: bytes) -> Tensor | None:
        self.data = torch.empty(payload_size(header), dtype=torch.uint8, device="cpu")
        return self.data if self.data.numel() else None


_Key = tuple[int, int, Channel]  # peer, tag, channel


class GlooTransport(Transport):
    """Messages over one gloo group per channel; those of a rank to itself over a queue."""

    def __init__(self, world: World, monitor: Monitor) -> None:
        super().__init__(world, monitor)
        self._threads = _Threads()
        self._lock = threading.Lock()
        self._sending = self._receiving = 0
        self._arriving: dict[_Key, deque[Callable[[], None]]] = {}
        self._loopback = Loopback()
        self._groups: dict[Channel, Any] = {}
        if world.size > 1:
            self._groups = {channel: dist.new_group(backend="gloo", timeout=_FOREVER) for channel in Channel}

    # Sending

    def _isend(self, tensor: Tensor | None, dest: int, tag: int, channel: Channel) -> Request:
        memory = sendable(tensor) if tensor is not None else torch.empty(0, device="cpu")
        return self._send(encode_header(tensor), _bytes_of(memory), dest, tag, channel)

    def _send_bytes(self, data: bytes, dest: int, tag: int, channel: Channel) -> None:
        payload = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        self._send(encode_header(payload), payload, dest, tag + _OBJECT_TAG, channel)

    def _send(self, header: bytearray, payload: Tensor, dest: int, tag: int, channel: Channel) -> Request:
        request = _Threaded()
        if dest == self.rank:
            self._loopback.put((tag, channel), (bytes(header), payload.clone()))
            request.done = True
            return request
        group = self._groups[channel]
        head = torch.frombuffer(header, dtype=torch.uint8)
        with self._lock:  # header and bytes of two messages must not interleave
            works = [group.send([head], dest, tag)]
            if payload.numel():
                works.append(group.send([payload], dest, tag))
            self._sending += 1

        def finish() -> None:
            try:
                for work in works:
                    work.wait()
                request.done = True
            except RuntimeError as error:
                request.error = error
            finally:
                _ = head, payload  # alive until here
                with self._lock:
                    self._sending -= 1

        self._threads.run(finish)
        return request

    # Receiving

    def _irecv(self, buffer: Tensor, source: int, tag: int, channel: Channel, optional: bool) -> Request:
        request = _Receive(buffer, Expected(buffer, source, tag, optional))
        target = _bytes_of(request.memory)

        def allocate(header: bytes) -> Tensor | None:
            request.present = request.expected.check(header)
            return target if request.present and target.numel() else None

        self._receive(request, allocate, source, tag, channel)
        return request

    def _recv_bytes(self, source: int, tag: int, channel: Channel, call: str) -> Any:
        request = self._irecv_bytes(source, tag, channel)
        self.monitor.wait(request.test, call, [source])
        return request.data.numpy()

    def _irecv_bytes(self, source: int, tag: int, channel: Channel) -> "_ReceiveBytes":
        request = _ReceiveBytes()
        self._receive(request, request.allocate, source, tag + _OBJECT_TAG, channel)
        return request

    def _receive(
        self, request: _Threaded, allocate: Callable[[bytes], Tensor | None], source: int, tag: int, channel: Channel
    ) -> None:
        """Receives a header, asks `allocate` where the bytes shall go, receives them."""

        def work() -> None:
            try:
                if source == self.rank:
                    self._from_self(allocate, tag, channel)
                else:
                    self._from_other(allocate, source, tag, channel)
                request.done = True
            except (RuntimeError, CommError) as error:
                request.error = error
            finally:
                self._next(key)

        key = (source, tag, channel)
        with self._lock:
            self._receiving += 1
            waiting = self._arriving.get(key)
            if waiting is not None:  # one at a time per key, or bytes could go to another header
                waiting.append(work)
                return
            self._arriving[key] = deque()
        self._threads.run(work)

    def _next(self, key: _Key) -> None:
        with self._lock:
            self._receiving -= 1
            waiting = self._arriving[key]
            if not waiting:
                del self._arriving[key]
                return
            work = waiting.popleft()
        self._threads.run(work)

    def _from_other(self, allocate: Callable[[bytes], Tensor | None], source: int, tag: int, channel: Channel) -> None:
        group = self._groups[channel]
        head = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
        group.recv([head], source, tag).wait()
        header = head.numpy().tobytes()
        try:
            target = allocate(header)
        except CommError:
            if payload_size(header):  # the sender shall not wait for ever, nor the next message be mistaken for this
                group.recv([torch.empty(payload_size(header), dtype=torch.uint8, device="cpu")], source, tag).wait()
            raise
        if target is not None:
            group.recv([target], source, tag).wait()

    def _from_self(self, allocate: Callable[[bytes], Tensor | None], tag: int, channel: Channel) -> None:
        header, payload = self._loopback.take((tag, channel))
        target = allocate(header)
        if target is not None:
            target.copy_(payload)

    # Groups

    def all_gather_object(self, obj: Any, group: Group, call: str | None = None) -> list[Any]:
        call = call or f"all_gather_object({group.kind.name})"
        data = pack(obj)
        return [unpack(part, self.world.device) for part in self._exchange(data, group, call)]

    def barrier(self, group: Group, call: str | None = None) -> None:
        self._exchange(b"", group, call or f"barrier({group.kind.name})")

    def _exchange(self, data: bytes, group: Group, call: str) -> list[Any]:
        """Every member sends to every other one, so that each knows whom it is waiting for."""
        tag = group_tag(group.ranks, 1)
        others = [rank for rank in group.ranks if rank != self.rank]
        for rank in others:
            self._send_bytes(data, rank, tag, Channel.CONTROL)
        requests = {rank: self._irecv_bytes(rank, tag, Channel.CONTROL) for rank in others}
        self.monitor.wait(lambda: all(request.test() for request in requests.values()), call, group.ranks)
        return [data if rank == self.rank else requests[rank].data.numpy() for rank in group.ranks]

    def progress(self) -> bool:
        return self._sending > 0

    def idle(self) -> bool:
        return self._sending == self._receiving == 0


def _bytes_of(tensor: Tensor) -> Tensor:
    """The same memory as a flat tensor of bytes."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return tensor.reshape(-1).view(torch.uint8)
