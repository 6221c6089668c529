from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from support.forked_reads import shard_of

from dataservice.core.packspec import ShardRef
from dataservice.errors import StaleIndexError, StorageError, StorageTimeout
from dataservice.storage.backends import FileCache, LocalBackend, ObjectStat
from dataservice.storage.objects import ShardReader, Store, read_chunks, staged_path

CONTENT = bytes(range(256)) * 100


def open_files() -> set[str]:
    names = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return names


@pytest.fixture
def shard(tmp_path: Path) -> ShardRef:
    path = tmp_path / "a.zip"
    path.write_bytes(CONTENT)
    return shard_of(path)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


@pytest.fixture
def reader(cache: Path) -> Iterator[ShardReader]:
    with ShardReader(str(cache), deadline_s=10, retries=0) as made:
        yield made


# ---- ShardReader


def test_origin_then_staged_copy_then_origin_again(
    reader: ShardReader, shard: ShardRef, cache: Path
) -> None:
    assert reader.read(shard, 300, 100) == CONTENT[300:400]
    assert (reader.origin_bytes, reader.staged_bytes) == (100, 0)
    copy = Path(staged_path(str(cache), shard))
    copy.write_bytes(CONTENT)
    assert reader.read(shard, 0, 50) == CONTENT[:50]
    assert (reader.origin_bytes, reader.staged_bytes) == (100, 50)
    assert str(copy) in open_files()
    copy.unlink()
    assert reader.sweep() == 1
    assert not any(str(copy) in name for name in open_files())
    assert reader.read(shard, 1, 1) == CONTENT[1:2]
    assert reader.origin_bytes == 101
    reader.cache_dir = None
    assert reader.read(shard, 0, 10) == CONTENT[:10]


def test_a_copy_of_another_size_or_version_is_not_used(
    reader: ShardReader, shard: ShardRef, cache: Path
) -> None:
    Path(staged_path(str(cache), shard)).write_bytes(CONTENT[:-1])
    assert reader.read(shard, 0, 10) == CONTENT[:10]
    assert reader.staged_bytes == 0
    older = replace(shard, mtime_ns=shard.mtime_ns - 1)
    assert staged_path(str(cache), older) != staged_path(str(cache), shard)


def test_a_shard_that_changed_is_named(reader: ShardReader, shard: ShardRef) -> None:
    reader.read(shard, 0, 1)
    for wrong, reason in (
        (replace(shard, mtime_ns=shard.mtime_ns + 1), "mtime"),
        (replace(shard, size_bytes=shard.size_bytes + 1), r"size 25601 -> 25600"),
    ):
        with pytest.raises(StaleIndexError, match=rf"shard s/a.zip changed.*{reason}"):
            reader.read(wrong, 0, 1)
    with pytest.raises(StaleIndexError, match="2 are wanted at 25599"):
        reader.read(shard, len(CONTENT) - 1, 2)
    with pytest.raises(StaleIndexError):
        reader.read(shard, -1, 2)


def test_a_replaced_file_is_opened_anew(reader: ShardReader, shard: ShardRef) -> None:
    reader.read(shard, 0, 1)
    path = Path(shard.url)
    new = path.with_suffix(".new")
    new.write_bytes(b"x" * 10)
    new.rename(path)
    assert reader.read(shard_of(path), 0, 10) == b"x" * 10
    with pytest.raises(StaleIndexError):
        reader.read(shard, 0, 1)


def test_a_missing_shard_is_a_storage_error(reader: ShardReader, shard: ShardRef) -> None:
    Path(shard.url).unlink()
    with pytest.raises(StorageError, match=r"shard s/a.zip is not there: .*a\.zip"):
        reader.read(shard, 0, 1)


def test_other_stores_by_fsspec(reader: ShardReader) -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file("/bucket/a.jsonl", CONTENT)
    shard = ShardRef(
        source="s", name="a", url="memory://bucket/a.jsonl", size_bytes=len(CONTENT), mtime_ns=0
    )
    assert reader.read(shard, 5, 7) == CONTENT[5:12]
    files.pipe_file("/bucket/a.jsonl", CONTENT + b"more")
    longer = replace(shard, size_bytes=len(CONTENT) + 4)
    assert reader.read(longer, len(CONTENT), 4) == b"more"
    with pytest.raises(StaleIndexError, match="size 25600 -> 25604"):
        reader.read(shard, 0, 1)


def test_listing_by_fsspec(store: Store) -> None:
    files = fsspec.filesystem("memory")
    for name in ("b", "a"):
        files.pipe_file(f"/list/{name}.jsonl", b"x")
    files.mkdir("/list/folder.jsonl")
    assert list(store.glob("memory://list/*.jsonl", deadline_s=5)) == [
        "memory:///list/a.jsonl",
        "memory:///list/b.jsonl",
    ]
    assert store.stat("memory://list", deadline_s=5).is_folder
    assert store.stat("memory://list/a.jsonl", deadline_s=5).size_bytes == 1
    with pytest.raises(FileNotFoundError):
        store.stat("memory://list/none", deadline_s=5)
    with pytest.raises(StorageError, match="nosuch"):
        store.read("nosuch://x/y", 0, 1, deadline_s=5)


# ---- Store: deadline and retries


class Flaky(LocalBackend):
    """Fails with the given errors first."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)
        self.reads = 0

    def read(self, url: str, offset: int, size: int) -> tuple[bytes, ObjectStat]:
        self.reads += 1
        if self.errors:
            raise self.errors.pop(0)
        return super().read(url, offset, size)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.close()


def io_error() -> OSError:
    return OSError(errno.EIO, "input/output error")


def read_with(backend: LocalBackend, shard: ShardRef, **options: object) -> tuple[bytes, list]:
    pauses: list[float] = []
    store = Store(local=backend, sleep=pauses.append, **options)
    try:
        return store.read(shard.url, 0, 4, deadline_s=10), pauses
    finally:
        store.close()


def test_what_may_pass_is_tried_again(shard: ShardRef) -> None:
    backend = Flaky(io_error(), StorageError("try later"), OSError(errno.ESTALE, "stale"))
    data, pauses = read_with(backend, shard)
    assert data == CONTENT[:4]
    assert backend.reads == 4 and len(pauses) == 3
    assert all(0 <= pause <= 2 for pause in pauses)


def test_attempts_end(shard: ShardRef) -> None:
    backend = Flaky(*[io_error() for _ in range(9)])
    with pytest.raises(StorageError, match="input/output error"):
        read_with(backend, shard, attempts=3)
    assert backend.reads == 3


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "gone"), PermissionError(13, "no"), StaleIndexError("changed")]
)
def test_what_will_not_pass_is_not_tried_again(shard: ShardRef, error: Exception) -> None:
    backend = Flaky(error)
    with pytest.raises((type(error), StorageError)):
        read_with(backend, shard)
    assert backend.reads == 1


def test_the_deadline_holds_for_all_attempts(shard: ShardRef) -> None:
    gate = threading.Event()

    class Hanging(LocalBackend):
        def read(self, url: str, offset: int, size: int) -> tuple[bytes, ObjectStat]:
            gate.wait(10)
            raise io_error()

    store = Store(local=Hanging())
    with pytest.raises(StorageTimeout, match=r"read .*a.zip at 0: no answer within"):
        store.read(shard.url, 0, 1, deadline_s=0.02)
    assert store.stuck_reads == 1
    gate.set()
    store.close()


def test_reading_from_front_to_end(store: Store, shard: ShardRef) -> None:
    size = len(CONTENT)
    chunks = list(read_chunks(store, shard.url, size_bytes=size, chunk_bytes=10_000, deadline_s=5))
    assert [len(chunk) for chunk in chunks] == [10_000, 10_000, 5_600]
    assert b"".join(chunks) == CONTENT
    with pytest.raises(StorageError, match=r"ends at 25600, expected 25601"):
        list(read_chunks(store, shard.url, size_bytes=size + 1, chunk_bytes=10_000, deadline_s=5))


def test_local_globs_are_sorted_files(store: Store, tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "x[1].jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "folder.jsonl").mkdir()
    found = list(store.glob(f"{tmp_path}/**/*.jsonl", deadline_s=5))
    assert [os.path.relpath(name, tmp_path) for name in found] == [
        "a.jsonl",
        "b.jsonl",
        "sub/c.jsonl",
        "x[1].jsonl",
    ]
    assert list(store.glob(f"file://{tmp_path}/x[1].jsonl", deadline_s=5)) == [
        f"{tmp_path}/x[1].jsonl"
    ]


# ---- FileCache


def test_descriptors_are_bounded_and_reused(tmp_path: Path) -> None:
    files = FileCache(capacity=3)
    paths = [tmp_path / f"{number}" for number in range(6)]
    for path in paths:
        path.write_bytes(path.name.encode())
        assert files.read(str(path), 0, 9)[0] == path.name.encode()
        assert files.read(str(path), 1, 9)[0] == b""
    assert {name for name in open_files() if name.startswith(str(tmp_path))} == {
        str(path) for path in paths[3:]
    }
    files.close()
    assert not {name for name in open_files() if name.startswith(str(tmp_path))}


def test_a_descriptor_in_use_is_not_closed_under_its_reader(tmp_path: Path) -> None:
    files = FileCache(capacity=1)
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode())
    held = files._acquire(str(tmp_path / "a"))
    files.read(str(tmp_path / "b"), 0, 1)
    assert os.pread(held.fd, 1, 0) == b"a"
    files._release(held)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held.fd)
    files.close()


def test_many_threads_and_few_descriptors(tmp_path: Path) -> None:
    files = FileCache(capacity=2)
    for number in range(8):
        (tmp_path / str(number)).write_bytes(str(number).encode() * 100)
    wrong: list[int] = []

    def read(seed: int) -> None:
        for turn in range(300):
            number = (seed * 7 + turn * 3) % 8
            if files.read(str(tmp_path / str(number)), turn % 90, 5)[0] != str(number).encode() * 5:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert wrong == []
    files.close()
    assert not {name for name in open_files() if name.startswith(str(tmp_path))}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_with_its_own_descriptors(
    reader: ShardReader, shard: ShardRef
) -> None:
    reader.read(shard, 0, 1)
    child = os.fork()
    if child == 0:
        good = all(reader.read(shard, at, 3) == CONTENT[at : at + 3] for at in range(100))
        os._exit(0 if good else 1)
    assert reader.read(shard, 7, 3) == CONTENT[7:10]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_names_that_no_file_can_have_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    store = Store(attempts=1)
    for name in ("loop", "file/x", "n" * 300, "d/" * 3000, "pipe"):
        with pytest.raises(FileNotFoundError):
            store.stat(f"{tmp_path}/{name}", deadline_s=10)
    with pytest.raises(StorageError, match="is no regular file"):
        store.read(f"{tmp_path}/pipe", 0, 1, deadline_s=10)
    assert store.stuck_reads == 0
    store.close()
