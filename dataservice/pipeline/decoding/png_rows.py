"""The rows of a usual PNG -> RGB and a fourth byte: libdeflate, then the filters and the colours.

Invariants: pixels are Pillow's; a stream that is damaged, or has too few or too many bytes for the
rows, and a filter that does not exist, give None; so does what is rare. Two arrays are made, the
rows as they are inflated and the pixels. Importing this needs numba.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from dataservice.core.compiled import compiled
from dataservice.pipeline.decoding.png_chunks import (
    CHANNELS,
    GRAY,
    GRAY_ALPHA,
    PALETTE,
    RGB,
    PngParts,
)
from dataservice.pipeline.decoding.png_vectors import average, paeth, plain, sub, up

_Words = NDArray[np.uint32]
_compiled: Any = functools.partial(compiled, package=Path(__file__).parent)
_OPAQUE = np.uint32(0xFF000000)
_GRAY_TO_RGB = np.uint32(0x010101)
_READ_BEYOND = 4
"""Bytes behind the last row."""


def pixels_of(parts: PngParts) -> NDArray[np.uint8] | None:
    """[H, W, 4], the last channel alpha where the picture has one; None: Pillow has to do it."""
    depth, colour = parts.depth, parts.colour
    if depth != 8 and not (depth in (1, 2, 4) and colour in (GRAY, PALETTE)):
        return None
    step = CHANNELS.get(colour, 0)
    columns = parts.width if depth == 8 else -(-parts.width * depth // 8)
    rows = _inflated(parts.pixels, parts.height * (columns * step + 1)) if step else None
    if rows is None:
        return None
    words = np.empty((parts.height, columns), np.uint32)
    above = np.zeros(columns, np.uint32)
    if not _unfilter(rows, rows.ctypes.data, step, above.ctypes.data, words, words.ctypes.data):
        return None
    if colour in (GRAY, PALETTE):
        table = _table(parts)
        if depth == 8:
            _look_up(words, table)
        else:
            packed, words = words, np.empty((parts.height, parts.width), np.uint32)
            _unpack(packed, depth, table, words)
    elif colour == GRAY_ALPHA:
        _spread(words)
    elif colour == RGB and parts.transparent:
        _clear(words, _key(parts.transparent))
    return words.view(np.uint8).reshape(parts.height, parts.width, 4)


def _inflated(stream: list[memoryview], size: int) -> NDArray[np.uint8] | None:
    rows = np.empty(size + _READ_BEYOND, np.uint8)
    try:
        found = imagecodecs.deflate_decode(b"".join(stream), out=rows[:size].data)
    except imagecodecs.DeflateError:
        return None
    return rows if len(found) == size else None


def _table(parts: PngParts) -> _Words:
    """[256]: the pixel of each value of a sample."""
    if parts.colour == PALETTE:
        table = np.full(256, _OPAQUE)
        colours = np.frombuffer(parts.palette, np.uint8).reshape(-1, 3)
        channels = table.view(np.uint8).reshape(256, 4)
        channels[: len(colours), :3] = colours
        channels[: len(parts.transparent), 3] = np.frombuffer(parts.transparent, np.uint8)
        return table
    top = (1 << parts.depth) - 1
    gray = (np.arange(256) & top) * 255 // top
    table = gray.astype(np.uint32) * _GRAY_TO_RGB | _OPAQUE
    if parts.transparent:
        table[parts.transparent[1] & top] &= ~_OPAQUE
    return table


def _key(transparent: bytes) -> np.uint32:
    """The colour of a tRNS chunk: three samples of 16 bits of which the lower 8 count."""
    return np.uint32(transparent[1] | transparent[3] << 8 | transparent[5] << 16)


@_compiled
def _unfilter(
    rows: NDArray[np.uint8], source: int, step: int, above: int, words: _Words, out: int
) -> bool:
    """`source`, `out`: the addresses of both arrays; `above`: of as many zeros as a row has."""
    height, width = words.shape
    for y in range(height):
        at = y * (width * step + 1)
        kind, row, to = rows[at], source + at + 1, out + y * width * 4
        if kind == 0:
            plain(row, step, above, to, width)
        elif kind == 1:
            sub(row, step, above, to, width)
        elif kind == 2:
            up(row, step, above, to, width)
        elif kind == 3:
            average(row, step, above, to, width)
        elif kind == 4:
            paeth(row, step, above, to, width)
        else:
            return False
        above = to
    return True


@_compiled
def _look_up(words: _Words, table: _Words) -> None:
    """Of each word the lowest byte counts."""
    for y in range(words.shape[0]):
        for x in range(words.shape[1]):
            words[y, x] = table[words[y, x] & np.uint32(255)]


@_compiled
def _unpack(packed: _Words, depth: int, table: _Words, out: _Words) -> None:
    """Samples of 1, 2 or 4 bits, highest first, in the lowest byte of each word."""
    in_byte, mask = 8 // depth, (1 << depth) - 1
    for y in range(out.shape[0]):
        for x in range(out.shape[1]):
            byte = np.int64(packed[y, x // in_byte])
            out[y, x] = table[byte >> (8 - depth - x % in_byte * depth) & mask]


@_compiled
def _spread(words: _Words) -> None:
    """Grey and alpha in the two lowest bytes -> RGB and alpha."""
    for y in range(words.shape[0]):
        for x in range(words.shape[1]):
            word = words[y, x]
            gray, alpha = word & np.uint32(255), word >> np.uint32(8) & np.uint32(255)
            words[y, x] = gray * _GRAY_TO_RGB | alpha << np.uint32(24)


@_compiled
def _clear(words: _Words, key: np.uint32) -> None:
    """Alpha 0 for pixels of that colour, 255 for all others."""
    for y in range(words.shape[0]):
        for x in range(words.shape[1]):
            colour = words[y, x] & np.uint32(0xFFFFFF)
            words[y, x] = colour if colour == key else colour | _OPAQUE
