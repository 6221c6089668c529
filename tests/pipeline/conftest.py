"""What the pixels of a picture must be: PIL and numpy only, nothing of the project."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
from PIL import Image, ImageOps


def _patches_of(data: bytes, target_width: int, target_height: int, patch: int, merge: int):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = _rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
        if image.size != (target_width, target_height):
            image = image.resize((target_width, target_height), Image.Resampling.BICUBIC)
        pixels = np.asarray(image)
    rows, columns = target_height // patch, target_width // patch
    grid = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    grid = grid.transpose(0, 3, 1, 4, 6, 2, 5)
    return grid.reshape(rows * columns, 3 * patch * patch)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I;16":
        return Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    values = np.asarray(image.convert("RGBA")).astype(np.float64)
    alpha = values[..., 3:] / 255
    return Image.fromarray(np.rint(values[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8))


def _slow_patches(pixels: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """The patch order spelled out, value by value."""
    height, width, _ = pixels.shape
    block = patch * merge
    patches = []
    for top in range(0, height, block):
        for left in range(0, width, block):
            for down in range(merge):
                for right in range(merge):
                    patches.append(
                        [
                            pixels[top + down * patch + y, left + right * patch + x, channel]
                            for channel in range(3)
                            for y in range(patch)
                            for x in range(patch)
                        ]
                    )
    return np.array(patches, np.uint8)


@pytest.fixture(scope="session")
def patches_of():
    """(file's bytes, target width, target height, patch, merge) -> uint8 [patches, values]."""
    return _patches_of


@pytest.fixture(scope="session")
def slow_patches():
    """(pixels [H, W, 3], patch, merge) -> uint8 [patches, values]."""
    return _slow_patches
