"""Which records of a source are taken: all, the first, the last, or some at random.

Invariants: a pure function of the setting and the numbers of records of the source's files, the
same on every machine; records that cannot be used count as records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from dataservice.core.order import permutation
from dataservice.errors import ConfigError

ALL = "all"
_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Rows of one record file, out of `num_records`."""

    start: int
    stop: int
    drawn: int | None = None
    """Only so many of [start, stop), drawn at random."""
    shard: int = 0
    """Number of the file in the source: another file, another draw."""

    @property
    def num_rows(self) -> int:
        return self.stop - self.start if self.drawn is None else self.drawn

    def rows(self) -> NDArray[np.int64]:
        """int64, in their order."""
        if self.drawn is None:
            return np.arange(self.start, self.stop, dtype=np.int64)
        mixed = permutation(self.stop - self.start, _SEED, "take", self.shard)
        return np.sort(mixed[: self.drawn]) + self.start


class Picker:
    """The taken rows in the order in which a file is read."""

    def __init__(self, taken: Taken) -> None:
        self._taken = taken
        self._rows = None if taken.drawn is None else taken.rows()

    def between(self, low: int, high: int) -> Sequence[int]:
        """Those in [low, high)."""
        if self._rows is None:
            return range(max(low, self._taken.start), min(high, self._taken.stop))
        first, stop = np.searchsorted(self._rows, (low, high)).tolist()
        found: list[int] = self._rows[first:stop].tolist()
        return found


def taken_rows(take: str, num_records: Sequence[int]) -> list[Taken]:
    """Of each record file of a source; `take` as `SourceFiles.take`. Raises ConfigError."""
    how, _, amount = take.partition(":")
    total = sum(num_records)
    ends = list(accumulate(num_records))
    begins = [end - count for end, count in zip(ends, num_records, strict=True)]
    if take == ALL:
        begin, end = 0, total
    elif how == "first":
        begin, end = 0, _count(take, amount, total)
    elif how == "end":
        begin, end = total - _count(take, amount, total), total
    elif how == "random":
        count = _count(take, amount, total)
        return [
            Taken(
                start=0,
                stop=size,
                drawn=count * last // total - count * first // total if total else 0,
                shard=number,
            )
            for number, (first, last, size) in enumerate(
                zip(begins, ends, num_records, strict=True)
            )
        ]
    else:
        raise ConfigError(f"take: {take!r} is none of all, first:N, end:N and random:N")
    return [
        Taken(start=min(max(begin - first, 0), size), stop=min(max(end - first, 0), size))
        for first, size in zip(begins, num_records, strict=True)
    ]


def _count(take: str, amount: str, total: int) -> int:
    """A share is rounded down, but never to none of some."""
    try:
        if not amount.endswith("%"):
            return min(int(amount), total)
        share = Fraction(amount[:-1]) / 100
    except ValueError:
        raise ConfigError(f"take: {take!r} has no number or share behind the colon") from None
    least = 1 if share > 0 and total else 0
    return min(max(int(total * share), least), total)
