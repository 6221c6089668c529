"""A pack as a worker holds it: a header and the stored bytes of each array, not joined.

Invariants:
- nothing is copied but what zstandard makes smaller: a raw array is held as it was given, and its
  owner writes into it no more;
- equal arrays and meta, given in equal order, give equal bytes (arrays and meta keys stay in the
  order the caller gives; the version of zstandard is part of "equal");
- `frames` is what wire.codec.PackDecoder reads; `write_into` is what wire.segment.read_pack reads:
  the header, then the stored bytes of each array at a multiple of 64 bytes, without checksums of
  their own, for memory that both ends share.

Compression is for another machine, and for arrays of which a sample shrinks enough. Measured at
level -5 (ratio; GB/s to compress, to decompress; link below which it pays): pages of text 6.3, 3.3,
10, 2,100 MB/s; labels 4.5, 1.5, 2.4, 700 MB/s; token ids 1.8, 0.5, 2.2, 170 MB/s; photos 1.0 to
1.4, 0.6 to 3, 2 or more, 100 MB/s. Since a GB through gRPC costs both ends about 0.7 CPU s, what
shrinks to 0.4 costs less compressed than raw, on any link, and the rest is sent raw.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from dataservice.errors import WireError
from dataservice.wire.checksum import crc32
from dataservice.wire.layout import (
    FRAME_BYTES,
    HEADER_PREFIX,
    MAGIC,
    MAX_FRAME_BYTES,
    MAX_PACK_BYTES,
    VERSION,
    ArrayEntry,
    Arrays,
    PackHeader,
    aligned,
    canonical,
    layout_of,
    raw_bytes,
)
from dataservice.wire.schema import encode, encode_plain

FRAME_PREFIX = struct.Struct("<II")  # number from 1, CRC
LEVEL = -5
LEAST_RATIO = 2.5
_MIN_COMPRESSED_BYTES = 16 << 10
_SAMPLES, _SAMPLE_BYTES = 16, 16 << 10


class EncodedPack:
    """Immutable; `size_bytes` is what its frames have together, and within a few bytes a frame what
    it holds in memory."""

    def __init__(
        self,
        arrays: Arrays,
        meta: Mapping[str, Any],
        *,
        frame_bytes: int = FRAME_BYTES,
        compress: bool = False,
    ) -> None:
        """`meta` holds JSON types. With `compress`, arrays that shrink enough are compressed.
        WireError for a dtype, shape, size or meta that the decoder refuses."""
        largest = MAX_FRAME_BYTES - FRAME_PREFIX.size
        if not 1 <= frame_bytes <= largest:
            raise ValueError(f"frame_bytes is {frame_bytes}, must be in 1..{largest}")
        stored = [_stored(name, array, compress) for name, array in arrays.items()]
        entries = tuple(entry for entry, _ in stored)
        layout_of(entries, MAX_PACK_BYTES)
        stored_bytes = sum(entry.stored_bytes for entry in entries)
        num_frames = -(-stored_bytes // frame_bytes)
        meta_bytes = encode_plain(dict(meta), what="pack meta")
        header = encode(PackHeader(arrays=entries, frames=num_frames, meta=meta_bytes))
        self._crc = crc32(header, 0)
        self._header = HEADER_PREFIX.pack(MAGIC, VERSION, len(header), self._crc) + header
        if len(self._header) > MAX_FRAME_BYTES:
            raise WireError(f"pack header: {len(self._header)} bytes, more than {MAX_FRAME_BYTES}")
        self._arrays, self._meta = arrays, meta
        self._frame_bytes = frame_bytes
        self._segments = [data for _, data in stored]
        self.size_bytes = len(self._header) + num_frames * FRAME_PREFIX.size + stored_bytes

    # ---- for another machine ----

    @functools.cached_property
    def shrinks(self) -> bool:
        """Whether `compressed` is smaller; tens of microseconds, once."""
        return any(_worth_it(segment) for segment in self._segments)

    def compressed(self) -> EncodedPack:
        """The same pack, compressed where it shrinks enough."""
        return EncodedPack(self._arrays, self._meta, frame_bytes=self._frame_bytes, compress=True)

    def frames(self) -> Iterator[bytes]:
        """The header and ceil(stored bytes / frame_bytes) payloads, each joined and its CRC taken
        when it is asked for."""
        head: list[bytes | memoryview] = [self._header]
        for number, pieces in enumerate(_cut(self._segments, self._frame_bytes), 1):
            prefix = FRAME_PREFIX.pack(number, payload_crc(number, pieces, self._crc))
            size = len(prefix) + sum(map(len, pieces))
            if head and len(self._header) + size > MAX_FRAME_BYTES:
                yield self._header
                head = []
            yield b"".join([*head, prefix, *pieces])
            head = []
        if head:
            yield self._header

    # ---- for this machine ----

    @property
    def segment_bytes(self) -> int:
        """What `write_into` needs."""
        end = len(self._header)
        for segment in self._segments:
            end = aligned(end) + len(segment)
        return end

    def write_into(self, place: npt.NDArray[np.uint8]) -> None:
        """`place`: uint8, at least `segment_bytes`."""
        end = 0
        parts: list[bytes | memoryview] = [self._header, *self._segments]
        for data in parts:
            start = aligned(end)
            end = start + len(data)
            place[start:end] = np.frombuffer(data, np.uint8)


def _stored(name: str, array: npt.NDArray[Any], compress: bool) -> tuple[ArrayEntry, memoryview]:
    array = canonical(name, array)
    data = raw_bytes(array)
    zstd = compress and _worth_it(data)
    if zstd:
        smaller = zstandard.ZstdCompressor(level=LEVEL).compress(data)
        if len(smaller) < len(data):
            data = memoryview(smaller)
        else:
            zstd = False
    entry = ArrayEntry(
        name=name,
        dtype=array.dtype.str,
        shape=tuple(int(size) for size in array.shape),
        stored_bytes=len(data),
        zstd=zstd,
    )
    return entry, data


def _worth_it(data: memoryview) -> bool:
    """By what spread samples shrink to."""
    if len(data) < _MIN_COMPRESSED_BYTES:
        return False
    step = max(_SAMPLE_BYTES, len(data) // _SAMPLES)
    sample = b"".join(data[at : at + _SAMPLE_BYTES] for at in range(0, len(data), step))
    shrunk = zstandard.ZstdCompressor(level=LEVEL).compress(sample)
    return len(sample) >= LEAST_RATIO * len(shrunk)


def _cut(segments: Sequence[memoryview], frame_bytes: int) -> Iterator[list[memoryview]]:
    """The concatenation of `segments` in runs of `frame_bytes` (the last may be shorter)."""
    run: list[memoryview] = []
    room = frame_bytes
    for segment in segments:
        at = 0
        while at < len(segment):
            piece = segment[at : at + room]
            run.append(piece)
            at += len(piece)
            room -= len(piece)
            if room == 0:
                yield run
                run, room = [], frame_bytes
    if run:
        yield run


def payload_crc(number: int, pieces: Sequence[memoryview], seed: int) -> int:
    """Of the payload of a frame; `seed` is the header's."""
    crc = crc32(number.to_bytes(4, "little"), seed)
    for piece in pieces:
        crc = crc32(piece, crc)
    return crc
