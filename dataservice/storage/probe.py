"""The upright size and the format of a picture from its headers, without decoding it.

Invariants: width and height are those of `PIL.ImageOps.exif_transpose` (EXIF first, then XMP);
pixels are never decoded and no more is read than the headers need: 8 KiB at first, more when they
go on, the last 64 KiB of a PNG or the metadata chunks of a WebP; memory is bounded by what is
read. JPEG, PNG, WebP and GIF are parsed here, BMP, TIFF, AVIF and others by Pillow's header reader.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dataservice.core.vision import MAX_ASPECT
from dataservice.errors import ImageError

FIRST_READ_BYTES = 8 * 1024
MAX_PIXELS = 178_956_970
"""Pillow decodes nothing above it."""
_TAIL_BYTES = 64 * 1024
_MAX_TEXT_BYTES = 1024 * 1024
_OTHER_FORMATS = ("BMP", "DIB", "TIFF", "AVIF", "PPM", "JPEG2000")
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')

ReadPart = Callable[[int, int], bytes]
"""(offset, size) -> those bytes of the picture, fewer only past its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageHeader:
    width: int
    """Upright: after the EXIF turn."""
    height: int
    format: str
    """Pillow's name, such as "JPEG"."""


class _NeedMore(Exception):
    """The header goes on past what was read."""


@dataclass(slots=True)
class _Meta:
    """Where an orientation may stand."""

    exif: bytes | None = None
    xmp: bytes | None = None
    raw_profile: str | None = None
    """Hexadecimal EXIF in a PNG text chunk, used when there is no other EXIF."""


def probe(read: ReadPart, size_bytes: int) -> ImageHeader:
    """Size and format of a picture of `size_bytes` bytes. Raises ImageError, and as `read`."""
    want = min(FIRST_READ_BYTES, size_bytes)
    while True:
        head = read(0, want)
        complete = want >= size_bytes
        try:
            width, height, format_name, meta = _parse(head, read, size_bytes)
            break
        except _NeedMore:
            if complete:
                raise ImageError("the header is cut off") from None
            want = min(want * 8, size_bytes)
        except (struct.error, IndexError):
            raise ImageError("the header is damaged") from None
    if meta is not None and 5 <= _orientation(meta) <= 8:
        width, height = height, width
    if width < 1 or height < 1:
        raise ImageError(f"the header says {width}x{height} pixels")
    if width * height > MAX_PIXELS:
        raise ImageError(f"{width}x{height} pixels, more than {MAX_PIXELS}")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(f"{width}x{height} pixels, more elongated than {MAX_ASPECT:.0f}:1")
    return ImageHeader(width=width, height=height, format=format_name)


def _parse(head: bytes, read: ReadPart, size_bytes: int) -> tuple[int, int, str, _Meta | None]:
    if head.startswith(b"\xff\xd8\xff"):
        return _jpeg(head)
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return _png(head, read, size_bytes)
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return _webp(head, read, size_bytes)
    if head.startswith((b"GIF87a", b"GIF89a")):
        return _gif(head)
    if not head:
        raise ImageError("the file is empty")
    return _other(read(0, size_bytes))


def _jpeg(head: bytes) -> tuple[int, int, str, _Meta | None]:
    size: tuple[int, int] | None = None
    meta = _Meta()
    at = 2
    while True:
        at = head.find(b"\xff", at)
        if at < 0 or at + 2 > len(head):
            raise _NeedMore
        marker = head[at + 1]
        at += 1 if marker == 0xFF else 2
        if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD8:
            continue
        if marker == 0xD9:
            raise ImageError("the JPEG has no picture in it")
        length = int.from_bytes(_take(head, at, 2), "big")
        if marker == 0xDA:
            break
        segment = _take(head, at + 2, max(length - 2, 0))
        at += max(length, 2)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            bits, height, width = struct.unpack_from(">BHH", segment)
            if bits != 8:
                raise ImageError(f"{bits}-bit JPEG is not supported")
            size = width, height
        elif marker == 0xE1 and segment.startswith(b"Exif\0\0"):
            meta.exif = (meta.exif or b"") + segment[6:]
        elif marker == 0xE1 and segment.startswith(b"http://ns.adobe.com/xap/1.0/\0"):
            meta.xmp = segment[29:]
    if size is None:
        raise ImageError("the JPEG has no size before its data")
    return *size, "JPEG", meta


def _png(head: bytes, read: ReadPart, size_bytes: int) -> tuple[int, int, str, _Meta | None]:
    if _take(head, 12, 4) != b"IHDR":
        raise ImageError("the PNG does not start with its size")
    width, height = struct.unpack(">II", _take(head, 16, 8))
    meta = _Meta()
    for kind, start, length in _png_chunks(head, 8):
        if kind == b"IDAT":
            _png_late_chunks(head, start + length + 4, read, size_bytes, meta)
            return width, height, "PNG", meta
        if kind == b"IEND":
            raise ImageError("the PNG has no picture in it")
        _png_meta(kind, _take(head, start, length) if _tells(kind) else b"", meta)
    raise _NeedMore


def _png_chunks(data: bytes, at: int) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start of its data, length) of the chunks whose heads lie in `data`."""
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        yield kind, at + 8, length
        at += length + 12


def _tells(kind: bytes) -> bool:
    return kind in (b"eXIf", b"iTXt", b"tEXt", b"zTXt")


def _png_meta(kind: bytes, data: bytes, meta: _Meta) -> None:
    if kind == b"eXIf":
        meta.exif = data
    elif kind in (b"tEXt", b"zTXt") and data.startswith(b"Raw profile type exif\0"):
        value = data[22:] if kind == b"tEXt" else _inflate_text(data[23:])
        meta.raw_profile = value.decode("latin-1")
    elif kind == b"iTXt" and data.startswith(b"XML:com.adobe.xmp\0"):
        parts = data[20:].split(b"\0", 2)
        if len(parts) == 3:
            meta.xmp = _inflate_text(parts[2]) if data[18:19] != b"\0" else parts[2]


def _inflate_text(data: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, _MAX_TEXT_BYTES)
    except zlib.error:
        return b""


def _png_late_chunks(
    head: bytes, after_first: int, read: ReadPart, size_bytes: int, meta: _Meta
) -> None:
    """Chunks behind the pixels, without reading the pixels.

    A PNG has either one huge IDAT, stepped over, or many small ones, of which the last is found
    in the tail: a place from where chunk follows chunk to the very end is one.
    """
    if len(head) >= size_bytes:
        _png_walk(head, after_first, meta)
        return
    tail_at = max(size_bytes - _TAIL_BYTES, 0)
    tail = read(tail_at, size_bytes - tail_at)
    if after_first >= tail_at:
        _png_walk(tail, after_first - tail_at, meta)
        return
    at = len(tail)
    while (at := tail.rfind(b"IDAT", 0, at)) >= 4:
        if _png_reaches_end(tail, at - 4):
            _png_walk(tail, at - 4, meta)
            return
    while after_first < tail_at:
        chunk = read(after_first, 8)
        if len(chunk) < 8:
            return
        after_first += int.from_bytes(chunk[:4], "big") + 12
    _png_walk(tail, after_first - tail_at, meta)


def _png_reaches_end(data: bytes, at: int) -> bool:
    for kind, start, length in _png_chunks(data, at):
        if kind == b"IEND":
            return start + length + 4 <= len(data)
    return False


def _png_walk(data: bytes, at: int, meta: _Meta) -> None:
    for kind, start, length in _png_chunks(data, at):
        if kind == b"IEND":
            return
        if _tells(kind):
            _png_meta(kind, data[start : start + length], meta)


def _webp(head: bytes, read: ReadPart, size_bytes: int) -> tuple[int, int, str, _Meta | None]:
    kind = _take(head, 12, 4)
    body = _take(head, 20, 10)
    if kind == b"VP8 ":
        if body[3:6] != b"\x9d\x01\x2a":
            raise ImageError("the WebP's frame has no start code")
        width, height = struct.unpack_from("<HH", body, 6)
        return width & 0x3FFF, height & 0x3FFF, "WEBP", None
    if kind == b"VP8L":
        if body[0] != 0x2F:
            raise ImageError("the WebP's lossless frame has no signature")
        bits = int.from_bytes(body[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, "WEBP", None
    if kind != b"VP8X":
        raise ImageError("not a WebP picture")
    flags = body[0]
    width = int.from_bytes(body[4:7], "little") + 1
    height = int.from_bytes(body[7:10], "little") + 1
    meta = _Meta()
    wanted = {name for name, bit in ((b"EXIF", 0x08), (b"XMP ", 0x04)) if flags & bit}
    end = min(size_bytes, int.from_bytes(head[4:8], "little") + 8)
    at = 12
    while wanted and at + 8 <= end:
        chunk = head[at : at + 8] if at + 8 <= len(head) else read(at, 8)
        name, length = chunk[:4], int.from_bytes(chunk[4:8], "little")
        if name in wanted:
            wanted.remove(name)
            data = read(at + 8, min(length, _MAX_TEXT_BYTES, end - at - 8))
            if name == b"EXIF":
                meta.exif = data
            else:
                meta.xmp = data
        at += 8 + length + (length & 1)
    return width, height, "WEBP", meta


def _gif(head: bytes) -> tuple[int, int, str, _Meta | None]:
    width, height, flags = struct.unpack("<HHB", _take(head, 6, 5))
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while (kind := _take(head, at, 1)) != b",":
        if kind == b";":
            raise ImageError("the GIF has no picture in it")
        at += 1
        if kind == b"!":
            at += 1
            while length := _take(head, at, 1)[0]:
                at += 1 + length
            at += 1
    left, top, right, bottom = struct.unpack("<4H", _take(head, at + 1, 8))
    return max(width, left + right), max(height, top + bottom), "GIF", None


def _other(data: bytes) -> tuple[int, int, str, _Meta | None]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=_OTHER_FORMATS) as image:
            width, height = image.size
            format_name = image.format or ""
            if format_name != "TIFF" and image.getexif().get(0x0112) in (5, 6, 7, 8):
                width, height = height, width  # Pillow turns a TIFF's size itself
    except Exception as error:  # a header reader may raise anything on hostile bytes
        raise ImageError(f"not a picture of a known format ({type(error).__name__})") from error
    return width, height, format_name, None


def _take(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise _NeedMore
    return data[at : at + size]


def _orientation(meta: _Meta) -> int:
    exif = meta.exif
    if exif is None and meta.raw_profile is not None:
        try:
            exif = bytes.fromhex("".join(meta.raw_profile.split("\n")[3:]))
        except ValueError:
            return 1
    found = _exif_orientation(exif) if exif else None
    if found is None and meta.xmp:
        match = _XMP_ORIENTATION.search(meta.xmp)
        found = int(match[1]) if match else None
    return 1 if found is None else found


def _exif_orientation(exif: bytes) -> int | None:
    """The orientation in the first directory; None when it has none, 0 when it is no number."""
    while exif.startswith(b"Exif\0\0"):
        exif = exif[6:]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None or len(exif) < 8:
        return None
    (at,) = struct.unpack_from(order + "L", exif, 4)
    if at + 2 > len(exif):
        return None
    (count,) = struct.unpack_from(order + "H", exif, at)
    for entry in range(at + 2, min(at + 2 + 12 * count, len(exif) - 11), 12):
        tag, kind, values = struct.unpack_from(order + "HHL", exif, entry)
        if tag == 0x0112:
            form = {3: "H", 4: "L", 8: "h", 9: "l"}.get(kind)
            if form is None or values != 1:
                return 0
            return int(struct.unpack_from(order + form, exif, entry + 8)[0])
    return None
