"""A journal's writer killed at every system call loses nothing that it had been told is safe."""

from __future__ import annotations

import os
from pathlib import Path

from support.alone import run_alone
from support.killpoints import killed_at

from dataservice.storage.journal import Journal

RECORDS = [{"kind": "hole", "number": n, "key": "x" * 40 * n} for n in range(4)]


def write_all(path: Path, acknowledged: Path) -> None:
    journal, before = Journal.open(str(path))
    told = os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for record in RECORDS[len(before) :]:
        journal.append(record)
        os.pwrite(told, b".", os.fstat(told).st_size)
    journal.close()


def test_killed_at_every_system_call(tmp_path: Path) -> None:
    run_alone(kill_at_every_system_call, tmp_path)


def kill_at_every_system_call(tmp_path: Path) -> None:
    points = 0
    while True:
        folder = tmp_path / str(points)
        folder.mkdir()
        path, told = folder / "journal", folder / "acknowledged"
        killed = killed_at(points, lambda path=path, told=told: write_all(path, told))
        journal, records = Journal.open(str(path))
        journal.close()
        safe = told.stat().st_size if told.exists() else 0
        assert records == RECORDS[: len(records)]
        assert safe <= len(records) <= safe + 1
        assert not killed_at(10**9, lambda path=path, told=told: write_all(path, told))
        journal, records = Journal.open(str(path))
        journal.close()
        assert records == RECORDS
        if not killed:
            break
        points += 1
    assert points > 4 * len(RECORDS)
