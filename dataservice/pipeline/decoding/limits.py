"""What a picture may cost."""

from __future__ import annotations

from dataclasses import dataclass

from dataservice.core.limits import MAX_IMAGE_BYTES
from dataservice.storage.probe import MAX_PIXELS


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLimits:
    deadline_s: float = 30.0
    """For one picture, from when its decode starts."""
    max_pixels: int = MAX_PIXELS
    """Width times height as the file's header says; the index has the same limit."""
    max_bytes: int = MAX_IMAGE_BYTES
    """Of a picture's file, checked before it is read."""
    read_deadline_s: float = 120.0
    """For what one thread reads in a row: a picture, or its share of a pack's records. Above the
    reader's own deadline with its retries, which should come first."""
