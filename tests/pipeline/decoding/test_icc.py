from __future__ import annotations

import dataclasses
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms
from support.pictures import chunk, encoded, noise

from dataservice.core.vision import VisionRules
from dataservice.pipeline.decoding import DecodeLimits, decode_whole, icc
from dataservice.pipeline.decoding.headers import picture_header

PLAIN = VisionRules()
BY_PROFILE = dataclasses.replace(PLAIN, icc=True)
LIMITS = DecodeLimits()
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
SWAPPED = (
    SRGB.replace(b"rXYZ", b"?XYZ", 1).replace(b"bXYZ", b"rXYZ", 1).replace(b"?XYZ", b"bXYZ", 1)
)
"""Of a device whose red and blue are the other way round."""
RGB = Image.fromarray(noise(40, 30) // 64 * 85)


def gray_profile(gamma: float) -> bytes:
    """The least that an ICC profile of grey may be."""
    curve = b"curv" + bytes(4) + struct.pack(">LH", 1, round(gamma * 256)) + bytes(2)
    white = b"XYZ " + bytes(4) + struct.pack(">3l", 63190, 65536, 54061)
    table = struct.pack(">L4sLL4sLL", 2, b"kTRC", 156, 14, b"wtpt", 172, 20)
    body = table + curve + white
    head = struct.pack(
        ">L4sL4s4s4s", 128 + len(body), bytes(4), 0x02400000, b"mntr", b"GRAY", b"XYZ "
    )
    head += bytes(12) + b"acsp" + bytes(28) + struct.pack(">3l", 63190, 65536, 54061)
    return head.ljust(128, b"\0") + body


def pixels(data: bytes, rules: VisionRules = BY_PROFILE) -> np.ndarray:
    return decode_whole(data, picture_header(data, LIMITS), rules).pixels[:, :, :3].astype(int)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"quality": 95}),
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("TIFF", {}),
        ("AVIF", {"quality": 95}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_profile_is_applied_where_it_is_asked_for(kind: str, options: dict[str, object]) -> None:
    data = encoded(RGB, kind, icc_profile=SWAPPED, **options)
    stored = pixels(data, PLAIN)
    assert np.array_equal(stored, pixels(encoded(RGB, kind, **options)))
    assert np.abs(pixels(data) - stored[:, :, ::-1]).max() <= 2


def test_a_profile_is_applied_before_the_background() -> None:
    image = RGB.copy()
    image.putalpha(Image.fromarray(noise(40, 30, 1)))
    rules = dataclasses.replace(BY_PROFILE, background=(250, 30, 90))
    swapped = pixels(encoded(image, "PNG", icc_profile=SWAPPED), rules)
    red, green, blue, alpha = image.split()
    other = Image.merge("RGBA", (blue, green, red, alpha))
    assert np.abs(swapped - pixels(encoded(other, "PNG"), rules)).max() <= 2


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_grey_profile(kind: str) -> None:
    gray = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    options = {"quality": 100} if kind == "JPEG" else {}
    data = encoded(gray, kind, icc_profile=gray_profile(1.0), **options)
    assert picture_header(data, LIMITS).format == kind
    got = pixels(data)[:, :, 0]
    linear = pixels(data, PLAIN)[:, :, 0] / 255
    expected = 255 * (1.055 * linear ** (1 / 2.4) - 0.055)
    assert np.abs(got - expected)[linear > 0.1].max() <= 2


@pytest.mark.parametrize(
    "profile",
    [b"", b"no profile", SWAPPED[:200], gray_profile(2.2), SRGB[:16] + b"CMYK" + SRGB[20:]],
    ids="empty words cut grey cmyk".split(),
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_profile_that_is_broken_or_of_another_kind_changes_nothing(kind, profile) -> None:
    data = encoded(RGB, kind, icc_profile=profile)
    assert np.array_equal(pixels(data), pixels(data, PLAIN))


def test_a_profile_of_other_inks_leaves_cmyk_as_it_is() -> None:
    data = encoded(RGB.convert("CMYK"), "JPEG", icc_profile=SWAPPED)
    assert np.array_equal(pixels(data), pixels(data, PLAIN))


def test_a_profile_that_inflates_beyond_the_limit_counts_as_none(monkeypatch) -> None:
    plain = encoded(RGB, "PNG")
    at = plain.index(b"IDAT") - 4
    data = plain[:at] + chunk(b"iCCP", b"p\0\0" + zlib.compress(SWAPPED)) + plain[at:]
    assert not np.array_equal(pixels(data), pixels(plain))
    monkeypatch.setattr(icc, "MAX_PROFILE_BYTES", len(SWAPPED) - 1)
    assert np.array_equal(pixels(data), pixels(plain))


def test_a_profile_in_parts_is_put_together_by_their_numbers() -> None:
    data = encoded(RGB, "JPEG", icc_profile=SWAPPED)
    at = data.index(b"\xff\xe2")
    size = 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    profile = data[at + 18 : at + size]

    def segment(number: int, body: bytes) -> bytes:
        body = b"ICC_PROFILE\0" + bytes([number, 2]) + body
        return b"\xff\xe2" + (len(body) + 2).to_bytes(2, "big") + body

    first, second = segment(1, profile[:300]), segment(2, profile[300:])
    parted = data[:at] + second + first + data[at + size :]
    assert np.array_equal(pixels(parted), pixels(data))
    lacking = data[:at] + first + data[at + size :]
    assert np.array_equal(pixels(lacking), pixels(data, PLAIN))
