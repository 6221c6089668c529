from __future__ import annotations

import io
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.pictures import encoded

from dataservice.core.vision import VisionRules
from dataservice.errors import ImageError
from dataservice.pipeline.decoding import DecodeLimits, decode_whole
from dataservice.pipeline.decoding.headers import picture_header
from dataservice.pipeline.decoding.whole_jpeg import WholeJpeg, only_scan

END = b"\xff\xd9"
LIMITS = DecodeLimits(max_pixels=10**6)


def jpeg(width: int, height: int, mode: str = "RGB", *, flat: bool = False, **options) -> bytes:
    pixels = random.Random(width).randbytes(width * height * 3)
    if flat:
        pixels = bytes([200]) * len(pixels)
    image = Image.frombytes("RGB", (width, height), pixels).convert(mode)
    return encoded(image, "JPEG", **options)


def pixels_of(data: bytes) -> np.ndarray:
    with WholeJpeg(data) as image:
        image.load()
        return np.asarray(image)


def pixels_of_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image)


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from(["RGB", "L", "CMYK"]),
    st.booleans(),
    st.fixed_dictionaries(
        {"quality": st.sampled_from([1, 75, 100])},
        optional={
            "progressive": st.just(True),
            "optimize": st.just(True),
            "restart_marker_blocks": st.integers(1, 9),
        },
    ),
    st.sampled_from([b"", b"behind", END, b"\xff\xd8\xff\xe0"]),
)
def test_pixels_are_those_of_pillow(width, height, mode, flat, options, behind) -> None:
    data = jpeg(width, height, mode, flat=flat, **options) + behind
    assert (pixels_of(data) == pixels_of_pillow(data)).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("marker", [END, b"\xff\xfe\0\4ab", b"\xff\xdc\0\4\0\x40"])
def test_data_that_end_early_are_no_picture(mode: str, marker: bytes) -> None:
    """Not at the end of the file, where anybody would notice, but at a marker."""
    data = jpeg(96, 200, mode)
    cut = data[: len(data) // 2].rstrip(b"\xff") + marker + END
    assert pixels_of_pillow(cut).shape[:2] == (200, 96)
    with pytest.raises(ImageError, match=r"^truncated JPEG: its data end before its last row$"):
        decode_whole(cut, picture_header(cut, LIMITS), VisionRules())


def test_a_height_that_the_data_do_not_fill() -> None:
    data = bytearray(jpeg(96, 40))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 2] = (400).to_bytes(2, "big")
    with pytest.raises(ImageError, match="truncated JPEG"):
        decode_whole(bytes(data), picture_header(bytes(data), LIMITS), VisionRules())


def test_a_picture_of_many_scans_is_left_to_the_decoder() -> None:
    data = jpeg(96, 64, progressive=True)
    fewer = data[: data.rindex(b"\xff\xda")] + END
    assert (pixels_of(fewer) == pixels_of_pillow(fewer)).all()


@pytest.mark.parametrize("alone", [b"\xff\xd0", b"\xff\x00"])
def test_a_marker_without_a_segment_hides_no_frame(alone: bytes) -> None:
    """What a decoder steps over as two bytes is not taken for a segment, with a frame behind it."""
    progressive = jpeg(96, 64, progressive=True)
    baseline = jpeg(96, 64)
    step = 2 + 0xFFE5  # the length that a reader finds that expects one
    filling = b"\xff\xe5" + (60_000).to_bytes(2, "big") + bytes(59_998)
    lacking = step - len(filling) - 2 - 4
    size = 2 + lacking + len(baseline) - 2
    hidden = b"\xff\xe6" + size.to_bytes(2, "big") + bytes(lacking) + baseline[2:]
    data = progressive[:2] + alone + filling + hidden + progressive[2:]
    assert only_scan(data) == -1
    assert only_scan(baseline) > 0
    assert (pixels_of(data) == pixels_of_pillow(data)).all()
