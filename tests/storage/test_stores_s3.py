"""s3:// against a real S3 API server on this machine."""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.s3_server import (
    ACCESS_KEY,
    SECRET_KEY,
    SESSION_TOKEN,
    S3Server,
    put,
    s3_server,
    use_credentials,
)

from dataservice.core.packspec import ShardRef
from dataservice.errors import DataServiceError, StaleIndexError, StorageError, StorageTimeout
from dataservice.storage.listing import list_source
from dataservice.storage.objects import ShardReader, Store, read_chunks
from dataservice.storage.remote import FsspecBackend
from dataservice.storage.sources import SourceFiles

CONTENT = bytes(range(256)) * 100


@pytest.fixture(scope="module")
def started() -> Iterator[S3Server]:
    with s3_server() as server:
        put(server, "data", "a.zip", CONTENT)
        put(server, "data", "docs/b.jsonl", b"{}\n")
        put(server, "data", "docs/a b.jsonl", b"{}\n")
        put(server, "data", "docs/deep/c.jsonl", b"{}\n")
        put(server, "data", "docs/x[1]*.jsonl", b"[1]")
        yield server


@pytest.fixture
def server(started: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    use_credentials(monkeypatch, started)
    started.failures, started.hang = 0, None
    started.count_from_here()
    return started


@pytest.fixture
def store(server: S3Server) -> Iterator[Store]:
    made = Store(sleep=lambda _: None)
    yield made
    made.close()


@pytest.fixture
def reader(server: S3Server) -> Iterator[ShardReader]:
    with ShardReader(None, deadline_s=10, retries=0) as made:
        yield made


def indexed(store: Store, url: str) -> ShardRef:
    stat = store.stat(url, deadline_s=10)
    return ShardRef(
        source="s", name="a", url=url, size_bytes=stat.size_bytes, mtime_ns=stat.mtime_ns
    )


def test_ranges_and_their_ends(store: Store) -> None:
    assert store.read("s3://data/a.zip", 300, 100, deadline_s=10) == CONTENT[300:400]
    assert store.read("s3://data/a.zip", len(CONTENT) - 3, 100, deadline_s=10) == CONTENT[-3:]
    assert store.read("s3://data/a.zip", len(CONTENT), 10, deadline_s=10) == b""
    assert store.read("s3://data/a.zip", 5, 0, deadline_s=10) == b""
    chunks = read_chunks(
        store, "s3://data/a.zip", size_bytes=len(CONTENT), chunk_bytes=10_000, deadline_s=10
    )
    assert b"".join(chunks) == CONTENT


def test_an_empty_object(server: S3Server, store: Store) -> None:
    put(server, "data", "empty", b"")
    assert store.stat("s3://data/empty", deadline_s=10).size_bytes == 0
    assert store.read("s3://data/empty", 0, 10, deadline_s=10) == b""


def test_a_large_object_is_read_by_ranges_only(server: S3Server, store: Store) -> None:
    put(server, "data", "large.zip", bytes(20_000_000))
    server.count_from_here()
    assert store.stat("s3://data/large.zip", deadline_s=10).size_bytes == 20_000_000
    for offset in (0, 10_000_000, 19_999_000):
        assert len(store.read("s3://data/large.zip", offset, 1000, deadline_s=10)) == 1000
    assert server.bodies_bytes == 3000
    assert [request.split()[0] for request in server.requests] == ["HEAD", "GET", "GET", "GET"]
    assert server.requests[2] == "GET /data/large.zip bytes=10000000-10000999"


def test_what_is_not_there(store: Store) -> None:
    for url in ("s3://data/none", "s3://no-such-bucket/a"):
        with pytest.raises(FileNotFoundError, match=url):
            store.stat(url, deadline_s=10)
        with pytest.raises(FileNotFoundError, match=url):
            store.read(url, 0, 1, deadline_s=10)
        assert list(store.glob(url, deadline_s=10)) == []


def test_folders_and_listings(store: Store) -> None:
    assert store.stat("s3://data/docs", deadline_s=10).is_folder
    assert store.stat("s3://data/docs/", deadline_s=10).is_folder
    assert store.stat("s3://data", deadline_s=10).is_folder
    assert list(store.glob("s3://data/docs/*.jsonl", deadline_s=10)) == [
        "s3://data/docs/a b.jsonl",
        "s3://data/docs/b.jsonl",
        "s3://data/docs/x[1]*.jsonl",
    ]
    assert "s3://data/docs/deep/c.jsonl" in store.glob("s3://data/**/*.jsonl", deadline_s=10)
    assert list(store.glob("s3://data/docs/x[1]*.jsonl", deadline_s=10)) == [
        "s3://data/docs/x[1]*.jsonl"
    ]
    assert store.read("s3://data/docs/a b.jsonl", 0, 9, deadline_s=10) == b"{}\n"


def test_no_listing_is_kept(server: S3Server, store: Store) -> None:
    assert len(store.glob("s3://data/fresh/*", deadline_s=10)) == 0
    put(server, "data", "fresh/a", b"1")
    assert list(store.glob("s3://data/fresh/*", deadline_s=10)) == ["s3://data/fresh/a"]
    assert store.stat("s3://data/fresh/a", deadline_s=10).size_bytes == 1
    put(server, "data", "fresh/a", b"22")
    put(server, "data", "fresh/b", b"1")
    assert store.stat("s3://data/fresh/a", deadline_s=10).size_bytes == 2
    assert len(store.glob("s3://data/fresh/*", deadline_s=10)) == 2


def test_more_record_files_take_no_more_requests(server: S3Server, store: Store) -> None:
    needed = []
    for folder, count in (("some", 10), ("many", 40)):
        for number in range(count):
            put(server, "data", f"{folder}/p{number}.jsonl", b"{}" * number)
            put(server, "data", f"{folder}/p{number}.{('zip', 'tar')[number % 2]}", b"x" * number)
        for pattern in ("*.jsonl", "p*.jsonl"):
            source = SourceFiles(name="s", records=(f"s3://data/{folder}/{pattern}",))
            server.count_from_here()
            found = list_source(source, store, deadline_s=20)
            needed.append(len(server.requests))
            assert len(found.records) == count
            files = [*found.records, *(file for some in found.beside for file in some)]
            assert len(files) == 2 * count
            for file in files:
                assert file.stat == store.stat(file.url, deadline_s=10)
    assert needed[:2] == needed[2:] and max(needed) < 10


def test_a_shard_that_changed_after_indexing_is_named(
    server: S3Server, store: Store, reader: ShardReader
) -> None:
    put(server, "data", "changing", b"first version")
    shard = indexed(store, "s3://data/changing")
    assert reader.read(shard, 6, 7) == b"version"
    put(server, "data", "changing", b"other content")  # same size, within the same second
    with pytest.raises(StaleIndexError, match="shard s/a changed after it was indexed"):
        reader.read(shard, 6, 7)
    now = indexed(store, "s3://data/changing")
    assert now.mtime_ns != shard.mtime_ns
    assert reader.read(now, 6, 7) == b"content"
    put(server, "data", "changing", b"longer than before")
    with pytest.raises(StaleIndexError, match="size 13 -> 18"):
        reader.read(now, 0, 1)


def test_an_unchanged_shard_has_the_same_identity_in_every_answer(
    server: S3Server, store: Store
) -> None:
    backend = FsspecBackend()
    whole = store.stat("s3://data/a.zip", deadline_s=10)
    assert whole.mtime_ns > 0
    assert backend.stat("s3://data/a.zip") == whole
    assert backend.read("s3://data/a.zip", 7, 1)[1] == whole
    assert backend.read("s3://data/a.zip", 10**9, 1) == (b"", whole)
    backend.close()


def test_what_may_pass_is_tried_again_by_us_alone(server: S3Server) -> None:
    pauses: list[float] = []
    store = Store(attempts=4, sleep=pauses.append)
    server.failures = 3
    assert store.read("s3://data/a.zip", 0, 4, deadline_s=10) == CONTENT[:4]
    assert len(server.requests) == 4
    assert len(pauses) == 3 and all(0 <= pause <= 2 for pause in pauses)
    server.failures = 9
    server.count_from_here()
    with pytest.raises(StorageError, match=r"s3://data/a\.zip"):
        store.read("s3://data/a.zip", 0, 4, deadline_s=10)
    assert len(server.requests) == 4
    store.close()


def test_the_deadline_holds(server: S3Server) -> None:
    store = Store()
    assert store.read("s3://data/a.zip", 0, 4, deadline_s=10) == CONTENT[:4]
    server.hang = threading.Event()
    with pytest.raises(StorageTimeout, match=r"read s3://data/a.zip at 0: no answer within 0.2 s"):
        store.read("s3://data/a.zip", 0, 4, deadline_s=0.2)
    assert store.stuck_reads == 1
    server.hang.set()
    assert store.read("s3://data/a.zip", 0, 4, deadline_s=10) == CONTENT[:4]
    store.close()


def test_many_threads(store: Store) -> None:
    wrong: list[int] = []

    def read(seed: int) -> None:
        for turn in range(15):
            at = (seed * 997 + turn * 31) % 25_000
            if store.read("s3://data/a.zip", at, 50, deadline_s=20) != CONTENT[at : at + 50]:
                wrong.append(at)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_read_beside_their_parent(store: Store) -> None:
    assert store.read("s3://data/a.zip", 0, 3, deadline_s=10) == CONTENT[:3]
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            good = all(
                store.read("s3://data/a.zip", at, 3, deadline_s=10) == CONTENT[at : at + 3]
                for at in range(20)
            )
            store.close()
            os._exit(0 if good else 1)
        children.append(child)
    for at in range(20):
        assert store.read("s3://data/a.zip", at, 3, deadline_s=10) == CONTENT[at : at + 3]
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.read("s3://data/a.zip", 9, 3, deadline_s=10) == CONTENT[9:12]


def test_credentials_are_in_no_error_and_no_log(
    server: S3Server, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    store = Store(attempts=2, sleep=lambda _: None)
    texts = []

    def attempt(url: str) -> None:
        with pytest.raises((DataServiceError, OSError)) as caught:
            store.read(url, 0, 4, deadline_s=10)
        texts.extend(traceback.format_exception(caught.value))
        texts.append(repr(caught.value))

    store.read("s3://data/a.zip", 0, 4, deadline_s=10)
    attempt("s3://data/none")
    server.failures = 9
    attempt("s3://data/a.zip")
    server.failures = 0
    attempt("s3://user:hunter2@data/none?X-Amz-Signature=abc123")
    store.close()
    shown = "".join((*texts, caplog.text, repr(store), *capfd.readouterr()))
    assert "s3://data/none" in shown
    for secret in (SECRET_KEY, SESSION_TOKEN, ACCESS_KEY, "hunter2", "abc123"):
        assert secret not in shown


def test_missing_credentials_are_a_clear_error(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = Store()
    with pytest.raises(StorageError, match="give credentials in the environment or in fsspec's"):
        store.read("s3://data/a.zip", 0, 4, deadline_s=10)
    assert server.requests == []
    store.close()


def test_credentials_by_fsspec_config(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    settings = {"endpoint_url": server.url, "key": ACCESS_KEY, "secret": SECRET_KEY}
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)
    store = Store()
    assert store.read("s3://data/a.zip", 0, 4, deadline_s=10) == CONTENT[:4]
    store.close()


def test_a_read_past_the_indexed_end_is_refused(store: Store, reader: ShardReader) -> None:
    shard = indexed(store, "s3://data/a.zip")
    with pytest.raises(StaleIndexError, match="are wanted at"):
        reader.read(shard, len(CONTENT) - 1, 2)
    with pytest.raises(StaleIndexError, match="changed"):
        reader.read(replace(shard, size_bytes=len(CONTENT) + 5), len(CONTENT), 5)
