"""The record file in a zip, read from front to end by local headers (APPNOTE 4.3.7).

Invariants: stored and deflated members only, size and CRC-32 checked; of the members whose names
end with .jsonl or .json the first is read, folders and other files are passed over; more of them
are `LeftOut`, raised behind the first one's content; encryption and whatever else cannot be read is
a RecordError that names the member.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from isal import igzip_lib, isal_zlib

from dataservice.errors import RecordError
from dataservice.storage.packed.feed import INFLATE_ERROR, PIECE_BYTES, SLICE_BYTES, Feed

RECORD_SUFFIXES = (".jsonl", ".json", ".ndjson")
_LOCAL, _DESCRIPTOR = b"PK\x03\x04", b"PK\x07\x08"
_AFTER_MEMBERS = (b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06")
_HEADER = struct.Struct("<5H3L2H")
_STORED, _DEFLATED = 0, 8
_SHOWN = 3
_FULL = 0xFFFFFFFF


class LeftOut(RecordError):
    """What was wanted was read to its end; the reason says what else is there and is not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Member:
    name: str
    flags: int
    method: int
    crc32: int
    stored_bytes: int
    size_bytes: int

    @property
    def is_record_file(self) -> bool:
        base = self.name.rpartition("/")[2]
        return base.lower().endswith(RECORD_SUFFIXES) and not base.startswith(".")

    @property
    def has_descriptor(self) -> bool:
        """Sizes and CRC stand behind the data."""
        return bool(self.flags & 8)


def unzip(feed: Feed) -> Iterator[bytes]:
    """The content of the one record file in the archive."""
    found = ""
    while member := _next_member(feed):
        if member.is_record_file and found:
            raise LeftOut(_more_than(found, [member.name, *_others(feed, member)]))
        if member.is_record_file:
            found = member.name
            yield from _content(feed, member)
        else:
            for _ in _content(feed, member):
                pass
    if not found:
        raise RecordError(
            f"the zip holds no record file ({', '.join(RECORD_SUFFIXES)}); an archive of images "
            "goes into `images` of the source"
        )


def _others(feed: Feed, member: _Member | None) -> Iterator[str]:
    """The names of the record files behind that member, as far as they can be read."""
    with suppress(RecordError):
        while member:
            for _ in _content(feed, member):
                pass
            member = _next_member(feed)
            if member and member.is_record_file:
                yield member.name


def _more_than(found: str, others: list[str]) -> str:
    names = ", ".join(others[:_SHOWN])
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    return (
        f"the zip holds more than one record file, and only {found} is read, not {names}{more}; "
        "unpack it, or give each file a zip of its own"
    )


def _next_member(feed: Feed) -> _Member | None:
    magic = feed.take(4)
    if magic in _AFTER_MEMBERS:
        return None
    header = feed.take(_HEADER.size)
    if magic != _LOCAL or len(header) < _HEADER.size:
        raise RecordError("damaged zip: no member or directory where one must stand")
    _, flags, method, _, _, crc, stored, size, name_bytes, extra_bytes = _HEADER.unpack(header)
    raw, extra = feed.take(name_bytes), feed.take(extra_bytes)
    if _FULL in (stored, size):
        size, stored = _zip64_sizes(extra, size, stored)
    member = _Member(
        name=raw.decode("utf-8", "replace"),
        flags=flags,
        method=method,
        crc32=crc,
        stored_bytes=stored,
        size_bytes=size,
    )
    if flags & 0x2041:
        raise RecordError(f"{member.name} in the zip is encrypted")
    if method not in (_STORED, _DEFLATED):
        raise RecordError(f"{member.name} in the zip has compression method {method}; 0 and 8 work")
    if method == _STORED and member.has_descriptor and not stored:
        raise RecordError(f"{member.name} in the zip is stored without its size")
    return member


def _zip64_sizes(extra: bytes, size: int, stored: int) -> tuple[int, int]:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1 and length >= 16 and at + 20 <= len(extra):
            large = struct.unpack_from("<2Q", extra, at + 4)
            return (large[0] if size == _FULL else size, large[1] if stored == _FULL else stored)
        at += 4 + length
    raise RecordError("damaged zip: a member's zip64 sizes are missing")


def _content(feed: Feed, member: _Member) -> Iterator[bytes]:
    start = feed.position
    crc = size = 0
    pieces = _inflated(feed, member) if member.method == _DEFLATED else _stored(feed, member)
    for piece in pieces:
        crc = isal_zlib.crc32(piece, crc)
        size += len(piece)
        yield piece
    stored = feed.position - start
    if member.has_descriptor and not member.stored_bytes:
        good = _matches_descriptor(feed, crc, stored, size)
    else:
        good = (crc, stored, size) == (member.crc32, member.stored_bytes, member.size_bytes)
        if good and member.has_descriptor:
            good = _matches_descriptor(feed, crc, stored, size)
    if not good:
        raise RecordError(f"damaged zip: size or checksum of {member.name} is wrong")


def _matches_descriptor(feed: Feed, crc: int, stored: int, size: int) -> bool:
    """Takes the data descriptor: with signature or without, sizes of 4 or of 8 bytes."""
    data = feed.take(24)
    wide = struct.pack("<L2Q", crc, stored, size)
    narrow = struct.pack("<3L", crc, stored & _FULL, size & _FULL)
    for form in (_DESCRIPTOR + wide, _DESCRIPTOR + narrow, wide, narrow):
        if data.startswith(form):
            feed.give_back(data[len(form) :])
            return True
    return False


def _stored(feed: Feed, member: _Member) -> Iterator[bytes]:
    missing = member.stored_bytes
    while missing:
        piece = feed.take(min(missing, PIECE_BYTES))
        if not piece:
            raise RecordError(f"the zip ends within {member.name}: the file is cut off")
        missing -= len(piece)
        yield piece


def _inflated(feed: Feed, member: _Member) -> Iterator[bytes]:
    decoder = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_DEFLATE)
    data = b""
    while not decoder.eof:
        if decoder.needs_input:
            data = feed.take(SLICE_BYTES)
            if not data:
                raise RecordError(f"the zip ends within {member.name}: the file is cut off")
        try:
            piece = decoder.decompress(data, PIECE_BYTES)
        except INFLATE_ERROR as error:
            raise RecordError(f"damaged zip: {member.name}: {error}") from error
        data = b""
        if piece:
            yield piece
    feed.give_back(decoder.unused_data)
