"""dataservice.rpc.client: closing, threads, forks, packs through a real connection."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from dataservice.errors import ServiceUnavailable, WireError
from dataservice.rpc.client import CoordinatorClient, DataClient
from dataservice.wire.codec import PackDecoder, encode_pack
from dataservice.wire.messages import GetStatus, Ok, StatusReport, StreamPack

Serve = Callable[..., Any]
PACK = StreamPack(session=1, pack_id="0.0.0", dp_rank=0, wait_s=1.0)


def closed_while(blocked: Callable[[], Any], close: Callable[[], None]) -> BaseException:
    """What `blocked` raises when `close` runs in another thread meanwhile."""
    closer = threading.Timer(0.3, close)
    closer.start()
    try:
        with pytest.raises(ServiceUnavailable) as caught:
            blocked()
    finally:
        closer.join(timeout=30)
    return caught.value


def test_close_from_another_thread_ends_a_blocked_call(serve: Serve) -> None:
    server = serve(coordinator=lambda request: asyncio.sleep(60))
    client = CoordinatorClient(server.endpoint)
    closed_while(lambda: client.call(GetStatus(), 60.0), client.close)
    client.close()
    with pytest.raises(ServiceUnavailable, match=r"GetStatus at .*: the client is closed"):
        client.call(GetStatus(), 60.0)


def test_close_from_another_thread_ends_a_blocked_stream(serve: Serve, data_of: Any) -> None:
    data = data_of(lambda request: [b"one", asyncio.sleep(60)])
    client = DataClient(serve(data=data).endpoint)
    frames = client.stream_pack(PACK, 60.0)
    assert next(frames) == b"one"
    closed_while(lambda: next(frames), client.close)
    assert data.closed.wait(timeout=30)
    with pytest.raises(ServiceUnavailable, match="the client is closed"):
        client.stream_pack(PACK, 60.0)


def test_cancel_from_another_thread_ends_a_blocked_stream_only(serve: Serve) -> None:
    server = serve(
        data=lambda request: [asyncio.sleep(60)] if request.pack_id == "slow" else [b"one"]
    )
    slow = StreamPack(session=1, pack_id="slow", dp_rank=0, wait_s=1.0)
    with DataClient(server.endpoint) as client:
        with client.stream_pack(slow, 60.0) as frames:
            closed_while(lambda: next(frames), frames.cancel)
        assert list(client.stream_pack(PACK, 60.0)) == [b"one"]


def test_calls_race_with_close_without_another_error(serve: Serve) -> None:
    server = serve(coordinator=lambda request: StatusReport(status=""))
    for _ in range(5):
        client = CoordinatorClient(server.endpoint)
        unexpected: list[BaseException] = []

        def run(client: CoordinatorClient, unexpected: list[BaseException]) -> None:
            try:
                while True:
                    client.call(GetStatus(), 30.0)
            except ServiceUnavailable:
                return
            except BaseException as error:
                unexpected.append(error)

        threads = [
            threading.Thread(target=run, args=(client, unexpected), daemon=True) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        client.close()
        for thread in threads:
            thread.join(timeout=30)
        assert not unexpected
        assert not any(thread.is_alive() for thread in threads)


def test_nobody_at_the_endpoint() -> None:
    with (
        CoordinatorClient("127.0.0.1:1") as client,
        pytest.raises(ServiceUnavailable, match=r"GetStatus at 127\.0\.0\.1:1: "),
    ):
        client.call(GetStatus(), 30.0)


def test_a_client_finds_a_service_that_came_back_on_its_port(serve: Serve) -> None:
    first = serve(coordinator=lambda request: StatusReport(status="first"))
    with CoordinatorClient(first.endpoint) as client:
        assert client.call(GetStatus(), 30.0).status == "first"
        first.run(first.server.stop(0))
        serve(coordinator=lambda request: StatusReport(status="second"), bind=first.endpoint)
        deadline = time.monotonic() + 30
        while True:
            try:
                answer = client.call(GetStatus(), 30.0)
                break
            except ServiceUnavailable:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert answer.status == "second"


def test_no_request_of_the_coordinator() -> None:
    with (
        CoordinatorClient("127.0.0.1:1") as client,
        pytest.raises(TypeError, match="Ok is no request"),
    ):
        client.call(Ok(), 1.0)


def test_a_stream_is_read_without_a_thread_of_its_own(serve: Serve) -> None:
    server = serve(data=lambda request: [b"one", b"two"])
    with DataClient(server.endpoint) as client:
        assert list(client.stream_pack(PACK, 60.0)) == [b"one", b"two"]
        before = set(threading.enumerate())
        with client.stream_pack(PACK, 60.0) as frames:
            assert next(frames) == b"one"
            assert set(threading.enumerate()) <= before


def test_what_this_side_ended_is_unavailable(serve: Serve) -> None:
    server = serve(data=lambda request: [b"one", b"two"])
    with DataClient(server.endpoint) as client, client.stream_pack(PACK, 60.0) as frames:
        assert next(frames) == b"one"
        frames.cancel()
        with pytest.raises(ServiceUnavailable, match="StreamPack"):
            for _ in range(3):
                next(frames)


def test_a_pack_arrives_whole_and_a_damaged_one_does_not(serve: Serve) -> None:
    arrays: dict[str, Any] = {
        "input_ids": np.arange(8192, dtype=np.int32),
        "pixel_values": np.resize(np.arange(251, dtype=np.uint8), (6000, 588)),
    }
    good = encode_pack(arrays, {"pack_id": "0.0.0"}, frame_bytes=1 << 20)
    bad = [*good[:-1], good[-1][:-1] + bytes([good[-1][-1] ^ 1])]
    server = serve(data=lambda request: good if request.pack_id == "0.0.0" else bad)

    def fetch(pack_id: str) -> Any:
        decoder = PackDecoder()
        request = StreamPack(session=1, pack_id=pack_id, dp_rank=0, wait_s=1.0)
        for frame in client.stream_pack(request, 30.0):
            decoder.feed(frame)
        return decoder.result()

    with DataClient(server.endpoint) as client:
        result, meta = fetch("0.0.0")
        for name, array in arrays.items():
            np.testing.assert_array_equal(result[name], array, strict=True)
        assert meta == {"pack_id": "0.0.0"}
        with pytest.raises(WireError, match="checksum"):
            fetch("0.0.1")


STREAMING_SERVER = """
import asyncio
import os
from dataservice.rpc.server import start_server

class Data:
    async def stream_pack(self, request):
        yield b"one"
        await asyncio.sleep(60)

async def main():
    server = await start_server(data=Data())
    print(server.endpoint, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_worker_killed_in_the_middle_of_a_stream_is_unavailable_at_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STREAMING_SERVER], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            with DataClient(process.stdout.readline().strip()) as client:
                frames = client.stream_pack(PACK, 50.0)
                assert next(frames) == b"one"
                process.kill()
                with pytest.raises(ServiceUnavailable):
                    next(frames)
        finally:
            process.kill()


FORK = """
import os, sys
from dataservice.errors import ConfigError
from dataservice.rpc.client import CoordinatorClient, DataClient
from dataservice.wire.messages import GetStatus, StreamPack

client = CoordinatorClient(sys.argv[1])
data = DataClient(sys.argv[1])
assert client.call(GetStatus(), 30.0).status == "here"
pid = os.fork()
if pid == 0:
    pack = StreamPack(session=1, pack_id="p", dp_rank=0, wait_s=1.0)
    refused = 0
    for use in (lambda: client.call(GetStatus(), 30.0), lambda: data.stream_pack(pack, 30.0)):
        try:
            use()
        except ConfigError as error:
            refused += "after a fork" in str(error)
    client.close()
    data.close()
    os._exit(refused)
_, status = os.waitpid(pid, 0)
assert client.call(GetStatus(), 30.0).status == "here"
client.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_use_after_a_fork_is_refused_and_the_parent_goes_on(serve: Serve) -> None:
    server = serve(coordinator=lambda request: StatusReport(status="here"))
    done = subprocess.run(
        [sys.executable, "-c", FORK, server.endpoint], timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr


def test_the_client_imports_nothing_heavy() -> None:
    check = (
        "import sys, dataservice.rpc.client\n"
        "heavy = {'ray', 'torch', 'google.protobuf', 'grpc_health.v1', 'pydantic', 'pyarrow',\n"
        "         'numba', 'PIL', 'dataservice.core', 'dataservice.storage'}\n"
        "found = sorted(heavy & set(sys.modules))\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", check], timeout=60, check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc counts the descriptors")
def test_a_stream_that_is_not_read_to_its_end_keeps_no_connection(
    serve: Serve, data_of: Any
) -> None:
    def two_and_no_end(request: StreamPack) -> Iterator[Any]:
        yield b"one"
        yield b"two"
        yield asyncio.sleep(60)

    endpoint = serve(data=data_of(two_and_no_end)).endpoint

    def sockets() -> int:
        places = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return sum(os.readlink(p).startswith("socket:") for p in places if os.path.islink(p))

    before = sockets()
    for read in (0, 1, 1, 1, 2, 2):
        with DataClient(endpoint) as client, client.stream_pack(PACK, 60.0) as frames:
            for _ in range(read):
                next(frames)
            if read == 2:
                client.close()
    deadline = time.monotonic() + 20
    while sockets() > before:
        assert time.monotonic() < deadline, f"{sockets()} sockets, {before} before"
        time.sleep(0.02)
