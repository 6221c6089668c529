"""What `dataservice doctor` says of one thing.

Invariants: a problem or a warning always comes with what to do about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    level: Level
    words: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if (self.level == "ok") == bool(self.remedy):
            raise ValueError(f"{self.name} is {self.level} and its remedy {self.remedy!r}")


def ok(name: str, words: str) -> Finding:
    return Finding(name, "ok", words)


def warning(name: str, words: str, remedy: str) -> Finding:
    return Finding(name, "warning", words, remedy)


def problem(name: str, words: str, remedy: str) -> Finding:
    return Finding(name, "problem", words, remedy)
