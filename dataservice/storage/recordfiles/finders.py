"""What finds the records in the content of a file: the seam between lines and JSON values.

Invariants: the records found do not depend on how the content is cut into chunks; a finder keeps
only numbers, never content; records come in the order of their offsets and do not overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Found:
    """Records [n] that end in a chunk; [starts, stops) are offsets in the content."""

    numbers: Places
    starts: Places
    stops: Places

    def __add__(self, other: Found) -> Found:
        return Found(
            np.concatenate((self.numbers, other.numbers)),
            np.concatenate((self.starts, other.starts)),
            np.concatenate((self.stops, other.stops)),
        )


NONE_FOUND = Found(*(np.empty(0, np.int64) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class Problem:
    """Why the rest of a file, from `offset` on, cannot be used."""

    number: int
    offset: int
    reason: str


class Finder(Protocol):
    @property
    def open_start(self) -> int:
        """Where the record that has not ended yet begins; nothing before it is needed again."""

    @property
    def next_number(self) -> int:
        """Of the record that would come next."""

    def feed(self, chunk: bytes) -> Found:
        """Takes the next bytes of the content."""

    def end(self, damage: str = "") -> tuple[Found, Problem | None]:
        """After the last bytes; `damage` says why there are no more, if that was not their end."""
