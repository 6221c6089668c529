"""The lines of a JSONL file with their byte offsets, from chunks of any size, in bounded memory.

Invariants: only LF ends a line; `data` is exactly file[offset : offset + length], without LF, CR
before it, and a byte order mark at the start of the file; blank lines are no lines but count in
the numbers; a line above the limit is never held (its `data` is None).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

MAX_LINE_BYTES = 64 * 1024 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Line(NamedTuple):
    number: int
    """From 1, as editors count."""
    offset: int
    length: int
    data: bytes | None
    """None: longer than the limit."""


def scan_lines(chunks: Iterable[bytes], *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """Lines of the concatenated chunks; holds at most one chunk and one line."""
    number = 0
    offset = 0  # of the line that is being read
    held: list[bytes] = []
    held_bytes = 0  # of the line that is being read, also those given up
    for chunk in chunks:
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            number += 1
            size = held_bytes + end - start
            if size > max_line_bytes:
                yield Line(number, offset, size, None)
            elif held:
                held.append(chunk[start:end])
                yield from _line(number, offset, b"".join(held))
            else:
                yield from _line(number, offset, chunk[start:end])
            offset += size + 1
            start = end + 1
            held.clear()
            held_bytes = 0
        held_bytes += len(chunk) - start
        if held_bytes > max_line_bytes:
            held.clear()
        elif start < len(chunk):
            held.append(chunk[start:])
    if held_bytes > max_line_bytes:
        yield Line(number + 1, offset, held_bytes, None)
    elif held:
        yield from _line(number + 1, offset, b"".join(held))


def _line(number: int, offset: int, data: bytes) -> Iterator[Line]:
    if offset == 0 and data.startswith(BYTE_ORDER_MARK):
        offset = len(BYTE_ORDER_MARK)
        data = data[offset:]
    if data.endswith(b"\r"):
        data = data[:-1]
    if data and not data.isspace():
        yield Line(number, offset, len(data), data)
