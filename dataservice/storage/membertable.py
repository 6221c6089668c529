"""The members of an archive as columns, and why a member cannot be read.

Invariants: rows stand in the archive's own order and folders are none of them; `problem` is OK or
says why the member is refused, and no two members that are OK share a name or a byte. A member
costs about 32 bytes and its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

MAX_MEMBERS = 50_000_000
MAX_MEMBER_BYTES = 128 * 1024 * 1024
MAX_NAME_BYTES = 1024
MAX_RATIO = 200
"""Unpacked to stored bytes of a member above RATIO_FROM_BYTES; deflate reaches 1,032."""
RATIO_FROM_BYTES = 1024 * 1024

AS_IT_IS = -1
"""The method of a tar's member or a plain file: its bytes stand at `offset` as they are."""

OK = 0
ENCRYPTED = 1
METHOD = 2
UNSAFE_NAME = 3
TOO_LARGE = 4
SPLIT = 5
DAMAGED = 6
OVERLAP = 7
RATIO = 8
LONG_NAME = 9
NOT_A_FILE = 10
SHADOWED = 11
SIZES = 12
SPARSE = 13
CUT_OFF = 14


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberTable:
    """One row a member; folders are left out."""

    name: Any
    """Arrow large_string; of a name that is refused for its length, the first 100 characters."""
    offset: NDArray[np.uint64]
    """Of the local header in a zip, of the data in a tar."""
    stored_bytes: NDArray[np.uint64]
    size_bytes: NDArray[np.uint64]
    """Unpacked."""
    method: NDArray[np.int16]
    """Zip compression method, AS_IT_IS in a tar."""
    crc32: NDArray[np.uint32]
    """Of the unpacked bytes; 0 in a tar."""
    problem: NDArray[np.uint8]
    """OK or why the member cannot be read, see `describe_problem`."""
    directory_crc32: int
    """Of the central directory (zip) or of all headers (tar) as they are stored: which archive."""

    def __len__(self) -> int:
        return len(self.offset)

    def reason(self, row: int) -> str | None:
        """Why the member is refused, for a person; None when it is not."""
        if self.problem[row] == OK:
            return None
        return describe_problem(
            int(self.problem[row]), int(self.method[row]), int(self.size_bytes[row])
        )


def describe_problem(problem: int, method: int, size_bytes: int) -> str:
    """Why a member cannot be read, for a person."""
    return {
        ENCRYPTED: "the member is encrypted",
        METHOD: f"unsupported compression method {method}",
        UNSAFE_NAME: "unsafe member name: empty, absolute, leaving the archive's root, or no text",
        TOO_LARGE: f"{size_bytes} bytes, over the size limit of a member ({MAX_MEMBER_BYTES})",
        SPLIT: "the member lies on another disk of a split archive",
        DAMAGED: "the member's entry in the central directory is damaged",
        OVERLAP: "the member overlaps another one: they share bytes of the archive",
        RATIO: f"inflates to {size_bytes} bytes, over {MAX_RATIO} times what is stored",
        LONG_NAME: f"the member's name is over {MAX_NAME_BYTES} bytes long",
        NOT_A_FILE: "the member is a link or a device, not a file",
        SHADOWED: "a later member has the same name; the last one counts",
        SIZES: f"size mismatch: what is stored cannot be {size_bytes} bytes packed",
        SPARSE: "the member is a sparse file",
        CUT_OFF: "the archive is truncated within the member",
    }[problem]


def is_safe_name(name: str) -> bool:
    """True for a relative name that stays below its root on every system."""
    if not name or "\0" in name or name[0] in "/\\" or name[1:2] == ":":
        return False
    return ".." not in name.replace("\\", "/").split("/")


def refuse(problem: NDArray[np.uint8], where: NDArray[np.bool_], code: int) -> None:
    """Sets `code` in those of the rows that have no problem yet."""
    problem[where & (problem == OK)] = code


def refuse_shadowed(problem: NDArray[np.uint8], names: Any) -> None:
    """Refuses all but the last of the members of one name."""
    if not len(names):
        return
    codes = pc.dictionary_encode(names)
    if len(codes.dictionary) == len(names):
        return
    number = codes.indices.to_numpy()
    last = np.zeros(len(codes.dictionary), np.int64)
    np.maximum.at(last, number, np.arange(len(number)))
    refuse(problem, last[number] != np.arange(len(number)), SHADOWED)


def refuse_overlaps(
    problem: NDArray[np.uint8],
    start: NDArray[np.uint64],
    stop: NDArray[np.uint64],
    considered: NDArray[np.bool_],
) -> None:
    """Refuses every member that reaches into the next one by place, and that next one too.

    What is left shares no byte, and an entry that claims too much costs one other member at most
    besides itself (or those that start at its very place).
    """
    rows = np.flatnonzero(considered)
    rows = rows[np.lexsort((stop[rows], start[rows]))]
    over = stop[rows[:-1]] > start[rows[1:]]
    sharing = np.zeros(len(problem), np.bool_)
    sharing[rows[:-1][over]] = True
    sharing[rows[1:][over]] = True
    refuse(problem, sharing, OVERLAP)


def large_strings(raw: bytes, lengths: NDArray[Any]) -> Any:
    """Arrow large_string of consecutive UTF-8 pieces of `raw`."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return pa.LargeStringArray.from_buffers(len(lengths), pa.py_buffer(ends), pa.py_buffer(raw))
