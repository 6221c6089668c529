"""dataservice.obs.web: who may read, renewed certificates, and connections that stay silent."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rpc.loop_thread import LoopThread
from support.certificates import TOKEN, Authority

from dataservice.errors import ConfigError
from dataservice.obs import web_limits
from dataservice.obs.web import HEADERS, Answer, WebServer, start_web
from dataservice.rpc.security import ServerSecurity

Web = Callable[..., WebServer]


async def shout(query: Mapping[str, str]) -> Answer:
    return Answer(query.get("word", "").upper().encode(), "text/plain")


@pytest.fixture
def web() -> Iterator[Web]:
    with contextlib.ExitStack() as stack:

        def start(security: ServerSecurity, host: str = "127.0.0.1") -> WebServer:
            thread = LoopThread()
            stack.callback(thread.close)
            server: WebServer = thread.run(
                start_web({"/shout": shout}, host=host, port=0, security=security)
            )
            stack.callback(lambda: thread.run(server.stop()))
            return server

        yield start


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def connected(server: WebServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def get(
    server: WebServer,
    path: str = "/shout?word=a",
    *,
    authorization: str | None = None,
    host: str = "127.0.0.1",
    context: ssl.SSLContext | None = None,
    name: str | None = None,
) -> tuple[int, str]:
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(connected(server))
        if context is not None:
            connection = stack.enter_context(
                context.wrap_socket(connection, server_hostname=name or "127.0.0.1")
            )
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
        if authorization is not None:
            lines.append(f"Authorization: {authorization}")
        connection.sendall("\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape"))
        answer = ended(connection).decode()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    ("request_line", "host", "status"),
    [
        ("GET /shout?word=a", "127.0.0.1", 200),
        ("GET /none", "127.0.0.1", 404),
        ("POST /shout", "127.0.0.1", 405),
        ("GET /shout", "evil.example", 403),
    ],
)
def test_every_answer_keeps_browsers_to_what_is_meant(
    web: Web, request_line: str, host: str, status: int
) -> None:
    with connected(web(ServerSecurity())) as connection:
        lines = [f"{request_line} HTTP/1.1", f"Host: {host}", "Connection: close", "", ""]
        connection.sendall("\r\n".join(lines).encode())
        head = ended(connection).decode().partition("\r\n\r\n")[0]
    assert int(head.split()[1]) == status
    for header, value in HEADERS.items():
        assert f"{header}: {value}" in head


def ended(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            found += data
    return found


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"me:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("shown", "code"),
    [
        (f"Bearer {TOKEN}", 200),
        (basic(TOKEN), 200),
        (None, 401),
        (f"Bearer {TOKEN}0", 401),
        ("Bearer \udcff", 401),
        ("Basic \udcff", 401),
        (basic(TOKEN[1:]), 401),
        (TOKEN, 401),
    ],
)
def test_every_path_but_healthz_asks_for_the_token(
    web: Web, authority: Authority, shown: str | None, code: int
) -> None:
    server = web(ServerSecurity(token_file=authority.token(TOKEN)))
    assert get(server, authorization=shown)[0] == code
    assert get(server, "/nothing", authorization=shown)[0] == (404 if code == 200 else 401)
    assert get(server, "/healthz", authorization=shown) == (200, "ok")


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost:8", 200),
        ("[::1]:8", 200),
        ("127.0.0.1", 200),
        ("evil.test", 403),
        ("evil.test:8", 403),
        ("127.0.0.1.evil.test", 403),
        ("[", 403),
    ],
)
def test_a_page_of_another_site_reads_nothing_of_this_machine(
    web: Web, authority: Authority, host: str, code: int
) -> None:
    assert get(web(ServerSecurity()), host=host)[0] == code
    with_token = web(ServerSecurity(token_file=authority.token(TOKEN)))
    assert get(with_token, host=host, authorization=f"Bearer {TOKEN}")[0] == 200


@pytest.mark.parametrize("name", ["127.0.0.1", "svc.test"])
def test_a_renewed_certificate_is_shown(web: Web, authority: Authority, name: str) -> None:
    """To those that name the host they ask for, and to those that name none."""
    server = web(authority.server(name, expired=True))
    context = ssl.create_default_context(cafile=authority.ca_file)
    assert server.url.startswith("https://")
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        get(server, context=context, name=name)
    authority.issue("server", name)
    assert get(server, context=context, name=name) == (200, "A")


@pytest.mark.parametrize("missing", ["tls", "token"])
def test_others_are_served_with_tls_and_token_only(
    web: Web, authority: Authority, missing: str
) -> None:
    security = authority.server(token=TOKEN)
    less = ServerSecurity(
        tls=None if missing == "tls" else security.tls,
        token_file=None if missing == "token" else security.token_file,
    )
    with pytest.raises(ConfigError, match=rf"status page.*set serving\.{missing}"):
        asyncio.run(start_web({}, host="0.0.0.0", port=0, security=less))
    web(security, "0.0.0.0")


@pytest.mark.parametrize("sent", [b"", b"GET /shout HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "])
@pytest.mark.parametrize("tls", [False, True])
def test_a_request_that_does_not_end_is_given_up(
    web: Web, authority: Authority, monkeypatch: pytest.MonkeyPatch, sent: bytes, tls: bool
) -> None:
    monkeypatch.setattr(web_limits, "REQUEST_S", 0.5)
    monkeypatch.setattr(web_limits, "HANDSHAKE_S", 0.5)
    server = web(authority.server() if tls else ServerSecurity())
    started = time.monotonic()
    with connected(server) as connection:
        connection.sendall(sent)
        ended(connection)
    assert time.monotonic() - started < 5.0


def test_a_connection_that_has_asked_is_not_taken_for_a_silent_one(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_limits, "REQUEST_S", 0.3)
    with connected(web(ServerSecurity())) as connection:
        for _ in range(2):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            time.sleep(0.5)


def test_connections_past_the_most_are_ended_until_others_go(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_limits, "MAX_CONNECTIONS", 3)
    server = web(ServerSecurity())
    with contextlib.ExitStack() as held:
        for _ in range(3):
            connection: Any = held.enter_context(connected(server))
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert connection.recv(65536)
        with connected(server) as late:
            assert ended(late) == b""
    time.sleep(0.2)
    assert get(server, "/healthz") == (200, "ok")


@pytest.mark.parametrize("header", ["Authorization: Bearer {}\x01", "Authorization : Bearer {}"])
def test_the_token_of_a_malformed_request_is_not_logged(
    web: Web, caplog: pytest.LogCaptureFixture, header: str
) -> None:
    caplog.set_level("DEBUG")
    server = web(ServerSecurity())
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        asked = f"GET /shout HTTP/1.1\r\nHost: localhost\r\n{header.format(TOKEN)}\r\n\r\n"
        connection.sendall(asked.encode())
        assert b" 400 " in connection.recv(4096)
    assert TOKEN not in caplog.text
