"""A pack's arrays as a list of frames, and back into one buffer.

Layout: the pack begins with magic, version, header length, CRC-32 and the msgpack header
(PackHeader); the payloads after it carry, each behind its number and CRC-32, the stored bytes of
all arrays one after the other, cut every `frame_bytes`. Payload 1 is in one frame with the header
where both fit; every other payload is a frame.

Invariants:
- a frame's CRC starts from the header's and covers its number: a flipped byte, a frame of another
  pack, a missing, repeated or exchanged frame is a WireError, never a wrong array;
- the decoder checks every size before it allocates (wire.layout): one buffer for the pack, at most
  `max_bytes`, and one for each compressed array while it arrives. Frames land in it; arrays are
  views of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from dataservice.errors import WireError
from dataservice.wire.encoded import FRAME_PREFIX, EncodedPack, payload_crc
from dataservice.wire.layout import (
    ALLOWED_DTYPES,
    FRAME_BYTES,
    MAX_FRAME_BYTES,
    MAX_PACK_BYTES,
    Allocate,
    ArrayEntry,
    Arrays,
    CheckedHeader,
    PackHeader,
    canonical,
    fresh,
    inflate,
    raw_bytes,
    read_header,
    views_of,
)
from dataservice.wire.schema import Buffer

__all__ = [
    "ALLOWED_DTYPES",
    "FRAME_BYTES",
    "MAX_FRAME_BYTES",
    "MAX_PACK_BYTES",
    "ArrayEntry",
    "EncodedPack",
    "PackDecoder",
    "PackHeader",
    "encode_pack",
    "pack_digest",
]


def encode_pack(
    arrays: Arrays,
    meta: Mapping[str, Any],
    *,
    frame_bytes: int = FRAME_BYTES,
    compress: bool = False,
) -> list[bytes]:
    """The frames of EncodedPack."""
    return list(EncodedPack(arrays, meta, frame_bytes=frame_bytes, compress=compress).frames())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """Where the next stored bytes go: the array's place, or a buffer to decompress from."""

    view: memoryview
    inflate_into: memoryview | None
    name: str


class PackDecoder:
    """Takes the frames of one pack in order. After a WireError it takes no more."""

    def __init__(self, *, max_bytes: int = MAX_PACK_BYTES, allocate: Allocate = fresh) -> None:
        """`allocate` is asked once, for the bytes of all arrays."""
        self._max_bytes = max_bytes
        self._allocate = allocate
        self._failed = False
        self._head: CheckedHeader | None = None
        self._buffer = np.empty(0, np.uint8)
        self._targets: Iterator[_Target] = iter(())
        self._target: _Target | None = None
        self._filled = 0
        self._next_frame = 0

    @property
    def done(self) -> bool:
        head = self._head
        return not self._failed and head is not None and self._next_frame > head.header.frames

    def feed(self, frame: Buffer) -> bool:
        """Takes the next frame; True when it was the last. WireError for anything but that."""
        if self._failed:
            raise WireError("pack: a frame after a broken one")
        try:
            if self._head is None:
                self._take_header(memoryview(frame))
            else:
                self._take_payload(self._head, memoryview(frame))
        except WireError:
            self._failed = True
            raise
        return self.done

    def result(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """(arrays, meta): the arrays are writable views of one buffer, in the sender's order."""
        head = self._head
        if not self.done or head is None:
            raise WireError("pack: the stream ended before the last frame")
        return views_of(head.header.arrays, head.layout, self._buffer), head.meta

    def _take_header(self, frame: memoryview) -> None:
        head = self._head = read_header(frame, self._max_bytes)
        self._buffer = self._allocate(head.layout.total)
        self._targets = self._places(head)
        self._target = next(self._targets, None)
        self._next_frame = 1
        if len(payload := frame[head.size_bytes :]):
            self._take_payload(head, payload)

    def _places(self, head: CheckedHeader) -> Iterator[_Target]:
        whole, layout = self._buffer.data, head.layout
        for entry, offset, size in zip(
            head.header.arrays, layout.offsets, layout.sizes, strict=True
        ):
            place = whole[offset : offset + size]
            if entry.zstd:
                stored = np.empty(entry.stored_bytes, np.uint8).data
                yield _Target(view=stored, inflate_into=place, name=entry.name)
            elif size:
                yield _Target(view=place, inflate_into=None, name=entry.name)

    def _take_payload(self, head: CheckedHeader, frame: memoryview) -> None:
        number, last = self._next_frame, head.header.frames
        if number > last:
            raise WireError(f"pack: a frame after the last ({last})")
        if not FRAME_PREFIX.size < len(frame) <= MAX_FRAME_BYTES:
            raise WireError(f"pack frame {number}: {len(frame)} bytes")
        claimed, crc = FRAME_PREFIX.unpack_from(frame)
        body = frame[FRAME_PREFIX.size :]
        if claimed != number:
            raise WireError(f"pack frame {number}: is number {claimed}")
        if payload_crc(number, (body,), head.crc) != crc:
            raise WireError(f"pack frame {number}: checksum mismatch")
        self._land(number, body)
        self._next_frame += 1
        if number == last and self._target is not None:
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
                    inflate(target.name, target.view, target.inflate_into)
                self._target, self._filled = next(self._targets, None), 0


# ---- digest -------------------------------------------------------------------------------------


def pack_digest(arrays: Arrays) -> str:
    """Hex SHA-256 over the arrays sorted by name: msgpack of [name, dtype, shape], then the bytes.

    Bytes are little-endian and C-ordered, so equal arrays give equal digests on any machine and in
    any dict order; meta is left out.
    """
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = canonical(name, arrays[name])
        digest.update(msgpack.packb([name, array.dtype.str, list(array.shape)]))
        digest.update(raw_bytes(array))
    return digest.hexdigest()
