"""The size of a PNG (third edition of the specification) from its chunks, and its orientation.

Invariants: pixels are not read; where they end is found from the length of the first IDAT, else by
a chain of chunks in the last 64 KiB; a look behind them costs 20 bytes where nothing is there.
"""

from __future__ import annotations

import struct

from dataservice.errors import ImageError
from dataservice.storage.probe import orientation
from dataservice.storage.probe.parts import (
    MAX_METADATA_BYTES,
    MAX_STEPS,
    Parts,
    cut_off,
)

_CHUNK = struct.Struct(">I4s")
_AROUND = 12
"""Bytes of a chunk besides its data."""
_END = b"\0\0\0\0IEND\xae\x42\x60\x82"
_TELLS = frozenset((b"eXIf", b"iTXt", b"tEXt", b"zTXt"))
_PROFILE, _XMP = b"Raw profile type exif\0", b"XML:com.adobe.xmp\0"
_LOOK = 8 + len(_PROFILE)
_TAIL_BYTES = 64 * 1024
_MAX_LATE_STEPS = 64
"""Chunks behind the pixels that are looked at."""


def png(parts: Parts, *, look_behind: bool) -> tuple[int, int, int]:
    """Width and height as stored, and the orientation. Raises ImageError.

    `look_behind`: whether an orientation behind the pixels counts.
    """
    data, start = parts.data, parts.start
    if data[12:16] != b"IHDR" and len(data) >= 16:
        raise ImageError("corrupt: the PNG does not start with its size")
    width, height = struct.unpack(">II", parts.get(16, 8))
    meta = _Metadata(parts)
    at = 8
    for _ in range(MAX_STEPS):
        if at - start + _LOOK > len(data) and start + len(data) < parts.size:
            data, start = parts.around(at, _LOOK)
        if at - start + 8 > len(data):
            raise cut_off()
        length, kind = _CHUNK.unpack_from(data, at - start)
        if kind == b"IDAT":
            if look_behind:
                _look_behind(parts, at, length, meta)
            return width, height, meta.orientation()
        if kind == b"IEND":
            raise ImageError("corrupt: the PNG has no picture in it")
        if kind in _TELLS:
            meta.add(kind, at + 8, length)
        at += length + _AROUND
        if at > parts.size:
            raise cut_off()
    raise ImageError("corrupt: the PNG has too many chunks before its pixels")


class _Metadata:
    """Where an orientation may stand; the last of a kind counts."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._exif: tuple[int, int] | None = None
        self._profile: tuple[bytes, int, int] | None = None
        self._xmp: tuple[int, int] | None = None

    def add(self, kind: bytes, at: int, length: int) -> None:
        if kind == b"eXIf":
            self._exif = at, min(length, MAX_METADATA_BYTES)
        elif kind == b"iTXt":
            if self._parts.some(at, min(length, len(_XMP))) == _XMP:
                self._xmp = at, min(length, MAX_METADATA_BYTES)
        elif self._parts.some(at, min(length, len(_PROFILE))) == _PROFILE:
            self._profile = kind, at, min(length, MAX_METADATA_BYTES)

    def orientation(self) -> int:
        if not (self._exif or self._profile or self._xmp):
            return orientation.UPRIGHT
        found = None
        if self._exif is not None:
            begin, size = self._exif
            found = orientation.in_exif(lambda at, n: self._parts.some(begin + at, n), size)
        elif self._profile is not None:
            kind, begin, size = self._profile
            text = self._parts.some(begin, size)[len(_PROFILE) :]
            found = orientation.in_profile(
                text if kind == b"tEXt" else orientation.inflate_text(text[1:])
            )
        return orientation.choose(found, self._xmp_text() if found is None else None)

    def _xmp_text(self) -> bytes | None:
        """Behind the keyword: compression flag and method, language, translated keyword, text."""
        if self._xmp is None:
            return None
        data = self._parts.some(*self._xmp)[len(_XMP) :]
        fields = data[2:].split(b"\0", 2)
        if len(fields) < 3:
            return None
        return orientation.inflate_text(fields[2]) if data[0] else fields[2]


def _look_behind(parts: Parts, first: int, length: int, meta: _Metadata) -> None:
    at = _behind_pixels(parts, first, length)
    for _ in range(_MAX_LATE_STEPS):
        if at is None or at + 8 > parts.size:
            return
        data, start = parts.around(at, 8)
        length, kind = _CHUNK.unpack_from(data, at - start)
        if kind == b"IEND":
            return
        if kind in _TELLS:
            meta.add(kind, at + 8, length)
        at += length + _AROUND


def _behind_pixels(parts: Parts, first: int, length: int) -> int | None:
    """Where a chain of chunks starts that leads to the end; None when nothing follows the pixels.

    Most writers make all IDAT chunks but the last of one length, or a single one.
    """
    end = parts.size - len(_END)
    second = first + length + _AROUND
    if second > end:
        return None
    if parts.some(end, len(_END)) == _END:
        step = length + _AROUND
        whole, rest = divmod(end - second, step)
        if not whole and not rest:
            return None
        last = second + whole * step if rest else end - step
        size, kind = _CHUNK.unpack(parts.get(last, 8))
        if kind == b"IDAT" and last + size + _AROUND == end:
            return None
    tail_at = max(parts.size - _TAIL_BYTES, second)
    data, start = parts.around(tail_at, parts.size - tail_at)
    tail = data[tail_at - start :]
    at = len(tail) if tail_at > second else 0
    while (at := tail.rfind(b"IDAT", 0, at)) >= 4:
        if _leads_to_end(tail, at - 4):
            return tail_at + at - 4
    return second


def _leads_to_end(data: bytes, at: int) -> bool:
    for _ in range(_MAX_LATE_STEPS):
        if at + 8 > len(data):
            return False
        length, kind = _CHUNK.unpack_from(data, at)
        at += length + _AROUND
        if kind == b"IEND":
            return at <= len(data)
    return False
