"""The names of a central directory's entries, as Arrow strings.

Invariants: UTF-8 where flagged or valid, else code page 437; an Info-ZIP Unicode Path that belongs
to the name goes before it. A name that is not what its flag says, or leaves its root, is refused;
of one that is too long the first 100 bytes are kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dataservice.storage import membertable as mt
from dataservice.storage.zips.layout import ENTRY_BYTES, extra_field, unaligned
from dataservice.storage.zips.methods import crc32

_UTF8_FLAG = 0x0800
_UNICODE_PATH = 0x7075
_UNICODE_PATH_BYTES = 5
"""Version and CRC, before the name."""
_SHORTENED_BYTES = 100


def read_names(
    data: bytes, at: NDArray[np.int64], entry: NDArray[Any]
) -> tuple[Any, NDArray[np.uint8]]:
    """Arrow names, and the problems that they have."""
    problem = np.zeros(len(at), np.uint8)
    length = entry["name"].astype(np.int64)
    mt.refuse(problem, length > mt.MAX_NAME_BYTES, mt.LONG_NAME)
    length[problem != mt.OK] = _SHORTENED_BYTES
    raw = pieces(data, at + ENTRY_BYTES, length)
    unicode_paths = _unicode_paths(data, at, entry)
    if raw.isascii() and not unicode_paths:
        names = mt.large_strings(raw, length)
    else:
        starts, is_utf8 = np.cumsum(length) - length, entry["flags"] & _UTF8_FLAG != 0
        decoded = [
            _decode(raw[start : start + size], flagged)
            for start, size, flagged in zip(
                starts.tolist(), length.tolist(), is_utf8.tolist(), strict=True
            )
        ]
        for row, name in unicode_paths.items():
            decoded[row] = name
        names = pa.array([name or "" for name in decoded], pa.large_string())
        mt.refuse(problem, np.array([n is None for n in decoded], np.bool_), mt.UNSAFE_NAME)
    mt.refuse(problem, unsafe_names(names), mt.UNSAFE_NAME)
    return names, problem


def pieces(data: bytes, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> bytes:
    """The bytes of all ranges behind each other; ranges do not overlap and are in order."""
    inside = np.zeros(len(data) + 1, np.int8)
    used = lengths > 0
    inside[starts[used]] += 1
    inside[(starts + lengths)[used]] -= 1
    mask = np.cumsum(inside, dtype=np.int8)[:-1].view(np.bool_)
    return np.frombuffer(data, np.uint8)[mask].tobytes()


def _decode(raw: bytes, is_utf8: bool) -> str | None:
    """None for a name that is not what its flag says."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None if is_utf8 else raw.decode("cp437")


def _unicode_paths(data: bytes, at: NDArray[np.int64], entry: NDArray[Any]) -> dict[int, str]:
    """By row, the names that stand in an extra field (Info-ZIP's Unicode Path)."""
    found: dict[int, str] = {}
    extra_at = at + ENTRY_BYTES + entry["name"]
    # Rows whose extra fields hold the field's kind, be it by chance: there are few.
    kinds = np.flatnonzero(unaligned(data, "<u2") == _UNICODE_PATH)
    rows = np.searchsorted(extra_at, kinds, "right") - 1
    rows = np.unique(rows[(rows >= 0) & (kinds < (extra_at + entry["extra"])[rows])])
    for row in rows[entry["flags"][rows] & _UTF8_FLAG == 0].tolist():
        start, stop = int(at[row]) + ENTRY_BYTES, int(extra_at[row])
        field = extra_field(data, stop, int(entry["extra"][row]), _UNICODE_PATH)
        value = data[slice(*field)] if field else b""
        if (
            len(value) > _UNICODE_PATH_BYTES
            and value[0] == 1
            and int.from_bytes(value[1:5], "little") == crc32(data[start:stop])
        ):
            name = _decode(value[5:], True)
            if name and len(name) <= mt.MAX_NAME_BYTES:
                found[row] = name
    return found


def unsafe_names(names: Any) -> NDArray[np.bool_]:
    """Which of Arrow strings are no safe names, see `membertable.is_safe_name`."""
    suspect = pc.match_substring_regex(names, r"^$|^[/\\]|^.:|\.\.|\x00")
    unsafe: NDArray[np.bool_] = suspect.to_numpy(zero_copy_only=False).copy()
    for row in np.flatnonzero(unsafe).tolist():
        unsafe[row] = not mt.is_safe_name(names[row].as_py())
    return unsafe
