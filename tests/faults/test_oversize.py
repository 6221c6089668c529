"""Batches larger than any message, and messages one byte over their limit."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from support.local_service import LoopThread
from support.proof import nothing_leaks

from dataservice.errors import DamagedMessage, DataServiceError, WireError
from dataservice.rpc.channel import DATA_OPTIONS, MAX_REQUEST_BYTES
from dataservice.rpc.client import CoordinatorClient, DataClient
from dataservice.rpc.sealing import CRC_BYTES
from dataservice.rpc.server import RunningServer, start_server
from dataservice.wire.codec import FRAME_PREFIX, MAX_FRAME_BYTES, EncodedPack
from dataservice.wire.layout import MAX_PACK_BYTES
from dataservice.wire.messages import HolesDecided, ReportHoles, StreamPack
from dataservice.wire.schema import encode
from trainer_client.fetching import WorkerLink

MIB = 1 << 20
BATCH = 64 * MIB


class Data:
    """Streams `frames`."""

    def __init__(self, frames: Any) -> None:
        self.frames = frames

    async def stream_pack(self, request: StreamPack) -> AsyncIterator[bytes]:
        for frame in self.frames():
            yield frame


class Serving:
    """One worker's server in a thread."""

    def __init__(self, **services: Any) -> None:
        self._services = services

    def __enter__(self) -> str:
        self._thread = LoopThread("oversize")
        self._server: RunningServer = self._thread.run(start_server(**self._services))
        return self._server.endpoint

    def __exit__(self, *_: object) -> None:
        self._thread.run(self._server.stop(0))
        self._thread.close()
        del self._server
        gc.collect()  # an error's traceback keeps it, in a circle


def request_of(pack_id: str) -> StreamPack:
    return StreamPack(session=1, pack_id=pack_id, dp_rank=0, wait_s=1.0)


def test_a_batch_of_64_mib_in_frames_of_4_mib() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, BATCH, np.uint8)
    pack = EncodedPack(
        {"pixel_values": pixels},
        {"pack_id": "large"},
        frame_bytes=MAX_FRAME_BYTES - FRAME_PREFIX.size,
    )
    sizes = [len(frame) for frame in pack.frames()]
    assert max(sizes) == MAX_FRAME_BYTES == 4 * MIB and len(sizes) == 18  # the header apart
    with nothing_leaks(), Serving(data=Data(pack.frames)) as endpoint:
        link = WorkerLink(endpoint, local=False)
        (arrays, meta), _ = link.fetch(request_of("large"), timeout_s=60.0)
        link.close()
    assert np.array_equal(arrays["pixel_values"], pixels) and meta == {"pack_id": "large"}


def test_frames_over_their_limit_are_not_made() -> None:
    pixels = np.zeros(8 * MIB, np.uint8)
    limit = MAX_FRAME_BYTES - FRAME_PREFIX.size
    with pytest.raises(ValueError, match=rf"frame_bytes is {limit + 1}, must be in 1\.\.{limit}"):
        EncodedPack({"pixel_values": pixels}, {}, frame_bytes=limit + 1)
    with pytest.raises(WireError, match=r"pack header: .* more than 4194304"):
        EncodedPack({}, {"text": "x" * MAX_FRAME_BYTES})


def test_a_pack_over_its_limit_is_not_made() -> None:
    """Said before anything is read of its arrays, whose pages are not there yet."""
    before = psutil.Process().memory_info().rss
    pixels = np.zeros(MAX_PACK_BYTES + 1, np.uint8)
    with pytest.raises(WireError, match=f"over {MAX_PACK_BYTES} bytes"):
        EncodedPack({"pixel_values": pixels}, {})
    assert psutil.Process().memory_info().rss - before < 64 * MIB


def test_a_frame_over_its_limit_is_refused_at_both_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "dataservice.rpc.failures")  # a traceback keeps the server

    def one_too_long() -> Any:
        yield b"x" * (MAX_FRAME_BYTES + 1)

    with nothing_leaks(), Serving(data=Data(one_too_long)) as endpoint:
        with DataClient(endpoint) as client, client.stream_pack(request_of("p"), 30.0) as frames:
            with pytest.raises(DataServiceError, match="StreamPack failed with ValueError"):
                next(frames)
    # the client's own limit, before a server that has none
    with nothing_leaks():
        thread = LoopThread("no limit")
        endpoint, server = thread.run(_without_limits(b"x" * (MAX_FRAME_BYTES + 1)))
        with DataClient(endpoint) as client, client.stream_pack(request_of("p"), 30.0) as frames:
            with pytest.raises(DamagedMessage, match=r"larger than max \(4194305 vs\. 4194304\)"):
                next(frames)
        thread.run(server.stop(0))
        thread.close()
        del server
    assert dict(DATA_OPTIONS)["grpc.max_receive_message_length"] == MAX_FRAME_BYTES


async def _without_limits(frame: bytes) -> tuple[str, Any]:
    async def handle(data: bytes, context: Any) -> None:
        await context.write(frame)

    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    handler = grpc.unary_stream_rpc_method_handler(handle)
    handlers = grpc.method_handlers_generic_handler("dataservice.v1.Data", {"StreamPack": handler})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return f"127.0.0.1:{port}", server


class Coordinator:
    def __init__(self) -> None:
        self.seen: list[ReportHoles] = []

    def __getattr__(self, name: str) -> Any:
        return self._other

    async def _other(self, request: Any) -> Any:
        await asyncio.sleep(0)
        raise AssertionError(request)

    async def report_holes(self, request: ReportHoles) -> HolesDecided:
        self.seen.append(request)
        return HolesDecided(holes={})


def holes_of(size_bytes: int) -> ReportHoles:
    """A request of so many bytes on the wire."""
    some = ReportHoles(worker_id="w", lease=1, pack_id="p", holes={"k": "x" * 65536})
    text = "x" * (65536 + size_bytes - CRC_BYTES - len(encode(some)))
    return ReportHoles(worker_id="w", lease=1, pack_id="p", holes={"k": text})


def test_a_request_of_the_limit_is_sent_and_one_byte_more_is_not() -> None:
    coordinator = Coordinator()
    with nothing_leaks(), Serving(coordinator=coordinator) as endpoint:
        with CoordinatorClient(endpoint) as client:
            client.call(holes_of(MAX_REQUEST_BYTES), 30.0)
            with pytest.raises(WireError, match="4194301 bytes, more than the limit of 4194300"):
                client.call(holes_of(MAX_REQUEST_BYTES + 1), 30.0)
    assert len(coordinator.seen) == 1
