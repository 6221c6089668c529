from __future__ import annotations

import dataclasses
import gzip
import io
import os
import random
import threading
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from storage.staging.origins import CONTENT, CountingStore, Origin

from dataservice.errors import StaleIndexError, StorageError
from dataservice.storage.staging import Need, copying, ranges
from dataservice.storage.staging.copying import checked_later, copy_into
from dataservice.storage.staging.ranges import Ranges

SIZE = len(CONTENT)


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ranges, copying):
        monkeypatch.setattr(module, "RANGE_BYTES", 7001)
    monkeypatch.setattr(copying, "_WRITE_BYTES", 999)


class Copier:
    def __init__(self, folder: Path) -> None:
        self.store = CountingStore()
        self.ranges = Ranges(self.store, threads=8, deadline_s=10, stopped=threading.Event())
        self.path = folder / "copy"

    def copy(self, need: Need) -> bytes:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            copy_into(fd, need, self.ranges, window=4, on_range=lambda _size, _left: None)
        finally:
            os.close(fd)
        return self.path.read_bytes()

    def close(self) -> None:
        self.ranges.close()
        self.store.close()


@pytest.fixture
def copier(tmp_path: Path) -> Iterator[Copier]:
    made = Copier(tmp_path)
    yield made
    made.close()


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    return Origin(tmp_path / "origin")


@pytest.mark.parametrize("size", [0, 1, 7001, 7002, SIZE])
def test_a_copy_is_the_original(copier: Copier, origin: Origin, size: int) -> None:
    assert copier.copy(origin.make("a.jsonl", size)) == CONTENT[:size]


def test_a_change_is_refused_by_its_time_size_or_crc(copier: Copier, origin: Origin) -> None:
    need = origin.make("a.jsonl", SIZE)
    stat = os.stat(need.shard.url)
    Path(need.shard.url).write_bytes(CONTENT[::-1])
    with pytest.raises(StaleIndexError, match=r"shard s/a\.jsonl changed"):
        copier.copy(need)
    os.utime(need.shard.url, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(StaleIndexError, match="has CRC"):
        copier.copy(need)
    Path(need.shard.url).write_bytes(CONTENT[1:])
    os.utime(need.shard.url, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(StaleIndexError, match="changed"):
        copier.copy(need)
    Path(need.shard.url).unlink()
    with pytest.raises(FileNotFoundError):
        copier.copy(need)


def lines() -> bytes:
    rng = random.Random(1)
    return b"".join(b'{"text": "%d"}\n' % rng.randrange(10**9) for _ in range(5000))


def zipped(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jsonl", content)
    return file.getvalue()


@pytest.mark.parametrize("packing", ["gz", "zst", "zip"])
def test_a_packed_shard_is_copied_unpacked(copier: Copier, origin: Origin, packing: str) -> None:
    content = lines()
    pack = {"gz": gzip.compress, "zst": zstandard.compress, "zip": zipped}
    packed = pack[packing](content)
    assert len(packed) > 3 * 7001
    need = origin.make_of("a", packed, packing=packing, unpacked_bytes=len(content))
    assert copier.copy(need) == content
    wrong = dataclasses.replace(need, crc32=need.crc32 ^ 1)
    with pytest.raises(StaleIndexError, match="has CRC"):
        copier.copy(wrong)
    longer = dataclasses.replace(need.shard, unpacked_bytes=len(content) + 1)
    with pytest.raises(StaleIndexError, match=r"shard s/a does not unpack .* run `dataservice"):
        copier.copy(dataclasses.replace(need, shard=longer))


def test_a_damaged_end_that_the_index_knows_is_left_out(copier: Copier, origin: Origin) -> None:
    content = lines()
    packed = gzip.compress(content[:30_000]) + gzip.compress(content[30_000:])[:-2000]
    need = origin.make_of("a.gz", packed, packing="gz", unpacked_bytes=30_000)
    assert copier.copy(need) == content[:30_000]


def test_what_later_reads_do_not_check_is_read_back(
    copier: Copier, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fail_silently(fd: int) -> None:
        real(fd)
        os.pwrite(fd, b"\xff", 3)

    monkeypatch.setattr(os, "fsync", fail_silently)
    plain = dataclasses.replace(origin.make("a.jpg", SIZE), crc32=-1)
    assert not checked_later(plain)
    with pytest.raises(StorageError, match="is the disk failing"):
        copier.copy(plain)
    assert not checked_later(
        dataclasses.replace(plain, shard=dataclasses.replace(plain.shard, packing="gz"), crc32=7)
    )
    for checked in (
        origin.make("a.jsonl", SIZE),
        dataclasses.replace(origin.make("A.ZIP", SIZE), crc32=-1),
    ):
        assert checked_later(checked)
        assert copier.copy(checked) != CONTENT
    parquet = origin.make_of("a.parquet", CONTENT, packing="parquet")
    assert parquet.crc32 == zlib.crc32(CONTENT) and not checked_later(parquet)
