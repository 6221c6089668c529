"""Where the entries of a central directory stand, and what their fixed fields are.

Invariants: an entry is 46 bytes, a name, extra fields and a comment, right behind each other
(PKWARE APPNOTE 4.3.12).
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.errors import ArchiveError

ENTRY_BYTES = 46
ENTRY_SIGNATURE = b"PK\x01\x02"
ENCRYPTED_FLAGS = 0x2041
"""Encrypted, strongly encrypted, headers masked."""

ENTRY = np.dtype(
    [
        ("signature", "<u4"), ("made_by", "<u2"), ("needs", "<u2"), ("flags", "<u2"),
        ("method", "<u2"), ("time", "<u4"), ("crc32", "<u4"), ("stored", "<u4"), ("size", "<u4"),
        ("name", "<u2"), ("extra", "<u2"), ("comment", "<u2"), ("disk", "<u2"),
        ("internal", "<u2"), ("external", "<u4"), ("offset", "<u4"),
    ]
)  # fmt: skip
_SIGNATURE = int.from_bytes(ENTRY_SIGNATURE, "little")
_LENGTHS = struct.Struct("<3H")


def entry_places(data: bytes) -> tuple[NDArray[np.int64], int]:
    """Where the whole entries in `data` start, the first at 0, and where the last of them ends.

    Raises ArchiveError where there is no entry behind an entry.
    """
    octets = np.frombuffer(data, np.uint8)
    # Every signature, also those that stand in a name; mostly there is none such.
    at = np.flatnonzero(octets[: max(len(data) - ENTRY_BYTES + 1, 0)] == ENTRY_SIGNATURE[0])
    if len(at):
        every = unaligned(data, ENTRY)
        at = at[every["signature"][at] == _SIGNATURE]
        found = every[at]
        stop = at + ENTRY_BYTES + found["name"] + found["extra"] + found["comment"]
        if len(at) and at[0] == 0 and np.array_equal(stop[:-1], at[1:]):
            whole = len(at) if stop[-1] <= len(data) else len(at) - 1
            end = int(stop[whole - 1]) if whole else 0
            if not _is_cut(data, end):
                raise ArchiveError("damaged: no entry behind an entry of the central directory")
            return at[:whole], end
    return _walk(data)


def _is_cut(data: bytes, end: int) -> bool:
    """Whether what stands at `end` may be the beginning of an entry."""
    rest = data[end : end + len(ENTRY_SIGNATURE)]
    return ENTRY_SIGNATURE.startswith(rest)


def _walk(data: bytes) -> tuple[NDArray[np.int64], int]:
    at, places = 0, []
    while at + ENTRY_BYTES <= len(data):
        if not data.startswith(ENTRY_SIGNATURE, at):
            break
        stop = at + ENTRY_BYTES + sum(_LENGTHS.unpack_from(data, at + 28))
        if stop > len(data):
            break
        places.append(at)
        at = stop
    if not _is_cut(data, at):
        raise ArchiveError("damaged: no entry behind an entry of the central directory")
    return np.array(places, np.int64), at


def unaligned(data: bytes, kind: Any) -> NDArray[Any]:
    """Values of a numpy type that start at every byte of `data`, without a copy."""
    size = np.dtype(kind).itemsize
    return np.ndarray((max(len(data) - size + 1, 0),), kind, data, strides=(1,))


def extra_field(data: bytes, at: int, size: int, wanted: int) -> tuple[int, int] | None:
    """Where the data of the first extra field of that kind begins and ends, among `size` bytes of
    such fields at `at`."""
    end = at + size
    while at + 4 <= end:
        kind = data[at] | data[at + 1] << 8
        length = data[at + 2] | data[at + 3] << 8
        at += 4
        if kind == wanted:
            return (at, at + length) if at + length <= end else None
        at += length
    return None
