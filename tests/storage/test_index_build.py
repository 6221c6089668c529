from __future__ import annotations

import fcntl
import fnmatch
import json
import os
import re
import shutil
import threading
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from storage.datasets import ByteCounter, llava, picture, write_jsonl, write_zip

from dataservice.errors import ConfigError, StaleIndexError, StorageError
from dataservice.storage import index_folder
from dataservice.storage.backends import LocalBackend, ObjectStat
from dataservice.storage.index import Index
from dataservice.storage.index_build import build_index
from dataservice.storage.index_report import IndexProgress, IndexReport
from dataservice.storage.manifest import INDEX_VERSION
from dataservice.storage.objects import Store
from dataservice.storage.sources import SourceFiles


class CountingBackend(LocalBackend):
    """Remembers which files were read, and fails on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: dict[str, int] = {}
        self.broken: set[str] = set()

    def read(self, url: str, offset: int, size: int) -> tuple[bytes, ObjectStat]:
        name = os.path.basename(url)
        self.reads[name] = self.reads.get(name, 0) + 1
        if name in self.broken:
            raise PermissionError(13, "no", url)
        return super().read(url, offset, size)


class World:
    """A folder with data, an index folder, and what building it reads."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.index_dir = str(folder / "index")
        self.backend = CountingBackend()
        self.counter = ByteCounter()
        self.sources = [self.source("s")]

    def source(self, name: str, *, records: str = "*.jsonl", **fields: Any) -> SourceFiles:
        images = tuple(f"{self.data}/{pattern}" for pattern in fields.pop("images", ()))
        return SourceFiles(name=name, records=(f"{self.data}/{records}",), images=images, **fields)

    def build(self, **options: Any) -> IndexReport:
        self.backend.reads.clear()
        self.counter.counted = 0
        store = Store(local=self.backend, attempts=1)
        try:
            return build_index(
                self.sources, self.index_dir, counter=lambda: self.counter, store=store, **options
            )
        finally:
            store.close()

    def reasons(self, report: IndexReport) -> list[tuple[str, int, str]]:
        with open(report.rejected_path) as file:
            rows = [json.loads(line) for line in file]
        return [(os.path.basename(row["file"]), row["line"], row["reason"]) for row in rows]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def rows_of(index: Index, source: int = 0) -> list[tuple[int, list[tuple[int, int]]]]:
    """(text tokens, picture sizes) of every sample."""
    total = sum(index.sources[source].shard_samples)
    columns = index.columns(source, np.arange(total))
    sizes = list(zip(columns.width.tolist(), columns.height.tolist(), strict=True))
    bounds = columns.image_offsets.tolist()
    return [
        (tokens, sizes[bounds[row] : bounds[row + 1]])
        for row, tokens in enumerate(columns.text_tokens.tolist())
    ]


def test_offsets_checksums_and_sizes(world: World) -> None:
    path = write_jsonl(
        world.data / "a.jsonl",
        b'\xef\xbb\xbf{"text": "c\xc3\xb4te"}\r',
        b"",
        llava("two", "./x/1.png", "x//2.jpg"),
    )
    write_zip(
        world.data / "a.zip",
        {"x/2.jpg": picture(30, 40, "JPEG"), "x/1.png": picture(50, 60)},
    )
    report = world.build()
    assert (report.num_samples, report.num_rejected) == (2, 0)
    index = Index.open(world.index_dir)
    assert rows_of(index) == [(5, []), (14 + 3 + 4, [(50, 60), (30, 40)])]
    columns = index._sources[0].shards[0].samples
    samples = {name: column.slice(0, 2) for name, column in columns.items()}
    data = path.read_bytes()
    assert samples["offset"].tolist() == [3, 23]
    lines = [
        data[offset : offset + length]
        for offset, length in zip(samples["offset"], samples["length"], strict=True)
    ]
    assert lines[0] == '{"text": "côte"}'.encode()
    assert lines[1] == data[23:-1]
    assert samples["crc32"].tolist() == [zlib.crc32(line) for line in lines]
    assert index.manifest.sources[0].shards[0].crc32 == zlib.crc32(data)
    assert report.digest == index.digest


def test_what_cannot_be_used_is_reported_and_stops_nothing(world: World) -> None:
    write_zip(
        world.data / "a.zip",
        {
            "good.png": picture(20, 20),
            "thin.png": picture(402, 2),
            "page.png": b"<html>",
            "cut.jpg": picture(90, 90, "JPEG")[:40],
        },
    )
    world.sources = [world.source("s", images=["bad.zip", "a.zip"])]
    (world.data / "bad.zip").write_bytes(b"not a zip")
    write_jsonl(
        world.data / "a.jsonl",
        llava("", "good.png"),
        b'{"text": "cut',
        llava("", "nowhere.png"),
        b"",
        llava("", "good.png", "thin.png"),
        llava("", "page.png"),
        llava("", "cut.jpg"),
        llava("", "../good.png"),
        llava("", "/good.png"),
        llava("", "https://a.example/good.png"),
        {"text": ""},
    )
    report = world.build()
    assert (report.num_samples, report.num_rejected) == (10, 9)
    expected = {
        2: "not valid JSON",
        3: "no such image: 'nowhere.png', places searched: 2; .*bad.zip: truncated, or not a zip",
        5: "'thin.png': 402x2 pixels, more elongated than 200:1",
        6: "'page.png': not an image: an HTML page",
        7: "'cut.jpg': truncated: the header is cut off",
        8: "leaves its root",
        9: "absolute",
        10: "is a URL",
        11: "no text and no image",
    }
    found = {line: reason for _, line, reason in world.reasons(report)}
    assert found.keys() == expected.keys()
    for line, reason in expected.items():
        assert re.search(reason, found[line]), found[line]
    assert report.examples[0].line == 2 and report.examples[0].offset > 0
    index = Index.open(world.index_dir)
    assert rows_of(index) == [(11, [(20, 20)]), *[(0, [])] * 9]
    (stats,) = index.sources
    assert (stats.shard_samples, stats.shard_text_samples) == ((10,), (0,))
    assert stats.shard_vision_samples == (1,)


def test_images_are_looked_up_beside_first_then_in_the_roots_in_order(world: World) -> None:
    write_zip(world.data / "a.zip", {"1.png": picture(10, 11)})
    write_zip(world.data / "roots/x1.zip", {"1.png": picture(20, 21), "2.png": picture(22, 23)})
    write_zip(world.data / "roots/x2.zip", {"2.png": picture(30, 31), "3.png": picture(32, 33)})
    for name, size in (("3.png", (40, 41)), ("d/4.png", (42, 43))):
        path = world.data / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(*size))
    write_jsonl(world.data / "a.jsonl", llava("", "1.png", "2.png", "3.png", "d/4.png"))
    write_jsonl(world.data / "b.jsonl", llava("", "1.png"))
    world.sources = [world.source("s", images=["roots/*.zip", "folder"])]
    world.build()
    assert [sizes for _, sizes in rows_of(Index.open(world.index_dir))] == [
        [(10, 11), (22, 23), (32, 33), (42, 43)],
        [(20, 21)],
    ]
    world.sources = [world.source("s", images=["folder", "roots/*.zip"])]
    world.build()
    assert rows_of(Index.open(world.index_dir))[0][1] == [(10, 11), (22, 23), (40, 41), (42, 43)]


def test_of_two_members_of_one_name_the_last_counts(world: World) -> None:
    path = write_zip(world.data / "a.zip", {"1.png": picture(10, 11)})
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("1.png", picture(20, 21))
    write_jsonl(world.data / "a.jsonl", llava("", "1.png"))
    world.build()
    assert rows_of(Index.open(world.index_dir))[0][1] == [(20, 21)]


def test_deflated_members_are_inflated_as_far_as_needed(world: World) -> None:
    members = {"1.png": picture(900, 700), "2.jpg": picture(300, 200, "JPEG")}
    write_zip(world.data / "a.zip", members, zipfile.ZIP_DEFLATED)
    write_jsonl(world.data / "a.jsonl", llava("", *members))
    world.build()
    assert rows_of(Index.open(world.index_dir))[0][1] == [(900, 700), (300, 200)]


# ---- what is read again


def test_what_did_not_change_is_not_read_again(world: World) -> None:
    for name in ("a", "b"):
        write_zip(world.data / f"{name}.zip", {"1.png": picture(10, 11)})
        write_jsonl(world.data / f"{name}.jsonl", llava(name, "1.png"))
    first = world.build()
    assert [s.shards_read for s in first.sources] == [2]
    again = world.build()
    assert world.backend.reads == {} and world.counter.counted == 0
    assert again.digest == first.digest
    assert [(s.shards_read, s.shards_reused) for s in again.sources] == [(0, 2)]

    write_jsonl(world.data / "b.jsonl", llava("longer", "1.png"))
    changed = world.build()
    assert world.backend.reads.keys() == {"b.jsonl"}
    assert [(s.shards_read, s.shards_reused) for s in changed.sources] == [(1, 1)]

    write_zip(world.data / "a.zip", {"1.png": picture(20, 21)})
    world.build()
    assert world.backend.reads.keys() == {"a.jsonl", "a.zip"}
    assert rows_of(Index.open(world.index_dir))[0][1] == [(20, 21)]


def test_another_tokenizer_reads_text_again_and_no_archive(world: World) -> None:
    write_zip(world.data / "a.zip", {"1.png": picture(10, 11)})
    write_jsonl(world.data / "a.jsonl", llava("a", "1.png"))
    world.build()
    world.counter = ByteCounter("another")
    world.build()
    assert world.backend.reads.keys() == {"a.jsonl"}
    assert Index.open(world.index_dir).fingerprint == "another"


def test_an_index_of_an_older_version_is_refused_and_built_anew(world: World) -> None:
    write_jsonl(world.data / "a.jsonl", {"text": "a"})
    world.build()
    new = set(os.listdir(world.index_dir))
    path = Path(world.index_dir, "manifest.json")
    manifest = json.loads(path.read_text())
    older = [shard for source in manifest["sources"] for shard in source["shards"]]
    for shard in older:
        del shard["num_text_samples"]
    path.write_text(json.dumps({**manifest, "version": INDEX_VERSION - 1}))
    Path(world.index_dir, f"shard-{'0123' * 6}.samples.arrow").write_bytes(b"of the older version")
    with pytest.raises(
        StaleIndexError,
        match=rf"is of version {INDEX_VERSION - 1}, .* run `dataservice index` again",
    ):
        Index.open(world.index_dir)
    world.build()
    assert rows_of(Index.open(world.index_dir)) == [(1, [])]
    assert set(os.listdir(world.index_dir)) == new


def test_a_touched_or_new_image_of_a_folder_is_seen(world: World) -> None:
    folder = world.data / "folder"
    folder.mkdir(parents=True)
    (folder / "1.png").write_bytes(picture(10, 11))
    write_jsonl(world.data / "a.jsonl", llava("", "1.png"), llava("", "2.png"))
    write_jsonl(world.data / "b.jsonl", {"text": "b"})
    world.sources = [world.source("s", images=["folder"])]
    assert world.build().num_rejected == 1
    (folder / "2.png").write_bytes(picture(12, 13))
    assert world.build().num_rejected == 0
    assert "b.jsonl" not in world.backend.reads
    world.build()
    assert world.backend.reads == {}
    (folder / "1.png").write_bytes(picture(14, 15))
    world.build()
    assert [sizes for _, sizes in rows_of(Index.open(world.index_dir))] == [
        [(14, 15)],
        [(12, 13)],
        [],
    ]


def test_an_archive_shared_by_many_shards_is_read_once(world: World) -> None:
    write_zip(world.data / "images.zip", {"1.png": picture(10, 11)})
    for number in range(3):
        write_jsonl(world.data / f"{number}.jsonl", llava("", "1.png"))
    world.sources = [world.source("s", images=["images.zip"]), world.source("t", images=["*.zip"])]
    world.build()
    assert world.backend.reads["images.zip"] == 2  # directory, one picture's header
    assert len(Index.open(world.index_dir).manifest.archives) == 1


def test_a_stopped_build_goes_on_where_it_was(world: World) -> None:
    for name in ("a", "b"):
        write_jsonl(world.data / f"{name}.jsonl", {"text": name})
    world.backend.broken = {"b.jsonl"}
    with pytest.raises(StorageError, match=r"b\.jsonl"):
        world.build()
    with pytest.raises(StaleIndexError, match="no index in"):
        Index.open(world.index_dir)
    world.backend.broken = set()
    world.build()
    assert world.backend.reads.keys() == {"b.jsonl"}


def test_an_image_that_cannot_be_read_for_now_is_tried_again(world: World) -> None:
    folder = world.data / "folder"
    folder.mkdir(parents=True)
    (folder / "1.png").write_bytes(picture(10, 11))
    write_jsonl(world.data / "a.jsonl", llava("", "1.png"), {"text": "b"})
    world.sources = [world.source("s", images=["folder"])]
    world.backend.broken = {"1.png"}
    report = world.build()
    assert (report.num_samples, report.num_rejected) == (2, 1)
    assert "could not be read" in world.reasons(report)[0][2]
    world.backend.broken = set()
    assert world.build().num_rejected == 0


def test_files_of_older_data_are_removed(world: World) -> None:
    write_zip(world.data / "a.zip", {"1.png": picture(10, 11)})
    write_jsonl(world.data / "a.jsonl", llava("", "1.png"))
    world.build()
    before = set(os.listdir(world.index_dir))
    Path(world.index_dir, ".tmp-1-x.arrow").write_bytes(b"left by a crash")
    Path(world.index_dir, "notes.txt").write_bytes(b"not ours")
    write_zip(world.data / "a.zip", {"1.png": picture(20, 21)})
    world.build()
    after = set(os.listdir(world.index_dir))
    assert len(after) == len(before) + 1 and "notes.txt" in after
    assert before & after == {".lock", ".open", "manifest.json", "rejected.jsonl"}


# ---- identity


def test_a_copied_data_set_has_the_same_fingerprint(world: World, tmp_path: Path) -> None:
    write_zip(world.data / "in/a.zip", {"1.png": picture(10, 11)})
    write_jsonl(world.data / "in/a.jsonl", llava("a", "1.png"))
    write_jsonl(world.data / "b.jsonl", {"text": "b"})
    world.sources = [world.source("s", records="**/*.jsonl")]
    world.build()
    (stats,) = Index.open(world.index_dir).sources
    assert stats.shard_names == ("b.jsonl", "in/a.jsonl")

    other = World(tmp_path / "other")
    shutil.copytree(world.data, other.data)
    other.sources = [other.source("s", records="**/*.jsonl")]
    other.build()
    assert Index.open(other.index_dir).sources == (stats,)

    write_zip(other.data / "in/a.zip", {"1.png": picture(10, 12)})
    other.build()
    assert Index.open(other.index_dir).sources[0].fingerprint != stats.fingerprint


def test_what_is_wrong_with_a_source_is_named(world: World) -> None:
    write_jsonl(world.data / "a.jsonl", {"text": "a"})
    for sources, reason in (
        (
            [world.source("s", records="*.json")],
            r"source s: no file matches records pattern .*\*\.json",
        ),
        ([world.source("s", images=["*.zip"])], r"images .*\*\.zip.* is no folder and matches no"),
        ([world.source("s"), world.source("s")], "a name is used twice"),
        ([SourceFiles(name="s", records=())], "'records' names no file"),
    ):
        world.sources = sources
        with pytest.raises(ConfigError, match=reason):
            world.build()


def test_one_build_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(world.data / "a.jsonl", {"text": "a"})
    os.makedirs(world.index_dir)
    with open(Path(world.index_dir, ".lock"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with monkeypatch.context() as impatient:
            impatient.setattr(index_folder, "BUILDER_WAIT_S", 0.2)
            with pytest.raises(ConfigError, match=r"another process is building .* for 0\.2 s"):
                world.build()
        ends = threading.Timer(0.5, fcntl.flock, (held, fcntl.LOCK_UN))
        ends.start()
        begun = time.monotonic()
        world.build()
        ends.join()
        assert time.monotonic() - begun > 0.4


def test_progress(world: World) -> None:
    for name in ("a", "b"):
        write_jsonl(world.data / f"{name}.jsonl", *[{"text": name}] * 600, b"no")
    seen: list[IndexProgress] = []
    world.build(progress=seen.append)
    total = sum(path.stat().st_size for path in world.data.iterdir())
    done = [state.done_bytes for state in seen]
    assert done == sorted(done) and len(done) >= 6
    last = seen[-1]
    assert (last.done_bytes, last.total_bytes) == (total, total)
    assert (last.num_samples, last.num_rejected, last.shard) == (1202, 2, "b.jsonl")


def test_other_stores(world: World) -> None:
    write_zip(world.data / "a.zip", {"1.png": picture(10, 11)})
    write_jsonl(world.data / "a.jsonl", llava("a", "1.png"), llava("b", "2.png"))
    (world.data / "2.png").write_bytes(picture(12, 13))
    files = fsspec.filesystem("memory")
    for path in world.data.iterdir():
        files.pipe_file(f"/set/{path.name}", path.read_bytes())
    world.sources = [
        SourceFiles(name="s", records=("memory://set/*.jsonl",), images=("memory://set",))
    ]
    assert world.build().num_rejected == 0
    index = Index.open(world.index_dir)
    assert [sizes for _, sizes in rows_of(index)] == [[(10, 11)], [(12, 13)]]
    assert index.sources[0].shard_names == ("a.jsonl",)
    assert index._sources[0].shards[0].ref.url == "memory:///set/a.jsonl"


class RemoteBackend:
    """Objects in memory that answer after a while; counts bytes and calls at a time."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.bytes: dict[str, int] = {}
        self.most = self._now = 0

    def stat(self, url: str) -> ObjectStat:
        if url not in self.objects:
            raise FileNotFoundError(url)
        return ObjectStat(size_bytes=len(self.objects[url]), mtime_ns=1)

    def read(self, url: str, offset: int, size: int) -> tuple[bytes, ObjectStat]:
        self._now += 1
        self.most = max(self.most, self._now)
        time.sleep(0.005)
        data = self.objects[url][offset : offset + size]
        self.bytes[url] = self.bytes.get(url, 0) + len(data)
        self._now -= 1
        return data, self.stat(url)

    def glob(self, pattern: str) -> dict[str, ObjectStat | None]:
        return dict.fromkeys(sorted(fnmatch.filter(self.objects, pattern)))

    def list_folder(self, folder: str, prefix: str) -> None: ...

    def forget(self, url: str) -> None: ...

    def close(self) -> None: ...


def test_a_remote_archive_is_not_downloaded(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, 200_000, dtype=np.uint8).tobytes()
    members = {f"{n}.jpg": picture(20 + n, 9, "JPEG") + noise for n in range(100)}
    archive = write_zip(tmp_path / "a.zip", members).read_bytes()
    records = write_jsonl(tmp_path / "a.jsonl", *[llava("", name) for name in members])
    remote = RemoteBackend({"fake://b/a.zip": archive, "fake://b/a.jsonl": records.read_bytes()})
    store = Store(remote=remote)
    index_dir = str(tmp_path / "index")
    source = SourceFiles(name="s", records=("fake://b/*.jsonl",), images=("fake://b/*.zip",))
    report = build_index([source], index_dir, counter=ByteCounter, store=store)
    store.close()
    assert report.num_rejected == 0
    assert len(rows_of(Index.open(index_dir))) == 100
    assert remote.bytes["fake://b/a.zip"] < len(archive) / 15
    assert remote.most > 4
