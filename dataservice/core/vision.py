"""How large a picture becomes and how many patches and tokens it takes, from its size alone.

Invariants: pure integer results; the vectorised form equals the scalar one for every input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

MAX_ASPECT = 200.0
OPENAI_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
Side = TypeVar("Side", int, NDArray[np.int64])


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionRules:
    """What turns a picture's size into patches; part of the plan's digest."""

    patch: int = 14
    merge: int = 2
    """Side of the square of patches that becomes one image token."""
    min_pixels: int = 56 * 56
    max_pixels: int = 1280 * 28 * 28
    temporal_patch: int = 2
    """How often `normalize()` repeats a still picture along time on the trainer's device."""
    mode: Literal["patches", "tiles"] = "patches"
    tile: int = 448
    """Side of a tile in pixels; of tiles only, as are the next four."""
    min_tiles: int = 1
    max_tiles: int = 12
    """Of one picture, its thumbnail not counted."""
    thumbnail: bool = True
    """One more tile with the whole picture, where it has more than one."""
    tile_tokens: int = 256
    """Image tokens of a tile."""
    mean: tuple[float, float, float] = OPENAI_CLIP_MEAN
    std: tuple[float, float, float] = OPENAI_CLIP_STD
    exact: bool = False
    """Pixels are those of the model's own processor: no JPEG is decoded at a reduced size."""
    background: tuple[int, int, int] = (255, 255, 255)
    """Under what is transparent."""
    icc: bool = False
    """Whether colour profiles are applied, to sRGB."""

    @property
    def patch_bytes(self) -> int:
        """Of a patch's pixels, uint8 with three channels."""
        return 3 * self.patch**2


def target_size(
    height: int, width: int, *, patch: int, merge: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """(height, width) in pixels after the resize, multiples of patch * merge.

    The rule is Qwen2-VL's smart resize: round each side to the nearest multiple (half to even),
    then shrink or grow both alike when the area is out of bounds. Raises ValueError for a side
    below 1 or an aspect ratio above 200.
    """
    if height < 1 or width < 1:
        raise ValueError(f"picture of {width}x{height} pixels: both sides must be at least 1")
    if max(height, width) / min(height, width) > MAX_ASPECT:
        raise ValueError(f"picture of {width}x{height} pixels: aspect ratio above {MAX_ASPECT:g}")
    factor = patch * merge
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif new_height * new_width < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


def target_sizes(
    height: NDArray[np.int64],
    width: NDArray[np.int64],
    rules: VisionRules,
    max_pixels: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`target_size` of many pictures, int64 [N] arrays in and out, with the same errors.

    `max_pixels`: one a picture, in place of the rules'.
    """
    high = np.asarray(height, dtype=np.int64)
    wide = np.asarray(width, dtype=np.int64)
    if high.size == 0:
        return high.copy(), wide.copy()
    short, long = np.minimum(high, wide), np.maximum(high, wide)
    bad = short < 1
    bad |= long / np.maximum(short, 1) > MAX_ASPECT
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"picture {first} of {wide[first]}x{high[first]} pixels: both sides must be at least 1 "
            f"and the aspect ratio at most {MAX_ASPECT:g}"
        )
    factor = rules.patch * rules.merge
    area = high * wide
    new_high = np.rint(high / factor).astype(np.int64) * factor
    new_wide = np.rint(wide / factor).astype(np.int64) * factor
    new_area = new_high * new_wide

    most = rules.max_pixels if max_pixels is None else max_pixels
    large = new_area > most
    beta = np.sqrt(area / most)
    for side, new in ((high, new_high), (wide, new_wide)):
        shrunk = np.floor(side / beta / factor).astype(np.int64) * factor
        new[large] = np.maximum(factor, shrunk)[large]

    small = ~large & (new_area < rules.min_pixels)
    beta = np.sqrt(rules.min_pixels / area)
    for side, new in ((high, new_high), (wide, new_wide)):
        new[small] = (np.ceil(side * beta / factor).astype(np.int64) * factor)[small]
    return new_high, new_wide


def num_patches(height: Side, width: Side, rules: VisionRules) -> Side:
    """Patches of a picture whose target size is (height, width), or int64 [N] of many, before the
    merge."""
    return (height // rules.patch) * (width // rules.patch)


def image_tokens(height: Side, width: Side, rules: VisionRules) -> Side:
    """Image tokens of a picture whose target size is (height, width), or int64 [N] of many."""
    return num_patches(height, width, rules) // rules.merge**2
