"""The size of a JPEG (ITU T.81) from its segments, and its orientation.

Invariants: segments are stepped over unread but for the frame header and the first directory of
the EXIF; XMP is read only when the EXIF says nothing.
"""

from __future__ import annotations

from dataservice.errors import ImageError
from dataservice.storage.probe import orientation
from dataservice.storage.probe.parts import MAX_STEPS, Parts, cut_off

_ALONE = frozenset((0x00, 0x01, *range(0xD0, 0xD9)))
"""Markers without a segment, and what stands for 0xFF in data."""
_FRAMES = frozenset(
    (*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
)
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_MAX_EXIF_SEGMENTS = 16
"""64 KiB each."""
_LOOK = 40
"""Bytes of a segment that are looked at."""

Span = tuple[int, int]
"""(place, bytes)."""


def jpeg(parts: Parts) -> tuple[int, int, int]:
    """Width and height as stored, and the orientation. Raises ImageError."""
    data, start = parts.data, parts.start
    size: tuple[int, int] | None = None
    exif: list[Span] = []
    xmp: Span | None = None
    at = 2
    for _ in range(MAX_STEPS):
        i = at - start
        if i + _LOOK > len(data) and start + len(data) < parts.size:
            data, start = parts.around(at, _LOOK)
            i = at - start
        if i + 2 > len(data):
            raise cut_off()
        marker = data[i + 1]
        if data[i] != 0xFF:
            found = data.find(b"\xff", i)
            at = start + (found if found >= 0 else len(data))
            continue
        if marker == 0xFF or marker in _ALONE:
            at += 1 if marker == 0xFF else 2
            continue
        if marker == 0xD9:
            raise ImageError("corrupt: the JPEG has no picture in it")
        if i + 4 > len(data):
            raise cut_off()
        if marker == 0xDA:
            break
        length = data[i + 2] << 8 | data[i + 3]
        if marker in _FRAMES:
            size = _frame(data[i + 4 : i + 9], length)
        elif marker == 0xE1 and data.startswith(_EXIF, i + 4):
            exif.append((at + 10, max(length - 8, 0)))
        elif marker == 0xE1 and data.startswith(_XMP, i + 4):
            xmp = at + 33, max(length - 31, 0)
        at += 2 + max(length, 2)
        if at > parts.size:
            raise cut_off()
    else:
        raise ImageError("corrupt: the JPEG has too many segments before its data")
    if size is None:
        raise ImageError("corrupt: the JPEG has no size before its data")
    return *size, _turn(parts, exif, xmp)


def _frame(body: bytes, length: int) -> tuple[int, int]:
    if length < 7:
        raise ImageError("corrupt: the JPEG's frame header is too short")
    if len(body) < 5:
        raise cut_off()
    if body[0] != 8:
        raise ImageError(f"unsupported format: JPEG of {body[0]} bits a sample")
    return body[3] << 8 | body[4], body[1] << 8 | body[2]


def _turn(parts: Parts, exif: list[Span], xmp: Span | None) -> int:
    found = None
    if len(exif) == 1:
        at, length = exif[0]
        found = orientation.in_exif(lambda offset, size: parts.some(at + offset, size), length)
    elif exif:
        whole = b"".join(parts.some(*span) for span in exif[:_MAX_EXIF_SEGMENTS])
        found = orientation.in_exif(lambda offset, size: whole[offset : offset + size], len(whole))
    if found is None and xmp is not None:
        return orientation.choose(None, parts.some(*xmp))
    return orientation.choose(found, None)
