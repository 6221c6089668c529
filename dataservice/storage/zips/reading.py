"""Reads one member of a zip: its local header, its data, and the check of both.

Invariants: normally one positioned read a member; a member is never larger than planned, and its
CRC is always compared.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from dataservice.errors import ArchiveError
from dataservice.storage.membertable import (
    ENCRYPTED,
    MAX_MEMBER_BYTES,
    METHOD,
    TOO_LARGE,
    describe_problem,
)
from dataservice.storage.reads import ReadAt
from dataservice.storage.zips.layout import ENCRYPTED_FLAGS
from dataservice.storage.zips.methods import METHODS, STORED, CorruptData, crc32, unpack

_LOCAL = struct.Struct("<4s5H3L2H")
HEADER_GUESS = _LOCAL.size + 128
"""Bytes of a local header with its name and extra fields, rarely more."""


class Place(NamedTuple):
    """Where a member is, as its row of the member table says."""

    method: int
    offset: int
    stored_bytes: int
    size_bytes: int
    crc32: int


def read_place(read: ReadAt, place: Place, archive_bytes: int) -> bytes:
    """The unpacked bytes of a member, checked. Raises ArchiveError and what `read` raises."""
    if place.size_bytes > MAX_MEMBER_BYTES:
        raise _refused(TOO_LARGE, place)
    if place.method not in METHODS:
        raise _refused(METHOD, place)
    _, data = read_stored(read, place, archive_bytes, place.stored_bytes)
    if place.method != STORED:
        try:
            data = unpack(place.method, data, place.size_bytes + 1)
        except CorruptData as error:
            raise ArchiveError(str(error)) from None
    if len(data) > place.size_bytes:
        raise ArchiveError(f"size mismatch: inflates past {place.size_bytes} bytes")
    if len(data) != place.size_bytes:
        raise ArchiveError(f"size mismatch: {len(data)} bytes, {place.size_bytes} planned")
    if crc32(data) != place.crc32:
        raise ArchiveError("CRC mismatch: the bytes are not those that were packed")
    return data


def read_stored(read: ReadAt, place: Place, archive_bytes: int, limit: int) -> tuple[int, bytes]:
    """Where a member's data starts, and its first `limit` stored (still compressed) bytes.

    `limit` is cut to the stored bytes. Raises ArchiveError and what `read` raises.
    """
    offset = place.offset
    limit = min(limit, place.stored_bytes)
    room = archive_bytes - offset
    if room < _LOCAL.size:
        raise ArchiveError("the local header lies past the end of the archive")
    head = read(offset, min(HEADER_GUESS + limit, room))
    signature, _, flags, method, _, _, _, _, _, name_bytes, extra_bytes = _LOCAL.unpack_from(head)
    if signature != b"PK\x03\x04":
        raise ArchiveError("wrong offset: no local header where the central directory says")
    if flags & ENCRYPTED_FLAGS:
        raise _refused(ENCRYPTED, place)
    if method != place.method:
        raise ArchiveError(f"local header says method {method}, not {place.method}")
    start = _LOCAL.size + name_bytes + extra_bytes
    if start + limit > room:
        raise ArchiveError("the data runs past the end of the archive")
    data = head[start : start + limit]
    if len(data) < limit:
        data += read(offset + start + len(data), limit - len(data))
    return offset + start, data


def _refused(problem: int, place: Place) -> ArchiveError:
    return ArchiveError(describe_problem(problem, place.method, place.size_bytes))
