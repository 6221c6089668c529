"""The eight EXIF turns, of pixels and of a region in them.

Invariants: a turn moves whole pixels; all but orientation 1 give a C-contiguous array of their own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataservice.pipeline.resampling import Box

_ACROSS, _DOWN, _SIDEWAYS = (2, 3, 6, 7), (3, 4, 7, 8), 5
"""Orientations that are flipped, the last from which on rows become columns before."""
_STRIP_ROWS = 64
"""Turned at a time, so that what is read and written stays in the cache."""


def upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Pixels [H, W, C] stored with that EXIF orientation, 1 to 8, as they are to be seen."""
    if orientation == 1:
        return pixels
    whole = pixels.view(np.uint32) if pixels.shape[2] == 4 else pixels
    high, wide, parts = whole.shape
    sideways = orientation >= _SIDEWAYS
    out = np.empty((wide, high, parts) if sideways else whole.shape, whole.dtype)
    across, down = orientation in _ACROSS, orientation in _DOWN
    target = out[:: -1 if down else 1, :: -1 if across else 1]
    for start in range(0, high, _STRIP_ROWS):
        rows = slice(start, start + _STRIP_ROWS)
        if sideways:
            target[:, rows] = whole[rows].swapaxes(0, 1)
        else:
            target[rows] = whole[rows]
    return out.view(np.uint8)


def upright_box(box: Box, width: int, height: int, orientation: int) -> Box:
    """Where a region of a stored picture of that size lies after the turn."""
    left, upper, right, lower = box
    if orientation >= _SIDEWAYS:
        left, upper, right, lower = upper, left, lower, right
        width, height = height, width
    if orientation in _ACROSS:
        left, right = width - right, width - left
    if orientation in _DOWN:
        upper, lower = height - lower, height - upper
    return left, upper, right, lower
