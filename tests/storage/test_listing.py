from __future__ import annotations

import errno
from pathlib import Path
from typing import NoReturn

import pytest

from dataservice.errors import ConfigError, StorageError
from dataservice.storage.backends import LocalBackend, ObjectStat
from dataservice.storage.listing import list_source, record_stem
from dataservice.storage.objects import Store
from dataservice.storage.sources import SourceFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (
        "a.jsonl", "a.zip", "a.tar", "b.jsonl.gz", "b.tar", "c.json", "d.jsonl.zip", "d.zip",
        "roots/x.zip", "roots/y.tar", "roots/README.md", "roots/z.tar.gz", "deep/e.parquet",
        "parts/x.zip.001", "parts/x.z01", "a.jsonl.idx",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    (tmp_path / "c.zip").mkdir()
    return tmp_path


def listed(folder: Path, *records: str, images: tuple[str, ...] = ()) -> tuple[list[str], ...]:
    """Names of record files, of what stands beside each, and of roots."""
    source = SourceFiles(
        name="s",
        records=tuple(f"{folder}/{pattern}" for pattern in records),
        images=tuple(f"{folder}/{pattern}" for pattern in images),
    )
    store = Store()
    try:
        found = list_source(source, store, deadline_s=10)
    finally:
        store.close()
    assert found.root == str(folder)
    beside = [" ".join(Path(f.url).name for f in files) for files in found.beside]
    names = ([f.url for f in found.records], beside, [f.url for f in found.roots])
    return tuple([name.removeprefix(f"{folder}/") for name in some] for some in names)


def test_archives_of_the_same_stem_stand_beside(folder: Path) -> None:
    records, beside, _ = listed(folder, "*.json*", "deep/*")  # but not the places of Energon
    assert records == ["a.jsonl", "b.jsonl.gz", "c.json", "d.jsonl.zip", "deep/e.parquet"]
    assert beside == ["a.zip a.tar", "b.tar", "", "d.zip", ""]


def test_stems_of_record_files() -> None:
    assert record_stem("/x/a.b.jsonl.zst") == "/x/a.b"
    assert record_stem("a.json") == record_stem("a.parquet") == record_stem("a.JSONL.GZ") == "a"
    assert record_stem("/x/a?b.jsonl") == "/x/a?b"
    assert record_stem("https://host/a.jsonl.zip?part=b.gz") == "https://host/a"
    assert record_stem("https://host/a.jsonl?at=b.c/d") == "https://host/a"


def test_roots_are_archives_and_folders_in_their_order(folder: Path) -> None:
    found = listed(folder, "*.jsonl", images=("roots", "roots/*", "a.zip", "roots/x.zip"))[2]
    assert found == ["roots", "roots/x.zip", "roots/y.tar", "a.zip"]
    for images, reason in (
        ("*.jpg", r"images .*\*\.jpg' is no folder and matches no zip or tar archive$"),
        ("roots/README.md", "is no folder and matches no zip or tar archive$"),
        ("roots/*.gz", r"a compressed tar cannot be read by place, unpack it to \.tar"),
        ("parts/*.zip.0*", r"x\.zip\.001 is a part of a split archive, join the parts first"),
        ("parts/*.z0*", r"x\.z01 is a part of a split archive, join the parts first"),
    ):
        with pytest.raises(ConfigError, match=reason):
            listed(folder, "*.jsonl", images=(images,))
    with pytest.raises(ConfigError, match=r"no file matches records pattern '.*\.txt'$"):
        listed(folder, "*.txt")
    with pytest.raises(ConfigError, match=r"it is a folder: name the files in it"):
        listed(folder, "roots/")


def test_many_files_are_looked_at_side_by_side(folder: Path) -> None:
    for number in range(40):
        (folder / f"m{number:02d}.jsonl").write_bytes(b"x")
    (folder / "m07.tar").write_bytes(b"x")
    (folder / "m08.zip").mkdir()
    records, beside, _ = listed(folder, "m*.jsonl", "a.jsonl")
    assert len(records) == 41
    assert beside == ["a.zip a.tar", *[""] * 7, "m07.tar", *[""] * 32]


def test_names_with_the_characters_of_patterns(folder: Path) -> None:
    odd = folder / "run [1] *? x"
    odd.mkdir()
    for name in ("a.jsonl", "b[2].jsonl", "i[1].zip"):
        (odd / name).write_bytes(b"x")
    source = SourceFiles(
        name="s",
        records=(f"{odd}/a*.jsonl", f"{odd}/b[2].jsonl", f"{odd}/b[[]2].jsonl"),
        images=(f"{odd}/i[1].zip",),
    )
    store = Store()
    found = list_source(source, store, deadline_s=10)
    store.close()
    assert [Path(file.url).name for file in found.records] == ["a.jsonl", "b[2].jsonl"]
    assert [Path(file.url).name for file in found.roots] == ["i[1].zip"]


def test_names_that_are_not_utf_8_are_named(folder: Path) -> None:
    for suffix in (b"jsonl", b"zip"):
        with open(bytes(folder) + b"/\xff." + suffix, "wb"):
            pass
    with pytest.raises(ConfigError, match=r"name of '.*udcff\.jsonl' is not UTF-8; rename"):
        listed(folder, "*.jsonl")
    with pytest.raises(ConfigError, match=r"name of '.*udcff\.zip' is not UTF-8; rename"):
        listed(folder, "a.jsonl", images=("*.zip",))


def test_archives_that_may_not_be_looked_at_are_not_there(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S3 answers 403 in place of 404 to who may not list the bucket."""

    class NoListing(LocalBackend):
        def list_folder(self, folder: str, prefix: str) -> NoReturn:
            raise PermissionError(errno.EACCES, "Forbidden")

        def stat(self, url: str) -> ObjectStat:
            try:
                return super().stat(url)
            except FileNotFoundError:
                raise PermissionError(errno.EACCES, "Forbidden") from None

    (folder / "alone.jsonl").write_text("{}")
    files = SourceFiles(name="s", records=(str(folder / "alone.jsonl"),))
    store = Store(local=NoListing())
    assert list_source(files, store, deadline_s=5).beside == ((),)
    assert "2 archives beside record files are taken as not there" in caplog.text
    for number in range(20):
        (folder / f"m{number:02}.jsonl").write_text("{}")
    (folder / "m07.zip").write_text("x")
    many = SourceFiles(name="s", records=(str(folder / "m*.jsonl"),))
    found = list_source(many, store, deadline_s=5)
    assert [len(some) for some in found.beside] == [*[0] * 7, 1, *[0] * 12]
    assert "39 archives beside record files are taken as not there" in caplog.text
    assert len(caplog.records) == 2
    missing = SourceFiles(name="s", records=files.records, images=(str(folder / "none.zip"),))
    with pytest.raises(StorageError, match="Forbidden"):
        list_source(missing, store, deadline_s=5)
    store.close()
