"""Grey, and what is transparent -> RGB over the background.

Invariants: integers alone; a colour under alpha becomes ((t >> 8) + t) >> 8 of t = colour * alpha +
background * (255 - alpha) + 128, which is Pillow's `paste` with a mask; compiled where numba is
present, else in numpy with equal results and little scratch memory.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from dataservice.core.compiled import compiled, has_compiler
from dataservice.pipeline.decoding.raster import Raster
from dataservice.pipeline.resampling import Pixels

_STRIP_ROWS = 32
_GRAY_TO_RGB = np.uint32(0x010101)


def over(raster: Raster, background: tuple[int, int, int]) -> Pixels:
    """The picture's colours, where it has alpha over `background`; in its own array if that has
    room for them and can be written."""
    samples = raster.samples
    fits = samples.shape[2] == 4 and samples.flags.writeable
    if not raster.has_alpha and samples.shape[2] >= 3:
        return samples
    out = samples if fits else np.empty((*samples.shape[:2], 4), np.uint8)
    if raster.has_alpha and fits and _BY_WORD:
        _blend_words(samples.view(np.uint32), *background)
    elif raster.has_alpha:
        _blend(samples, np.array(background, np.uint8), out)
    else:
        np.multiply(samples, _GRAY_TO_RGB, out=out.view(np.uint32), dtype=np.uint32)
    return out


@compiled
def _blend_words(words: NDArray[np.uint32], red: int, green: int, blue: int) -> None:
    """In place: words [H, W, 1] of red, green, blue and alpha, from the lowest byte on. Without a
    branch, and in 32 bits at each step, so that a step is taken for many pixels at a time."""
    one, two, three = np.uint32(red), np.uint32(green), np.uint32(blue)
    for y in range(words.shape[0]):
        for x in range(words.shape[1]):
            word = words[y, x, 0]
            alpha = np.uint32(word >> np.uint32(24))
            first = _mixed(np.uint32(word & np.uint32(255)), one, alpha)
            second = _mixed(np.uint32(word >> np.uint32(8) & np.uint32(255)), two, alpha)
            third = _mixed(np.uint32(word >> np.uint32(16) & np.uint32(255)), three, alpha)
            words[y, x, 0] = (
                first | second << np.uint32(8) | third << np.uint32(16) | alpha << np.uint32(24)
            )


@compiled
def _mixed(colour: np.uint32, under: np.uint32, alpha: np.uint32) -> np.uint32:
    clear = np.uint32(under * np.uint32(np.uint32(255) - alpha))
    mixed = np.uint32(np.uint32(np.uint32(colour * alpha) + clear) + np.uint32(128))
    return np.uint32(np.uint32(np.uint32(mixed >> np.uint32(8)) + mixed) >> np.uint32(8))


@compiled
def _blend_loop(samples: NDArray[np.uint8], under: NDArray[np.uint8], out: Pixels) -> None:
    """`samples` [H, W, 2 or 4], alpha last; `under` [3]."""
    high, wide, channels = samples.shape
    step = 1 if channels == 4 else 0
    for y in range(high):
        for x in range(wide):
            alpha = np.uint32(samples[y, x, channels - 1])
            if alpha == 255:
                for c in range(3):
                    out[y, x, c] = samples[y, x, c * step]
            else:
                for c in range(3):
                    mixed = np.uint32(samples[y, x, c * step]) * alpha
                    mixed += np.uint32(under[c]) * (np.uint32(255) - alpha) + np.uint32(128)
                    out[y, x, c] = ((mixed >> np.uint32(8)) + mixed) >> np.uint32(8)


def _blend_strips(samples: NDArray[np.uint8], under: NDArray[np.uint8], out: Pixels) -> None:
    for start in range(0, len(samples), _STRIP_ROWS):
        rows = slice(start, start + _STRIP_ROWS)
        alpha = samples[rows, :, -1:].astype(np.uint32)
        mixed = samples[rows, :, :-1] * alpha + under * (255 - alpha) + 128
        out[rows, :, :3] = ((mixed >> 8) + mixed) >> 8


_BY_WORD = has_compiler() and sys.byteorder == "little"
_blend = _blend_loop if has_compiler() else _blend_strips
