"""A web server over bytes in memory that counts what it sends and misbehaves on request."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class WebServer:
    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    """By path, such as "/a.jsonl"."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of every answer, besides those of HTTP itself."""
    ranges: bool = True
    failures: list[int] = field(default_factory=list)
    """Statuses of the next answers; 0 cuts the body in half."""
    hang: threading.Event | None = None
    """Answers wait for it."""
    sent_bytes: int = 0
    requests: list[str] = field(default_factory=list)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.requests.append(f"{request.command} {request.path}")
        if self.hang is not None:
            self.hang.wait(30)
        failure = self.failures.pop(0) if self.failures else None
        if failure:
            request.send_error(failure)
            return
        content = self.files.get(request.path.partition("?")[0])
        if content is None:
            request.send_error(404)
            return
        start, stop = 0, len(content)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        if asked and self.ranges:
            start, stop = int(asked[1]), min(int(asked[2]) + 1, stop)
            if start >= len(content):
                request.send_response(416)
                request.send_header("Content-Range", f"bytes */{len(content)}")
                request.send_header("Content-Length", "0")
                request.end_headers()
                return
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        else:
            request.send_response(200)
        for name, value in self.headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(stop - start))
        request.end_headers()
        body = content[start : (start + stop) // 2 if failure == 0 else stop]
        for at in range(0, len(body), 65536):
            piece = body[at : at + 65536]
            request.wfile.write(piece)
            self.sent_bytes += len(piece)
        if failure == 0:
            request.close_connection = True


@contextmanager
def web_server() -> Iterator[WebServer]:
    """Serves on a free loopback port until the end of the block."""
    state = WebServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            try:
                state.answer(self)
            except ConnectionError:
                self.close_connection = True

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(
        target=server.serve_forever, args=(0.05,), name="web-server", daemon=True
    )
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()
