from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from support.pictures import turned

from dataservice.pipeline.decoding.turns import upright, upright_box


@given(
    width=st.integers(1, 150),
    height=st.integers(1, 150),
    channels=st.sampled_from([3, 4]),
    orientation=st.integers(1, 8),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_turns_are_those_of_pillow(width, height, channels, orientation, seed) -> None:
    rng = np.random.Generator(np.random.Philox(seed))
    pixels = rng.integers(0, 256, (height, width, channels), np.uint8)
    got = upright(pixels, orientation)
    with Image.open(io.BytesIO(turned(Image.fromarray(pixels), "PNG", orientation))) as image:
        assert np.array_equal(got, np.asarray(ImageOps.exif_transpose(image)))
    assert got.flags.c_contiguous and got.dtype == np.uint8


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_region_stays_on_the_pixels_that_it_was_on(orientation: int) -> None:
    pixels = np.zeros((7, 11, 3), np.uint8)
    pixels[1:4, 2:9] = 255
    left, upper, right, lower = map(int, upright_box((2, 1, 9, 4), 11, 7, orientation))
    seen = upright(pixels, orientation)
    assert seen[upper:lower, left:right].all()
    assert seen.sum() == pixels.sum() == 255 * 3 * (right - left) * (lower - upper)
