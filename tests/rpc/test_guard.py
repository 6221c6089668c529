"""dataservice.rpc.guard: limits of a connection and of a host, and what a server does with clients
that send nothing, half, too much or nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.certificates import TOKEN, Authority

from dataservice.errors import AccessRefused, ServiceUnavailable
from dataservice.rpc import channel as channel_module
from dataservice.rpc import guard as guard_module
from dataservice.rpc.channel import MAX_REQUEST_BYTES, server_options
from dataservice.rpc.client import CoordinatorClient
from dataservice.rpc.guard import LIMITS, PACK_COST, Guard
from dataservice.rpc.sealing import sealed
from dataservice.rpc.security import ClientSecurity, ServerSecurity
from dataservice.wire.messages import GetStatus, StatusReport

Serve = Callable[..., Any]
STATUS = StatusReport(status="here")
PEER = "ipv4:10.0.0.1:5"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def guard_of(clock: Clock | None = None, **limits: Any) -> Guard:
    return Guard(ServerSecurity(), replace(LIMITS, **limits), clock or Clock())


# ---- decisions ----------------------------------------------------------------------------------


def calls_let_in(guard: Guard, peer: str, calls: int) -> int:
    let_in = 0
    for _ in range(calls):
        with contextlib.suppress(ServiceUnavailable), guard.call(peer):
            let_in += 1
    return let_in


def test_a_connection_has_a_rate_and_a_burst_of_its_own() -> None:
    clock = Clock()
    guard = guard_of(clock, calls_per_s=10.0, burst=20)
    assert calls_let_in(guard, PEER, 50) == 20
    assert calls_let_in(guard, "ipv4:10.0.0.1:6", 50) == 20
    clock.now_s += 1.0
    assert calls_let_in(guard, PEER, 50) == 10
    clock.now_s += 1_000.0
    assert calls_let_in(guard, PEER, 50) == 20
    with pytest.raises(ServiceUnavailable, match="more than 10 calls a second; again later"):
        with guard.call(PEER):
            pass


def test_packs_count_less_than_calls_of_the_coordinator() -> None:
    guard = guard_of(calls_per_s=10.0, burst=20)
    for _ in range(100):
        with guard.call(PEER, cost=PACK_COST):
            pass
    assert calls_let_in(guard, PEER, 50) in (9, 10)  # tenths do not add up to the last bit


def test_a_host_has_so_many_calls_under_way() -> None:
    guard = guard_of(host_calls=3)
    with contextlib.ExitStack() as held:
        for port in (1, 2, 3):
            held.enter_context(guard.call(f"ipv6:[fd00::1]:{port}"))
        with pytest.raises(ServiceUnavailable, match="3 calls of this host are under way"):
            held.enter_context(guard.call("ipv6:[fd00::1]:4"))
        with guard.call("ipv6:[fd00::2]:1"):
            pass
    with guard.call("ipv6:[fd00::1]:4"):
        pass
    assert guard._under_way == {}


def test_what_is_remembered_of_connections_is_bounded() -> None:
    guard = guard_of(connections=10)
    for port in range(100):
        assert calls_let_in(guard, f"ipv4:10.0.0.1:{port}", 1) == 1
    assert list(guard._buckets) == [f"ipv4:10.0.0.1:{port}" for port in range(90, 100)]


def test_a_thousand_ranks_of_one_address_are_far_from_the_limits() -> None:
    """Each makes ten calls a second and holds two long polls."""
    guard, clock = guard_of(), Clock()
    with contextlib.ExitStack() as held:
        for rank in range(1024):
            for _ in range(2):
                held.enter_context(guard.call(f"ipv4:10.0.0.1:{rank}"))
        for _second in range(3):
            clock.now_s += 1.0
            for rank in range(1024):
                assert calls_let_in(guard, f"ipv4:10.0.0.1:{rank}", 10) == 10


@pytest.mark.parametrize(
    "shown", [b"Bearer " + TOKEN.encode(), f"Bearer {TOKEN[:-1]}\udcff", "Bearer", "", TOKEN]
)
def test_a_token_of_any_form_is_looked_at(tmp_path: Path, shown: str | bytes) -> None:
    guard = Guard(ServerSecurity(token_file=Authority(tmp_path).token(TOKEN)))
    guard.check_token([("x", "y"), ("authorization", f"bearer {TOKEN}")])
    with pytest.raises(AccessRefused):
        guard.check_token([("authorization", shown)])


# ---- at a server --------------------------------------------------------------------------------


def test_a_client_past_its_rate_is_told_to_come_again(serve: Serve) -> None:
    limits = replace(LIMITS, calls_per_s=1.0, burst=3)
    server = serve(coordinator=lambda _: STATUS, limits=limits)
    with CoordinatorClient(server.endpoint) as client:
        for _ in range(3):
            client.call(GetStatus(), 10.0)
        with pytest.raises(ServiceUnavailable, match="calls a second; again later"):
            client.call(GetStatus(), 10.0)
        time.sleep(1.1)
        assert client.call(GetStatus(), 10.0) == STATUS


def test_health_is_within_the_limits(serve: Serve) -> None:
    server = serve(coordinator=lambda _: STATUS, limits=replace(LIMITS, host_calls=2))
    request = health_pb2.HealthCheckRequest()
    with grpc.insecure_channel(server.endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watched = [stub.Watch(request, timeout=20) for _ in range(2)]
        for states in watched:
            assert next(states).status == health_pb2.HealthCheckResponse.SERVING
        for refused in (lambda: stub.Check(request, timeout=10), lambda: next(stub.Watch(request))):
            with pytest.raises(grpc.RpcError) as caught:
                refused()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        watched.pop().cancel()
        until = time.monotonic() + 10
        while server.run(_calls_under_way(server)) > 1:
            assert time.monotonic() < until
        assert stub.Check(request, timeout=10).status == health_pb2.HealthCheckResponse.SERVING
        watched.pop().cancel()


async def _calls_under_way(server: Any) -> int:
    return sum(server.server._services.guard._under_way.values())


HELD_S = 3.0
"""In which so many calls as a connection may have under way come in, also on a busy machine."""


def test_more_streams_than_a_connection_has_wait_or_are_refused_and_harm_nobody(
    serve: Serve,
) -> None:
    most = dict(server_options(tls=False))["grpc.max_concurrent_streams"]
    under_way, peak, lock = 0, 0, threading.Lock()

    async def slow(_request: Any) -> StatusReport:
        nonlocal under_way, peak
        with lock:
            under_way += 1
            peak = max(peak, under_way)
        await asyncio.sleep(HELD_S)
        with lock:
            under_way -= 1
        return STATUS

    server = serve(coordinator=slow)
    with grpc.insecure_channel(server.endpoint) as channel:
        ask = channel.unary_unary("/dataservice.v1.Coordinator/GetStatus")
        request = sealed(GetStatus(), max_bytes=100)
        assert ask(request, timeout=30)  # the server's settings are known then
        calls = [ask.future(request, timeout=30) for _ in range(most + 100)]
        with CoordinatorClient(server.endpoint) as other:
            assert other.call(GetStatus(), 10.0) == STATUS
        ends = {call.code() for call in calls}
        assert ends <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
        assert ask(request, timeout=30)
    assert most - 1 <= peak <= most + 1


# ---- raw connections ----------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, DATA, SETTINGS = 1, 0, 4
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


def literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def headers(method: str) -> bytes:
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": f"/dataservice.v1.Coordinator/{method}".encode(),
        b":authority": b"x",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    return b"".join(literal(name, value) for name, value in fields.items())


@contextlib.contextmanager
def connected(endpoint: str) -> Iterator[socket.socket]:
    host, _, port = endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        yield connection


def read_until_closed(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            found += data
    return found


def still_serves(endpoint: str, security: ClientSecurity | None = None) -> bool:
    with CoordinatorClient(endpoint, security) as client:
        report: StatusReport = client.call(GetStatus(), 10.0)
    return report == STATUS


@pytest.fixture
def short_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [
        (name, 500 if name == "grpc.server_handshake_timeout_ms" else value)
        for name, value in channel_module._SERVER_OPTIONS
    ]
    monkeypatch.setattr(channel_module, "_SERVER_OPTIONS", options)


@pytest.mark.usefixtures("short_handshake")
@pytest.mark.parametrize("begun", [b"", PREFACE[:10], b"\x16\x03\x01\x02\x00", PREFACE])
@pytest.mark.parametrize("tls", [False, True])
def test_a_connection_that_does_not_finish_its_handshake_is_ended(
    serve: Serve, tmp_path: Path, begun: bytes, tls: bool
) -> None:
    authority = Authority(tmp_path)
    security = authority.server() if tls else ServerSecurity()
    server = serve(coordinator=lambda _: STATUS, security=security)
    started = time.monotonic()
    with connected(server.endpoint) as connection:
        connection.sendall(begun)
        read_until_closed(connection)
    assert time.monotonic() - started < 5.0
    assert still_serves(server.endpoint, authority.client() if tls else None)


def test_the_handshake_has_its_time_in_the_options_of_a_server() -> None:
    assert dict(server_options(tls=True))["grpc.server_handshake_timeout_ms"] == 20_000
    assert "grpc.max_connection_age_ms" in dict(server_options(tls=True))
    assert "grpc.max_connection_age_ms" not in dict(server_options(tls=False))


def test_connections_past_the_most_are_refused_until_others_go(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [
        (name, 3 if name == "grpc.max_allowed_incoming_connections" else value)
        for name, value in channel_module._SERVER_OPTIONS
    ]
    monkeypatch.setattr(channel_module, "_SERVER_OPTIONS", options)
    server = serve(coordinator=lambda _: STATUS)
    with contextlib.ExitStack() as held:
        for _ in range(3):
            connection = held.enter_context(connected(server.endpoint))
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
            assert connection.recv(9)
        with pytest.raises(ServiceUnavailable):
            still_serves(server.endpoint)
    until = time.monotonic() + 10
    while True:
        with contextlib.suppress(ServiceUnavailable):
            assert still_serves(server.endpoint)
            return
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize("body", [b"", b"\x00\x00\x00\x01\x00abc"])
def test_a_request_that_does_not_end_is_given_up(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    """Its headers came, of its body nothing, or a part; the connection answers pings all along."""
    monkeypatch.setattr(guard_module, "REQUEST_S", 0.5)
    server = serve(coordinator=lambda _: STATUS)
    with connected(server.endpoint) as connection:
        begin = PREFACE + frame(SETTINGS, 0, 0, b"")
        begin += frame(HEADERS, END_HEADERS, 1, headers("GetStatus"))
        connection.sendall(begin + (frame(DATA, 0, 1, body) if body else b""))
        found, until = b"", time.monotonic() + 8
        while b"no request within 0.5 s" not in found and time.monotonic() < until:
            found += connection.recv(65536)
    assert b"no request within 0.5 s" in found
    assert still_serves(server.endpoint)


MALFORMED = {
    "not HTTP/2": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "nothing but zeros": bytes(4096),
    "a frame longer than its limit": PREFACE + b"\xff\xff\xff" + bytes(6) + bytes(4096),
    "headers that are no HPACK": PREFACE
    + frame(SETTINGS, 0, 0, b"")
    + frame(HEADERS, END_HEADERS, 1, b"\xff" * 64),
    "a message that says it has 2 GiB": PREFACE
    + frame(SETTINGS, 0, 0, b"")
    + frame(HEADERS, END_HEADERS, 1, headers("GetStatus"))
    + frame(DATA, END_STREAM, 1, b"\x00\x7f\xff\xff\xff"),
    "a message over its limit": PREFACE
    + frame(SETTINGS, 0, 0, b"")
    + frame(HEADERS, END_HEADERS, 1, headers("GetStatus"))
    + frame(DATA, 0, 1, b"\x00" + struct.pack(">I", MAX_REQUEST_BYTES + 1) + bytes(8_000)),
    "a call without a request": PREFACE
    + frame(SETTINGS, 0, 0, b"")
    + frame(HEADERS, END_HEADERS | END_STREAM, 1, headers("GetStatus")),
    "a request that is compressed and is not": PREFACE
    + frame(SETTINGS, 0, 0, b"")
    + frame(HEADERS, END_HEADERS, 1, headers("GetStatus"))
    + frame(DATA, END_STREAM, 1, b"\x01\x00\x00\x00\x04abcd"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_nonsense_ends_at_most_its_own_connection(serve: Serve, name: str) -> None:
    called: list[Any] = []

    def answer(request: Any) -> StatusReport:
        called.append(request)
        return STATUS

    server = serve(coordinator=answer)
    with CoordinatorClient(server.endpoint) as client:
        assert client.call(GetStatus(), 10.0) == STATUS
        with connected(server.endpoint) as connection:
            connection.sendall(MALFORMED[name])
            assert connection.recv(65536) is not None
            assert client.call(GetStatus(), 10.0) == STATUS
    assert len(called) == 2
    assert server.server._dead == {}


def test_headers_larger_than_their_limit_are_refused(serve: Serve) -> None:
    server = serve(coordinator=lambda _: STATUS)
    with (
        grpc.insecure_channel(server.endpoint) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary("/dataservice.v1.Coordinator/GetStatus")(
            b"", timeout=10, metadata=(("x", "y" * 100_000),)
        )
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert still_serves(server.endpoint)
