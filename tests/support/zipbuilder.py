"""Builds zip archives by hand, every field of which may be set to anything."""

from __future__ import annotations

import bz2
import lzma
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import inflate64
import zstandard

STORED, DEFLATED, DEFLATE64, BZIP2, LZMA, ZSTD = 0, 8, 9, 12, 14, 93
WIDE = 0xFFFFFFFF


def pack(method: int, data: bytes) -> bytes:
    if method == DEFLATED:
        packer = zlib.compressobj(6, zlib.DEFLATED, -15)
        return packer.compress(data) + packer.flush()
    if method == DEFLATE64:
        wide_packer = inflate64.Deflater()
        return bytes(wide_packer.deflate(data) + wide_packer.flush())
    if method == BZIP2:
        return bz2.compress(data)
    if method == LZMA:
        filters = [{"id": lzma.FILTER_LZMA1, "lc": 3, "lp": 0, "pb": 2, "dict_size": 1 << 16}]
        raw = lzma.compress(data, lzma.FORMAT_RAW, filters=filters)
        return struct.pack("<2BHBL", 9, 4, 5, 93, 1 << 16) + raw
    if method == ZSTD:
        return zstandard.compress(data)
    return data


@dataclass(kw_only=True)
class Part:
    """A member; None is the right value."""

    name: bytes = b"a.png"
    data: bytes = b""
    method: int = STORED
    flags: int = 0
    made_by: int = 20
    external: int = 0
    stored: bytes | None = None
    extra: bytes = b""
    comment: bytes = b""
    size: int | None = None
    stored_size: int | None = None
    crc32: int | None = None
    offset: int | None = None
    disk: int = 0
    local_name: bytes | None = None
    local_extra: bytes = b""
    local_method: int | None = None
    local_flags: int | None = None
    local_signature: bytes = b"PK\x03\x04"
    before: bytes = b""
    """Stands before the local header."""
    descriptor: bool = False
    """Sizes and CRC behind the data, zeros in the local header."""


def build(
    parts: Sequence[Part],
    *,
    prefix: bytes = b"",
    comment: bytes = b"",
    zip64: bool = False,
    count: int | None = None,
    directory_size: int | None = None,
    directory_offset: int | None = None,
    disks: tuple[int, int] = (0, 0),
    end64_data: bytes = b"",
    between: bytes = b"",
    trailing: bytes = b"",
) -> bytes:
    """`between` stands between the directory and its end record."""
    content, directory = b"", b""
    for part in parts:
        stored = pack(part.method, part.data) if part.stored is None else part.stored
        crc = zlib.crc32(part.data) if part.crc32 is None else part.crc32
        size = len(part.data) if part.size is None else part.size
        stored_size = len(stored) if part.stored_size is None else part.stored_size
        content += part.before
        offset = len(content) if part.offset is None else part.offset
        content += _local(part, crc, len(part.data), len(stored)) + stored
        if part.descriptor:
            content += struct.pack("<4s3L", b"PK\x07\x08", crc, len(stored), len(part.data))
        directory += _entry(part, crc, size, stored_size, offset, zip64)
    total = len(parts) if count is None else count
    size = len(directory) if directory_size is None else directory_size
    offset = len(content) if directory_offset is None else directory_offset
    tail = between
    if zip64:
        tail += struct.pack(
            "<4sQ2H2L4Q",
            *(b"PK\x06\x06", 44 + len(end64_data), 45, 45, *disks, total, total, size, offset),
        )
        tail += end64_data
        end64 = len(content) + len(directory) + len(between)
        tail += struct.pack("<4sLQL", b"PK\x06\x07", 0, end64, 1)
        total, size, offset = 0xFFFF, WIDE, WIDE
    tail += struct.pack("<4s4H2LH", b"PK\x05\x06", *disks, total, total, size, offset, len(comment))
    return prefix + content + directory + tail + comment + trailing


def _local(part: Part, crc: int, size: int, stored_size: int) -> bytes:
    name = part.name if part.local_name is None else part.local_name
    method = part.method if part.local_method is None else part.local_method
    flags = part.flags if part.local_flags is None else part.local_flags
    if part.descriptor:
        flags, crc, size, stored_size = flags | 8, 0, 0, 0
    return (
        struct.pack(
            "<4s5H3L2H",
            *(part.local_signature, 20, flags, method, 0, 0x21, crc, stored_size, size),
            *(len(name), len(part.local_extra)),
        )
        + name
        + part.local_extra
    )


def _entry(part: Part, crc: int, size: int, stored_size: int, offset: int, zip64: bool) -> bytes:
    extra = part.extra
    if zip64:
        extra = struct.pack("<2H3Q", 1, 24, size, stored_size, offset) + extra
        size = stored_size = offset = WIDE
    flags = part.flags | (8 if part.descriptor else 0)
    return (
        struct.pack(
            "<4s6H3L5H2L",
            *(b"PK\x01\x02", part.made_by, 20, flags, part.method, 0, 0x21, crc, stored_size),
            *(size, len(part.name), len(extra), len(part.comment), part.disk, 0),
            *(part.external, offset),
        )
        + part.name
        + extra
        + part.comment
    )
