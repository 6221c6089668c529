"""How much each source pixel counts in each pixel of a resized row or column: Pillow's bicubic.

Invariants: the numbers are those of stock Pillow (`precompute_coeffs` and
`normalize_coeffs_8bpc` in its Resample.c) bit by bit: float64 in the same order of operations, the
box in float32, then rounded to integers of 22 binary places. Pixels beyond the picture do not
count; the weights of what is left are scaled to a sum of one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PLACES = 22
"""Binary places of a weight."""
_SUPPORT = 2.0
_A = -0.5
_LARGEST_KEPT, _NUM_KEPT = 4096, 1024
"""Sides in pixels, and pairs of sizes, that are computed once; a pair takes about 24 bytes a pixel:
25 MB at 1,000 pixels a side, 100 MB if all were of the largest. It takes 50 to 200 us to compute,
as long as the passes of a small picture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Of n resized pixels. Pixel i is the sum over k < count[i] of factors[i, k] * source[first[i]
    + k], rounded to nearest and clipped to a byte; all arrays are C-contiguous and read-only."""

    first: NDArray[np.int32]
    count: NDArray[np.int32]
    factors: NDArray[np.int32]
    """[n, most taps], times 2**PLACES; zero from `count` on."""
    start: int
    """The first source pixel that counts."""
    stop: int
    """One past the last one."""


def weights(source: int, low: float, high: float, target: int) -> Weights:
    """Of the pixels [low, high) of a side of `source` pixels, made to `target` pixels.

    0 <= low < high <= source; both may lie within a pixel.
    """
    keep = max(source, target) <= _LARGEST_KEPT
    return (_kept if keep else _computed)(source, low, high, target)


def _computed(source: int, low: float, high: float, target: int) -> Weights:
    start = float(np.float32(low))
    scale = float(np.float32(high) - np.float32(low)) / target
    if scale == 1.0 and start.is_integer():
        first = np.arange(target, dtype=np.int32) + np.int32(start)
        return _read_only(first, np.ones_like(first), np.full((target, 1), 1 << PLACES, np.int32))
    stretch = max(scale, 1.0)
    support = _SUPPORT * stretch
    centre = start + (np.arange(target) + 0.5) * scale
    begin = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    count = np.minimum((centre + support + 0.5).astype(np.int64), source) - begin
    steps = np.arange(count.max())[:, None]  # taps down, pixels across
    shares = _cubic((steps + begin - centre + 0.5) * (1.0 / stretch))
    shares[steps >= count] = 0.0
    total = np.zeros(target)
    for row in shares:  # one after the other: another order rounds in another way
        total += row
    shares /= total
    half = np.where(shares < 0, -0.5, 0.5)
    factors = np.ascontiguousarray((half + shares * (1 << PLACES)).astype(np.int32).T)
    return _read_only(begin.astype(np.int32), count.astype(np.int32), factors)


_kept = functools.lru_cache(maxsize=_NUM_KEPT)(_computed)


def _cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    x = np.abs(x)
    near = ((_A + 2.0) * x - (_A + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * _A
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _read_only(
    first: NDArray[np.int32], count: NDArray[np.int32], factors: NDArray[np.int32]
) -> Weights:
    for array in (first, count, factors):
        array.flags.writeable = False
    return Weights(
        first=first,
        count=count,
        factors=factors,
        start=int(first.min()),
        stop=int((first + count).max()),
    )
