"""Random chaos over a real service and real trainers; `python tests/chaos/run.py` does it for
longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.driver import Chaos, Result
from chaos.report import lines
from support.proof import nothing_leaks


def storm(folder: Path, *, seconds: float, seed: int) -> Result:
    with nothing_leaks():
        result = Chaos(folder, seconds=seconds, seed=seed, say=print).run()
    print("\n".join(lines(result)))
    assert not result.violations
    assert result.exits, "no process was killed"
    assert result.counters["steps_planned"] > 0
    return result


@pytest.mark.timeout(300)
def test_some_seconds_of_chaos(tmp_path: Path) -> None:
    storm(tmp_path, seconds=12.0, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_five_minutes_of_chaos(tmp_path: Path) -> None:
    result = storm(tmp_path, seconds=300.0, seed=1)
    assert result.starts > 3
    assert result.counters["workers_lost"] > 3
    assert len(result.struck) > 60
