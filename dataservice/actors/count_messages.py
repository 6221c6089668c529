"""Blocks to be counted as they travel, and as storage knows them."""

from __future__ import annotations

import numpy as np

from dataservice.actors.shard_messages import ref_of, shard_of
from dataservice.errors import WireError
from dataservice.storage.backends import ObjectStat
from dataservice.storage.lazy.counting import BlockPlace
from dataservice.storage.listing import FoundFile
from dataservice.wire.counting import CountBlock, Found


def job_of(place: BlockPlace) -> CountBlock:
    return CountBlock(
        file=place.file,
        block=place.block,
        shard=shard_of(place.shard),
        offsets=place.offset.astype("<u8").tobytes(),
        lengths=place.length.astype("<u4").tobytes(),
        beside=tuple(map(found_of, place.beside)),
        unread=place.unread,
    )


def place_of(job: CountBlock) -> BlockPlace:
    """Raises WireError."""
    try:
        offset = np.frombuffer(job.offsets, dtype="<u8")
        length = np.frombuffer(job.lengths, dtype="<u4")
    except ValueError as error:
        raise WireError(f"CountBlock: offsets or lengths are no whole numbers: {error}") from None
    if len(offset) != len(length):
        raise WireError(f"CountBlock: {len(offset)} offsets and {len(length)} lengths")
    return BlockPlace(
        file=job.file,
        block=job.block,
        shard=ref_of(job.shard),
        offset=offset,
        length=length,
        beside=tuple(map(file_of, job.beside)),
        unread=job.unread,
    )


def found_of(file: FoundFile) -> Found:
    stat = file.stat
    return Found(
        url=file.url, size_bytes=stat.size_bytes, mtime_ns=stat.mtime_ns, folder=stat.is_folder
    )


def file_of(found: Found) -> FoundFile:
    return FoundFile(
        url=found.url,
        stat=ObjectStat(
            size_bytes=found.size_bytes, mtime_ns=found.mtime_ns, is_folder=found.folder
        ),
    )
