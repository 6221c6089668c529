"""Serves a stream's figures over HTTP to Prometheus, from a thread of its own.

Invariants: it answers /metrics alone, one request at a time, each within REQUEST_S; it keeps no
stream alive; a forked child ends nothing of its parent's; `close` joins the thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import TCPServer
from typing import Any

from dataservice.errors import ConfigError

LOG = logging.getLogger(__name__)

REQUEST_S = 5.0
"""From the first byte of a request to the last of its answer."""
POLL_S = 0.1
JOIN_S = 10.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsServer:
    """Started when made; `text` is asked at every request."""

    def __init__(self, text: Callable[[], str], *, host: str, port: int) -> None:
        """`port` 0 takes a free one. Raises ConfigError for one that cannot be had."""
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"metrics_port is {port}, must be in 0..65535")
        try:
            self._server = _server_class(host)((host, port), _handler(text))
        except OSError as error:
            raise ConfigError(
                f"metrics_port is {port}: cannot listen at {host}: {error.strerror or error}; give "
                "another for each process, or 0 for any free one"
            ) from None
        self._pid = os.getpid()
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._server.server_address[1]}"
        """ "host:port"."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="pack-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        if threading.current_thread() is self._thread:  # it had the stream last
            threading.Thread(target=self.close, name="pack-metrics-end", daemon=True).start()
            return
        if os.getpid() == self._pid and self._thread.is_alive():
            self._server.end_requests()
            self._server.shutdown()
            self._thread.join(JOIN_S)
        self._server.server_close()


class _Server(HTTPServer):
    request_queue_size = 8
    _connection: socket.socket | None = None
    _ending = False

    def server_bind(self) -> None:
        """Without HTTPServer's look at the name of the host, which can take seconds."""
        TCPServer.server_bind(self)

    def finish_request(self, request: Any, client_address: Any) -> None:
        self._connection = request
        if self._ending:
            return
        deadline = threading.Timer(REQUEST_S, self.cut)
        deadline.daemon = True
        deadline.start()
        try:
            super().finish_request(request, client_address)
        finally:
            deadline.cancel()
            deadline.join()
            self._connection = None

    def end_requests(self) -> None:
        """Also one that is only just coming."""
        self._ending = True
        self.cut()

    def cut(self) -> None:
        """Ends the request that is being answered."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        LOG.debug("a request for metrics ended", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _server_class(host: str) -> type[_Server]:
    return _Server6 if ":" in host else _Server


def _handler(text: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "only /metrics is here")
                return
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def version_string(self) -> str:
            return "dataservice"

        def log_message(self, format: str, *args: Any) -> None:
            LOG.debug(format, *args)

    return Handler
