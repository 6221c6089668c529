"""The pictures of a pack: read and decoded in the pools, largest first, into its patches.

Invariants: a picture starts before every smaller one of its pack that was read by then, and before
all of packs that are needed later; nothing is written into the patches of a picture that was given
up, nor after `cancel`; a read that was given up starts no decode; a picture that cannot be had is a
new hole, whose patches the caller fills; why it cannot be had does not say where it is, which
`Picture.place` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dataservice.core.packspec import ImageSpec, PackSpec
from dataservice.core.vision import VisionRules
from dataservice.errors import (
    ArchiveError,
    DeadlineExceeded,
    ImageError,
    StorageError,
    StorageTimeout,
)
from dataservice.pipeline.decoding.headers import check_bytes
from dataservice.pipeline.images import DecodeLimits, Decoder
from dataservice.pipeline.pool import BuildPools, Job
from dataservice.pipeline.reading import NotAtHand, Reader, at_hand, hole_key, undamaged
from dataservice.pipeline.specs import num_rows
from dataservice.storage.members import read_image
from dataservice.storage.objects import CACHED_BYTES
from dataservice.storage.sources import RecordFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    key: str
    """Hole key: "<sample key>#<number of the image in the sample>"."""
    item: int
    spec: ImageSpec
    patches: slice
    place: str
    """For people: "<member> in <source>/<shard name>", or the shard's whole path."""


def pictures_of(spec: PackSpec, rules: VisionRules) -> list[Picture]:
    """Those that are kept, in pack order, each with its place in the pixel array."""
    pictures, start = [], 0
    for number, item in enumerate(spec.items):
        for i, image in enumerate(item.kept):
            stop = start + num_rows(image, rules)
            shard = spec.shards[image.shard]
            pictures.append(
                Picture(
                    key=hole_key(item.key, i),
                    item=number,
                    spec=image,
                    patches=slice(start, stop),
                    place=f"{image.member} in {_shard_place(shard.source, shard.name)}",
                )
            )
            start = stop
    return pictures


def _shard_place(source: str, name: str) -> str:
    return name if name.startswith("/") or "://" in name else f"{source}/{name}"


class _Cancelled(Exception):
    """The build that wanted this picture has failed already."""


class PackPictures:
    """The picture tasks of one pack: `start`, `finish`, and `cancel` at the end in any case."""

    def __init__(
        self,
        spec: PackSpec,
        reader: Reader,
        formats: Mapping[str, RecordFormat],
        decoder: Decoder,
        limits: DecodeLimits,
        pools: BuildPools,
        need: tuple[int, ...],
    ) -> None:
        self._spec = spec
        self._reader = reader
        self._formats = formats
        self._decoder = decoder
        self._limits = limits
        self._pools = pools
        self._need = need
        self._cancelled = False
        self._reads: list[Job[Job[None]]] = []
        self._decodes: list[Job[None]] = []
        self._waiting: list[tuple[Picture, Job[Job[None]] | None, Job[None] | None]] = []
        """Its read, or its decode where nothing had to be waited for."""

    def start(self, pictures: Sequence[Picture], pixels: NDArray[np.uint8]) -> None:
        """`pixels`: uint8 [P, F], the patches of the whole pack."""
        for picture in sorted(pictures, key=lambda p: -p.spec.width * p.spec.height):
            out = pixels[picture.patches]
            if (data := self._at_hand(picture.spec)) is not None:
                decode = self._start_decode(picture.spec, out, data)
                self._waiting.append((picture, None, decode))
                continue
            read = self._pools.reads.submit(
                partial(self._read_image, picture.spec),
                commit=partial(self._start_decode, picture.spec, out),
                deadline_s=self._limits.read_deadline_s,
                priority=self._need,
            )
            self._reads.append(read)
            self._waiting.append((picture, read, None))

    def finish(self, storage_holes: bool) -> dict[str, str]:
        """The new holes: hole key to reason."""
        found: dict[str, str] = {}
        for picture, read, decode in reversed(self._waiting):  # ends last: one wait, not many
            try:
                self._finish_picture(picture, read, decode)
            except (ArchiveError, ImageError) as error:
                found[picture.key] = error.reason
            except StorageError as error:
                if not storage_holes:
                    raise
                found[picture.key] = f"could not be read: {error}"
        return found

    def cancel(self) -> None:
        """Takes back what has not started; finished builds have nothing left to take back."""
        self._cancelled = True
        self._pools.reads.cancel(self._reads)
        self._pools.decodes.cancel(self._decodes)

    def _start_decode(self, image: ImageSpec, out: NDArray[np.uint8], data: bytes) -> Job[None]:
        """Runs as the commit of the read, so a read that was given up starts no decode."""
        if self._cancelled:
            raise _Cancelled
        job = self._pools.decodes.submit(
            partial(self._decoder.prepare, data, image),
            commit=lambda prepared: prepared(out),
            deadline_s=self._limits.deadline_s,
            priority=(*self._need, -image.width * image.height),
        )
        self._decodes.append(job)
        return job

    def _finish_picture(
        self, picture: Picture, read: Job[Job[None]] | None, decode: Job[None] | None
    ) -> None:
        try:
            if read is not None:
                decode = self._pools.reads.result(read)
        except DeadlineExceeded as error:
            raise StorageTimeout(f"reading {picture.place} {error}") from error
        assert decode is not None
        try:
            self._pools.decodes.result(decode)
        except DeadlineExceeded as error:
            raise ImageError(f"decode {error}") from error

    def _at_hand(self, image: ImageSpec) -> bytes | None:
        """The file of a small picture where no disk is needed for it, so that no other thread need
        be woken. Whatever is odd about it is for the usual read to find."""
        if image.method < 0 or max(image.stored_bytes, image.size_bytes) > CACHED_BYTES:
            return None
        try:
            return read_image(at_hand(self._reader), image, self._spec.shards[image.shard])
        except (NotAtHand, ArchiveError):
            return None

    def _read_image(self, image: ImageSpec) -> bytes:
        check_bytes(max(image.stored_bytes, image.size_bytes), self._limits)
        shard = self._spec.shards[image.shard]
        fmt = self._formats.get(shard.source)
        return undamaged(self._reader, shard, lambda read: read_image(read, image, shard, fmt))
