from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage.datasets import picture, write_jsonl, write_zip

from dataservice.errors import ArchiveError, ImageError, RecordError, StaleIndexError, StorageError
from dataservice.storage.archives import Archive, Archives, MissingImage, Place
from dataservice.storage.archives.access import Access, ManyReads
from dataservice.storage.archives.lookup import Lookup, write_lookup
from dataservice.storage.archives.name_blocks import BLOCK_NAMES, NameBlocks, NameWriter
from dataservice.storage.archives.names import (
    in_archive,
    is_archive,
    plain_name,
    plain_names,
    searched_name,
    searched_names,
)
from dataservice.storage.backends import LocalBackend, ObjectStat
from dataservice.storage.listing import FoundFile
from dataservice.storage.membertable import OK, SHADOWED
from dataservice.storage.objects import Store
from dataservice.storage.sources import SourceFiles

ODD_NAMES = ["a", "./a", "b//c", "b/c", "x.zip@/a", "d/.", "a\nb", "é"]
NAMES = st.lists(st.one_of(st.sampled_from(ODD_NAMES), st.text()), max_size=8)


@dataclass
class Named:
    names: list[str]
    shadowed: set[int] = field(default_factory=set)

    @property
    def num_members(self) -> int:
        return len(self.names)

    def named(self) -> list[str]:
        return self.names

    def problems(self) -> np.ndarray:
        return np.array([SHADOWED if n in self.shadowed else OK for n in range(len(self.names))])


@given(archives=st.lists(NAMES, max_size=4), wanted=NAMES)
@settings(deadline=None)
def test_a_lookup_finds_the_first_archive_and_its_last_member(
    archives: list[list[str]], wanted: list[str]
) -> None:
    named = [Named([name for name in names if plain_name(name)]) for names in archives]
    wanted = [plain_name(name) for name in wanted] + [plain_name(n) for a in named for n in a.names]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "lookup")
        write_lookup(path, named)
        for lookup in (Lookup.of(named), Lookup.open(path)):
            numbers, members = lookup.find(wanted)
            for name, number, member in zip(wanted, numbers, members, strict=True):
                having = [
                    (a, n)
                    for a, archive in enumerate(named)
                    for n, other in reversed(list(enumerate(archive.names)))
                    if plain_name(other) == name
                ]
                assert (number, member) == (having or [(-1, -1)])[0]
                for a in range(len(named)):
                    last = [n for other, n in having if other == a]
                    assert lookup.find_in(name, a) == (last or [-1])[0]
        assert os.listdir(folder) == ["lookup"]


def test_a_large_lookup_is_sorted_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataservice.storage.archives.lookup._PART_MEMBERS", 64)
    named = [Named([f"{a}/{n}" for n in range(500)], {0, 7}) for a in range(3)]
    path = str(tmp_path / "lookup")
    write_lookup(path, named)
    lookup = Lookup.open(path)
    names = [name for archive in named for name in archive.names]
    numbers, members = lookup.find(names)
    expected = [-1 if n in (0, 7) else n for _ in named for n in range(500)]
    assert members.tolist() == expected
    assert numbers[expected.index(1)] == 0 and numbers[-1] == 2


@given(names=NAMES, strip=st.sampled_from(["", "a", "b/"]), add=st.sampled_from(["", "r/"]))
@settings(deadline=None)
def test_many_names_are_searched_as_each_of_them(names: list[str], strip: str, add: str) -> None:
    expected: list[str] = []
    for name in names:
        try:
            expected.append(searched_name(name, strip, add))
        except RecordError as error:
            expected.append(str(error))
    assert [str(found) for found in searched_names(names, strip, add)] == expected
    assert plain_names(names) == [plain_name(name) for name in names]


def test_names_that_are_searched() -> None:
    assert searched_name("./a//b.jpg") == "a/b.jpg"
    assert searched_name("coco/1.jpg", "coco/", "train/") == "train/1.jpg"
    assert searched_name("other/1.jpg", "coco/", "") == "other/1.jpg"
    for name, reason in (
        ("/etc/passwd", "is absolute or leaves its root"),
        ("a/../../b", "is absolute or leaves its root"),
        ("C:\\x", "is absolute or leaves its root"),
        ("https://a.example/b.jpg", "is a URL"),
        ("data:image/png;base64,AAAA", "is a URL"),
        (".", "names no file"),
        ("a" * 100_000 + "/..", r"a\.\.\.' is absolute"),
    ):
        with pytest.raises(RecordError, match=reason) as caught:
            searched_name(name)
        assert len(str(caught.value)) < 300
    assert in_archive("d/x.zip@/a/b.jpg") == ("d/x.zip", "a/b.jpg")
    assert in_archive("x.TAR/b.jpg") == ("x.TAR", "b.jpg")
    assert in_archive("a/b.jpg") is None and in_archive("x.zip") is None
    assert is_archive("/data/d/x.zip", "d/x.zip") and is_archive("/data/d/x.zip", "x.zip")
    assert not is_archive("/data/d/yx.zip", "x.zip")


@given(names=st.lists(st.text(), max_size=3 * BLOCK_NAMES))
@settings(deadline=None, max_examples=20)
def test_names_are_read_by_row(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "names.arrow")
        writer = NameWriter()
        writer.add(names[:5])
        writer.add(names[5:])
        size = writer.write(path)
        blocks = NameBlocks(path, len(names), size_bytes=size)
        assert len(blocks) == len(names) and list(blocks) == names
        assert [blocks[row] for row in reversed(range(len(names)))] == names[::-1]


def test_names_resemble_their_neighbours(tmp_path: Path) -> None:
    names = [f"{n // 1000:05d}/{n * 7919 % 10**9:09d}.jpg" for n in range(20_000)]
    writer = NameWriter()
    writer.add(names)
    path = tmp_path / "names"
    assert writer.write(str(path)) < 5 * len(names)
    with pytest.raises(StaleIndexError, match="not a table of this index version"):
        NameBlocks(str(path), 5)
    data = bytearray(path.read_bytes())
    data[1000:1100] = bytes(100)
    path.write_bytes(data)
    with pytest.raises(StaleIndexError, match="is damaged"):
        list(NameBlocks(str(path), len(names)))


# ---- archives


class SlowBackend(LocalBackend):
    """Counts reads at a time; slow on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.wait_s = 0.0
        self.broken: set[str] = set()
        self.most = self._now = 0

    def read(self, url: str, offset: int, size: int) -> tuple[bytes, ObjectStat]:
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            if os.path.basename(url) in self.broken:
                raise PermissionError(13, "no", url)
            time.sleep(self.wait_s)
            return super().read(url, offset, size)
        finally:
            self._now -= 1


@pytest.fixture
def backend() -> SlowBackend:
    return SlowBackend()


@pytest.fixture
def store(backend: SlowBackend) -> Store:
    return Store(local=backend, attempts=1)


def found(path: Path) -> FoundFile:
    stat = path.stat()
    return FoundFile(
        url=str(path),
        stat=ObjectStat(
            size_bytes=0 if path.is_dir() else stat.st_size,
            mtime_ns=stat.st_mtime_ns,
            is_folder=path.is_dir(),
        ),
    )


def sizes(finder_sizes: Sequence[object]) -> list[object]:
    return [size if isinstance(size, tuple) else type(size) for size in finder_sizes]


def test_an_archive_is_read_once_and_opened_from_its_tables(
    tmp_path: Path, store: Store, backend: SlowBackend
) -> None:
    path = write_zip(tmp_path / "a.zip", {f"{n}.png": picture(20 + n, 9) for n in range(600)})
    index_dir = tmp_path / "index"
    index_dir.mkdir()
    first = Archive(found(path), store, str(index_dir), deadline_s=10)
    backend.broken = {"a.zip"}
    again = Archive(found(path), store, str(index_dir), deadline_s=10)
    assert again.num_members == 600 and list(again.named()) == list(first.named())
    assert again.name(599) == "599.png" and again.directory_crc32 == first.directory_crc32
    for name, column in first.columns.items():
        assert again.columns[name].slice(0, 600).tolist() == column.slice(0, 600).tolist()
    assert again.entry == first.entry
    for name in os.listdir(index_dir):
        (index_dir / name).write_bytes(b"damaged")
    with pytest.raises(StorageError):
        Archive(found(path), store, str(index_dir), deadline_s=10)
    backend.broken = set()
    before = sorted(os.listdir(index_dir))
    assert Archive(found(path), store, None, deadline_s=10).name(3) == "3.png"
    assert sorted(os.listdir(index_dir)) == before  # without an index folder nothing is written
    store.close()


def test_headers_are_read_where_they_are_not_known(
    tmp_path: Path, store: Store, backend: SlowBackend
) -> None:
    members = {f"{n}.png": picture(20 + n, 9) for n in range(40)} | {"bad.png": b"<html>"}
    roots = [found(write_zip(tmp_path / "a.zip", members))]
    (tmp_path / "f").mkdir()
    (tmp_path / "f/x.png").write_bytes(picture(7, 8))
    roots.append(found(tmp_path / "f"))
    archives = Archives(store, None, deadline_s=10)
    finder = archives.finder(SourceFiles(name="s", records=()), (), roots)
    places = finder.places([*members, "x.png", "nowhere"])
    assert isinstance(places.pop(), MissingImage)
    good = [place for place in places if isinstance(place, Place)]
    expected = [*[(20 + n, 9) for n in range(40)], ImageError, (7, 8)]
    assert sizes(finder.sizes(good)) == expected
    backend.broken = {"a.zip", "x.png"}
    assert sizes(finder.sizes(good)) == [*expected[:-1], StorageError]
    archives.close()
    store.close()


def test_reads_that_wait_are_done_side_by_side(
    tmp_path: Path, store: Store, backend: SlowBackend
) -> None:
    path = write_jsonl(tmp_path / "x", *range(100))
    reads = ManyReads(store, deadline_s=10)

    def read(access: Access, number: int) -> int:
        return int(access.read(str(path), 2 * number, 1))

    assert reads.each("o", read, range(10)) == list(range(10))
    assert backend.most == 1
    backend.wait_s = 0.01
    reads.each("o", read, range(10))  # still one by one: this tells that they wait
    assert backend.most == 1
    assert reads.each("o", read, range(10)) == list(range(10))
    assert backend.most > 3
    backend.broken = {"x"}
    assert {type(answer) for answer in reads.each("o", read, range(5))} == {StorageError}
    assert reads.each("o", read, []) == []
    reads.close()
    store.close()


def test_what_is_bad_as_a_whole_is_named(tmp_path: Path, store: Store) -> None:
    (tmp_path / "bad.zip").write_bytes(b"no zip")
    archives = Archives(store, None, deadline_s=10)
    roots = [found(tmp_path / "bad.zip")]
    finder = archives.finder(SourceFiles(name="s", records=()), (), roots)
    (missing,) = finder.places(["1.png"])
    assert "bad.zip" in str(missing) and "places searched: 1" in str(missing)
    identity = archives.identity(roots[0])
    assert identity is not None and identity.directory_crc32 == 0
    assert isinstance(archives.root(roots[0]), ArchiveError)
    archives.close()
    store.close()
