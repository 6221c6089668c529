"""Finds the lines of a content: memory speed, whatever their length.

Invariants: only LF ends a line; a line is without LF, and without a CR before it; blank lines
(white space only) are no records but count in the numbers, which start at 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataservice.storage.recordfiles.finders import NONE_FOUND, Found, Places, Problem

_LF, _CR = 10, 13
_NOT_SPACE = bytes(byte not in b" \t\n\r\x0b\x0c" for byte in range(256))
_IS_SPACE = ~np.frombuffer(_NOT_SPACE, np.bool_)


class LineFinder:
    def __init__(self, position: int = 0) -> None:
        self._position = position
        self._number = 0  # lines ended
        self._start = position  # of the open line
        self._blank = True  # so far
        self._last_is_cr = False

    @property
    def open_start(self) -> int:
        return self._start

    @property
    def next_number(self) -> int:
        return self._number + 1

    def feed(self, chunk: bytes) -> Found:
        if self._blank and chunk.isspace():
            return self._pass_over(chunk)
        data = np.frombuffer(chunk, np.uint8)
        ends = np.flatnonzero(data == _LF)
        if not len(ends):
            self._extend(chunk)
            return NONE_FOUND
        self._extend(chunk[: ends[0]])
        stops = ends - (data[ends - 1] == _CR)
        stops[0] = ends[0] - self._last_is_cr
        starts = np.empty_like(ends)
        starts[1:] = ends[:-1] + 1
        starts[0] = self._start - (self._position - int(ends[0]))
        blank = self._find_blank(chunk, starts, stops)
        blank[0] = self._blank
        good = ~blank
        base = self._position - int(ends[0])
        numbers = np.flatnonzero(good) + (self._number + 1)
        found = Found(numbers, starts[good] + base, stops[good] + base)
        self._number += len(ends)
        self._position = self._start = base + int(ends[-1]) + 1
        self._blank, self._last_is_cr = True, False
        self._extend(chunk[ends[-1] + 1 :])
        return found

    def _pass_over(self, chunk: bytes) -> Found:
        """Of blank lines alone."""
        last = chunk.rfind(b"\n")
        if last >= 0:
            self._number += chunk.count(b"\n")
            self._start = self._position + last + 1
        self._position += len(chunk)
        self._last_is_cr = chunk.endswith(b"\r")
        return NONE_FOUND

    def end(self, damage: str = "") -> tuple[Found, Problem | None]:
        number = self._number + 1
        if damage:
            return NONE_FOUND, Problem(number, self._start, damage)
        stop = self._position - self._last_is_cr
        if self._blank:
            return NONE_FOUND, None
        self._number = number
        return Found(*(np.array([n], np.int64) for n in (number, self._start, stop))), None

    def _extend(self, part: bytes) -> None:
        """The open line goes on with `part`."""
        if part:
            self._blank = self._blank and part.isspace()
            self._last_is_cr = part[-1] == _CR
            self._position += len(part)

    @staticmethod
    def _find_blank(chunk: bytes, starts: Places, stops: Places) -> NDArray[np.bool_]:
        """Which lines that start in the chunk are blank; the first is not looked at."""
        data = np.frombuffer(chunk, np.uint8)
        maybe = _IS_SPACE[data[np.maximum(starts, 0)]]
        maybe[0] = False
        if maybe.any():
            words = np.flatnonzero(np.frombuffer(chunk.translate(_NOT_SPACE), np.bool_))
            words = np.append(words, len(chunk))
            first = words[np.searchsorted(words, starts[maybe])]
            maybe[maybe] = first >= stops[maybe]
        return maybe
