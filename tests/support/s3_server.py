"""moto's S3 server in this process, which counts what it sends and fails on request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key"
SESSION_TOKEN = "test-session-token"
UNAVAILABLE = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>later</Message></Error>"


@dataclass
class S3Server:
    url: str
    bodies_bytes: int = 0
    """Of answers to GET."""
    requests: list[str] = field(default_factory=list)
    """Method, path and range, such as "GET /bucket/key bytes=0-9"."""
    failures: int = 0
    """So many of the next requests are answered by 503."""
    hang: threading.Event | None = None
    """While it is set to an event that is not set, answers wait for it."""

    def count_from_here(self) -> None:
        self.bodies_bytes = 0
        self.requests = []

    def watch(self, app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterator[bytes]]:
        def watched(environ: dict[str, Any], start: Callable[..., Any]) -> Iterator[bytes]:
            method = environ["REQUEST_METHOD"]
            asked = environ.get("HTTP_RANGE", "")
            self.requests.append(f"{method} {environ['PATH_INFO']} {asked}".rstrip())
            if self.hang is not None:
                self.hang.wait(30)
            if self.failures:
                self.failures -= 1
                start("503 Slow Down", [("Content-Type", "application/xml")])
                yield UNAVAILABLE
                return
            for chunk in app(environ, start):
                if method == "GET":
                    self.bodies_bytes += len(chunk)
                yield chunk

        return watched


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Serves on a free loopback port until the end of the block."""
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    watcher = S3Server(url="")
    app = watcher.watch(DomainDispatcherApplication(create_backend_app))

    class Quiet(MotoRequestHandler):
        def log(self, *args: object) -> None:
            pass

    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    server.daemon_threads = True
    watcher.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(
        target=server.serve_forever, args=(0.05,), name="s3-server", daemon=True
    )
    thread.start()
    try:
        yield watcher
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()


def use_credentials(monkeypatch: pytest.MonkeyPatch, server: S3Server) -> None:
    """Environment of a process that reads from the server; no file of the developer's is read."""
    for name in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ROLE_ARN"):
        monkeypatch.delenv(name, raising=False)
    settings = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_SESSION_TOKEN": SESSION_TOKEN,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


def put(server: S3Server, bucket: str, key: str, content: bytes) -> None:
    """Creates or replaces an object, and the bucket if need be."""
    import requests

    auth = {
        "Authorization": "AWS4-HMAC-SHA256 "
        f"Credential={ACCESS_KEY}/20260101/us-east-1/s3/aws4_request, "
        "SignedHeaders=host, Signature=0"
    }
    for url, data in (
        (f"{server.url}/{bucket}", b""),
        (f"{server.url}/{bucket}/{key}", content),
    ):
        requests.put(url, data=data, headers=auth, timeout=10).raise_for_status()
