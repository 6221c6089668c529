"""What a worker and a decoder process say to each other over their socket.

Invariants: a message is its length (4 bytes, big-endian) and msgpack; the bytes of a picture or of
its patches follow the message that gives their number, and nothing is allocated for more than the
receiver expects. No pickle.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from dataservice.core.packspec import ImageSpec
from dataservice.core.vision import VisionRules
from dataservice.pipeline.images import DecodeLimits

MAX_MESSAGE_BYTES = 1 << 20
MAX_REASON = 2000
"""Characters."""
_LENGTH = struct.Struct(">I")

M = TypeVar("M")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The first message, to the process."""

    rules: VisionRules
    limits: DecodeLimits
    memory_bytes: int
    """That decoding may take on top of what the process has once it is ready."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Its answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One picture; its file follows."""

    image: ImageSpec
    data_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The answer to a task; the patches follow unless there is a reason why not."""

    reason: str = ""
    out_of_memory: bool = False


class Wire:
    """One end; every call ends at `until` (monotonic seconds; None: when the other end closes).

    Raises TimeoutError at the deadline, EOFError or OSError when the other end is gone,
    msgspec.MsgspecError and ValueError for what is no message.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: object, until: float | None = None) -> None:
        payload = msgspec.msgpack.encode(message)
        self.send_bytes(_LENGTH.pack(len(payload)) + payload, until)

    def receive(self, kind: type[M], until: float | None = None) -> M:
        prefix = bytearray(_LENGTH.size)
        self.receive_into(prefix, until)
        (length,) = _LENGTH.unpack(prefix)
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes")
        payload = bytearray(length)
        self.receive_into(payload, until)
        return msgspec.msgpack.decode(payload, type=kind)

    def send_bytes(self, data: bytes | memoryview, until: float | None = None) -> None:
        left = memoryview(data)
        while left:
            self._wait(until)
            left = left[self._socket.send(left) :]

    def receive_into(self, out: bytearray | memoryview, until: float | None = None) -> None:
        """Fills it."""
        left = memoryview(out)
        while left:
            self._wait(until)
            count = self._socket.recv_into(left)
            if not count:
                raise EOFError
            left = left[count:]

    def _wait(self, until: float | None) -> None:
        if until is None:
            self._socket.settimeout(None)
            return
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)

    def close(self) -> None:
        self._socket.close()
