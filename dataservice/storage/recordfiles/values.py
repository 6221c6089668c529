"""Finds the records of a JSON text: the items of an array, or one value after the other.

Invariants: a record is a bracketed value (object or array) of the outermost level, as its bytes
stand in the text; brackets in strings do not count; what stands between two records besides white
space and commas is one record more, for the parser to reject. Nothing is parsed: broken JSON inside
a record costs that record alone as long as its quotes and brackets agree. Vectorised, no recursion.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataservice.storage.recordfiles.finders import NONE_FOUND, Found, Places, Problem

_QUOTE, _BACKSLASH, _CLOSE_ARRAY = b'"\\]'
_SPECIAL = bytes(byte in b'"\\[]{}' for byte in range(256))
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1
_BETWEEN = b" \t\r\n,"
NOT_CLOSED = "the array is not closed: the file was cut off"
BEHIND = "text behind the end of the array"


class ValueFinder:
    """With `in_array` the content begins behind the array's opening bracket."""

    def __init__(self, position: int = 0, *, in_array: bool = False) -> None:
        self._position = position
        self._in_array = in_array
        self._closed = False  # the array
        self._strings = _Strings()
        self._depth = 0
        self._number = 0
        self._start = -1  # of the open value
        self._other = _Text()  # since the last value

    @property
    def open_start(self) -> int:
        if self._start >= 0:
            return self._start
        return self._position if self._closed or self._other.start < 0 else self._other.start

    @property
    def next_number(self) -> int:
        return self._number + 1

    def feed(self, chunk: bytes) -> Found:
        base, length = self._position, len(chunk)
        self._position += length
        if self._closed:
            self._other.add(chunk, base)
            return NONE_FOUND
        places, kinds = self._strings.brackets(chunk)
        steps = _STEP[kinds]
        plain = np.cumsum(steps, dtype=np.int64) + self._depth
        floor = np.minimum.accumulate(np.minimum(plain, 0))
        depths = plain - floor
        stray = np.diff(floor, prepend=0) < 0
        if self._in_array and len(ends := np.flatnonzero(stray & (kinds == _CLOSE_ARRAY))):
            end = int(ends[0])
            self._closed = True
            length = int(places[end])
            places, steps, depths, stray = places[:end], steps[:end], depths[:end], stray[:end]
        if len(depths):
            self._depth = int(depths[-1])
        starts = places[(steps > 0) & (depths == 1)].tolist()
        stops = (places[(steps < 0) & (depths == 0) & ~stray] + 1).tolist()
        spans = self._spans(chunk, base, starts, stops, length)
        if self._closed:
            spans += self._other.take(base)
            self._other.add(chunk[length + 1 :], base + length + 1)
        return self._found(spans, base)

    def end(self, damage: str = "") -> tuple[Found, Problem | None]:
        if damage:
            return NONE_FOUND, Problem(self._number + 1, self.open_start, damage)
        if self._closed:
            behind = self._other.start
            found = NONE_FOUND
            return found, Problem(self._number + 1, behind, BEHIND) if behind >= 0 else None
        if self._start >= 0:
            return self._found([(self._start, self._position)], 0), None
        found = self._found(self._other.take(0), 0)
        if self._in_array:
            return found, Problem(self._number + 1, self._position, NOT_CLOSED)
        return found, None

    def _spans(
        self, chunk: bytes, base: int, starts: list[int], stops: list[int], length: int
    ) -> list[tuple[int, int]]:
        """The records that end here, counted from the chunk; notes what stays open."""
        spans: list[tuple[int, int]] = []
        if self._start >= 0:
            starts.insert(0, self._start - base)
        else:
            self._other.add(chunk[: starts[0] if starts else length], base)
            if starts:
                spans += self._other.take(base)
        if not starts:
            return spans
        gaps = list(zip(stops, starts[1:], strict=False))
        if any(text.strip(_BETWEEN) for text in {chunk[a:b] for a, b in gaps}):
            for start, stop, after in zip(starts, stops, [*starts[1:], stops[-1]], strict=False):
                spans.append((start, stop))
                self._other.add(chunk[stop:after], base + stop)
                spans += self._other.take(base)
        else:
            spans += zip(starts, stops, strict=False)
        self._start = base + starts[-1] if len(starts) > len(stops) else -1
        if self._start < 0:
            self._other.add(chunk[stops[-1] : length], base + stops[-1])
        return spans

    def _found(self, spans: list[tuple[int, int]], base: int) -> Found:
        if not spans:
            return NONE_FOUND
        places = np.array(spans, np.int64) + base
        numbers = np.arange(self._number + 1, self._number + 1 + len(spans))
        self._number += len(spans)
        return Found(numbers, places[:, 0], places[:, 1])


class _Text:
    """Where text that is no value begins and ends, white space and commas around it left out."""

    def __init__(self) -> None:
        self.start = -1
        self._stop = -1

    def add(self, part: bytes, position: int) -> None:
        text = part.lstrip(_BETWEEN)
        if text:
            if self.start < 0:
                self.start = position + len(part) - len(text)
            self._stop = position + len(part.rstrip(_BETWEEN))

    def take(self, base: int) -> list[tuple[int, int]]:
        """The span, counted from `base`, if there is one; starts anew."""
        if self.start < 0:
            return []
        span = self.start - base, self._stop - base
        self.start = -1
        return [span]


class _Strings:
    """Which brackets stand outside of strings."""

    def __init__(self) -> None:
        self._inside = False
        self._escaped = False  # the next byte

    def brackets(self, chunk: bytes) -> tuple[Places, NDArray[np.uint8]]:
        """Positions [n] in the chunk, and the brackets there."""
        places = np.flatnonzero(np.frombuffer(chunk.translate(_SPECIAL), np.bool_))
        if self._escaped and chunk:
            places = places[np.searchsorted(places, 1) :]
            self._escaped = False
        kinds = np.frombuffer(chunk, np.uint8)[places]
        backslash = kinds == _BACKSLASH
        if backslash.any():
            keep = ~(backslash | self._find_escaped(places, backslash, len(chunk)))
            places, kinds = places[keep], kinds[keep]
        quotes = kinds == _QUOTE
        inside = np.logical_xor.accumulate(quotes) ^ self._inside
        if len(inside):
            self._inside = bool(inside[-1])
        outside = ~(inside | quotes)
        return places[outside], kinds[outside]

    def _find_escaped(
        self, places: Places, backslash: NDArray[np.bool_], length: int
    ) -> NDArray[np.bool_]:
        """Which of the bytes stand behind a backslash that is not escaped itself."""
        index = np.arange(len(places))
        behind = np.zeros(len(places), np.bool_)
        behind[1:] = backslash[:-1] & (np.diff(places) == 1)
        run_start = np.maximum.accumulate(np.where(backslash & behind, 0, index))
        escaping = backslash & ((index - run_start) % 2 == 0)
        self._escaped = bool(escaping[-1]) and int(places[-1]) == length - 1
        escaped = np.zeros(len(places), np.bool_)
        escaped[1:] = behind[1:] & escaping[:-1]
        return escaped
