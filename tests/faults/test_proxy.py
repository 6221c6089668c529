"""The proxy that other tests break connections with."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from support.proxy import Proxy


@pytest.fixture
def echo() -> Iterator[str]:
    """A server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def serve(sock: socket.socket) -> None:
        with sock, suppress(OSError):
            sock.settimeout(20)
            while data := sock.recv(1 << 16):
                sock.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                sock, _ = listener.accept()
                threads.append(threading.Thread(target=serve, args=(sock,)))
                threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in [accepting, *threads]:
        thread.join(20)


def connect(proxy: Proxy) -> socket.socket:
    host, _, port = proxy.endpoint.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def answered(sock: socket.socket, data: bytes, *, timeout_s: float = 5.0) -> bytes:
    sock.settimeout(timeout_s)
    sock.sendall(data)
    got = b""
    while len(got) < len(data):
        got += (more := sock.recv(1 << 16))
        if not more:
            break
    return got


def test_passes_everything_on(echo: str) -> None:
    data = bytes(range(256)) * 4096
    with Proxy(echo) as proxy, connect(proxy) as sock:
        sender = threading.Thread(target=sock.sendall, args=(data,))
        sender.start()
        got = b""
        while len(got) < len(data):
            got += sock.recv(1 << 16)
        sender.join()
        assert got == data and proxy.passed == {"client": len(data), "server": len(data)}
        assert proxy.connections == proxy.accepted == 1


def test_an_end_is_passed_on_after_all_bytes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        data = b"x" * (1 << 20)

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(data)

        server = threading.Thread(target=serve)
        server.start()
        with Proxy(f"127.0.0.1:{listener.getsockname()[1]}") as proxy, connect(proxy) as sock:
            got = b""
            while more := sock.recv(1 << 16):
                got += more
        server.join()
        assert len(got) == len(data)


def test_frozen_then_thawed(echo: str) -> None:
    with Proxy(echo) as proxy, connect(proxy) as sock:
        assert answered(sock, b"one") == b"one"
        proxy.freeze()
        with pytest.raises(TimeoutError):
            answered(sock, b"two", timeout_s=0.2)
        proxy.thaw()
        sock.settimeout(5)
        assert sock.recv(9) == b"two"


def test_closes_while_frozen(echo: str) -> None:
    with Proxy(echo) as proxy:
        proxy.freeze()
        with connect(proxy), connect(proxy):
            time.sleep(0.05)


def test_dropped_connections_hear_nothing_and_new_ones_work(echo: str) -> None:
    with Proxy(echo) as proxy, connect(proxy) as old:
        assert answered(old, b"one") == b"one"
        proxy.drop()
        with pytest.raises(TimeoutError):
            answered(old, b"two", timeout_s=0.2)
        with connect(proxy) as new:
            assert answered(new, b"three") == b"three"
        proxy.heal()
        with pytest.raises(ConnectionResetError):
            old.recv(9)


def test_reset_and_refuse(echo: str) -> None:
    with Proxy(echo) as proxy:
        with connect(proxy) as sock:
            assert answered(sock, b"one") == b"one"
            proxy.reset()
            with pytest.raises(ConnectionResetError):
                sock.recv(9)
        proxy.refuse()
        with pytest.raises(ConnectionResetError), connect(proxy) as sock:
            sock.settimeout(5)
            sock.recv(9)
        proxy.heal()
        with connect(proxy) as sock:
            assert answered(sock, b"one") == b"one"


def test_cut_after_some_bytes_once(echo: str) -> None:
    with Proxy(echo) as proxy:
        proxy.cut_after(5)
        with connect(proxy) as sock:
            assert answered(sock, b"12345") == b"12345"
            with pytest.raises(ConnectionResetError):
                answered(sock, b"6789")
        with connect(proxy) as sock:
            assert answered(sock, b"123456789") == b"123456789"


def test_flip_after_some_bytes_once(echo: str) -> None:
    with Proxy(echo) as proxy, connect(proxy) as sock:
        proxy.flip_after(2)
        assert answered(sock, b"\0\0\0\0") == b"\0\0\xff\0"
        assert answered(sock, b"\0\0\0\0") == b"\0\0\0\0"


def test_delay(echo: str) -> None:
    with Proxy(echo) as proxy, connect(proxy) as sock:
        proxy.delay(0.15)
        started = time.monotonic()
        assert answered(sock, b"one") == b"one"
        assert time.monotonic() - started >= 0.3
