"""rpc.local_server and rpc.local_client: packs through shared memory, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from rpc.loop_thread import LoopThread

from dataservice import errors
from dataservice.errors import (
    DataError,
    DataServiceError,
    DeadlineExceeded,
    ServiceUnavailable,
    WireError,
)
from dataservice.rpc import local, local_client, local_server
from dataservice.rpc.client import DataClient
from dataservice.rpc.local import address_of, new_socket
from dataservice.rpc.local_client import LocalClient, connect
from dataservice.rpc.local_server import LocalServer, start_local_server
from dataservice.wire.codec import EncodedPack
from dataservice.wire.messages import StreamPack
from dataservice.wire.schema import encode

MIB = 1 << 20


def request(pack_id: str = "0.0.0") -> StreamPack:
    return StreamPack(session=1, pack_id=pack_id, dp_rank=0, wait_s=1.0)


def pixels(size: int, value: int = 7) -> EncodedPack:
    return EncodedPack({"pixel_values": np.full(size, value, np.uint8)}, {"size": size})


class Source:
    """Answers with what `answer(request)` returns: a pack, or a coroutine that gives one."""

    def __init__(self, answer: Callable[[StreamPack], Any]) -> None:
        self.answer = answer
        self.asked = threading.Event()
        self.asked_ids: list[str] = []
        self.cancelled = threading.Event()
        self.taken_ids: list[str] = []

    async def whole_pack(self, request: StreamPack) -> EncodedPack:
        self.asked_ids.append(request.pack_id)
        self.asked.set()
        try:
            pack = self.answer(request)
            return await pack if asyncio.iscoroutine(pack) else pack
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def taken(self, request: StreamPack, pack: EncodedPack) -> None:
        self.taken_ids.append(request.pack_id)


class LocalThread(LoopThread):
    """A server in a thread of its own, under a name that nobody else has."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.endpoint = f"test-{uuid.uuid4().hex}:1"
        super().__init__()
        self.server = self.run(self._start())

    async def _start(self) -> LocalServer:
        server = start_local_server(self.source, self.endpoint)
        assert server is not None
        return server

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        async def inside() -> Any:
            return function(*args)

        return self.run(inside())

    def client(self) -> LocalClient:
        client = connect(self.endpoint)
        assert client is not None
        return client

    def close(self) -> None:
        self.run(self.server.stop(0))
        super().close()


@pytest.fixture
def serve_local() -> Iterator[Callable[..., LocalThread]]:
    servers: list[LocalThread] = []

    def start(answer: Callable[[StreamPack], Any]) -> LocalThread:
        servers.append(LocalThread(Source(answer)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def fetched(client: LocalClient, pack_id: str = "0.0.0", timeout_s: float = 30.0) -> Any:
    pack = client.fetch(request(pack_id), timeout_s)
    assert pack is not None
    return pack


def test_a_pack_arrives_as_it_was_built(serve_local: Any) -> None:
    arrays = {
        "input_ids": np.arange(8192, dtype=np.int32) % 11,
        "pixel_values": np.resize(np.arange(251, dtype=np.uint8), (6000, 588)),
        "image_grid_thw": np.empty((0, 3), np.int32),
    }
    server = serve_local(lambda _: EncodedPack(arrays, {"pack_id": "0.0.0"}))
    with server.client() as client:
        result, meta = fetched(client)
    assert meta == {"pack_id": "0.0.0"}
    assert list(result) == list(arrays)
    for name, expected in arrays.items():
        np.testing.assert_array_equal(result[name], expected, strict=True)
    assert server.source.taken_ids == ["0.0.0"]


def test_a_segment_is_used_again_and_replaced_by_a_larger_one(serve_local: Any) -> None:
    sizes = {"a": MIB, "b": MIB + 1000, "c": 5 * MIB, "d": MIB, "e": 0}
    server = serve_local(lambda asked: pixels(sizes[asked.pack_id], ord(asked.pack_id)))
    held, before = [], descriptors()
    with server.client() as client:
        windows, segments = [], []
        for pack_id in sizes:
            held.append(fetched(client, pack_id))
            windows.append(client._window)
            segments.append(server.server.segment_bytes)
            assert descriptors() - before == 5  # two sockets, one segment (mmap holds its own)
    assert windows[0] is windows[1] is not windows[2]
    assert windows[2] is windows[3] is windows[4]
    assert segments[0] == segments[1] < 5 * MIB < segments[2] == segments[3] < 8 * MIB
    for pack_id, (arrays, meta) in zip(sizes, held, strict=True):
        assert meta == {"size": sizes[pack_id]}
        assert len(arrays["pixel_values"]) == sizes[pack_id]
        assert (arrays["pixel_values"] == ord(pack_id)).all()


def test_nothing_is_left_after_close(serve_local: Any) -> None:
    server = serve_local(lambda _: pixels(MIB))
    before = descriptors()
    for _ in range(5):
        with server.client() as client:
            fetched(client)
            assert server.server.connections == 1
        client.close()
        with pytest.raises(ServiceUnavailable, match="the client is closed"):
            client.fetch(request(), 1.0)
        wait_until(lambda: server.server.connections == 0)
    wait_until(lambda: descriptors() == before)
    assert server.server.segment_bytes == 0


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    assert connect("127.0.0.1:1") is None
    assert connect("x" * 200 + ":1") is None
    monkeypatch.setattr(local.sys, "platform", "darwin")
    assert connect("127.0.0.1:1") is None
    assert descriptors() == before

    async def start() -> Any:
        return start_local_server(Source(lambda _: None), "127.0.0.1:1")

    assert asyncio.run(start()) is None


def test_a_name_that_is_taken_is_served_by_the_first_alone(serve_local: Any) -> None:
    first = serve_local(lambda _: pixels(10))
    before = descriptors()
    assert first.call(start_local_server, first.source, first.endpoint) is None
    assert descriptors() == before
    with first.client() as client:
        fetched(client)


@pytest.mark.parametrize("side", [local_client, local])
def test_another_user_is_refused(
    serve_local: Any, monkeypatch: pytest.MonkeyPatch, side: Any
) -> None:
    server = serve_local(lambda _: pixels(10))
    before = descriptors()
    monkeypatch.setattr(side, "same_user", lambda _: False)
    assert connect(server.endpoint) is None
    wait_until(lambda: server.server.connections == 0)
    wait_until(lambda: descriptors() == before)


def test_the_kernel_names_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert local.peer_uid(ours) == os.geteuid()
        assert local.same_user(ours)
        monkeypatch.setattr(local, "peer_uid", lambda _: os.geteuid() + 1)
        assert not local.same_user(ours)


def test_a_server_that_does_not_greet_is_left_alone() -> None:
    with new_socket() as mute:
        mute.bind(address_of("mute:1"))
        mute.listen()
        assert connect("mute:1", timeout_s=0.05) is None


def test_connections_are_bounded(serve_local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "MAX_CONNECTIONS", 2)
    server = serve_local(lambda _: pixels(10))
    with server.client(), server.client():
        assert connect(server.endpoint) is None
    wait_until(lambda: server.server.connections == 0)
    server.client().close()


# ---- memory -------------------------------------------------------------------------------------


def test_segments_are_bounded_together(serve_local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "MAX_SEGMENT_BYTES", 9 * MIB)
    server = serve_local(lambda asked: pixels(3 * MIB, int(asked.pack_id)))
    clients = [server.client() for _ in range(4)]
    for _ in range(2):
        for value, client in enumerate(clients):
            arrays, _ = fetched(client, str(value))
            assert (arrays["pixel_values"] == value).all()
            assert 4 * MIB <= server.server.segment_bytes <= 9 * MIB
    server.source.answer = lambda _: pixels(20 * MIB)  # one pack may always be sent
    assert len(fetched(clients[0])[0]["pixel_values"]) == 20 * MIB
    assert server.server.segment_bytes == 26 * MIB
    for client in clients:
        client.close()


def test_a_segment_far_too_large_for_what_comes_is_given_up(serve_local: Any) -> None:
    sizes = [20 * MIB, *[MIB] * local_server.SPARE_PACKS, MIB]
    server = serve_local(lambda asked: pixels(sizes[int(asked.pack_id)]))
    with server.client() as client:
        held = []
        for number, size in enumerate(sizes):
            assert len(fetched(client, str(number))[0]["pixel_values"]) == size
            held.append(server.server.segment_bytes)
    assert held[:3] == [26 * MIB] * 3
    assert held[-1] == 2 * MIB
    assert held.count(2 * MIB) <= 2


def test_one_large_pack_now_and_then_keeps_its_segment(serve_local: Any) -> None:
    server = serve_local(lambda asked: pixels(MIB * (20 if int(asked.pack_id) % 8 == 0 else 1)))
    with server.client() as client:
        for number in range(local_server.SPARE_PACKS * 2):
            fetched(client, str(number))
            assert server.server.segment_bytes == 26 * MIB


def test_the_event_loop_goes_on_while_a_large_pack_is_copied(serve_local: Any) -> None:
    copying, go = threading.Event(), threading.Event()

    class Slow(EncodedPack):
        def write_into(self, place: Any) -> None:
            copying.set()
            assert go.wait(30)
            super().write_into(place)

    large = Slow({"pixel_values": np.full(local_server.THREAD_BYTES, 7, np.uint8)}, {})
    server = serve_local(lambda _: large)
    got: list[Any] = []
    with server.client() as client:
        reader = threading.Thread(target=lambda: got.append(fetched(client)))
        reader.start()
        assert copying.wait(30)
        with server.client():
            assert server.call(lambda: server.server.connections) == 2
        go.set()
        reader.join(30)
    assert (got[0][0]["pixel_values"] == 7).all()


def test_a_copy_that_fails_leaves_no_segment_that_the_client_does_not_know(
    serve_local: Any,
) -> None:
    class Breaks(EncodedPack):
        def write_into(self, place: Any) -> None:
            raise OSError("gone")

    broken = Breaks({"pixel_values": np.zeros(MIB, np.uint8)}, {})
    server = serve_local(lambda asked: broken if asked.pack_id == "broken" else pixels(MIB))
    with server.client() as client:
        with pytest.raises(DataServiceError, match="OSError"):
            fetched(client, "broken")
        assert server.server.segment_bytes == 0
        assert len(fetched(client)[0]["pixel_values"]) == MIB


def test_an_idle_segment_is_given_up_and_made_again(serve_local: Any) -> None:
    server = serve_local(lambda _: pixels(MIB))
    with server.client() as client:
        fetched(client)
        server.call(server.server.close_idle, 60.0)
        assert server.server.segment_bytes > 0
        server.call(server.server.close_idle, 0.0)
        assert server.server.segment_bytes == 0
        assert len(fetched(client)[0]["pixel_values"]) == MIB


def test_memory_that_can_shrink_is_refused() -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(WireError, match="not sealed"):
            local.Window(fd)
        segment = local.Segment(4096)
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, 1)
        window = local.Window(segment.fd)
        with pytest.raises(WireError, match="4097 bytes in 4096"):
            window.pack(4097)
        with pytest.raises(ValueError, match="read-only"):
            window.pack(4096)[0] = 1
        window.close()
        segment.close()
    finally:
        os.close(fd)


def test_no_memory_is_an_error_that_may_pass(
    serve_local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve_local(lambda _: pixels(MIB))

    def none(size_bytes: int) -> Any:
        raise OSError("Too many open files")

    with server.client() as client:
        monkeypatch.setattr(local_server, "Segment", none)
        with pytest.raises(ServiceUnavailable, match="Too many open files"):
            client.fetch(request(), 30.0)
        monkeypatch.undo()
        fetched(client)


# ---- failures -----------------------------------------------------------------------------------


def all_errors() -> list[Exception]:
    found = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, DataServiceError)
    ]
    place = {"source": "s", "shard": "a.tar", "sample": "s/a@0", "member": "m"}
    return [
        *(one("why", **place) if issubclass(one, DataError) else one("why") for one in found),
        errors.StorageError("x" * 5000),
        ZeroDivisionError("of ours"),
    ]


@pytest.mark.parametrize("error", all_errors(), ids=lambda error: type(error).__name__)
def test_errors_are_those_of_grpc(
    serve_local: Any, serve: Any, data_of: Any, error: Exception
) -> None:
    def fail(_: StreamPack) -> Any:
        raise error

    with serve_local(fail).client() as client:
        with pytest.raises(DataServiceError) as ours:
            client.fetch(request(), 30.0)
        with pytest.raises(DataServiceError):
            client.fetch(request(), 30.0)  # and the connection is still good
    remote = serve(data=fail)
    with DataClient(remote.endpoint) as other, pytest.raises(DataServiceError) as theirs:
        list(other.stream_pack(request(), 30.0))
    assert type(ours.value) is type(theirs.value)
    texts = [str(error).rpartition(": StreamPack")[2] for error in (ours.value, theirs.value)]
    if isinstance(error, DataServiceError):
        assert texts[0] == texts[1]
        assert vars(ours.value).keys() == vars(theirs.value).keys()
    else:
        assert "failed with ZeroDivisionError" in texts[0]
        assert "failed with ZeroDivisionError" in texts[1]


def test_a_deadline_ends_the_call_and_the_connection(serve_local: Any) -> None:
    server = serve_local(lambda _: asyncio.sleep(60))
    client = server.client()
    with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.1 s"):
        client.fetch(request(), 0.1)
    assert server.source.cancelled.wait(timeout=30)
    with pytest.raises(ServiceUnavailable, match="the client is closed"):
        client.fetch(request(), 0.1)


def test_a_pack_that_is_not_built_yet_is_waited_for(serve_local: Any) -> None:
    built = threading.Event()

    async def later() -> EncodedPack:
        while not built.is_set():
            await asyncio.sleep(0.005)
        return pixels(10)

    server = serve_local(lambda _: later())
    threading.Timer(0.2, built.set).start()
    with server.client() as client:
        fetched(client)
        assert built.is_set()


def test_close_from_another_thread_ends_a_blocked_call(serve_local: Any) -> None:
    server = serve_local(lambda asked: pixels(10) if asked.pack_id == "a" else asyncio.sleep(60))
    before = descriptors()
    client = server.client()
    fetched(client, "a")
    closer = threading.Timer(0.2, client.close)
    closer.start()
    with pytest.raises(ServiceUnavailable):
        client.fetch(request(), 60.0)
    closer.join(timeout=30)
    assert server.source.cancelled.wait(timeout=30)
    wait_until(lambda: descriptors() == before)


def test_a_second_thread_is_not_made_to_wait(serve_local: Any) -> None:
    server = serve_local(lambda _: asyncio.sleep(60))
    client = server.client()

    def wait() -> None:
        with pytest.raises(ServiceUnavailable):
            client.fetch(request(), 60.0)

    first = threading.Thread(target=wait)
    first.start()
    assert server.source.asked.wait(timeout=30)
    assert client.fetch(request(), 60.0) is None
    client.close()
    first.join(timeout=30)
    assert not first.is_alive()


def test_a_client_that_does_not_read_holds_up_nobody(serve_local: Any) -> None:
    server = serve_local(lambda _: pixels(MIB))
    with new_socket() as slow, server.client() as quick:
        slow.connect(address_of(server.endpoint))
        slow.send(encode(request("slow")))
        for _ in range(20):
            fetched(quick)
        assert "slow" in server.source.taken_ids
        slow.send(encode(request("slow")))
        wait_until(lambda: server.source.taken_ids.count("slow") == 2)
        assert server.server.segment_bytes == 4 * MIB


@pytest.mark.parametrize(
    "messages",
    [[b"\xc1"], [b"x" * (local.MAX_MESSAGE_BYTES + 1)], [encode(request())] * 2],
    ids=["no message", "too long", "before the answer"],
)
def test_a_malformed_request_ends_the_connection(serve_local: Any, messages: Any) -> None:
    server = serve_local(lambda _: asyncio.sleep(60))
    with new_socket() as sock:
        sock.settimeout(30)
        sock.connect(address_of(server.endpoint))
        assert sock.recv(100) == local.HELLO
        for message in messages:
            sock.send(message)
        assert sock.recv(100) == b""
    wait_until(lambda: server.server.connections == 0)
    if len(messages) > 1:
        assert server.source.cancelled.wait(timeout=30)


@pytest.mark.parametrize(
    "answer", [b"\xc1", encode(local.Answer(size_bytes=10)), encode(local.Answer(code="WHAT"))]
)
def test_an_answer_of_a_broken_worker_is_a_wire_error(answer: bytes) -> None:
    endpoint = f"broken-{uuid.uuid4().hex}:1"
    with new_socket() as listener:
        listener.bind(address_of(endpoint))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.send(local.HELLO)
                connection.recv(1000)
                connection.send(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        client = connect(endpoint)
        assert client is not None
        with pytest.raises(WireError):
            client.fetch(request(), 30.0)
        client.close()
        thread.join(timeout=30)


def test_stop_lets_a_request_end_and_refuses_the_next(serve_local: Any) -> None:
    async def later() -> EncodedPack:
        await asyncio.sleep(0.2)
        return pixels(10)

    server = serve_local(lambda _: later())
    with server.client() as client, server.client() as idle:
        stopping = threading.Timer(0.1, lambda: server.run(server.server.stop(20)))
        stopping.start()
        fetched(client)
        stopping.join(timeout=30)
        assert server.server.connections == 0
        for one in (client, idle):
            with pytest.raises(ServiceUnavailable):
                one.fetch(request(), 30.0)
        assert connect(server.endpoint) is None


# ---- processes ----------------------------------------------------------------------------------

WAITING_CLIENT = """
import sys
from dataservice.rpc.local_client import connect
from dataservice.wire.messages import StreamPack

client = connect(sys.argv[1])
client.fetch(StreamPack(session=1, pack_id="now", dp_rank=0, wait_s=1.0), 30.0)
client.fetch(StreamPack(session=1, pack_id="p", dp_rank=0, wait_s=60.0), 60.0)
"""


def test_a_client_killed_while_it_waits_takes_its_request_along(serve_local: Any) -> None:
    server = serve_local(lambda asked: pixels(9) if asked.pack_id == "now" else asyncio.sleep(60))
    before = descriptors()
    with subprocess.Popen([sys.executable, "-c", WAITING_CLIENT, server.endpoint]) as process:
        wait_until(lambda: server.source.asked_ids == ["now", "p"])
        assert server.server.segment_bytes > 0
        process.kill()
        assert server.source.cancelled.wait(timeout=30)
    wait_until(lambda: server.server.connections == 0)
    assert server.server.segment_bytes == 0
    wait_until(lambda: descriptors() == before)


SERVER = """
import asyncio, sys
import numpy as np
from dataservice.rpc.local_server import start_local_server
from dataservice.wire.codec import EncodedPack

class Data:
    async def whole_pack(self, request):
        if request.pack_id != "now":
            print("asked", flush=True)
            await asyncio.sleep(60)
        return EncodedPack({"a": np.zeros(9, np.uint8)}, {})

    def taken(self, request, pack):
        pass

async def main():
    server = start_local_server(Data(), sys.argv[1])
    print("serving", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_worker_killed_while_a_client_waits_is_unavailable_at_once() -> None:
    endpoint = f"killed-{uuid.uuid4().hex}:1"
    command = [sys.executable, "-c", SERVER, endpoint]
    before = descriptors()
    for _ in range(2):  # the name is free again, too
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "serving\n"
            client = connect(endpoint)
            assert client is not None
            fetched(client, "now")

            def kill(process: Any) -> None:
                process.stdout.readline()
                process.kill()

            killer = threading.Thread(target=kill, args=(process,))
            killer.start()
            with pytest.raises(ServiceUnavailable):
                client.fetch(request(), 50.0)
            killer.join(timeout=30)
            assert connect(endpoint) is None
    assert descriptors() == before


FORK = """
import os, sys
from dataservice.errors import ConfigError
from dataservice.rpc.local_client import connect
from dataservice.wire.messages import StreamPack

client = connect(sys.argv[1])
pack = StreamPack(session=1, pack_id="p", dp_rank=0, wait_s=1.0)
client.fetch(pack, 30.0)
pid = os.fork()
if pid == 0:
    refused = 1
    try:
        client.fetch(pack, 30.0)
    except ConfigError as error:
        refused = 2 if "after a fork" in str(error) else 1
    client.close()
    os._exit(refused)
_, status = os.waitpid(pid, 0)
client.fetch(pack, 30.0)
client.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_use_after_a_fork_is_refused_and_the_parent_goes_on(serve_local: Any) -> None:
    server = serve_local(lambda _: pixels(10))
    done = subprocess.run(
        [sys.executable, "-c", FORK, server.endpoint], timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr


def test_the_client_imports_nothing_heavy() -> None:
    check = (
        "import sys, dataservice.rpc.local_client\n"
        "heavy = {'ray', 'torch', 'pydantic', 'dataservice.core', 'dataservice.storage'}\n"
        "found = sorted(heavy & set(sys.modules))\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", check], timeout=60, check=True)
