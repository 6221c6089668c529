"""Tiles of a decoded picture, against InternVL's preprocessing done plainly with Pillow."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.internvl import tiles_of
from support.pictures import image_spec

from dataservice.core.vision import VisionRules
from dataservice.pipeline.images import DecodeLimits, ImageDecoder
from dataservice.pipeline.isolation import IsolatedDecoder, picture_memory
from dataservice.pipeline.specs import grid, num_patches, num_rows
from dataservice.pipeline.tiling import prepare_rows


def rows_of(pixels: np.ndarray, rules: VisionRules) -> np.ndarray:
    spec = image_spec(pixels.shape[1], pixels.shape[0], rules)
    shape = rules.pixel_shape(num_patches(spec, rules))
    around = np.full((shape[0] + 2, shape[1]), 77, np.uint8)
    prepare_rows(pixels, None, spec, rules)(around[1:-1])
    assert (around[[0, -1]] == 77).all()
    assert num_rows(spec, rules) == shape[0]
    return around[1:-1]


def noise(width: int, height: int) -> np.ndarray:
    rng = np.random.Generator(np.random.Philox(width * 10_000 + height))
    return rng.integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("size", [(448, 448), (300, 200), (1000, 420), (97, 801), (896, 448)])
def test_tiles_of_448_pixels(size: tuple[int, int]) -> None:
    pixels = noise(*size)
    expected = tiles_of(
        Image.fromarray(pixels), min_num=1, max_num=6, image_size=448, thumbnail=True
    )
    rows = rows_of(pixels, VisionRules(mode="tiles", max_tiles=6))
    assert np.array_equal(rows.reshape(expected.shape), expected)


@settings(deadline=None, max_examples=60)
@given(
    width=st.integers(1, 200),
    height=st.integers(1, 200),
    least=st.integers(1, 3),
    more=st.integers(0, 9),
    thumbnail=st.booleans(),
)
def test_any_size_and_limit(
    width: int, height: int, least: int, more: int, thumbnail: bool
) -> None:
    pixels = noise(width, height)
    rules = VisionRules(
        mode="tiles",
        tile=28,
        min_tiles=least,
        max_tiles=least + more,
        thumbnail=thumbnail,
    )
    expected = tiles_of(
        Image.fromarray(pixels),
        min_num=least,
        max_num=least + more,
        image_size=28,
        thumbnail=thumbnail,
    )
    assert np.array_equal(rows_of(pixels, rules).reshape(expected.shape), expected)


def test_a_decoder_process_gives_the_same_tiles() -> None:
    stored = io.BytesIO()
    Image.fromarray(noise(130, 60)).save(stored, "PNG")
    rules, limits = VisionRules(mode="tiles", tile=28), DecodeLimits()
    spec = image_spec(130, 60, rules)
    found = np.zeros((2, *rules.pixel_shape(num_patches(spec, rules))), np.uint8)
    memory = picture_memory(limits.max_pixels, limits.max_bytes)
    isolated = IsolatedDecoder(rules, limits, memory_bytes=memory)
    try:
        for out, decoder in zip(found, (ImageDecoder(rules, limits), isolated), strict=True):
            decoder.prepare(stored.getvalue(), spec)(out)
    finally:
        isolated.close()
    assert found[0].any()
    assert np.array_equal(found[0], found[1])


def test_a_grid_counts_no_thumbnail() -> None:
    rules = VisionRules(mode="tiles")
    spec = image_spec(1920, 1080, rules)
    assert grid(spec, rules) == (2, 4)
    assert num_rows(spec, rules) == 9
