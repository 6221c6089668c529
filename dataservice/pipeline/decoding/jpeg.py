"""A JPEG (ITU T.81): libjpeg-turbo through simplejpeg, at a part of its size where that is enough.

Invariants: metadata is not given to a decoder, so that it never costs the picture; simplejpeg takes
what it decodes without a warning, with Pillow's pixels; pictures of four colours, of arithmetic
coding and whatever else is unusual or damaged are Pillow's, which decodes them whole. Which of both
has a picture follows from its bytes alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from dataservice.pipeline.decoding import by_pillow, icc
from dataservice.pipeline.decoding.raster import Raster
from dataservice.storage.probe import ImageHeader

_SCALES = (8, 4, 2)
"""Of a side. The other scales of libjpeg-turbo take longer than the whole picture does."""
_LEAST_SCALED = 16
"""Pixels of the longer side from which on no two scales give the same size."""
_SCAN, _QUANTISATION, _HUFFMAN, _RESTART = 0xDA, 0xDB, 0xC4, 0xDD
_USUAL_FRAMES = (0xC0, 0xC1, 0xC2)
"""Baseline, extended and progressive, in Huffman codes."""
_COMMENT, _APP0, _APP2, _APP14, _APP15 = 0xFE, 0xE0, 0xE2, 0xEE, 0xEF
_ICC = b"ICC_PROFILE\0"
_LOOK = 14
"""Bytes of a segment that are looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    bare: bytes
    """Without metadata, and without what stands between segments."""
    components: int
    """1 or 3 of a picture in which everything before its first scan is usual, else 0."""
    profile: bytes


def decode(data: bytes, header: ImageHeader, least: tuple[int, int], *, with_icc: bool) -> Raster:
    """As stored, at the smallest scale of at least `least` (width, height). Raises ImageError."""
    parts = _parts(data)
    profile = parts.profile if with_icc else b""
    stored = header.stored
    if parts.components:
        scale = _scale(stored, least)
        samples = _by_turbo(parts, stored, scale)
        if samples is not None:
            return Raster(samples=samples, scale=scale, profile=profile)
    return by_pillow.load(parts.bare, header, profile)


def _by_turbo(parts: _Parts, stored: tuple[int, int], scale: int) -> NDArray[np.uint8] | None:
    """[H, W, 1 or 4]; None for what simplejpeg refuses."""
    width, height = (-(-side // scale) for side in stored)
    try:
        samples: NDArray[np.uint8] = simplejpeg.decode_jpeg(
            parts.bare,
            "GRAY" if parts.components == 1 else "RGBX",
            min_height=height,
            min_width=width,
            min_factor=scale,
            strict=True,
        )
    except ValueError as error:
        if "memory" in str(error).lower():  # what the next one would have is another size
            raise MemoryError(str(error)) from error
        return None
    return samples if samples.shape[:2] == (height, width) else None


def _scale(stored: tuple[int, int], least: tuple[int, int]) -> int:
    if max(stored) < _LEAST_SCALED:
        return 1
    for scale in _SCALES:
        if stored[0] >= least[0] * scale and stored[1] >= least[1] * scale:
            return scale
    return 1


def _parts(data: bytes) -> _Parts:
    """Of a file whose segments `storage.probe` has walked through."""
    at, kept_to = 2, 0
    kept: list[bytes] = []
    profile: list[bytes] = []
    frames: list[int] = []
    usual = True
    while at + 4 <= len(data):
        marker = data[at + 1]
        if data[at] != 0xFF:
            usual = False
            kept.append(data[kept_to:at])
            found = data.find(b"\xff", at)
            at = kept_to = found if found >= 0 else len(data)
            continue
        if marker == 0xFF:  # filling before a marker
            at += 1
            continue
        if marker == _SCAN:
            break
        stop = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if not _COMMENT >= marker >= 0xC0 or 0xD0 <= marker <= 0xD9 or stop < at + 4:
            usual = False  # no segment
            break
        if marker == _COMMENT or _APP0 <= marker <= _APP15:
            if not _tells_colours(marker, data[at + 4 : min(stop, at + 4 + _LOOK)]):
                kept.append(data[kept_to:at])
                kept_to = stop
            if marker == _APP2 and data.startswith(_ICC, at + 4):
                profile.append(data[at + 4 + len(_ICC) : stop])
        elif marker not in (_QUANTISATION, _HUFFMAN, _RESTART):
            usual = usual and marker in _USUAL_FRAMES and not frames
            frames.append(data[at + 9] if at + 9 < len(data) else 0)
        at = stop
    components = frames[0] if usual and frames and frames[0] in (1, 3) else 0
    bare = b"".join([*kept, data[kept_to:]]) if kept else data
    return _Parts(bare=bare, components=components, profile=_profile(profile))


def _tells_colours(marker: int, body: bytes) -> bool:
    """Whether a decoder reads from a segment of that beginning how the colours are coded."""
    if marker == _APP0:
        return body.startswith(b"JFIF\0") and len(body) >= 14
    return marker == _APP14 and body.startswith(b"Adobe") and len(body) >= 12


def _profile(segments: list[bytes]) -> bytes:
    """Of the parts, each behind its number and the number of all; empty when not all are there."""
    numbered = sorted((part[0], part[1], part[2:]) for part in segments if len(part) > 2)
    if [part[:2] for part in numbered] != [(n + 1, len(segments)) for n in range(len(segments))]:
        return b""
    return icc.usable(b"".join(part[2] for part in numbered))
