"""The whole service without Ray on a lazy index: the packs of the full one, counted on the way."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.demo_config import demo_settings, write_config
from support.harness import Readers, read_ranks
from support.local_service import LocalService

from dataservice.actors import counting_desk
from dataservice.actors.count_thread import CountThread
from dataservice.config import Config, load_config
from dataservice.errors import DataServiceError
from dataservice.indexing import scan_lazy_index, update_index, write_lazy_rejected
from dataservice.storage.lazy import LazyIndex
from dataservice.wire.counting import CountBlock, CountedBlock

STEPS = 6
RECORDS = 6000
"""Of the text source, 94 blocks; six steps read about a tenth."""


def write_data(folder: Path) -> None:
    """Long texts, every hundredth record broken; pictures with their captions in two files."""
    lines = [
        json.dumps({"text": f"{i} " + "word " * (i * 7 % 120)}) if i % 100 else '{"text": '
        for i in range(RECORDS)
    ]
    (folder / "text.jsonl").write_text("\n".join(lines))
    for part in range(2):
        with zipfile.ZipFile(folder / f"caption{part}.zip", "w") as archive:
            captions = []
            for i in range(200):
                picture = BytesIO()
                Image.new("RGB", (30 + i % 50, 40), (i, part, 9)).save(picture, "PNG")
                archive.writestr(f"{i}.png", picture.getvalue())
                captions.append(json.dumps({"image": f"{i}.png", "caption": f"picture {i}"}))
        (folder / f"caption{part}.jsonl").write_text("\n".join(captions))


def config_of(folder: Path, data: Path, index: str) -> Config:
    settings = demo_settings(
        folder,
        plan={"pack_length": 1024, "lanes": 2, "window": 96, "epochs": 1},
        serving={"plan_ahead_steps": 2},
    )
    settings["index"] = index
    settings["sources"] = [
        {"name": "text", "records": str(data / "text.jsonl"), "mean_tokens": 300},
        {"name": "caption", "records": str(data / "caption*.jsonl"), "mean_tokens": 60},
    ]
    return load_config(str(write_config(folder, settings)))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def full(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Readers:
    """What a service on a full index delivers."""
    config = config_of(tmp_path_factory.mktemp("full"), data, "full")
    update_index(config)
    with LocalService(config) as service:
        return read(service)


@pytest.fixture
def config(data: Path, tmp_path: Path) -> Config:
    config = config_of(tmp_path, data, "lazy")
    scan_lazy_index(config)
    return config


def read(service: LocalService, **changes: Any) -> Readers:
    options = {"job": "test", "dp_size": 2, "micro_steps": 2, "steps": STEPS, **changes}
    return read_ranks(service.endpoint, **options)


def num_counted(config: Config) -> int:
    index = LazyIndex.open(config.index_dir)
    try:
        return index.num_counted()
    finally:
        index.close()


def until(true: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    ends = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < ends, what
        time.sleep(0.02)


def test_the_packs_are_those_of_the_full_index_and_workers_count_them(
    config: Config, full: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CountThread._counted
    jobs: list[tuple[int, int]] = []

    def counted(thread: CountThread, job: CountBlock) -> CountedBlock:
        jobs.append((job.file, job.block))
        return real(thread, job)

    monkeypatch.setattr(CountThread, "_counted", counted)
    with LocalService(config, workers=2) as service:
        readers = read(service)
        status = service.status()
    assert readers.digests_of_packs() == full.digests_of_packs()
    assert readers.packs_of_step() == full.packs_of_step()
    counting = status["counting"]
    assert counting["by_planner"] == 0
    assert len(jobs) == len(set(jobs))
    assert len(jobs) >= counting["blocks"] == num_counted(config) < 60
    assert 0 < counting["rejected"] <= RECORDS // 100
    assert counting["waiting_for"] == ""
    assert status["sample_counts"]["text"]["rejected"] > 0
    found = write_lazy_rejected(config)
    assert found.num_rejected == counting["rejected"]
    assert (found.counted_blocks, found.all_blocks) == (counting["blocks"], 94 + 2 * 4)


def test_a_service_started_again_counts_nothing_again(config: Config, full: Readers) -> None:
    with LocalService(config) as service:
        read(service)
        until(lambda: _idle(service), "counting ahead does not end")
    before = num_counted(config)
    state = dataclasses.replace(config, state_dir=config.state_dir + "-2")
    with LocalService(state) as service:
        again = read(service)
        assert service.status()["counting"]["blocks"] == 0
    assert again.digests_of_packs() == full.digests_of_packs()
    assert num_counted(config) == before


def _idle(service: LocalService) -> bool:
    before = service.status()["counting"]["blocks"]
    time.sleep(0.5)
    return bool(service.status()["counting"]["blocks"] == before)


def only_hold(thread: CountThread, jobs: Sequence[CountBlock]) -> None:
    """In place of `CountThread.add`: blocks are taken and never counted."""
    with thread._state:
        thread._held |= {(job.file, job.block) for job in jobs}


def test_a_lost_worker_gives_its_blocks_back(
    config: Config, full: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker takes blocks and never counts one; then it is gone."""
    first: list[CountThread] = []
    real = CountThread.add

    def add(thread: CountThread, jobs: Sequence[CountBlock]) -> None:
        if jobs and not first:
            first.append(thread)
        (only_hold if first and first[0] is thread else real)(thread, jobs)

    monkeypatch.setattr(CountThread, "add", add)
    with LocalService(config) as service:
        until(lambda: first and first[0].held(), "no blocks are given")
        service.cut_worker(next(iter(service.workers)))
        service.add_worker()
        readers = read(service)
        counting = service.status()["counting"]
    assert readers.digests_of_packs() == full.digests_of_packs()
    assert counting["by_planner"] == 0


def test_the_planning_process_counts_what_no_worker_counts(
    config: Config, full: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting_desk, "URGENT_S", 0.3)
    monkeypatch.setattr(CountThread, "add", only_hold)
    with LocalService(config) as service:
        readers = read(service)
        counting = service.status()["counting"]
    assert readers.digests_of_packs() == full.digests_of_packs()
    assert counting["by_planner"] == counting["blocks"] > 0


def test_a_killed_planning_process_loses_nothing(config: Config, full: Readers) -> None:
    with LocalService(config) as service:
        killed = threading.Event()

        def kill_once(_: Any) -> None:
            if not killed.is_set():
                killed.set()
                process = service.coordinator.counting._link._process  # type: ignore[attr-defined]
                os.kill(process.pid, signal.SIGKILL)

        readers = read(service, on_batch=kill_once)
        blocks = service.status()["counting"]["blocks"]
    assert killed.is_set()
    assert readers.digests_of_packs() == full.digests_of_packs()
    # an answer that was lost with the process may have told of some
    assert blocks <= num_counted(config)


def test_a_store_that_fails_for_a_while_makes_the_step_wait(
    config: Config, full: Readers, data: Path
) -> None:
    away = data / "away"
    os.rename(data / "text.jsonl", away)
    try:
        with LocalService(config) as service:
            found: list[Readers] = []
            reading = threading.Thread(target=lambda: found.append(read(service)))
            reading.start()

            def reason() -> str:
                return str(service.status()["counting"]["waiting_for"])

            until(lambda: "is not there" in reason(), "nobody says what the step waits for")
            assert reason().startswith("step 0 waits for ")
            assert "text/text.jsonl" in reason()
            os.rename(away, data / "text.jsonl")
            reading.join(60)
            assert service.status()["counting"]["failed"] > 0
    finally:
        if away.exists():
            os.rename(away, data / "text.jsonl")
    assert found[0].digests_of_packs() == full.digests_of_packs()


def test_a_file_that_changed_ends_the_session(tmp_path: Path) -> None:
    write_data(tmp_path)
    config = config_of(tmp_path / "run", tmp_path, "lazy")
    scan_lazy_index(config)
    with open(tmp_path / "text.jsonl", "a") as file:
        file.write('\n{"text": "one more"}')
    with (
        LocalService(config) as service,
        pytest.raises(DataServiceError, match=r"text/text\.jsonl changed"),
    ):
        read(service)


def test_a_step_that_waits_too_long_fails_with_the_reason(
    config: Config, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting_desk, "STEP_WAIT_S", 1.5)
    away = data / "away"
    os.rename(data / "text.jsonl", away)
    try:
        with (
            LocalService(config) as service,
            pytest.raises(
                DataServiceError,
                match=r"step 0 waits for .*text/text\.jsonl .*is not there.*given up",
            ),
        ):
            read(service)
    finally:
        os.rename(away, data / "text.jsonl")
