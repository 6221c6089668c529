from __future__ import annotations

import io
import json
import os
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage.recordbytes import MemoryStore

from dataservice.core.packspec import ImageSpec, ShardRef
from dataservice.errors import ArchiveError, DataError, RecordError, StorageError
from dataservice.storage.jsonl import Line
from dataservice.storage.objects import ShardReader
from dataservice.storage.parquet import read_image, reading
from dataservice.storage.recordfiles import RecordScan, count_records, read_record, scan_offsets

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def finevision(rows: int = 40) -> pa.Table:
    images = [
        None if i % 5 == 4 else [{"bytes": b"%d/%d" % (i, n), "path": None} for n in range(i % 3)]
        for i in range(rows)
    ]
    texts = [[{"user": f"Question {i}", "assistant": "Yes."}] * (i % 3) for i in range(rows)]
    return pa.table(
        {
            "images": pa.array(images, pa.list_(IMAGE)),
            "texts": texts,
            "source": [f"set {i % 2}" for i in range(rows)],
            "relevance_ratings": [[i % 5] for i in range(rows)],
            "embedding": pa.array([b"\0" * 30] * rows),
        }
    )


def onevision(rows: int = 40) -> pa.Table:
    images = [
        {"bytes": bytes([i]) * (i * 50), "path": f"{i}.png"} if i % 4 else None for i in range(rows)
    ]
    talk = [
        [{"from": "human", "value": f"<image>{i}"}, {"from": "gpt", "value": "\u00e9"}]
        for i in range(rows)
    ]
    return pa.table(
        {
            "id": [str(i) for i in range(rows)],
            "image": pa.array(images, IMAGE),
            "conversations": talk,
            "data_source": ["x"] * rows,
        }
    )


def written(table: pa.Table, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **{"row_group_size": 17, **options})
    return file.getvalue()


def shard_of(data: bytes, name: str = "a.parquet") -> ShardRef:
    return ShardRef(
        source="s", name=name, url=name, size_bytes=len(data), mtime_ns=0, packing="parquet"
    )


def read_of(data: bytes) -> Callable[[ShardRef, int, int], bytes]:
    return lambda shard, offset, size: data[offset : offset + size]


def scanned(data: bytes, **options: int) -> list[Line]:
    store = MemoryStore({"a.parquet": data})
    made = RecordScan(store, "a.parquet", len(data), deadline_s=9, **options)
    lines = [line for batch in made.batches() for line in batch]
    rows = scan_offsets(store, "a.parquet", len(data), deadline_s=9)
    if not options:
        assert count_records(store, "a.parquet", len(data), deadline_s=9) == len(lines)
        assert rows.offset.tolist() == [line.offset for line in lines]
        assert rows.length.tolist() == [line.length for line in lines]
        assert (rows.crc32, rows.unpacked_bytes) == (made.crc32, len(data))
    return lines


def image_spec(row: int, member: str, size_bytes: int = 0) -> ImageSpec:
    return ImageSpec(
        shard=0,
        member=member,
        offset=row,
        stored_bytes=size_bytes,
        size_bytes=size_bytes,
        method=-3,
        crc32=-1,
        width=1,
        height=1,
        target_width=1,
        target_height=1,
    )


def test_rows_of_finevision_as_records() -> None:
    table = finevision()
    lines = scanned(written(table))
    expected = table.drop_columns(["embedding"]).to_pylist()
    for row in expected:
        if row["images"] is not None:
            row["images"] = [f"images/{n}" for n in range(len(row["images"]))]
    assert [json.loads(line.data or b"") for line in lines] == expected
    assert [(line.number, line.offset) for line in lines] == [(i + 1, i) for i in range(40)]
    assert lines[1].data == (
        b'{"images":["images/0"],"texts":[{"user":"Question 1","assistant":"Yes."}],'
        b'"source":"set 1","relevance_ratings":[1]}'
    )


def test_rows_of_onevision_as_records() -> None:
    lines = scanned(written(onevision()))
    assert json.loads(lines[0].data or b"")["image"] is None
    assert json.loads(lines[1].data or b"") == {
        "id": "1",
        "image": "image/0",
        "conversations": [
            {"from": "human", "value": "<image>1"},
            {"from": "gpt", "value": "\u00e9"},
        ],
        "data_source": "x",
    }


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_records_and_images_in_any_order(compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_KEPT_BYTES", 3000)
    table = finevision()
    data = written(table, compression=compression)
    shard, read = shard_of(data, f"{compression}.parquet"), read_of(data)
    lines = scanned(data)
    rows = table.to_pylist()
    order = list(range(40)) * 2
    random.Random(1).shuffle(order)
    for row in order:
        assert read_record(read, shard, row, 0) == lines[row].data
        for n, image in enumerate(rows[row]["images"] or []):
            spec = image_spec(row, f"images/{n}", len(image["bytes"]))
            assert read_image(read, spec, shard) == image["bytes"]


def test_images_are_not_read_with_records_nor_records_with_images() -> None:
    row = {"image": {"bytes": os.urandom(300_000), "path": None}, "caption": "x" * 1000}
    schema = pa.schema([("image", IMAGE), ("caption", pa.string())])
    data = written(pa.Table.from_pylist([row] * 30, schema), row_group_size=10, compression="none")
    store = MemoryStore({"a.parquet": data})
    scan = RecordScan(store, "a.parquet", len(data), deadline_s=9)
    assert sum(map(len, scan.batches())) == 30
    assert store.bytes_read < 200_000


@pytest.mark.parametrize(
    ("row", "member", "size_bytes", "reason"),
    [
        (0, "image/0", 0, "row 0 has no bytes of image image/0"),
        (1, "image/1", 0, "row 1 has no bytes of image image/1"),
        (1, "image/0", 51, "the image has 50 bytes, 51 in the index"),
        (1, "picture/0", 0, "no image column 'picture'"),
        (40, "image/0", 0, "row 40 of 40 rows"),
        (1, "image", 0, "'image' names no image"),
        (1, "image/-1", 0, "'image/-1' names no image"),
    ],
)
def test_images_that_are_not_there(row: int, member: str, size_bytes: int, reason: str) -> None:
    data = written(onevision())
    with pytest.raises(ArchiveError, match=reason) as caught:
        read_image(read_of(data), image_spec(row, member, size_bytes), shard_of(data))
    assert (caught.value.source, caught.value.shard) == ("s", "a.parquet")


def test_large_columns_that_no_layout_uses_are_not_read() -> None:
    rows = [{"text": "t" * 100_000, "ocr": "o" * 100_000, "note": "n"}] * 20
    data = written(pa.Table.from_pylist(rows))
    assert set(json.loads(scanned(data)[0].data or b"")) == {"text", "note"}


def test_a_record_over_the_limit_and_a_row_that_is_no_text() -> None:
    table = pa.table({"text": pa.array([b"short", b"bad \xff", b"long" * 9]).cast(pa.binary())})
    texts = pa.table({"text": table.column("text").combine_chunks().view(pa.string())})
    lines = scanned(written(texts), max_record_bytes=30)
    assert lines[0] == Line(1, 0, 16, b'{"text":"short"}')
    assert (lines[1].data, lines[1].length) == (None, 0)
    assert "can't decode byte 0xff" in lines[1].problem
    assert (lines[2].data, lines[2].length) == (None, 47)
    assert "more than the limit of 30" in lines[2].problem


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "does not end with a Parquet footer"),
        (written(finevision())[:-9], "does not end with a Parquet footer"),
        (written(finevision())[:-4] + b"PARE", "encrypted"),
        (b"PAR1" + b"\xff" * 4 + b"PAR1", "a footer of 4294967295 bytes"),
        (written(finevision())[-3000:], "damaged Parquet file"),
        (written(pa.table({"blob": [b"x"]})), "no column that a record can be made of"),
    ],
)
def test_files_that_are_no_records_are_one_reason(data: bytes, reason: str) -> None:
    (line,) = scanned(data)
    assert line == Line(1, 0, 0, None, line.problem)
    assert reason in line.problem


def test_a_damaged_row_group_ends_the_rows() -> None:
    data = bytearray(written(finevision(), compression="zstd", use_dictionary=False))
    starts = [i for i in range(len(data)) if data[i : i + 4] == b"\x28\xb5\x2f\xfd"]
    at = starts[len(starts) // 2]
    data[at : at + 4] = b"\0\0\0\0"
    lines = scanned(bytes(data))
    assert 0 < len(lines) < 40
    assert all(line.data for line in lines[:-1])
    assert "damaged Parquet file: row group" in lines[-1].problem


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.data())
def test_any_damage_is_a_reason(data: st.DataObject) -> None:
    good = data.draw(st.sampled_from(GOOD))
    bad = bytearray(good)
    for at in data.draw(st.lists(st.integers(0, len(good) - 1), min_size=1, max_size=5)):
        bad[at] = data.draw(st.integers(0, 255))
    lines = scanned(bytes(bad))
    assert all(line.data is not None or line.problem for line in lines)
    for row in (0, 30):
        for member in ("images/0", "image/0"):
            try:
                read_image(read_of(bytes(bad)), image_spec(row, member), shard_of(bytes(bad)))
            except DataError:
                continue


GOOD = [
    written(table, compression=compression, store_schema=False)
    for table in (finevision(), onevision())
    for compression in ("none", "zstd")
]


def test_what_the_store_raises_is_passed_on() -> None:
    data = written(finevision())
    failing = False

    def read(shard: ShardRef, offset: int, size: int) -> bytes:
        if failing:
            raise StorageError("the store is away")
        return data[offset : offset + size]

    shard = shard_of(data, "away.parquet")
    read_record(read, shard, 0, 0)
    failing = True
    with pytest.raises(StorageError, match="away"):
        read_image(read, image_spec(30, "images/0"), shard)
    failing = False
    assert read_image(read, image_spec(31, "images/0"), shard) == b"31/0"
    store = MemoryStore({"a.parquet": data[:-1]})
    with pytest.raises(StorageError, match=r"a.parquet ends at"):
        list(RecordScan(store, "a.parquet", len(data), deadline_s=9).batches())


def test_another_read_of_a_shard_does_not_see_what_the_first_read() -> None:
    table = onevision(10)
    good = written(table, compression="none", use_dictionary=False)
    bad = good.replace(b"<image>3", b"<IMAGE>3")
    shard = shard_of(good, "copy.parquet")
    copy, origin = read_of(bad), read_of(good)
    assert b"<IMAGE>3" in read_record(copy, shard, 3, 0)
    assert b"<image>3" in read_record(origin, shard, 3, 0)
    assert b"<IMAGE>3" in read_record(copy, shard, 3, 0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_through_a_shard_reader_in_threads_and_after_fork(tmp_path: Path) -> None:
    table = onevision()
    path = tmp_path / "a.parquet"
    path.write_bytes(written(table))
    stat = path.stat()
    shard = replace(
        shard_of(path.read_bytes(), "x.parquet"), url=str(path), mtime_ns=stat.st_mtime_ns
    )
    wrong: list[int] = []
    with ShardReader(None, deadline_s=30) as reader:

        def read_all(seed: int) -> None:
            rows = list(range(40))
            random.Random(seed).shuffle(rows)
            for row in rows:
                if json.loads(read_record(reader.read, shard, row, 0))["id"] != str(row):
                    wrong.append(row)
                if row % 4:
                    spec = image_spec(row, "image/0")
                    if read_image(reader.read, spec, shard) != bytes([row]) * (row * 50):
                        wrong.append(row)

        threads = [threading.Thread(target=read_all, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        child = os.fork()
        if child == 0:
            read_all(9)
            os._exit(len(wrong))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(RecordError, match="row 99 of 40 rows"):
            read_record(reader.read, shard, 99, 0)


@pytest.mark.parametrize("name", ["jpg", "image_bytes", "image"])
def test_bytes_alone_in_a_column_of_a_usual_name(name: str) -> None:
    pictures = [b"first", None, b"third"]
    table = pa.table({"caption": ["a", "b", "c"], name: pa.array(pictures, pa.binary())})
    data = written(table)
    records = [json.loads(line.data or b"") for line in scanned(data)]
    assert [record["image"] for record in records] == [f"{name}/0", None, f"{name}/0"]
    found = read_image(read_of(data), image_spec(2, f"{name}/0", 5), shard_of(data))
    assert found == b"third"
    with pytest.raises(ArchiveError, match="has no bytes of image"):
        read_image(read_of(data), image_spec(1, f"{name}/0", 5), shard_of(data))
