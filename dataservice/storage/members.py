"""Reads the bytes of an image, wherever it stands: a zip, a tar, a file, its record, a Parquet row.

Invariants: what is read is bounded by the plan and by MAX_MEMBER_BYTES before it is read, and
checked against the plan's size, and CRC where there is one; errors name source, shard and member.
"""

from __future__ import annotations

from dataservice.core.packspec import ImageSpec, ShardRef
from dataservice.errors import ArchiveError, ImageError, RecordError
from dataservice.storage import parquet
from dataservice.storage.membertable import (
    AS_IT_IS,
    MAX_MEMBER_BYTES,
    METHOD,
    TOO_LARGE,
    describe_problem,
)
from dataservice.storage.probe import FIRST_READ_BYTES, ImageHeader, probe
from dataservice.storage.reads import ReadAt, ReadShard
from dataservice.storage.recordfiles import read_record
from dataservice.storage.records import inline_image
from dataservice.storage.sources import RecordFormat
from dataservice.storage.zips import STORED, Place, read_place, read_stored
from dataservice.storage.zips.methods import CorruptData, crc32, unpack
from dataservice.storage.zips.reading import HEADER_GUESS

IN_RECORD, IN_PARQUET = -2, -3

_FIRST_STORED_BYTES = FIRST_READ_BYTES - HEADER_GUESS
_LEAST_HEAD_BYTES = 1024


def read_image(
    read: ReadShard, image: ImageSpec, shard: ShardRef, fmt: RecordFormat | None = None
) -> bytes:
    """The bytes of the picture file. `fmt` is that of the image's source, for images in records.

    Pass the same `read` each time: what is kept of Parquet files belongs to it. Raises
    ArchiveError, and what `read` raises.
    """
    try:
        if image.method >= 0:
            place = Place(
                image.method, image.offset, image.stored_bytes, image.size_bytes, image.crc32
            )
            return read_place(
                lambda offset, size: read(shard, offset, size), place, shard.size_bytes
            )
        if image.method == AS_IT_IS:
            if image.stored_bytes > MAX_MEMBER_BYTES:
                raise ArchiveError(describe_problem(TOO_LARGE, AS_IT_IS, image.stored_bytes))
            return read(shard, image.offset, image.stored_bytes)
        if image.method == IN_PARQUET:
            return parquet.read_image(read, image, shard)
        if image.method == IN_RECORD:
            return _read_inline(read, image, shard, fmt or RecordFormat(data_uris=True))
        raise ArchiveError(describe_problem(METHOD, image.method, image.size_bytes))
    except (ArchiveError, ImageError, RecordError) as error:
        raise ArchiveError(
            error.reason, source=shard.source, shard=shard.name, member=image.member
        ) from error


def _read_inline(read: ReadShard, image: ImageSpec, shard: ShardRef, fmt: RecordFormat) -> bytes:
    record = read_record(read, shard, image.offset, image.stored_bytes)
    data = inline_image(record, fmt, int(image.member))
    if image.crc32 >= 0 and crc32(data) != image.crc32:
        raise ArchiveError("CRC mismatch: the bytes are not those that were indexed")
    return data


def probe_place(read: ReadAt, place: Place, archive_bytes: int) -> ImageHeader:
    """Upright size and format of the picture at a place of an archive, or of a plain file.

    Mostly one read of less than 8 KiB. Of a compressed PNG, an orientation behind the pixels does
    not count: all of them would have to be unpacked. Raises ArchiveError, ImageError and what
    `read` raises.
    """
    method, begin, _, size_bytes, _ = place
    if size_bytes > MAX_MEMBER_BYTES:
        raise ArchiveError(describe_problem(TOO_LARGE, method, size_bytes))
    head = None
    if method not in (AS_IT_IS, STORED):
        unpacked = _Unpacked(read, place, archive_bytes)
        return probe(unpacked, size_bytes, head=unpacked.head(), look_behind=False)
    if method == STORED:
        begin, head = read_stored(read, place, archive_bytes, _FIRST_STORED_BYTES)

    def read_part(at: int, size: int) -> bytes:
        return read(begin + at, max(min(size, size_bytes - at), 0))

    return probe(read_part, size_bytes, head=head)


class _Unpacked:
    """Parts of a compressed member; unpacks little more than what is asked for."""

    def __init__(self, read: ReadAt, place: Place, archive_bytes: int) -> None:
        self._read = read
        self._place = place
        self._archive_bytes = archive_bytes
        self._limit = _FIRST_STORED_BYTES
        self._data = b""
        self._ended = False

    def head(self) -> bytes:
        self._unpack(_LEAST_HEAD_BYTES)
        return self._data

    def __call__(self, at: int, size: int) -> bytes:
        self._unpack(at + size)
        return self._data[at : at + size]

    def _unpack(self, stop: int) -> None:
        place = self._place
        stop = min(stop, place.size_bytes)
        while len(self._data) < stop and not self._ended:
            _, stored = read_stored(self._read, place, self._archive_bytes, self._limit)
            most = max(stop, 2 * len(self._data), FIRST_READ_BYTES)
            try:
                self._data = unpack(place.method, stored, most)
            except CorruptData as error:
                raise ArchiveError(str(error)) from None
            self._ended = len(self._data) < most and self._limit >= place.stored_bytes
            if len(self._data) < stop:
                self._limit *= 4
