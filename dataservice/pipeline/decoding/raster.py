"""The arrays that pictures are on their way from a codec to the resize.

Invariants: uint8, C-contiguous; whoever is given one is its only owner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.pipeline.resampling import Box, Pixels


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """A picture, upright, over the background."""

    pixels: Pixels
    box: Box
    """The region of `pixels` that is the picture. All of it, but for a JPEG decoded at a half, a
    quarter or an eighth whose size is no multiple of that: its last pixels cover more than it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Raster:
    """A picture as it is stored, not turned."""

    samples: NDArray[np.uint8]
    """[H, W, C]: grey (1), grey and alpha (2), RGB (3), RGB and a fourth byte (4)."""
    has_alpha: bool = False
    """Whether the last channel is alpha, not premultiplied."""
    scale: int = 1
    """How many pixels of the stored picture's width or height one of these covers."""
    profile: bytes = b""
    """The ICC profile that is yet to be applied; empty for none."""
