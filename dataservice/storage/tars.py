"""The members of a tar archive (POSIX ustar and pax, GNU, old): headers are read, data is not.

Invariants: a header counts only with its checksum; links, devices and sparse files are rows that
are refused; an archive that is cut off keeps the members before the cut; damage elsewhere, and a
compressed archive, is an ArchiveError. Memory is 1 MiB and the table.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from dataservice.errors import ArchiveError
from dataservice.storage import membertable as mt
from dataservice.storage.reads import ReadAt
from dataservice.storage.zips.methods import crc32

_BLOCK = 512
_WINDOW_BYTES = 1024 * 1024
_LEAST_BYTES = 4096
_NEAR_BYTES = 32 * 1024
"""From what has been read to the next header; further away nothing is read ahead."""
_MAX_EXTENDED_BYTES = 1024 * 1024
_SUM_FIELD = slice(148, 156)
_ZEROS = bytes(_BLOCK)
_COMPRESSED = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "Zstandard"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ", "xz"),
)
_FILES, _FOLDER = (b"\0", b"0", b"7"), b"5"
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL, _GNU_SPARSE = b"L", b"K", b"x", b"g", b"S"


@dataclass(slots=True)
class _Columns:
    name: list[str] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    problem: list[int] = field(default_factory=list)

    def add(self, raw_name: bytes, offset: int, size: int, problem: int) -> None:
        if len(raw_name) > mt.MAX_NAME_BYTES:
            problem, raw_name = problem or mt.LONG_NAME, raw_name[:100]
        try:
            name = raw_name.decode()
        except UnicodeDecodeError:
            name = raw_name.decode("latin-1")
        if problem == mt.OK and not mt.is_safe_name(name):
            problem = mt.UNSAFE_NAME
        if problem == mt.OK and size > mt.MAX_MEMBER_BYTES:
            problem = mt.TOO_LARGE
        self.name.append(name)
        self.offset.append(offset)
        self.size.append(size)
        self.problem.append(problem)


def read_members(read: ReadAt, size_bytes: int) -> mt.MemberTable:
    """The member table of a tar of `size_bytes` bytes. Raises ArchiveError."""
    walk = _Walk(read, size_bytes)
    columns = walk.run()
    size = np.array(columns.size, np.uint64)
    problem = np.array(columns.problem, np.uint8)
    names = pa.array(columns.name, pa.large_string())
    mt.refuse_shadowed(problem, names)
    return mt.MemberTable(
        name=names,
        offset=np.array(columns.offset, np.uint64),
        stored_bytes=size,
        size_bytes=size,
        method=np.full(len(size), mt.AS_IT_IS, np.int16),
        crc32=np.zeros(len(size), np.uint32),
        problem=problem,
        directory_crc32=walk.crc,
    )


class _Walk:
    """From header to header."""

    def __init__(self, read: ReadAt, size_bytes: int) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._window = b""
        self._window_at = 0
        self._ahead = _LEAST_BYTES
        self._columns = _Columns()
        self._globals: dict[bytes, bytes] = {}
        self.crc = 0

    def run(self) -> _Columns:
        at = 0
        pending: dict[bytes, bytes] = {}
        while at + _BLOCK <= self._size_bytes:
            header = self._take(at, _BLOCK)
            if header == _ZEROS:
                return self._columns
            if not _checksum_fits(header):
                raise self._bad_header(header, at)
            self.crc = crc32(header, self.crc)
            kind = header[156:157]
            stored = _number(header[124:136], at)
            if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL):
                self._extended(kind, at + _BLOCK, stored, pending)
            else:
                stored = self._member(header, kind, at, stored, {**self._globals, **pending})
                pending.clear()
            at += _BLOCK + (stored + _BLOCK - 1) // _BLOCK * _BLOCK
        if not at:
            head = self._take(0, self._size_bytes)
            raise _compressed(head) or ArchiveError("truncated, or not a tar archive")
        return self._columns

    def _member(
        self, header: bytes, kind: bytes, at: int, stored: int, told: dict[bytes, bytes]
    ) -> int:
        """Adds a row; returns the bytes of data that follow the header."""
        if b"size" in told:
            stored = _decimal(told[b"size"], at)
        name = told.get(b"path") or _ustar_name(header)
        problem = mt.OK
        if kind == _GNU_SPARSE or any(key.startswith(b"GNU.sparse.") for key in told):
            problem = mt.SPARSE
        elif kind not in _FILES:
            problem = mt.NOT_A_FILE
        if kind in _WITHOUT_DATA:
            stored = 0
        offset = at + _BLOCK
        if kind == _FOLDER or (problem == mt.OK and name.endswith(b"/")):
            return stored
        if offset + stored > self._size_bytes:
            problem = mt.CUT_OFF
        self._columns.add(name, offset, stored, problem)
        if len(self._columns.name) > mt.MAX_MEMBERS:
            raise ArchiveError(f"over the limit of members of an archive ({mt.MAX_MEMBERS})")
        return stored

    def _extended(self, kind: bytes, at: int, size: int, pending: dict[bytes, bytes]) -> None:
        if kind == _LONG_LINK:
            return
        if size > _MAX_EXTENDED_BYTES:
            raise ArchiveError(f"an extended header of {size} bytes at {at}")
        if at + size > self._size_bytes:
            return  # cut off: no member follows
        data = self._take(at, size)
        self.crc = crc32(data, self.crc)
        if kind == _LONG_NAME:
            pending[b"path"] = data.split(b"\0", 1)[0]
        elif kind == _PAX:
            pending |= _pax_records(data, at)
        else:
            self._globals |= _pax_records(data, at)

    def _take(self, at: int, size: int) -> bytes:
        """Reads ahead, twice as far each time, as long as headers stand near each other."""
        start = at - self._window_at
        if start < 0 or start + size > len(self._window):
            is_near = start - len(self._window) < _NEAR_BYTES and len(self._window) > 0
            self._ahead = min(2 * self._ahead, _WINDOW_BYTES) if is_near else _LEAST_BYTES
            self._window = self._read(at, min(max(size, self._ahead), self._size_bytes - at))
            self._window_at, start = at, 0
        return self._window[start : start + size]

    def _bad_header(self, header: bytes, at: int) -> ArchiveError:
        if at:
            return ArchiveError(f"damaged: no valid header at {at}, behind a member")
        return _compressed(header) or ArchiveError(
            "not a tar archive: no valid header at its beginning"
        )


def _compressed(head: bytes) -> ArchiveError | None:
    for signature, name in _COMPRESSED:
        if head.startswith(signature):
            return ArchiveError(f"compressed by {name}; unpack the tar first")
    return None


def _checksum_fits(header: bytes) -> bool:
    try:
        claimed = int(header[_SUM_FIELD].split(b"\0", 1)[0].strip() or b"-1", 8)
    except ValueError:
        return False
    field_sum = sum(header[_SUM_FIELD])
    if claimed == sum(header) - field_sum + 8 * ord(" "):
        return True
    signed = struct.unpack("512b", header)
    return bool(claimed == sum(signed) - sum(signed[_SUM_FIELD]) + 8 * ord(" "))


def _number(raw: bytes, at: int) -> int:
    """Octal, or binary where the first bit is set (GNU)."""
    if raw[0] & 0x80:
        value = int.from_bytes(raw, "big", signed=False) & (1 << 8 * len(raw) - 1) - 1
        if raw[0] != 0x80 or value >= 1 << 63:
            raise ArchiveError(f"damaged: a size in the header at {at} is out of range")
        return value
    text = raw.split(b"\0", 1)[0].strip()
    try:
        return int(text or b"0", 8)
    except ValueError:
        raise ArchiveError(f"damaged: a size in the header at {at} is no number") from None


def _decimal(raw: bytes, at: int) -> int:
    if not raw.isdigit() or len(raw) > 18:
        raise ArchiveError(f"damaged: a size in the pax header before {at} is no number")
    return int(raw)


def _ustar_name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].split(b"\0", 1)[0]
        if prefix:
            return prefix + b"/" + name
    return name


def _pax_records(data: bytes, at: int) -> dict[bytes, bytes]:
    """ "<length> <key>=<value>\\n", the length that of the whole record."""
    records: dict[bytes, bytes] = {}
    begin = 0
    while begin < len(data) and data[begin] != 0:
        digits, space, _ = data[begin : begin + 20].partition(b" ")
        stop = begin + int(digits) if space and digits.isdigit() else 0
        key, equals, value = data[begin + len(digits) + 1 : stop - 1].partition(b"=")
        if stop <= begin or stop > len(data) or not equals or data[stop - 1 : stop] != b"\n":
            raise ArchiveError(f"damaged: the pax header at {at} is malformed")
        records[key] = value
        begin = stop
    return records
