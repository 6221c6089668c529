"""http:// against a server on this machine that has ranges, and one that has none."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator

import pytest
from support.web_server import WebServer, web_server

from dataservice.core.packspec import ShardRef
from dataservice.errors import StaleIndexError, StorageError, StorageTimeout
from dataservice.storage.listing import list_source
from dataservice.storage.objects import ShardReader, Store
from dataservice.storage.remote import FsspecBackend
from dataservice.storage.remote.ranges import SKIPPED_MOST
from dataservice.storage.sources import SourceFiles

CONTENT = bytes(range(256)) * 100
MONDAY = "Mon, 02 Nov 2026 10:00:00 GMT"


@pytest.fixture(scope="module")
def started() -> Iterator[WebServer]:
    with web_server() as server:
        yield server


@pytest.fixture
def server(started: WebServer) -> WebServer:
    started.files = {"/a.zip": CONTENT, "/empty": b""}
    started.headers = {"Last-Modified": MONDAY, "ETag": '"one"'}
    started.ranges, started.failures, started.hang = True, [], None
    started.sent_bytes, started.requests = 0, []
    return started


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(sleep=lambda _: None)
    yield made
    made.close()


def test_ranges_and_their_ends(server: WebServer, store: Store) -> None:
    url = server.url + "/a.zip"
    assert store.stat(url, deadline_s=10).size_bytes == len(CONTENT)
    assert store.read(url, 300, 100, deadline_s=10) == CONTENT[300:400]
    assert store.read(url, len(CONTENT) - 3, 100, deadline_s=10) == CONTENT[-3:]
    assert store.read(url, len(CONTENT), 10, deadline_s=10) == b""
    assert store.read(url, 5, 0, deadline_s=10) == b""
    assert store.stat(server.url + "/empty", deadline_s=10).size_bytes == 0
    assert store.read(server.url + "/empty", 0, 10, deadline_s=10) == b""


def test_a_large_file_is_read_by_ranges_only(server: WebServer, store: Store) -> None:
    server.files["/large"] = bytes(50_000_000)
    url = server.url + "/large"
    assert store.stat(url, deadline_s=10).size_bytes == 50_000_000
    for offset in (0, 25_000_000, 49_999_000):
        assert len(store.read(url, offset, 1000, deadline_s=10)) == 1000
    assert server.sent_bytes == 3001


def test_one_request_a_read_and_no_head(server: WebServer, store: Store) -> None:
    store.read(server.url + "/a.zip?X-Amz-Signature=s", 0, 9, deadline_s=10)
    assert server.requests == ["GET /a.zip?X-Amz-Signature=s"]


def test_names_and_listings(server: WebServer, store: Store) -> None:
    page = b'<html><a href="b.jsonl">b</a> <a href="a%20b.jsonl">a</a> <a href="c.zip">c</a></html>'
    server.files |= {"/docs/": page, "/docs/b.jsonl": b"1", "/docs/a%20b.jsonl": b"22"}
    server.headers |= {"Content-Type": "text/html"}
    found = list(store.glob(server.url + "/docs/*.jsonl", deadline_s=10))
    assert found == [server.url + "/docs/a%20b.jsonl", server.url + "/docs/b.jsonl"]
    assert store.read(found[0], 0, 9, deadline_s=10) == b"22"
    assert store.read(server.url + "/docs/a b.jsonl", 0, 9, deadline_s=10) == b"22"
    assert list(store.glob(server.url + "/a.zip?v=1", deadline_s=10)) == [server.url + "/a.zip?v=1"]
    assert list(store.glob(server.url + "/none.zip", deadline_s=10)) == []


def test_archives_beside_record_files_are_asked_for_by_name(
    server: WebServer, store: Store
) -> None:
    server.files |= {f"/docs/{n}.jsonl": b"{}" for n in range(10)} | {"/docs/7.zip": b"x"}
    records = tuple(f"{server.url}/docs/{n}.jsonl?v=1" for n in range(10))
    found = list_source(SourceFiles(name="s", records=records), store, deadline_s=10)
    assert [len(some) for some in found.beside] == [*[0] * 7, 1, 0, 0]
    assert found.beside[7][0].url == f"{server.url}/docs/7.zip"
    assert "GET /docs/" not in server.requests and "GET /docs/9.tar" in server.requests


def test_a_server_without_ranges_gives_the_beginning_of_a_file(
    server: WebServer, store: Store
) -> None:
    server.ranges = False
    url = server.url + "/a.zip"
    assert store.stat(url, deadline_s=10).size_bytes == len(CONTENT)
    assert store.read(url, 0, 100, deadline_s=10) == CONTENT[:100]
    assert store.read(url, 300, 100, deadline_s=10) == CONTENT[300:400]
    assert store.read(url, len(CONTENT) + 5, 100, deadline_s=10) == b""


def test_a_server_without_ranges_is_refused_for_what_lies_far_behind(
    server: WebServer, store: Store
) -> None:
    server.ranges = False
    server.files["/large"] = bytes(SKIPPED_MOST + 5_000_000)
    with pytest.raises(StorageError, match=r"the server ignores range requests, and 9 bytes at"):
        store.read(server.url + "/large", SKIPPED_MOST + 1, 9, deadline_s=10)
    assert len(server.requests) == 1
    assert store.read(server.url + "/large", 1, 9, deadline_s=10) == bytes(9)


def test_the_identity_is_that_of_every_answer(server: WebServer, store: Store) -> None:
    backend = FsspecBackend()
    url = server.url + "/a.zip"
    first = backend.stat(url)
    assert backend.read(url, 4, 1)[1] == backend.read(url, 10**9, 1)[1] == first
    server.headers["ETag"] = '"two"'
    second = backend.read(url, 4, 1)[1]
    assert second.mtime_ns != first.mtime_ns
    assert second.mtime_ns // 10**9 == first.mtime_ns // 10**9
    server.headers = {"ETag": 'W/"two"'}
    assert 0 < backend.stat(url).mtime_ns < 2**62
    server.headers = {"Last-Modified": "not a date"}
    assert backend.stat(url).mtime_ns == 0
    backend.close()


def test_a_shard_that_changed_after_indexing_is_named(server: WebServer, store: Store) -> None:
    url = server.url + "/a.zip"
    with ShardReader(None, deadline_s=10, retries=0) as reader:
        stat = store.stat(url, deadline_s=10)
        shard = ShardRef(
            source="s", name="a.zip", url=url, size_bytes=stat.size_bytes, mtime_ns=stat.mtime_ns
        )
        assert reader.read(shard, 5, 7) == CONTENT[5:12]
        server.headers["ETag"] = '"two"'
        with pytest.raises(StaleIndexError, match=r"shard s/a\.zip changed after it was indexed"):
            reader.read(shard, 5, 7)


@pytest.mark.parametrize("status", [500, 503, 429, 0])
def test_what_may_pass_is_tried_again(server: WebServer, store: Store, status: int) -> None:
    server.failures = [status, status]
    assert store.read(server.url + "/a.zip", 3, 400, deadline_s=10) == CONTENT[3:403]
    assert len(server.requests) == 3


@pytest.mark.parametrize(("status", "words"), [(403, "give credentials"), (400, "HTTP 400")])
def test_what_will_not_pass_is_not_tried_again(
    server: WebServer, store: Store, status: int, words: str
) -> None:
    server.failures = [status]
    with pytest.raises(StorageError, match=words):
        store.read(server.url + "/a.zip", 0, 4, deadline_s=10)
    assert len(server.requests) == 1


def test_what_is_not_there(server: WebServer, store: Store) -> None:
    with pytest.raises(FileNotFoundError, match="none"):
        store.stat(server.url + "/none", deadline_s=10)
    with pytest.raises(StorageError, match=r"127\.0\.0\.1"):
        store.read("http://127.0.0.1:1/a", 0, 1, deadline_s=10)


def test_a_file_that_is_compressed_on_the_way_is_refused(server: WebServer, store: Store) -> None:
    server.headers["Content-Encoding"] = "gzip"
    server.files["/b.jsonl.gz"] = b"stored as it is"
    assert store.read(server.url + "/b.jsonl.gz", 0, 6, deadline_s=10) == b"stored"
    with pytest.raises(StorageError, match=r"compresses files on the way \(gzip\)"):
        store.read(server.url + "/a.zip", 0, 4, deadline_s=10)


def test_an_answer_that_is_another_range_is_refused(server: WebServer, store: Store) -> None:
    server.ranges = False
    server.headers["Content-Range"] = "bytes 0-9/10"  # beside a status of 200: not a range
    assert store.read(server.url + "/a.zip", 2, 2, deadline_s=10) == CONTENT[2:4]


def test_the_deadline_holds(server: WebServer) -> None:
    store = Store()
    server.hang = threading.Event()
    with pytest.raises(StorageTimeout, match=r"a.zip at 0: no answer within 0.2 s"):
        store.read(server.url + "/a.zip", 0, 4, deadline_s=0.2)
    server.hang.set()
    assert store.read(server.url + "/a.zip", 0, 4, deadline_s=10) == CONTENT[:4]
    store.close()


def test_a_call_ends_after_a_while_even_when_nobody_waits(server: WebServer) -> None:
    backend = FsspecBackend(longest_s=0.1)
    server.hang = threading.Event()
    with pytest.raises(StorageError, match=r"no answer within 0\.1 s"):
        backend.stat(server.url + "/a.zip")
    server.hang.set()
    backend.close()
    assert not any(thread.name == "storage-loop" for thread in threading.enumerate())


def test_credentials_are_in_no_error(server: WebServer, store: Store) -> None:
    url = server.url.replace("//", "//me:hunter2@") + "/{}?X-Amz-Signature=abc123&v=1"
    server.headers["ETag"] = '"two"'
    shown = ""
    for name, failure in (("none", None), ("a.zip", 403), ("a.zip", 418)):
        server.failures = [] if failure is None else [failure]
        with pytest.raises((StorageError, FileNotFoundError)) as caught:
            store.read(url.format(name), 0, 4, deadline_s=10)
        shown += "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert "X-Amz-Signature=***&v=1" in shown
    assert "hunter2" not in shown
    assert "abc123" not in shown
