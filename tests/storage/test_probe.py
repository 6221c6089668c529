from __future__ import annotations

import io
import random
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
        self.read_bytes = self.calls = 0

    def __call__(self, offset: int, size: int) -> bytes:
        part = self.data[offset : offset + size]
        self.read_bytes += len(part)
        self.calls += 1
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
    assert source.read_bytes <= (8 + 64) * 1024


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
    data = save(noise(700, 500), "PNG")
    assert check(data).read_bytes <= 8 * 1024
    for file_format in ("BMP", "TIFF", "PPM"):
        assert check(save(noise(700, 500), file_format)).read_bytes <= 16 * 1024


def test_a_header_behind_large_segments() -> None:
    profile = random.Random(2).randbytes(150_000)
    for file_format in ("JPEG", "PNG"):
        source = check(save(noise(50, 40), file_format, icc_profile=profile, exif=exif(6)))
        assert source.read_bytes < 40_000


def test_exif_in_several_segments_and_with_its_directory_at_the_end() -> None:
    entry = struct.pack("<HHLHxx", 0x0112, 3, 1, 6)
    tiff = b"II*\0" + struct.pack("<L", 60_000)
    tiff = tiff.ljust(60_000, b"\0") + b"\1\0" + entry + bytes(4)
    data = save(noise(40, 30), "JPEG", exif=b"Exif\0\0" + tiff)
    check(data)
    assert probe(Source(data), len(data)).width == 30
    plain = save(noise(40, 30), "JPEG")
    for part in (tiff[30_000:], tiff[:30_000]):
        body = b"Exif\0\0" + part
        plain = plain[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + plain[2:]
    check(plain)
    assert probe(Source(plain), len(plain)).width == 30


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
        (b"<html>not found</html>", "not an image"),
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
    for side, reason in (
        (50_000, "too many pixels: 50000x50000"),
        (0, "no pixels: the header says 0x0"),
    ):
        png[16:24] = struct.pack(">II", side, side)
        with pytest.raises(ImageError, match=reason):
            probe(Source(bytes(png)), len(png))
    png[16:24] = struct.pack(">II", 65_536, 2_000)
    with pytest.raises(ImageError, match="65536x2000, the limit of a side is 65535"):
        probe(Source(bytes(png)), len(png))
    png[16:24] = struct.pack(">II", 5_000, 5_000)
    with pytest.raises(ImageError, match="too many pixels or truncated: 5000x5000 in a file of"):
        probe(Source(bytes(png)), len(png))
    assert probe(Source(bytes(png) + bytes(3_000)), len(png) + 3_000).width == 5_000


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"P6 4 3 255\n", (4, 3)),
        (b"P5\n# a comment\n4#another\n3\t65535\n", (4, 3)),
        (b"P4 4 3\n", (4, 3)),
        (b"P1\n#" + b"x" * 20_000 + b"\n4 3\n", (4, 3)),
        (b"P6 4 3 0\n", "the largest value is 0"),
        (b"P6 4 3 65536\n", "the largest value is 65536"),
        (b"P6 4 -3 255\n", "no width, height and largest value"),
        (b"P6 4 3", "no width, height and largest value"),
        (b"P6 0 0 255\n", "no pixels"),
        (b"P1\n#" + b"x" * 1_000_000 + b"\n4 3\n", "no width, height and largest value"),
    ],
)
def test_netpbm_headers(data: bytes, said: tuple[int, int] | str) -> None:
    if isinstance(said, tuple):
        header = probe(Source(data), len(data))
        assert (header.width, header.height, header.format) == (*said, "PPM")
    else:
        with pytest.raises(ImageError, match=said):
            probe(Source(data), len(data))


def test_a_text_that_begins_with_the_letters_of_a_bmp() -> None:
    text = b"BMW is a car; many a text begins with these letters"
    with pytest.raises(ImageError, match="not an image"):
        probe(Source(text), len(text))


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


# ---- hostile files


def test_no_file_takes_long() -> None:
    """Tiny segments, chunks and blocks over 8 MiB: a limited number of steps, a clear reason."""
    size = 8 * 1024 * 1024
    for data in (
        b"\xff\xd8" + b"\xff\xe0\0\2" * (size // 4),
        b"\xff\xd8" + b"\xff" * size,
        b"\xff\xd8\xff" + b"\0" * size,
        b"GIF89a" + bytes(7) + b"!\xfe\1a\0" * (size // 5),
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", bytes(13)) + chunk(b"tEXt", b"") * (size // 12),
    ):
        source = Source(data)
        with pytest.raises(ImageError, match=r"corrupt|truncated"):
            probe(source, len(data))
        assert source.calls < 70_000
    png = save(noise(4, 4), "PNG")
    webp = b"RIFF" + struct.pack("<L4s4sLL", size, b"WEBP", b"VP8X", 10, 8) + bytes(size)
    source = Source(webp)
    assert probe(source, len(webp)).width == 1
    assert source.calls < 70_000
    many = png[:33] + chunk(b"IDAT", b"x") * 500_000
    source = Source(many)
    assert probe(source, len(many)).width == 4
    assert source.calls < 100


def test_a_tiff_whose_tags_name_its_bytes_again_and_again() -> None:
    size = 400_000
    tags = b"".join(struct.pack("<HHLL", 0xC000 + n, 7, size, 8) for n in range(8000))
    data = b"II*\0" + struct.pack("<L", size + 8) + bytes(size) + struct.pack("<H", 8000) + tags
    source = Source(data + bytes(4))
    with pytest.raises(ImageError, match="corrupt TIFF: the header names more bytes"):
        probe(source, len(source.data))
    assert source.read_bytes < 3 * len(data)


# ---- every kind of picture


@st.composite
def pictures(draw: st.DrawFn) -> bytes:
    file_format = draw(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]))
    mode = draw(st.sampled_from({
        "JPEG": ["RGB", "L", "CMYK"],
        "PNG": ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"],
        "WEBP": ["RGB", "RGBA"],
        "GIF": ["P", "L"],
        "BMP": ["RGB", "L", "P", "1"],
        "TIFF": ["RGB", "RGBA", "L", "CMYK", "1"],
        "PPM": ["RGB", "L", "1"],
    }[file_format]))  # fmt: skip
    width, height = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    image = Image.frombytes(
        "RGB", (width, height), draw(st.randoms()).randbytes(3 * width * height)
    )
    image = image.convert("I").convert("I;16") if mode == "I;16" else image.convert(mode)
    options: dict[str, object] = {}
    if file_format in ("JPEG", "PNG", "WEBP", "TIFF"):
        turn = draw(st.none() | st.integers(0, 9))
        if turn is not None:
            options["exif"] = exif(turn)
        if draw(st.booleans()):
            options["icc_profile"] = bytes(draw(st.integers(1, 20_000)))
    if file_format in ("JPEG", "WEBP") and draw(st.booleans()):
        options["xmp"] = xmp(draw(st.integers(0, 9)))
    if file_format == "JPEG":
        options |= {"progressive": draw(st.booleans()), "quality": draw(st.integers(1, 95))}
        options["comment"] = draw(st.binary(max_size=300))
    if file_format == "WEBP":
        options["lossless"] = draw(st.booleans())
    if file_format == "PNG":
        options["compress_level"] = draw(st.integers(0, 9))
    return save(image, file_format, **options)


@settings(deadline=None, max_examples=250)
@given(data=pictures())
def test_sizes_are_those_of_pillow(data: bytes) -> None:
    check(data)


@settings(deadline=None, max_examples=150)
@given(
    data=pictures(),
    changes=st.lists(st.tuples(st.integers(0, 600), st.binary(min_size=1, max_size=8)), max_size=3),
    cut=st.integers(0, 3000),
)
def test_damage_gives_an_image_error_or_a_size_whatever_is_read_first(
    data: bytes, changes: list[tuple[int, bytes]], cut: int
) -> None:
    for at, value in changes:
        data = data[:at] + value + data[at + len(value) :]
    data = data[: max(len(data) - max(cut - 1000, 0), 0)]
    outcomes = []
    for first in (20, 64, 1000, len(data)):
        try:
            outcomes.append(probe(Source(data), len(data), head=data[:first]))
        except ImageError:
            outcomes.append(None)
    assert len(set(outcomes[1:])) == 1
