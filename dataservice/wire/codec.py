"""A pack's arrays as a list of frames, and back into one buffer.

Layout: the pack begins with magic, version, header length, CRC-32 and the msgpack header
(PackHeader); the payloads after it carry, each behind its number and CRC-32, the stored bytes of
all arrays one after the other, cut every `frame_bytes`. Payload 1 is in one frame with the header
where both fit, so that most packs are a single frame; every other payload is a frame.

Invariants:
- equal arrays and meta, given in equal order, give equal bytes (arrays and meta keys stay in the
  order the caller gives; the version of zstandard is part of "equal");
- data is little-endian and C-ordered; dtypes are the fixed-size integers and floats of
  ALLOWED_DTYPES, nothing that could be a pointer;
- uint8 arrays (pixels) travel raw; others as one zstandard frame (level 1) where that is smaller;
- a frame's CRC starts from the header's and covers its number: a flipped byte, a frame of another
  pack, a missing, repeated or exchanged frame is a WireError, never a wrong array;
- the decoder checks every size before it allocates: one buffer for the pack, at most `max_bytes`,
  and one for each compressed array while it arrives. Frames land in it; arrays are views of it.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import zstandard

from dataservice.errors import WireError
from dataservice.wire.schema import Buffer, decode, decode_plain, encode, encode_plain

__all__ = [
    "ALLOWED_DTYPES",
    "FRAME_BYTES",
    "MAX_FRAME_BYTES",
    "MAX_PACK_BYTES",
    "ArrayEntry",
    "PackDecoder",
    "PackHeader",
    "encode_pack",
    "pack_digest",
]

MAX_FRAME_BYTES = 4 << 20
"""Of a whole frame; the data channel's message limit."""
FRAME_BYTES = MAX_FRAME_BYTES - (64 << 10)
"""Stored bytes in a payload: as many as leave room for a header, for every frame has its price at
both ends."""
MAX_PACK_BYTES = 1 << 30
ALLOWED_DTYPES = frozenset(
    ("|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")
)

_MAGIC = b"VDPK"
_VERSION = 2
_HEADER_PREFIX = struct.Struct("<4sIII")  # magic, version, header bytes, header CRC
_FRAME_PREFIX = struct.Struct("<II")  # number from 1, CRC
_ALIGN = 64
_MAX_ARRAYS = 64
_MAX_DIMENSIONS = 8
_MAX_NAME_LENGTH = 128
_MIN_COMPRESSED_BYTES = 256
_MAX_WINDOW_BYTES = 8 << 20

Arrays = Mapping[str, npt.NDArray[Any]]
Crc32 = Callable[[Buffer, int], int]
"""(data, CRC of what came before it) -> CRC of both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayEntry:
    name: str
    dtype: str
    """numpy's `dtype.str`, one of ALLOWED_DTYPES."""
    shape: tuple[int, ...]
    stored_bytes: int
    zstd: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PackHeader:
    arrays: tuple[ArrayEntry, ...]
    frames: int
    """Payloads that follow."""
    meta: bytes
    """msgpack of JSON types."""


# ---- encode -------------------------------------------------------------------------------------


def encode_pack(
    arrays: Arrays,
    meta: Mapping[str, Any],
    *,
    frame_bytes: int = FRAME_BYTES,
    compress: bool = True,
    crc32: Crc32 = zlib.crc32,
) -> list[bytes]:
    """The frames of a pack: its header and ceil(stored bytes / frame_bytes) payloads.

    `meta` holds JSON types; `crc32` is zlib's, or one that gives the same faster. WireError for a
    dtype, shape, size or meta that the decoder refuses.
    """
    largest = MAX_FRAME_BYTES - _FRAME_PREFIX.size
    if not 1 <= frame_bytes <= largest:
        raise ValueError(f"frame_bytes is {frame_bytes}, must be in 1..{largest}")
    compressor = zstandard.ZstdCompressor(level=1) if compress else None
    stored = [_stored(name, array, compressor) for name, array in arrays.items()]
    entries = tuple(entry for entry, _ in stored)
    _layout(entries, MAX_PACK_BYTES)
    num_frames = -(-sum(entry.stored_bytes for entry in entries) // frame_bytes)
    meta_bytes = encode_plain(dict(meta), what="pack meta")
    header = encode(PackHeader(arrays=entries, frames=num_frames, meta=meta_bytes))
    seed = crc32(header, 0)
    first = _HEADER_PREFIX.pack(_MAGIC, _VERSION, len(header), seed) + header
    if len(first) > MAX_FRAME_BYTES:
        raise WireError(f"pack header: {len(first)} bytes, more than {MAX_FRAME_BYTES}")
    cuts = _cut([data for _, data in stored], frame_bytes)
    payloads = [_payload(number, cut, seed, crc32) for number, cut in enumerate(cuts, 1)]
    parts: list[list[bytes | memoryview]] = [[first], *payloads]
    if payloads and len(first) + sum(map(len, payloads[0])) <= MAX_FRAME_BYTES:
        parts[:2] = [[first, *payloads[0]]]
    return [b"".join(part) for part in parts]


def _stored(
    name: str, array: npt.NDArray[Any], compressor: zstandard.ZstdCompressor | None
) -> tuple[ArrayEntry, memoryview]:
    array = _canonical(name, array)
    data = _raw_bytes(array)
    zstd = False
    if compressor is not None and array.dtype != np.uint8 and len(data) >= _MIN_COMPRESSED_BYTES:
        smaller = compressor.compress(data)
        if len(smaller) < len(data):
            data, zstd = memoryview(smaller), True
    entry = ArrayEntry(
        name=name,
        dtype=array.dtype.str,
        shape=tuple(int(size) for size in array.shape),
        stored_bytes=len(data),
        zstd=zstd,
    )
    return entry, data


def _canonical(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`array` little-endian, its dtype checked."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if little.dtype.str not in ALLOWED_DTYPES:
        raise WireError(f"array {name!r}: dtype {array.dtype} is not allowed on the wire")
    return little


def _raw_bytes(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data.toreadonly()


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


def _payload(
    number: int, pieces: Sequence[memoryview], seed: int, crc32: Crc32
) -> list[bytes | memoryview]:
    return [_FRAME_PREFIX.pack(number, _payload_crc(number, pieces, seed, crc32)), *pieces]


def _payload_crc(
    number: int, pieces: Sequence[memoryview], seed: int, crc32: Crc32 = zlib.crc32
) -> int:
    crc = crc32(number.to_bytes(4, "little"), seed)
    for piece in pieces:
        crc = crc32(piece, crc)
    return crc


# ---- layout -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    offsets: tuple[int, ...]
    """Of each array in the buffer, multiples of 64."""
    sizes: tuple[int, ...]
    """Bytes of each array."""
    total: int


def _layout(entries: Sequence[ArrayEntry], max_bytes: int) -> _Layout:
    """Where each array lies in the decoder's buffer; WireError unless every entry is sane."""
    if len(entries) > _MAX_ARRAYS:
        raise WireError(f"pack header: {len(entries)} arrays, more than {_MAX_ARRAYS}")
    if len({entry.name for entry in entries}) != len(entries):
        raise WireError("pack header: two arrays of one name")
    offsets, sizes, end = [], [], 0
    for entry in entries:
        size = _checked_size(entry, max_bytes)
        start = -(-end // _ALIGN) * _ALIGN
        end = start + size
        if end > max_bytes:
            raise WireError(f"pack header: arrays of more than the limit of {max_bytes} bytes")
        offsets.append(start)
        sizes.append(size)
    return _Layout(offsets=tuple(offsets), sizes=tuple(sizes), total=end)


def _checked_size(entry: ArrayEntry, max_bytes: int) -> int:
    """Bytes of the decoded array."""
    what = f"pack header: array {entry.name[:_MAX_NAME_LENGTH]!r}"
    if not 1 <= len(entry.name) <= _MAX_NAME_LENGTH:
        raise WireError(f"{what}: a name of {len(entry.name)} characters")
    if entry.dtype not in ALLOWED_DTYPES:
        raise WireError(f"{what}: dtype {entry.dtype!r} is not allowed")
    if len(entry.shape) > _MAX_DIMENSIONS:
        raise WireError(f"{what}: {len(entry.shape)} dimensions, more than {_MAX_DIMENSIONS}")
    itemsize = np.dtype(entry.dtype).itemsize
    extent = math.prod(max(size, 1) for size in entry.shape) * itemsize
    if min(entry.shape, default=0) < 0 or extent > max_bytes:
        raise WireError(f"{what}: shape {entry.shape} is negative or over {max_bytes} bytes")
    size = math.prod(entry.shape) * itemsize
    if entry.zstd and not 0 < entry.stored_bytes < size:
        raise WireError(f"{what}: {entry.stored_bytes} compressed bytes for {size}")
    if not entry.zstd and entry.stored_bytes != size:
        raise WireError(f"{what}: {entry.stored_bytes} bytes for a shape of {size}")
    return size


# ---- decode -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """Where the next stored bytes go: the array's place, or a buffer to decompress from."""

    view: memoryview
    inflate_into: memoryview | None
    name: str


class PackDecoder:
    """Takes the frames of one pack in order. After a WireError it takes no more."""

    def __init__(self, *, max_bytes: int = MAX_PACK_BYTES) -> None:
        self._max_bytes = max_bytes
        self._failed = False
        self._header: PackHeader | None = None
        self._meta: dict[str, Any] = {}
        self._layout = _Layout(offsets=(), sizes=(), total=0)
        self._buffer = bytearray()
        self._targets: Iterator[_Target] = iter(())
        self._target: _Target | None = None
        self._filled = 0
        self._seed = 0
        self._next_frame = 0

    @property
    def done(self) -> bool:
        return (
            not self._failed and self._header is not None and self._next_frame > self._header.frames
        )

    def feed(self, frame: Buffer) -> bool:
        """Takes the next frame; True when it was the last. WireError for anything but that."""
        if self._failed:
            raise WireError("pack: a frame after a broken one")
        try:
            if self._header is None:
                self._take_header(memoryview(frame))
            else:
                self._take_payload(self._header, memoryview(frame))
        except WireError:
            self._failed = True
            raise
        return self.done

    def result(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """(arrays, meta): the arrays are writable views of one buffer, in the sender's order."""
        if not self.done or self._header is None:
            raise WireError("pack: the stream ended before the last frame")
        arrays: dict[str, npt.NDArray[Any]] = {}
        for entry, offset, size in zip(
            self._header.arrays, self._layout.offsets, self._layout.sizes, strict=True
        ):
            if size == 0:
                arrays[entry.name] = np.empty(entry.shape, entry.dtype)
            else:
                arrays[entry.name] = np.ndarray(
                    entry.shape, entry.dtype, buffer=self._buffer, offset=offset
                )
        return arrays, self._meta

    def _take_header(self, frame: memoryview) -> None:
        if not _HEADER_PREFIX.size <= len(frame) <= MAX_FRAME_BYTES:
            raise WireError(f"pack header: a frame of {len(frame)} bytes")
        magic, version, size, crc = _HEADER_PREFIX.unpack_from(frame)
        rest = frame[_HEADER_PREFIX.size :]
        body, payload = rest[:size], rest[size:]
        if magic != _MAGIC:
            raise WireError("pack header: not a pack of ours (wrong magic)")
        if version != _VERSION:
            raise WireError(f"pack header: version {version}, this side reads {_VERSION}")
        if size != len(body) or zlib.crc32(body) != crc:
            raise WireError("pack header: checksum mismatch")
        header = decode(PackHeader, body)
        layout = _layout(header.arrays, self._max_bytes)
        stored_bytes = sum(entry.stored_bytes for entry in header.arrays)
        if not min(stored_bytes, 1) <= header.frames <= stored_bytes:
            raise WireError(f"pack header: {header.frames} frames for {stored_bytes} bytes")
        meta = decode_plain(header.meta, what="pack meta")
        if type(meta) is not dict:
            raise WireError("pack meta: expected a map")
        self._header, self._layout, self._meta, self._seed = header, layout, meta, crc
        self._buffer = bytearray(layout.total)
        self._targets = self._places(header)
        self._target = next(self._targets, None)
        self._next_frame = 1
        if len(payload):
            self._take_payload(header, payload)

    def _places(self, header: PackHeader) -> Iterator[_Target]:
        whole = memoryview(self._buffer)
        for entry, offset, size in zip(
            header.arrays, self._layout.offsets, self._layout.sizes, strict=True
        ):
            place = whole[offset : offset + size]
            if entry.zstd:
                stored = memoryview(bytearray(entry.stored_bytes))
                yield _Target(view=stored, inflate_into=place, name=entry.name)
            elif size:
                yield _Target(view=place, inflate_into=None, name=entry.name)

    def _take_payload(self, header: PackHeader, frame: memoryview) -> None:
        number = self._next_frame
        if number > header.frames:
            raise WireError(f"pack: a frame after the last ({header.frames})")
        if not _FRAME_PREFIX.size < len(frame) <= MAX_FRAME_BYTES:
            raise WireError(f"pack frame {number}: {len(frame)} bytes")
        claimed, crc = _FRAME_PREFIX.unpack_from(frame)
        body = frame[_FRAME_PREFIX.size :]
        if claimed != number:
            raise WireError(f"pack frame {number}: is number {claimed}")
        if _payload_crc(number, (body,), self._seed) != crc:
            raise WireError(f"pack frame {number}: checksum mismatch")
        self._land(number, body)
        self._next_frame += 1
        if number == header.frames and self._target is not None:
            raise WireError(f"pack: the last frame leaves array {self._target.name!r} incomplete")

    def _land(self, number: int, body: memoryview) -> None:
        while len(body):
            target = self._target
            if target is None:
                raise WireError(f"pack frame {number}: {len(body)} bytes too many")
            taken = min(len(body), len(target.view) - self._filled)
            target.view[self._filled : self._filled + taken] = body[:taken]
            body = body[taken:]
            self._filled += taken
            if self._filled == len(target.view):
                if target.inflate_into is not None:
                    _inflate(target.name, target.view, target.inflate_into)
                self._target, self._filled = next(self._targets, None), 0


def _inflate(name: str, stored: memoryview, place: memoryview) -> None:
    """Decompresses into `place`, whose size must be what the zstandard frame says it holds."""
    try:
        says = zstandard.get_frame_parameters(stored).content_size
        if says != len(place):
            raise WireError(f"array {name!r}: compressed for {says} bytes, not {len(place)}")
        inflater = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        data = inflater.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"array {name!r}: {error}") from None
    if len(data) != len(place):
        raise WireError(f"array {name!r}: {len(data)} bytes, not {len(place)}")
    place[:] = data


# ---- digest -------------------------------------------------------------------------------------


def pack_digest(arrays: Arrays) -> str:
    """Hex SHA-256 over the arrays sorted by name: msgpack of [name, dtype, shape], then the bytes.

    Bytes are little-endian and C-ordered, so equal arrays give equal digests on any machine and in
    any dict order; meta is left out.
    """
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = _canonical(name, arrays[name])
        digest.update(msgpack.packb([name, array.dtype.str, list(array.shape)]))
        digest.update(_raw_bytes(array))
    return digest.hexdigest()
