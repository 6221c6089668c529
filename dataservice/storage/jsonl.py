"""A record of a record file: where it stands, and its bytes.

Invariants: `data` is exactly content[offset : offset + length], of the unpacked content; in a
Parquet file the offset is the row and the data its JSON.
"""

from __future__ import annotations

import msgspec

MAX_LINE_BYTES = 64 * 1024 * 1024


class Line(msgspec.Struct, frozen=True, gc=False):
    number: int
    """From 1: of the line, as editors count; in a JSON array or Parquet file of the record."""
    offset: int
    length: int
    data: bytes | None
    """None: it cannot be had, `problem` says why."""
    problem: str = ""
    """For a person. The record is longer than the limit; or, with a length of 0, the rest of the
    file from `offset` on cannot be read."""
