"""Reads of what lies in memory: no other thread is asked, and nothing else changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.forked_reads import shard_of

from dataservice.core.packspec import ShardRef
from dataservice.errors import StaleIndexError
from dataservice.storage import objects
from dataservice.storage.backends import FileCache
from dataservice.storage.deadline import ReaderPool
from dataservice.storage.objects import ShardReader, staged_path

CONTENT = bytes(range(256)) * 300


@pytest.fixture
def shard(tmp_path: Path) -> ShardRef:
    path = tmp_path / "a.zip"
    path.write_bytes(CONTENT)
    return shard_of(path)


@pytest.fixture
def reader() -> Iterator[ShardReader]:
    with ShardReader(None, deadline_s=10, retries=0) as made:
        yield made


@pytest.fixture
def hand_overs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What another thread was asked for."""
    asked, run = [], ReaderPool.run

    def counted(self, call, *, timeout_s, what):
        asked.append(what)
        return run(self, call, timeout_s=timeout_s, what=what)

    monkeypatch.setattr(ReaderPool, "run", counted)
    return asked


@pytest.fixture(autouse=True)
def _supported(tmp_path: Path) -> None:
    path = tmp_path / "probe"
    path.write_bytes(b"12345")
    files = FileCache()
    try:
        assert files.read(str(path), 1, 3)[0] == b"234"
        if files.read_cached(str(path), 1, 3) is None:
            pytest.skip("this file system cannot say whether a read would wait")
    finally:
        files.close()


def test_only_the_first_read_of_a_file_asks_another_thread(
    reader: ShardReader, shard: ShardRef, hand_overs: list[str]
) -> None:
    for offset, size in ((0, 10), (300, 700), (0, 0), (len(CONTENT) - 5, 5)):
        assert reader.read(shard, offset, size) == CONTENT[offset : offset + size]
    assert len(hand_overs) == 1
    assert reader.origin_bytes == 715


def test_a_staged_copy_as_well_but_for_a_sweep_a_second(
    tmp_path: Path, shard: ShardRef, hand_overs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_SWEEP_S", 100.0)
    cache = tmp_path / "cache"
    cache.mkdir()
    Path(staged_path(str(cache), shard)).write_bytes(CONTENT)
    with ShardReader(str(cache)) as reader:
        for _ in range(4):
            assert reader.read(shard, 5, 9) == CONTENT[5:14]
        assert len(hand_overs) == 1
        monkeypatch.setattr(reader, "_next_sweep", 0.0)
        assert reader.read(shard, 5, 9) == CONTENT[5:14]
        assert len(hand_overs) == 2
        assert (reader.staged_bytes, reader.origin_bytes) == (45, 0)


@pytest.mark.parametrize("change", ["longer", "shorter", "touched"])
def test_a_file_that_changed_is_noticed(reader: ShardReader, shard: ShardRef, change: str) -> None:
    reader.read(shard, 0, 10)
    if change == "longer":
        with open(shard.url, "ab") as file:
            file.write(b"x")
    elif change == "shorter":
        os.truncate(shard.url, 1000)
    else:
        os.utime(shard.url, ns=(1, shard.mtime_ns + 1_000_000_000))
    with pytest.raises(StaleIndexError, match="changed"):
        reader.read(shard, 0, 10)


def test_what_is_not_in_memory_is_read_from_the_disk(reader: ShardReader, shard: ShardRef) -> None:
    reader.read(shard, 0, 10)
    fd = os.open(shard.url, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    assert reader.read(shard, 70_000, 5000) == CONTENT[70_000:75_000]


def test_a_large_read_goes_the_usual_way(
    reader: ShardReader, shard: ShardRef, hand_overs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "CACHED_BYTES", 100)
    for _ in range(2):
        assert reader.read(shard, 7, 101) == CONTENT[7:108]
    assert len(hand_overs) == 2


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(CONTENT)), st.integers(0, 5000))
def test_equal_to_the_usual_way(
    reader: ShardReader, shard: ShardRef, offset: int, size: int
) -> None:
    size = min(size, len(CONTENT) - offset)
    assert reader.read(shard, offset, size) == reader.read_origin(shard, offset, size)


def test_a_closed_file_is_not_read_and_every_descriptor_is_given_back(
    tmp_path: Path, shard: ShardRef
) -> None:
    files = FileCache(capacity=1)
    other = tmp_path / "b"
    other.write_bytes(b"other")
    assert files.read_cached(shard.url, 0, 4) is None
    files.read(shard.url, 0, 4)
    assert files.read_cached(shard.url, 0, 4)[0] == CONTENT[:4]
    assert files.read_cached(shard.url, len(CONTENT) - 2, 4) is None
    files.read(str(other), 0, 5)
    assert files.read_cached(shard.url, 0, 4) is None
    files.discard(str(other))
    assert files.read_cached(str(other), 0, 5) is None
    files.close()
    left = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    assert not left & {shard.url, str(other)}
