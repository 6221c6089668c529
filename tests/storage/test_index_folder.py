from __future__ import annotations

import dataclasses
import errno
import gc
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from storage.datasets import ByteCounter, llava, picture, write_jsonl, write_zip
from storage.test_index_parallel import SlowCounter, builders

from dataservice.errors import ConfigError, StorageError
from dataservice.storage import index_build
from dataservice.storage.archives.lookup import Lookup, Named
from dataservice.storage.backends import LocalBackend, ObjectStat
from dataservice.storage.index import Index
from dataservice.storage.index_build import build_index
from dataservice.storage.index_executor import InProcesses, InThisProcess, States
from dataservice.storage.index_report import IndexProgress
from dataservice.storage.index_tasks import BuildContext, Task
from dataservice.storage.objects import Store
from dataservice.storage.sources import SourceFiles


def pairs(folder: Path, count: int, *images: str) -> SourceFiles:
    """0.jsonl with 0.zip and so on."""
    for number in range(count):
        write_zip(folder / f"{number}.zip", {f"{number}.png": picture(9, 20 + number)})
        write_jsonl(folder / f"{number}.jsonl", llava("a", f"{number}.png"))
    return SourceFiles(
        name="s", records=(f"{folder}/*.jsonl",), images=tuple(f"{folder}/{i}" for i in images)
    )


def test_what_an_open_index_needs_stays(tmp_path: Path) -> None:
    source = pairs(tmp_path / "data", 3)
    index_dir = str(tmp_path / "index")
    build_index([source], index_dir, counter=ByteCounter)
    index = Index.open(index_dir)
    other = SourceFiles(name="other", records=(f"{tmp_path}/data/0.jsonl",))
    build_index([other], index_dir, counter=ByteCounter)
    assert index.columns(0, np.arange(3)).height.tolist() == [20, 21, 22]
    before = len(os.listdir(index_dir))
    del index
    gc.collect()
    build_index([other], index_dir, counter=ByteCounter)
    assert len(os.listdir(index_dir)) < before


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pairs(tmp_path / "data", 2, "*.zip")
    (tmp_path / "data/bad.zip").write_bytes(b"no zip")
    index_dir = str(tmp_path / "index")
    built = build_index([source], index_dir, counter=ByteCounter)

    def refused(path: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system", path)

    monkeypatch.setattr(index_build, "only_builder", refused)
    report = build_index([source], index_dir, counter=ByteCounter)
    assert (report.digest, report.sources[0].shards_reused) == (built.digest, 2)
    write_jsonl(tmp_path / "data/0.jsonl", {"text": "new"})
    with pytest.raises(ConfigError, match=r"index_dir .* cannot be written to .* not up to date"):
        build_index([source], index_dir, counter=ByteCounter)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    class Full:
        def run(self, context: BuildContext, tasks: Sequence[Task]) -> States:
            raise OSError(errno.ENOSPC, "No space left on device")
            yield  # pragma: no cover

    source = pairs(tmp_path / "data", 1)
    index_dir = tmp_path / "index"
    with pytest.raises(StorageError, match=rf"index_dir {index_dir}: No space left .* make room"):
        build_index([source], str(index_dir), counter=ByteCounter, executor=Full())


def test_a_folder_with_other_files_is_never_built_in(tmp_path: Path) -> None:
    data = tmp_path / "data"
    source = pairs(data, 1)
    (data / "shard-00000.jsonl").write_bytes(b"{}")
    before = sorted(os.listdir(data))
    with pytest.raises(ConfigError, match=rf"holds other files, such as 0.jsonl; .* {data}/index$"):
        build_index([source], str(data), counter=ByteCounter)
    assert sorted(os.listdir(data)) == before


def test_files_that_came_later_stay_and_are_no_records(tmp_path: Path) -> None:
    source = pairs(tmp_path / "data", 1)
    write_jsonl(tmp_path / "data/bad.jsonl", b"bad")
    below = SourceFiles(name="s", records=(f"{tmp_path}/data/**/*.json*",))
    index_dir = tmp_path / "data/index"
    reports = [build_index([below], str(index_dir), counter=ByteCounter) for _ in range(2)]
    assert [(r.num_samples, r.num_rejected) for r in reports] == [(2, 1)] * 2
    names = ("shard-00000.jsonl", "archive-x.zip", "records-a.jsonl", "notes.txt")
    for name in names:
        (index_dir / name).write_bytes(b"not ours")
    build_index([source], str(index_dir), counter=ByteCounter)
    for name in names:
        assert (index_dir / name).read_bytes() == b"not ours"


def test_damaged_files_of_an_index_are_made_anew(tmp_path: Path) -> None:
    folder = pairs(tmp_path / "data", 1)
    write_jsonl(tmp_path / "data/0.jsonl", llava("a", "0.png"), llava("b", "f.png"), b"bad")
    (tmp_path / "data/f.png").write_bytes(picture(7, 8))
    source = dataclasses.replace(folder, images=(f"{tmp_path}/data",))
    index_dir = tmp_path / "index"
    digest = build_index([source], str(index_dir), counter=ByteCounter).digest
    names = [n for n in os.listdir(index_dir) if n.startswith(("shard-", "archive-"))]
    assert len(names) == 8
    for name in names:
        good = (index_dir / name).read_bytes()
        for damage in (b"", good[: len(good) // 2], None):
            if damage is None:
                os.unlink(index_dir / name)
            else:
                (index_dir / name).write_bytes(damage)
            assert build_index([source], str(index_dir), counter=ByteCounter).digest == digest
            assert (index_dir / name).read_bytes() == good
    (index_dir / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"index_dir .*/file/x: .* is no folder"):
        build_index([source], str(index_dir / "file/x"), counter=ByteCounter)


class Broken(LocalBackend):
    """Some record files cannot be read."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names = names

    def read(self, url: str, offset: int, size: int) -> tuple[bytes, ObjectStat]:
        if url.endswith(self._names):
            raise PermissionError(errno.EACCES, "not yours", url)
        return super().read(url, offset, size)


def test_files_that_cannot_be_read_cost_themselves_alone(tmp_path: Path) -> None:
    source = pairs(tmp_path / "data", 16)
    index_dir = tmp_path / "index"

    def build(*broken: str) -> None:
        store = Store(local=Broken(*broken), attempts=1)
        try:
            build_index([source], str(index_dir), counter=ByteCounter, store=store)
        finally:
            store.close()

    with pytest.raises(StorageError, match=r"0\.jsonl.*not yours.*\(and 1 files more\); run again"):
        build("/0.jsonl", "/5.jsonl")
    assert len(list(index_dir.glob("shard-*.json"))) == 14
    for path in index_dir.glob("shard-*"):
        path.unlink()
    with pytest.raises(StorageError, match=r"and 9 files more"):
        build(".jsonl")
    os.unlink(tmp_path / "data/3.jsonl")
    build()
    assert Index.open(str(index_dir)).sources[0].shard_samples == (1,) * 15


def test_a_build_that_is_given_up_ends_within_a_batch(tmp_path: Path) -> None:
    for name in "ab":
        write_jsonl(tmp_path / f"data/{name}.jsonl", *({"text": f"{n}"} for n in range(2000)))
    source = SourceFiles(name="s", records=(f"{tmp_path}/data/*.jsonl",))

    def interrupt(state: IndexProgress) -> None:
        if state.num_samples:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(
            [source],
            str(tmp_path / "index"),
            counter=SlowCounter,
            executor=InProcesses(2),
            progress=interrupt,
        )
    assert not builders()
    assert sorted(os.listdir(tmp_path / "index")) == [".lock", ".open"]


def test_record_files_with_archives_beside_share_one_lookup_of_the_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[int] = []
    make = Lookup.of

    def counted(archives: Sequence[Named]) -> Lookup:
        looked_up.append(len(archives))
        return make(archives)

    monkeypatch.setattr(Lookup, "of", counted)
    source = pairs(tmp_path / "data", 6, "*.zip")
    write_jsonl(tmp_path / "data/9.jsonl", llava("a", "4.png"), llava("b", "9.png"))
    report = build_index(
        [source], str(tmp_path / "index"), counter=ByteCounter, executor=InThisProcess()
    )
    assert looked_up == [1] * 6
    assert (report.num_samples, report.num_rejected) == (8, 1)
    rejected = Path(report.rejected_path).read_text()
    assert "no such image: '9.png', places searched: 6" in rejected
