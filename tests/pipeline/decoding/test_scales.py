"""JPEGs that are decoded at a part of their size."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from support.pictures import ORIENTATION, encoded, image_spec, noise, turned

from dataservice.core.vision import VisionRules
from dataservice.pipeline.decoding import Decoded, DecodeLimits, decode, jpeg

RULES = VisionRules()
LIMITS = DecodeLimits()


def planned(data: bytes, width: int, height: int, rules: VisionRules = RULES) -> Decoded:
    with Image.open(io.BytesIO(data)) as image:
        size = image.size[:: -1 if image.getexif().get(ORIENTATION, 1) >= 5 else 1]
    spec = dataclasses.replace(image_spec(*size, rules), target_width=width, target_height=height)
    return decode(data, spec, rules, LIMITS)


def by_draft(data: bytes, scale: int) -> np.ndarray:
    """What Pillow's own reduced decode gives."""
    with Image.open(io.BytesIO(data)) as image:
        image.draft("RGB", (max(image.width // scale, 1), max(image.height // scale, 1)))
        return np.asarray(image.convert("RGB"))


PICTURE = Image.fromarray(noise(203, 118))


@given(
    width=st.integers(16, 150),
    height=st.integers(16, 150),
    parts=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
    orientation=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_the_smallest_scale_that_is_at_least_the_target(width, height, parts, orientation) -> None:
    data = turned(Image.fromarray(noise(width, height)), "JPEG", orientation)
    upright = (height, width) if orientation >= 5 else (width, height)
    target = tuple(max(int(side * part), 1) for side, part in zip(upright, parts, strict=True))
    ratio = min(a / b for a, b in zip(upright, target, strict=True))
    scale = next(scale for scale in (8, 4, 2, 1) if scale <= ratio)
    got = planned(data, *target)
    part = turned(Image.fromarray(by_draft(data, scale)), "PNG", orientation)
    with Image.open(io.BytesIO(part)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    assert np.array_equal(got.pixels[:, :, :3], expected)
    left, upper, right, lower = got.box
    assert (right - left, lower - upper) == (upright[0] / scale, upright[1] / scale)
    high, wide = got.pixels.shape[:2]
    assert (left == 0 or right == wide) and (upper == 0 or lower == high)
    assert min(got.box) >= 0 and right <= wide and lower <= high


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_exact_rules_never_scale(mode: str) -> None:
    data = encoded(PICTURE.convert(mode), "JPEG")
    got = planned(data, 28, 28, dataclasses.replace(RULES, exact=True))
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(got.pixels[:, :, :3], np.asarray(image.convert("RGB")))
    assert got.box == (0, 0, 203, 118)
    assert planned(data, 28, 28).pixels.shape[:2] == (30, 51)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF", "GIF"])
def test_other_formats_are_never_scaled(kind: str) -> None:
    assert planned(encoded(PICTURE, kind), 28, 28).pixels.shape[:2] == (118, 203)


def test_what_pillow_has_to_decode_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(PICTURE.convert("CMYK"), "JPEG")
    assert planned(data, 28, 28).box == (0, 0, 203, 118)
    monkeypatch.setattr(jpeg, "_by_turbo", lambda *_: None)
    assert planned(encoded(PICTURE, "JPEG"), 28, 28).pixels.shape[:2] == (118, 203)
