"""Events are few, short and in order, and a storm of one kind drives out nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dataservice.actors import events
from dataservice.actors.events import MANY, MOST, TEXT_CHARS, Events, named, short


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """In a list, so that tests can set it."""
    times = [1000.0]
    monkeypatch.setattr(events, "time", SimpleNamespace(time=lambda: times[0]))
    return times


def test_a_storm_becomes_one_event_that_counts(now: list[float]) -> None:
    seen = Events()
    seen.note("started", "coordinator started")
    for number in range(500):
        now[0] += 0.01
        seen.note("hole", f"hole {number}", level="warning")
    told = seen.as_json()
    assert [event["text"] for event in told[:MANY]] == [
        "coordinator started",
        *(f"hole {number}" for number in range(MANY - 1)),
    ]
    assert (told[-1]["text"], told[-1]["count"]) == ("hole 499", 500 - MANY + 1)
    assert sum(event["count"] for event in told) == 501
    assert len(told) == MANY + 1


def test_events_of_a_kind_that_come_slowly_are_all_told(now: list[float]) -> None:
    seen = Events()
    for number in range(10):
        now[0] += 2.0
        seen.note("hole", f"hole {number}")
    assert [event["count"] for event in seen.as_json()] == [1] * 10


def test_the_oldest_go_and_long_texts_are_cut(now: list[float]) -> None:
    seen = Events()
    for number in range(MOST + 20):
        now[0] += 10.0
        seen.note("kind", f"{number} " + "x" * 1000)
    told = seen.as_json()
    assert (len(told), told[0]["text"].split()[0]) == (MOST, "20")
    assert {len(event["text"]) for event in told} == {TEXT_CHARS}


def test_names_are_short_and_say_once_what_they_are() -> None:
    assert (named("w0"), named("worker-5fe63a2b")) == ("worker w0", "worker-5fe63a2b")
    assert short("a" * 56) == "a" * 12
