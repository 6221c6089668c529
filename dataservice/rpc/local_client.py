"""Blocking client of a worker on this host: packs out of shared memory (rpc.local).

Invariants:
- a call has a deadline and ends in a pack or in an error of dataservice.errors, as in rpc.client;
  after an error of this side nothing more is asked of the connection;
- a pack is copied out of the segment before the next request, so that what is returned never
  changes and the segment may;
- `close()`, from any thread, makes a blocked call raise; descriptors and memory are given back by
  then, or by the call that is under way;
- the connection belongs to the process that made it: a use after a fork is refused.
"""

from __future__ import annotations

import array
import os
import socket
import threading
import time
from typing import Any

import grpc
import numpy.typing as npt

from dataservice.errors import (
    ConfigError,
    DataServiceError,
    DeadlineExceeded,
    ServiceUnavailable,
    WireError,
)
from dataservice.rpc.failures import ERROR_BODY_KEY, ERROR_CLASS_KEY, error_of
from dataservice.rpc.local import (
    HELLO,
    MAX_MESSAGE_BYTES,
    Answer,
    Window,
    address_of,
    new_socket,
    same_user,
)
from dataservice.wire.layout import Allocate, fresh
from dataservice.wire.messages import StreamPack
from dataservice.wire.schema import decode, encode
from dataservice.wire.segment import read_pack

__all__ = ["LocalClient", "Pack", "connect"]

CONNECT_S = 5.0
_FD_BYTES = array.array("i").itemsize

Pack = tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]


def connect(endpoint: str, *, timeout_s: float = CONNECT_S) -> LocalClient | None:
    """A connection to the worker at `endpoint` if it is on this host and lets this process in;
    None otherwise, after `timeout_s` at the latest."""
    try:
        sock = new_socket()
    except OSError:
        return None
    try:
        sock.settimeout(timeout_s)
        sock.connect(address_of(endpoint))
        if same_user(sock) and sock.recv(len(HELLO) + 1) == HELLO:
            return LocalClient(endpoint, sock)
    except OSError:
        pass
    sock.close()
    return None


class LocalClient:
    """Made by `connect`."""

    def __init__(self, endpoint: str, connection: socket.socket) -> None:
        self.endpoint = endpoint
        self._socket = connection
        self._window: Window | None = None
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()

    @property
    def closed(self) -> bool:
        """By `close`, or by an error of this side."""
        return self._closed

    def fetch(
        self, request: StreamPack, timeout_s: float, *, allocate: Allocate = fresh
    ) -> Pack | None:
        """(arrays, meta) as PackDecoder.result gives them, in memory of `allocate`; None while
        another thread's call is under way, which this one does not wait for.

        `timeout_s` bounds the call, the time the worker needs to build included.
        """
        call = f"StreamPack {request.pack_id} at {self.endpoint} (this host)"
        if os.getpid() != self._pid:
            raise ConfigError(
                f"{call}: the client was made in process {self._pid} and is used in process "
                f"{os.getpid()} after a fork; make it in the process that uses it"
            )
        if not self._lock.acquire(blocking=False):
            return None
        in_order = False
        try:
            answer = self._ask(request, call, time.monotonic() + timeout_s, timeout_s)
            if answer.code:
                in_order = True
                raise _failure(answer, call, timeout_s)
            if self._window is None:
                raise WireError(f"{call}: an answer without memory")
            pack = read_pack(self._window.pack(answer.size_bytes), allocate=allocate)
            in_order = True
        finally:
            self._lock.release()
            if self._closed or not in_order:
                self.close()
        return pack

    def _ask(self, request: StreamPack, call: str, until: float, timeout_s: float) -> Answer:
        if self._closed:
            raise ServiceUnavailable(f"{call}: the client is closed")
        try:
            self._wait_at_most(until)
            self._socket.send(encode(request, max_bytes=MAX_MESSAGE_BYTES))
            self._wait_at_most(until)
            return self._answer(call)
        except TimeoutError:
            raise DeadlineExceeded(f"{call}: no answer within {timeout_s:g} s") from None
        except OSError as error:
            raise ServiceUnavailable(f"{call}: {error}") from None

    def _wait_at_most(self, until: float) -> None:
        self._socket.settimeout(max(0.001, until - time.monotonic()))

    def _answer(self, call: str) -> Answer:
        data, ancillary, flags, _ = self._socket.recvmsg(
            MAX_MESSAGE_BYTES, socket.CMSG_LEN(_FD_BYTES), socket.MSG_CMSG_CLOEXEC
        )
        fds = array.array("i")
        for level, kind, body in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(body[: len(body) - len(body) % _FD_BYTES])
        try:
            if not data:
                raise ServiceUnavailable(f"{call}: the connection ended")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) > 1:
                raise WireError(f"{call}: an answer that is too large")
            answer = decode(Answer, data, max_bytes=MAX_MESSAGE_BYTES)
            for fd in fds:
                self._drop_window()
                self._window = Window(fd)
        finally:
            for fd in fds:
                os.close(fd)
        return answer

    def _drop_window(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.close()

    def close(self) -> None:
        """Idempotent, from any thread; in a process that was forked off, it does nothing."""
        if os.getpid() != self._pid:
            return
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already
        if self._lock.acquire(blocking=False):
            try:
                self._socket.close()
                self._drop_window()
            finally:
                self._lock.release()

    def __enter__(self) -> LocalClient:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _failure(answer: Answer, call: str, timeout_s: float) -> DataServiceError:
    try:
        code = grpc.StatusCode[answer.code]
    except KeyError:
        return WireError(f"{call}: an answer with the unknown status {answer.code[:40]!r}")
    told = ((ERROR_CLASS_KEY, answer.error), (ERROR_BODY_KEY, answer.body))
    return error_of(
        code=code,
        details=answer.details,
        metadata=told if answer.error else (),
        call=call,
        timeout_s=timeout_s,
    )
