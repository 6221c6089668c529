"""The order in which a vision model reads the pixels of a picture, and the way into it.

Invariants: patches go (row / merge, column / merge, row in merge, column in merge), each patch
(channel, row, column): the order of Qwen-VL's processor without the temporal repeat, and with
merge 1 rows of tiles; a patch is copied once, nothing beside it is written.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def patchify(planes: NDArray[np.uint8], patch: int, merge: int, out: NDArray[np.uint8]) -> None:
    """Copies planes [H, 3, W] into `out` [H/patch * W/patch, 3 * patch * patch].

    H and W are multiples of patch * merge.
    """
    rows, columns = planes.shape[0] // (patch * merge), planes.shape[2] // (patch * merge)
    blocks = planes.reshape(rows, merge, patch, 3, columns, merge, patch)
    view = out.reshape(rows, columns, merge, merge, 3, patch, patch, copy=False)
    view[...] = blocks.transpose(0, 4, 1, 5, 3, 2, 6)


def unpatchify(
    rows: NDArray[np.uint8], height: int, width: int, patch: int, merge: int
) -> NDArray[np.uint8]:
    """The picture [H, W, 3] of which `patchify` made `rows` of patches."""
    blocks = rows.reshape(
        height // (patch * merge), width // (patch * merge), merge, merge, 3, patch, patch
    )
    return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(height, width, 3)
