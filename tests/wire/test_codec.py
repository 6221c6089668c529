"""dataservice.wire.codec: arrays come back equal, anything else is a WireError."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from dataservice.errors import WireError
from dataservice.wire import codec
from dataservice.wire.codec import (
    ArrayEntry,
    EncodedPack,
    PackDecoder,
    PackHeader,
    encode_pack,
    pack_digest,
)
from dataservice.wire.schema import encode, encode_plain

Arrays = dict[str, npt.NDArray[Any]]
META = {"pack_id": "0.1.2", "sample_keys": ["a/b@0"], "num_docs": 2, "holes": []}


def tokens_and_pixels() -> Arrays:
    random = np.random.Generator(np.random.Philox(7))
    return {
        "input_ids": np.arange(512, dtype=np.int32) % 7,
        "labels": np.full(512, -100, np.int32),
        "cu_seqlens": np.array([0, 100, 512], np.int32),
        "pixel_values": random.integers(0, 256, (5, 48), dtype=np.uint8),
        "image_grid_thw": np.empty((0, 3), np.int32),
    }


def decoded(frames: list[bytes], **options: Any) -> tuple[Arrays, dict[str, Any]]:
    decoder = PackDecoder(**options)
    done = [decoder.feed(frame) for frame in frames]
    assert done == [False] * (len(frames) - 1) + [True]
    return decoder.result()


def assert_equal(ours: Arrays, theirs: Arrays) -> None:
    assert list(ours) == list(theirs)
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype
        np.testing.assert_array_equal(ours[name], array, strict=True)


@pytest.mark.parametrize("frame_bytes", [1, 7, 64, 100, 2 << 20])
@pytest.mark.parametrize("compress", [True, False])
def test_round_trip(frame_bytes: int, compress: bool) -> None:
    arrays = tokens_and_pixels()
    frames = encode_pack(arrays, META, frame_bytes=frame_bytes, compress=compress)
    result, meta = decoded(frames)
    assert_equal(result, arrays)
    assert meta == META
    assert frames == encode_pack(arrays, META, frame_bytes=frame_bytes, compress=compress)


@settings(deadline=None, max_examples=100)
@given(
    arrays=st.dictionaries(
        st.text(min_size=1, max_size=8),
        npst.arrays(
            st.sampled_from(sorted(codec.ALLOWED_DTYPES)).map(np.dtype),
            npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6),
        ),
        max_size=4,
    ),
    frame_bytes=st.integers(1, 200),
)
def test_round_trip_of_any_arrays(arrays: Arrays, frame_bytes: int) -> None:
    result, _ = decoded(encode_pack(arrays, {}, frame_bytes=frame_bytes))
    assert_equal(result, arrays)
    assert pack_digest(result) == pack_digest(arrays)


def test_frames_are_as_large_as_asked_for() -> None:
    frames = encode_pack(tokens_and_pixels(), META, frame_bytes=100, compress=False)
    assert {len(frame) for frame in frames[1:-1]} == {108}
    assert 8 < len(frames[-1]) <= 108
    with pytest.raises(ValueError, match="frame_bytes"):
        encode_pack({}, {}, frame_bytes=codec.MAX_FRAME_BYTES)


def test_what_fits_in_one_frame_is_one_frame() -> None:
    assert len(encode_pack(tokens_and_pixels(), META)) == 1
    room = codec.FRAME_BYTES
    large = {"pixel_values": np.zeros(room + 1, np.uint8)}
    first, last = encode_pack(large, META)
    assert room < len(first) <= codec.MAX_FRAME_BYTES
    assert len(last) == 9
    assert_equal(decoded([first, last])[0], large)


def test_a_header_that_leaves_no_room_is_a_frame_of_its_own() -> None:
    arrays: Arrays = {"pixel_values": np.zeros(codec.FRAME_BYTES, np.uint8)}
    frames = encode_pack(arrays, {"a": "x" * (codec.MAX_FRAME_BYTES - codec.FRAME_BYTES)})
    assert [len(frame) == codec.FRAME_BYTES + 8 for frame in frames] == [False, True]
    assert_equal(decoded(frames)[0], arrays)


def test_a_pack_that_ends_behind_its_header_has_no_result() -> None:
    (frame,) = encode_pack(tokens_and_pixels(), META)
    _, _, size, _ = struct.unpack_from("<4sIII", frame)
    decoder = PackDecoder()
    assert not decoder.feed(frame[: 16 + size])
    with pytest.raises(WireError, match="ended before"):
        decoder.result()


def test_results_are_writable_views_of_one_aligned_buffer() -> None:
    arrays, _ = decoded(encode_pack(tokens_and_pixels(), META, frame_bytes=100))
    bases = {id(array.base) for array in arrays.values() if array.size}
    assert len(bases) == 1
    for array in arrays.values():
        assert array.flags.writeable
        assert array.flags.c_contiguous
        assert array.flags.aligned
    arrays["pixel_values"][0, 0] ^= 255


def test_what_shrinks_is_compressed_and_the_rest_is_not() -> None:
    random = np.random.Generator(np.random.Philox(7))
    photo = random.integers(0, 256, (200, 768), np.uint8)
    arrays: Arrays = {
        "labels": np.full(65536, -100, np.int32),
        "few": np.zeros(100, np.int32),
        "pixel_values": photo,
    }
    pack = EncodedPack(arrays, META)
    assert pack.shrinks
    smaller = pack.compressed()
    assert photo.nbytes < smaller.size_bytes < photo.nbytes + 4000
    assert pack.size_bytes > photo.nbytes + 4 * 65536
    result, meta = decoded(list(smaller.frames()))
    assert_equal(result, arrays)
    assert meta == META
    assert b"".join(smaller.frames()) == b"".join(encode_pack(arrays, META, compress=True))


def test_pages_are_compressed_among_photos_only_where_all_of_it_pays() -> None:
    random = np.random.Generator(np.random.Philox(7))
    photos = random.integers(0, 256, (3000, 768), np.uint8)
    mostly_white = np.full((3000, 768), 255, np.uint8)
    mostly_white[::10] = photos[::10]
    half = photos.copy()
    half[:1500] = 255
    for pixels, pays in ((photos, False), (mostly_white, True), (half, False)):
        pack = EncodedPack({"pixel_values": pixels}, {})
        assert pack.shrinks == pays
        assert (pack.compressed().size_bytes < pack.size_bytes) == pays


def test_what_does_not_shrink_is_no_other_pack() -> None:
    random = np.random.Generator(np.random.Philox(7))
    arrays: Arrays = {"noise": random.integers(0, 2**63, 5000, dtype=np.int64).view(np.float64)}
    pack = EncodedPack(arrays, {})
    assert not pack.shrinks
    assert encode_pack(arrays, {}) == list(pack.compressed().frames())


def test_other_memory_layouts_are_canonical() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    for same in (np.asfortranarray(array), array.astype(">i4"), array.repeat(2, axis=1)[:, ::2]):
        assert encode_pack({"a": same}, {}) == encode_pack({"a": array}, {})
        assert pack_digest({"a": same}) == pack_digest({"a": array})


@pytest.mark.parametrize(
    ("arrays", "meta"),
    [
        ({"a": np.array([None])}, {}),
        ({"a": np.array(["x"])}, {}),
        ({"a": np.array([True])}, {}),
        ({"a": np.array([1j])}, {}),
        ({"a": np.zeros(1, "i4,i4")}, {}),
        ({"": np.zeros(1, np.int32)}, {}),
        ({"a": np.zeros((1,) * 9, np.int32)}, {}),
        ({str(number): np.zeros(1, np.int32) for number in range(65)}, {}),
        ({}, {"a": np.int32(1)}),
        ({}, {"a": {1: 2}}),
        ({}, {"a": "x" * codec.MAX_FRAME_BYTES}),
    ],
)
def test_the_encoder_refuses_what_the_decoder_would(arrays: Arrays, meta: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        encode_pack(arrays, meta)


# ---- damage -------------------------------------------------------------------------------------


def small_pack() -> tuple[Arrays, list[bytes]]:
    arrays: Arrays = {
        "input_ids": np.arange(100, dtype=np.int32) % 5,
        "pixel_values": np.arange(60, dtype=np.uint8).reshape(5, 12),
    }
    return arrays, encode_pack(arrays, {"pack_id": "0.0.0"}, frame_bytes=20)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_any_flipped_byte_is_a_wire_error(mask: int) -> None:
    _, frames = small_pack()
    assert len(frames) >= 3
    for number, frame in enumerate(frames):
        for at in range(len(frame)):
            broken = bytearray(frame)
            broken[at] ^= mask
            with pytest.raises(WireError):
                decoded([*frames[:number], bytes(broken), *frames[number + 1 :]])


def test_any_cut_is_a_wire_error() -> None:
    _, frames = small_pack()
    for number, frame in enumerate(frames):
        for size in range(len(frame)):
            with pytest.raises(WireError):
                decoded([*frames[:number], frame[:size], *frames[number + 1 :]])


def test_frames_out_of_order_repeated_missing_or_of_another_pack() -> None:
    arrays, frames = small_pack()
    other = encode_pack(
        {**arrays, "pixel_values": arrays["pixel_values"] + 1},
        {"pack_id": "0.0.1"},
        frame_bytes=20,
    )
    wrong_orders = [
        [frames[1], frames[0], *frames[2:]],
        [frames[0], frames[2], frames[1], *frames[3:]],
        [frames[0], frames[1], *frames[1:]],
        [frames[0], *frames[2:]],
        [frames[0], *frames],
        [*frames, frames[-1]],
        [*frames[:-1], other[-1]],
    ]
    for wrong in wrong_orders:
        decoder = PackDecoder()
        with pytest.raises(WireError):
            for frame in wrong:
                decoder.feed(frame)
        assert not decoder.done
        with pytest.raises(WireError, match="after a broken one"):
            decoder.feed(frames[0])
        with pytest.raises(WireError, match="ended before"):
            decoder.result()


def test_an_unfinished_pack_has_no_result() -> None:
    _, frames = small_pack()
    decoder = PackDecoder()
    for frame in frames[:-1]:
        with pytest.raises(WireError, match="ended before"):
            decoder.result()
        decoder.feed(frame)
    decoder.feed(frames[-1])
    assert decoder.done
    with pytest.raises(WireError, match="after the last"):
        decoder.feed(frames[-1])


# ---- headers of a hostile sender --------------------------------------------------


def forged(header: PackHeader, payload: bytes = b"", version: int = 2) -> list[bytes]:
    """Frames with right checksums around any header."""
    body = encode(header)
    seed = zlib.crc32(body)
    first = struct.pack("<4sIII", b"VDPK", version, len(body), seed) + body
    if not payload:
        return [first]
    crc = zlib.crc32(payload, zlib.crc32((1).to_bytes(4, "little"), seed))
    return [first, struct.pack("<II", 1, crc) + payload]


ENTRY = ArrayEntry(name="a", dtype="<i4", shape=(2,), stored_bytes=8, zstd=False)
HEADER = PackHeader(arrays=(ENTRY,), frames=1, meta=encode_plain({}, what="meta"))


def with_entry(**changes: Any) -> PackHeader:
    return dataclasses.replace(HEADER, arrays=(dataclasses.replace(ENTRY, **changes),))


def test_a_forged_pack_is_fine_when_it_is_right() -> None:
    arrays, _ = decoded(forged(HEADER, struct.pack("<ii", 4, 5)))
    assert arrays["a"].tolist() == [4, 5]


@pytest.mark.parametrize(
    "header",
    [
        with_entry(dtype="|O"),
        with_entry(dtype="<U2"),
        with_entry(dtype=">i4"),
        with_entry(dtype="|b1"),
        with_entry(dtype="i4,i4"),
        with_entry(name=""),
        with_entry(name="x" * 129),
        with_entry(shape=(-2,)),
        with_entry(shape=(-1, -2)),
        with_entry(shape=(1 << 40,), stored_bytes=4 << 40),
        with_entry(shape=(0, 1 << 62), stored_bytes=0),
        with_entry(shape=(1 << 16,) * 8, stored_bytes=1, zstd=True),
        with_entry(shape=(1,) * 9, stored_bytes=4),
        with_entry(stored_bytes=7),
        with_entry(stored_bytes=-8),
        with_entry(stored_bytes=8, zstd=True),
        with_entry(stored_bytes=0, zstd=True),
        dataclasses.replace(HEADER, arrays=(ENTRY, ENTRY), frames=2),
        dataclasses.replace(HEADER, frames=0),
        dataclasses.replace(HEADER, frames=9),
        dataclasses.replace(HEADER, frames=-1),
        dataclasses.replace(HEADER, arrays=(), frames=1),
        dataclasses.replace(HEADER, meta=encode_plain([], what="meta")),
        dataclasses.replace(HEADER, meta=b"\xc1"),
    ],
)
def test_a_header_is_checked_before_anything_is_allocated(header: PackHeader) -> None:
    with pytest.raises(WireError):
        PackDecoder().feed(forged(header)[0])


def test_a_pack_over_the_limit_is_refused() -> None:
    arrays: Arrays = {"a": np.zeros(100, np.uint8), "b": np.zeros(100, np.uint8)}
    frames = encode_pack(arrays, {})
    decoded(frames, max_bytes=228)
    with pytest.raises(WireError, match="more than the limit of 227 bytes"):
        decoded(frames, max_bytes=227)


def test_another_version_is_named() -> None:
    with pytest.raises(WireError, match="version 1, this side reads 2"):
        PackDecoder().feed(forged(HEADER, version=1)[0])


def test_payload_that_does_not_fit_the_header() -> None:
    with pytest.raises(WireError, match="bytes too many"):
        decoded(forged(HEADER, bytes(9)))
    with pytest.raises(WireError, match="incomplete"):
        decoded(forged(HEADER, bytes(7)))


@pytest.mark.parametrize(
    "stored",
    [
        b"\x00" * 20,
        zstandard.compress(bytes(5000)),
        zstandard.compress(bytes(300)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(400)),
        zstandard.compress(bytes(400))[:-1],
        zstandard.compress(bytes(400)) + b"\x00",
    ],
    ids=["no zstd", "bomb", "too short", "size not said", "cut", "trailing byte"],
)
def test_compressed_data_must_be_exactly_the_array(stored: bytes) -> None:
    header = with_entry(shape=(100,), stored_bytes=len(stored), zstd=True)
    with pytest.raises(WireError):
        decoded(forged(header, stored))


# ---- digest -------------------------------------------------------------------------------------


def test_the_digest_is_a_fixed_function() -> None:
    arrays: Arrays = {"b": np.arange(3, dtype=np.int32), "a": np.zeros((2, 0), np.uint8)}
    spelled = (
        b"\x93\xa1a\xa3|u1\x92\x02\x00"
        b"\x93\xa1b\xa3<i4\x91\x03"
        b"\x00\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00"
    )
    assert pack_digest(arrays) == hashlib.sha256(spelled).hexdigest()


def test_the_digest_depends_on_names_dtypes_shapes_and_bytes_not_on_order() -> None:
    array = np.arange(6, dtype=np.int32)
    base = pack_digest({"a": array, "b": array})
    assert pack_digest({"b": array, "a": array}) == base
    others: list[Arrays] = [
        {"a": array, "c": array},
        {"a": array, "b": array.view(np.uint32)},
        {"a": array, "b": array.reshape(2, 3)},
        {"a": array, "b": array + 1},
        {"a": array},
    ]
    assert len({pack_digest(other) for other in others} | {base}) == 6
    with pytest.raises(WireError, match="not allowed"):
        pack_digest({"a": np.array([None])})
