"""What of a PNG (third edition of the specification) makes its pixels, and whether all are there.

Invariants: chunks that say nothing of the pixels are not given to a decoder, so that they neither
cost the picture nor are inflated; those that do have their checksums right, or it is an ImageError;
of an animation the picture that everybody shows is taken. Transparency that cannot be that of the
picture's kind counts as none, as in libpng.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from isal import isal_zlib
from PIL import Image

from dataservice.errors import ImageError
from dataservice.pipeline.decoding import icc

_CHUNK = struct.Struct(">I4s")
_FIRST = 8
"""Where the first chunk stands."""
_AROUND = 12
"""Bytes of a chunk besides its data."""
_HEADER = struct.Struct(">2I5B")
GRAY, RGB, PALETTE, GRAY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6
CHANNELS = {GRAY: 1, RGB: 3, PALETTE: 1, GRAY_ALPHA: 2, RGB_ALPHA: 4}
_PASSES = (
    (0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2),
    (0, 1, 1, 2),
)  # fmt: skip
"""Of an interlaced picture: first column and row, steps to the next ones."""
_MAX_PALETTE_BYTES = 3 * 256
_PIECE_BYTES = 256 * 1024
_MAX_CHUNKS = 500_000
"""Steps over so many take half a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PngParts:
    bare: bytes
    """The file without the chunks that do not matter for the pixels."""
    width: int
    height: int
    depth: int
    """Bits a sample."""
    colour: int
    palette: bytes
    transparent: bytes
    """What the tRNS chunk holds; empty for none."""
    pixels: list[memoryview]
    """The zlib stream of all rows, in parts."""
    is_usual: bool
    """Whether it is whole, not interlaced, and has each chunk once and in its place."""


def parts_of(data: bytes) -> PngParts:
    """Raises ImageError."""
    if len(data) < _FIRST + _AROUND + _HEADER.size:
        raise ImageError("truncated PNG: its header is cut off")
    width, height, depth, colour, *methods = _HEADER.unpack_from(data, _FIRST + 8)
    view = memoryview(data)
    kept: list[bytes] = []
    pixels: list[memoryview] = []
    kinds: list[bytes] = []
    palette, transparent, start = b"", b"", _FIRST
    for at, end, kind in _chunks(data):
        drop = bool(kind[0] & 0x20)
        if kind == b"tRNS":
            values = data[at + 8 : end - 4]
            drop = bool(pixels) or not _fits(values, depth, colour, len(palette) // 3)
            transparent = transparent if drop else values
        elif kind == b"PLTE":
            palette = data[at + 8 : end - 4]
        elif kind == b"IDAT":
            if colour == PALETTE and len(palette) < 3:
                raise ImageError("corrupt PNG: no palette before its pixels")
            pixels.append(view[at + 8 : end - 4])
        if drop:
            kept.append(data[start:at])
            start = end
            continue
        if not kinds or kind != b"IDAT" or kinds[-1] != kind:
            kinds.append(kind)
        if end <= len(data):
            _check(data, at, end, kind)
    bare = data if not kept else data[:_FIRST] + b"".join(kept) + data[start:]
    order = [kind for kind in kinds if kind not in (b"PLTE", b"tRNS")]
    fine = len(palette) % 3 == 0 and len(palette) <= _MAX_PALETTE_BYTES
    whole = order == [b"IHDR", b"IDAT", b"IEND"] and len(kinds) == len(set(kinds))
    return PngParts(
        bare=bare,
        width=width,
        height=height,
        depth=depth,
        colour=colour,
        palette=palette,
        transparent=transparent,
        pixels=pixels,
        is_usual=fine and whole and not any(methods) and end <= len(data),
    )


def profile_in(data: bytes) -> bytes:
    """The ICC profile before the pixels; empty when there is none that could be one."""
    for at, end, kind in _chunks(data):
        if kind == b"IDAT":
            break
        if kind == b"iCCP":
            _, _, stored = data[at + 8 : end - 4].partition(b"\0")
            inflater = zlib.decompressobj()
            try:
                return icc.usable(inflater.decompress(stored[1:], icc.MAX_PROFILE_BYTES + 1))
            except zlib.error:
                break
    return b""


def check_rows(data: bytes, image: Image.Image) -> None:
    """Raises ImageError where a decoded picture lacks rows: Pillow leaves them black."""
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
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(data):
            return
        length, kind = _CHUNK.unpack_from(data, at)
        yield at, at + length + _AROUND, kind
        if kind == b"IEND":
            return
        at += length + _AROUND
    raise ImageError(f"corrupt PNG: more than {_MAX_CHUNKS} chunks")


def _check(data: bytes, at: int, end: int, kind: bytes) -> None:
    right = int.from_bytes(data[end - 4 : end], "big")
    if isal_zlib.crc32(memoryview(data)[at + 4 : end - 4]) != right:
        raise ImageError(f"corrupt PNG: a wrong CRC of chunk {kind.decode('latin-1')!r}")
    if kind == b"IHDR" and at > _FIRST:
        raise ImageError("corrupt PNG: it says its size twice")


def _fits(values: bytes, depth: int, colour: int, palette: int) -> bool:
    """Whether those of a tRNS chunk belong to the picture's kind."""
    if colour == PALETTE:
        return len(values) <= min(palette, 1 << depth)
    if colour == GRAY and depth == 1:
        return values in (b"\0\0", b"\0\1")
    return len(values) == {GRAY: 2, RGB: 6}.get(colour)


def _raw_bytes(data: bytes, width: int, height: int) -> int:
    """Of all rows, each with its filter, before they are deflated."""
    bits = data[24] * CHANNELS.get(data[25], 1)
    passes = _PASSES if data[28] else ((0, 0, 1, 1),)
    total = 0
    for left, top, right, down in passes:
        columns, rows = -(-(width - left) // right), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            total += rows * (1 + (columns * bits + 7) // 8)
    return total
