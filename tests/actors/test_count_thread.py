from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_settings, write_config

from dataservice.actors.count_messages import file_of, found_of, job_of, place_of
from dataservice.actors.count_thread import CountThread
from dataservice.config import Config, load_config
from dataservice.errors import ServiceUnavailable, WireError
from dataservice.indexing import open_lazy_index, scan_lazy_index
from dataservice.pipeline.text import TextRenderer
from dataservice.storage.lazy import LazyIndex
from dataservice.storage.lazy.scratch import ScratchFolder
from dataservice.storage.objects import ShardReader
from dataservice.wire.counting import CountBlock, CountedBlock, GetRoots, ReportCounts, Roots
from dataservice.wire.messages import Ok


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("counting")
    settings = {**demo_settings(folder), "index": "lazy"}
    config = load_config(str(write_config(folder, settings)))
    scan_lazy_index(config)
    return config


class Coordinator:
    """Answers what a counting thread asks."""

    def __init__(self, index: LazyIndex) -> None:
        self._index = index
        self.reported: list[CountedBlock] = []
        self.refuse = 0

    def ask(self, request: Any) -> Any:
        if isinstance(request, GetRoots):
            return Roots(roots=tuple(map(found_of, self._index.roots(request.source))))
        assert isinstance(request, ReportCounts)
        assert (request.worker_id, request.lease) == ("w", 7)
        if self.refuse:
            self.refuse -= 1
            raise ServiceUnavailable("away for a moment")
        self.reported += request.blocks
        return Ok()


@contextmanager
def counting(config: Config, coordinator: Coordinator) -> Iterator[CountThread]:
    with ShardReader(None) as reader:
        thread = CountThread(
            config, TextRenderer.build(config.text), reader, coordinator.ask, lambda: ("w", 7)
        )
        running = threading.Thread(target=thread.run)
        running.start()
        try:
            yield thread
        finally:
            thread.close()
            running.join(10)
            assert not running.is_alive()


def until(true: Callable[[], object]) -> None:
    ends = time.monotonic() + 20
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.01)


def all_jobs(index: LazyIndex) -> list[CountBlock]:
    return [
        job_of(index.blocks.place((file, block)))
        for file, of in enumerate(index.lazy.block_files())
        for block in range(of.num_blocks)
    ]


@pytest.mark.parametrize("shared", [True, False])
def test_a_worker_counts_what_any_other_process_counts(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Also on a machine that does not see the index folder; nothing stays there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    index = open_lazy_index(config)
    elsewhere = config if shared else dataclasses.replace(config, index_dir="/nowhere/at/all")
    coordinator = Coordinator(index)
    coordinator.refuse = 1
    jobs = all_jobs(index)
    with counting(elsewhere, coordinator) as thread:
        assert len(os.listdir(tmp_path)) == (not shared)
        thread.add(jobs[:9])
        thread.add(jobs[5:])
        assert len(thread.held()) > 0
        until(lambda: not thread.held())
    assert os.listdir(tmp_path) == []
    assert {(c.file, c.block) for c in coordinator.reported} == {(j.file, j.block) for j in jobs}
    assert len(coordinator.reported) == len(jobs)
    for counted in coordinator.reported:
        key = counted.file, counted.block
        index.blocks.get(key)
        assert index.blocks.keep(key, counted.rows) is None
        assert index._store.read(*key) == counted.rows
    index.close()


def with_shard(job: CountBlock, **changes: str | int) -> CountBlock:
    return dataclasses.replace(job, shard=dataclasses.replace(job.shard, **changes))


def test_what_cannot_be_counted_is_reported_with_the_reason(config: Config) -> None:
    index = LazyIndex.open(config.index_dir)
    coordinator = Coordinator(index)
    good, *others = all_jobs(index)[:4]
    gone = with_shard(others[0], url="/nowhere/a.jsonl")
    changed = with_shard(others[1], mtime_ns=5)
    bad = dataclasses.replace(others[2], offsets=b"abc")
    with counting(config, coordinator) as thread:
        thread.add([gone, changed, bad, good])
        until(lambda: not thread.held())
    found = {(c.file, c.block): c for c in coordinator.reported}
    reasons = [found[j.file, j.block] for j in (gone, changed, bad, good)]
    assert "is not there" in reasons[0].reason and not reasons[0].fatal
    assert "changed after it was indexed" in reasons[1].reason and reasons[1].fatal
    assert "no whole numbers" in reasons[2].reason
    assert reasons[3].rows and not reasons[3].reason
    index.close()


def test_blocks_travel_unchanged(config: Config) -> None:
    index = LazyIndex.open(config.index_dir)
    place = index.blocks.place((0, 1))
    there = place_of(job_of(place))
    assert there.shard == place.shard and there.beside == place.beside
    assert there.offset.tolist() == place.offset.tolist()
    assert there.length.tolist() == place.length.tolist()
    assert all(file_of(found_of(root)) == root for root in index.roots("caption"))
    with pytest.raises(WireError, match="2 offsets and 1 lengths"):
        place_of(dataclasses.replace(job_of(place), offsets=bytes(16), lengths=bytes(4)))
    index.close()


def test_what_a_killed_process_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, signal, sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from dataservice.storage.lazy.scratch import ScratchFolder\n"
        "open(ScratchFolder('members').path + '/file', 'w').close()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (left,) = os.listdir(tmp_path)
    (tmp_path / "dataservice-other").mkdir()
    mine, other = ScratchFolder("members"), ScratchFolder("members")
    assert left not in os.listdir(tmp_path)
    assert os.path.isdir(mine.path) and os.path.isdir(other.path)
    mine.close()
    other.close()
    assert os.listdir(tmp_path) == ["dataservice-other"]
