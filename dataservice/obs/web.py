"""An HTTP server in the event loop of a coordinator, worker or stager: GET alone, nothing changes.

Invariants: beyond loopback it asks for the service's token on every path but /healthz; requests are
small and few at once; what a handler raises is a 500 without its text.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from aiohttp import web

from dataservice.errors import ConfigError
from dataservice.rpc.security import ServerSecurity, TokenFile, server_ssl_context

__all__ = ["Answer", "Handler", "WebServer", "start_web"]

_LOG = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
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
    if not _is_loopback(host) and not security.insecure:
        if security.tls is None or security.token_file is None:
            raise ConfigError(
                f"serving.host {host} is reachable from other machines: its status page needs "
                "serving.tls and serving.token_file, or --insecure in a private network"
            )
    token = None if security.token_file is None else TokenFile(security.token_file)
    app = web.Application(middlewares=[_guard(token)], client_max_size=1024)
    app.router.add_get("/healthz", _healthz)
    for path, handler in routes.items():
        app.router.add_get(path, _handled(handler))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    context = None if security.tls is None else server_ssl_context(security.tls)
    site = web.TCPSite(runner, host, port, ssl_context=context, backlog=MAX_CONNECTIONS)
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


def _guard(token: TokenFile | None) -> Callable[..., Awaitable[web.StreamResponse]]:
    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if token is not None and request.path != "/healthz" and not _lets_in(token, request):
            refused = web.Response(status=401, text="a token is needed")
            refused.headers["WWW-Authenticate"] = 'Basic realm="dataservice", charset="UTF-8"'
            return refused
        response = await handler(request)
        response.headers.update(HEADERS)
        return response

    return guard


def _lets_in(token: TokenFile, request: web.Request) -> bool:
    """As a bearer token, or as the password of any user, which browsers can ask a person for."""
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return token.matches(given.strip())
    if kind.lower() == "basic":
        try:
            plain = base64.b64decode(given, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
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


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
