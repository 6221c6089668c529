"""Chooses how the records of a file are found, by its name and first bytes.

Invariants: the choice depends on the content's first MiB alone, however they arrive. A `.json` is
read line by line if of its first 16 lines the first that is not blank and another one are whole
objects or arrays and none begins as the inside of one does (then a broken line costs that line
alone); otherwise as one array or as values one after the other. Any other name is a file of lines.
A byte order mark at the start is passed over.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dataservice.storage.backends import without_query
from dataservice.storage.packed.unpacking import packing_of
from dataservice.storage.recordfiles.finders import (
    BYTE_ORDER_MARK,
    NONE_FOUND,
    Finder,
    Found,
    Problem,
)
from dataservice.storage.recordfiles.lines import LineFinder
from dataservice.storage.recordfiles.values import ValueFinder

HEAD_BYTES = 1024 * 1024
_PART_BYTES = 256 * 1024
_SPACE = b" \t\r\n"
_LOOKED_AT = 16
_INSIDE = b'",]}'


def finder_for(url: str) -> Finder:
    path = without_query(url)
    if packing_of(path):
        path = path.rpartition(".")[0]
    if path.lower().endswith(".json"):
        return _HeadFinder(HEAD_BYTES, _json_finder)
    return _HeadFinder(len(BYTE_ORDER_MARK), _line_finder)


class _HeadFinder:
    """Gathers the head, has the finder for it chosen, and stands for that from then on."""

    def __init__(self, head_bytes: int, choose: Callable[[bytes, int], tuple[Finder, int]]) -> None:
        self._head_bytes = head_bytes
        self._choose = choose
        self._finder: Finder | None = None
        self._head: list[bytes] = []

    @property
    def open_start(self) -> int:
        return self._finder.open_start if self._finder else 0

    @property
    def next_number(self) -> int:
        return self._finder.next_number if self._finder else 1

    def feed(self, chunk: bytes) -> Found:
        if self._finder:
            return self._finder.feed(chunk)
        self._head.append(chunk)
        self._head_bytes -= len(chunk)
        if self._head_bytes > 0:
            return NONE_FOUND
        return self._start()[1]

    def end(self, damage: str = "") -> tuple[Found, Problem | None]:
        if self._finder:
            return self._finder.end(damage)
        finder, first = self._start()
        rest, problem = finder.end(damage)
        return first + rest, problem

    def _start(self) -> tuple[Finder, Found]:
        head = b"".join(self._head)
        self._head.clear()
        mark = len(BYTE_ORDER_MARK) if head.startswith(BYTE_ORDER_MARK) else 0
        self._finder, start = self._choose(head[:HEAD_BYTES], mark)
        found = NONE_FOUND
        for at in range(start, len(head), _PART_BYTES):
            found += self._finder.feed(head[at : at + _PART_BYTES])
        return self._finder, found


def _line_finder(_head: bytes, start: int) -> tuple[Finder, int]:
    return LineFinder(start), start


def _json_finder(head: bytes, start: int) -> tuple[Finder, int]:
    """The finder, and where in the head it begins."""
    if _are_lines(head[start:]):
        return LineFinder(start), start
    text = head[start:].lstrip(_SPACE)
    if text.startswith(b"["):
        start = len(head) - len(text) + 1
        return ValueFinder(start, in_array=True), start
    return ValueFinder(start), start


def _are_lines(text: bytes) -> bool:
    """Whether the first line and another are whole values and none looks like the inside of one."""
    lines = [line.strip(_SPACE) for line in text.split(b"\n", _LOOKED_AT)[:_LOOKED_AT]]
    first, *others = [line for line in lines if line] or [b""]
    if any(line[0] in _INSIDE for line in others):
        return False
    return _is_value(first) and any(_is_value(line) for line in others)


def _is_value(line: bytes) -> bool:
    found = ValueFinder().feed(line)
    return np.array_equal((found.starts, found.stops), ([0], [len(line)]))
