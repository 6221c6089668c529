from __future__ import annotations

import contextlib
import gzip
import io
import random
import struct
import tracemalloc
import zipfile
import zlib

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from storage.recordbytes import PACKINGS, cut, pack

from dataservice.core.packspec import ShardRef
from dataservice.errors import RecordError, StorageError
from dataservice.storage.packed.feed import Feed
from dataservice.storage.recordfiles import content_of, packing_of, unpacked

CONTENT = bytes(range(256)) * 3000 + b"end"


def unpack(packing: str, data: bytes, size: int = 50_000) -> bytes:
    return b"".join(unpacked(packing, cut(data, size)))


def zip_of(*members: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


class Pipe(io.RawIOBase):
    """A file that cannot seek, for zips with data descriptors."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:
        self.parts.append(bytes(data))
        return len(data)


@pytest.mark.parametrize(
    ("url", "packing"),
    [
        ("a/b.jsonl", ""),
        ("a.json.GZ", "gz"),
        ("s3://bucket/a.jsonl.zst", "zst"),
        ("https://host/a.jsonl.zip?X-Sig=a.gz", "zip"),
        ("a.parquet", "parquet"),
        ("a.gz/b.jsonl", ""),
        ("zip", ""),
    ],
)
def test_packing_by_name(url: str, packing: str) -> None:
    assert packing_of(url) == packing


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(PACKINGS),
    st.binary(max_size=300).map(lambda data: data * 7),
    st.integers(1, 4),
    st.integers(1, 60),
)
def test_what_was_packed_comes_out(packing: str, content: bytes, parts: int, size: int) -> None:
    assert unpack(packing, pack(packing, content, parts=parts), size) == content


def test_pieces_are_bounded_and_memory_too() -> None:
    chosen = random.Random(5)
    content = b"".join(chosen.randbytes(8_000) + bytes(992_000) for _ in range(100))
    for packing, packed in (
        ("gz", gzip.compress(content, 1)),
        ("zst", zstandard.ZstdCompressor().compress(content)),
    ):
        tracemalloc.start()
        sizes = [len(piece) for piece in unpacked(packing, cut(packed, 1 << 20))]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sum(sizes) == len(content)
        assert max(sizes) < 1_200_000
        assert peak < 8_000_000


@pytest.mark.parametrize("packing", ["gz", "zst", "zip"])
def test_a_bomb_is_given_up_behind_64_mib(packing: str) -> None:
    content = bytes(80_000_000)
    packed = {
        "gz": lambda: gzip.compress(content, 1),
        "zst": lambda: zstandard.ZstdCompressor().compress(content),
        "zip": lambda: pack("zip", content),
    }[packing]()
    for size in (1000, len(packed)):
        got = 0
        with pytest.raises(RecordError, match=r"more than 200 times .*after [0-9]{8} bytes") as bad:
            for piece in unpacked(packing, cut(packed, size)):
                got += len(piece)
        assert 64 << 20 <= got < 70_000_000
        assert str(bad.value).endswith(f"(after {got} bytes of content)")


def test_gzip_members_padding_and_garbage() -> None:
    member = gzip.compress(CONTENT, mtime=0)
    empty = gzip.compress(b"", mtime=0)
    assert unpack("gz", member + empty * 3 + member) == CONTENT * 2
    assert unpack("gz", member + bytes(200_000)) == CONTENT
    assert unpack("gz", member + bytes(100_000) + member) == CONTENT * 2
    with pytest.raises(RecordError, match="damaged gzip"):
        unpack("gz", member + b"garbage behind it")
    with pytest.raises(RecordError, match="empty"):
        unpack("gz", b"")


def test_zstandard_frames_and_windows() -> None:
    frame = zstandard.ZstdCompressor().compress(CONTENT)
    skippable = struct.pack("<2L", 0x184D2A50, 5) + b"notes"
    assert unpack("zst", skippable + frame + skippable + frame) == CONTENT * 2
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    large = stream.compress(CONTENT) + stream.flush()
    with pytest.raises(RecordError, match="damaged zstandard"):
        unpack("zst", large)
    with pytest.raises(RecordError, match="empty"):
        unpack("zst", b"")


def test_checksums_are_checked() -> None:
    for packing, at in (("gz", -6), ("zst", -2), ("zip", 16)):
        packed = bytearray(pack(packing, CONTENT))
        packed[at] ^= 1
        out: list[bytes] = []
        with pytest.raises(RecordError, match=r"damaged .*\(after \d+ bytes of content\)"):
            out.extend(unpacked(packing, [bytes(packed)]))
        assert CONTENT.startswith(b"".join(out))


@pytest.mark.parametrize("packing", PACKINGS[1:])
@settings(deadline=None, max_examples=40)
@given(at=st.integers(0, 3000), first=st.integers(1, 3000), byte=st.integers(0, 255))
def test_what_comes_before_damage_is_the_same_in_any_chunks(
    packing: str, at: int, first: int, byte: int
) -> None:
    content = b"".join(b"%d\n" % (i * 7919) for i in range(20_000))
    packed = bytearray(pack(packing, content))
    packed[at] = byte
    results = []
    for chunks in (cut(bytes(packed), 1 << 20), [bytes(packed[:first]), bytes(packed[first:])]):
        out: list[bytes] = []
        reason = ""
        try:
            out.extend(unpacked(packing, chunks))
        except RecordError as error:
            reason = error.reason
        results.append((b"".join(out), reason))
    assert results[0] == results[1]
    assert results[0][1] or results[0][0] == content


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(PACKINGS[1:]), st.binary(max_size=200), st.integers(1, 50))
def test_any_bytes_end_in_content_or_a_reason(packing: str, data: bytes, size: int) -> None:
    magic = {"gz": b"\x1f\x8b\x08\0", "zst": b"\x28\xb5\x2f\xfd", "zip": b"PK\3\4"}[packing]
    for packed in (data, magic + data):
        with contextlib.suppress(RecordError):
            unpack(packing, packed, size)


@pytest.mark.parametrize("packing", PACKINGS)
def test_what_the_store_raises_is_passed_on(packing: str) -> None:
    def chunks() -> object:
        yield pack(packing, CONTENT)[:2000]
        raise StorageError("the store is away")

    with pytest.raises(StorageError, match="away"):
        list(unpacked(packing, chunks()))


# ---- zip


def test_the_record_file_among_others() -> None:
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        packed = zip_of(
            ("docs/", b""),
            ("docs/README.txt", b"read me " * 5000),
            ("docs/data.jsonl", CONTENT),
            ("__MACOSX/docs/._data.jsonl", b"resource fork"),
            method=method,
        )
        assert unpack("zip", packed) == CONTENT


def test_a_zip_written_to_a_pipe_has_its_sizes_behind() -> None:
    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jsonl", CONTENT)
        archive.writestr("note.txt", b"x")
    packed = b"".join(pipe.parts)
    assert unpack("zip", packed) == CONTENT
    at = packed.index(b"PK\x07\x08") + 5
    with pytest.raises(RecordError, match=r"size or checksum of a.jsonl is wrong"):
        unpack("zip", packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :])


def test_zip64_sizes() -> None:
    file = io.BytesIO()
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.json", "w", force_zip64=True) as member,
    ):
        member.write(CONTENT)
    assert unpack("zip", file.getvalue()) == CONTENT


def raw_member(name: bytes, *, flags: int = 0, method: int = 0, stored: int = 0) -> bytes:
    crc = zlib.crc32(b"{}")
    header = struct.pack(
        "<4s5H3L2H", b"PK\3\4", 20, flags, method, 0, 0, crc, stored, 2, len(name), 0
    )
    return header + name + b"{}"


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (zip_of(("a.txt", b"x")), "holds no record file"),
        (zip_of(), "holds no record file"),
        (zip_of(("a.jsonl", b"{}"), ("b.json", b"[]")), "only a.jsonl is read, not b.json;"),
        (zip_of(("a.jsonl", b"{}"), method=zipfile.ZIP_BZIP2), "compression method 12"),
        (raw_member(b"a.jsonl", flags=1, stored=2), "a.jsonl in the zip is encrypted"),
        (raw_member(b"a.jsonl", flags=8), "stored without its size"),
        (raw_member(b"a.jsonl", stored=2) + b"what is this", "no member or directory"),
        (raw_member(b"a.jsonl", stored=0xFFFFFFFF), "zip64 sizes are missing"),
        (raw_member(b"a.jsonl", stored=3), "the zip ends within a.jsonl"),
        (b"PK\x07\x08" + raw_member(b"a.jsonl", stored=2), "no member or directory"),
        (b"", "no member or directory"),
    ],
)
def test_zips_that_are_refused(packed: bytes, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        unpack("zip", packed)


# ---- content_of, Feed


def test_content_of_a_shard_ends_where_the_index_saw_it_end() -> None:
    packed = gzip.compress(CONTENT, mtime=0)
    shard = ShardRef(
        source="s",
        name="a.jsonl.gz",
        url="a.jsonl.gz",
        size_bytes=len(packed) + 4,
        mtime_ns=0,
        packing="gz",
        unpacked_bytes=len(CONTENT),
    )
    assert b"".join(content_of(shard, [packed + b"junk"])) == CONTENT
    short = gzip.compress(CONTENT[:-1], mtime=0)
    with pytest.raises(RecordError, match=r"shard a.jsonl.gz: the content ends 1 bytes early"):
        list(content_of(shard, [short]))


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.binary(max_size=9), max_size=9),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=20),
)
def test_feed_gives_what_is_asked_for(chunks: list[bytes], takes: list[tuple[int, int]]) -> None:
    data = b"".join(chunks)
    feed = Feed(chunks)
    at = 0
    for size, back in takes:
        taken = feed.take(size)
        assert taken == data[at : at + size]
        back = min(back, len(taken))
        feed.give_back(taken[len(taken) - back :])
        at += len(taken) - back
        assert feed.position == at
