"""The largest values that settings may have, and exact numbers read from text of bounded size.

Invariants: within these bounds nothing overflows int64 or takes memory out of proportion to the
data; the config file and the planner keep to the same table.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_IMAGE_PIXELS = 100_000_000
"""Of one picture as stored, unless the config says otherwise."""
MAX_IMAGE_BYTES = 256 * 1024**2
"""Of one picture's file, likewise."""

MAX_STEP_PACKS = 1 << 17
MAX_IMAGE_PATCHES = 1 << 26
"""Of one image, so that the square of its patches fits int64 many times."""
MAX_COST = 1 << 56
"""Of the samples of a window together, in the unit of plan.cost."""

LARGEST: dict[str, int] = {
    # plan, its phases and kinds
    "pack_length": 1 << 24,
    "align": 1 << 16,
    "open_bins": 1 << 16,
    "reference_ranks": 1 << 20,
    "reference_micro_steps": 1 << 16,
    "image_token_cap": 1 << 40,
    "patch_cap": 1 << 40,
    "image_cap": 1 << 40,
    "p_ref": 1 << 24,
    "lanes": 1 << 16,
    "window": 1 << 26,
    "segment": 1 << 30,
    "open_segments": 1 << 30,
    "epochs": 1 << 40,
    "windows": 1 << 40,
    "vision_windows": 1 << 40,
    "packs": 1 << 40,
    "micro_steps": MAX_STEP_PACKS,
    "packs_per_cell": MAX_STEP_PACKS,
    # vision
    "patch": 1 << 12,
    "merge": 1 << 12,
    "temporal_patch": 1 << 12,
    "min_pixels": 1 << 32,
    "max_pixels": 1 << 32,
    "tile": 1 << 12,
    "min_tiles": 1 << 8,
    "max_tiles": 1 << 8,
    "tile_tokens": 1 << 24,
    # balance
    "min_images_per_rank": 1 << 40,
}
"""By setting."""

MAX_TEXT = 100
"""Characters of an exact number."""
_LARGE_EXPONENT = re.compile(r"[eE][+-]?[0_]*[1-9]_?\d_?\d")


def exact_fraction(text: str) -> Fraction:
    """An exact decimal or fraction, such as "0.3" or "1/3". ValueError, in words that follow the
    name of a setting, for anything else and for what takes too long to compute with."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"should have at most {MAX_TEXT} characters, has {len(text):,}")
    if _LARGE_EXPONENT.search(text):
        raise ValueError("should have an exponent from -99 to 99")
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError('should be a number or a fraction, such as 0.3 or "1/3"') from None
