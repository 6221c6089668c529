"""Widths and heights that a record gives for its images.

Invariants: whole numbers from 1 to MAX_SIDE of a picture that may be used, or None; a wrong value
never costs the record; what is believed here is checked when the image is decoded.
"""

from __future__ import annotations

from typing import Any

from dataservice.core.vision import MAX_ASPECT
from dataservice.storage.probe import MAX_PIXELS
from dataservice.storage.records.fields import FieldNames, Fields
from dataservice.storage.records.model import MAX_SIDE, Size

_FIELDS = ("width", "height", "width_list", "height_list")


class SizeFields:
    def __init__(self, top: FieldNames) -> None:
        self._names = tuple(top[field] for field in _FIELDS)
        self._any_name = frozenset(self._names)

    def read(self, fields: Fields, num_images: int) -> tuple[Size | None, ...]:
        """By image, in the order in which the record lists them; `width` and `height` are of the
        only image, the lists of as many as they are long."""
        if self._any_name.isdisjoint(fields):
            return (None,) * num_images
        width, height, widths, heights = (fields.get(name) for name in self._names)
        if num_images == 1 and width is not None:
            widths, heights = [width], [height]
        if not isinstance(widths, list) or not isinstance(heights, list):
            return (None,) * num_images
        if len(widths) != num_images or len(heights) != num_images:
            return (None,) * num_images
        return tuple(map(_size, widths, heights))


def _size(width: Any, height: Any) -> Size | None:
    sides = _side(width), _side(height)
    if not all(sides) or max(sides) > MAX_ASPECT * min(sides) or sides[0] * sides[1] > MAX_PIXELS:
        return None
    return sides


def _side(value: Any) -> int:
    """0 for what is none."""
    if type(value) not in (int, float) or not 1 <= value <= MAX_SIDE or value != int(value):
        return 0
    return int(value)
