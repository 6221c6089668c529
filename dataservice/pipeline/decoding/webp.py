"""A WebP: libwebp through imagecodecs, Pillow where it is animated or put together in a rare way.

Invariants: a still picture's pixels are Pillow's; a file that ends before its header says is none.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from dataservice.errors import ImageError
from dataservice.pipeline.decoding import by_pillow, icc
from dataservice.pipeline.decoding.raster import Raster
from dataservice.storage.probe import ImageHeader

_CHUNK = struct.Struct("<4sL")
_FIRST = 12
"""Where the first chunk stands."""
_ANIMATED = 0x02
_STILL = {(b"VP8 ",), (b"VP8L",), (b"ALPH", b"VP8 ")}
"""The chunks that make one picture, in order."""
_PIXELS = frozenset((b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF"))
_MAX_CHUNKS = 64
_BESIDE = frozenset((b"VP8X", b"ICCP", b"EXIF", b"XMP "))


def decode(data: bytes, header: ImageHeader, *, with_icc: bool) -> Raster:
    """As stored. Raises ImageError."""
    end = int.from_bytes(data[4:8], "little") + 8
    if end > len(data):
        raise ImageError("truncated WEBP: its header says more bytes than the file has")
    chunks = list(itertools.islice(_chunks(data, end), _MAX_CHUNKS + 1))
    profile = _profile(data, chunks) if with_icc else b""
    if _is_usual(data, chunks):
        samples = _by_libwebp(data, header)
        if samples is not None:
            has_alpha = samples.shape[2] == 4
            return Raster(samples=samples, has_alpha=has_alpha, profile=profile)
    return by_pillow.load(data, header, profile)


def _by_libwebp(data: bytes, header: ImageHeader) -> NDArray[np.uint8] | None:
    """[H, W, 3 or 4]; None for what libwebp refuses."""
    try:
        samples: NDArray[np.uint8] = imagecodecs.webp_decode(data)
    except imagecodecs.WebpError:
        return None
    width, height = header.stored
    return samples if samples.shape[:2] == (height, width) else None


def _is_usual(data: bytes, chunks: list[tuple[bytes, int, int]]) -> bool:
    """Whether it is one picture, and nothing that only some decoders pass over stands before it."""
    if len(chunks) > _MAX_CHUNKS:
        return False
    if chunks and chunks[0][0] == b"VP8X" and data[20] & _ANIMATED:
        return False
    names = [name for name, _, _ in chunks]
    known = all(name in _PIXELS or name in _BESIDE for name in names)
    return known and tuple(name for name in names if name in _PIXELS) in _STILL


def _profile(data: bytes, chunks: list[tuple[bytes, int, int]]) -> bytes:
    found = next(((at, size) for name, at, size in chunks if name == b"ICCP"), None)
    return icc.usable(data[found[0] : sum(found)]) if found else b""


def _chunks(data: bytes, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Name, place of the data and their size, of those that are whole."""
    at = _FIRST
    while at + _CHUNK.size <= end:
        name, size = _CHUNK.unpack_from(data, at)
        yield name, at + _CHUNK.size, size
        at += _CHUNK.size + size + (size & 1)
