"""The two passes of a resize in numpy: what runs where no compiler is.

Invariants: values equal those of the compiled passes bit by bit; scratch memory is bounded by
`_ROWS` rows of the wider of both pictures.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataservice.pipeline.patches import patchify
from dataservice.pipeline.resampling.weights import PLACES, Weights

_ROWS = 32
_HALF = 1 << PLACES - 1


def across(pixels: NDArray[np.uint8], wide: Weights, high: Weights) -> NDArray[np.uint8]:
    """The rows that `high` needs in their new width: uint8 [rows, 3, width]."""
    start, stop = high.start, high.stop
    out = np.empty((stop - start, 3, len(wide.first)), np.uint8)
    for top in range(start, stop, _ROWS):
        rows = pixels[top : min(top + _ROWS, stop), :, :3].transpose(0, 2, 1).astype(np.int32)
        total = np.full((*rows.shape[:2], out.shape[2]), _HALF, np.int32)
        for k in range(wide.factors.shape[1]):
            column = np.minimum(wide.first + k, rows.shape[2] - 1)
            total += rows[:, :, column] * wide.factors[:, k]
        out[top - start : top - start + len(rows)] = _bytes(total)
    return out


def shorten(rows: NDArray[np.uint8], high: Weights, start: int = 0) -> NDArray[np.uint8]:
    """Rows from number `start` on, uint8 [H, ...], in their new height: [n, ...]."""
    out = np.empty((len(high.first), *rows.shape[1:]), np.uint8)
    for row, (first, count) in enumerate(zip(high.first, high.count, strict=True)):
        total = np.full(rows.shape[1:], _HALF, np.int32)
        for k in range(count):
            total += rows[first - start + k].astype(np.int32) * high.factors[row, k]
        out[row] = _bytes(total)
    return out


def down(
    planes: NDArray[np.uint8], high: Weights, patch: int, merge: int, out: NDArray[np.uint8]
) -> None:
    """Rows in their new height, written as the patches of `out`; `planes` is what `across` gave."""
    patchify(shorten(planes, high, high.start), patch, merge, out)


def place(pixels: NDArray[np.uint8], patch: int, merge: int, out: NDArray[np.uint8]) -> None:
    """The pixels as they are, written as the patches of `out`."""
    patchify(pixels[:, :, :3].transpose(0, 2, 1), patch, merge, out)


def _bytes(total: NDArray[np.int32]) -> NDArray[np.uint8]:
    return np.clip(total >> PLACES, 0, 255).astype(np.uint8)
