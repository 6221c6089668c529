"""Zip archives by positioned reads: the central directory once, then one read a member.

Invariants: nothing is written and no member is believed: sizes are bounded before anything is
inflated, inflating stops one byte past the planned size, and the CRC of the central directory is
checked. A bad member is refused alone (`problem`), a bad archive as a whole (ArchiveError). Of two
members of one name the last counts. Names are UTF-8 where flagged or valid, else code page 437.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dataservice.core.packspec import ImageSpec, ShardRef
from dataservice.errors import ArchiveError

MAX_MEMBER_BYTES = 128 * 1024 * 1024
MAX_MEMBERS = 50_000_000
STORED, DEFLATED, PLAIN_FILE = 0, 8, -1

OK, ENCRYPTED, METHOD, UNSAFE_NAME, TOO_LARGE, SPLIT, DAMAGED = range(7)

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_LOCAL_EXTRA_GUESS = 64
_DIRECTORY_CHUNK = 4 * 1024 * 1024

ReadAt = Callable[[int, int], bytes]
"""(offset, size) -> exactly those bytes."""
ReadShard = Callable[[ShardRef, int, int], bytes]
"""(shard, offset, size) -> exactly those bytes, such as `ShardReader.read`."""


@dataclass(slots=True)
class MemberTable:
    """The members of an archive that are no folders; one list a column."""

    name: list[str] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    """Of the local header."""
    stored_bytes: list[int] = field(default_factory=list)
    size_bytes: list[int] = field(default_factory=list)
    method: list[int] = field(default_factory=list)
    crc32: list[int] = field(default_factory=list)
    problem: list[int] = field(default_factory=list)
    """OK or why the member cannot be read, see `describe_problem`."""


@dataclass(frozen=True, slots=True)
class _Directory:
    offset: int
    size: int
    count: int
    shift: int
    """Bytes before the archive's first byte, which its offsets do not count."""


def read_directory(read: ReadAt, size_bytes: int) -> MemberTable:
    """The member table of an archive of `size_bytes` bytes. Raises ArchiveError."""
    directory = _find_directory(read, size_bytes)
    table = MemberTable()
    for entry, name, extra in _entries(read, directory):
        _add_member(table, entry, name, extra, directory, size_bytes)
    return table


def describe_problem(problem: int, method: int, size_bytes: int) -> str:
    """Why a member cannot be read, for a person."""
    return {
        ENCRYPTED: "the member is encrypted",
        METHOD: f"unsupported compression method {method}",
        UNSAFE_NAME: "unsafe member name",
        TOO_LARGE: f"{size_bytes} bytes, over the size limit of a member ({MAX_MEMBER_BYTES})",
        SPLIT: "the member lies on another disk of a split archive",
        DAMAGED: "the member's entry in the central directory is damaged",
    }[problem]


def read_member(read: ReadShard, image: ImageSpec, shard: ShardRef) -> bytes:
    """The bytes of a member or plain file, checked. Raises ArchiveError and what `read` raises."""
    if image.size_bytes > MAX_MEMBER_BYTES:
        raise _bad(image, shard, describe_problem(TOO_LARGE, image.method, image.size_bytes))
    if image.method == PLAIN_FILE:
        return read(shard, 0, image.size_bytes)
    if image.method not in (STORED, DEFLATED):
        raise _bad(image, shard, describe_problem(METHOD, image.method, image.size_bytes))
    _, stored = read_stored(
        lambda offset, size: read(shard, offset, size), image, shard, image.stored_bytes
    )
    if image.method == DEFLATED:
        data = _inflate(stored, image, shard)
    else:
        data = stored
    if len(data) != image.size_bytes:
        raise _bad(image, shard, f"size mismatch: {len(data)} bytes, {image.size_bytes} planned")
    if zlib.crc32(data) != image.crc32:
        raise _bad(image, shard, "CRC mismatch")
    return data


def read_stored(read: ReadAt, image: ImageSpec, shard: ShardRef, limit: int) -> tuple[int, bytes]:
    """Where a member's data starts, and its first `limit` stored (still compressed) bytes.

    Normally one read. Raises ArchiveError and what `read` raises.
    """
    limit = min(limit, image.stored_bytes)
    room = shard.size_bytes - image.offset
    guess = _LOCAL.size + 4 * len(image.member) + _LOCAL_EXTRA_GUESS + limit
    if room < _LOCAL.size:
        raise _bad(image, shard, "the local header lies past the end of the archive")
    head = read(image.offset, min(guess, room))
    signature, _, flags, method, *_, name_bytes, extra_bytes = _LOCAL.unpack_from(head)
    if signature != b"PK\x03\x04":
        raise _bad(image, shard, "no local header where the central directory says")
    if flags & 0x41:
        raise _bad(image, shard, describe_problem(ENCRYPTED, method, image.size_bytes))
    if method != image.method:
        raise _bad(image, shard, f"local header says method {method}, not {image.method}")
    start = _LOCAL.size + name_bytes + extra_bytes
    if start + limit > room:
        raise _bad(image, shard, "the data runs past the end of the archive")
    data = head[start : start + limit]
    if len(data) < limit:
        data += read(image.offset + start + len(data), limit - len(data))
    return image.offset + start, data


def _inflate(stored: bytes, image: ImageSpec, shard: ShardRef) -> bytes:
    inflater = zlib.decompressobj(-15)
    try:
        data = inflater.decompress(stored, image.size_bytes + 1)
    except zlib.error as error:
        raise _bad(image, shard, f"cannot be inflated: {error}") from None
    if len(data) > image.size_bytes:
        raise _bad(image, shard, f"size mismatch: inflates past {image.size_bytes} bytes")
    if not inflater.eof:
        raise _bad(image, shard, "the compressed data ends early")
    return data


def _bad(image: ImageSpec, shard: ShardRef, reason: str) -> ArchiveError:
    return ArchiveError(reason, source=shard.source, shard=shard.name, member=image.member)


def _find_directory(read: ReadAt, size_bytes: int) -> _Directory:
    tail_bytes = min(size_bytes, _END.size + 0xFFFF + _END64_LOCATOR.size + _END64.size)
    tail_at = size_bytes - tail_bytes
    tail = read(tail_at, tail_bytes)
    at = _find_end(tail)
    _, disk, directory_disk, count_here, count, size, offset, _ = _END.unpack_from(tail, at)
    end = tail_at + at
    locator_at = at - _END64_LOCATOR.size
    if locator_at >= 0 and tail[locator_at : locator_at + 4] == b"PK\x06\x07":
        _, disk64, end64, disks = _END64_LOCATOR.unpack_from(tail, locator_at)
        if disk64 or disks > 1:
            raise ArchiveError("part of a split archive; join its parts first")
        end, record = _read_end64(read, tail_at + locator_at, end64)
        _, _, _, _, disk, directory_disk, count_here, count, size, offset = record
    if disk or directory_disk or count_here != count:
        raise ArchiveError("part of a split archive; join its parts first")
    shift = end - size - offset
    if shift < 0 or count > MAX_MEMBERS or count * _ENTRY.size > size:
        raise ArchiveError("truncated or damaged: the central directory is not where it should be")
    return _Directory(offset + shift, size, count, shift)


def _find_end(tail: bytes) -> int:
    at = len(tail)
    while (at := tail.rfind(b"PK\x05\x06", 0, at)) >= 0:
        if at + _END.size <= len(tail):
            comment_bytes = _END.unpack_from(tail, at)[7]
            if at + _END.size + comment_bytes <= len(tail):
                return at
    raise ArchiveError("truncated, or not a zip archive: no central directory found")


def _read_end64(read: ReadAt, locator: int, claimed: int) -> tuple[int, tuple[int, ...]]:
    """The zip64 end record, normally right before its locator, whatever precedes the archive."""
    for at in (locator - _END64.size, claimed):
        if 0 <= at <= locator - _END64.size:
            record = _END64.unpack(read(at, _END64.size))
            if record[0] == b"PK\x06\x06":
                return at, record
    raise ArchiveError("truncated or damaged: no zip64 end record")


def _entries(read: ReadAt, directory: _Directory) -> Iterator[tuple[tuple[int, ...], bytes, bytes]]:
    buffer = b""
    at = 0
    fetched = 0
    for number in range(1, directory.count + 1):
        if len(buffer) - at < _ENTRY.size + 3 * 0xFFFF and fetched < directory.size:
            wanted = min(_DIRECTORY_CHUNK, directory.size - fetched)
            buffer = buffer[at:] + read(directory.offset + fetched, wanted)
            fetched += wanted
            at = 0
        if len(buffer) - at < _ENTRY.size:
            raise ArchiveError("damaged: the central directory ends early")
        entry = _ENTRY.unpack_from(buffer, at)
        if entry[0] != b"PK\x01\x02":
            raise ArchiveError(f"damaged: no entry {number} in the central directory")
        name_at = at + _ENTRY.size
        extra_at = name_at + entry[10]
        at = extra_at + entry[11] + entry[12]
        if at > len(buffer):
            raise ArchiveError("damaged: the central directory ends early")
        yield entry, buffer[name_at:extra_at], buffer[extra_at : extra_at + entry[11]]


def _add_member(
    table: MemberTable,
    entry: tuple[int, ...],
    raw_name: bytes,
    extra: bytes,
    directory: _Directory,
    archive_bytes: int,
) -> None:
    flags, method = entry[3], entry[4]
    crc, stored, size, disk, offset = entry[7], entry[8], entry[9], entry[13], entry[16]
    if raw_name.endswith(b"/"):
        return
    problem = OK
    if 0xFFFFFFFF in (stored, size, offset) or disk == 0xFFFF:
        wide = _zip64_values(extra, size, stored, offset, disk)
        if wide is None:
            problem = DAMAGED
        else:
            size, stored, offset, disk = wide
    name, name_ok = _decode_name(raw_name, bool(flags & 0x800))
    offset += directory.shift
    if problem == OK:
        problem = _member_problem(flags, method, stored, size, disk, name_ok)
    if problem == OK and offset + _LOCAL.size + stored > archive_bytes:
        problem = DAMAGED
    table.name.append(name)
    table.offset.append(offset)
    table.stored_bytes.append(stored)
    table.size_bytes.append(size)
    table.method.append(method)
    table.crc32.append(crc)
    table.problem.append(problem)


def _member_problem(
    flags: int, method: int, stored: int, size: int, disk: int, name_ok: bool
) -> int:
    if not name_ok:
        return UNSAFE_NAME
    if flags & 0x41 or method == 99:
        return ENCRYPTED
    if method not in (STORED, DEFLATED):
        return METHOD
    if disk:
        return SPLIT
    if size > MAX_MEMBER_BYTES or stored > MAX_MEMBER_BYTES + 65536:
        return TOO_LARGE
    if method == STORED and stored != size:
        return DAMAGED
    return OK


def _zip64_values(
    extra: bytes, size: int, stored: int, offset: int, disk: int
) -> tuple[int, int, int, int] | None:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        at += 4
        if kind != 1:
            at += length
            continue
        values = []
        for value, unknown, form in (
            (size, 0xFFFFFFFF, "<Q"),
            (stored, 0xFFFFFFFF, "<Q"),
            (offset, 0xFFFFFFFF, "<Q"),
            (disk, 0xFFFF, "<L"),
        ):
            if value == unknown:
                width = struct.calcsize(form)
                if length < width or at + width > len(extra):
                    return None
                (value,) = struct.unpack_from(form, extra, at)
                at += width
                length -= width
            values.append(value)
        return values[0], values[1], values[2], values[3]
    return None


def _decode_name(raw: bytes, is_utf8: bool) -> tuple[str, bool]:
    """The name, and whether it is safe to refer to."""
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        if is_utf8:
            return raw.decode(errors="replace"), False
        name = raw.decode("cp437")
    return name, is_safe_name(name)


def is_safe_name(name: str) -> bool:
    """True for a relative name that stays below its root on every system."""
    if not name or "\0" in name or name[0] in "/\\" or name[1:2] == ":":
        return False
    return ".." not in name.replace("\\", "/").split("/")
