"""The worker's end of the shared-memory path of its host (rpc.local), in its event loop.

Invariants:
- one request of a connection is worked on at a time; a connection that says anything but a request,
  or says it too early, is closed; one that goes away takes its request with it;
- a failure is answered as gRPC would answer it (rpc.failures);
- nothing waits for a reader: an answer that the socket does not take at once closes it;
- large packs are copied into their segment by another thread, one at a time, so that the event loop
  answers others meanwhile;
- connections are bounded, and so is the memory of their segments together: past that, and after a
  time without use, a segment is given up, and its connection gets a new one when it asks again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from typing import Protocol

from dataservice.errors import ServiceUnavailable, WireError
from dataservice.rpc.local import (
    MAX_CONNECTIONS,
    MAX_MESSAGE_BYTES,
    MAX_SEGMENT_BYTES,
    Answer,
    Segment,
    address_of,
    failure,
    let_in,
    new_socket,
    roomy,
)
from dataservice.wire.encoded import EncodedPack
from dataservice.wire.messages import StreamPack
from dataservice.wire.schema import decode, encode

__all__ = ["LocalServer", "PackSource", "start_local_server"]

_LOG = logging.getLogger(__name__)

BACKLOG = 16
PAUSE_S = 1.0
"""Before connections are taken again when the process had no descriptor for one."""
CANCEL_S = 5.0
"""Longest wait for a cancelled request."""
THREAD_BYTES = 4 << 20
"""Packs from here on are copied by another thread: the first copy into a segment takes a
millisecond a MB, and the way to a thread and back a tenth of one."""
SPARE_PACKS = 64
"""After so many packs in a row that need less than a quarter of a segment, it is too large."""


class PackSource(Protocol):
    """What a worker answers."""

    async def whole_pack(self, request: StreamPack) -> EncodedPack:
        """Cancelled when the client goes away."""
        ...

    def taken(self, request: StreamPack, pack: EncodedPack) -> None:
        """The client has been given all of it."""
        ...


def start_local_server(data: PackSource, endpoint: str) -> LocalServer | None:
    """Listens for the clients of this host that know the worker by `endpoint`; None where that is
    not to be had, which is no loss but of speed. In the event loop that is to serve."""
    try:
        listener = new_socket()
        try:
            listener.setblocking(False)
            listener.bind(address_of(endpoint))
            listener.listen(BACKLOG)
            Segment(roomy(1)).close()
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        _LOG.info("%s serves no packs through shared memory: %s", endpoint, error)
        return None
    return LocalServer(data, listener)


class LocalServer:
    """Made by `start_local_server`; for one event loop."""

    def __init__(self, data: PackSource, listener: socket.socket) -> None:
        self.data = data
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._connections: set[_Connection] = set()
        self.stopped = False
        self.copying = asyncio.Lock()
        self._listen()

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def segment_bytes(self) -> int:
        return sum(connection.segment_bytes for connection in self._connections)

    def close_idle(self, idle_s: float) -> None:
        """Gives up the segments that nobody has asked for since."""
        for connection in self._connections:
            if time.monotonic() - connection.used_at >= idle_s:
                connection.drop_segment()

    def make_room(self, size_bytes: int) -> None:
        """Gives up segments, the longest unused first, until one of `size_bytes` is in bounds."""
        for connection in sorted(self._connections, key=lambda one: one.used_at):
            if self.segment_bytes + size_bytes <= MAX_SEGMENT_BYTES:
                break
            connection.drop_segment()

    async def stop(self, grace_s: float) -> None:
        """Takes no more connections, gives requests `grace_s` to end, ends the rest; idempotent."""
        if not self.stopped:
            self.stopped = True
            self._loop.remove_reader(self._listener)
            self._listener.close()
        tasks = [one.task for one in self._connections if one.task is not None]
        for connection in list(self._connections):
            if connection.task is None:
                connection.close()
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for connection in list(self._connections):
            connection.close()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_S)

    def forget(self, connection: _Connection) -> None:
        self._connections.discard(connection)

    def _listen(self) -> None:
        if not self.stopped:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            _LOG.warning("no connection through shared memory for %g s: %s", PAUSE_S, error)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(PAUSE_S, self._listen)
            return
        if let_in(sock, is_full=len(self._connections) >= MAX_CONNECTIONS):
            self._connections.add(_Connection(self, self._loop, sock))


class _Connection:
    """Owns its socket, its segment and the task of the request that is worked on."""

    def __init__(
        self, server: LocalServer, loop: asyncio.AbstractEventLoop, sock: socket.socket
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self.used_at = time.monotonic()
        self._server = server
        self._loop = loop
        self._socket = sock
        self._segment: Segment | None = None
        self._spare_packs = 0
        self._closed = False
        loop.add_reader(sock, self._readable)

    @property
    def segment_bytes(self) -> int:
        return 0 if self._segment is None else self._segment.size_bytes

    def drop_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()

    def close(self) -> None:
        """Idempotent; the task of a request ends a moment later."""
        if self._closed:
            return
        self._closed = True
        self._server.forget(self)
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self.drop_segment()
        if self.task is not None:
            self.task.cancel()

    def _readable(self) -> None:
        try:
            data = self._socket.recv(MAX_MESSAGE_BYTES + 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data or (self._server.stopped and self.task is None):
            self.close()
            return
        try:
            if self.task is not None:
                raise WireError("StreamPack: before the answer to the last one")
            request = decode(StreamPack, data, max_bytes=MAX_MESSAGE_BYTES)
        except WireError as error:
            _LOG.warning("a client on this host is turned away: %s", error)
            self.close()
            return
        self.task = self._loop.create_task(self._answer(request))

    async def _answer(self, request: StreamPack) -> None:
        try:
            pack = await self._server.data.whole_pack(request)
            async with self._server.copying:
                answer, fds = await self._placed(pack)
                self.task = None
                taken = self._send(answer, fds)
        except asyncio.CancelledError:
            self.close()
            raise
        except Exception as error:
            self.task = None
            self._send(failure(error), ())
            return
        if taken:
            self._server.data.taken(request, pack)

    def _send(self, answer: Answer, fds: Sequence[int]) -> bool:
        """False, and the connection closed, where the client does not take it."""
        try:
            socket.send_fds(self._socket, [encode(answer)], fds)
        except OSError as error:
            _LOG.info("a client on this host went away: %s", error)
            self.close()
            return False
        return True

    async def _placed(self, pack: EncodedPack) -> tuple[Answer, Sequence[int]]:
        """The pack is in the segment then; the descriptors that the client has not got yet."""
        size_bytes, fds = pack.segment_bytes, []
        self.used_at = time.monotonic()
        segment = self._segment
        if segment is None or not self._fits(segment, size_bytes):
            self.drop_segment()
            self._server.make_room(roomy(size_bytes))
            try:
                segment = self._segment = Segment(roomy(size_bytes))
            except OSError as error:
                raise ServiceUnavailable(f"no shared memory for a pack: {error}") from error
            fds.append(segment.fd)
        try:
            if size_bytes < THREAD_BYTES:
                segment.write(pack)
            else:
                await asyncio.to_thread(segment.write, pack)
        except BaseException:
            self.drop_segment()  # whose descriptor the client may not have
            raise
        return Answer(size_bytes=size_bytes), fds

    def _fits(self, segment: Segment, size_bytes: int) -> bool:
        """And is not far too large for all that came lately."""
        spare = segment.size_bytes > 4 * roomy(size_bytes)
        self._spare_packs = self._spare_packs + 1 if spare else 0
        if self._spare_packs < SPARE_PACKS:
            return segment.size_bytes >= size_bytes
        self._spare_packs = 0
        return False
