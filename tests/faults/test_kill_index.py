"""A build of the index is killed at every change of the disk; the next one goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from storage.datasets import ByteCounter, llava, picture, write_jsonl, write_zip
from support.alone import run_alone
from support.killpoints import killed_at

from dataservice.storage.index import Index
from dataservice.storage.index_build import build_index
from dataservice.storage.index_executor import InThisProcess
from dataservice.storage.index_report import IndexReport
from dataservice.storage.sources import SourceFiles


def make_sources(tmp_path: Path) -> Sequence[SourceFiles]:
    folder = tmp_path / "data"
    write_zip(folder / "images.zip", {f"{n}.png": picture(20 + n, 9) for n in range(3)})
    (folder / "plain").mkdir()
    (folder / "plain/p.png").write_bytes(picture(5, 6))
    for shard in range(2):
        records = [llava("a", "1.png"), llava("b", "p.png"), b"bad", {"text": f"{shard}"}]
        write_jsonl(folder / f"{shard}.jsonl", *records)
    return [
        SourceFiles(
            name="s",
            records=(f"{folder}/*.jsonl",),
            images=(f"{folder}/images.zip", f"{folder}/plain"),
            take="first:90%",
        )
    ]


def build(sources: Sequence[SourceFiles], index_dir: Path) -> IndexReport:
    return build_index(sources, str(index_dir), counter=ByteCounter, executor=InThisProcess())


def ours(index_dir: Path) -> set[str]:
    return {name for name in os.listdir(index_dir) if name != ".lock"}


def test_killed_anywhere_it_goes_on(tmp_path: Path) -> None:
    run_alone(kill_a_build, tmp_path)


def kill_a_build(tmp_path: Path) -> None:
    sources = make_sources(tmp_path)
    expected = build(sources, tmp_path / "whole")
    index_dir = tmp_path / "index"
    point, read = 0, []
    while killed_at(point, lambda: build(sources, index_dir)):
        kept = tmp_path / "kept"
        shutil.copytree(index_dir, kept)
        report = build(sources, kept)
        assert report.digest == expected.digest == Index.open(str(kept)).digest
        assert ours(kept) == ours(tmp_path / "whole")
        read.append(report.sources[0].shards_read)
        shutil.rmtree(kept)
        shutil.rmtree(index_dir)
        point += 1
    assert point > 30
    # what a killed build finished is not read again
    assert read == sorted(read, reverse=True) and set(read) == {2, 1, 0}


def test_an_index_that_is_brought_up_to_date_stays_whole(tmp_path: Path) -> None:
    run_alone(kill_an_update, tmp_path)


def kill_an_update(tmp_path: Path) -> None:
    sources = make_sources(tmp_path)
    index_dir = tmp_path / "index"
    old = build(sources, index_dir)
    path = tmp_path / "data/1.jsonl"
    path.write_bytes(path.read_bytes() + b'{"text": "more"}\n')
    new = build(sources, tmp_path / "whole").digest
    before = tmp_path / "before"
    shutil.copytree(index_dir, before)
    point = 0
    while killed_at(point, lambda: build(sources, index_dir)):
        index = Index.open(str(index_dir))
        assert index.digest in (old.digest, new)
        rows = np.arange(sum(index.sources[0].shard_samples))
        assert len(index.columns(0, rows).width) == 4
        shutil.rmtree(index_dir)
        shutil.copytree(before, index_dir)
        point += 1
    assert Index.open(str(index_dir)).digest == new
