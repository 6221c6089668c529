from __future__ import annotations

import gc
import logging
import os
import random
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from storage.recordbytes import PACKINGS, pack

from dataservice.core.packspec import ShardRef
from dataservice.errors import RecordError, StaleIndexError, StorageError, StorageTimeout
from dataservice.storage.objects import ShardReader, staged_path
from dataservice.storage.packed.forward import ForwardReader

CONTENT = b"".join(b'{"id":%d,"text":"%d"}\n' % (i, i * i * 7919) for i in range(300_000))
PACKED = {packing: pack(packing, CONTENT) for packing in PACKINGS[1:]}


def shard_of(packing: str, path: Path, content: bytes = CONTENT) -> ShardRef:
    stat = path.stat()
    return ShardRef(
        source="s",
        name=path.name,
        url=str(path),
        size_bytes=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        packing=packing,
        unpacked_bytes=len(content),
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


@pytest.fixture
def reader(cache: Path) -> Iterator[ShardReader]:
    with ShardReader(str(cache), deadline_s=30, retries=0) as made:
        yield made


def shard_in(folder: Path, packing: str) -> ShardRef:
    path = folder / f"a.jsonl.{packing}"
    path.write_bytes(PACKED[packing])
    return shard_of(packing, path)


@pytest.mark.parametrize("packing", PACKINGS[1:])
def test_a_packed_shard_from_origin_then_from_its_copy(
    reader: ShardReader, tmp_path: Path, cache: Path, packing: str
) -> None:
    shard = shard_in(tmp_path, packing)
    for offset in (0, 5_000_000, 4_999_000, len(CONTENT) - 9):
        assert reader.read(shard, offset, 9) == CONTENT[offset : offset + 9]
    assert (reader.origin_bytes, reader.staged_bytes) == (36, 0)
    Path(staged_path(str(cache), shard)).write_bytes(PACKED[packing])  # not what a copy must be
    assert reader.read(shard, 3, 9) == CONTENT[3:12]
    assert reader.staged_bytes == 0
    reader.drop_copy(shard)
    Path(staged_path(str(cache), shard)).write_bytes(CONTENT)
    assert reader.read(shard, 3, 9) == CONTENT[3:12]
    assert reader.read_origin(shard, 3, 9) == CONTENT[3:12]
    assert reader.staged_bytes == 9
    with pytest.raises(StaleIndexError, match=f"has {len(CONTENT)} bytes, but 2 are wanted at"):
        reader.read(shard, len(CONTENT) - 1, 2)


def test_going_back_starts_again_and_warns_once(
    reader: ShardReader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard = shard_in(tmp_path, "gz")
    with caplog.at_level(logging.WARNING):
        reader.read(shard, 9_000_000, 9)
        assert reader.read(shard, 8_000_000, 9) == CONTENT[8_000_000:8_000_009]
        assert not caplog.records
        for offset in (100, 9_000_000, 0):
            assert reader.read(shard, offset, 9) == CONTENT[offset : offset + 9]
    (warning,) = caplog.messages
    assert f"s/a.jsonl.gz ({shard.size_bytes} bytes, {len(CONTENT)} unpacked)" in warning
    assert "for the record at 100" in warning


class Counting:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.read_bytes = 0
        self.error: Exception | None = None

    def __call__(self, shard: ShardRef, offset: int, size: int, deadline_s: float) -> bytes:
        if self.error:
            raise self.error
        self.read_bytes += size
        return self.data[offset : offset + size]


def plain_shard(packing: str, name: str = "a") -> ShardRef:
    return ShardRef(
        source="s",
        name=name,
        url=name,
        size_bytes=len(PACKED[packing]),
        mtime_ns=0,
        packing=packing,
        unpacked_bytes=len(CONTENT),
    )


def test_several_places_at_once_do_not_start_again() -> None:
    origin = Counting(PACKED["zst"])
    reader = ForwardReader(origin)
    places = [0, 2_000_000, 7_000_000]
    for step in range(500):
        place = places[step % 3] + step * 50
        assert reader.read(plain_shard("zst"), place, 7, deadline_s=9) == CONTENT[place : place + 7]
    assert origin.read_bytes <= 3 * len(PACKED["zst"])


def test_many_shards_in_any_order_and_threads() -> None:
    reader = ForwardReader(Counting(PACKED["gz"]))
    wrong: list[object] = []

    def read(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(30):
            shard = plain_shard("gz", f"{chosen.randrange(3)}")
            at, size = chosen.randrange(1_500_000), chosen.randrange(100_000)
            if reader.read(shard, at, size, deadline_s=60) != CONTENT[at : at + size]:
                wrong.append((shard, at))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert wrong == []


def test_memory_is_bounded_in_shards_and_in_the_place() -> None:
    reader = ForwardReader(Counting(PACKED["gz"]))
    gc.collect()
    tracemalloc.start()
    for number in range(12):
        reader.read(plain_shard("gz", str(number)), len(CONTENT) - 1, 1, deadline_s=60)
    kept, _ = tracemalloc.get_traced_memory()
    reader.close()
    gc.collect()
    closed, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 8 * 7_500_000
    assert closed < 1_000_000


def test_a_deadline_ends_the_read_and_the_next_goes_on() -> None:
    origin = Counting(PACKED["gz"])
    reader = ForwardReader(origin)
    shard = plain_shard("gz")
    with pytest.raises(StorageTimeout, match="unpacked up to 0, not yet to 1"):
        reader.read(shard, 0, 1, deadline_s=0.0)
    assert reader.read(shard, 0, 1, deadline_s=9) == CONTENT[:1]
    cursor = reader._cursors[0]
    with cursor.lock, pytest.raises(StorageTimeout, match="other reads of it"):
        reader.read(shard, 0, 1, deadline_s=0.01)


def test_a_failed_read_does_not_stay() -> None:
    origin = Counting(PACKED["zst"])
    reader = ForwardReader(origin)
    origin.error = StorageError("the store is away")
    with pytest.raises(StorageError, match="away"):
        reader.read(plain_shard("zst"), 5, 5, deadline_s=9)
    origin.error = None
    assert reader.read(plain_shard("zst"), 5, 5, deadline_s=9) == CONTENT[5:10]


def test_damage_names_the_shard_and_spares_what_stands_before(
    reader: ShardReader, tmp_path: Path
) -> None:
    path = tmp_path / "b.jsonl.gz"
    path.write_bytes(PACKED["gz"][: len(PACKED["gz"]) // 2])
    shard = shard_of("gz", path)
    assert reader.read(shard, 100, 50) == CONTENT[100:150]
    with pytest.raises(RecordError, match=r"source s, shard b.jsonl.gz: the gzip data ends"):
        reader.read(shard, len(CONTENT) - 9, 9)
    assert reader.read(shard, 100, 50) == CONTENT[100:150]


def test_a_packed_shard_that_changed_is_named(reader: ShardReader, tmp_path: Path) -> None:
    shard = shard_in(tmp_path, "gz")
    with pytest.raises(StaleIndexError, match=r"shard s/a.jsonl.gz changed.*mtime"):
        reader.read(replace(shard, mtime_ns=shard.mtime_ns + 1), 0, 1)
    missing = replace(shard, url=f"{shard.url}.none")
    with pytest.raises(StorageError, match=r"a.jsonl.gz is not there"):
        reader.read(missing, 0, 1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_unpacks_for_itself(reader: ShardReader, tmp_path: Path) -> None:
    shard = shard_in(tmp_path, "gz")
    reader.read(shard, 9_000_000, 1)
    child = os.fork()
    if child == 0:
        good = reader.read(shard, 50, 9) == CONTENT[50:59]
        os._exit(0 if good else 1)
    assert reader.read(shard, 9_000_009, 3) == CONTENT[9_000_009:9_000_012]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
