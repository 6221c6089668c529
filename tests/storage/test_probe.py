from __future__ import annotations

import io
import random
import struct
import zlib

import pytest
from PIL import Image, ImageOps

from dataservice.errors import ImageError
from dataservice.storage.probe import FIRST_READ_BYTES, ImageHeader, probe

TURNED = (5, 6, 7, 8)


def noise(width: int, height: int) -> Image.Image:
    data = random.Random(1).randbytes(width * height * 3)
    return Image.frombytes("RGB", (width, height), data)


def save(image: Image.Image, file_format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    tags[0x010E] = "a description"
    return tags.tobytes()


def xmp(orientation: int) -> bytes:
    return f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/>'.encode()


def pillow(data: bytes) -> ImageHeader:
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
        return ImageHeader(width=upright.width, height=upright.height, format=image.format or "")


class Source:
    """Parts of a picture in memory; remembers how much was read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.read_bytes = 0

    def __call__(self, offset: int, size: int) -> bytes:
        part = self.data[offset : offset + size]
        self.read_bytes += len(part)
        return part


def check(data: bytes) -> Source:
    source = Source(data)
    assert probe(source, len(data)) == pillow(data)
    return source


@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation(file_format: str, orientation: int | None) -> None:
    options = {} if orientation is None else {"exif": exif(orientation)}
    data = save(noise(61, 37), file_format, **options)
    header = probe(Source(data), len(data))
    assert header == pillow(data)
    upright = (37, 61) if orientation in TURNED else (61, 37)
    assert (header.width, header.height, header.format) == (*upright, file_format)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
def test_orientation_in_xmp(file_format: str) -> None:
    if file_format == "PNG":
        text = b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(6)
        data = insert_chunk(save(noise(40, 30), "PNG"), b"IDAT", b"iTXt", text)
    else:
        data = save(noise(40, 30), file_format, xmp=xmp(6))
    check(data)
    assert probe(Source(data), len(data)).width == 30


def chunk(kind: bytes, data: bytes) -> bytes:
    check_sum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check_sum)


def insert_chunk(png: bytes, before: bytes, kind: bytes, data: bytes) -> bytes:
    at = png.index(before) - 4
    return png[:at] + chunk(kind, data) + png[at:]


@pytest.mark.parametrize("size", [40, 300])
@pytest.mark.parametrize("one_idat", [True, False])
def test_png_orientation_behind_the_pixels(size: int, one_idat: bool) -> None:
    data = save(noise(size, size // 2), "PNG")
    if one_idat:
        pixels, at = b"", 8
        while at < len(data):
            length, kind = struct.unpack_from(">I4s", data, at)
            pixels += data[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
            at += length + 12
        data = data[:33] + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    data = data[:-12] + chunk(b"eXIf", exif(8)[6:]) + data[-12:]
    source = check(data)
    assert probe(Source(data), len(data)).width == size // 2
    assert source.read_bytes <= FIRST_READ_BYTES + 64 * 1024 + 16


@pytest.mark.parametrize("kind", [b"tEXt", b"zTXt"])
def test_png_orientation_as_imagemagick_writes_it(kind: bytes) -> None:
    profile = f"\nexif\n  {len(exif(6))}\n{exif(6).hex()}\n".encode()
    body = profile if kind == b"tEXt" else b"\0" + zlib.compress(profile)
    text = b"Raw profile type exif\0" + body
    data = insert_chunk(save(noise(40, 30), "PNG"), b"IDAT", kind, text)
    check(data)
    assert probe(Source(data), len(data)).width == 30


def test_no_more_is_read_than_the_header() -> None:
    data = save(noise(700, 500), "JPEG", quality=95, exif=exif(6))
    assert len(data) > 10 * FIRST_READ_BYTES
    assert check(data).read_bytes == FIRST_READ_BYTES
    data = save(noise(700, 500), "WEBP", quality=95)
    assert check(data).read_bytes == FIRST_READ_BYTES


def test_a_header_behind_large_segments() -> None:
    profile = random.Random(2).randbytes(150_000)
    for file_format in ("JPEG", "PNG"):
        check(save(noise(50, 40), file_format, icc_profile=profile, exif=exif(6)))


@pytest.mark.parametrize(
    ("file_format", "options"),
    [
        ("JPEG", {"progressive": True}),
        ("GIF", {}),
        ("BMP", {}),
        ("PPM", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"save_all": True, "append_images": [noise(33, 21)]}),
    ],
)
def test_other_forms(file_format: str, options: dict[str, object]) -> None:
    image = noise(33, 21)
    data = save(image.quantize(8) if file_format == "GIF" else image, file_format, **options)
    check(data)


def test_webp_with_alpha_and_gif_larger_than_its_screen() -> None:
    check(save(noise(33, 21).convert("RGBA"), "WEBP", exif=exif(5)))
    gif = bytearray(save(noise(33, 21).quantize(8), "GIF"))
    gif[6:10] = struct.pack("<HH", 10, 5)
    check(bytes(gif))


@pytest.mark.parametrize("kind", [1, 2, 4, 5])
def test_an_orientation_of_another_type(kind: int) -> None:
    entry = struct.pack("<HHL4s", 0x0112, kind, 1, b"\x06\0\0\0")
    tiff = b"II*\0\x08\0\0\0\x01\0" + entry + bytes(4) + struct.pack("<LL", 6, 7)
    data = save(noise(40, 30), "JPEG", exif=b"Exif\0\0" + tiff)
    assert probe(Source(data), len(data)).width == (30 if kind == 4 else 40)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"<html>not found</html>", "not a picture of a known format"),
        (b"\xff\xd8\xff\xd9", "no picture"),
        (b"\xff\xd8\xff\xe1\x00\x40Exif", "cut off"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0", "cut off"),
        (save(noise(800, 2), "PNG"), "more elongated than 200:1"),
    ],
)
def test_what_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        probe(Source(data), len(data))


def test_claims_of_size_are_bounded() -> None:
    png = bytearray(save(noise(4, 4), "PNG"))
    for side, reason in ((50_000, "more than 178956970"), (0, "0x0 pixels")):
        png[16:24] = struct.pack(">II", side, side)
        with pytest.raises(ImageError, match=reason):
            probe(Source(bytes(png)), len(png))


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_damage_gives_an_image_error_or_a_size(file_format: str) -> None:
    image = noise(9, 7)
    options = {"exif": exif(6)} if file_format in ("JPEG", "PNG", "WEBP") else {}
    data = save(image.quantize(4) if file_format == "GIF" else image, file_format, **options)
    rng = random.Random(3)
    for at in range(min(len(data), 250)):
        flipped = bytearray(data)
        flipped[at] = rng.randrange(256)
        for damaged in (data[:at], bytes(flipped)):
            try:
                header = probe(Source(damaged), len(damaged))
            except ImageError:
                continue
            assert header.width > 0 and header.height > 0
