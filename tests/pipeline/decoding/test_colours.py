from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataservice.pipeline.decoding import colours
from dataservice.pipeline.decoding.colours import over
from dataservice.pipeline.decoding.raster import Raster

COLOUR = st.tuples(*[st.integers(0, 255)] * 3)


def pasted(image: Image.Image, background: tuple[int, int, int]) -> np.ndarray:
    under = Image.new("RGB", image.size, background)
    under.paste(image.convert("RGBA"), mask=image.getchannel("A"))
    return np.asarray(under)


@pytest.mark.parametrize("form", ["_blend_loop", "_blend_strips", "_blend_words"])
@pytest.mark.parametrize("mode", ["LA", "RGBA"])
@given(writeable=st.booleans(), background=COLOUR, seed=st.integers(0, 99), rows=st.integers(1, 70))
@settings(max_examples=20, deadline=None)
def test_alpha_is_mixed_as_pillow_pastes(form, mode, writeable, background, seed, rows) -> None:
    rng = np.random.Generator(np.random.Philox(seed))
    samples = rng.integers(0, 256, (rows, 33, len(mode)), np.uint8)
    samples[::3, :, -1] = rng.choice(np.array([0, 255], np.uint8), samples[::3, :, -1].shape)
    expected = pasted(Image.fromarray(samples, mode), background)
    samples.flags.writeable = writeable
    with pytest.MonkeyPatch.context() as patch:
        if form != "_blend_words":  # which is there for some pictures, where a compiler is
            patch.setattr(colours, "_BY_WORD", False)
            patch.setattr(colours, "_blend", getattr(colours, form))
        got = over(Raster(samples=samples, has_alpha=True), background)
    assert np.array_equal(got[:, :, :3], expected)
    assert (got is samples) == (writeable and mode == "RGBA")


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_every_colour_under_every_alpha(mode: str) -> None:
    values = np.arange(256, dtype=np.uint8)
    samples = np.stack(np.meshgrid(values, values), axis=2)
    if mode == "RGBA":
        samples = np.ascontiguousarray(samples[:, :, [0, 0, 0, 1]])
    expected = pasted(Image.fromarray(samples, mode), (255, 0, 77))
    got = over(Raster(samples=samples, has_alpha=True), (255, 0, 77))
    assert np.array_equal(got[:, :, :3], expected)


def test_what_hides_nothing_is_not_copied() -> None:
    for channels in (3, 4):
        samples = np.zeros((5, 6, channels), np.uint8)
        assert over(Raster(samples=samples), (1, 2, 3)) is samples


def test_grey_is_red_green_and_blue() -> None:
    samples = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
    assert np.array_equal(over(Raster(samples=samples), (1, 2, 3))[:, :, :3], samples.repeat(3, 2))
