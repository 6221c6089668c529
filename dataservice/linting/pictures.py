"""Decodes pictures as a served run does, several at a time, and says what became of each.

Invariants: a picture that cannot be read or decoded, or not in time, is a DataError and stops
nothing; results come in the order of the pictures; at most one picture of over 16 megapixels is
decoded at a time, and about 64 MiB of files are held besides.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from dataservice.core.vision import VisionRules
from dataservice.errors import (
    DataError,
    DeadlineExceeded,
    ImageError,
    StaleIndexError,
    StorageError,
)
from dataservice.pipeline.decoding import DecodeLimits, decode_whole
from dataservice.pipeline.decoding.headers import picture_header, planned_header
from dataservice.pipeline.pool import DeadlinePool, Job
from dataservice.storage.probe import ImageHeader

_LARGE_PIXELS = 16_000_000
_HELD_BYTES = 64 * 1024 * 1024
_MAX_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """Upright, in pixels."""

    width: int
    height: int
    mean_rgb: tuple[float, float, float] | None


Size = tuple[int, int]

Fetch = Callable[[], tuple[bytes, Size | None]]
"""The bytes of a picture file, and its upright size as the index has it, if it is in one. Raises
DataError, StorageError."""
_Wait = Callable[[], Picture | DataError]


class PictureChecker:
    """Owns its threads: close it."""

    def __init__(self, *, digest: bool, rules: VisionRules, limits: DecodeLimits) -> None:
        self._digest = digest
        self._rules = rules
        self._limits = limits
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._small = DeadlinePool(threads, name="lint")
        self._large = DeadlinePool(1, name="lint-large")

    def check(self, fetches: Iterable[Fetch]) -> Iterator[Picture | DataError]:
        """What became of each picture."""
        waiting: deque[tuple[int, _Wait]] = deque()
        held = 0
        for fetch in fetches:
            size, wait = self._start(fetch)
            waiting.append((size, wait))
            held += size
            while held > _HELD_BYTES or len(waiting) > 4 * self._small.num_threads:
                size, wait = waiting.popleft()
                held -= size
                yield wait()
        for _, wait in waiting:
            yield wait()

    def close(self) -> None:
        self._small.close()
        self._large.close()

    def _start(self, fetch: Fetch) -> tuple[int, _Wait]:
        """The bytes held, and what waits for the result."""
        try:
            data, size = fetch()
            if size is None:
                header = picture_header(data, self._limits)
            else:
                header = planned_header(data, *size, self._limits)
        except (StorageError, StaleIndexError) as error:
            refused: DataError = ImageError(f"could not be read: {error}")
            return 0, lambda: refused
        except DataError as error:
            bad = error
            return 0, lambda: bad
        large = header.width * header.height > _LARGE_PIXELS
        pool = self._large if large else self._small
        job = pool.submit(
            partial(self._decode, data, header),
            commit=lambda picture: picture,
            deadline_s=self._limits.deadline_s,
        )
        return len(data), partial(_result, pool, job)

    def _decode(self, data: bytes, header: ImageHeader) -> Picture:
        try:
            pixels = decode_whole(data, header, self._rules).pixels
        except MemoryError:
            raise ImageError(
                f"too many pixels: no memory to decode {header.width}x{header.height}"
            ) from None
        mean = None
        if self._digest:
            sums = pixels[:, :, :3].sum(axis=(0, 1), dtype=np.uint64)
            red, green, blue = (
                round(total / (header.width * header.height), 1) for total in sums.tolist()
            )
            mean = red, green, blue
        return Picture(width=header.width, height=header.height, mean_rgb=mean)


def _result(pool: DeadlinePool, job: Job[Picture]) -> Picture | DataError:
    try:
        return pool.result(job)
    except DeadlineExceeded as error:
        return ImageError(f"decode {error}")
    except DataError as error:
        return error
