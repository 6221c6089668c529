"""Small pictures as files, whole and damaged, and what a plan says of them."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dataservice.core.packspec import ImageSpec
from dataservice.core.vision import VisionRules, planned_size

ORIENTATION = 0x0112


def noise(width: int, height: int, channels: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    """Smooth enough that JPEG keeps something of it, different everywhere."""
    rng = np.random.Generator(np.random.Philox(seed))
    small = rng.integers(0, 256, (height // 4 + 2, width // 4 + 2, channels), np.uint8)
    return np.repeat(np.repeat(small, 4, 0), 4, 1)[:height, :width].squeeze()


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    stored = io.BytesIO()
    image.save(stored, kind, **options)
    return stored.getvalue()


def turned(image: Image.Image, kind: str, orientation: int, **options: object) -> bytes:
    """A file with that EXIF orientation."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encoded(image, kind, exif=exif, **options)


def image_spec(width: int, height: int, rules: VisionRules, member: str = "picture") -> ImageSpec:
    """Of a picture of that upright size, as the rules plan it; where it is stored is made up."""
    target_height, target_width = planned_size(height, width, rules)
    return ImageSpec(
        shard=0,
        member=member,
        offset=0,
        stored_bytes=0,
        size_bytes=0,
        method=-1,
        crc32=-1,
        width=width,
        height=height,
        target_width=target_width,
        target_height=target_height,
    )


def chunk(kind: bytes, body: bytes) -> bytes:
    """Of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    width: int, height: int, depth: int, colour: int, rows: bytes | Sequence[bytes], *extra: bytes
) -> bytes:
    """`rows`: before they are deflated, or the deflated bytes of each IDAT chunk."""
    data = [zlib.compress(rows)] if isinstance(rows, bytes) else rows
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    parts = [header, *extra, *(chunk(b"IDAT", part) for part in data), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, taken out or put in, mostly near the front; often cut off."""
    out = bytearray(data)
    for _ in range(rng.randint(0, 4)):
        out[rng.randrange(rng.choice([len(out), min(len(out), 700)]))] = rng.randrange(256)
    at, size = rng.randrange(len(out)), rng.randint(1, 9)
    fate = rng.random()
    if fate < 0.2:
        del out[at:]
    elif fate < 0.3:
        out[at:at] = rng.randbytes(size)
    elif fate < 0.4:
        del out[at : at + size]
    return bytes(out)
