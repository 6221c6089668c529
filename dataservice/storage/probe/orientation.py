"""How a picture is to be turned: the orientation in its EXIF, else in its XMP, as Pillow reads it.

Invariants: pure; damage means no orientation, never an error.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable

_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_TAG = 0x0112
_FORMS = {3: "H", 4: "L", 8: "h", 9: "l"}
_FIRST_BYTES = 2048
_MAX_TEXT_BYTES = 1024 * 1024

UPRIGHT = 1


class _MoreNeeded(Exception):
    pass


def choose(exif: int | None, xmp: bytes | None) -> int:
    """1 to 8, from what was found in the EXIF and from the XMP."""
    if exif is None and xmp:
        match = _XMP_ORIENTATION.search(xmp)
        exif = int(match[1]) if match else None
    return exif if exif is not None and 1 <= exif <= 8 else UPRIGHT


def in_exif(read: Callable[[int, int], bytes], size: int) -> int | None:
    """The orientation in the first directory; None when it has none, 0 when it is no number.

    `read(at, size)` gives bytes of the EXIF block, which has `size` bytes.
    """
    try:
        return _search(read(0, min(size, _FIRST_BYTES)), size <= _FIRST_BYTES)
    except _MoreNeeded:
        return _search(read(0, size), True)


def in_profile(text: bytes) -> int | None:
    """As `in_exif`, of a PNG's text "Raw profile type exif": hexadecimal digits from line 4 on."""
    try:
        exif = bytes.fromhex("".join(text.decode("latin-1").split("\n")[3:]))
    except ValueError:
        return 0
    return _search(exif, True)


def inflate_text(data: bytes) -> bytes:
    """What of it can be had, 1 MiB at most."""
    try:
        return zlib.decompressobj().decompress(data, _MAX_TEXT_BYTES)
    except zlib.error:
        return b""


def _search(exif: bytes, complete: bool) -> int | None:
    while exif.startswith(b"Exif\0\0"):
        exif = exif[6:]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None or len(exif) < 8:
        return None
    (at,) = struct.unpack_from(order + "L", exif, 4)
    if at + 2 > len(exif):
        if complete:
            return None
        raise _MoreNeeded
    (count,) = struct.unpack_from(order + "H", exif, at)
    for entry in range(at + 2, min(at + 2 + 12 * count, len(exif) - 11), 12):
        tag, kind, values = struct.unpack_from(order + "HHL", exif, entry)
        if tag == _TAG:
            form = _FORMS.get(kind)
            if form is None or values != 1:
                return 0
            return int(struct.unpack_from(order + form, exif, entry + 8)[0])
    if not complete and at + 2 + 12 * count > len(exif):
        raise _MoreNeeded
    return None
