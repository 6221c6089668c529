"""Streams the content of record files that are compressed as a whole: gzip, zstandard, zip.

Invariants: memory is bounded whatever the file says (pieces of at most 1 MiB, a window of at most
128 MiB); what comes out before the damage in a file is the same however its bytes are cut into
chunks; checksums of the container are checked; damage is a RecordError that says after how many
bytes of content it stands, never a short end. What the chunks raise is passed on as it is.

Formats: RFC 1952 (members one after the other, zeros behind the last), RFC 8878 (frames and
skippable frames), PKWARE APPNOTE 4.3.7 (local headers; stored and deflated).
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Iterator

import pyarrow
from isal import igzip_lib

from dataservice.core.packspec import ShardRef
from dataservice.errors import RecordError
from dataservice.storage.backends import without_query
from dataservice.storage.packed.feed import INFLATE_ERROR, PIECE_BYTES, SLICE_BYTES, Feed
from dataservice.storage.packed.zip_stream import LeftOut, unzip

PACKINGS = ("gz", "zst", "zip")
"""Those whose places count in the unpacked content."""
_BLOCK_BYTES = 1024 * 1024
MAX_RATIO = 200
"""Unpacked to stored bytes, of content above RATIO_FROM_BYTES; records reach some 20."""
RATIO_FROM_BYTES = 64 * 1024 * 1024


def packing_of(url: str) -> str:
    """How a record file of that name is packed: "", "gz", "zst", "zip" or "parquet"."""
    suffix = posixpath.splitext(without_query(url))[1][1:].lower()
    return suffix if suffix in (*PACKINGS, "parquet") else ""


def unpacked(packing: str, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The content of a file of that packing, from its bytes in order.

    A packing other than gz, zst and zip gives the chunks as they are. Raises RecordError where the
    file is damaged, cut off, or no such file; LeftOut behind the content of one that holds more.
    """
    if packing not in PACKINGS:
        yield from chunks
        return
    held: list[bytes] = []
    held_bytes = done_bytes = 0
    feed = Feed(chunks)
    try:
        for piece in _UNPACK[packing](feed):
            if done_bytes > max(RATIO_FROM_BYTES, MAX_RATIO * feed.position):
                raise RecordError(f"unpacks to more than {MAX_RATIO} times what is stored: a bomb")
            held.append(piece)
            held_bytes += len(piece)
            if held_bytes >= _BLOCK_BYTES:
                yield b"".join(held)
                done_bytes += held_bytes
                held, held_bytes = [], 0
    except RecordError as error:
        if held:
            yield b"".join(held)
        if isinstance(error, LeftOut):
            raise
        done = done_bytes + held_bytes
        raise RecordError(f"{error.reason} (after {done} bytes of content)") from error
    if held:
        yield b"".join(held)


def content_of(shard: ShardRef, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The `shard.content_bytes` bytes that the places in the shard count in.

    Damage behind them, known to the index, is not met. Raises RecordError when they are fewer.
    """
    missing = shard.content_bytes
    for piece in unpacked(shard.packing, chunks):
        yield piece[:missing]
        missing -= min(len(piece), missing)
        if not missing:
            return
    if missing:
        raise RecordError(
            f"the content ends {missing} bytes early, at {shard.content_bytes - missing}",
            source=shard.source,
            shard=shard.name,
        )


def _gunzip(feed: Feed) -> Iterator[bytes]:
    data = feed.take(SLICE_BYTES)
    if not data:
        raise RecordError("the file is empty, no gzip data")
    while data:
        decoder = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        while not decoder.eof:
            try:
                piece = decoder.decompress(data, PIECE_BYTES)
            except INFLATE_ERROR as error:
                said = str(error).split(" ", 2)[-1]  # behind "Error" and its number
                raise RecordError(f"damaged gzip data: {said}") from error
            if piece:
                yield piece
            data = b""
            if decoder.needs_input and not decoder.eof:
                data = feed.take(SLICE_BYTES)
                if not data:
                    raise RecordError("the gzip data ends too early: the file is cut off")
        feed.give_back(decoder.unused_data)
        while (data := feed.take(SLICE_BYTES)) and not (data := data.lstrip(b"\0")):
            pass


def _unzstd(feed: Feed) -> Iterator[bytes]:
    if not (first := feed.take(1)):
        raise RecordError("the file is empty, no zstandard data")
    feed.give_back(first)
    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(feed, mode="r"), "zstd")
    while True:
        try:
            piece = stream.read(PIECE_BYTES)
        except OSError as error:
            if feed.failed:
                raise
            raise RecordError(f"damaged zstandard data: {error}") from error
        if not piece:
            return
        yield piece


_UNPACK: dict[str, Callable[[Feed], Iterator[bytes]]] = {
    "gz": _gunzip,
    "zst": _unzstd,
    "zip": unzip,
}
