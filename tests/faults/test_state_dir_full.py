"""The coordinator's journal cannot be written for a time: its disk is full, or read-only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from actors.bench import Bench, on_bench
from support.demo_config import demo_config

from dataservice.actors import planning_ahead
from dataservice.actors.state_log import open_state
from dataservice.errors import StorageError
from dataservice.storage import journal


class Disk:
    """Takes nothing that is written to a journal while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.refused = 0
        self._write = os.pwrite
        monkeypatch.setattr(journal.os, "pwrite", self._pwrite)

    def _pwrite(self, *given: Any) -> int:
        if self.full:
            self.refused += 1
            raise OSError(28, "No space left on device")
        return self._write(*given)


def test_a_coordinator_that_cannot_start_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = demo_config(tmp_path)
    Disk(monkeypatch).full = True
    with pytest.raises(StorageError, match=f"state_dir {config.state_dir} .*No space left"):
        open_state(config)


def test_ranks_wait_and_go_on_once_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_ahead, "JOURNAL_AGAIN_S", 0.02)
    config = demo_config(tmp_path, serving={"plan_ahead_steps": 2, "lease_s": 60.0})
    disk = Disk(monkeypatch)

    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        with pytest.raises(StorageError, match="No space left"):
            disk.full = True
            await bench.open("run")
        disk.full = False
        session = (await bench.open("run")).session
        disk.full = True
        blocked = await bench.steps(session, 0, done=0)
        assert blocked.steps == ()
        assert "journal cannot be written" in blocked.blocked_by
        assert "No space left on device; make room there" in blocked.blocked_by
        assert disk.refused > 2
        disk.full = False
        first = await bench.one(session, 0, done=0)
        disk.full = True
        done = 1
        while (await bench.steps(session, done, done=done)).steps:
            done += 1
        assert done > 2
        disk.full = False
        for step in range(done, done + 20):
            await bench.one(session, step, done=step)
        assert first.step == 0
        status = await bench.status()
        assert status["session"]["failure"] == ""

    on_bench(config, tmp_path / "state", check)

    async def goes_on(bench: Bench) -> None:
        saved = bench.coordinator.shared.log.session
        assert saved is not None
        assert saved.homes
        assert saved.cursor.step > 0

    on_bench(config, tmp_path / "state", goes_on)
