"""The support of the fault tests itself: real processes read what threads read, restarts are kept,
and a proof fails when it should."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.demo_config import demo_config
from support.proof import MARK, clean_run, longest_gap, nothing_leaks, prove_same
from support.rank_processes import RankProcesses
from support.service_processes import ServiceProcesses

JOB = "test"


def test_processes_killed_and_resumed(tmp_path: Path) -> None:
    config = demo_config(tmp_path)
    clean = clean_run(config, dp_size=2, micro_steps=2, steps=6)
    with nothing_leaks(), ServiceProcesses(config, tmp_path / "service") as service:
        first = RankProcesses(
            service.endpoint,
            tmp_path / "first",
            job=JOB,
            dp_size=2,
            micro_steps=2,
            steps=4,
            save_every=2,
            pause_s=0.05,
        )
        with first:
            first.wait_for_step(1)
            service.signal("worker-0", signal.SIGKILL)
            service.signal("coordinator", signal.SIGKILL)
            assert first.wait(60) == {0: 0, 1: 0}
        states = first.last_state()
        assert states is not None and states.name == "step-4"
        with RankProcesses(
            service.endpoint,
            tmp_path / "second",
            job=JOB,
            dp_size=2,
            micro_steps=2,
            steps=2,
            states=states,
        ) as second:
            assert second.wait(60) == {0: 0, 1: 0}
        status = service.status()
    deliveries = first.deliveries() + second.deliveries()
    print(f"recovered in {longest_gap(first.deliveries()):.1f} s")
    prove_same(clean, deliveries)
    assert sorted(service.exits) == [("coordinator", -9), ("worker-0", -9)]
    assert status["session"] is not None
    one = deliveries[0]
    with pytest.raises(AssertionError, match="more than once"):
        prove_same(clean, [*deliveries, one])
    with pytest.raises(AssertionError, match="came 0 times, should come 1 times"):
        prove_same(clean, deliveries[1:])
    other = dataclasses.replace(one, digests=("other",))
    with pytest.raises(AssertionError, match="other digests"):
        prove_same(clean, [other, *deliveries[1:]])


def test_an_orphan_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.proof.SETTLE_S", 0.2)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    start = f"import subprocess; print(subprocess.Popen({sleep!r}, stdout=2).pid)"
    pid = 0
    with pytest.raises(AssertionError, match=r"left behind: process"):
        with nothing_leaks():
            done = subprocess.run(
                [sys.executable, "-c", start], stdout=subprocess.PIPE, timeout=20, check=True
            )
            pid = int(done.stdout)
    os.kill(pid, signal.SIGKILL)
    assert MARK not in os.environ


def test_a_descriptor_is_a_leak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("support.proof.SETTLE_S", 0.2)
    left = []
    with pytest.raises(AssertionError, match=r"left behind: descriptor"):
        with nothing_leaks():
            left.append(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT))
    os.close(left[0])
