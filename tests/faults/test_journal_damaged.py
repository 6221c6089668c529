"""The journal of a real run, cut at every byte and with every byte flipped: it is read up to the
last whole record, or refused; and whatever was cut off, trainers go on from their states."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_config
from support.harness import Readers, read_ranks
from support.local_service import LocalService
from support.proof import clean_run, nothing_leaks, prove_same
from support.service_processes import ServiceProcesses

from dataservice.actors.state_log import JOURNAL, StateLog, open_state
from dataservice.config import Config
from dataservice.storage.journal import Journal, JournalDamaged

SIZES = {"dp_size": 2, "micro_steps": 1}
STEPS, MORE = 36, 6


@dataclass(frozen=True)
class Run:
    config: Config
    journal: bytes
    states: dict[int, dict[str, Any]]
    clean: Readers
    ends: list[int]
    """Of the file's head and of each record."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("journal")
    config = demo_config(folder, plan={"pack_length": 1024}, staging={"cache_dir": None})
    with LocalService(config) as service:
        readers = read_ranks(service.endpoint, job=config.job, **SIZES, steps=STEPS)
        data = (Path(config.state_dir) / JOURNAL).read_bytes()
    return Run(
        config=config,
        journal=data,
        states=readers.states,
        clean=clean_run(config, **SIZES, steps=STEPS + MORE),
        ends=ends_of(data),
    )


def ends_of(data: bytes) -> list[int]:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / JOURNAL
        copy.write_bytes(data)
        journal, records = Journal.open(str(copy))
        journal.close()
        copy.unlink()
        journal, _ = Journal.open(str(copy))
        ends = [journal.size_bytes]
        for record in records:
            journal.append(record)
            ends.append(journal.size_bytes)
        journal.close()
        assert copy.read_bytes() == data
    return ends


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder) / JOURNAL


def state(path: Path, data: bytes) -> tuple[object, ...]:
    path.write_bytes(data)
    log = StateLog(str(path))
    log.close()
    return log.holes, log.fenced_runs, log.session


def test_cut_at_every_byte(run: Run, path: Path) -> None:
    assert len(run.ends) > 6
    whole = {end: state(path, run.journal[:end]) for end in run.ends}
    empty = state(path, b"")
    for cut in range(len(run.journal)):
        last = max((end for end in run.ends if end <= cut), default=None)
        assert state(path, run.journal[:cut]) == (empty if last is None else whole[last])


def test_every_byte_flipped(run: Run, path: Path) -> None:
    rng = random.Random(5)
    before_last = state(path, run.journal[: run.ends[-2]])
    refused = 0
    for at in range(len(run.journal)):
        for mask in (1 << rng.randrange(8), 0xFF):
            data = bytearray(run.journal)
            data[at] ^= mask
            try:
                found = state(path, bytes(data))
            except JournalDamaged:
                refused += 1
                assert path.read_bytes() == bytes(data), "a refused journal is left as it is"
                assert at < run.ends[-2]
            else:
                assert at >= run.ends[-2]
                assert found == before_last
    assert refused == 2 * run.ends[-2]


@pytest.mark.parametrize("records", [0, 1, -2])
def test_trainers_go_on_whatever_was_cut_off(run: Run, tmp_path: Path, records: int) -> None:
    path = Path(run.config.state_dir) / JOURNAL
    path.write_bytes(run.journal[: run.ends[records] + 3])
    with nothing_leaks(), ServiceProcesses(run.config, tmp_path, workers=1) as service:
        readers = read_ranks(
            service.endpoint, job=run.config.job, **SIZES, steps=MORE, states=run.states
        )
        status = service.status()
    assert status["session"]["done_step"] == STEPS + MORE
    assert status["counters"]["sessions"] == 1
    before = [d for d in run.clean.deliveries if d.step < STEPS]
    prove_same(run.clean, [*before, *readers.deliveries])


def test_a_coordinator_does_not_start_with_a_damaged_journal(run: Run) -> None:
    path = Path(run.config.state_dir) / JOURNAL
    damaged = bytearray(run.journal)
    damaged[run.ends[1] + 20] ^= 1
    path.write_bytes(damaged)
    for _ in range(2):
        with pytest.raises(
            JournalDamaged, match=r"damaged at byte \d+, and records follow.*remove"
        ):
            open_state(run.config)
    path.unlink()
