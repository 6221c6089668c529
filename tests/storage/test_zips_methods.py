from __future__ import annotations

import contextlib
import random
import struct

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.archives import contents
from support.zipbuilder import BZIP2, DEFLATE64, LZMA, STORED, ZSTD, Part, build, pack

from dataservice.storage.zips import METHODS
from dataservice.storage.zips.methods import CorruptData, unpack

TEXT = b"the same words " * 5000
COMPRESSING = [method for method in METHODS if method != STORED]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", [b"", b"x", TEXT, random.Random(1).randbytes(100_000)])
def test_every_method(method: int, data: bytes) -> None:
    assert contents(build([Part(data=data, method=method)])) == {"a.png": data}


@pytest.mark.parametrize("method", [1, 2, 6, 10, 95, 96, 97, 98, 0x7FFF])
def test_other_methods_are_refused_by_number(method: int) -> None:
    found = contents(build([Part(data=TEXT, method=method), Part(name=b"b", data=b"good")]))
    assert found == {"a.png": f"unsupported compression method {method}", "b": b"good"}


@pytest.mark.parametrize("method", METHODS)
def test_no_more_comes_out_than_asked_for(method: int) -> None:
    stored = pack(method, TEXT)
    for limit in (1, 100, len(TEXT) - 1, len(TEXT), len(TEXT) + 1):
        assert unpack(method, stored, limit) == TEXT[:limit]


@pytest.mark.parametrize("method", COMPRESSING)
def test_what_is_cut_off_gives_its_beginning(method: int) -> None:
    stored = pack(method, TEXT)
    for size in {0, 1, 5, 8, 9, 20, len(stored) // 2, len(stored) - 1} - {len(stored)}:
        assert TEXT.startswith(unpack(method, stored[:size], len(TEXT) + 1))
    part = Part(data=TEXT, method=method, stored=stored[: len(stored) // 2])
    assert "size mismatch" in str(contents(build([part]))["a.png"])


@pytest.mark.parametrize("method", COMPRESSING)
def test_a_size_that_is_too_small_or_too_large(method: int) -> None:
    for size, reason in ((50_000, "inflates past 50000 bytes"), (80_000, "75000 bytes, 80000")):
        part = Part(data=TEXT, method=method, size=size)
        assert reason in str(contents(build([part]))["a.png"])


@settings(deadline=None, max_examples=200)
@given(
    method=st.sampled_from(COMPRESSING),
    changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=5),
    junk=st.none() | st.binary(max_size=200),
)
def test_damage_is_corrupt_data_or_other_bytes(
    method: int, changes: list[tuple[int, int]], junk: bytes | None
) -> None:
    stored = bytearray(pack(method, TEXT[:3000]) if junk is None else junk)
    for at, value in changes:
        if stored:
            stored[at % len(stored)] = value
    with contextlib.suppress(CorruptData):
        assert len(unpack(method, bytes(stored), 4000)) <= 4000


def test_headers_that_claim_much_memory() -> None:
    claims = struct.pack("<2BHBL", 9, 4, 5, 93, 0xFFFFFFFF)
    assert unpack(LZMA, claims + pack(LZMA, TEXT)[9:], len(TEXT)) == TEXT
    with pytest.raises(CorruptData, match="LZMA properties"):
        unpack(LZMA, struct.pack("<2BHBL", 9, 4, 5, 225, 1 << 16) + b"x" * 20, 10)
    window = zstandard.ZstdCompressionParameters(window_log=30, write_content_size=False)
    huge = zstandard.ZstdCompressor(compression_params=window).compressobj()
    with pytest.raises(CorruptData):
        unpack(ZSTD, huge.compress(b"x") + huge.flush(), 10)


def test_frames_and_streams_that_follow_each_other() -> None:
    assert unpack(ZSTD, pack(ZSTD, b"one ") + pack(ZSTD, b"two"), 100) == b"one two"
    assert unpack(BZIP2, pack(BZIP2, b"one ") + b"junk", 100) == b"one "
    assert unpack(DEFLATE64, pack(DEFLATE64, b"one ") + b"junk", 100) == b"one "
