"""What fsspec knows besides S3 and HTTP, and what is said where it knows nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dataservice.core.packspec import ShardRef
from dataservice.errors import StaleIndexError, StorageError
from dataservice.storage.listing import SourceListing, list_source
from dataservice.storage.objects import ShardReader, Store
from dataservice.storage.remote import FsspecBackend, backend
from dataservice.storage.sources import SourceFiles

NOON = datetime(2026, 11, 2, 12, tzinfo=UTC)


class Told(fsspec.AbstractFileSystem):
    """Says of its one file what the test tells it to, and keeps listings like many clients do."""

    protocol = "told"
    told: ClassVar[dict[str, Any]] = {}
    calls = 0

    def ls(self, path: str, detail: bool = True, **options: object) -> list[Any]:
        Told.calls += 1
        if "/dir" not in self.dircache:
            self.dircache["/dir"] = [{"name": "dir/a", "type": "file", **self.told}]
        return self.dircache["/dir"]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def info(self, path: str, **options: object) -> dict[str, Any]:
        if not path.endswith("/a"):
            raise FileNotFoundError(path)
        return self.ls("dir")[0]

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: object) -> bytes:
        return b"0123456789"[start:end]


class Counted(MemoryFileSystem):
    """Counts what is asked of it; the times in its listings are `late` seconds later."""

    protocol = "counted"
    calls: ClassVar[list[str]] = []
    late: ClassVar[int] = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("counted://"))

    def info(self, path: str, **options: object) -> dict[str, Any]:
        Counted.calls.append(f"info {path}")
        return super().info(path, **options)

    def ls(self, path: str, detail: bool = True, **options: object) -> list[Any]:
        Counted.calls.append(f"ls {path}")
        found = super().ls(path, detail=True, **options)
        return [{**info, "created": info.get("created", 0) + self.late} for info in found]

    def find(self, path: str, *args: Any, **options: Any) -> Any:
        Counted.calls.append(f"find {path}")
        found = super().find(path, *args, **options)
        return {n: {**i, "created": i.get("created", 0) + self.late} for n, i in found.items()}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    fsspec.register_implementation("told", Told, clobber=True)
    fsspec.register_implementation("counted", Counted, clobber=True)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(sleep=lambda _: None)
    yield made
    made.close()


def told(**info: object) -> int:
    Told.told = {"size": 10, **info}
    return FsspecBackend().stat("told://dir/a").mtime_ns


def test_identity_from_what_a_store_tells() -> None:
    assert told() == 0
    assert told(mtime=1.5) == 1_500_000_000
    assert told(LastModified=NOON) == int(NOON.timestamp()) * 10**9
    first, second = (told(updated=NOON, etag=tag) for tag in ("x", "y"))
    assert first != second
    assert first // 10**9 == second // 10**9 == int(NOON.timestamp())
    assert told(etag="x") not in (0, told(etag="y"))


def test_no_listing_is_kept(store: Store) -> None:
    told()
    assert store.stat("told://dir/a", deadline_s=5).size_bytes == 10
    Told.told = {"size": 11}
    assert store.stat("told://dir/a", deadline_s=5).size_bytes == 11
    assert list(store.glob("told://dir/*", deadline_s=5)) == ["told://dir/a"]


def test_a_change_shows_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = ShardRef(
        source="s", name="a", url="told://dir/a", size_bytes=10, mtime_ns=told(mtime=7)
    )
    with ShardReader(None, deadline_s=5, retries=0) as reader:
        assert reader.read(shard, 2, 3) == b"234"
        stats = Told.calls
        assert reader.read(shard, 3, 3) == b"345"
        assert Told.calls == stats
        told(mtime=8)
        monkeypatch.setattr(backend, "_STAT_KEPT_S", 0)
        with pytest.raises(StaleIndexError, match="mtime"):
            reader.read(shard, 2, 3)


def test_a_replaced_file_in_memory_is_another_version(store: Store) -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file("/stores/a", b"first")
    first = store.stat("memory://stores/a", deadline_s=5)
    files.pipe_file("/stores/a", b"other")
    assert store.stat("memory://stores/a", deadline_s=5) != first
    assert store.read("memory://stores/a", 1, 99, deadline_s=5) == b"other"[1:]
    assert store.read("memory://stores/a", 5, 9, deadline_s=5) == b""


def test_a_file_that_is_changed_in_place_is_noticed(tmp_path: Any) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    stat = path.stat()
    shard = ShardRef(source="s", name="a", url=str(path), size_bytes=10, mtime_ns=stat.st_mtime_ns)
    with ShardReader(None, deadline_s=5, retries=0) as reader:
        assert reader.read(shard, 2, 3) == b"234"
        with path.open("r+b") as file:
            file.write(b"x")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        with pytest.raises(StaleIndexError, match="mtime"):
            reader.read(shard, 2, 3)


def test_a_missing_client_library_is_named(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    def missing(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(StorageError, match="Install s3fs to access S3; pip install s3fs"):
        store.stat("s3://bucket/a", deadline_s=5)


def test_an_unknown_protocol_is_named(store: Store) -> None:
    with pytest.raises(StorageError, match="nosuch"):
        store.stat("nosuch://a/b", deadline_s=5)


def listed_with_archives(store: Store, folder: str, count: int) -> SourceListing:
    files = fsspec.filesystem("counted")
    for number in range(count):
        for suffix in ("jsonl", "zip"):
            files.pipe_file(f"/{folder}/{number}.{suffix}", b"x" * number)
    Counted.calls.clear()
    source = SourceFiles(name="s", records=(f"counted://{folder}/*.jsonl",))
    found = list_source(source, store, deadline_s=5)
    assert [len(some) for some in found.beside] == [1] * count
    return found


def test_more_record_files_take_no_more_calls(store: Store) -> None:
    needed = []
    for count in (10, 40):
        listed_with_archives(store, f"count/{count}", count)
        needed.append(len(Counted.calls))
    assert needed[0] == needed[1] < 10


@pytest.mark.parametrize("late", [0, 1])
def test_the_listed_version_is_that_of_the_file(
    monkeypatch: pytest.MonkeyPatch, store: Store, late: int
) -> None:
    monkeypatch.setattr(Counted, "late", late)
    found = listed_with_archives(store, f"late/{late}", 10)
    for file in (*found.records, *(some[0] for some in found.beside)):
        assert file.stat == store.stat(file.url, deadline_s=5)
