"""dataservice.wire.segment: a pack through shared memory is the pack through frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from dataservice.errors import WireError
from dataservice.wire import layout
from dataservice.wire.codec import EncodedPack, PackDecoder
from dataservice.wire.segment import read_pack

Arrays = dict[str, npt.NDArray[Any]]


def segment_of(arrays: Arrays, meta: dict[str, Any], **options: Any) -> npt.NDArray[np.uint8]:
    pack = EncodedPack(arrays, meta, **options)
    place = np.full(pack.segment_bytes + 64, 171, np.uint8)
    pack.write_into(place)
    assert (place[pack.segment_bytes :] == 171).all()
    return place[: pack.segment_bytes]


def by_frames(arrays: Arrays, meta: dict[str, Any]) -> tuple[Arrays, dict[str, Any]]:
    decoder = PackDecoder()
    for frame in EncodedPack(arrays, meta).frames():
        decoder.feed(frame)
    return decoder.result()


@settings(deadline=None, max_examples=100)
@given(
    arrays=st.dictionaries(
        st.text(min_size=1, max_size=8),
        npst.arrays(
            st.sampled_from(sorted(layout.ALLOWED_DTYPES)).map(np.dtype),
            npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=12),
        ),
        max_size=4,
    ),
    compress=st.booleans(),
)
def test_both_ways_give_the_same(arrays: Arrays, compress: bool) -> None:
    got, meta = read_pack(segment_of(arrays, {"pack_id": "0.0.1"}, compress=compress))
    expected, expected_meta = by_frames(arrays, {"pack_id": "0.0.1"})
    assert meta == expected_meta
    assert list(got) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, strict=True)


def test_what_comes_back_is_writable_and_not_the_segment() -> None:
    segment = segment_of({"a": np.arange(9, dtype=np.uint8), "b": np.zeros(500, np.int32)}, {})
    arrays, _ = read_pack(segment)
    segment[:] = 255
    assert arrays["a"].tolist() == list(range(9))
    assert not arrays["b"].any()
    arrays["a"][0] = 7


def test_a_pack_holds_its_pixels_as_they_were_given() -> None:
    pixels = np.zeros((1000, 48), np.uint8)
    pack = EncodedPack({"pixel_values": pixels}, {})
    pixels[0, 0] = 9  # as nobody may: only to see that there is no copy
    place = np.zeros(pack.segment_bytes, np.uint8)
    pack.write_into(place)
    assert read_pack(place)[0]["pixel_values"][0, 0] == 9


@pytest.mark.parametrize("frame_bytes", [7, 100, layout.FRAME_BYTES])
def test_the_size_is_that_of_the_frames(frame_bytes: int) -> None:
    arrays: Arrays = {"a": np.arange(999, dtype=np.int32), "b": np.zeros(999, np.uint8)}
    pack = EncodedPack(arrays, {"k": "v"}, frame_bytes=frame_bytes)
    frames = list(pack.frames())
    assert pack.size_bytes == sum(map(len, frames))
    assert frames == list(pack.frames())
    assert EncodedPack({}, {}).size_bytes == sum(map(len, EncodedPack({}, {}).frames()))


def test_any_cut_and_any_damage_of_the_header_is_a_wire_error() -> None:
    pixels = np.arange(60, dtype=np.uint8)
    segment = segment_of({"a": pixels}, {"k": 1})
    for size in range(len(segment)):
        with pytest.raises(WireError):
            read_pack(segment[:size])
    with pytest.raises(WireError, match="its header says"):
        read_pack(np.concatenate([segment, segment[:1]]))
    header_bytes = len(next(EncodedPack({"a": pixels}, {"k": 1}).frames())) - len(pixels) - 8
    for at in range(header_bytes):
        broken = segment.copy()
        broken[at] ^= 255
        with pytest.raises(WireError):
            read_pack(broken)


def test_damaged_compressed_data_is_a_wire_error() -> None:
    segment = segment_of({"a": np.zeros(5000, np.int32)}, {}, compress=True)
    segment[-8:] = 255
    with pytest.raises(WireError):
        read_pack(segment)


def test_the_limit_holds() -> None:
    segment = segment_of({"a": np.zeros(100, np.uint8), "b": np.zeros(100, np.uint8)}, {})
    read_pack(segment, max_bytes=228)
    with pytest.raises(WireError, match="more than the limit"):
        read_pack(segment, max_bytes=227)
