"""Sizes of WebP, GIF, BMP and PPM pictures from their headers, of TIFF and others by Pillow.

Invariants: Pillow reads headers only, through a file that gives at most twice the picture's bytes
in all, whatever a header says; blocks are stepped over unread.
"""

from __future__ import annotations

import importlib
import logging
import re
import struct
import warnings
from typing import Any

from dataservice.errors import ImageError
from dataservice.storage.probe import orientation
from dataservice.storage.probe.parts import (
    MAX_METADATA_BYTES,
    MAX_STEPS,
    Parts,
)
from dataservice.storage.probe.reasons import in_words

PILLOW_FORMATS = {"TIFF": "Tiff", "AVIF": "Avif", "JPEG2000": "Jpeg2K"}
"""Pillow's module of each format that is not parsed here."""

warnings.filterwarnings("ignore", module=r"PIL\.")
logging.getLogger("PIL").setLevel(logging.CRITICAL)  # what it says of a picture names no picture

_GAP = rb"(?:[ \t-\r]|#[^\r\n]*+[\r\n])+"
_NETPBM = re.compile(
    rb"P(?:[14]%b([0-9]{1,10})%b([0-9]{1,10})|[2356]%b([0-9]{1,10})%b([0-9]{1,10})%b([0-9]{1,6}))"
    rb"[ \t-\r#]" % ((_GAP,) * 5)
)
_MAX_NETPBM_HEADER = 64 * 1024
"""Pillow reads it byte by byte."""


def webp(parts: Parts) -> tuple[int, int, int]:
    """Width and height as stored, and the orientation. Raises ImageError."""
    head = parts.get(0, 30)
    kind, body = head[12:16], head[20:30]
    if kind == b"VP8 ":
        if body[3:6] != b"\x9d\x01\x2a":
            raise ImageError("corrupt: the WebP's frame has no start code")
        width, height = struct.unpack_from("<HH", body, 6)
        return width & 0x3FFF, height & 0x3FFF, orientation.UPRIGHT
    if kind == b"VP8L":
        if body[0] != 0x2F:
            raise ImageError("corrupt: the WebP's lossless frame has no signature")
        bits = int.from_bytes(body[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, orientation.UPRIGHT
    if kind != b"VP8X":
        raise ImageError("corrupt: the WebP starts with no picture")
    width = int.from_bytes(body[4:7], "little") + 1
    height = int.from_bytes(body[7:10], "little") + 1
    end = min(parts.size, int.from_bytes(head[4:8], "little") + 8)
    return width, height, _webp_turn(parts, body[0], end)


def _webp_turn(parts: Parts, flags: int, end: int) -> int:
    wanted = {name for name, bit in ((b"EXIF", 0x08), (b"XMP ", 0x04)) if flags & bit}
    found: dict[bytes, bytes] = {}
    at = 12
    for _ in range(MAX_STEPS):
        if not wanted or at + 8 > end:
            break
        data, start = parts.around(at, 8)
        name, length = struct.unpack_from("<4sL", data, at - start)
        if name in wanted:
            wanted.remove(name)
            found[name] = parts.some(at + 8, min(length, MAX_METADATA_BYTES, end - at - 8))
        at += 8 + length + (length & 1)
    exif = found.get(b"EXIF", b"")
    turn = orientation.in_exif(lambda at, size: exif[at : at + size], len(exif))
    return orientation.choose(turn, found.get(b"XMP "))


def gif(parts: Parts) -> tuple[int, int, int]:
    """The screen, or what the first picture needs beyond it. Raises ImageError."""
    width, height, flags = struct.unpack("<HHB", parts.get(6, 5))
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    in_extension = False
    for _ in range(MAX_STEPS):
        data, start = parts.around(at, 1)
        kind = data[at - start]
        if in_extension:
            at += 1 + kind
            in_extension = kind > 0
        elif kind == ord(","):
            left, top, right, bottom = struct.unpack("<4H", parts.get(at + 1, 8))
            return max(width, left + right), max(height, top + bottom), orientation.UPRIGHT
        elif kind == ord(";"):
            raise ImageError("corrupt: the GIF has no picture in it")
        else:
            at += 2 if kind == ord("!") else 1
            in_extension = kind == ord("!")
    raise ImageError("corrupt: the GIF has too many blocks before its picture")


def bmp(parts: Parts) -> tuple[int, int, int]:
    """Width and height. Raises ImageError."""
    if int.from_bytes(parts.get(14, 4), "little") == 12:
        width, height = struct.unpack("<HH", parts.get(18, 4))
    else:
        width, height = struct.unpack("<ll", parts.get(18, 8))
    return width, abs(height), orientation.UPRIGHT


def ppm(parts: Parts) -> tuple[int, int, int]:
    """Width and height of the Netpbm formats P1 to P6. Raises ImageError."""
    found = _NETPBM.match(parts.data) or _NETPBM.match(parts.some(0, _MAX_NETPBM_HEADER))
    if not found:
        raise ImageError(
            "corrupt PPM: no width, height and largest value in the first "
            f"{_MAX_NETPBM_HEADER} bytes"
        )
    width, height = int(found[1] or found[3]), int(found[2] or found[4])
    if found[5] and not 1 <= int(found[5]) <= 0xFFFF:
        raise ImageError(f"corrupt PPM: the largest value is {int(found[5])}")
    return width, height, orientation.UPRIGHT


def by_pillow(parts: Parts, name: str) -> tuple[int, int, int]:
    """Width and height, and what turn Pillow leaves to others. Raises ImageError."""
    from PIL import Image

    importlib.import_module(f"PIL.{PILLOW_FORMATS[name]}ImagePlugin")
    if name not in Image.OPEN:
        raise ImageError(f"unsupported format: {name}")
    try:
        file: Any = _HeaderFile(parts)
        with Image.OPEN[name][0](file, "") as image:
            width, height = image.size
            # Pillow turns a TIFF's size itself.
            turn: Any = 1 if name == "TIFF" else image.getexif().get(0x0112, 1)
    except Exception as error:  # a header reader may raise anything on hostile bytes
        said = in_words(error)
        bad = "unsupported format:" if said.startswith("unsupported") else "corrupt"
        raise ImageError(f"{bad} {name}: {said.removeprefix('unsupported: ')}") from error
    return width, height, orientation.choose(turn if isinstance(turn, int) else None, None)


class _HeaderFile:
    """A file over the parts of a picture, as much of one as Pillow's header readers need."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._at = 0
        self._left = 2 * parts.size + 64 * 1024

    def read(self, size: int = -1) -> bytes:
        left = max(self._parts.size - self._at, 0)
        size = left if size < 0 else min(size, left)
        self._left -= size
        if self._left < 0:
            raise ValueError("the header names more bytes than the file has")
        if not size:
            return b""
        data, start = self._parts.around(self._at, size)
        found = data[self._at - start : self._at - start + size]
        self._at += len(found)
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._at, self._parts.size)[whence]
        if base + offset < 0:
            raise ValueError("a place before the beginning of the file")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        pass
