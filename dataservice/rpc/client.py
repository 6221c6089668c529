"""Blocking clients of the coordinator and of workers; import only grpc, msgpack, zstandard, numpy.

Invariants:
- every call has a deadline and ends in a message or in an error of dataservice.errors:
  ServiceUnavailable when nobody answers or the client was closed, DeadlineExceeded at the
  deadline, AccessRefused where one end does not take the other's certificate or token, otherwise
  the class that the service raised;
- a message that was damaged on its way is sent once more on a new connection, then it is a
  WireError; nor is a connection used again on which the coordinator let a deadline pass, since it
  may be half open;
- safe from several threads: `close()` in one makes a call blocked in another raise;
- a client belongs to the process that made it: gRPC does not survive a fork, so a use after one is
  refused with a ConfigError instead of hanging.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import grpc.experimental

from dataservice.errors import (
    ConfigError,
    DamagedMessage,
    DeadlineExceeded,
    ServiceUnavailable,
)
from dataservice.rpc.access import Access
from dataservice.rpc.allocator import keep_freed_blocks
from dataservice.rpc.channel import (
    COORDINATOR_OPTIONS,
    DATA_OPTIONS,
    MAX_REQUEST_BYTES,
    STREAM_PACK,
    Options,
    coordinator_method,
)
from dataservice.rpc.failures import error_of, is_ours
from dataservice.rpc.sealing import sealed, unsealed
from dataservice.rpc.security import ClientSecurity
from dataservice.wire.messages import StreamPack

__all__ = ["CoordinatorClient", "DataClient", "PackFrames", "checked_endpoint"]

SINGLE_THREADED: Options = [(grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)]
"""A stream is read by the thread that wants it; else gRPC starts one for every stream and hands
each frame over: half of a client's CPU time where packs are small."""


class _Client:
    """A channel with an owner: one process, closed once."""

    def __init__(self, endpoint: str, options: Options, security: ClientSecurity | None) -> None:
        self.endpoint = checked_endpoint(endpoint)
        self._access = Access(endpoint, security)
        self._options = options
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._channel = self._access.channel(grpc, options)

    def _open_channel(self, call: str) -> Any:
        if os.getpid() != self._pid:
            raise ConfigError(
                f"{call}: the client was made in process {self._pid} and is used in process "
                f"{os.getpid()} after a fork, which gRPC does not survive; make it in the process "
                "that uses it (num_workers=0, or the spawn start method)"
            )
        if self._closed:
            raise ServiceUnavailable(f"{call}: the client is closed")
        return self._channel

    def close(self) -> None:
        """Ends the channel and every call on it; idempotent, from any thread."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            channel = self._channel
        channel.close()

    def _connect_anew(self, silent: Any) -> None:
        """Unless another thread has; what others wait for on the old connection ends."""
        with self._lock:
            if self._closed or self._channel is not silent:
                return
            self._channel = self._access.channel(grpc, self._options)
        silent.close()

    def _explained(self, failure: Exception, channel: Any) -> Exception:
        """What to raise; the next call shows renewed files, if they are what this one lacked."""
        if not self._access.is_refused(failure):
            return failure
        if not self._access.is_renewed():
            return self._access.explained(failure)
        self._connect_anew(channel)
        return failure

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class CoordinatorClient(_Client):
    """The coordinator's methods, one request message each (messages.COORDINATOR_METHODS)."""

    def __init__(self, endpoint: str, security: ClientSecurity | None = None) -> None:
        """`security` None: ClientSecurity.from_environment(). Raises ConfigError for an endpoint
        that is none, and for files that cannot be used."""
        super().__init__(endpoint, COORDINATOR_OPTIONS, security)

    def call(self, request: object, timeout_s: float) -> Any:
        """The response message to `request`; waits at most `timeout_s` (above request.wait_s)."""
        method, response_type = coordinator_method(request)
        call = f"{method.rpartition('/')[2]} at {self.endpoint}"
        channel = self._open_channel(call)
        data = sealed(request, max_bytes=MAX_REQUEST_BYTES)
        try:
            return unsealed(response_type, self._invoke(channel, method, data, call, timeout_s))
        except DamagedMessage:
            self._connect_anew(channel)  # both ends of the old one may remember what was wrong
            channel = self._open_channel(call)
            return unsealed(response_type, self._invoke(channel, method, data, call, timeout_s))

    def _invoke(self, channel: Any, method: str, data: bytes, call: str, timeout_s: float) -> Any:
        invoke = _invocation(channel, "unary_unary", method, call)
        try:
            return invoke(data, timeout=timeout_s, metadata=self._access.metadata)
        except grpc.RpcError as error:
            failure = _failure(error, call, timeout_s)
            if isinstance(failure, DeadlineExceeded) and not is_ours(_trailing_metadata(error)):
                self._connect_anew(channel)
            raise self._explained(failure, channel) from None
        except ValueError as error:  # grpc's word for a channel closed by another thread
            raise ServiceUnavailable(f"{call}: {error}") from None


class DataClient(_Client):
    """The packs of one worker."""

    def __init__(self, endpoint: str, security: ClientSecurity | None = None) -> None:
        """As CoordinatorClient."""
        super().__init__(endpoint, [*DATA_OPTIONS, *SINGLE_THREADED], security)
        keep_freed_blocks()

    def stream_pack(self, request: StreamPack, timeout_s: float) -> PackFrames:
        """Starts the stream of a pack's frames (wire.codec.PackDecoder reads them).

        `timeout_s` bounds the whole stream, the time the worker needs to build included.
        """
        call = f"StreamPack {request.pack_id} at {self.endpoint}"
        channel = self._open_channel(call)
        invoke = _invocation(channel, "unary_stream", STREAM_PACK, call)
        try:
            data = sealed(request, max_bytes=MAX_REQUEST_BYTES)
            stream = invoke(data, timeout=timeout_s, metadata=self._access.metadata)
        except ValueError as error:
            raise ServiceUnavailable(f"{call}: {error}") from None
        return PackFrames(stream, call, timeout_s, partial(self._explained, channel=channel))


def checked_endpoint(endpoint: str) -> str:
    """`endpoint` when it has the form "host:port"; ConfigError otherwise."""
    if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:/\s\[\]]+):[0-9]{1,5}", endpoint):
        raise ConfigError(f"endpoint {endpoint!r} is not host:port, such as 127.0.0.1:7070")
    return endpoint


class PackFrames(Iterator[bytes]):
    """Frames of one pack as they arrive; the worker sends only a few ahead of the reader."""

    def __init__(
        self,
        stream: Any,
        call: str,
        timeout_s: float,
        explained: Callable[[Exception], Exception],
    ) -> None:
        self._stream = stream
        self._call = call
        self._timeout_s = timeout_s
        self._explained = explained

    def __next__(self) -> bytes:
        try:
            frame: bytes = next(self._stream)
        except grpc.RpcError as error:
            raise self._explained(_failure(error, self._call, self._timeout_s)) from None
        return frame

    def cancel(self) -> None:
        """Ends the stream at both ends; idempotent, from any thread."""
        self._stream.cancel()

    def __enter__(self) -> PackFrames:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.cancel()
        _drain(self._stream)


def _drain(stream: Any) -> None:
    """Takes the last events of a cancelled stream, which come at once. grpc's end of a stream that
    is read by one thread (SINGLE_THREADED) leaves that to the reader, and has no name for it: until
    then it keeps the call, and with it the connection, also of a channel that is closed."""
    consume = getattr(stream, "_consume_next_event", None)
    while consume is not None and stream._state.due:
        consume()


def _invocation(channel: Any, kind: str, method: str, call: str) -> Any:
    try:
        return getattr(channel, kind)(method)
    except ValueError as error:  # grpc's word for a channel closed by another thread
        raise ServiceUnavailable(f"{call}: {error}") from None


def _failure(error: Any, call: str, timeout_s: float) -> Exception:
    return error_of(
        code=error.code(),
        details=error.details(),
        metadata=_trailing_metadata(error),
        call=call,
        timeout_s=timeout_s,
    )


def _trailing_metadata(error: Any) -> Any:
    try:
        return error.trailing_metadata()
    except grpc.experimental.UsageError:  # ended at this side, before the service said anything
        return ()
