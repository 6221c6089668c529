"""The decoder of a worker: the bytes of a picture file -> its rows in a pack's pixel array.

Invariants: what takes time is done before anything is written; rows are written once, in place, and
no array of the picture in its planned size is made besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dataservice.core.packspec import ImageSpec
from dataservice.core.vision import VisionRules
from dataservice.pipeline.decoding import DecodeLimits, decode
from dataservice.pipeline.decoding.installed import check_decoders, decoder_fingerprint
from dataservice.pipeline.tiling import prepare_rows

__all__ = [
    "DecodeLimits",
    "Decoder",
    "ImageDecoder",
    "Prepared",
    "check_decoders",
    "decoder_fingerprint",
]

Prepared = Callable[[NDArray[np.uint8]], None]
"""A decoded picture: writes its rows into `out` uint8 of shape `rules.pixel_shape`, C-contiguous,
and does so fast."""


class Decoder(Protocol):
    """Thread-safe. What builds a pack from pictures: `ImageDecoder`, or one in another process."""

    def prepare(self, data: bytes, image: ImageSpec) -> Prepared:
        """The file's bytes, decoded and halfway to the planned size; raises ImageError."""


class ImageDecoder:
    """Decodes in the thread that calls."""

    def __init__(self, rules: VisionRules, limits: DecodeLimits) -> None:
        self._rules = rules
        self._limits = limits

    def prepare(self, data: bytes, image: ImageSpec) -> Prepared:
        decoded = decode(data, image, self._rules, self._limits)
        return prepare_rows(decoded.pixels, decoded.box, image, self._rules)
