"""A PNG: libdeflate and own filters where it is a usual one and a compiler is there, else Pillow.

Invariants: pixels are Pillow's either way. Pillow has the interlaced pictures, 16 bits, grey ones
with a profile to apply, and whatever is damaged.
"""

from __future__ import annotations

import importlib
import sys

from dataservice.core.compiled import has_compiler
from dataservice.pipeline.decoding import by_pillow
from dataservice.pipeline.decoding.png_chunks import (
    GRAY,
    GRAY_ALPHA,
    RGB_ALPHA,
    parts_of,
    profile_in,
)
from dataservice.pipeline.decoding.raster import Raster
from dataservice.storage.probe import ImageHeader

_rows = None
if has_compiler() and sys.byteorder == "little":
    _rows = importlib.import_module("dataservice.pipeline.decoding.png_rows")


def decode(data: bytes, header: ImageHeader, *, with_icc: bool) -> Raster:
    """As stored. Raises ImageError."""
    parts = parts_of(data)
    profile = profile_in(data) if with_icc else b""
    is_gray = parts.colour in (GRAY, GRAY_ALPHA)
    if _rows is not None and parts.is_usual and not (is_gray and profile):
        samples = _rows.pixels_of(parts)
        if samples is not None:
            transparent = bool(parts.transparent) or parts.colour in (GRAY_ALPHA, RGB_ALPHA)
            return Raster(samples=samples, has_alpha=transparent, profile=profile)
    return by_pillow.load(parts.bare, header, profile)
