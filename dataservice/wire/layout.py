"""How a pack's arrays lie in a decoder's buffer, and the header that says so.

Invariants:
- data is little-endian and C-ordered; dtypes are the fixed-size integers and floats of
  ALLOWED_DTYPES, nothing that could be a pointer;
- an array is stored raw, or as one zstandard frame that is smaller;
- every size in a header is checked before anything is allocated for it: arrays of at most
  `max_bytes` together, each at a multiple of 64 bytes in one buffer.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from dataservice.errors import WireError
from dataservice.wire.checksum import crc32
from dataservice.wire.schema import Buffer, decode, decode_plain

MAX_FRAME_BYTES = 4 << 20
"""Of a whole frame; the data channel's message limit."""
FRAME_BYTES = 512 << 10
"""Stored bytes in a payload. Every frame has its price at both ends, but large ones fall out of the
cache between their copies, and nobody has work before the first has come: packs of 20 MB in frames
of 0.25, 0.5, 0.75, 2 and 4 MiB went at 1.2, 1.6, 1.5, 1.3 and 1.0 GB/s, decoded."""
MAX_PACK_BYTES = 1 << 30
ALLOWED_DTYPES = frozenset(
    ("|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")
)
ALIGN = 64

MAGIC = b"VDPK"
VERSION = 2
HEADER_PREFIX = struct.Struct("<4sIII")  # magic, version, header bytes, header CRC
_MAX_ARRAYS = 64
_MAX_DIMENSIONS = 8
_MAX_NAME_LENGTH = 128
_MAX_WINDOW_BYTES = 8 << 20

Arrays = Mapping[str, npt.NDArray[Any]]
Allocate = Callable[[int], npt.NDArray[np.uint8]]
"""Bytes -> writable, contiguous memory of that size, its content arbitrary: where a pack lands."""


def fresh(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory of its own for every pack."""
    return np.empty(size_bytes, np.uint8)


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


def aligned(at: int) -> int:
    """The next multiple of ALIGN."""
    return -(-at // ALIGN) * ALIGN


def canonical(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`array` little-endian, its dtype checked."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if little.dtype.str not in ALLOWED_DTYPES:
        raise WireError(f"array {name!r}: dtype {array.dtype} is not allowed on the wire")
    return little


def raw_bytes(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data.toreadonly()


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    offsets: tuple[int, ...]
    """Of each array in the buffer, multiples of 64."""
    sizes: tuple[int, ...]
    """Bytes of each array."""
    total: int


def layout_of(entries: Sequence[ArrayEntry], max_bytes: int) -> Layout:
    """Where each array lies in the decoder's buffer; WireError unless every entry is sane."""
    if len(entries) > _MAX_ARRAYS:
        raise WireError(f"pack header: {len(entries)} arrays, more than {_MAX_ARRAYS}")
    if len({entry.name for entry in entries}) != len(entries):
        raise WireError("pack header: two arrays of one name")
    offsets, sizes, end = [], [], 0
    for entry in entries:
        size = _checked_size(entry, max_bytes)
        start = aligned(end)
        end = start + size
        if end > max_bytes:
            raise WireError(f"pack header: arrays of more than the limit of {max_bytes} bytes")
        offsets.append(start)
        sizes.append(size)
    return Layout(offsets=tuple(offsets), sizes=tuple(sizes), total=end)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedHeader:
    """A header that was found right, and what it means."""

    header: PackHeader
    layout: Layout
    meta: dict[str, Any]
    crc: int
    """Of the header: the CRC of every frame starts from it."""
    size_bytes: int
    """With its prefix; what follows it in a frame is the first payload."""


def read_header(frame: memoryview, max_bytes: int) -> CheckedHeader:
    """The header at the beginning of `frame`; WireError unless all that it says is sane."""
    if not HEADER_PREFIX.size <= len(frame) <= MAX_FRAME_BYTES:
        raise WireError(f"pack header: a frame of {len(frame)} bytes")
    magic, version, size, crc = HEADER_PREFIX.unpack_from(frame)
    body = frame[HEADER_PREFIX.size : HEADER_PREFIX.size + size]
    if magic != MAGIC:
        raise WireError("pack header: not a pack of ours (wrong magic)")
    if version != VERSION:
        raise WireError(f"pack header: version {version}, this side reads {VERSION}")
    if size != len(body) or crc32(body, 0) != crc:
        raise WireError("pack header: checksum mismatch")
    header = decode(PackHeader, body)
    layout = layout_of(header.arrays, max_bytes)
    stored_bytes = sum(entry.stored_bytes for entry in header.arrays)
    if not min(stored_bytes, 1) <= header.frames <= stored_bytes:
        raise WireError(f"pack header: {header.frames} frames for {stored_bytes} bytes")
    meta = decode_plain(header.meta, what="pack meta")
    if type(meta) is not dict:
        raise WireError("pack meta: expected a map")
    return CheckedHeader(
        header=header, layout=layout, meta=meta, crc=crc, size_bytes=HEADER_PREFIX.size + size
    )


def views_of(
    entries: Sequence[ArrayEntry], layout: Layout, buffer: npt.NDArray[np.uint8]
) -> dict[str, npt.NDArray[Any]]:
    """The arrays in a buffer that holds them: writable views of it, in the sender's order."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for entry, offset, size in zip(entries, layout.offsets, layout.sizes, strict=True):
        if size == 0:
            arrays[entry.name] = np.empty(entry.shape, entry.dtype)
        else:
            arrays[entry.name] = np.ndarray(entry.shape, entry.dtype, buffer=buffer, offset=offset)
    return arrays


def inflate(name: str, stored: Buffer, place: memoryview) -> None:
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
