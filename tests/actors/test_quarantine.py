from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataservice.actors.holes import Hole, HoleLedger
from dataservice.actors.quarantine import QUARANTINE, Quarantine

PLAN = "0123456789abcdef"


def hole(number: int, **changes: Any) -> Hole:
    values = {
        "key": f"s/d/a.jsonl@{number}#{number % 3}",
        "reason": "truncated JPEG: ü\nnew line",
        "pack_number": 7 + number,
        "policy": "hole",
        "member": "x/ü.jpg",
        "archive": "d/a.zip",
    }
    return Hole(**(values | changes))


def ledger_of(holes: list[Hole]) -> HoleLedger:
    ledger = HoleLedger(max_share=1.0, max_in_a_row=9)
    for one in holes:
        ledger.restore(one)
    return ledger


def started(path: Path, holes: list[Hole], plan: str = PLAN) -> tuple[Quarantine, HoleLedger]:
    ledger = ledger_of(holes)
    quarantine = Quarantine(path, ledger)
    quarantine.start(plan)
    return quarantine, ledger


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_hole_is_one_object(tmp_path: Path) -> None:
    path = tmp_path / QUARANTINE
    quarantine, ledger = started(path, [])
    assert not path.exists()
    picture = hole(10, policy="fallback")
    record = hole(20, key="s/d/a.jsonl@20#record", member="", archive="")
    for one in (picture, record):
        ledger.add(one)
        quarantine.add(one)
    assert lines(path) == [
        {
            "source": "s",
            "shard": "d/a.jsonl",
            "sample": "s/d/a.jsonl@10",
            "image": 1,
            "member": "x/ü.jpg",
            "archive": "d/a.zip",
            "reason": "truncated JPEG: ü\nnew line",
            "pack": 17,
            "policy": "fallback",
            "plan": PLAN[:12],
        },
        {
            "source": "s",
            "shard": "d/a.jsonl",
            "sample": "s/d/a.jsonl@20",
            "image": None,
            "member": "",
            "archive": "",
            "reason": "truncated JPEG: ü\nnew line",
            "pack": 27,
            "policy": "hole",
            "plan": PLAN[:12],
        },
    ]


def test_it_is_written_anew_from_the_journal_when_missing(tmp_path: Path) -> None:
    path = tmp_path / QUARANTINE
    holes = [hole(n) for n in range(4)]
    quarantine, ledger = started(path, holes)
    whole = path.read_bytes()
    assert [row["pack"] for row in lines(path)] == [7, 8, 9, 10]
    started(path, holes)
    assert path.read_bytes() == whole
    path.unlink()
    ledger.add(hole(4))
    quarantine.add(hole(4))
    assert [row["pack"] for row in lines(path)] == [7, 8, 9, 10, 11]


def test_lines_of_another_plan_stay_and_hide_nothing(tmp_path: Path) -> None:
    path = tmp_path / QUARANTINE
    started(path, [hole(1)], plan="another plan")
    started(path, [hole(1), hole(2)])
    assert [(row["plan"], row["pack"]) for row in lines(path)] == [
        ("another plan", 8),
        (PLAN[:12], 8),
        (PLAN[:12], 9),
    ]


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), surrogate=st.booleans())
def test_after_any_crash_each_hole_stands_there_once(
    tmp_path: Path, data: st.DataObject, surrogate: bool
) -> None:
    path = tmp_path / QUARANTINE
    path.unlink(missing_ok=True)
    holes = [hole(n, member="x\ud800" if surrogate else "x") for n in range(5)]
    started(path, holes[: data.draw(st.integers(0, 5))])
    written = path.read_bytes() if path.exists() else b""
    own = data.draw(st.sampled_from([b"", b"\n", b"noted: repaired\n", b"[1]\n", b'{"plan": 3}\n']))
    cut = data.draw(st.integers(0, len(written)))
    path.write_bytes(own + written[:cut])
    started(path, holes)
    text = path.read_bytes().decode()
    found = [json.loads(line)["pack"] for line in text[len(own) :].splitlines()]
    assert sorted(found) == [7, 8, 9, 10, 11]
    assert text.encode().startswith(own)


def test_a_file_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / QUARANTINE
    path.mkdir()
    with caplog.at_level(logging.WARNING):
        quarantine, ledger = started(path, [hole(1)])
        ledger.add(hole(2))
        quarantine.add(hole(2))
    assert caplog.text.count("cannot be written") == 2
    path.rmdir()
    quarantine.add(hole(2))
    assert [row["pack"] for row in lines(path)] == [8, 9]
