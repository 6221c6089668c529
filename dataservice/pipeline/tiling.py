"""A decoded picture on its way into its rows of a pack: patches, or tiles and a thumbnail.

Invariants: a thumbnail is made of the decoded picture, not of its tiles, and is the last row;
pixels are those of `pipeline.resampling`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dataservice.core.packspec import ImageSpec
from dataservice.core.vision import VisionRules
from dataservice.pipeline.resampling import Box, Pixels, prepare_patches
from dataservice.pipeline.specs import grid, num_rows


def prepare_rows(
    pixels: Pixels, box: Box | None, image: ImageSpec, rules: VisionRules
) -> Callable[[NDArray[np.uint8]], None]:
    """`box` is the region of `pixels` that is the picture; what is returned writes its rows into
    `out` uint8 of shape `rules.pixel_shape`, C-contiguous, and does so fast."""
    whole = prepare_patches(
        pixels,
        image.target_width,
        image.target_height,
        patch=rules.side,
        merge=rules.group,
        box=box,
    )
    rows, columns = grid(image, rules)
    if num_rows(image, rules) == rows * columns:
        return whole
    small = prepare_patches(pixels, rules.tile, rules.tile, patch=rules.tile, merge=1, box=box)

    def write(out: NDArray[np.uint8]) -> None:
        whole(out[:-1])
        small(out[-1:])

    return write
