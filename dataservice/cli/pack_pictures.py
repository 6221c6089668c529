"""The pictures of a built pack, put together again from the rows that the model reads.

Invariants: pixels are those of the pack; a page gets them as data inside itself.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dataservice.core.vision import VisionRules
from dataservice.pipeline.patches import unpatchify

THUMBNAIL = 320
"""Longest side in pixels."""
QUALITY = 85


def pictures_in(
    arrays: Mapping[str, NDArray[Any]], rules: VisionRules
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Image tokens and pixels [H, W, 3] of each; of tiles without the thumbnail behind them."""
    first = 0
    for _, rows, columns in arrays["image_grid_thw"].tolist():
        count = rows * columns
        height, width = rows * rules.side, columns * rules.side
        values = arrays["pixel_values"][first : first + count]
        first += count
        tokens = count // rules.merge**2
        if rules.mode == "tiles":
            first += rules.thumbnail and count > 1
            tokens = (count + (rules.thumbnail and count > 1)) * rules.tile_tokens
        yield tokens, unpatchify(values, height, width, rules.side, rules.group)


def data_url(pixels: NDArray[np.uint8]) -> str:
    """A JPEG, made smaller where it is large."""
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
