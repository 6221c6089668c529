"""Each piece of news of a session is told once."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dataservice.actors import session_news
from dataservice.actors.events import Events
from dataservice.actors.session import Session
from dataservice.actors.session_news import SessionNews
from dataservice.core.settings import Grid
from dataservice.errors import DataServiceError
from dataservice.wire.messages import CursorState


def session_of(generation: int = 1) -> Session:
    cursor = CursorState(
        step=0,
        phase=0,
        phase_digest="",
        next_pack=(0,),
        lanes=((0, 0),),
        next_lane=(0,),
        lane_homes=(-1,),
    )
    return Session(
        generation=generation,
        run_id="run",
        grid=Grid(dp_size=2, micro_steps=1),
        state=None,
        hosts={0: ("h",), 1: ("h",)},
        first=(0, 0),
        cursor=cursor,
    )


def told(events: Events) -> list[tuple[str, str]]:
    return [(event["kind"], event["text"]) for event in events.as_json()]


def test_who_holds_up_a_session_is_told_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_news, "STILL_S", 0.05)
    events, session = Events(), session_of()
    news = SessionNews(events)
    news.look(None)
    for _ in range(2):
        session.progress(0, 0, (session.done_step + 1, 0), 0.0)
        for _ in range(4):
            news.look(session)
            time.sleep(0.03)
        session.progress(1, 0, (session.done_step + 1, 0), 0.0)
    assert [kind for kind, _ in told(events)] == ["slowest", "slowest"]
    assert told(events)[0][1].startswith("step 0: rank 1 is at step 0 micro-step 0 and was last")
    assert told(events)[1][1].startswith("step 1: rank 1 is at step 1")


def test_the_end_of_data_and_of_the_ranks_are_told_once() -> None:
    events, session = Events(), session_of()
    news = SessionNews(events)
    session.end_step = 5
    for closing in (False, False, True, True):
        for rank in range(2):
            session.progress(rank, 0, (5, 0), 0.0, closing=closing)
        news.look(session)
    assert told(events) == [
        ("data end", "the data end with step 4"),
        ("closed", "every rank has closed its stream at step 5"),
    ]


def test_a_failure_is_told_and_another_session_is_another_story() -> None:
    events = Events()
    news = SessionNews(events)
    for generation in (1, 2):
        session: Any = session_of(generation)
        session.failure = DataServiceError("too many holes")
        news.look(session)
        news.look(session)
    assert told(events) == [("failed", "run run failed: too many holes")] * 2
    assert {event["level"] for event in events.as_json()} == {"error"}
