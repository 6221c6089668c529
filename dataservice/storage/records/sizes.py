"""Widths and heights that a record gives for its images.

Invariants: whole numbers from 1 to MAX_SIDE of a picture that may be used, or None; a wrong value
never costs the record; what is believed here is checked when the image is decoded.
"""

from __future__ import annotations

from typing import Any

from dataservice.core.vision import MAX_ASPECT
from dataservice.storage.probe import MAX_PIXELS, MAX_SIDE
from dataservice.storage.records.fields import FieldNames, Fields
from dataservice.storage.records.model import Size


class SizeFields:
    def __init__(self, top: FieldNames) -> None:
        self._width, self._height = top["width"], top["height"]
        self._widths, self._heights = top["width_list"], top["height_list"]

    def read(self, fields: Fields, num_images: int) -> tuple[Size | None, ...]:
        """By image, in the order in which the record lists them; `width` and `height` are of the
        only image, the lists of as many as they are long."""
        if num_images == 1:
            width = fields.get(self._width)
            if width is not None:
                return (_size(width, fields.get(self._height)),)
        widths, heights = fields.get(self._widths), fields.get(self._heights)
        if not isinstance(widths, list) or not isinstance(heights, list):
            return (None,) * num_images
        if len(widths) != num_images or len(heights) != num_images:
            return (None,) * num_images
        return tuple(map(_size, widths, heights))


def _size(width: Any, height: Any) -> Size | None:
    if type(width) is not int or type(height) is not int:
        width, height = _whole(width), _whole(height)
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE) or width * height > MAX_PIXELS:
        return None
    if width > MAX_ASPECT * height or height > MAX_ASPECT * width:
        return None
    return width, height


def _whole(value: Any) -> int:
    """0 for what is no whole number."""
    return int(value) if type(value) in (int, float) and value == value // 1 else 0
