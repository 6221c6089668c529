"""The wall clock jumps: nothing of ours looks at it."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_config
from support.harness import read_ranks
from support.local_service import LocalService
from support.proof import clean_run, longest_gap, nothing_leaks, prove_same
from support.until import until, workers_of

ROOT = Path(__file__).parents[2]
STEPS = 20
WALL_CLOCK = {
    *("time", "time_ns", "ctime", "gmtime", "localtime", "asctime", "strftime"),
    *("now", "utcnow", "today"),
}
MODULES = {"time", "datetime", "date", "dt"}


def looks_at_the_wall_clock(code: str) -> list[str]:
    """Where, as source text."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and node.attr in WALL_CLOCK:
            owner = ast.unparse(node.value).rpartition(".")[2]
            if owner in MODULES:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            names = WALL_CLOCK & {alias.name for alias in node.names}
            found += [f"line {node.lineno}: from time import {name}" for name in names]
    return found


SHOWN = {
    "dataservice/actors/events.py": {"time.time"},
    "dataservice/actors/shared.py": {"time.time"},
    "dataservice/actors/stager.py": {"time.time"},
    "dataservice/actors/status.py": {"time.time"},
    "dataservice/actors/worker.py": {"time.time"},
    "dataservice/cli/doctor_machine.py": {"time.time", "time.strftime", "time.gmtime"},
    "dataservice/cli/top_view.py": {"time.strftime", "time.localtime"},
}
"""Where times are shown to people and to monitoring, and nothing is decided by them."""


def test_a_look_at_the_wall_clock_is_found() -> None:
    for code in (
        "import time\nuntil = time.time() + 3",
        "from time import time",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import datetime\nwhen = datetime.utcnow",
    ):
        assert looks_at_the_wall_clock(code), code
    assert not looks_at_the_wall_clock("import time\ntime.monotonic()\nmodel.time()")


def test_no_module_looks_at_the_wall_clock() -> None:
    found = {
        str(path.relative_to(ROOT)): places
        for package in ("dataservice", "trainer_client")
        for path in sorted((ROOT / package).rglob("*.py"))
        if (places := looks_at_the_wall_clock(path.read_text()))
    }
    assert {path: {place.partition(": ")[2] for place in found[path]} for path in found} == SHOWN


def test_jumps_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an hour, forth and back again, at every look that anybody takes."""
    config = demo_config(tmp_path)
    clean = clean_run(config, dp_size=2, micro_steps=2, steps=STEPS)
    config = dataclasses.replace(config, state_dir=str(tmp_path / "other"))
    hours, now = itertools.cycle([0, 3600, -3600, 86400]), time.time

    def jumping(*_: Any) -> float:
        return now() + next(hours)

    with nothing_leaks():
        with LocalService(config, workers=2) as service:
            until("two workers", lambda: len(workers_of(service)) == 2)
            monkeypatch.setattr(time, "time", jumping)
            monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 1e9))
            readers = read_ranks(
                service.endpoint, job="test", dp_size=2, micro_steps=2, steps=STEPS
            )
            counters = service.status()["counters"]
            monkeypatch.undo()
    prove_same(clean, readers.deliveries)
    assert counters.get("workers_lost", 0) == 0
    assert counters["steps_planned"] >= STEPS
    print(f"recovered in {longest_gap(readers.deliveries):.1f} s")
