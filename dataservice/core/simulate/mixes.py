"""The parts of the synthetic mixes: sources of like samples and how their sizes are distributed.

Invariants: constants only. Those of text80 and mostlyvl were fitted to the moments that
tests/core/test_workloads.py holds; in gravity text-only samples have 80 % of the tokens and images
above 2 megapixels are 10 % of all images.
"""

from __future__ import annotations

from typing import NamedTuple

MEGAPIXEL = 1 << 20
ROWS = 1 << 12
"""Rows over which a part's samples without images are spread evenly."""


class Text(NamedTuple):
    """Tokens, lognormal."""

    median: float
    sigma: float
    least: int = 8


class Images(NamedTuple):
    """Sizes are lognormal, in megapixels."""

    median: float
    sigma: float
    least: float
    most: float
    max_count: int = 1
    """Of a sample."""
    ratio: float = 0.0
    """Samples with n + 1 images over those with n."""


class Part(NamedTuple):
    name: str
    sources: int
    share: float
    """Of the mix's samples, relative to the other parts'."""
    text: Text
    text_only: int = ROWS
    """Samples without images, of ROWS."""
    images: Images = Images(0.5, 0.8, 0.01, 2.0)
    """Of the others."""


class Mix(NamedTuple):
    pack_length: int
    """Tokens; the mix's usual setting."""
    max_pixels: int
    parts: tuple[Part, ...]
    first_seed: int = 0
    """Added to every seed; seed 0 has the moments that the tests hold."""


_TEXT80 = (
    Part("text", 44, 0.6337, Text(603.9, 1.102)),
    Part("long", 12, 0.1043, Text(2990.6, 0.801)),
    Part("caption", 24, 0.08933, Text(130.6, 0.983), 236, Images(0.344, 0.814, 0.01, 2.148)),
    Part("vqa", 16, 0.0379, Text(294.9, 0.868), 236, Images(0.317, 0.731, 0.01, 2.148, 2, 0.033)),
    Part("doc", 10, 0.03077, Text(799.3, 0.997), 236, Images(0.576, 0.812, 0.01, 2.148, 3, 0.05)),
    Part(
        "interleaved",
        10,
        0.02553,
        Text(1613.3, 0.997),
        236,
        Images(0.288, 0.737, 0.01, 2.148, 8, 0.794),
    ),
    Part("hires", 4, 0.01135, Text(550.7, 1.15, 481), 0, Images(4.988, 0.501, 2.0, 16.0)),
)
_MOSTLYVL = (
    Part("text", 8, 0.05933, Text(552.1, 0.812)),
    Part("long", 4, 0.01324, Text(2602.7, 0.802)),
    Part("caption", 50, 0.4083, Text(126.4, 0.894), 98, Images(0.379, 0.843, 0.01, 2.396)),
    Part("vqa", 24, 0.1914, Text(174.9, 0.825), 98, Images(0.37, 0.658, 0.01, 2.396, 2, 0.017)),
    Part("doc", 16, 0.1493, Text(679.8, 0.801), 98, Images(0.601, 0.798, 0.01, 2.396, 4, 0.269)),
    Part(
        "interleaved",
        14,
        0.1113,
        Text(1107.1, 0.952),
        98,
        Images(0.257, 0.267, 0.01, 2.396, 8, 0.83),
    ),
    Part("hires", 4, 0.05164, Text(360.0, 0.891, 320), 0, Images(4.8, 0.343, 2.0, 16.0)),
)
_GRAVITY = (
    Part("text", 50, 0.63799, Text(900.0, 1.0)),
    Part("long", 14, 0.1276, Text(4000.0, 1.0)),
    Part("caption", 36, 0.16499, Text(200.0, 0.9), 0, Images(0.5, 0.7, 0.05, 2.0)),
    Part("interleaved", 14, 0.04125, Text(700.0, 1.0), 0, Images(0.5, 0.7, 0.05, 2.0, 4, 0.75)),
    Part("hires", 6, 0.02818, Text(300.0, 0.9), 0, Images(5.0, 0.6, 2.01, 16.0)),
)

MIXES: dict[str, Mix] = {
    "text80": Mix(8192, 4 * MEGAPIXEL, _TEXT80, first_seed=138),
    "mostlyvl": Mix(8192, 4 * MEGAPIXEL, _MOSTLYVL, first_seed=259),
    "gravity": Mix(32_768, 16 * MEGAPIXEL, _GRAVITY),
}
