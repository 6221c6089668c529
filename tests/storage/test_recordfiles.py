from __future__ import annotations

import json
import tracemalloc
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage.recordbytes import (
    BOM,
    PACKINGS,
    MemoryStore,
    Row,
    cut,
    pack,
    slow_lines,
    slow_values,
)

from dataservice.errors import StorageError
from dataservice.storage.jsonl import Line
from dataservice.storage.recordfiles import (
    Offsets,
    RecordScan,
    count_records,
    heads,
    scan_offsets,
)
from dataservice.storage.recordfiles import content as content_module
from dataservice.storage.recordfiles.finders import Finder
from dataservice.storage.recordfiles.heads import finder_for
from dataservice.storage.recordfiles.lines import LineFinder
from dataservice.storage.recordfiles.values import ValueFinder

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\[]{},\n \u00e9', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("k{", max_size=2), inner),
    max_leaves=8,
)
RECORDS = st.lists(st.dictionaries(st.text('k"]', min_size=1, max_size=3), JSON, max_size=3))
NOISE = st.lists(
    st.sampled_from([b'"', b"\\", b"[", b"]", b"{", b"}", b",", b" ", b"\n", b"a", b"12", b'"x"']),
    max_size=40,
).map(b"".join)


def found(finder: Finder, chunks: Sequence[bytes]) -> tuple[list[Row], int]:
    """The records, and where a problem stands (-1: none)."""
    rows: list[Row] = []
    parts = [finder.feed(chunk) for chunk in chunks]
    last, problem = finder.end()
    for part in (*parts, last):
        lengths = part.stops - part.starts
        rows += zip(part.numbers.tolist(), part.starts.tolist(), lengths.tolist(), strict=True)
    return rows, problem.offset if problem else -1


def scan(name: str, data: bytes, **options: int) -> tuple[list[Line], RecordScan]:
    store = MemoryStore({name: data})
    made = RecordScan(store, name, len(data), deadline_s=9, **options)
    return [line for batch in made.batches() for line in batch], made


def offsets(name: str, data: bytes) -> Offsets:
    return scan_offsets(MemoryStore({name: data}), name, len(data), deadline_s=9)


def bytes_in(name: str, data: bytes) -> list[bytes | None]:
    return [line.data for line in scan(name, data)[0]]


# ---- lines


def test_line_ends_blank_lines_and_byte_order_mark() -> None:
    data = BOM + b'{"a":1}\r\n\n  \t\r\n{"b":2}\n\r\n{"c":"x\xe2\x80\xa8y"}'
    lines, made = scan("a.jsonl", data)
    assert [(line.number, line.data) for line in lines] == [
        (1, b'{"a":1}'),
        (4, b'{"b":2}'),
        (6, b'{"c":"x\xe2\x80\xa8y"}'),
    ]
    assert all(data[line.offset :][: line.length] == line.data for line in lines)
    assert (made.crc32, made.unpacked_bytes) == (zlib.crc32(data), len(data))


@pytest.mark.parametrize("data", [b"", b"\n", b" \r\n\t", BOM, BOM + b"\r\n", b"\xef\xbb"])
def test_files_with_hardly_a_record(data: bytes) -> None:
    expected = [b"\xef\xbb"] if data == b"\xef\xbb" else []
    for name in ("a.jsonl", "a.json"):
        assert bytes_in(name, data) == expected
        assert len(offsets(name, data).offset) == len(expected)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b" ", b"\r\n", BOM, b"\v"]), max_size=30),
    st.integers(1, 9),
)
def test_lines_of_chunks_of_any_size(pieces: list[bytes], size: int) -> None:
    data = b"".join(pieces)
    assert found(finder_for("x.jsonl"), cut(data, size)) == (slow_lines(data), -1)


def test_a_record_over_the_limit_is_reported_and_not_held() -> None:
    data = b"short\n" + b"x" * 50 + b"\nnext\n" + b"y" * 11
    reason = "the record has {} bytes, more than the limit of 10"
    lines, _ = scan("a.jsonl", data, max_record_bytes=10)
    assert lines == [
        Line(1, 0, 5, b"short"),
        Line(2, 6, 50, None, reason.format(50)),
        Line(3, 57, 4, b"next"),
        Line(4, 62, 11, None, reason.format(11)),
    ]
    assert offsets("a.jsonl", data).length.tolist() == [5, 50, 4, 11]


def test_memory_for_a_record_over_the_limit_is_that_of_the_limit() -> None:
    data = b"y" * 30_000_000 + b"\nnext\n"
    tracemalloc.start()
    lines, _ = scan("a.jsonl", data, max_record_bytes=4_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(line.length, line.data) for line in lines] == [(30_000_000, None), (4, b"next")]
    assert peak < 8_000_000


@pytest.mark.parametrize("end", [b"", b"\r", b"  ", b"a"])
def test_blocks_of_blank_lines(end: bytes) -> None:
    data = b"\n" * 5_000 + b" \r\n\t\n\r" * 2_000 + b"\nrecord\r\n" + b"\n" * 3_000 + end
    for size in (1, 7, 1_000, len(data)):
        chunks = [data[at : at + size] for at in range(0, len(data), size)]
        assert found(LineFinder(), chunks) == (slow_lines(data), -1)


# ---- JSON values


@settings(deadline=None, max_examples=300)
@given(NOISE, st.integers(1, 9), st.booleans())
def test_values_of_chunks_of_any_size_in_any_text(data: bytes, size: int, in_array: bool) -> None:
    expected = slow_values(data, in_array=in_array)
    assert found(ValueFinder(in_array=in_array), cut(data, size)) == expected
    assert found(ValueFinder(in_array=in_array), [data]) == expected


@settings(deadline=None, max_examples=150)
@given(RECORDS, st.sampled_from([None, 0, 2]), st.booleans(), st.integers(1, 50), st.booleans())
def test_the_items_of_an_array_and_values_one_after_the_other(
    records: list[dict[str, object]], indent: int | None, ascii_only: bool, size: int, array: bool
) -> None:
    def dumps(value: object) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ascii_only)

    if indent is not None and not array:
        records = [record for record in records if record]
    text = dumps(records) if array else "\n".join(map(dumps, records))
    rows, problem = found(finder_for("x.json"), cut(text.encode(), size))
    assert problem == -1
    assert [json.loads(text.encode()[start : start + n]) for _, start, n in rows] == records
    assert [number for number, _, _ in rows] == list(range(1, len(records) + 1))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'[{"a":1},{"b":"]}\\""}]', [b'{"a":1}', b'{"b":"]}\\""}']),
        (b'\n [\n{"a":1},\n[{"b":2},{}]\n]\n', [b'{"a":1}', b'[{"b":2},{}]']),
        (b'{"a":1}{"b":2}', [b'{"a":1}', b'{"b":2}']),
        (b'{"a":\n1}\n{"b":2}', [b'{"a":\n1}', b'{"b":2}']),
        (b'{}\n{\n"a":1\n}\n{}', [b"{}", b'{\n"a":1\n}', b"{}"]),
        (b'{"a":1}\n{"b":\n{"c":3}\n', [b'{"a":1}', b'{"b":', b'{"c":3}']),  # a broken line
        (b'[{"a":1}]\n[{"b":2}]\n', [b'[{"a":1}]', b'[{"b":2}]']),  # records that are lists
        (b'[{"a":1}, 17, "x", {"b":2}]', [b'{"a":1}', b'17, "x"', b'{"b":2}']),
        (b'[{"a":1},nonsense]', [b'{"a":1}', b"nonsense"]),
        (b'[{"a":1 2},{"b":2}]', [b'{"a":1 2}', b'{"b":2}']),
        (b"[]", []),
        (b"no JSON at all", [b"no JSON at all"]),
        (BOM + b'[{"a":1}]', [b'{"a":1}']),
    ],
)
def test_what_people_call_json(data: bytes, expected: list[bytes]) -> None:
    lines, _ = scan("a.json", data)
    assert [line.data for line in lines] == expected
    assert all(data[line.offset :][: line.length] == line.data for line in lines)


@pytest.mark.parametrize(
    ("data", "offset", "reason"),
    [
        (b'[{"a":1},', 9, "the array is not closed: the file was cut off"),
        (b'[{"a":1}] {"b":2}', 10, "text behind the end of the array"),
        (b'[{"a":1}]\nnotes\n', 10, "text behind the end of the array"),
    ],
)
def test_arrays_that_do_not_end_well(data: bytes, offset: int, reason: str) -> None:
    lines, _ = scan("a.json", data)
    assert lines == [Line(1, 1, 7, b'{"a":1}'), Line(2, offset, 0, None, reason)]
    assert offsets("a.json", data).length.tolist() == [7, 0]


def test_a_record_that_is_cut_off_is_the_last() -> None:
    assert bytes_in("a.json", b'[{"a":1},{"b":"x') == [b'{"a":1}', b'{"b":"x']


def test_a_broken_quote_costs_what_follows_and_no_memory() -> None:
    data = b'[{"a":1},{"b":"x},' + b'{"c":3},' * 1000 + b"]"
    lines, _ = scan("a.json", data, max_record_bytes=100)
    assert [line.data for line in lines] == [b'{"a":1}', None]
    assert lines[1].offset == 9


def test_a_long_text_before_long_space_is_whole() -> None:
    data = b'{"a":\n1} word' + b" " * 6_000_000 + b"{}"
    assert bytes_in("a.json", data) == [b'{"a":\n1}', b"word", b"{}"]


# ---- files: all packings, both ways


def both(name: str, data: bytes, block: int) -> tuple[list[Line], RecordScan]:
    """The rows of RecordScan, which are those of scan_offsets, with blocks of that size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content_module, "_BLOCK_BYTES", block)
        patch.setattr(heads, "_PART_BYTES", block)
        lines, made = scan(name, data)
        rows = offsets(name, data)
        count = count_records(MemoryStore({name: data}), name, len(data), deadline_s=9)
    assert count == len(lines)
    assert rows.offset.tolist() == [line.offset for line in lines]
    assert rows.length.tolist() == [line.length for line in lines]
    assert (rows.crc32, rows.unpacked_bytes) == (made.crc32, made.unpacked_bytes)
    assert rows.crc32 == zlib.crc32(data)
    assert (rows.offset.dtype, rows.length.dtype) == (np.uint64, np.uint32)
    return lines, made


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.sampled_from([b'{"a":1}', b"{}", b"\n", b"\r\n", b" ", b"[{}]", b"x"]), max_size=40
    ),
    st.sampled_from(PACKINGS),
    st.sampled_from(["jsonl", "json"]),
    st.integers(1, 40),
    st.integers(1, 3),
)
def test_every_packing_gives_the_same_records(
    pieces: list[bytes], packing: str, kind: str, block: int, parts: int
) -> None:
    content = b"".join(pieces)
    plain, _ = both(f"x.{kind}", content, block)
    packed = pack(packing, content, name=f"x.{kind}", parts=parts)
    lines, made = both(f"x.{kind}.{packing}".rstrip("."), packed, block)
    assert lines == plain
    assert made.unpacked_bytes == len(content)
    for line in lines:
        if line.data is not None:
            assert content[line.offset : line.offset + line.length] == line.data


CONTENT = b"".join(b'{"id":%d,"text":"%d"}\n' % (i, i * i * 7919) for i in range(3000))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(PACKINGS[1:]), st.floats(0, 1, exclude_max=True), st.integers(0, 255))
def test_a_packed_file_that_is_cut_off_or_damaged(packing: str, where: float, byte: int) -> None:
    whole = pack(packing, CONTENT, parts=3)
    at = int(where * len(whole))
    expected = slow_lines(CONTENT)
    for damaged in (whole[:at], whole[:at] + bytes([byte]) + whole[at + 1 :]):
        lines, made = both(f"x.jsonl.{packing}", damaged, 4096)
        good = lines[:-1] if lines and lines[-1].problem else lines
        if len(damaged) < len(whole):
            assert len(good) < len(lines) or packing == "zip" or at in frame_ends(packing)
        for line, row in zip(good, expected, strict=False):
            if line.data != CONTENT[row[1] : row[1] + row[2]]:
                break  # flipped bits may come out before the checksum tells
        else:
            found = [(line.number, line.offset, line.length) for line in good]
            assert found == expected[: len(good)]
        if len(good) < len(lines):
            assert (lines[-1].data, lines[-1].length) == (None, 0)
            assert lines[-1].problem
        assert made.crc32 == zlib.crc32(damaged)


def frame_ends(packing: str) -> list[int]:
    step = -(-len(CONTENT) // 3)
    sizes = [len(pack(packing, CONTENT[at : at + step])) for at in range(0, len(CONTENT), step)]
    return [int(size) for size in np.cumsum(sizes)]


@pytest.mark.parametrize("packing", PACKINGS[1:])
def test_all_before_the_cut_is_used(packing: str) -> None:
    records = [
        b'{"text":"%s"}' % bytes(f"{i * 7919 % 10007:x}" * 20, "ascii") for i in range(20_000)
    ]
    whole = pack(packing, b"\n".join(records))
    lines, _ = scan(f"x.jsonl.{packing}", whole[: len(whole) // 2])
    good = [line.data for line in lines[:-1]]
    assert good == records[: len(good)]
    assert len(good) > 4_000
    assert lines[-1].offset == sum(len(record) + 1 for record in records[: len(good)])
    assert "bytes of content" in lines[-1].problem


def test_a_file_that_shrinks_is_a_storage_error() -> None:
    store = MemoryStore({"a.jsonl": b"{}\n"})
    with pytest.raises(StorageError, match=r"a.jsonl ends at 3, expected 9 bytes"):
        list(RecordScan(store, "a.jsonl", 9, deadline_s=9).batches())
    with pytest.raises(StorageError):
        scan_offsets(store, "a.jsonl", 9, deadline_s=9)


def test_batches_are_bounded_in_records_and_bytes() -> None:
    data = (b"{}\n" * 5 + b"x" * 9_000_000 + b"\n") * 3
    made = RecordScan(MemoryStore({"a.jsonl": data}), "a.jsonl", len(data), deadline_s=9)
    assert [len(batch) for batch in made.batches(4)] == [4, 4, 4, 4, 2]
    made = RecordScan(MemoryStore({"a.jsonl": data}), "a.jsonl", len(data), deadline_s=9)
    assert [len(batch) for batch in made.batches()] == [12, 6]


def test_a_large_array_is_scanned_in_little_memory() -> None:
    record = json.dumps({"conversations": [{"from": "human", "value": 'a "b" \\ ' * 60}]}).encode()
    data = b"[" + b", ".join([record] * 60_000) + b"]"
    assert len(data) > 40_000_000
    store = MemoryStore({"a.json": data})
    made = RecordScan(store, "a.json", len(data), deadline_s=9)
    tracemalloc.start()
    count = sum(len(batch) for batch in made.batches())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 60_000
    assert peak < 30_000_000


def test_line_finder_starts_where_it_is_told() -> None:
    assert found(LineFinder(10), [b"ab\ncd"]) == ([(1, 10, 2), (2, 13, 2)], -1)
