"""Pack specs as they travel from the planning process through the coordinator to a worker.

Invariants: the bytes are those of wire.schema, compressed, so a quarter as many; the coordinator
hands them on as they are; equal specs give equal bytes.
"""

from __future__ import annotations

import zlib

import msgspec
import zstandard

from dataservice.core.packspec import PackSpec
from dataservice.errors import WireError
from dataservice.wire.schema import MAX_MESSAGE_BYTES, decode

LEVEL = 1
"""10 us a pack of 16 samples; higher levels make it no smaller."""


def packed_spec(spec: PackSpec) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(msgspec.msgpack.encode(spec))


def spec_of(data: bytes) -> PackSpec:
    """WireError for bytes that `packed_spec` has not written."""
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_MESSAGE_BYTES:
            raise WireError(f"PackSpec: {size} bytes, more than the limit of {MAX_MESSAGE_BYTES}")
        return decode(PackSpec, zstandard.ZstdDecompressor().decompress(data))
    except zstandard.ZstdError as error:
        raise WireError(f"PackSpec: damaged ({error})") from None


def sample_mark(key: str) -> int:
    """32 bits of a sample key: where they differ, so do the keys."""
    return zlib.crc32(key.encode())


def sample_marks(spec: PackSpec) -> list[int]:
    """Of its samples."""
    return [sample_mark(item.key) for item in spec.items]
