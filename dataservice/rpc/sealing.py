"""Control messages as they travel: the bytes of a message and their CRC-32 behind them.

Invariants: a message whose bytes are not those that were sent is a DamagedMessage, before anything
of it is believed: TCP's own checksum lets one damaged segment in 65,536 pass, and a digit of a pack
id that changes is still a pack id. Frames of packs have checksums of their own (wire.codec).
"""

from __future__ import annotations

from typing import Any, TypeVar

from dataservice.errors import DamagedMessage
from dataservice.wire.checksum import crc32
from dataservice.wire.schema import decode, encode

CRC_BYTES = 4

Message = TypeVar("Message")


def sealed(message: Any, *, max_bytes: int) -> bytes:
    """WireError for a value that does not fit its field, or more than `max_bytes` of them."""
    return seal(encode(message, max_bytes=max_bytes - CRC_BYTES))


def seal(data: bytes) -> bytes:
    return data + crc32(data, 0).to_bytes(CRC_BYTES, "little")


def unsealed(cls: type[Message], data: bytes | None) -> Message:
    """The message; DamagedMessage, or WireError where it is whole and no message of `cls`.

    None is what gRPC gives for a call that went well and lost its message.
    """
    if data is None:
        raise DamagedMessage(f"{cls.__name__}: no message came")
    body = memoryview(data)[:-CRC_BYTES]
    if crc32(body, 0).to_bytes(CRC_BYTES, "little") != data[-CRC_BYTES:]:
        raise DamagedMessage(
            f"{cls.__name__}: {len(data)} bytes with a wrong checksum, damaged on their way or of "
            "another version than this side reads"
        )
    return decode(cls, body)
