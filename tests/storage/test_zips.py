from __future__ import annotations

import io
import struct
import zipfile
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.archives import Source, contents, directory, names, place
from support.zipbuilder import DEFLATED, STORED, WIDE, Part, build

from dataservice.errors import ArchiveError
from dataservice.storage import membertable as mt
from dataservice.storage.zips import Place, read_directory, read_place, read_stored
from dataservice.storage.zips import directory as directory_module
from dataservice.storage.zips.layout import entry_places

PICTURE = bytes(range(256)) * 40
TEXT = b"the same words " * 500
BOTH = {"images/a.png": PICTURE, "images/b.txt": TEXT}
PARTS = [
    Part(name=b"images/a.png", data=PICTURE),
    Part(name=b"images/b.txt", data=TEXT, method=DEFLATED),
    Part(name=b"folder/"),
]


def made_by_zipfile() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("images/a.png", PICTURE)
        archive.writestr("images/b.txt", TEXT, compress_type=zipfile.ZIP_DEFLATED)
        archive.mkdir("folder")
    return file.getvalue()


def test_members_are_read_in_one_read_each() -> None:
    data = made_by_zipfile()
    table = directory(data)
    assert names(table) == list(BOTH)
    for row, expected in enumerate(BOTH.values()):
        source = Source(data)
        assert read_place(source, place(table, row), len(data)) == expected
        assert len(source.reads) == 1


def test_a_small_archive_takes_one_read_to_open() -> None:
    data = made_by_zipfile()
    source = Source(data)
    read_directory(source, len(data))
    assert len(source.reads) == 1


def test_columns() -> None:
    data = build(PARTS)
    table = directory(data)
    assert len(table) == 2
    assert table.method.tolist() == [0, 8] and table.problem.tolist() == [0, 0]
    assert table.size_bytes.tolist() == [len(PICTURE), len(TEXT)]
    assert table.crc32.tolist() == [zlib.crc32(PICTURE), zlib.crc32(TEXT)]
    assert table.offset.dtype == table.stored_bytes.dtype == np.uint64
    at, end = data.index(b"PK\x01\x02"), data.rindex(b"PK\x05\x06")
    assert table.directory_crc32 == zlib.crc32(data[at:end])


@pytest.mark.parametrize(
    "data",
    [
        build(PARTS),
        build(PARTS, comment=b"PK\x05\x06 as a comment, and some more of it"),
        build(PARTS, prefix=b"#!/bin/sh\n" * 200),
        build(PARTS, zip64=True),
        build(PARTS, zip64=True, prefix=b"x" * 99),
        build(PARTS, zip64=True, end64_data=b"an extension"),
        build(PARTS, between=b"PK\x05\x05\x02\0ab"),
        build(PARTS, trailing=b"\r\n"),
        build(PARTS, trailing=bytes(3000)),
        build(PARTS, prefix=b"PK\x07\x08"),
    ],
    ids=[
        "plain", "comment", "prefix", "zip64", "zip64-prefix", "zip64-extended", "signature",
        "line-end-behind", "zeros-behind", "spanning-mark",
    ],
)  # fmt: skip
def test_forms_of_an_archive(data: bytes) -> None:
    assert contents(data) == BOTH


def test_data_descriptors_and_unlike_extra_fields() -> None:
    extra = struct.pack("<HH", 0x7777, 500) + bytes(500)
    parts = [
        Part(name=b"images/a.png", data=PICTURE, local_extra=extra, descriptor=True),
        Part(name=b"images/b.txt", data=TEXT, method=DEFLATED, extra=extra, comment=b"a comment",
             descriptor=True),
    ]  # fmt: skip
    assert contents(build(parts)) == BOTH
    table = directory(build(parts))
    source = Source(build(parts))
    assert read_stored(source, place(table, 0), len(source.data), 10)[1] == PICTURE[:10]


@pytest.mark.parametrize("before", [b"", b"\x55\x54\x01\0\0"])
@pytest.mark.parametrize("disk", [0, 0xFFFF])
def test_zip64_values_stand_only_where_they_are_needed(disk: int, before: bytes) -> None:
    for known in range(3):
        fields = [len(TEXT), len(TEXT), 0]
        extra, values = b"", [WIDE] * 3
        values[known] = fields[known]
        for number in range(3):
            if number != known:
                extra += struct.pack("<Q", fields[number])
        extra += struct.pack("<L", 0) if disk else b""
        part = Part(
            data=TEXT,
            size=values[0],
            stored_size=values[1],
            offset=values[2],
            disk=disk,
            extra=before + struct.pack("<2H", 1, len(extra)) + extra,
        )
        assert contents(build([part])) == {"a.png": TEXT}


@pytest.mark.parametrize("extra", [b"", struct.pack("<2HQ", 1, 8, 5), b"\1\0\x20\0" + bytes(8)])
def test_zip64_values_that_are_missing(extra: bytes) -> None:
    part = Part(data=TEXT, size=WIDE, stored_size=WIDE, extra=extra)
    good = Part(name=b"b", data=b"good")
    found = contents(build([part, good]))
    assert found["b"] == b"good" and "central directory is damaged" in str(found["a.png"])


def test_names() -> None:
    path = "ordn\u00fcng/\u4e2d.png".encode()
    unicode_path = struct.pack("<2HBL", 0x7075, 5 + len(path), 1, zlib.crc32(b"ordn?ng")) + path
    wrong_crc = struct.pack("<2HBL", 0x7075, 5 + len(path), 1, 7) + path
    parts = [
        Part(name="\u00e9.png".encode(), data=b"1", flags=0x800),
        Part(name="\u00e8.png".encode(), data=b"2"),
        Part(name=b"\x82ld.png", data=b"3"),
        Part(name=b"ordn?ng", data=b"4", extra=unicode_path),
        Part(name=b"up/up", data=b"5", extra=wrong_crc),
        Part(name=b"a..b/..c/d..", data=b"6"),
        Part(name=b"", data=b"7"),
        Part(name=b"\xff.png", data=b"8", flags=0x800),
        Part(name=b"n" * 1024, data=b"9"),
    ]
    found = contents(build(parts))
    expected = {
        "\u00e9.png": b"1",
        "\u00e8.png": b"2",
        "\u00e9ld.png": b"3",
        path.decode(): b"4",
        "up/up": b"5",
        "a..b/..c/d..": b"6",
        "n" * 1024: b"9",
    }
    assert {name: value for name, value in found.items() if isinstance(value, bytes)} == expected
    assert "unsafe" in str(found[""])


@pytest.mark.parametrize(
    "name",
    ["../up", "/abs", "a/../../b", "a\\..\\b", "\\abs", "C:x", "c:\\x", "a/..", "..", "a\0b",
     "\u00e9/../x"],
)  # fmt: skip
def test_unsafe_names(name: str) -> None:
    found = contents(build([Part(name=name.encode(), data=b"x"), Part(name=b"b", data=b"good")]))
    assert "unsafe member name" in str(found[name]) and found["b"] == b"good"


def test_of_two_members_of_one_name_the_last_counts() -> None:
    parts = [
        Part(name=b"a", data=b"first"),
        Part(name=b"b", data=b"other"),
        Part(name=b"a", data=b"last"),
    ]
    data = build(parts)
    assert directory(data).problem.tolist() == [mt.SHADOWED, mt.OK, mt.OK]
    assert contents(data) == {"a": b"last", "b": b"other"}


def test_no_members() -> None:
    table = directory(build([]))
    assert len(table) == 0 and table.directory_crc32 == 0
    assert len(directory(build([Part(name=b"only/a/folder/")]))) == 0
    assert len(directory(build([], zip64=True))) == 0


def test_a_directory_of_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [
        Part(name=f"{i:03d}/PK\x01\x02-{i % 7}".encode(), comment=b"PK\x01\x02" * (i % 3))
        for i in range(200)
    ]
    data = build(parts)
    whole = directory(data)
    monkeypatch.setattr(directory_module, "_TAIL_BYTES", 100)
    monkeypatch.setattr(directory_module, "_CHUNK_BYTES", 61)
    chunked = directory(data)
    assert names(chunked) == names(whole) == [part.name.decode() for part in parts]
    assert chunked.offset.tolist() == whole.offset.tolist()
    assert chunked.directory_crc32 == whole.directory_crc32


def test_more_members_than_16_bits_count_without_zip64() -> None:
    entry = Part(name=b"x")
    one = build([entry])
    start = one.index(b"PK\x01\x02")
    entries = one[start : one.rindex(b"PK\x05\x06")] * 0x10002
    tail = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 2, 2, len(entries), start, 0)
    assert len(directory(one[:start] + entries + tail)) == 0x10002


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.tuples(*[st.integers(0, 60)] * 3), max_size=30),
    fill=st.binary(min_size=1, max_size=8) | st.just(b"PK\x01\x02"),
    cut=st.integers(0, 200),
)
def test_entries_are_found_as_a_walk_finds_them(
    lengths: list[tuple[int, int, int]], fill: bytes, cut: int
) -> None:
    data, places = b"", []
    for n, e, c in lengths:
        places.append(len(data))
        head = struct.pack("<4s6H3L5H2L", b"PK\x01\x02", *[0] * 9, n, e, c, *[0] * 4)
        data += head + (fill * 60)[:n] + (fill * 60)[:e] + (fill * 60)[:c]
    ends = [*places[1:], len(data)]
    data = data[: max(len(data) - cut, 0)]
    whole = [at for at, end in zip(places, ends, strict=False) if end <= len(data)]
    found, stop = entry_places(data)
    assert found.tolist() == whole
    assert stop == (ends[len(whole) - 1] if whole else 0)


@settings(deadline=None, max_examples=60)
@given(
    files=st.dictionaries(
        st.text("ab./\u00e9\u4e2d-", min_size=1, max_size=12)
        .filter(lambda n: mt.is_safe_name(n) and not n.endswith("/")),
        st.tuples(st.binary(max_size=300), st.sampled_from([STORED, DEFLATED, 12, 14])),
        max_size=12,
    ),
    prefix=st.binary(max_size=50),
    comment=st.binary(max_size=50),
)  # fmt: skip
def test_what_zipfile_writes_is_read(
    files: dict[str, tuple[bytes, int]], prefix: bytes, comment: bytes
) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, (content, method) in files.items():
            archive.writestr(name, content, compress_type=method)
        archive.comment = comment
    data = prefix + file.getvalue()
    if b"PK\x05\x06" in comment:
        return
    assert contents(data) == {name: content for name, (content, _) in files.items()}


def test_a_place_that_the_directory_does_not_say() -> None:
    data = build(PARTS)
    table = directory(data)
    good = place(table, 1)
    wrong: list[tuple[Place, str]] = [
        (good._replace(offset=7), "wrong offset: no local header"),
        (good._replace(offset=len(data) - 5), "past the end"),
        (good._replace(method=STORED), "local header says method 8, not 0"),
        (good._replace(method=1), "unsupported compression method 1"),
        (good._replace(stored_bytes=len(data)), "runs past the end"),
        (good._replace(size_bytes=1000), "size mismatch: inflates past 1000 bytes"),
        (good._replace(size_bytes=len(TEXT) + 1), "size mismatch: 7500 bytes, 7501 planned"),
        (good._replace(crc32=5), "CRC mismatch"),
        (good._replace(size_bytes=mt.MAX_MEMBER_BYTES + 1), "over the size limit"),
    ]
    for bad, reason in wrong:
        with pytest.raises(ArchiveError, match=reason):
            read_place(Source(data), bad, len(data))
