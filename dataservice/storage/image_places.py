"""Where the bytes of an indexed image are, in the terms of a pack spec.

Invariants: the methods are those of `packspec.ImageSpec`; a CRC that nobody knows is -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dataservice.storage.members import IN_PARQUET, IN_RECORD
from dataservice.storage.membertable import AS_IT_IS
from dataservice.storage.tables import Column


class ImagePlace(NamedTuple):
    """Fields of `ImageSpec`."""

    member: str
    offset: int
    stored_bytes: int
    size_bytes: int
    method: int
    crc32: int


def member_place(members: Mapping[str, Column], name: str, member: int) -> ImagePlace:
    """Of row `member` of an archive's or folder's table."""
    method = members["method"].item(member)
    return ImagePlace(
        member=name,
        offset=members["offset"].item(member),
        stored_bytes=members["stored_bytes"].item(member),
        size_bytes=members["size_bytes"].item(member),
        method=method,
        crc32=-1 if method == AS_IT_IS else members["crc32"].item(member),
    )


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
