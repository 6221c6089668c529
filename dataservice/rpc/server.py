"""The gRPC server (asyncio) of a coordinator, of a worker, or of both on one port.

Invariants:
- the services are Protocols over messages; nothing above this module sees gRPC;
- a request that cannot be decoded is answered INVALID_ARGUMENT (WireError); a DataServiceError
  reaches the caller as its own class; any other exception is logged with its traceback and
  answered INTERNAL; no request is left without an answer;
- a stream is written frame by frame, each only when HTTP/2 flow control takes it: a reader that
  pauses leaves the generator a few frames ahead, and one that goes away closes it;
- what a caller sends ends no service: gRPC's own server ends at a method name that is not UTF-8,
  and another takes its place at once, on the same port;
- without TLS and token it serves on loopback only, unless the caller says `insecure`;
- every method of ours asks for the token before it reads the request, and gives up one that does
  not arrive within guard.REQUEST_S; health asks for none, since probes have none and it says
  little more than that the port is open; all are within the limits of rpc.guard;
- one server a port: a second one fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from dataservice.errors import ConfigError, ServiceUnavailable, WireError
from dataservice.rpc.access import server_credentials
from dataservice.rpc.allocator import keep_freed_blocks
from dataservice.rpc.binding import checked_bind, endpoint_of
from dataservice.rpc.channel import (
    COORDINATOR_SERVICE,
    DATA_SERVICE,
    MAX_RESPONSE_BYTES,
    server_options,
)
from dataservice.rpc.failures import failure_of, status_of
from dataservice.rpc.guard import LIMITS, PACK_COST, Guard, Limits, request_of
from dataservice.rpc.sealing import sealed, unsealed
from dataservice.rpc.security import ServerSecurity
from dataservice.wire.codec import MAX_FRAME_BYTES
from dataservice.wire.counting import GetRoots, ReportCounts, Roots
from dataservice.wire.draining import Drain, Drained
from dataservice.wire.messages import (
    COORDINATOR_METHODS,
    Assignment,
    GetAssignment,
    GetStatus,
    GetSteps,
    HolesDecided,
    Ok,
    OpenSession,
    PackFailed,
    Progress,
    PullWork,
    RegisterWorker,
    ReportHoles,
    Scaled,
    ScaleWorkers,
    SessionOpened,
    StatusReport,
    Steps,
    StreamPack,
    Work,
    WorkerRegistered,
)
from dataservice.wire.staging import PullStaging, RegisterStager, StagerRegistered, Staging

__all__ = ["CoordinatorService", "DataService", "RunningServer", "start_server"]

_LOG = logging.getLogger(__name__)

AGAIN_S = 0.2
"""Between two attempts to listen on the port of a server that ended by itself."""
OUTLIVES_S = 30.0
"""For which the calls go on that such a server had taken."""

Handler = Callable[[Any, Any], Awaitable[Any]]


class CoordinatorService(Protocol):
    """What the coordinator answers; one coroutine a method of messages.COORDINATOR_METHODS.

    A coroutine is cancelled when its caller goes away or the caller's deadline passes.
    """

    async def open_session(self, request: OpenSession) -> SessionOpened: ...

    async def get_steps(self, request: GetSteps) -> Steps: ...

    async def report_progress(self, request: Progress) -> Ok: ...

    async def register_worker(self, request: RegisterWorker) -> WorkerRegistered: ...

    async def pull_work(self, request: PullWork) -> Work: ...

    async def get_assignment(self, request: GetAssignment) -> Assignment: ...

    async def report_holes(self, request: ReportHoles) -> HolesDecided: ...

    async def report_pack_failed(self, request: PackFailed) -> Ok: ...

    async def report_counts(self, request: ReportCounts) -> Ok: ...

    async def get_roots(self, request: GetRoots) -> Roots: ...

    async def register_stager(self, request: RegisterStager) -> StagerRegistered: ...

    async def pull_staging(self, request: PullStaging) -> Staging: ...

    async def get_status(self, request: GetStatus) -> StatusReport: ...

    async def scale(self, request: ScaleWorkers) -> Scaled: ...

    async def drain(self, request: Drain) -> Drained: ...


class DataService(Protocol):
    """What a worker answers."""

    def stream_pack(self, request: StreamPack) -> AsyncIterator[bytes]:
        """An async generator of the pack's frames; closed early when the reader goes away."""
        ...


class RunningServer:
    """A started server; stop it in the event loop that started it."""

    def __init__(self, services: _Services, host: str, listening: _Listening) -> None:
        self._services = services
        self._listening = listening
        self.host = host
        self.port = listening.port
        self.endpoint = endpoint_of(host, self.port)
        """ "host:port" with the host as bound; a wildcard bind needs a host of the caller's."""
        self._dead: dict[Any, asyncio.Future[None]] = {}
        self._turned_away = False
        self._stopping = False
        self._keeper = asyncio.ensure_future(self._keep())

    async def turn_away(self) -> None:
        """Turns health to NOT_SERVING, for good; calls are answered as before."""
        self._turned_away = True
        await self._listening.health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Turns health to NOT_SERVING, gives calls `grace_s` to end, ends the rest; idempotent."""
        self._stopping = True
        await self.turn_away()
        await self._listening.server.stop(grace_s)
        await self._keeper
        for dead, shut_down in tuple(self._dead.items()):
            await dead.stop(0)
            await shut_down

    async def _keep(self) -> None:
        while True:
            if self._listening.loop is None:
                return
            await asyncio.wait([self._listening.loop])
            if self._stopping:
                return
            _LOG.error("gRPC's server at %s ended by itself: another is started", self.endpoint)
            dead = self._listening.server
            if dead not in self._dead:
                self._dead[dead] = asyncio.ensure_future(self._shut_down(dead))
            try:
                self._listening = await _listening(self._services, self.host, self.port)
            except ConfigError as error:
                _LOG.error("%s", error)
                await asyncio.sleep(AGAIN_S)
            if self._turned_away:
                await self._listening.health.enter_graceful_shutdown()
            if self._stopping:
                await self._listening.server.stop(0)
                return

    async def _shut_down(self, dead: Any) -> None:
        """Frees what it holds; gRPC does not."""
        with contextlib.suppress(UnicodeDecodeError):
            await dead.stop(OUTLIVES_S)
        del self._dead[dead]


PLAIN = ServerSecurity()


async def start_server(
    *,
    coordinator: CoordinatorService | None = None,
    data: DataService | None = None,
    bind: str = "127.0.0.1:0",
    security: ServerSecurity = PLAIN,
    limits: Limits = LIMITS,
) -> RunningServer:
    """Serves the given services, and grpc.health.v1 ("" and each service's name), on `bind`.

    `bind` is "host:port" or "[v6 address]:port"; port 0 takes a free one. ConfigError for a bind
    that is malformed, not loopback without TLS and token, or already in use, and for files of
    `security` that cannot be used.
    """
    if coordinator is None and data is None:
        raise ValueError("start_server needs a coordinator, a data service, or both")
    host, port = checked_bind(bind, security)
    services = _Services(coordinator, data, security, Guard(security, limits))
    return RunningServer(services, host, await _listening(services, host, port))


@dataclass(frozen=True, slots=True)
class _Services:
    coordinator: CoordinatorService | None
    data: DataService | None
    security: ServerSecurity
    guard: Guard


@dataclass(frozen=True, slots=True)
class _Listening:
    server: Any
    health: health_aio.HealthServicer
    port: int
    loop: asyncio.Task[Any] | None
    """In which gRPC takes requests. An exception of its own there ends it and the server, of which
    `wait_for_termination` says nothing. None in a version of gRPC that has no such task."""


async def _listening(services: _Services, host: str, port: int) -> _Listening:
    coordinator, data, guard = services.coordinator, services.data, services.guard
    tls = services.security.tls
    server = grpc.aio.server(options=server_options(tls=tls is not None))
    health = health_aio.HealthServicer()
    if coordinator is not None:
        handlers = _coordinator_handlers(coordinator, guard)
        await _add_service(server, health, COORDINATOR_SERVICE, handlers)
    if data is not None:
        keep_freed_blocks()
        handler = grpc.stream_stream_rpc_method_handler(_stream_handler(data, guard))
        await _add_service(server, health, DATA_SERVICE, {"StreamPack": handler})
    health_pb2_grpc.add_HealthServicer_to_server(_LimitedHealth(health, guard), _ByName(server))
    try:
        if tls is None:
            bound = server.add_insecure_port(endpoint_of(host, port))
        else:
            bound = server.add_secure_port(endpoint_of(host, port), server_credentials(tls))
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {endpoint_of(host, port)}: the port is in use or the address is not "
            f"of this machine; choose another, or port 0 for a free one ({error})"
        ) from None
    before = asyncio.all_tasks()
    await server.start()
    new = asyncio.all_tasks() - before
    loop = next((task for task in new if "_server_main_loop" in repr(task)), None)
    return _Listening(server, health, bound, loop)


class _ByName:
    """Takes generated handlers for a server, by name alone.

    For each that is registered gRPC has memory at hand into which its core writes a call; a server
    that ends by itself gives that memory back too early, and the core writes into others' objects.
    """

    def __init__(self, server: Any) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Not wanted; the generic handlers are the same."""


async def _add_service(
    server: Any, health: health_aio.HealthServicer, name: str, handlers: dict[str, Any]
) -> None:
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    await health.set(name, health_pb2.HealthCheckResponse.SERVING)


# ---- handlers -----------------------------------------------------------------------------------


def _coordinator_handlers(coordinator: CoordinatorService, guard: Guard) -> dict[str, Any]:
    """Registered as if requests were streams: those are read by the handler, and not before it
    runs."""
    return {
        name: grpc.stream_unary_rpc_method_handler(
            _unary_handler(name, request, response, getattr(coordinator, _snake_case(name)), guard)
        )
        for name, (request, response) in COORDINATOR_METHODS.items()
    }


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _unary_handler(
    name: str,
    request_type: type,
    response_type: type,
    method: Callable[[Any], Awaitable[Any]],
    guard: Guard,
) -> Handler:
    async def handle(_requests: Any, context: Any) -> bytes:
        async with _failures_answered(name, context):
            with guard.lets_in(context):
                response = await method(unsealed(request_type, await request_of(name, context)))
            if type(response) is not response_type:
                raise TypeError(f"{name} answers {response_type.__name__}, got {response!r:.80}")
            return _response(response)
        raise AssertionError("unreachable: a failure aborts the call")

    return handle


def _stream_handler(data_service: DataService, guard: Guard) -> Handler:
    async def handle(_requests: Any, context: Any) -> None:
        async with _failures_answered("StreamPack", context):
            with guard.lets_in(context, cost=PACK_COST):
                request = unsealed(StreamPack, await request_of("StreamPack", context))
                frames = data_service.stream_pack(request)
                async with _closing(frames):
                    await _write(frames, context)

    return handle


async def _write(frames: AsyncIterator[bytes], context: Any) -> None:
    async for frame in frames:
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(frame)} bytes, over {MAX_FRAME_BYTES}")
        await context.write(frame)
        del frame  # the next one takes its memory, which is in the cache


class _LimitedHealth(health_pb2_grpc.HealthServicer):
    """Takes the same calls of a peer as others, and no token."""

    def __init__(self, health: health_aio.HealthServicer, guard: Guard) -> None:
        self._health = health
        self._guard = guard

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        with contextlib.ExitStack() as held:
            await self._let_in(held, context)
            return await self._health.Check(request, context)

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        with contextlib.ExitStack() as held:
            await self._let_in(held, context)
            await self._health.Watch(request, context)

    async def _let_in(self, held: contextlib.ExitStack, context: Any) -> None:
        try:
            held.enter_context(self._guard.call(context.peer()))
        except ServiceUnavailable as error:
            await context.abort(*status_of(error))


@contextlib.asynccontextmanager
async def _closing(frames: Any) -> AsyncIterator[None]:
    try:
        yield
    finally:
        close = getattr(frames, "aclose", None)
        if close is not None:
            await close()


def _response(response: object) -> bytes:
    try:
        return sealed(response, max_bytes=MAX_RESPONSE_BYTES)
    except WireError as error:  # ours, not the caller's: answered INTERNAL
        raise TypeError(str(error)) from error


@contextlib.asynccontextmanager
async def _failures_answered(method: str, context: Any) -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.InternalError as error:  # a write after the caller left, before gRPC says so
        raise asyncio.CancelledError from error
    except Exception as error:
        code, details, metadata = failure_of(method, error)
    else:
        return
    await context.abort(code, details, metadata)
