"""dataservice.rpc.aio: the asyncio clients behave as the blocking ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from dataservice import errors
from dataservice.rpc.aio import AsyncCoordinatorClient, AsyncDataClient
from dataservice.wire.messages import GetStatus, StatusReport, StreamPack

Serve = Callable[..., Any]
PACK = StreamPack(session=1, pack_id="0.0.0", dp_rank=0, wait_s=1.0)


async def ask(endpoint: str, timeout_s: float = 30.0) -> Any:
    async with AsyncCoordinatorClient(endpoint) as client:
        return await client.call(GetStatus(), timeout_s)


async def frames_of(endpoint: str) -> list[bytes]:
    async with AsyncDataClient(endpoint) as client:
        return [frame async for frame in client.stream_pack(PACK, 30.0)]


def test_a_call_and_a_stream(serve: Serve) -> None:
    answer = StatusReport(status="{}")
    server = serve(coordinator=lambda request: answer, data=lambda request: [b"a", b"bc"])
    assert asyncio.run(ask(server.endpoint)) == answer
    assert asyncio.run(frames_of(server.endpoint)) == [b"a", b"bc"]


def test_errors_arrive_as_their_class(serve: Serve) -> None:
    def fail(request: Any) -> Any:
        raise errors.ArchiveError("no central directory", shard="a.zip")

    def stream(request: Any) -> Any:
        yield b"a"
        raise errors.StaleIndexError("a.zip changed")

    server = serve(coordinator=fail, data=stream)
    with pytest.raises(errors.ArchiveError, match=r"shard a\.zip: no central directory"):
        asyncio.run(ask(server.endpoint))
    with pytest.raises(errors.StaleIndexError, match=r"a\.zip changed"):
        asyncio.run(frames_of(server.endpoint))


def test_deadline_and_nobody_there(serve: Serve) -> None:
    server = serve(coordinator=lambda request: asyncio.sleep(60))
    with pytest.raises(errors.DeadlineExceeded, match=r"no answer within 0\.2 s"):
        asyncio.run(ask(server.endpoint, timeout_s=0.2))
    with pytest.raises(errors.ServiceUnavailable, match=r"GetStatus at 127\.0\.0\.1:1"):
        asyncio.run(ask("127.0.0.1:1"))


def test_cancelling_the_task_ends_the_call_at_the_service(
    serve: Serve, coordinator_of: Any
) -> None:
    coordinator = coordinator_of(lambda request: asyncio.sleep(60))
    server = serve(coordinator=coordinator)

    async def run() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ask(server.endpoint), timeout=0.3)

    asyncio.run(run())
    assert coordinator.cancelled.wait(timeout=30)


def test_leaving_a_stream_early_closes_the_generator(serve: Serve, data_of: Any) -> None:
    data = data_of(lambda request: (bytes(1 << 20) for _ in range(200)))
    server = serve(data=data)

    async def run() -> None:
        async with AsyncDataClient(server.endpoint) as client:
            frames = client.stream_pack(PACK, 30.0)
            async for _ in frames:
                break
            await frames.aclose()

    asyncio.run(run())
    assert data.closed.wait(timeout=30)
    assert data.produced < 200


def test_close_ends_a_waiting_call_and_is_idempotent(serve: Serve) -> None:
    server = serve(coordinator=lambda request: asyncio.sleep(60))

    async def run() -> None:
        client = AsyncCoordinatorClient(server.endpoint)
        waiting = asyncio.create_task(client.call(GetStatus(), 60.0))
        await asyncio.sleep(0.3)
        await client.close()
        await client.close()
        with pytest.raises(errors.ServiceUnavailable, match="closed meanwhile"):
            await waiting
        with pytest.raises(errors.ServiceUnavailable, match="the client is closed"):
            await client.call(GetStatus(), 1.0)

    asyncio.run(run())


def test_close_ends_a_waiting_stream(serve: Serve, data_of: Any) -> None:
    data = data_of(lambda request: [b"one", asyncio.sleep(60)])
    server = serve(data=data)

    async def read(client: AsyncDataClient) -> None:
        async for frame in client.stream_pack(PACK, 60.0):
            assert frame == b"one"

    async def run() -> None:
        client = AsyncDataClient(server.endpoint)
        waiting = asyncio.create_task(read(client))
        await asyncio.sleep(0.3)
        await client.close()
        with pytest.raises(errors.ServiceUnavailable):
            await waiting

    asyncio.run(run())
    assert data.closed.wait(timeout=30)
