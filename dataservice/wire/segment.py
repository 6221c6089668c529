"""A pack out of memory that its sender wrote with EncodedPack.write_into.

Invariants: everything is checked before anything is allocated for it; a header has its CRC, arrays
have none, for nothing lies between the two ends; what comes back shares no memory with the segment,
and each byte of a raw array is copied once; a segment that changes meanwhile gives wrong values or
a WireError, never a read outside of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dataservice.errors import WireError
from dataservice.wire.layout import (
    HEADER_PREFIX,
    MAX_FRAME_BYTES,
    MAX_PACK_BYTES,
    Allocate,
    aligned,
    fresh,
    inflate,
    read_header,
    views_of,
)


def read_pack(
    segment: npt.NDArray[np.uint8], *, max_bytes: int = MAX_PACK_BYTES, allocate: Allocate = fresh
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """(arrays, meta) of `segment`, uint8 of exactly the pack's bytes; as PackDecoder.result, in
    memory of `allocate`."""
    head = _head(segment)
    checked = read_header(memoryview(head), max_bytes)
    entries, layout = checked.header.arrays, checked.layout
    starts, end = [], checked.size_bytes
    for entry in entries:
        starts.append(aligned(end))
        end = starts[-1] + entry.stored_bytes
    if end != len(segment):
        raise WireError(f"pack: {len(segment)} bytes, its header says {end}")
    buffer = allocate(layout.total)
    for entry, start, offset, size in zip(
        entries, starts, layout.offsets, layout.sizes, strict=True
    ):
        stored = segment[start : start + entry.stored_bytes]
        place = buffer[offset : offset + size]
        if entry.zstd:
            inflate(entry.name, stored.tobytes(), place.data)
        else:
            place[:] = stored
    return views_of(entries, layout, buffer), checked.meta


def _head(segment: npt.NDArray[np.uint8]) -> bytes:
    """A copy of the header: what was checked must not change."""
    prefix = segment[: HEADER_PREFIX.size].tobytes()
    if len(prefix) < HEADER_PREFIX.size:
        raise WireError(f"pack header: a segment of {len(segment)} bytes")
    _, _, size, _ = HEADER_PREFIX.unpack(prefix)
    if size > MAX_FRAME_BYTES:
        raise WireError(f"pack header: {size} bytes")
    return prefix + segment[len(prefix) : len(prefix) + size].tobytes()
