"""What happened to the service lately, in plain words, for the status page and `dataservice top`.

Invariants: at most MOST are kept, the newest last, each of at most TEXT_CHARS characters; where
many of a kind come at once the last one counts the rest, so that a storm drives out nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

Level = Literal["info", "warning", "error"]

MOST = 200
TEXT_CHARS = 300
MANY = 4
"""So many of a kind in a row, none older than MANY_S: the next is counted, not added."""
MANY_S = 5.0


@dataclass(slots=True)
class Event:
    at_s: float
    """Unix time."""
    kind: str
    text: str
    level: Level
    count: int = 1
    """Of its kind that it stands for, with itself."""


class Events:
    """In the coordinator's event loop."""

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=MOST)

    def note(self, kind: str, text: str, *, level: Level = "info") -> None:
        text = text if len(text) <= TEXT_CHARS else f"{text[: TEXT_CHARS - 3]}..."
        event = Event(at_s=time.time(), kind=kind, text=text, level=level)
        last = list(islice(reversed(self._kept), MANY))
        if len(last) == MANY and all(
            one.kind == kind and event.at_s - one.at_s < MANY_S for one in last
        ):
            event.count += self._kept.pop().count
        self._kept.append(event)

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {
                "at_s": round(event.at_s, 3),
                "kind": event.kind,
                "text": event.text,
                "level": event.level,
                "count": event.count,
            }
            for event in self._kept
        ]


def short(name: str) -> str:
    """Of a node, of which Ray's have 56 characters, or of a run."""
    return name[:12]


def named(worker_id: str) -> str:
    """Ids that Ray's workers are given say already what they are."""
    return worker_id if worker_id.startswith("worker") else f"worker {worker_id}"
