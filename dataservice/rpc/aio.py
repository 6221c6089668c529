"""The asyncio twins of rpc.client, for the workers and stagers.

Invariants: as in rpc.client: every call has a deadline and ends in a message or in an error of
dataservice.errors; a damaged message is sent once more, and a connection on which a deadline
passed is not used again; a client belongs to the event loop it is first used in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from dataservice.errors import DamagedMessage, DeadlineExceeded, ServiceUnavailable
from dataservice.rpc.access import Access
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

__all__ = ["AsyncCoordinatorClient", "AsyncDataClient"]


class _AsyncClient:
    def __init__(self, endpoint: str, options: Options, security: ClientSecurity | None) -> None:
        self.endpoint = endpoint
        self._access = Access(endpoint, security)
        self._options = options
        self._closed = False
        self._channel: Any = None

    def _open_channel(self, call: str) -> Any:
        if self._closed:
            raise ServiceUnavailable(f"{call}: the client is closed")
        if self._channel is None:
            self._channel = self._access.channel(grpc.aio, self._options)
        return self._channel

    async def _explained(self, failure: Exception, channel: Any) -> Exception:
        """What to raise; the next call shows renewed files, if they are what this one lacked."""
        if not self._access.is_refused(failure):
            return failure
        if not self._access.is_renewed():
            return await asyncio.to_thread(self._access.explained, failure)
        await self._disconnect(channel)
        return failure

    def _raise_if_closed(self, call: str, channel: Any) -> None:
        """Tells the channel's end, which grpc.aio shows as CancelledError too, from a cancelled
        task."""
        task = asyncio.current_task()
        if channel is not self._channel and task is not None and not task.cancelling():
            raise ServiceUnavailable(f"{call}: the connection was closed meanwhile") from None

    async def close(self) -> None:
        """Ends the channel and every call on it; idempotent."""
        self._closed = True
        await self._disconnect(self._channel)

    async def _disconnect(self, channel: Any) -> None:
        """The next call connects anew; what others wait for on `channel` ends."""
        if channel is not None and channel is self._channel:
            self._channel = None
            await channel.close()

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()


class AsyncCoordinatorClient(_AsyncClient):
    """See rpc.client.CoordinatorClient."""

    def __init__(self, endpoint: str, security: ClientSecurity | None = None) -> None:
        super().__init__(endpoint, COORDINATOR_OPTIONS, security)

    async def call(self, request: object, timeout_s: float) -> Any:
        """The response message to `request`; waits at most `timeout_s` (above request.wait_s)."""
        method, response_type = coordinator_method(request)
        call = f"{method.rpartition('/')[2]} at {self.endpoint}"
        channel = self._open_channel(call)
        data = sealed(request, max_bytes=MAX_REQUEST_BYTES)
        try:
            answer = await self._invoke(channel, method, data, call, timeout_s)
            return unsealed(response_type, answer)
        except DamagedMessage:
            await self._disconnect(channel)
        channel = self._open_channel(call)
        answer = await self._invoke(channel, method, data, call, timeout_s)
        return unsealed(response_type, answer)

    async def _invoke(
        self, channel: Any, method: str, data: bytes, call: str, timeout_s: float
    ) -> Any:
        invoke = channel.unary_unary(method)
        try:
            return await invoke(data, timeout=timeout_s, metadata=self._access.metadata)
        except grpc.aio.AioRpcError as error:
            failure = _failure(error, call, timeout_s)
            if isinstance(failure, DeadlineExceeded) and not is_ours(error.trailing_metadata()):
                await self._disconnect(channel)
            raise await self._explained(failure, channel) from None
        except asyncio.CancelledError:
            self._raise_if_closed(call, channel)
            raise


class AsyncDataClient(_AsyncClient):
    """See rpc.client.DataClient."""

    def __init__(self, endpoint: str, security: ClientSecurity | None = None) -> None:
        super().__init__(endpoint, DATA_OPTIONS, security)

    async def stream_pack(self, request: StreamPack, timeout_s: float) -> AsyncIterator[bytes]:
        """The frames of a pack; `timeout_s` bounds the whole stream."""
        call = f"StreamPack {request.pack_id} at {self.endpoint}"
        channel = self._open_channel(call)
        data = sealed(request, max_bytes=MAX_REQUEST_BYTES)
        invoke = channel.unary_stream(STREAM_PACK)
        stream = invoke(data, timeout=timeout_s, metadata=self._access.metadata)
        try:
            async for frame in stream:
                yield frame
        except grpc.aio.AioRpcError as error:
            raise await self._explained(_failure(error, call, timeout_s), channel) from None
        except asyncio.CancelledError:
            self._raise_if_closed(call, channel)
            raise
        finally:
            stream.cancel()


def _failure(error: grpc.aio.AioRpcError, call: str, timeout_s: float) -> Exception:
    return error_of(
        code=error.code(),
        details=error.details(),
        metadata=error.trailing_metadata(),
        call=call,
        timeout_s=timeout_s,
    )
