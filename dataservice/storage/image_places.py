"""Where the bytes of an indexed image are, in the terms of a pack spec.

Invariants: the methods are those of `packspec.ImageSpec`; a CRC that nobody knows is -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.storage.members import IN_PARQUET, IN_RECORD
from dataservice.storage.membertable import AS_IT_IS
from dataservice.storage.tables import Column

Ints = NDArray[np.int64]


class ImagePlace(NamedTuple):
    """Fields of `ImageSpec`."""

    member: str
    offset: int
    stored_bytes: int
    size_bytes: int
    method: int
    crc32: int


def member_columns(members: Mapping[str, Column], rows: Ints) -> tuple[Ints, ...]:
    """Of rows of an archive's or folder's table: an ImagePlace without its name, by field."""
    offset, stored, size, method, crc32 = (
        members[name].take(rows)
        for name in ("offset", "stored_bytes", "size_bytes", "method", "crc32")
    )
    crc32[method == AS_IT_IS] = -1
    return offset, stored, size, method, crc32


def member_place(members: Mapping[str, Column], name: str, member: int) -> ImagePlace:
    """Of row `member`, which has this name."""
    columns = member_columns(members, np.array([member]))
    return ImagePlace(name, *(int(column[0]) for column in columns))


def file_place(name: str, size_bytes: int) -> ImagePlace:
    """Of a file as a whole."""
    return ImagePlace(
        member=name,
        offset=0,
        stored_bytes=size_bytes,
        size_bytes=size_bytes,
        method=AS_IT_IS,
        crc32=-1,
    )


def inside_place(column: str, number: int, offset: int, length: int) -> ImagePlace:
    """Of image `number` of the record at `offset`: in the record itself, or in that row of a
    column of a Parquet file. Its size is not known."""
    return ImagePlace(
        member=f"{column}/{number}" if column else str(number),
        offset=offset,
        stored_bytes=length,
        size_bytes=0,
        method=IN_PARQUET if column else IN_RECORD,
        crc32=-1,
    )
