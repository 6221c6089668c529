"""dataservice.rpc.server: every method, every error class, health, binding, back-pressure."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dataservice import errors
from dataservice.errors import (
    ConfigError,
    DataError,
    DataServiceError,
    ServiceUnavailable,
    WireError,
)
from dataservice.rpc.channel import MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES, STREAM_PACK
from dataservice.rpc.client import CoordinatorClient, DataClient
from dataservice.rpc.sealing import CRC_BYTES, seal
from dataservice.rpc.security import ServerSecurity
from dataservice.rpc.server import start_server
from dataservice.wire.codec import MAX_FRAME_BYTES
from dataservice.wire.messages import (
    COORDINATOR_METHODS,
    GetStatus,
    HolesDecided,
    Ok,
    ReportHoles,
    StatusReport,
    StreamPack,
)
from dataservice.wire.schema import encode

Serve = Callable[..., Any]
PACK = StreamPack(session=1, pack_id="0.0.0", dp_rank=0, wait_s=1.0)


@pytest.fixture
def call(serve: Serve) -> Iterator[Callable[..., Any]]:
    """call(answer function, request) -> response, over a real connection."""
    clients = []

    def run(answer: Callable[[Any], Any], request: Any, timeout_s: float = 30.0) -> Any:
        client = CoordinatorClient(serve(coordinator=answer).endpoint)
        clients.append(client)
        return client.call(request, timeout_s)

    yield run
    for client in clients:
        client.close()


def empty_request(cls: Any) -> Any:
    """A request with zeros of the right types."""
    values = {"int": 0, "float": 0.0, "str": "", "bool": False, "dict[str, str]": {}}
    values |= {"bytes": b"", "ResumeState | None": None}
    return cls(
        **{
            name: () if kind.startswith("tuple[") else values[kind]
            for name, kind in cls.__annotations__.items()
        }
    )


@pytest.mark.parametrize("method", COORDINATOR_METHODS)
def test_every_method_reaches_its_own_coroutine(serve: Serve, method: str) -> None:
    request_type, _ = COORDINATOR_METHODS[method]
    seen: list[Any] = []

    class Service:
        def __getattr__(self, name: str) -> Any:
            async def answer(request: Any) -> Any:
                seen.append((name, request))
                raise errors.ResumeRefused("seen")

            return answer

    server = serve(coordinator=lambda request: None)
    server.run(server.server.stop(0))
    server.server = server.run(start_server(coordinator=Service()))
    request = empty_request(request_type)
    with (
        CoordinatorClient(server.server.endpoint) as client,
        pytest.raises(errors.ResumeRefused, match="seen"),
    ):
        client.call(request, 30.0)
    ((name, received),) = seen
    assert received == request
    assert name.replace("_", "") == method.lower()


def test_messages_travel_both_ways(call: Callable[..., Any]) -> None:
    answer = HolesDecided(holes={"s/a@0#1": "größer"})
    request = ReportHoles(worker_id="w", lease=1, pack_id="0.0.0", holes={"s/a@0#1": "x"})
    assert call(lambda request: answer, request) == answer


# ---- errors -------------------------------------------------------------------------------------

ERROR_CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, DataServiceError)
]


@pytest.mark.parametrize("cls", ERROR_CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_arrives_as_its_own_class(
    call: Callable[..., Any], cls: type[DataServiceError]
) -> None:
    text = "rank 3: größer\nsecond line %41"
    if issubclass(cls, DataError):
        error: DataServiceError = cls(text, source="s", shard="a.zip", sample="k", member="ü.jpg")
    else:
        error = cls(text)

    def fail(request: Any) -> Any:
        raise error

    with pytest.raises(cls) as caught:
        call(fail, GetStatus())
    assert type(caught.value) is cls
    assert str(caught.value) == str(error)
    assert "GetStatus at 127.0.0.1:" in caught.value.__notes__[0]
    if isinstance(error, DataError) and isinstance(caught.value, DataError):
        assert caught.value.where == error.where == "source s, shard a.zip, sample k, member ü.jpg"


def test_another_exception_is_logged_and_answered_without_its_text(
    call: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: Any) -> Any:
        raise ZeroDivisionError("a secret")

    with pytest.raises(DataServiceError) as caught:
        call(fail, GetStatus())
    assert type(caught.value) is DataServiceError
    assert "GetStatus failed with ZeroDivisionError" in str(caught.value)
    assert "secret" not in str(caught.value)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert "a secret" in str(record.exc_info[1])


@pytest.mark.parametrize("wrong", [None, Ok(), StatusReport(status=5)])  # type: ignore[arg-type]
def test_a_wrong_response_is_a_failure_of_the_service(
    call: Callable[..., Any], wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DataServiceError, match="failed with TypeError"):
        call(lambda request: wrong, GetStatus())
    assert "failed" in caplog.text


def raw_call(endpoint: str, method: str, data: bytes) -> bytes:
    with grpc.insecure_channel(endpoint, options=[("grpc.enable_http_proxy", 0)]) as channel:
        return bytes(channel.unary_unary(method)(data, timeout=30))


def test_a_request_that_is_no_message_is_an_invalid_argument(serve: Serve) -> None:
    server = serve(coordinator=lambda request: pytest.fail("must not be called"))
    with pytest.raises(grpc.RpcError) as caught:
        data = seal(b"\x81\xa7workers\xa1x")
        raw_call(server.endpoint, "/dataservice.v1.Coordinator/Scale", data)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "ScaleWorkers.workers: expected an int, got str"
    assert dict(caught.value.trailing_metadata())["dataservice-error"] == "WireError"


def test_an_unknown_method_is_unimplemented(serve: Serve) -> None:
    server = serve(coordinator=lambda request: None)
    for method in ("/dataservice.v1.Coordinator/Nothing", STREAM_PACK):
        with pytest.raises(grpc.RpcError) as caught:
            raw_call(server.endpoint, method, b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with (
        DataClient(server.endpoint) as client,
        pytest.raises(WireError, match="is this the right endpoint"),
    ):
        next(client.stream_pack(PACK, 30.0))


def test_a_request_over_its_limit_is_not_sent(call: Callable[..., Any]) -> None:
    empty = len(encode(ReportHoles(worker_id="w", lease=1, pack_id="p", holes={"k": "x" * 65536})))
    text = 65536 + MAX_REQUEST_BYTES - CRC_BYTES - empty
    largest = ReportHoles(worker_id="w", lease=1, pack_id="p", holes={"k": "x" * text})
    seen: list[ReportHoles] = []

    def answer(request: ReportHoles) -> HolesDecided:
        seen.append(request)
        return HolesDecided(holes={})

    call(answer, largest)
    assert seen == [largest]
    over = replace(largest, holes={"k": "x" * (text + 1)})
    with pytest.raises(WireError, match="4194301 bytes, more than the limit of 4194300"):
        call(answer, over)
    assert seen == [largest]


def test_a_message_over_its_limit_is_an_error_not_a_hang(call: Callable[..., Any]) -> None:
    text = "x" * (MAX_RESPONSE_BYTES // 5)
    with pytest.raises(DataServiceError):
        call(
            lambda request: HolesDecided(holes={str(number): text for number in range(5)}),
            ReportHoles(worker_id="w", lease=1, pack_id="p", holes={}),
        )
    almost = HolesDecided(holes={"k": "x" * (10 << 20)})
    assert (
        call(lambda request: almost, ReportHoles(worker_id="w", lease=1, pack_id="p", holes={}))
        == almost
    )


# ---- streams ------------------------------------------------------------------------------------


def test_frames_arrive_in_order(serve: Serve) -> None:
    frames = [bytes([number]) * 1000 for number in range(50)] + [b"x" * MAX_FRAME_BYTES]
    seen = []

    def stream(request: StreamPack) -> list[bytes]:
        seen.append(request)
        return frames

    with DataClient(serve(data=stream).endpoint) as client:
        assert list(client.stream_pack(PACK, 30.0)) == frames
    assert seen == [PACK]


def test_an_error_in_the_middle_of_a_stream(serve: Serve) -> None:
    def stream(request: StreamPack) -> Iterator[bytes]:
        yield b"one"
        raise errors.StorageTimeout("the origin sleeps")

    with DataClient(serve(data=stream).endpoint) as client:
        frames = client.stream_pack(PACK, 30.0)
        assert next(frames) == b"one"
        with pytest.raises(errors.StorageTimeout, match="the origin sleeps"):
            next(frames)


def test_a_frame_over_the_limit_is_a_failure_of_the_service(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(data=lambda request: [bytes(MAX_FRAME_BYTES + 1)])
    with (
        DataClient(server.endpoint) as client,
        pytest.raises(DataServiceError, match="failed with ValueError"),
    ):
        next(client.stream_pack(PACK, 30.0))
    assert "a frame of" in caplog.text


def test_a_reader_that_pauses_holds_up_the_generator(serve: Serve, data_of: Any) -> None:
    frame = bytes(1 << 20)
    data = data_of(lambda request: (frame for _ in range(200)))
    with DataClient(serve(data=data).endpoint) as client:
        frames = client.stream_pack(PACK, 60.0)
        assert next(frames) == frame
        produced = -1
        while produced != data.produced:  # until nothing more is taken
            produced = data.produced
            time.sleep(0.3)
        assert 1 <= produced <= 16
        assert sum(1 for _ in frames) == 199
    assert data.produced == 200


def test_a_reader_that_goes_away_closes_the_generator(
    serve: Serve, data_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    frame = bytes(1 << 20)
    data = data_of(lambda request: (frame for _ in range(200)))
    with DataClient(serve(data=data).endpoint) as client:
        frames = client.stream_pack(PACK, 60.0)
        next(frames)
        frames.cancel()
        frames.cancel()
        assert data.closed.wait(timeout=30)
        with pytest.raises(errors.ServiceUnavailable):
            list(frames)
    assert data.produced < 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# ---- deadlines, cancellation, stop --------------------------------------------------------------


def test_a_deadline_ends_the_call_at_both_ends(serve: Serve, coordinator_of: Any) -> None:
    coordinator = coordinator_of(lambda request: asyncio.sleep(60))
    with (
        CoordinatorClient(serve(coordinator=coordinator).endpoint) as client,
        pytest.raises(errors.DeadlineExceeded, match=r"GetStatus at .*: no answer within 0\.2 s"),
    ):
        client.call(GetStatus(), 0.2)
    assert coordinator.cancelled.wait(timeout=30)


def test_stop_gives_calls_their_grace_and_may_be_repeated(serve: Serve) -> None:
    started = threading.Event()

    async def slowly() -> StatusReport:
        started.set()
        await asyncio.sleep(0.3)
        return StatusReport(status="done")

    server = serve(coordinator=lambda request: slowly())
    answers: list[Any] = []
    with CoordinatorClient(server.endpoint) as client:
        thread = threading.Thread(target=lambda: answers.append(client.call(GetStatus(), 30.0)))
        thread.start()
        assert started.wait(timeout=30)
        server.run(server.server.stop(30.0))
        thread.join(timeout=30)
        assert answers == [StatusReport(status="done")]
        server.run(server.server.stop(0))
        with pytest.raises(errors.ServiceUnavailable):
            client.call(GetStatus(), 5.0)


def test_stop_without_grace_ends_calls_as_unavailable(serve: Serve) -> None:
    started = threading.Event()

    async def forever() -> Any:
        started.set()
        await asyncio.sleep(60)

    server = serve(coordinator=lambda request: forever())
    failures: list[BaseException] = []

    def run() -> None:
        try:
            client.call(GetStatus(), 30.0)
        except errors.ServiceUnavailable as error:
            failures.append(error)

    with CoordinatorClient(server.endpoint) as client:
        thread = threading.Thread(target=run)
        thread.start()
        assert started.wait(timeout=30)
        server.run(server.server.stop(0))
        thread.join(timeout=30)
    assert len(failures) == 1


def test_health_says_what_is_served_and_turns_before_the_end(serve: Serve) -> None:
    started, release = threading.Event(), threading.Event()

    async def until_released() -> StatusReport:
        started.set()
        while not release.is_set():
            await asyncio.sleep(0.01)
        return StatusReport(status="")

    server = serve(coordinator=lambda request: until_released())
    serving, not_serving = (
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
    )
    with (
        grpc.insecure_channel(server.endpoint, options=[("grpc.enable_http_proxy", 0)]) as channel,
        CoordinatorClient(server.endpoint) as client,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "dataservice.v1.Coordinator"):
            request = health_pb2.HealthCheckRequest(service=name)
            assert health.Check(request, timeout=30).status == serving
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="dataservice.v1.Data"), timeout=30)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest(service=""), timeout=30)
        assert next(watch).status == serving
        thread = threading.Thread(target=lambda: client.call(GetStatus(), 30.0))
        thread.start()
        assert started.wait(timeout=30)
        stopping = asyncio.run_coroutine_threadsafe(server.server.stop(30.0), server.loop)
        assert next(watch).status == not_serving
        watch.cancel()
        release.set()
        thread.join(timeout=30)
        stopping.result(timeout=30)


# ---- where it listens ---------------------------------------------------------------------------


async def _start_and_stop(bind: str, *, insecure: bool = False) -> str:
    server = await start_server(
        coordinator=NOBODY, bind=bind, security=ServerSecurity(insecure=insecure)
    )
    await server.stop(0)
    return server.endpoint


class _Nobody:
    def __getattr__(self, name: str) -> Any:
        return None


NOBODY: Any = _Nobody()


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "10.0.0.1:0", "example.org:7070"])
def test_a_bind_that_others_reach_must_be_asked_for(bind: str) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        asyncio.run(_start_and_stop(bind))


def test_insecure_serves_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = asyncio.run(_start_and_stop("0.0.0.0:0", insecure=True))
    assert endpoint.startswith("0.0.0.0:")
    assert "plain text" in caplog.text


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "localhost:0", "127.8.8.8:0"])
def test_loopback_is_the_default(bind: str) -> None:
    host, _, port = asyncio.run(_start_and_stop(bind)).rpartition(":")
    assert host == bind.rpartition(":")[0]
    assert int(port) > 0


@pytest.mark.parametrize(
    "bind", ["", "7070", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536", "::1:0", "a/b:1"]
)
def test_a_malformed_bind(bind: str) -> None:
    with pytest.raises(ConfigError, match="is not"):
        asyncio.run(_start_and_stop(bind))


def test_a_port_in_use_is_named(serve: Serve) -> None:
    server = serve(coordinator=lambda request: None)
    with pytest.raises(
        ConfigError, match=f"cannot listen on {server.endpoint}: the port is in use"
    ):
        asyncio.run(_start_and_stop(server.endpoint))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            asyncio.run(_start_and_stop(f"127.0.0.1:{port}"))


def test_a_server_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a coordinator, a data service"):
        asyncio.run(start_server())


def test_a_method_name_that_is_no_text_ends_no_service(serve: Serve) -> None:
    """It ends gRPC's own server, whose place another takes, and whose memory is not written to
    when it is somebody else's."""
    server = serve(coordinator=lambda request: StatusReport(status="here"))
    for _ in range(10):
        with pytest.raises(grpc.RpcError):
            raw_call(server.endpoint, b"/dataservice\x8d/x", b"")  # type: ignore[arg-type]
        deadline = time.monotonic() + 10
        with CoordinatorClient(server.endpoint) as client:
            while True:
                try:
                    assert client.call(GetStatus(), 5.0).status == "here"
                    break
                except ServiceUnavailable:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
    server.run(server.server.stop(0))
    assert not server.server._dead
    server.run(server.server.stop(0))
