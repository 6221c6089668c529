from __future__ import annotations

import io
import struct
import zipfile
import zlib

import pytest

from dataservice.core.packspec import ImageSpec, ShardRef
from dataservice.errors import ArchiveError
from dataservice.storage import zips
from dataservice.storage.zips import MemberTable, describe_problem, read_directory, read_member

PICTURE = bytes(range(256)) * 40
TEXT = b"the same words " * 500


def make_zip(**options: object) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive:  # type: ignore[arg-type]
        archive.writestr("images/a.png", PICTURE)
        archive.writestr("images/b.txt", TEXT, compress_type=zipfile.ZIP_DEFLATED)
        archive.mkdir("folder")
    return file.getvalue()


def directory(data: bytes) -> MemberTable:
    def read(offset: int, size: int) -> bytes:
        assert 0 <= offset and offset + size <= len(data)
        return data[offset : offset + size]

    return read_directory(read, len(data))


class Reader:
    """Ranges of bytes in memory; counts reads."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads = 0

    def __call__(self, shard: ShardRef, offset: int, size: int) -> bytes:
        self.reads += 1
        assert offset + size <= len(self.data)
        return self.data[offset : offset + size]


def fetch(data: bytes, number: int, reader: Reader | None = None, **changed: int) -> bytes:
    table = directory(data)
    assert table.problem[number] == zips.OK
    fields = {
        name: getattr(table, name)[number]
        for name in ("offset", "stored_bytes", "size_bytes", "method", "crc32")
    }
    spec = ImageSpec(
        shard=0,
        member=table.name[number],
        width=1,
        height=1,
        target_width=1,
        target_height=1,
        **{**fields, **changed},
    )
    shard = ShardRef(source="s", name="x.zip", url="x.zip", size_bytes=len(data), mtime_ns=0)
    return read_member(reader or Reader(data), spec, shard)


def test_members_are_read_in_one_read_each() -> None:
    data = make_zip()
    assert directory(data).name == ["images/a.png", "images/b.txt"]
    for number, expected in enumerate((PICTURE, TEXT)):
        reader = Reader(data)
        assert fetch(data, number, reader) == expected
        assert reader.reads == 1


def test_bytes_before_and_comment_behind_the_archive() -> None:
    data = b"#!/bin/sh\n" * 20 + make_zip()
    with zipfile.ZipFile(buffer := io.BytesIO(data), "a") as archive:
        archive.comment = b"PK\x05\x06 as a comment"
    assert fetch(buffer.getvalue(), 1) == TEXT


def test_local_extra_fields_that_the_directory_lacks() -> None:
    data = bytearray(make_zip())
    extra = struct.pack("<HH", 0x7777, 500) + bytes(500)
    data[28:30] = struct.pack("<H", len(extra))
    data[30 + len("images/a.png") : 30 + len("images/a.png")] = extra
    reader = Reader(bytes(data))
    table = directory(make_zip())
    spec = ImageSpec(
        shard=0,
        member="images/a.png",
        offset=0,
        stored_bytes=len(PICTURE),
        size_bytes=len(PICTURE),
        method=0,
        crc32=table.crc32[0],
        width=1,
        height=1,
        target_width=1,
        target_height=1,
    )
    shard = ShardRef(source="s", name="x.zip", url="x", size_bytes=len(data), mtime_ns=0)
    assert read_member(reader, spec, shard) == PICTURE


def zip64(data: bytes, *, prefix: bytes = b"") -> bytes:
    """The same archive with every 32-bit field of the directory moved to zip64 records."""
    end = data.rindex(b"PK\x05\x06")
    _, _, _, _, count, size, offset, _ = struct.unpack("<4s4H2LH", data[end : end + 22])
    entries, at = b"", offset
    for _ in range(count):
        fields = list(struct.unpack("<4s6H3L5H2L", data[at : at + 46]))
        name = data[at + 46 : at + 46 + fields[10]]
        extra = struct.pack("<2H3Q", 1, 24, fields[9], fields[8], fields[16])
        at += 46 + fields[10] + fields[11] + fields[12]
        fields[8] = fields[9] = fields[16] = 0xFFFFFFFF
        fields[11], fields[12] = len(extra), 0
        entries += struct.pack("<4s6H3L5H2L", *fields) + name + extra
    end64 = struct.pack(
        "<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(entries), offset
    )
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, offset + len(entries), 1)
    tail = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    assert size
    return prefix + data[:offset] + entries + end64 + locator + tail


@pytest.mark.parametrize("prefix", [b"", b"x" * 100])
def test_zip64(prefix: bytes) -> None:
    data = zip64(make_zip(), prefix=prefix)
    assert (fetch(data, 0), fetch(data, 1)) == (PICTURE, TEXT)


def test_names() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("fine.png", "../up.png", "/abs.png", "a\\..\\b.png", "C:x.png", "\u00e9.png"):
            archive.writestr(name, b"x")
        archive.writestr("old.png", b"x")
    data = file.getvalue().replace(b"old.png", b"\x82ld.png")
    table = directory(data)
    unsafe = {n for n, p in zip(table.name, table.problem, strict=True) if p == zips.UNSAFE_NAME}
    assert unsafe == {"../up.png", "/abs.png", "a\\..\\b.png", "C:x.png"}
    assert {"\u00e9.png", "\u00e9ld.png"} <= set(table.name)


def test_a_huge_member_is_refused_before_it_is_read() -> None:
    data = bytearray(make_zip())
    entry = data.index(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = struct.pack("<L", zips.MAX_MEMBER_BYTES + 1)
    table = directory(bytes(data))
    assert table.problem[0] == zips.TOO_LARGE
    reader = Reader(bytes(data))
    with pytest.raises(ArchiveError, match="over the size limit"):
        fetch(make_zip(), 1, reader, size_bytes=zips.MAX_MEMBER_BYTES + 1)
    assert reader.reads == 0


@pytest.mark.parametrize(
    ("flags", "method", "problem", "reason"),
    [
        (1, 0, zips.ENCRYPTED, "encrypted"),
        (0, 99, zips.ENCRYPTED, "encrypted"),
        (0, 93, zips.METHOD, "unsupported compression method 93"),
    ],
)
def test_members_that_cannot_be_read_fail_alone(
    flags: int, method: int, problem: int, reason: str
) -> None:
    data = bytearray(make_zip())
    entry = data.index(b"PK\x01\x02")
    data[entry + 8 : entry + 12] = struct.pack("<HH", flags, method)
    table = directory(bytes(data))
    assert table.problem == [problem, zips.OK]
    assert reason in describe_problem(problem, method, 1)


def test_inflating_stops_at_the_planned_size() -> None:
    with pytest.raises(ArchiveError, match="inflates past 1000 bytes"):
        fetch(make_zip(), 1, size_bytes=1000)
    with pytest.raises(ArchiveError, match="size mismatch: 7500 bytes, 7501 planned"):
        fetch(make_zip(), 1, size_bytes=len(TEXT) + 1)


def test_damage_is_found() -> None:
    data = bytearray(make_zip())
    data[100] ^= 1
    with pytest.raises(ArchiveError, match=r"shard x.zip, member images/a.png: CRC mismatch"):
        fetch(bytes(data), 0)
    with pytest.raises(ArchiveError, match="no local header"):
        fetch(make_zip(), 0, offset=7)
    with pytest.raises(ArchiveError, match="method"):
        fetch(make_zip(), 1, method=0)


@pytest.mark.parametrize("at", [4, 6, 10])
def test_split_archives_are_refused(at: int) -> None:
    data = bytearray(make_zip())
    end = data.rindex(b"PK\x05\x06")
    data[end + at] += 1
    with pytest.raises(ArchiveError, match="split archive"):
        directory(bytes(data))


def test_cut_or_foreign_files_are_refused() -> None:
    whole = make_zip()
    for data in (b"", b"no zip at all", whole[:-30]):
        with pytest.raises(ArchiveError, match="no central directory"):
            directory(data)
    with pytest.raises(ArchiveError, match="truncated or damaged"):
        directory(whole[500:])


def test_any_flipped_byte_is_an_archive_error_or_the_same_bytes() -> None:
    data = make_zip()
    for at in range(len(data)):
        if 60 < at < data.index(b"PK\x01\x02") - 60 and at % 97:
            continue  # the insides of the members, sampled
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        try:
            table = directory(bytes(damaged))
        except ArchiveError:
            continue
        for number in range(len(table.name)):
            if table.problem[number] == zips.OK:
                try:
                    found = fetch(bytes(damaged), number)
                except ArchiveError:
                    continue
                assert zlib.crc32(found) == table.crc32[number]


def test_plain_files() -> None:
    spec = ImageSpec(
        shard=0, member="a.png", offset=0, stored_bytes=5, size_bytes=5, method=-1, crc32=-1,
        width=1, height=1, target_width=1, target_height=1,
    )  # fmt: skip
    shard = ShardRef(source="s", name="a.png", url="a.png", size_bytes=5, mtime_ns=0)
    assert read_member(Reader(b"12345"), spec, shard) == b"12345"
