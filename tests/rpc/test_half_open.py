"""A connection whose other end is gone without a word: left at the first deadline that passes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.proxy import Proxy

from dataservice.errors import DeadlineExceeded, ServiceUnavailable
from dataservice.rpc.aio import AsyncCoordinatorClient
from dataservice.rpc.channel import KEEPALIVE_S, KEEPALIVE_TIMEOUT_S
from dataservice.rpc.client import CoordinatorClient, DataClient
from dataservice.wire.messages import GetStatus, StatusReport, StreamPack

Serve = Callable[..., Any]
SOON_S = 3.0
"""Below what the keepalive takes, and more than a call takes."""


def here(_: Any) -> StatusReport:
    return StatusReport(status="here")


def test_the_next_call_after_a_deadline_goes_over_another_connection(serve: Serve) -> None:
    server = serve(coordinator=here)
    with Proxy(server.endpoint) as proxy, CoordinatorClient(proxy.endpoint) as client:
        client.call(GetStatus(), 10.0)
        proxy.drop()
        with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.5 s"):
            client.call(GetStatus(), 0.5)
        assert client.call(GetStatus(), SOON_S).status == "here"
        assert proxy.accepted == 2


def test_what_another_thread_waits_for_on_it_ends(serve: Serve) -> None:
    server = serve(coordinator=here)
    with Proxy(server.endpoint) as proxy, CoordinatorClient(proxy.endpoint) as client:
        client.call(GetStatus(), 10.0)
        proxy.drop()
        ends: list[Exception] = []

        def wait() -> None:
            try:
                client.call(GetStatus(), 60.0)
            except Exception as error:
                ends.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.2)
        with pytest.raises(DeadlineExceeded):
            client.call(GetStatus(), 0.5)
        waiting.join(SOON_S)
        assert not waiting.is_alive() and isinstance(ends[0], ServiceUnavailable)


def test_a_deadline_that_the_service_tells_costs_no_connection(serve: Serve) -> None:
    def late(_: Any) -> StatusReport:
        raise DeadlineExceeded("told")

    server = serve(coordinator=late)
    with Proxy(server.endpoint) as proxy, CoordinatorClient(proxy.endpoint) as client:
        for _ in range(3):
            with pytest.raises(DeadlineExceeded, match="told"):
                client.call(GetStatus(), 10.0)
        assert proxy.accepted == 1


def test_the_asyncio_client_too(serve: Serve) -> None:
    server = serve(coordinator=here)

    async def run(proxy: Proxy) -> None:
        async with AsyncCoordinatorClient(proxy.endpoint) as client:
            await client.call(GetStatus(), 10.0)
            proxy.drop()
            other = asyncio.ensure_future(client.call(GetStatus(), 60.0))
            with pytest.raises(DeadlineExceeded):
                await client.call(GetStatus(), 0.5)
            with pytest.raises(ServiceUnavailable, match="closed meanwhile"):
                await asyncio.wait_for(other, SOON_S)
            answer = await client.call(GetStatus(), SOON_S)
            assert answer.status == "here" and proxy.accepted == 2

    with Proxy(server.endpoint) as proxy:
        asyncio.run(run(proxy))


@pytest.mark.slow
def test_a_stream_is_given_up_by_the_keepalive(serve: Serve) -> None:
    server = serve(data=lambda request: [b"one", asyncio.sleep(60)])
    request = StreamPack(session=1, pack_id="0.0.0", dp_rank=0, wait_s=1.0)
    with Proxy(server.endpoint) as proxy, DataClient(proxy.endpoint) as client:
        with client.stream_pack(request, 60.0) as frames:
            assert next(frames) == b"one"
            proxy.drop()
            started = time.monotonic()
            with pytest.raises(ServiceUnavailable):
                next(frames)
            took_s = time.monotonic() - started
        print(f"noticed in {took_s:.1f} s")
        assert took_s < KEEPALIVE_S + KEEPALIVE_TIMEOUT_S + 5
