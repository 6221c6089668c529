"""trainer_client.fetching: shared memory where a worker is on this host, gRPC where it is not."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dataservice.errors import ServiceUnavailable, WireError
from dataservice.rpc import local_client
from dataservice.rpc.local_server import LocalServer, start_local_server
from dataservice.wire.codec import EncodedPack
from dataservice.wire.messages import StreamPack
from trainer_client import PackStream, ParallelLayout
from trainer_client.fetching import WorkerLink
from trainer_client.testing import FakeService, assert_same_batches, synthetic_packs

PACKS = synthetic_packs(22, seed=1)


class LocalPaths:
    """The shared-memory paths of a fake service's workers, beside their gRPC ports."""

    def __init__(self, service: FakeService) -> None:
        self.service = service
        self.asked: list[str] = []
        self.blocked: set[str] = set()
        """Packs that are not built yet."""
        self.renamed: set[str] = set()
        """Packs that come with another's name."""
        self._servers: dict[str, LocalServer] = {}
        for endpoint in service.workers:
            self.start(endpoint)

    def start(self, endpoint: str) -> None:
        async def start() -> LocalServer | None:
            return start_local_server(self, endpoint)

        server = self.service._wait(start())
        assert server is not None
        self._servers[endpoint] = server

    def stop(self, endpoint: str) -> None:
        self.service._wait(self._servers.pop(endpoint).stop(0))

    def close(self) -> None:
        for endpoint in list(self._servers):
            self.stop(endpoint)

    async def whole_pack(self, request: StreamPack) -> EncodedPack:
        self.asked.append(request.pack_id)
        while request.pack_id in self.blocked:
            await asyncio.sleep(0.005)
        pack = PACKS[int(request.pack_id.split(".")[2])]
        name = "0.0.99" if request.pack_id in self.renamed else request.pack_id
        return EncodedPack(pack.arrays, pack.meta | {"pack_id": name})

    def taken(self, request: StreamPack, pack: EncodedPack) -> None:
        pass


@pytest.fixture
def service() -> Iterator[FakeService]:
    with FakeService(PACKS) as service:
        yield service


@pytest.fixture
def paths(service: FakeService) -> Iterator[LocalPaths]:
    paths = LocalPaths(service)
    yield paths
    paths.close()


@pytest.fixture
def connects(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Endpoints whose shared memory was looked for."""
    tried: list[str] = []
    original = local_client.connect

    def connect(endpoint: str) -> Any:
        tried.append(endpoint)
        return original(endpoint)

    monkeypatch.setattr(local_client, "connect", connect)
    return tried


def stream_of(service: FakeService, **changes: Any) -> PackStream:
    settings = {"job": "test", "layout": ParallelLayout(), "micro_steps": 2, "digests": True}
    return PackStream(service.endpoint, **(settings | {"timeout_s": 30} | changes))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def request(pack_id: str) -> StreamPack:
    return StreamPack(session=0, pack_id=pack_id, dp_rank=0, wait_s=30.0)


def test_both_ways_give_the_same_batches(
    service: FakeService, paths: LocalPaths, connects: list[str]
) -> None:
    with stream_of(service, local=False) as stream:
        over_grpc = list(stream)
        assert stream.stats().local_packs == 0
    assert not connects and not paths.asked and len(service.requests) == 22
    service.requests.clear()
    with stream_of(service) as stream:
        assert_same_batches(list(stream), over_grpc)
        assert stream.stats().local_packs == stream.stats().received_packs == 22
        stream.get(3, 1)
        assert stream.stats().local_packs == 23
    assert connects == service.workers
    assert not service.requests and len(paths.asked) == 23


def test_a_worker_elsewhere_is_asked_over_grpc_and_looked_for_once(
    service: FakeService, connects: list[str]
) -> None:
    with stream_of(service) as stream:
        list(stream)
        assert stream.stats().local_packs == 0
        assert stream.stats().retries == 0
    assert connects == service.workers


def test_a_path_that_breaks_is_tried_again_as_any_endpoint(
    service: FakeService, paths: LocalPaths, connects: list[str]
) -> None:
    with stream_of(service, local=False) as stream:
        whole = list(stream)
    (endpoint,) = service.workers
    paths.blocked.add("0.0.5")
    with stream_of(service) as stream:
        stream.open()
        wait_until(lambda: "0.0.5" in paths.asked)
        paths.stop(endpoint)
        assert_same_batches(list(stream), whole)
        assert stream.stats().local_packs == 5
        assert stream.stats().retries == 1
    assert service.failed == [endpoint]
    assert connects == [endpoint] * 2


def test_a_pack_of_another_name_is_not_taken(service: FakeService, paths: LocalPaths) -> None:
    paths.renamed.add("0.0.1")
    with stream_of(service) as stream, pytest.raises(WireError, match=r"0\.0\.99"):
        list(stream)
    assert paths.asked.count("0.0.1") == 2


def test_closing_ends_a_stream_that_waits(service: FakeService, paths: LocalPaths) -> None:
    before = len(os.listdir("/proc/self/fd"))
    paths.blocked.add("0.0.2")
    stream = stream_of(service)
    stream.open()
    wait_until(lambda: "0.0.2" in paths.asked)
    began = time.monotonic()
    stream.close()
    assert time.monotonic() - began < 15
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_threads_that_fetch_meanwhile_have_a_connection_of_their_own_then_grpc(
    service: FakeService, paths: LocalPaths
) -> None:
    (endpoint,) = service.workers
    link = WorkerLink(endpoint, local=True)
    paths.blocked |= {"0.0.0", "0.0.1"}
    ended: list[BaseException] = []

    def wait(pack_id: str) -> None:
        try:
            link.fetch(request(pack_id), timeout_s=30.0)
        except BaseException as error:
            ended.append(error)

    threads = [threading.Thread(target=wait, args=(name,)) for name in ("0.0.0", "0.0.1")]
    for number, thread in enumerate(threads, 1):
        if number == 2:
            _, local = link.fetch(request("0.0.2"), timeout_s=30.0)
            assert local
        thread.start()
        wait_until(lambda number=number: len(paths.blocked & set(paths.asked)) == number)
    _, local = link.fetch(request("0.0.3"), timeout_s=30.0)
    assert not local
    link.close()
    for thread in threads:
        thread.join(timeout=30)
    assert [type(error) for error in ended] == [ServiceUnavailable] * 2
    with pytest.raises(ServiceUnavailable, match="closed"):
        link.fetch(request("0.0.1"), timeout_s=30.0)


def test_a_link_closed_while_it_connects_keeps_nothing(
    service: FakeService, paths: LocalPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    (endpoint,) = service.workers
    before = len(os.listdir("/proc/self/fd"))
    link = WorkerLink(endpoint, local=True)
    original = local_client.connect

    def connect(endpoint: str) -> Any:
        client = original(endpoint)
        link.close()
        return client

    monkeypatch.setattr(local_client, "connect", connect)
    with pytest.raises(ServiceUnavailable, match="closed"):
        link.fetch(request("0.0.1"), timeout_s=30.0)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == before)
