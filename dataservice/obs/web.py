"""An HTTP server in the event loop of a coordinator, worker or stager: GET alone, nothing changes.

Invariants: where the service has a token it is asked for on every path but /healthz; where it has
none, and loopback alone is served, the request must name a loopback host, so that no page of
another site reads it through a name of its own; requests are small and few at once
(obs.web_limits); what a handler raises is a 500 without its text; what came in a malformed request
stays out of the log: its header may be the one with the token.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from aiohttp import http_exceptions, web

from dataservice.errors import ConfigError
from dataservice.obs.web_limits import LimitedSite
from dataservice.rpc.security import (
    ServerSecurity,
    TokenFile,
    check_reachable,
    is_loopback,
    server_ssl_context,
)

__all__ = ["Answer", "Handler", "WebServer", "start_web"]

_LOG = logging.getLogger(__name__)
_AIOHTTP_LOG = logging.getLogger(f"{__name__}.aiohttp")

KEEPALIVE_S = 30.0
"""Of a connection between two requests."""
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    content_type: str = "application/json"
    status: int = 200


Handler = Callable[[Mapping[str, str]], Awaitable[Answer]]
"""Takes the query's parameters."""


class WebServer:
    """Made by `start_web`; for the event loop it was started in."""

    def __init__(self, runner: web.AppRunner, host: str, port: int, scheme: str) -> None:
        self._runner = runner
        self.port = port
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{scheme}://{shown}:{port}"

    async def stop(self) -> None:
        """Idempotent."""
        await self._runner.cleanup()


async def start_web(
    routes: Mapping[str, Handler], *, host: str, port: int, security: ServerSecurity
) -> WebServer:
    """Serves `routes` (path -> handler) and /healthz at `host`; `port` 0 takes a free one.

    ConfigError for a port in use, and for a host beyond loopback without TLS and token, unless
    `security.insecure`.
    """
    check_reachable(f"serving.host {host} (status page)", host, security)
    token = None if security.token_file is None else TokenFile(security.token_file)
    silent: set[Any] = set()
    only_here = token is None and is_loopback(host)
    app = web.Application(
        middlewares=[_guard(token, silent, only_here=only_here)], client_max_size=1024
    )
    app.router.add_get("/healthz", _healthz)
    for path, handler in routes.items():
        app.router.add_get(path, _handled(handler))
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=_AIOHTTP_LOG,
        shutdown_timeout=1.0,
        keepalive_timeout=KEEPALIVE_S,
    )
    await runner.setup()
    context = None if security.tls is None else server_ssl_context(security.tls)
    site = LimitedSite(runner, host, port, context=context, silent=silent)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"serving.http_port {port}: cannot listen at {host}: {error.strerror or error}; give "
            "another, 0 for any free one, or null for none"
        ) from None
    bound: int = runner.addresses[0][1]
    return WebServer(runner, host, bound, "https" if context else "http")


def _is_ours(record: logging.LogRecord) -> bool:
    """Errors about malformed requests quote them."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, http_exceptions.HttpProcessingError)


_AIOHTTP_LOG.addFilter(_is_ours)


def _guard(
    token: TokenFile | None, silent: set[Any], *, only_here: bool
) -> Callable[..., Awaitable[web.StreamResponse]]:
    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        silent.discard(request.protocol)
        try:
            response = refusal(request) or await handler(request)
        except web.HTTPException as error:  # no such path, another method
            error.headers.update(HEADERS)
            raise
        response.headers.update(HEADERS)
        return response

    def refusal(request: web.Request) -> web.Response | None:
        if only_here and not is_loopback(_host_named(request)):
            return web.Response(status=403, text="ask for it by 127.0.0.1 or localhost")
        if token is not None and request.path != "/healthz" and not _lets_in(token, request):
            asked = {"WWW-Authenticate": 'Basic realm="dataservice", charset="UTF-8"'}
            return web.Response(status=401, text="a token is needed", headers=asked)
        return None

    return guard


def _host_named(request: web.Request) -> str:
    try:
        return urlsplit(f"//{request.host}").hostname or ""
    except ValueError:
        return ""


def _lets_in(token: TokenFile, request: web.Request) -> bool:
    """As a bearer token, or as the password of any user, which browsers can ask a person for."""
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return token.matches(given.strip())
    if kind.lower() == "basic":
        try:
            plain = base64.b64decode(given, validate=True).decode()
        except ValueError:  # of base64, of UTF-8
            return False
        return token.matches(plain.partition(":")[2])
    return False


def _handled(handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            answer = await handler(request.query)
        except Exception:
            _LOG.exception("%s", request.path)
            return web.Response(status=500, text="an error of the service; its log has it")
        return web.Response(
            body=answer.body, status=answer.status, headers={"Content-Type": answer.content_type}
        )

    return handle


async def _healthz(_request: web.Request) -> web.Response:
    return web.Response(text="ok")
