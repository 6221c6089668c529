"""The two passes of a resize, compiled; importing this needs numba.

Invariants: values equal those of `portable`; the GIL is free; scratch memory is one block of 16
rows of the source and one row of the target. Rows and columns are taken 16 at a time, the last
block beginning earlier where they do not divide: each function says how many it needs at least.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.compiled import compiled
from dataservice.pipeline.resampling import portable
from dataservice.pipeline.resampling.vectors import (
    LANES,
    SIDE,
    copy_1,
    copy_8,
    copy_16,
    split_3,
    split_4,
    turn_in_3,
    turn_in_4,
    turn_out,
    weigh,
)
from dataservice.pipeline.resampling.weights import Weights

_Bytes = NDArray[np.uint8]


_compiled: Any = partial(compiled, package=Path(__file__).parent)


def shorten(pixels: _Bytes, high: Weights) -> _Bytes:
    """Pixels [H, W, 3 or 4] in their new height."""
    row_bytes = pixels.strides[0]
    if row_bytes < LANES:
        return portable.shorten(pixels, high)
    out = np.empty((len(high.first), *pixels.shape[1:]), np.uint8)
    _shorten((pixels.ctypes.data, row_bytes), _addressed(high), out.ctypes.data)
    return out


def across(pixels: _Bytes, wide: Weights, high: Weights) -> _Bytes:
    """The rows that `high` needs in their new width: uint8 [rows, 3, width].

    There may be rows too many. Rows lie multiples of 64 bytes apart, colours multiples of 16.
    """
    pixels = pixels[high.start : high.stop]
    lacking = [max(0, SIDE - side) for side in pixels.shape[:2]]
    if any(lacking):
        pixels = np.pad(pixels, ((0, lacking[0]), (0, lacking[1]), (0, 0)))
    plane = _padded(len(wide.first), SIDE)
    out = np.empty((len(pixels), _padded(3 * plane, LANES)), np.uint8)
    scratch = np.empty((pixels.shape[1] + SIDE, SIDE * 4), np.uint8)
    _across(
        (pixels.ctypes.data, *pixels.strides[:2], *pixels.shape[:2]),
        _addressed(wide),
        scratch.ctypes.data,
        (out.ctypes.data, out.strides[0], plane),
    )
    return out[:, : 3 * plane].reshape(len(out), 3, plane)[:, :, : len(wide.first)]


def down(planes: _Bytes, high: Weights, patch: int, merge: int, out: _Bytes) -> None:
    """Rows in their new height, written as the patches of `out`; `planes` is what `across` gave."""
    row_bytes, plane, _ = planes.strides
    line = np.empty(row_bytes, np.uint8)
    _down(
        (planes.ctypes.data - high.start * row_bytes, row_bytes),
        _addressed(high),
        (line.ctypes.data, plane),
        (out.ctypes.data, planes.shape[2], patch, merge),
    )


def place(pixels: _Bytes, patch: int, merge: int, out: _Bytes) -> None:
    """The pixels as they are, written as the patches of `out`; at least 16 columns."""
    plane = _padded(pixels.shape[1], SIDE)
    line = np.empty(3 * plane, np.uint8)
    _place(
        (pixels.ctypes.data, *pixels.strides[:2], *pixels.shape[:2]),
        (line.ctypes.data, plane),
        (out.ctypes.data, pixels.shape[1], patch, merge),
    )


def _addressed(weights: Weights) -> Any:
    factors = weights.factors
    return weights.first, weights.count, factors.ctypes.data, factors.strides[0]


def _padded(size: int, step: int) -> int:
    return -(-size // step) * step


@_compiled
def _copy(source: int, to: int, size: int) -> None:
    if size >= 16:
        for i in range(0, size - 15, 16):
            copy_16(source + i, to + i)
        copy_16(source + size - 16, to + size - 16)
    elif size >= 8:
        copy_8(source, to)
        copy_8(source + size - 8, to + size - 8)
    else:
        for i in range(size):
            copy_1(source + i, to + i)


@_compiled
def _scatter(line: Any, y: int, out: Any) -> None:
    """A row of pixels, its colours apart, into the patches that it crosses."""
    source, plane = line
    to, width, patch, merge = out
    area, block = patch * patch, patch * merge
    above = y // block * (width // patch) * merge + y // patch % merge * merge
    for left in range(width // block):
        for i in range(merge):
            at = source + left * block + i * patch
            into = to + (above + left * merge * merge + i) * 3 * area + y % patch * patch
            _copy(at, into, patch)
            _copy(at + plane, into + area, patch)
            _copy(at + 2 * plane, into + 2 * area, patch)


@_compiled
def _shorten(rows: Any, weights: Any, out: int) -> None:
    source, row_bytes = rows
    first, count, factors, factor_bytes = weights
    for y in range(len(first)):
        top = source + first[y] * row_bytes
        for left in range(0, row_bytes, LANES):
            x = min(left, row_bytes - LANES)
            at = out + y * row_bytes + x
            weigh(top + x, row_bytes, factors + y * factor_bytes, count[y], at)


@_compiled
def _across(pixels: Any, weights: Any, columns: Any, out: Any) -> None:
    """Blocks of 16 rows are turned, so that equal columns of all lie side by side."""
    source, row_bytes, pixel_bytes, height, width = pixels
    first, count, factors, factor_bytes = weights
    to, to_row_bytes, plane = out
    block, side = columns + width * 4 * SIDE, SIDE * 4
    for top in range(0, height, SIDE):
        y = min(top, height - SIDE)
        for left in range(0, width, SIDE):
            x = min(left, width - SIDE)
            at = source + y * row_bytes + x * pixel_bytes
            if pixel_bytes == 4:
                turn_in_4(at, row_bytes, columns + x * side)
            else:
                turn_in_3(at, row_bytes, columns + x * side)
        for left in range(0, len(first), SIDE):
            for i in range(SIDE):
                x = min(left + i, len(first) - 1)
                at = columns + first[x] * side
                weigh(at, side, factors + x * factor_bytes, count[x], block + i * side)
            turn_out(block, to + y * to_row_bytes + left, to_row_bytes, plane)


@_compiled
def _down(planes: Any, weights: Any, line: Any, out: Any) -> None:
    source, row_bytes = planes
    first, count, factors, factor_bytes = weights
    for y in range(len(first)):
        top = source + first[y] * row_bytes
        for x in range(0, row_bytes, LANES):
            weigh(top + x, row_bytes, factors + y * factor_bytes, count[y], line[0] + x)
        _scatter(line, y, out)


@_compiled
def _place(pixels: Any, line: Any, out: Any) -> None:
    source, row_bytes, pixel_bytes, height, width = pixels
    for y in range(height):
        for left in range(0, width, SIDE):
            x = min(left, width - SIDE)
            at = source + y * row_bytes + x * pixel_bytes
            if pixel_bytes == 4:
                split_4(at, line[0] + x, line[1])
            else:
                split_3(at, line[0] + x, line[1])
        _scatter(line, y, out)
