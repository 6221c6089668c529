"""A TCP proxy that can fail: stands before a coordinator or a worker and breaks what passes.

Invariants: every byte that is passed on is passed once and in order; one thread, joined by `close`;
its methods are called from any other thread and have taken effect when they return.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

CHUNK_BYTES = 64 << 10
_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends a reset."""

To = Literal["client", "server"]


class Proxy:
    """Listens at `endpoint` and connects each client to `target` ("host:port" both)."""

    def __init__(self, target: str, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.target = target
        self.accepted = 0
        self.cuts = 0
        """Of `cut_after`, those that have come."""
        self.passed = {"client": 0, "server": 0}
        """Bytes, by the end they were for."""
        self._delay_s = 0.0
        self._refusing = False
        self._at: tuple[To, int, Callable[[bytes], bytes]] | None = None
        self._pairs: set[_Pair] = set()
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()
        listening = asyncio.start_server(self._accept, host, port)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result(10)
        port = self._server.sockets[0].getsockname()[1]
        self.endpoint = f"{host}:{port}"

    @property
    def connections(self) -> int:
        return len(self._pairs)

    # ---- faults ---------------------------------------------------------------------------------

    def delay(self, seconds: float) -> None:
        """Each chunk, both ways; 0 ends it."""
        self._do(lambda: setattr(self, "_delay_s", seconds))

    def freeze(self) -> None:
        """A cable pulled: nothing passes, nothing is closed, new connections are stuck too."""
        self._do(self._flowing.clear)

    def thaw(self) -> None:
        """What was sent meanwhile passes."""
        self._do(self._flowing.set)

    def drop(self) -> None:
        """Half-open for good: what present connections send vanishes, and their ends are not told;
        new ones work."""

        def forget() -> None:
            for pair in self._pairs:
                pair.dropped = True

        self._do(forget)

    def reset(self) -> None:
        """RST to both ends of all connections; new ones work."""
        self._do(self._reset)

    def refuse(self, refusing: bool = True) -> None:
        """Whether new connections are reset at once."""
        self._do(lambda: setattr(self, "_refusing", refusing))

    def cut_after(self, num_bytes: int, *, to: To = "client") -> None:
        """Once: as `reset`, when so many more bytes have passed to that end."""

        def cut(data: bytes) -> bytes:
            self.cuts += 1
            self._loop.call_soon(self._reset)
            return b""

        self._do(lambda: setattr(self, "_at", (to, self.passed[to] + num_bytes, cut)))

    def flip_after(self, num_bytes: int, *, to: To = "client") -> None:
        """Once: the byte after so many more has every bit wrong."""

        def flip(data: bytes) -> bytes:
            return bytes([data[0] ^ 0xFF]) + data[1:]

        self._do(lambda: setattr(self, "_at", (to, self.passed[to] + num_bytes, flip)))

    def heal(self) -> None:
        """No fault any more, but for connections that were dropped: those are reset."""

        def well() -> None:
            self._delay_s, self._refusing, self._at = 0.0, False, None
            for pair in list(self._pairs):
                if pair.dropped:
                    pair.reset()
            self._flowing.set()

        self._do(well)

    # ---- life -----------------------------------------------------------------------------------

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _do(self, work: Callable[[], object]) -> None:
        async def run() -> None:
            work()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def _reset(self) -> None:
        for pair in list(self._pairs):
            pair.reset()

    async def _end(self) -> None:
        self._server.close()
        self._reset()
        while self._pairs:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)

    # ---- one connection -------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        pair = _Pair(asyncio.current_task(), writer)
        self._pairs.add(pair)
        try:
            if self._refusing:
                pair.abort()
                return
            await self._flowing.wait()
            host, _, port = self.target.rpartition(":")
            there, to_server = await asyncio.open_connection(host.strip("[]"), int(port))
            pair.writers.append(to_server)
            pumps = [
                asyncio.ensure_future(self._pump(pair, reader, to_server, "server")),
                asyncio.ensure_future(self._pump(pair, there, writer, "client")),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pair.abort()
        finally:
            for end in pair.writers:
                end.close()
            self._pairs.discard(pair)

    async def _pump(
        self, pair: _Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: To
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if pair.dropped:
                    continue
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await self._flowing.wait()
                if pair.dropped:
                    continue
                writer.write(self._changed(data, to))
                self.passed[to] += len(data)
                await writer.drain()
            if pair.dropped:
                await asyncio.Event().wait()  # the other end is not told

    def _changed(self, data: bytes, to: To) -> bytes:
        if self._at is None or self._at[0] != to:
            return data
        before = self._at[1] - self.passed[to]
        if before >= len(data):
            return data
        change, self._at = self._at[2], None
        return data[:before] + change(data[before:])


class _Pair:
    """Both ends of a client's connection."""

    def __init__(self, task: asyncio.Task[None] | None, to_client: asyncio.StreamWriter) -> None:
        self._task = task
        self.writers = [to_client]
        self.dropped = False

    def reset(self) -> None:
        self.abort()
        if self._task is not None:
            self._task.cancel()

    def abort(self) -> None:
        for writer in self.writers:
            sock = writer.get_extra_info("socket")
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            writer.transport.abort()
