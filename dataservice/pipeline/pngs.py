"""What of a PNG (third edition of the specification) makes its pixels, and whether all are there.

Invariants: chunks that say nothing of the pixels are not given to the decoder, so that they neither
cost the picture nor are inflated; those that do have their checksums right, or it is an ImageError;
of an animation the picture that everybody shows is taken. Transparency that cannot be that of the
picture's kind counts as none, as in libpng.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from PIL import Image

from dataservice.errors import ImageError

_CHUNK = struct.Struct(">I4s")
_FIRST = 8
"""Where the first chunk stands."""
_AROUND = 12
"""Bytes of a chunk besides its data."""
_GRAY, _RGB, _PALETTE = 0, 2, 3
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PASSES = (
    (0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2),
    (0, 1, 1, 2),
)  # fmt: skip
"""Of an interlaced picture: first column and row, steps to the next ones."""
_PIECE_BYTES = 256 * 1024


def bare_png(data: bytes) -> bytes:
    """Without the chunks that do not matter for the pixels. Raises ImageError."""
    kept: list[bytes] = []
    start, palette = _FIRST, -1
    for at, end, kind in _chunks(data):
        colour = data[25]
        drop = bool(kind[0] & 0x20)
        if kind == b"tRNS":
            drop = not _fits(colour, end - at - _AROUND, palette)
        elif kind == b"PLTE":
            palette = (end - at - _AROUND) // 3
        elif kind == b"IDAT" and colour == _PALETTE and palette < 1:
            raise ImageError("corrupt PNG: no palette before its pixels")
        if drop:
            kept.append(data[start:at])
            start = end
        elif end <= len(data):
            _check(data, at, end, kind)
    return data if not kept else data[:_FIRST] + b"".join(kept) + data[start:]


def check_rows(data: bytes, image: Image.Image) -> None:
    """Raises ImageError where a decoded picture lacks rows: the decoder leaves them black."""
    width, height = image.size
    if not data[28] and any(image.crop((0, height - 1, width, height)).tobytes()):
        return
    missing = _raw_bytes(data, width, height)
    inflater = zlib.decompressobj()
    try:
        for at, end, kind in _chunks(data):
            if kind != b"IDAT" or inflater.eof or missing <= 0:
                continue
            rest = data[at + 8 : end - 4]
            while rest and missing > 0:
                missing -= len(inflater.decompress(rest, _PIECE_BYTES))
                rest = inflater.unconsumed_tail
        while missing > 0 and (more := inflater.decompress(b"", _PIECE_BYTES)):
            missing -= len(more)
    except zlib.error:
        return  # behind the rows that the decoder took
    if missing > 0:
        raise ImageError("truncated PNG: its data end before its last row")


def _chunks(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Begin, end and kind, up to the chunk that says that no more come."""
    at = _FIRST
    while at + 8 <= len(data):
        length, kind = _CHUNK.unpack_from(data, at)
        yield at, at + length + _AROUND, kind
        if kind == b"IEND":
            return
        at += length + _AROUND


def _check(data: bytes, at: int, end: int, kind: bytes) -> None:
    if zlib.crc32(memoryview(data)[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end], "big"):
        raise ImageError(f"corrupt PNG: a wrong CRC of chunk {kind.decode('latin-1')!r}")
    if kind == b"IHDR" and at > _FIRST:
        raise ImageError("corrupt PNG: it says its size twice")


def _fits(colour: int, length: int, palette: int) -> bool:
    """Whether a tRNS chunk of that length belongs to the picture's kind."""
    if colour == _PALETTE:
        return length <= palette
    return length == {_GRAY: 2, _RGB: 6}.get(colour)


def _raw_bytes(data: bytes, width: int, height: int) -> int:
    """Of all rows, each with its filter, before they are deflated."""
    bits = data[24] * _CHANNELS.get(data[25], 1)
    passes = _PASSES if data[28] else ((0, 0, 1, 1),)
    total = 0
    for left, top, right, down in passes:
        columns, rows = -(-(width - left) // right), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            total += rows * (1 + (columns * bits + 7) // 8)
    return total
