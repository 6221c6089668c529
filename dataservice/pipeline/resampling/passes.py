"""The two halves of a resize: across when a picture is prepared, down when it is written.

Invariants: a picture that has its planned size is not resampled; the source is let go after the
first half, which leaves one array of [rows, 3, width] bytes. Where Pillow makes a picture shorter
before it makes it narrower, both passes are done in the first half.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray

from dataservice.core.compiled import has_compiler
from dataservice.pipeline.resampling import portable
from dataservice.pipeline.resampling.weights import weights

_form: Any = portable
if has_compiler():
    _form = importlib.import_module("dataservice.pipeline.resampling.kernels")
_FLOATS = struct.Struct("4f")
"""Sides of a box are rounded to what they are in Pillow."""
_LEAST_PLACED = 16
"""Columns of a picture that the compiled form takes as it is."""
_DOWN_FIRST = int(PIL.__version__.partition(".")[0]) >= 13
"""Whether a picture that loses more than twice as many rows as columns is first made shorter, then
narrower, as Pillow does from version 13 on; the second pass starts from rounded values either way,
so the order shows: by up to 25 in a picture of hard edges."""

Pixels = NDArray[np.uint8]
"""[H, W, 3] or [H, W, 4], C-contiguous; the fourth byte is not looked at."""
Box = tuple[float, float, float, float]
"""(left, upper, right, lower): the region of a picture that becomes the target, in its pixels."""


def resample(pixels: Pixels, width: int, height: int, box: Box | None = None) -> Pixels:
    """The picture in `width` x `height`, uint8 [height, width, 3]. Raises ValueError for a box that
    is empty or not within the picture."""
    out = np.empty((width * height, 3), np.uint8)
    prepare_patches(pixels, width, height, patch=1, merge=1, box=box)(out)
    return out.reshape(height, width, 3)


def prepare_patches(
    pixels: Pixels, width: int, height: int, *, patch: int, merge: int, box: Box | None = None
) -> Callable[[NDArray[np.uint8]], None]:
    """The first half; what is returned writes the patches of the picture in `width` x `height`.

    It takes `out` uint8 [height/patch * width/patch, 3 * patch * patch], C-contiguous; width and
    height are multiples of patch * merge. Rows of tiles: patch = side of a tile, merge = 1.
    Raises ValueError for a box that is empty or not within the picture.
    """
    left, upper, right, lower = _checked(pixels, box)
    if width < 1 or height < 1 or width % (patch * merge) or height % (patch * merge):
        raise ValueError(f"{width}x{height} pixels: not in multiples of {patch * merge}")
    shape = (width * height // patch**2, 3 * patch**2)
    if (left, upper, right, lower) == (0, 0, width, height) == (0, 0, *pixels.shape[1::-1]):
        place = portable.place if width < _LEAST_PLACED else _form.place
        return lambda out: place(pixels, patch, merge, _checked_out(out, shape))
    wide = weights(pixels.shape[1], left, right, width)
    high = weights(pixels.shape[0], upper, lower, height)
    if _DOWN_FIRST and pixels.shape[0] - height > max(0, 2 * (pixels.shape[1] - width)):
        pixels = _form.shorten(pixels, high)
        high = weights(height, 0.0, height, height)
    planes = _form.across(pixels, wide, high)
    return lambda out: _form.down(planes, high, patch, merge, _checked_out(out, shape))


def _checked_out(out: NDArray[np.uint8], shape: tuple[int, int]) -> NDArray[np.uint8]:
    good = out.dtype == np.uint8 and out.flags.c_contiguous and out.flags.writeable
    if not good or out.shape != shape:
        raise ValueError(f"out {out.dtype} {out.shape}: not a writable uint8 {shape} in rows")
    return out


def _checked(pixels: Pixels, box: Box | None) -> Box:
    height, width, channels = pixels.shape
    if pixels.dtype != np.uint8 or channels not in (3, 4) or not pixels.flags.c_contiguous:
        raise ValueError(f"pixels {pixels.dtype} {pixels.shape}: not uint8 [H, W, 3 or 4] in rows")
    if box is None:
        return (0.0, 0.0, float(width), float(height))
    left, upper, right, lower = _FLOATS.unpack(_FLOATS.pack(*box))
    if not (0 <= left < right <= width and 0 <= upper < lower <= height):
        raise ValueError(f"box {box}: not a region of a picture of {width}x{height} pixels")
    return (left, upper, right, lower)
