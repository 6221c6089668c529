from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.pictures import ORIENTATION, encoded, image_spec, noise, png, turned

from dataservice.core.packspec import ImageSpec
from dataservice.core.vision import VisionRules
from dataservice.errors import ImageError
from dataservice.pipeline.images import DecodeLimits, ImageDecoder

RULES = VisionRules(patch=14, merge=2, min_pixels=28 * 28, max_pixels=28 * 28 * 40, exact=True)
LIMITS = DecodeLimits()


def spec_of(width: int, height: int) -> ImageSpec:
    return image_spec(width, height, RULES)


def decoded(data: bytes, spec: ImageSpec, rules: VisionRules = RULES, limits=LIMITS) -> np.ndarray:
    prepared = ImageDecoder(rules, limits).prepare(data, spec)
    num_patches = spec.target_width * spec.target_height // rules.patch**2
    # A view inside a larger array, as in a pack, with guards around it.
    around = np.full((num_patches + 2, 3 * rules.patch**2), 77, np.uint8)
    prepared(around[1:-1])
    assert (around[[0, -1]] == 77).all()
    return around[1:-1]


def upright_size(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data)) as image:
        turned = image.getexif().get(ORIENTATION, 1) >= 5
        return image.size[::-1] if turned else image.size


def assert_as(patches_of, data: bytes) -> None:
    spec = spec_of(*upright_size(data))
    expected = patches_of(data, spec.target_width, spec.target_height, RULES.patch, RULES.merge)
    got = decoded(data, spec)
    assert got.tobytes() == expected.tobytes()


RGB = Image.fromarray(noise(150, 90))
PALETTE = RGB.quantize(40)


@pytest.mark.parametrize(
    "data",
    [
        encoded(RGB, "JPEG", quality=80),
        encoded(RGB, "JPEG", quality=80, progressive=True),
        encoded(RGB.convert("L"), "JPEG"),
        encoded(RGB.convert("CMYK"), "JPEG"),
        encoded(RGB, "PNG"),
        encoded(Image.fromarray(noise(150, 90, 4)), "PNG"),
        encoded(Image.fromarray(noise(150, 90, 2), "LA"), "PNG"),
        encoded(RGB.convert("L"), "PNG"),
        encoded(RGB.convert("1"), "PNG"),
        encoded(PALETTE, "PNG"),
        encoded(PALETTE, "PNG", transparency=3),
        encoded(PALETTE, "PNG", transparency=bytes(range(40))),
        encoded(RGB, "PNG", transparency=(1, 2, 3)),
        encoded(Image.fromarray(noise(150, 90, 1).astype(np.uint16) * 257), "PNG"),
        encoded(RGB, "WEBP", quality=70),
        encoded(Image.fromarray(noise(150, 90, 4)), "WEBP", lossless=True),
        encoded(PALETTE, "GIF"),
        encoded(RGB, "BMP"),
        encoded(RGB, "TIFF"),
        encoded(RGB, "GIF", save_all=True, append_images=[Image.fromarray(noise(150, 90, seed=5))]),
    ],
    ids=(
        "jpeg progressive grey-jpeg cmyk png rgba grey-alpha grey bits palette palette-clear "
        "palette-alpha rgb-clear grey16 webp webp-alpha gif bmp tiff animated"
    ).split(),
)
def test_pixels_equal_the_reference(data, patches_of) -> None:
    assert_as(patches_of, data)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_turn(orientation, kind, patches_of) -> None:
    data = turned(Image.fromarray(noise(130, 60)), kind, orientation)
    assert upright_size(data) == ((60, 130) if orientation >= 5 else (130, 60))
    assert_as(patches_of, data)


def test_an_orientation_behind_the_pixels_counts_as_the_index_has_it(patches_of) -> None:
    """Of a compressed PNG the index does not look there."""
    plain = encoded(Image.fromarray(noise(130, 60)), "PNG")
    data = turned(Image.fromarray(noise(130, 60)), "PNG", 6)
    start = data.index(b"eXIf") - 4
    stop = start + 12 + int.from_bytes(data[start : start + 4], "big")
    end = data.index(b"IEND") - 4
    data = data[:start] + data[stop:end] + data[start:stop] + data[end:]
    sideways, stored = spec_of(60, 130), spec_of(130, 60)
    size = sideways.target_width, sideways.target_height
    assert (decoded(data, sideways) == patches_of(data, *size, RULES.patch, RULES.merge)).all()
    assert (decoded(data, stored) == decoded(plain, stored)).all()


def test_a_picture_that_has_its_planned_size_is_not_resampled(slow_patches) -> None:
    pixels = noise(56, 84)
    data = encoded(Image.fromarray(pixels), "PNG")
    spec = spec_of(56, 84)
    assert (spec.target_width, spec.target_height) == (56, 84)
    assert (decoded(data, spec) == slow_patches(pixels, 14, 2)).all()


@given(width=st.integers(20, 400), height=st.integers(20, 400), seed=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_any_size_equals_the_reference(patches_of, width, height, seed) -> None:
    assert_as(patches_of, encoded(Image.fromarray(noise(width, height, seed=seed)), "JPEG"))


JPEG = encoded(RGB, "JPEG", quality=85)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (JPEG[: len(JPEG) // 2], r"^truncated JPEG: image file is truncated \(\d+ bytes not"),
        (encoded(RGB, "PNG")[:900], "^truncated PNG: image file is truncated"),
        (encoded(RGB, "WEBP")[:900], "^truncated WEBP: its header says more bytes"),
        (JPEG[:10], "^truncated: the header is cut off"),
        (b"GIF86a-not", "^not an image in a known format .first bytes: 47 49 46 38 36 61 2d 6e"),
        (b"", "^empty: the file has no bytes"),
        (b"<svg></svg>", "^unsupported format: SVG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 150 90\n", "^unsupported format: Post"),
        (png(150, 90, 8, 2, b"\0"), "^truncated PNG"),
    ],
    ids="jpeg png webp head gif empty svg postscript png-data".split(),
)
def test_damaged_pictures_say_why(data, reason) -> None:
    spec = spec_of(150, 90)
    reasons = set()
    for _ in range(2):
        with pytest.raises(ImageError, match=reason) as caught:
            decoded(data, spec)
        reasons.add(caught.value.reason)
    assert len(reasons) == 1
    assert "0x" not in reasons.pop()


def test_size_is_checked_before_decoding(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    monkeypatch.setattr("simplejpeg.decode_jpeg", refuse)
    with pytest.raises(ImageError, match="JPEG is 150x90 pixels upright, the index says 151x90"):
        decoded(JPEG, spec_of(151, 90))
    with pytest.raises(ImageError, match="too many pixels: JPEG of 150x90, the limit is 13499"):
        decoded(JPEG, spec_of(150, 90), limits=DecodeLimits(max_pixels=150 * 90 - 1))
    bomb = png(60_000, 60_000, 8, 2, b"\0")
    with pytest.raises(ImageError, match="too many pixels: 60000x60000, the limit"):
        decoded(bomb, spec_of(60_000, 60_000))


def test_a_turn_that_the_index_did_not_see_is_refused() -> None:
    with pytest.raises(ImageError, match="JPEG is 150x90 pixels upright, the index says 90x150"):
        decoded(JPEG, spec_of(90, 150))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # as importing the module does elsewhere
def test_damaged_exif_counts_as_absent() -> None:
    broken = b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\x01\x12\x00\x03\0\0\0"
    data = encoded(RGB, "JPEG", exif=broken)
    spec = spec_of(150, 90)
    plain = encoded(RGB, "JPEG")
    assert (decoded(data, spec) == decoded(plain, spec)).all()
