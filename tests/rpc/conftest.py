"""Real servers on loopback, each in an event loop of its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from rpc.loop_thread import LoopThread

from dataservice.rpc.server import RunningServer, start_server
from dataservice.wire.messages import COORDINATOR_METHODS, StreamPack


class Coordinator:
    """Answers every method by `answer(request)`, which may return a message or a coroutine."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.answer = answer
        self.cancelled = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if name.replace("_", "") not in {method.lower() for method in COORDINATOR_METHODS}:
            raise AttributeError(name)
        return self._call

    async def _call(self, request: Any) -> Any:
        try:
            response = self.answer(request)
            return await response if asyncio.iscoroutine(response) else response
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


class Data:
    """Streams what `frames(request)` yields; counts the frames and notes its end."""

    def __init__(self, frames: Callable[[StreamPack], Any]) -> None:
        self.frames = frames
        self.produced = 0
        self.closed = threading.Event()

    async def stream_pack(self, request: StreamPack) -> AsyncIterator[bytes]:
        try:
            for frame in self.frames(request):
                if asyncio.iscoroutine(frame):
                    await frame
                else:
                    self.produced += 1
                    yield frame
        finally:
            self.closed.set()


class ServerThread(LoopThread):
    """Owner of a server and of the thread its event loop runs in."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.server: RunningServer | None = None
        try:
            self.server = self.run(start_server(**options))
        except BaseException:
            self.close()
            raise
        self.endpoint = self.server.endpoint

    def close(self) -> None:
        if self.server is not None:
            self.run(self.server.stop(0))
        super().close()


@pytest.fixture
def serve() -> Iterator[Callable[..., ServerThread]]:
    """serve(coordinator=answer function, data=frames function, ...) -> a running server."""
    servers = []

    def start(
        *,
        coordinator: Callable[[Any], Any] | Coordinator | None = None,
        data: Callable[[StreamPack], Any] | Data | None = None,
        **options: Any,
    ) -> ServerThread:
        if coordinator is not None and not isinstance(coordinator, Coordinator):
            coordinator = Coordinator(coordinator)
        if data is not None and not isinstance(data, Data):
            data = Data(data)
        server = ServerThread(coordinator=coordinator, data=data, **options)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def coordinator_of() -> type[Coordinator]:
    return Coordinator


@pytest.fixture
def data_of() -> type[Data]:
    return Data
