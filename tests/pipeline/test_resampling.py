"""Resized pictures are those of stock Pillow, compiled or not, and nothing else is written."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.uncompiled import printed_by

from dataservice.pipeline.resampling import passes, portable, prepare_patches, resample
from dataservice.pipeline.resampling.weights import PLACES, weights

Box = tuple[float, float, float, float]


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Extreme bytes are frequent, so that sums leave the range of a byte on both sides."""
    rng = np.random.Generator(np.random.Philox(seed))
    values = rng.integers(-128, 384, (height, width, channels))
    return np.clip(values, 0, 255).astype(np.uint8)


def by_pillow(pixels: np.ndarray, width: int, height: int, box: Box | None = None) -> np.ndarray:
    image = Image.fromarray(np.ascontiguousarray(pixels[:, :, :3]))
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC, box=box))


sides = st.one_of(st.integers(1, 20), st.integers(1, 150))


@given(
    height=sides,
    width=sides,
    new_height=sides,
    new_width=sides,
    channels=st.sampled_from([3, 4]),
    form=st.sampled_from(["best", "portable"]),
)
@settings(max_examples=250, deadline=None)
def test_any_size_equals_pillow(height, width, new_height, new_width, channels, form) -> None:
    pixels = noise(height, width, channels)
    with pytest.MonkeyPatch.context() as patched:
        if form == "portable":
            patched.setattr(passes, "_form", portable)
        got = resample(pixels, new_width, new_height)
    assert (got == by_pillow(pixels, new_width, new_height)).all()


@given(data=st.data(), height=sides, width=sides, new_height=sides, new_width=sides)
@settings(max_examples=150, deadline=None)
def test_any_box_equals_pillow(data, height, width, new_height, new_width) -> None:
    def part(side: int) -> tuple[float, float]:
        steps = st.integers(0, side * 61)
        low, high = sorted(data.draw(st.lists(steps, min_size=2, max_size=2, unique=True)))
        return low / 61, high / 61

    (left, right), (upper, lower) = part(width), part(height)
    box = (left, upper, right, lower)
    pixels = noise(height, width)
    expected = by_pillow(pixels, new_width, new_height, box)
    assert (resample(pixels, new_width, new_height, box) == expected).all()


@pytest.mark.parametrize(
    ("height", "width", "new_height", "new_width"),
    [
        (2000, 2000, 980, 1008),
        (1, 200, 28, 5600),
        (3000, 16, 1400, 28),
        (16, 3000, 28, 1400),
        (40, 6000, 28, 28),
        (1200, 1600, 1204, 1596),
        (333, 777, 333, 28),
        (333, 777, 28, 777),
    ],
)
def test_large_and_odd_sizes_equal_pillow(height, width, new_height, new_width) -> None:
    for channels in (3, 4):
        pixels = noise(height, width, channels, seed=channels)
        got = resample(pixels, new_width, new_height)
        assert (got == by_pillow(pixels, new_width, new_height)).all()


@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    new_height=st.integers(1, 60),
    new_width=st.integers(1, 60),
    down_first=st.booleans(),
    form=st.sampled_from(["best", "portable"]),
)
@settings(max_examples=100, deadline=None)
def test_both_orders_of_the_passes(height, width, new_height, new_width, down_first, form) -> None:
    """Of Pillow 12 and of Pillow 13, whichever is installed: one pass after the other is plain."""
    pixels = noise(height, width)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(passes, "_DOWN_FIRST", down_first)
        if form == "portable":
            patched.setattr(passes, "_form", portable)
        got = resample(pixels, new_width, new_height)
    lost_rows, lost_columns = height - new_height, width - new_width
    if down_first and lost_rows > 0 and lost_rows > 2 * lost_columns:
        between = by_pillow(pixels, width, new_height)
    else:
        between = by_pillow(pixels, new_width, height)
    assert (got == by_pillow(between, new_width, new_height)).all()


def test_the_box_of_a_picture_decoded_at_a_scale_is_exact() -> None:
    """1001 columns at a scale of 1/2 are 501, of which the last counts half."""
    pixels = noise(301, 501)
    box = (0.0, 0.0, 500.5, 300.5)
    assert (resample(pixels, 392, 224, box) == by_pillow(pixels, 392, 224, box)).all()


@given(
    patch=st.sampled_from([1, 2, 3, 7, 8, 14, 16, 20, 33]),
    merge=st.sampled_from([1, 2, 3]),
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
    channels=st.sampled_from([3, 4]),
    resized=st.booleans(),
    form=st.sampled_from(["best", "portable"]),
)
@settings(max_examples=150, deadline=None)
def test_patches_are_in_the_order_of_the_loop(
    slow_patches, patch, merge, rows, columns, channels, resized, form
) -> None:
    height, width = rows * patch * merge, columns * patch * merge
    size = (height + 5, width + 3) if resized else (height, width)
    pixels = noise(*size, channels)
    # A view inside a larger array, as in a pack, with guards around it.
    around = np.full((height * width // patch**2 + 2, 3 * patch**2), 77, np.uint8)
    with pytest.MonkeyPatch.context() as patched:
        if form == "portable":
            patched.setattr(passes, "_form", portable)
        prepare_patches(pixels, width, height, patch=patch, merge=merge)(around[1:-1])
    expected = slow_patches(by_pillow(pixels, width, height), patch, merge)
    assert (around[1:-1] == expected).all()
    assert (around[[0, -1]] == 77).all()


def test_rows_of_tiles() -> None:
    pixels = noise(300, 500, 4)
    out = np.empty((6, 3 * 64 * 64), np.uint8)
    prepare_patches(pixels, 192, 128, patch=64, merge=1)(out)
    resized = by_pillow(pixels, 192, 128)
    for number in range(6):
        top, left = number // 3 * 64, number % 3 * 64
        tile = resized[top : top + 64, left : left + 64].transpose(2, 0, 1)
        assert (out[number].reshape(3, 64, 64) == tile).all()


def test_the_second_half_may_be_written_often_and_in_any_thread() -> None:
    pixels = noise(90, 120)
    write = prepare_patches(pixels, 56, 84, patch=14, merge=2)
    outs = [np.zeros((24, 588), np.uint8) for _ in range(2)]
    for out in outs:
        write(out)
    assert (outs[0] == outs[1]).all()
    assert outs[0].any()


def test_wrong_arguments_are_refused_before_anything_is_written() -> None:
    pixels = noise(40, 50)
    for box in ((0, 0, 51, 40), (-1, 0, 50, 40), (5, 0, 5, 40), (0, 0, 50, float("nan"))):
        with pytest.raises(ValueError, match="not a region of a picture of 50x40 pixels"):
            resample(pixels, 28, 28, box)
    with pytest.raises(ValueError, match="not in multiples of 28"):
        prepare_patches(pixels, 30, 28, patch=14, merge=2)
    with pytest.raises(ValueError, match="not in multiples"):
        resample(pixels, 0, 28)
    for wrong in (pixels[:, ::2], pixels[:, :, :2], pixels.astype(np.int16)):
        with pytest.raises(ValueError, match="in rows"):
            resample(wrong, 28, 28)
    write = prepare_patches(pixels, 28, 28, patch=14, merge=2)
    for out in (np.zeros((4, 587), np.uint8), np.zeros((4, 588), np.int8), np.zeros(10, np.uint8)):
        with pytest.raises(ValueError, match=r"not a writable uint8 \(4, 588\)"):
            write(out)


def test_weights_are_kept_and_sum_to_one() -> None:
    first = weights(1000, 0.0, 1000.0, 333)
    assert weights(1000, 0.0, 1000.0, 333) is first
    assert (abs(first.factors.sum(axis=1) - (1 << PLACES)) <= first.count).all()
    assert (first.start, first.stop) == (0, 1000)
    assert not first.factors.flags.writeable


def fingerprint() -> str:
    seen = hashlib.sha256()
    for size in ((28, 28), (196, 140), (97, 61), (97, 28)):
        for box in (None, (1.5, 2.25, 90.0, 55.75)):
            seen.update(resample(noise(61, 97, 4), *size, box).tobytes())
    out = np.empty((24, 588), np.uint8)
    prepare_patches(noise(84, 56), 56, 84, patch=14, merge=2)(out)
    return seen.hexdigest() + hashlib.sha256(out.tobytes()).hexdigest()


WITHOUT_JIT = "import dataservice.pipeline.resampling.passes as p, dataservice.pipeline.resampling.portable as q; assert p._form is q"  # noqa: E501
WITHOUT_NUMBA = f"import sys; sys.modules['numba'] = None; {WITHOUT_JIT}"


@pytest.mark.parametrize(
    ("first", "disable"), [(WITHOUT_JIT, "1"), (WITHOUT_NUMBA, "0")], ids=["jit off", "no numba"]
)
def test_same_without_compiling(first: str, disable: str) -> None:
    code = f"{first}\nfrom tests.pipeline.test_resampling import fingerprint\nprint(fingerprint())"
    assert printed_by(code, disable_jit=disable) == fingerprint()
