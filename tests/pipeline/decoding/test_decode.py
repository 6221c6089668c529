from __future__ import annotations

import io
import random
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.pictures import chunk, encoded, noise, png, turned

from dataservice.core.vision import VisionRules
from dataservice.errors import ImageError
from dataservice.pipeline.decoding import DecodeLimits, by_pillow, decode_whole, png_chunks
from dataservice.pipeline.decoding.by_pillow import to_8_bits
from dataservice.pipeline.decoding.headers import picture_header
from dataservice.pipeline.decoding.turns import upright
from dataservice.storage.probe import MAX_PIXELS

RULES = VisionRules()


def rgb_of(data: bytes, max_pixels: int = MAX_PIXELS, rules: VisionRules = RULES) -> np.ndarray:
    header = picture_header(data, DecodeLimits(max_pixels=max_pixels))
    decoded = decode_whole(data, header, rules)
    assert decoded.box == (0, 0, header.width, header.height)
    assert decoded.pixels.flags.c_contiguous and decoded.pixels.dtype == np.uint8
    return decoded.pixels[:, :, :3]


RGB = Image.fromarray(noise(96, 64))
PALETTE = RGB.quantize(40)


# ---- colour --------------------------------------------------------------------------------------


def test_sixteen_bits_are_divided_by_257() -> None:
    every = np.arange(65_536, dtype=np.uint16)
    assert (to_8_bits(every) == np.rint(every / 257)).all()
    assert (to_8_bits(np.array([-5, 0, 65_535, 70_000], np.int32)) == [0, 0, 255, 255]).all()


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_transparent_grey_lies_over_white_at_every_depth(depth: int) -> None:
    """A row that holds black, a middle grey that is transparent, and white."""
    top = (1 << depth) - 1
    clear = top // 2
    values = [0, clear, top]
    bits = "".join(f"{value:0{depth}b}" for value in values)
    bits += "0" * (-len(bits) % 8)
    row = b"\0" + int(bits, 2).to_bytes(len(bits) // 8, "big")
    data = png(3, 1, depth, 0, row, chunk(b"tRNS", struct.pack(">H", clear)))
    expected = [255 if value == clear else round(value * 255 / top) for value in values]
    assert rgb_of(data)[0, :, 0].tolist() == expected


@pytest.mark.parametrize("depth", [8, 16])
def test_transparent_rgb_lies_over_white(depth: int) -> None:
    form = ">BBB" if depth == 8 else ">HHH"
    colours = [(10, 20, 30), (40, 50, 60)]
    if depth == 16:
        colours = [tuple(v * 257 for v in colour) for colour in colours]
    row = b"\0" + b"".join(struct.pack(form, *colour) for colour in colours)
    data = png(2, 1, depth, 2, row, chunk(b"tRNS", struct.pack(">HHH", *colours[1])))
    assert rgb_of(data)[0].tolist() == [[10, 20, 30], [255, 255, 255]]


def test_alpha_is_blended_with_white() -> None:
    pixels = np.array([[[200, 100, 0, 255], [200, 100, 0, 128], [200, 100, 0, 0]]], np.uint8)
    got = rgb_of(encoded(Image.fromarray(pixels), "PNG"))[0]
    assert got.tolist() == [[200, 100, 0], [227, 177, 127], [255, 255, 255]]


def test_an_empty_transparency_chunk_makes_nothing_transparent() -> None:
    palette = chunk(b"PLTE", bytes([9, 8, 7]))
    data = png(1, 1, 8, 3, b"\0\0", palette, chunk(b"tRNS", b""))
    assert rgb_of(data).tolist() == [[[9, 8, 7]]]


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "AVIF"])
def test_the_background_is_the_one_that_the_rules_name(kind: str) -> None:
    image = RGB.copy()
    image.putalpha(0)
    options = {"WEBP": {"lossless": True}, "AVIF": {"quality": 100}}.get(kind, {})
    got = rgb_of(encoded(image, kind, **options), rules=VisionRules(background=(9, 90, 200)))
    assert (got == (9, 90, 200)).all()


def test_cmyk_of_a_jpeg_is_inverted_ink() -> None:
    ink = np.zeros((16, 16, 4), np.uint8)
    ink[..., 0] = 255  # cyan, as Pillow counts; a JPEG stores the inverse
    got = rgb_of(encoded(Image.fromarray(ink, "CMYK"), "JPEG", quality=95))
    assert np.abs(got.astype(int) - [0, 255, 255]).max() <= 3


def test_samples_of_32_bits_are_refused() -> None:
    data = encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF")
    with pytest.raises(ImageError, match=r"^unsupported format: TIFF with samples of 32 bits"):
        rgb_of(data)


# ---- turns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_every_turn_of_every_format_that_has_one(kind: str) -> None:
    options = {"WEBP": {"lossless": True}, "AVIF": {"quality": 100, "subsampling": "4:4:4"}}
    image = Image.fromarray(noise(60, 34))
    plain = rgb_of(encoded(image, kind, **options.get(kind, {})))
    for orientation in range(1, 9):
        got = rgb_of(turned(image, kind, orientation, **options.get(kind, {})))
        assert np.array_equal(got, upright(plain, orientation))


# ---- the first picture ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_only_the_first_frame_is_decoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = PALETTE, PALETTE.rotate(180)
    if kind != "GIF":
        first, second = first.convert("RGB"), second.convert("RGB")
    lossless = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(first, kind, save_all=True, append_images=[second, first], **lossless)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.seek", None)
    assert (rgb_of(data) == rgb_of(encoded(first, kind, **lossless))).all()


def test_further_pictures_behind_a_jpeg_are_not_looked_at() -> None:
    data = encoded(RGB, "MPO", save_all=True, append_images=[RGB.rotate(180)])
    assert picture_header(data, DecodeLimits()).format == "JPEG"
    assert np.abs(rgb_of(data).astype(int) - np.asarray(RGB)).mean() < 20
    assert (rgb_of(data + b"\0" * 100) == rgb_of(data)).all()


@pytest.mark.parametrize("kind", ["JPEG2000", "PPM", "AVIF"])
def test_formats_that_pillow_alone_reads(kind: str) -> None:
    options = {"AVIF": {"quality": 100, "subsampling": "4:4:4"}}.get(kind, {})
    data = encoded(RGB, kind, **options)
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(rgb_of(data), np.asarray(image.convert("RGB")))


# ---- what a file claims --------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [False, True])
def test_a_text_that_inflates_to_gigabytes_is_not_read(behind: bool) -> None:
    deflater = zlib.compressobj(9)
    bomb = b"".join(deflater.compress(b"\0" * 2**20) for _ in range(64)) + deflater.flush()
    texts = [
        chunk(b"zTXt", b"Comment\0\0" + bomb),
        chunk(b"iTXt", b"Comment\0\1\0\0\0" + bomb),
        chunk(b"iCCP", b"profile\0\0" + bomb),
        struct.pack(">I", 4) + b"tEXta\0bc" + b"bad!",
    ]
    plain = encoded(RGB, "PNG")
    at = plain.rindex(b"IEND") - 4 if behind else plain.index(b"IDAT") - 4
    assert (rgb_of(plain[:at] + b"".join(texts) + plain[at:]) == np.asarray(RGB)).all()


def test_a_file_above_the_limit_is_refused_by_its_size() -> None:
    data = encoded(RGB, "PNG")
    limits = DecodeLimits(max_bytes=len(data) - 1)
    with pytest.raises(ImageError, match=rf"^too large: a file of {len(data)} bytes, the limit is"):
        picture_header(data, limits)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_an_elongated_picture_is_refused_by_its_header(kind: str) -> None:
    data = encoded(Image.new("RGB", (1206, 6)), kind)
    with pytest.raises(ImageError, match=r"^1206x6 pixels, more elongated than 200:1"):
        picture_header(data, DecodeLimits())


def test_a_png_of_very_many_chunks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(png_chunks, "_MAX_CHUNKS", 50)
    plain = encoded(RGB, "PNG")
    at = plain.rindex(b"IEND") - 4
    with pytest.raises(ImageError, match=r"^corrupt PNG: more than 50 chunks"):
        rgb_of(plain[:at] + chunk(b"teSt", b"") * 60 + plain[at:])


def test_a_jpeg_of_thousands_of_scans_is_refused() -> None:
    data = encoded(RGB, "JPEG", progressive=True)
    scan = data.index(b"\xff\xda")
    data = data[:scan] + data[scan : scan + 12] * 30_000 + data[scan:]
    with pytest.raises(ImageError, match=r"^too many pixels: JPEG of 96x64 in 300\d\d scans"):
        rgb_of(data, max_pixels=100_000)


def test_a_png_without_its_checksums_right_is_refused() -> None:
    data = bytearray(encoded(RGB, "PNG"))
    data[data.index(b"IDAT") + 40] ^= 1
    with pytest.raises(ImageError, match=r"^corrupt PNG: a wrong CRC of chunk 'IDAT'"):
        rgb_of(bytes(data))


GOOD = {
    "JPEG": encoded(RGB, "JPEG"),
    "progressive": encoded(RGB, "JPEG", progressive=True),
    "PNG": encoded(RGB, "PNG"),
    "palette": encoded(PALETTE, "PNG"),
    "WEBP": encoded(RGB, "WEBP"),
    "lossless": encoded(RGB, "WEBP", lossless=True),
    "GIF": encoded(PALETTE, "GIF"),
    "BMP": encoded(RGB, "BMP"),
    "TIFF": encoded(RGB, "TIFF"),
    "PPM": encoded(RGB, "PPM"),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_cut_file_never_gives_other_pixels(name: str) -> None:
    data = GOOD[name]
    whole = rgb_of(data)
    said = set()
    for cut in random.Random(3).sample(range(len(data)), 60):
        try:
            assert (rgb_of(data[:cut]) == whole).all()
        except ImageError as error:
            said.add(str(error).split()[0])
    assert "truncated" in said


@given(
    name=st.sampled_from(sorted(GOOD)),
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=8),
    cut=st.integers(0, 2**16),
)
@settings(max_examples=150, deadline=None)
def test_any_change_decodes_or_is_an_image_error(name, changes, cut) -> None:
    data = bytearray(GOOD[name])
    for at, value in changes:
        data[at % len(data)] = value
    data = bytes(data[: max(cut, 64)])
    try:
        rgb_of(data, max_pixels=2_000_000)
    except ImageError as error:
        said = error.reason
    else:
        said = "decoded"
    assert len(said) > 5 and "0x7f" not in said


@given(data=st.binary(max_size=400))
@settings(max_examples=100, deadline=None)
def test_bytes_that_are_no_picture(data) -> None:
    with pytest.raises(ImageError):
        rgb_of(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty: the file has no bytes"),
        (b"<!DOCTYPE html><html><body>404</body>", "not an image: an HTML page"),
        (b"\xef\xbb\xbf<?xml version='1.0'?>\n<svg xmlns=''/>", "unsupported format: SVG"),
        (b"\0\0\0\x20ftypheic", "unsupported format: HEIC"),
        (b"RIFF\0\0\0\0WAVEfmt ", "unsupported format: RIFF WAVE"),
        (b'{"error": "not found"}', "not an image in a known format"),
        (b"\xff\xd8\xff\xc1\0\x11\x0c\0\x20\0\x20\3" + bytes(30), "unsupported format: JPEG of 12"),
    ],
    ids="empty html svg heic wave json twelve-bit".split(),
)
def test_reasons_are_of_a_known_kind(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match="^" + reason):
        rgb_of(data)


# ---- hostile files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        (chunk(b"pHYs", b"\0"),),
        (chunk(b"sRGB", b""),),
        (chunk(b"gAMA", b"\0"),),
        (chunk(b"cHRM", b"abc"),),
        (chunk(b"gAMA", bytes(4))[:-1] + b"\x07",),
        (chunk(b"tRNS", b"\1"),),
        (chunk(b"acTL", b"\0"),),
        (chunk(b"acTL", bytes(8)), chunk(b"fcTL", struct.pack(">5L6x", 9, 400, 400, 0, 0))),
        (chunk(b"acTL", bytes(8)), chunk(b"fcTL", struct.pack(">5L6x", 0, 2, 2, 2, 2))),
    ],
    ids="phys srgb gamma chroma crc transparency actl outside offset".split(),
)
def test_damage_beside_the_pixels_of_a_png_does_not_cost_the_picture(extra) -> None:
    data = png(4, 4, 8, 2, (b"\0" + b"\xff\0\0" * 4) * 4, *extra)
    assert (rgb_of(data) == (255, 0, 0)).all()


def test_a_png_whose_rows_are_not_all_there() -> None:
    rows = (b"\0" + b"\1\2\3" * 96) * 64
    for kept in (0, 10, 63):
        with pytest.raises(ImageError, match=r"^truncated PNG"):
            rgb_of(png(96, 64, 8, 2, rows[: kept * 289]))
    black = b"\0" + bytes(288)
    assert not rgb_of(png(96, 64, 8, 2, black * 64)).any()
    assert not rgb_of(png(96, 64, 8, 2, black * 64 + b"behind")).any()
    assert not rgb_of(png(96, 3, 1, 0, bytes(13) * 3)).any()


def interlaced(rows: bytes) -> bytes:
    data = bytearray(png(5, 3, 8, 0, rows))
    data[28] = 1
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def test_an_interlaced_png_whose_last_pass_is_not_there() -> None:
    """Of 5x3 pixels the passes have 1, 1, 0, 1, 3, 4 and 5, those of the sixth in two rows."""
    passes = [b"\0" + bytes([9]) * n for n in (1, 1, 1, 3, 2, 2, 5)]
    assert (rgb_of(interlaced(b"".join(passes))) == 9).all()
    with pytest.raises(ImageError, match=r"^truncated PNG"):
        rgb_of(interlaced(b"".join(passes[:-1])))


@pytest.mark.parametrize(
    "data",
    [
        png(4, 4, 8, 2, bytes(52), chunk(b"IHDR", struct.pack(">II5B", 9**5, 9**5, 8, 2, 0, 0, 0))),
        png(4, 4, 8, 3, bytes(20)),
        encoded(Image.new("L", (4, 4)), "GIF")[:6] + struct.pack("<HH", 13_000, 13_000) + b"\0" * 3
        + b",\0\0\0\0\4\0\4\0\0\2\1\0\0;",
        b"P6\n#" + b"x" * 1_000_000,
        b"P6 two words 255\n",
    ],
    ids="two-sizes no-palette gif-screen netpbm-comment netpbm-words".split(),
)  # fmt: skip
def test_claims_are_refused_before_anything_is_decoded(data, monkeypatch) -> None:
    def load(*_) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.Image, "load", load)
    with pytest.raises(ImageError, match=r"^(corrupt|too many pixels)"):
        rgb_of(data)


def test_the_first_picture_of_an_animated_webp_costs_four_times_its_pixels() -> None:
    stored = io.BytesIO()
    RGB.save(stored, "WEBP", save_all=True, append_images=[RGB.rotate(90)])
    assert rgb_of(stored.getvalue(), 4 * 96 * 64).shape == (64, 96, 3)
    with pytest.raises(ImageError, match="too many pixels: animated WEBP of 96x64, the limit is"):
        rgb_of(stored.getvalue(), 4 * 96 * 64 - 1)


def test_white_is_zero_in_16_bits_too() -> None:
    stored = encoded(Image.fromarray(np.full((4, 4), 0x4040, np.uint16)), "TIFF")
    assert (rgb_of(stored) == 64).all()
    white_is_zero = stored.replace(b"\x06\x01\3\0\1\0\0\0\1\0", b"\x06\x01\3\0\1\0\0\0\0\0")
    assert white_is_zero != stored
    assert (rgb_of(white_is_zero) == 191).all()


def test_a_reason_is_never_a_bare_number_or_the_name_of_an_error() -> None:
    tiff = encoded(RGB, "TIFF")
    at = tiff.index(struct.pack("<HHL", 259, 3, 1)) + 8
    unknown = tiff[:at] + struct.pack("<H", 60_000) + tiff[at + 2 :]
    with pytest.raises(ImageError, match=r"a field or value 60000 is missing or unknown"):
        rgb_of(unknown)
    with pytest.raises(ImageError, match=r"^corrupt PNG: its header cannot be read"):
        rgb_of(png(4, 4, 3, 0, bytes(20)))


SLOW = {
    "raw": b"P6 96 64 100\n" + bytes(96 * 64 * 3),
    "plain": b"P3 96 64 255\n" + b"7 " * 96 * 64 * 3,
    "runs": struct.pack("<2sIHHI", b"BM", 58, 0, 0, 58)
    + struct.pack("<IiiHHIIiiIII", 40, 96, 64, 1, 8, 1, 0, 0, 0, 1, 0, 0)
    + b"\x60\x00\x00\x00" * 64,
}
"""What Pillow decodes in Python."""


@pytest.mark.parametrize("form", SLOW)
@pytest.mark.parametrize("limit", ["_MAX_SLOW_PIXELS", "_MAX_SLOW_BYTES"])
def test_what_is_decoded_in_python_has_limits_of_its_own(
    form: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rgb_of(SLOW[form]).shape == (64, 96, 3)
    monkeypatch.setattr(by_pillow, limit, 100)
    with pytest.raises(ImageError, match=r"^too many pixels: 96x64 in \d+ bytes of a rare form of"):
        rgb_of(SLOW[form])


def test_comments_in_a_plain_ppm_do_not_take_minutes() -> None:
    data = SLOW["plain"][:-2] + b"\n#\n 7"
    assert rgb_of(data).shape == (64, 96, 3)
    with pytest.raises(ImageError, match=r"^corrupt PPM: more than 10000 comments"):
        rgb_of(data.replace(b"\n#\n", b"\n#\n" * 10_001))
