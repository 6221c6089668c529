"""Pictures in their planned size, as patches: stock Pillow's bicubic in integer arithmetic.

Invariants: pixels equal those of stock Pillow's `Image.resize(size, BICUBIC, box=box)` of an RGB
picture bit by bit, for all sizes, on every machine, with and without numba. Pillow 13 takes the two
passes of some pictures in another order than the versions before it: what is done is what the
version does that is installed. The GIL is free during the passes; what is written lies in `out`
alone. The first half (across) runs when a picture is prepared, the second (down) when its patches
are written: the picture in its final size never exists as an array of its own.
"""

from __future__ import annotations

from dataservice.pipeline.resampling.passes import Box, Pixels, prepare_patches, resample

VERSION = 1
"""Counts up when any pixel changes; part of what names a decoder."""

__all__ = ["VERSION", "Box", "Pixels", "prepare_patches", "resample"]
