from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataservice.core.packspec import ImageSpec
from dataservice.core.vision import VisionRules, target_size
from dataservice.errors import ConfigError, ImageError
from dataservice.pipeline import images
from dataservice.pipeline.images import (
    DecodeLimits,
    check_pillow,
    decode_pixels,
    decoder_fingerprint,
    patchify,
)

RULES = VisionRules(patch=14, merge=2, min_pixels=28 * 28, max_pixels=28 * 28 * 40)
LIMITS = DecodeLimits()
ORIENTATION = 0x0112


def noise(width: int, height: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Smooth enough that JPEG keeps something of it, different everywhere."""
    rng = np.random.Generator(np.random.Philox(seed))
    small = rng.integers(0, 256, (height // 4 + 2, width // 4 + 2, channels), np.uint8)
    return np.repeat(np.repeat(small, 4, 0), 4, 1)[:height, :width].squeeze()


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    stored = io.BytesIO()
    image.save(stored, kind, **options)
    return stored.getvalue()


def spec_of(width: int, height: int, rules: VisionRules = RULES, **changes) -> ImageSpec:
    target_height, target_width = target_size(
        height,
        width,
        patch=rules.patch,
        merge=rules.merge,
        min_pixels=rules.min_pixels,
        max_pixels=rules.max_pixels,
    )
    values = {
        "shard": 0,
        "member": "a.jpg",
        "offset": 0,
        "stored_bytes": 0,
        "size_bytes": 0,
        "method": 0,
        "crc32": 0,
        "width": width,
        "height": height,
        "target_width": target_width,
        "target_height": target_height,
    }
    return ImageSpec(**(values | changes))


def decoded(data: bytes, spec: ImageSpec, rules: VisionRules = RULES, limits=LIMITS) -> np.ndarray:
    num_patches = spec.target_width * spec.target_height // rules.patch**2
    # A view inside a larger array, as in a pack, with guards around it.
    around = np.full((num_patches + 2, 3 * rules.patch**2), 77, np.uint8)
    patchify(decode_pixels(data, spec, limits), rules, around[1:-1])
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
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = encoded(Image.fromarray(noise(130, 60)), kind, exif=exif)
    assert upright_size(data) == ((60, 130) if orientation >= 5 else (130, 60))
    assert_as(patches_of, data)


def test_an_orientation_behind_the_pixels_counts_as_the_index_has_it(patches_of) -> None:
    """Of a compressed PNG the index does not look there."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    plain = encoded(Image.fromarray(noise(130, 60)), "PNG")
    data = encoded(Image.fromarray(noise(130, 60)), "PNG", exif=exif)
    start = data.index(b"eXIf") - 4
    stop = start + 12 + int.from_bytes(data[start : start + 4], "big")
    end = data.index(b"IEND") - 4
    data = data[:start] + data[stop:end] + data[start:stop] + data[end:]
    turned, stored = spec_of(60, 130), spec_of(130, 60)
    size = turned.target_width, turned.target_height
    assert (decoded(data, turned) == patches_of(data, *size, RULES.patch, RULES.merge)).all()
    assert (decoded(data, stored) == decoded(plain, stored)).all()


def test_a_picture_that_has_its_planned_size_is_not_resampled(slow_patches) -> None:
    pixels = noise(56, 84)
    data = encoded(Image.fromarray(pixels), "PNG")
    spec = spec_of(56, 84)
    assert (spec.target_width, spec.target_height) == (56, 84)
    assert (decoded(data, spec) == slow_patches(pixels, 14, 2)).all()


@given(
    patch=st.sampled_from([2, 3, 14]),
    merge=st.sampled_from([1, 2, 3]),
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_patch_order_equals_the_loop(slow_patches, patch, merge, rows, columns) -> None:
    rules = VisionRules(patch=patch, merge=merge)
    height, width = rows * patch * merge, columns * patch * merge
    pixels = noise(width, height).reshape(height, width, 3)
    out = np.empty((height * width // patch**2, 3 * patch**2), np.uint8)
    patchify(pixels, rules, out)
    assert (out == slow_patches(pixels, patch, merge)).all()


@given(width=st.integers(20, 400), height=st.integers(20, 400), seed=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_any_size_equals_the_reference(patches_of, width, height, seed) -> None:
    assert_as(patches_of, encoded(Image.fromarray(noise(width, height, seed=seed)), "JPEG"))


JPEG = encoded(RGB, "JPEG", quality=85)


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header promises a size and whose data end at once."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    image_data = chunk(b"IDAT", zlib.compress(b"\0"))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + image_data + chunk(b"IEND", b"")


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
        (png_of(150, 90), "^truncated PNG"),
    ],
    ids="jpeg png webp head gif empty svg postscript png-data".split(),
)
def test_damaged_pictures_say_why(data, reason) -> None:
    spec = spec_of(150, 90)
    reasons = set()
    for _ in range(2):
        with pytest.raises(ImageError, match=reason) as caught:
            decode_pixels(data, spec, LIMITS)
        reasons.add(caught.value.reason)
    assert len(reasons) == 1
    assert "0x" not in reasons.pop()


def test_size_is_checked_before_decoding(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    with pytest.raises(ImageError, match="JPEG is 150x90 pixels upright, the index says 151x90"):
        decoded(JPEG, spec_of(151, 90))
    with pytest.raises(ImageError, match="too many pixels: JPEG of 150x90, the limit is 13499"):
        decoded(JPEG, spec_of(150, 90), limits=DecodeLimits(max_pixels=150 * 90 - 1))
    bomb = png_of(60_000, 60_000)
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


def test_fingerprint_names_the_library_and_does_not_change() -> None:
    text = decoder_fingerprint()
    assert text.startswith(("pillow-simd ", "pillow "))
    assert "libjpeg_turbo " in text and "probe " in text
    decoder_fingerprint.cache_clear()
    assert decoder_fingerprint() == text


def test_check_pillow(monkeypatch) -> None:
    check_pillow()
    monkeypatch.setattr(images.importlib.metadata, "version", lambda _: "1.0")
    with pytest.raises(ConfigError, match=r"pillow 1\.0 and pillow-simd 1\.0 are both installed"):
        check_pillow()


def test_check_pillow_finds_overwritten_files_and_missing_codecs(monkeypatch) -> None:
    monkeypatch.setattr(images.features, "check", lambda name: name != "webp")
    with pytest.raises(ConfigError, match="was built without webp"):
        check_pillow()
    monkeypatch.setattr(images.PIL, "__version__", "99.0")
    with pytest.raises(ConfigError, match=r"the files are those of 99\.0"):
        check_pillow()
