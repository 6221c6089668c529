"""The pictures and settings that the golden files are about: numpy only, the same everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The values of a model's published preprocessor_config.json."""

    patch: int
    min_pixels: int
    max_pixels: int
    mean_std: tuple[tuple[float, float, float], tuple[float, float, float]]
    merge: int = 2
    temporal_patch: int = 2


PROCESSORS = {
    "qwen2_vl": Processor(patch=14, min_pixels=3136, max_pixels=12845056, mean_std=CLIP),
    "qwen2_5_vl": Processor(patch=14, min_pixels=3136, max_pixels=12845056, mean_std=CLIP),
    "qwen3_vl": Processor(patch=16, min_pixels=65536, max_pixels=16777216, mean_std=HALF),
    "defaults": Processor(patch=14, min_pixels=56 * 56, max_pixels=28 * 28 * 1280, mean_std=CLIP),
    "small": Processor(patch=14, min_pixels=28 * 28, max_pixels=28 * 28 * 12, mean_std=CLIP),
    "small_16": Processor(patch=16, min_pixels=32 * 32, max_pixels=32 * 32 * 9, mean_std=HALF),
    "merge_3": Processor(
        patch=7, min_pixels=21 * 21 * 4, max_pixels=21 * 21 * 30, mean_std=CLIP, merge=3
    ),
}
"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL as published, the class's own defaults, and narrow bounds."""

SIZES = (
    (56, 56),
    (300, 200),
    (97, 61),
    (1, 1),
    (1, 200),
    (401, 3),
    (16, 640),
    (500, 3),
    (1300, 900),
)
"""(width, height) of the pictures."""
REFUSED = ((1, 201), (402, 2), (3, 601))
"""(width, height): aspect ratio above 200."""
WHOLE_PATCHES = 16
"""Pictures of so many patches are in the files whole, larger ones as a digest."""


def picture(width: int, height: int) -> np.ndarray:
    """uint8 [height, width, 3]: slopes, edges of full contrast and a little noise."""
    y, x = np.mgrid[:height, :width].astype(np.uint64)
    noise = (x * np.uint64(7919) + y * np.uint64(104729)) * np.uint64(0x9E3779B97F4A7C15)
    planes = []
    for channel in range(3):
        slope = x * np.uint64(2 + channel) + y * np.uint64(3 - channel)
        edge = ((x // np.uint64(5 + channel) + y // np.uint64(7)) % np.uint64(2)) * np.uint64(128)
        planes.append(slope + edge + (noise >> np.uint64(59 - channel)))
    return (np.stack(planes, -1) % np.uint64(256)).astype(np.uint8)


def levels(side: int) -> np.ndarray:
    """uint8 [side, side, 3] with every byte in every channel, for a run without a resize."""
    values = (np.arange(side * side) % 256).astype(np.uint8).reshape(side, side)
    return np.stack([values, values[::-1], values.T], -1)


def sides() -> list[tuple[int, int]]:
    """(width, height) of many pictures, of which only the grid is asked."""
    steps = np.arange(1, 301, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    widths, heights = (
        (steps >> np.uint64(52)) + np.uint64(1),
        (steps >> np.uint64(20)) % np.uint64(2999),
    )
    return [(int(w), int(h) + 1) for w, h in zip(widths, heights, strict=True)]


def stored_in(pillow: int, name: str) -> Path:
    """The file of a processor as made with this major version of Pillow; 13 changed the resize."""
    return Path(__file__).parent / f"pillow_{min(max(pillow, 12), 13)}" / f"{name}.npz"
