"""InternVL's image preprocessing as it is published, plainly: the grid of tiles, and the tiles.

The order of grids with equally many tiles, which the original leaves to a set, is by columns.
"""

from __future__ import annotations

import numpy as np
from PIL import Image


def closest_grid(
    width: int, height: int, *, min_num: int, max_num: int, image_size: int
) -> tuple[int, int]:
    """(columns, rows)."""
    ratios = {
        (i, j)
        for n in range(min_num, max_num + 1)
        for i in range(1, n + 1)
        for j in range(1, n + 1)
        if min_num <= i * j <= max_num
    }
    ordered = sorted(sorted(ratios), key=lambda ratio: ratio[0] * ratio[1])
    best_difference, best = float("inf"), (1, 1)
    for ratio in ordered:
        difference = abs(width / height - ratio[0] / ratio[1])
        if difference < best_difference:
            best_difference, best = difference, ratio
        elif difference == best_difference:
            if width * height > 0.5 * image_size * image_size * ratio[0] * ratio[1]:
                best = ratio
    return best


def tiles_of(
    image: Image.Image, *, min_num: int, max_num: int, image_size: int, thumbnail: bool
) -> np.ndarray:
    """uint8 [tiles, 3, image_size, image_size]; `image` is RGB and upright."""
    columns, rows = closest_grid(
        *image.size, min_num=min_num, max_num=max_num, image_size=image_size
    )
    resized = image.resize((image_size * columns, image_size * rows), Image.Resampling.BICUBIC)
    tiles = []
    for i in range(columns * rows):
        left, upper = i % columns * image_size, i // columns * image_size
        tiles.append(resized.crop((left, upper, left + image_size, upper + image_size)))
    if thumbnail and len(tiles) != 1:
        tiles.append(image.resize((image_size, image_size), Image.Resampling.BICUBIC))
    return np.stack([np.asarray(tile).transpose(2, 0, 1) for tile in tiles])
