"""How large a picture becomes and how many patches and tokens it takes, from its size alone.

Invariants: pure integer results; the vectorised form equals the scalar one for every input. In
either mode a picture is planned as one size, from which all else follows: a multiple of
patch * merge, or of the tile. Patches are the vision encoder's in both: a tile has (tile / patch)^2
of them, so that costs and sizes in bytes mean the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from dataservice.core.tiles import tile_grid, tile_grids

MAX_ASPECT = 200.0
OPENAI_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
Ints = NDArray[np.int64]
Side = TypeVar("Side", int, Ints)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionRules:
    """What turns a picture's size into patches; part of the plan's digest."""

    patch: int = 14
    merge: int = 2
    """Side of the square of patches that becomes one image token; of patches only, as are the next
    three."""
    min_pixels: int = 56 * 56
    max_pixels: int = 1280 * 28 * 28
    temporal_patch: int = 2
    """How often `normalize()` repeats a still picture along time on the trainer's device."""
    mode: Literal["patches", "tiles"] = "patches"
    tile: int = 448
    """Side of a tile in pixels, a multiple of `patch`; of tiles only, as are the next four."""
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

    @property
    def side(self) -> int:
        """Of what a row of `pixel_values` holds, a patch or a tile, in pixels."""
        return self.tile if self.mode == "tiles" else self.patch

    @property
    def group(self) -> int:
        """Side of the squares in which those rows follow one another."""
        return 1 if self.mode == "tiles" else self.merge

    @property
    def row_patches(self) -> int:
        """Patches that a row of `pixel_values` holds."""
        return (self.side // self.patch) ** 2

    def pixel_shape(self, num_patches: int) -> tuple[int, int]:
        """Of the `pixel_values` of so many patches: rows, and bytes a row."""
        return num_patches // self.row_patches, 3 * self.side**2

    @property
    def limit(self) -> int:
        """What bounds a picture's size: max_pixels, or max_tiles of tiles."""
        return self.max_tiles if self.mode == "tiles" else self.max_pixels

    @property
    def least_limit(self) -> int:
        """The lowest to which an oversize sample's limit is lowered."""
        if self.mode == "tiles":
            return self.min_tiles
        return min(max(self.min_pixels, (self.patch * self.merge) ** 2), self.max_pixels)

    def with_limit(self, limit: int) -> Self:
        """The same with another `limit`."""
        if self.mode == "tiles":
            return replace(self, max_tiles=limit)
        return replace(self, max_pixels=limit)


def target_size(
    height: int, width: int, *, patch: int, merge: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """(height, width) in pixels after the resize, multiples of patch * merge.

    The rule is Qwen2-VL's smart resize: round each side to the nearest multiple (half to even),
    then shrink or grow both alike when the area is out of bounds. Raises ValueError for a side
    below 1 or an aspect ratio above 200.
    """
    _check_size(height, width)
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


def planned_size(
    height: int, width: int, rules: VisionRules, limit: int | None = None
) -> tuple[int, int]:
    """(height, width) in pixels in which a picture is planned; of tiles, all but the thumbnail.

    `limit` stands in for the rules' own. Raises ValueError as `target_size` does.
    """
    most = rules.limit if limit is None else limit
    if rules.mode == "tiles":
        _check_size(height, width)
        rows, columns = tile_grid(
            height, width, tile=rules.tile, min_tiles=rules.min_tiles, max_tiles=most
        )
        return rows * rules.tile, columns * rules.tile
    return target_size(
        height,
        width,
        patch=rules.patch,
        merge=rules.merge,
        min_pixels=min(rules.min_pixels, most),
        max_pixels=most,
    )


def planned_sizes(
    height: Ints, width: Ints, rules: VisionRules, limit: Ints | None = None
) -> tuple[Ints, Ints]:
    """`planned_size` of many pictures, int64 [N] arrays in and out, with the same errors.

    `limit`: one a picture, in place of the rules'.
    """
    high = np.asarray(height, dtype=np.int64)
    wide = np.asarray(width, dtype=np.int64)
    if high.size == 0:
        return high.copy(), wide.copy()
    _check_sizes(high, wide)
    most = rules.limit if limit is None else limit
    if rules.mode == "patches":
        return _smart_sizes(high, wide, rules, most)
    rows, columns = tile_grids(
        high, wide, tile=rules.tile, min_tiles=rules.min_tiles, max_tiles=most
    )
    return rows * rules.tile, columns * rules.tile


def _check_size(height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise ValueError(f"picture of {width}x{height} pixels: both sides must be at least 1")
    if max(height, width) / min(height, width) > MAX_ASPECT:
        raise ValueError(f"picture of {width}x{height} pixels: aspect ratio above {MAX_ASPECT:g}")


def _check_sizes(high: Ints, wide: Ints) -> None:
    short, long = np.minimum(high, wide), np.maximum(high, wide)
    bad = short < 1
    bad |= long / np.maximum(short, 1) > MAX_ASPECT
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"picture {first} of {wide[first]}x{high[first]} pixels: both sides must be at least 1 "
            f"and the aspect ratio at most {MAX_ASPECT:g}"
        )


def _smart_sizes(high: Ints, wide: Ints, rules: VisionRules, most: Ints | int) -> tuple[Ints, Ints]:
    factor = rules.patch * rules.merge
    area = high * wide
    new_high = np.rint(high / factor).astype(np.int64) * factor
    new_wide = np.rint(wide / factor).astype(np.int64) * factor
    new_area = new_high * new_wide

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


def num_rows(height: Side, width: Side, rules: VisionRules) -> Side:
    """Rows of `pixel_values` of a picture planned as (height, width), or int64 [N] of many: its
    patches; or its tiles, and behind them, where it has more than one, its thumbnail."""
    rows = (height // rules.side) * (width // rules.side)
    if rules.mode == "tiles" and rules.thumbnail:
        return rows + (rows > 1)
    return rows


def num_patches(height: Side, width: Side, rules: VisionRules) -> Side:
    """Patches of a picture planned as (height, width), or int64 [N] of many, before the merge."""
    return num_rows(height, width, rules) * rules.row_patches


def image_tokens(height: Side, width: Side, rules: VisionRules) -> Side:
    """Image tokens of a picture planned as (height, width), or int64 [N] of many."""
    return tokens_of(num_patches(height, width, rules), rules)


def tokens_of(patches: Side, rules: VisionRules) -> Side:
    """Image tokens of a picture of so many patches, or int64 [N] of many."""
    if rules.mode == "tiles":
        return patches // rules.row_patches * rules.tile_tokens
    return patches // rules.merge**2


def squared(patches: Ints, rules: VisionRules) -> Ints:
    """int64 [N]: of pictures of so many patches, the sum of p^2 over what attends to itself alone
    in the vision encoder, a picture's p patches or each of its tiles'."""
    return patches * (rules.row_patches if rules.mode == "tiles" else patches)
