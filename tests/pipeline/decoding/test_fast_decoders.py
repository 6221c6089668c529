"""The fast decoders against Pillow: what they accept, Pillow accepts with equal pixels."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import struct
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from support.pictures import chunk, damaged, encoded, noise
from support.pictures import png as png_file
from support.uncompiled import printed_by

from dataservice.core.compiled import has_compiler
from dataservice.core.vision import VisionRules
from dataservice.errors import ImageError
from dataservice.pipeline.decoding import DecodeLimits, decode_whole, jpeg, png, webp
from dataservice.pipeline.decoding.headers import picture_header

RULES = VisionRules(background=(10, 200, 90))
LIMITS = DecodeLimits(max_pixels=300_000)
RGB = Image.fromarray(noise(96, 64))
RGBA = Image.fromarray(noise(96, 64, 4))
GRAY_ALPHA = Image.fromarray(noise(96, 64, 2), "LA")
PALETTE = RGB.quantize(40)
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="numba compiles nothing here")


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(
        name + struct.pack("<L", len(data)) + data + b"\0" * (len(data) % 2)
        for name, data in chunks
    )
    return b"RIFF" + struct.pack("<L", len(body) + 4) + b"WEBP" + body


def chunks_of(data: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 12
    while at < len(data):
        name, size = struct.unpack_from("<4sL", data, at)
        found.append((name, data[at + 8 : at + 8 + size]))
        at += 8 + size + size % 2
    return found


JPEGS = {
    f"{colours} {subsampling} {'progressive' if progressive else 'baseline'}": encoded(
        RGB, "JPEG", quality=80, subsampling=subsampling, progressive=progressive, **options
    )
    for (colours, options), subsampling, progressive in itertools.product(
        [("ycc", {}), ("restarts", {"restart_marker_blocks": 3})],
        [0, 1, 2],
        [False, True],
    )
} | {
    "rgb": encoded(RGB, "JPEG", keep_rgb=True),
    "gray": encoded(RGB.convert("L"), "JPEG"),
    "gray progressive": encoded(RGB.convert("L"), "JPEG", progressive=True),
}
PNGS = {
    "rgb": encoded(RGB, "PNG"),
    "rgba": encoded(RGBA, "PNG"),
    "gray": encoded(RGB.convert("L"), "PNG"),
    "gray and alpha": encoded(GRAY_ALPHA, "PNG"),
    "bits": encoded(RGB.convert("1"), "PNG"),
    "palette": encoded(PALETTE, "PNG"),
    "palette of 2 bits": encoded(RGB.quantize(4), "PNG"),
    "palette of 4 bits": encoded(RGB.quantize(13), "PNG"),
    "palette and alpha": encoded(PALETTE, "PNG", transparency=bytes(range(40))),
    "rgb and clear": encoded(RGB, "PNG", transparency=RGB.getpixel((0, 0))),
    "gray and clear": encoded(RGB.convert("L"), "PNG", transparency=77),
}
WEBPS = {
    "lossy": encoded(RGB, "WEBP", quality=70),
    "lossless": encoded(RGB, "WEBP", lossless=True),
    "lossy alpha": encoded(RGBA, "WEBP", quality=60),
    "lossless alpha": encoded(RGBA, "WEBP", lossless=True),
    "metadata": encoded(RGB, "WEBP", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0", icc_profile=b"x" * 50),
}
GOOD = {
    f"{kind} {name}": data
    for kind, files in (("JPEG", JPEGS), ("PNG", PNGS), ("WEBP", WEBPS))
    for name, data in files.items()
}
CMYK = encoded(RGB.convert("CMYK"), "JPEG")
ANIMATED = encoded(RGB, "WEBP", save_all=True, append_images=[RGB.rotate(90)])
DEEP = encoded(Image.fromarray(noise(96, 64, 1).astype(np.uint16) * 257), "PNG")


@contextlib.contextmanager
def pillow_alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jpeg, "_by_turbo", lambda *_: None)
        patch.setattr(png, "_rows", None)
        patch.setattr(webp, "_by_libwebp", lambda *_: None)
        yield


@contextlib.contextmanager
def no_pillow() -> Iterator[None]:
    def load(*_: object) -> None:
        raise AssertionError("this is a picture for a fast decoder")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dataservice.pipeline.decoding.by_pillow.load", load)
        yield


def outcome(data: bytes, rules: VisionRules = RULES) -> np.ndarray | str:
    try:
        return decode_whole(data, picture_header(data, LIMITS), rules).pixels[:, :, :3]
    except ImageError as error:
        return error.reason


def assert_as_pillow(data: bytes) -> None:
    got = outcome(data)
    with pillow_alone():
        expected = outcome(data)
    assert type(got) is type(expected), (got, expected)
    assert np.array_equal(got, expected)


@needs_compiler
@pytest.mark.parametrize("name", GOOD)
def test_good_files_are_decoded_fast(name: str) -> None:
    with no_pillow():
        assert isinstance(outcome(GOOD[name]), np.ndarray)
    assert_as_pillow(GOOD[name])


@pytest.mark.parametrize("data", [CMYK, ANIMATED, DEEP], ids=["cmyk", "animated", "16 bits"])
def test_what_is_rare_is_for_pillow(data: bytes) -> None:
    with pytest.raises(AssertionError, match="fast decoder"), no_pillow():
        outcome(data)
    assert isinstance(outcome(data), np.ndarray)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@given(data=st.data(), seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_damage_is_taken_as_pillow_takes_it(kind: str, data: st.DataObject, seed: int) -> None:
    name = data.draw(st.sampled_from([name for name in GOOD if name.startswith(kind)]))
    assert_as_pillow(damaged(GOOD[name], random.Random(seed)))


def strange_png(rng: random.Random) -> bytes:
    """Checksums are right; all else may be anything, and is mostly what it should be."""
    colour, depth = rng.choice(
        [(0, 1), (0, 2), (0, 4), (0, 8), (2, 8), (3, 1), (3, 2), (3, 4), (3, 8), (4, 8), (6, 8)]
    )
    width, height, top = rng.randint(1, 70), rng.randint(1, 9), rng.choice([1, 3, 7, 255])
    row_bytes = (width * depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour] + 7) // 8
    rows = b"".join(
        bytes([5 if rng.random() < 0.01 else rng.choice([0, 1, 2, 3, 4, 4])])
        + bytes(byte % (top + 1) for byte in rng.randbytes(row_bytes))
        for _ in range(height)
    )
    rows = rng.choice([rows] * 12 + [rows[: rng.randrange(len(rows))], rows + bytes(9)])
    stream = zlib.compress(rows, rng.choice([0, 1, 9]))
    stream = rng.choice(
        [stream] * 12 + [stream[: -rng.randint(1, 6)], stream[:-4] + bytes(4), stream + b"junk"]
    )
    extra = []
    if colour == 3 or rng.random() < 0.1:
        extra.append(chunk(b"PLTE", rng.randbytes(rng.choice([3, 9, 48, 50, 120, 768, 771]))))
    if rng.random() < 0.4:
        size = {0: 2, 2: 6}.get(colour, rng.choice([0, 1, 2, 15, 40, 200]))
        size += rng.random() < 0.1
        extra.append(chunk(b"tRNS", rng.choice([rng.randbytes(size), bytes(size)])))
    if extra and rng.random() < 0.1:
        extra.append(rng.choice(extra))
    cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.choice([0, 0, 1, 3])))
    parts = [stream[a:b] for a, b in itertools.pairwise([0, *cuts, len(stream)])]
    data = png_file(width, height, depth, colour, parts, *extra)
    if rng.random() < 0.1:
        at = data.rindex(b"IDAT") - 4
        late = chunk(rng.choice([b"tEXt", b"PLTE", b"tRNS", b"teST", b"TEST"]), b"abcdef")
        data = data[:at] + late + data[at:]
    return data[:-12] if rng.random() < 0.05 else data


@given(seed=st.integers(0, 2**40))
@settings(max_examples=400, deadline=None)
def test_pngs_of_all_sorts_are_taken_as_pillow_takes_them(seed: int) -> None:
    assert_as_pillow(strange_png(random.Random(seed)))


@given(
    parts=st.lists(
        st.sampled_from(
            [(b"VP8X", bytes([flags]) + b"\0\0\0" + struct.pack("<HBHB", 95, 0, 63, 0))
             for flags in (0, 0x10, 0x20)]
            + [part for data in WEBPS.values() for part in chunks_of(data)]
            + [(b"JUNK", b"abc"), (b"EXIF", b"II*\0"), (b"XMP ", b"<x/>"), (b"ALPH", b"\0")]
        ),
        min_size=1,
        max_size=4,
    ),
    behind=st.sampled_from([b"", b"\0", b"behind"]),
)  # fmt: skip
@example(parts=[*chunks_of(WEBPS["lossy"]), *chunks_of(WEBPS["lossless"])], behind=b"")
@settings(max_examples=300, deadline=None)
def test_webps_put_together_anyhow(parts: list[tuple[bytes, bytes]], behind: bytes) -> None:
    assert_as_pillow(riff(*parts) + behind)


def test_memory_that_lacks_is_not_taken_for_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would give another size for it."""

    def decode_jpeg(*_: object, **__: object) -> None:
        raise ValueError("Insufficient memory (case 4)")

    monkeypatch.setattr("simplejpeg.decode_jpeg", decode_jpeg)
    with pytest.raises(MemoryError):
        outcome(JPEGS["gray"])


def test_a_broken_profile_or_comment_does_not_cost_a_jpeg() -> None:
    plain = JPEGS["ycc 0 baseline"]
    segments = b"".join(
        b"\xff" + bytes([marker]) + struct.pack(">H", len(body) + 2) + body
        for marker, body in (
            (0xE2, b"ICC_PROFILE\0"),
            (0xE1, b"Exif\0\0broken"),
            (0xED, b"Photoshop 3.0\x008BIM"),
            (0xFE, b""),
            (0xEE, b"Adobe"),
        )
    )
    data = plain[:20] + segments + plain[20:]
    with pillow_alone():
        assert np.array_equal(outcome(data), outcome(plain))
    assert_as_pillow(data)


def test_what_stands_between_segments_costs_no_time() -> None:
    """Pillow's own header reader would look at every byte of it."""
    plain = JPEGS["ycc 0 baseline"]
    data = plain[:20] + bytes(20_000_000) + plain[20:]
    with no_pillow(), pytest.raises(AssertionError, match="fast decoder"):
        outcome(data)
    assert np.array_equal(outcome(data), outcome(plain))


_DIGEST = """
import hashlib
from pipeline.decoding.test_fast_decoders import GOOD, outcome
print(hashlib.sha256(b"".join(outcome(data).tobytes() for data in GOOD.values())).hexdigest())
"""


def test_same_without_compiling() -> None:
    whole = b"".join(outcome(data).tobytes() for data in GOOD.values())
    assert printed_by(_DIGEST) == hashlib.sha256(whole).hexdigest()
