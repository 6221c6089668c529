"""Tells of a session as it goes: who holds it up, where the data end, that its ranks have left.

Invariants: each is told once; a session is held up when the slowest rank has stood still for
STILL_S while it was heard or should have been.
"""

from __future__ import annotations

import time

from dataservice.actors.events import Events, Level, short
from dataservice.actors.session import Session

STILL_S = 20.0


class SessionNews:
    def __init__(self, events: Events) -> None:
        self._events = events
        self._session = 0
        """Generation."""
        self._step = -1
        self._since = 0.0
        """When the slowest rank came to `_step`."""
        self._told: set[str] = set()

    def look(self, session: Session | None) -> None:
        """Once a second or so."""
        if session is None:
            return
        now = time.monotonic()
        if session.generation != self._session:
            self._session, self._step = session.generation, -1
            self._told.clear()
        if session.failure is not None:
            self._once("failed", f"run {short(session.run_id)} failed: {session.failure}", "error")
            return
        if all(rank.closed for rank in session.ranks):
            self._once("closed", f"every rank has closed its stream at step {session.done_step}")
            return
        if session.end_step >= 0:
            self._once("data end", f"the data end with step {session.end_step - 1}")
        if session.done_step != self._step:
            self._step, self._since = session.done_step, now
            self._told.discard("slowest")
        elif now - self._since > STILL_S:
            self._once("slowest", f"step {session.done_step}: {session.slowest()}", "warning")

    def _once(self, kind: str, text: str, level: Level = "info") -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._events.note(kind, text, level=level)
