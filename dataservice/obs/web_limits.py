"""Where an HTTP server listens, with bounds on connections that aiohttp has not.

Invariants: a connection past the most is ended before it is read; one whose first request does not
arrive in time is ended, and so is one that does not finish TLS; between requests aiohttp's own
keep-alive does the same.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from aiohttp import web

__all__ = ["LimitedSite"]

MAX_CONNECTIONS = 128
REQUEST_S = 10.0
"""For the first request of a connection."""
HANDSHAKE_S = 10.0


class LimitedSite(web.BaseSite):
    """In place of web.TCPSite."""

    def __init__(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        *,
        context: ssl.SSLContext | None,
        silent: set[Any],
    ) -> None:
        """`silent` gets aiohttp's end of each connection; who handles requests takes it out."""
        super().__init__(runner, ssl_context=context, backlog=MAX_CONNECTIONS)
        self._host = host.strip("[]")
        self._port = port
        self._silent = silent

    @property
    def name(self) -> str:
        return f"{self._host}:{self._port}"

    async def start(self) -> None:
        """OSError where nothing can listen there."""
        await super().start()
        self._server = await asyncio.get_running_loop().create_server(
            self._accept,
            self._host,
            self._port,
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=None if self._ssl_context is None else HANDSHAKE_S,
        )

    def _accept(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        if len(server.connections) >= MAX_CONNECTIONS:
            return _TurnedAway()
        protocol = server()
        self._silent.add(protocol)
        asyncio.get_running_loop().call_later(REQUEST_S, self._end_if_silent, protocol)
        return protocol

    def _end_if_silent(self, protocol: Any) -> None:
        if protocol in self._silent:
            self._silent.discard(protocol)
            protocol.force_close()


class _TurnedAway(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()
