"""A Decoder whose work is done by decoder processes, one for each thread that calls.

Invariants: a picture whose process died is tried once more in a fresh one, and then is an
ImageError that says how it died; one that takes too long, or more memory than it may, is an
ImageError at once. A process that did any of these is never used again. Whether a picture has
memory enough depends on the limits alone, not on the machine or on what else the worker holds.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from dataservice.core.packspec import ImageSpec
from dataservice.core.vision import VisionRules
from dataservice.errors import ImageError
from dataservice.pipeline.images import DecodeLimits, Prepared
from dataservice.pipeline.isolation.frames import Setup
from dataservice.pipeline.isolation.process import (
    END_S,
    START_S,
    DecoderProcess,
    Died,
    OutOfMemory,
)

_LOG = logging.getLogger(__name__)

STRIKES = 2
PIXEL_BYTES = 32
"""Of memory that decoding may take for each pixel of the file; the hungriest format is JPEG 2000
with alpha, which takes 27."""
FILE_COPIES = 3
"""Of the file, at most."""
ASIDE_BYTES = 256 << 20
"""For what does not grow with the picture."""


def picture_memory(max_pixels: int, max_bytes: int) -> int:
    """Bytes that are enough for any picture within the limits."""
    return PIXEL_BYTES * max_pixels + FILE_COPIES * max_bytes + ASIDE_BYTES


class IsolatedDecoder:
    """A Decoder; `close` ends its processes, also under the threads that wait for one."""

    def __init__(self, rules: VisionRules, limits: DecodeLimits, *, memory_bytes: int) -> None:
        """`memory_bytes`: what decoding one picture may take, such as `picture_memory`."""
        self._setup = Setup(rules=rules, limits=limits, memory_bytes=memory_bytes)
        self._lock = threading.Lock()
        self._idle: list[DecoderProcess] = []
        self._busy: set[DecoderProcess] = set()
        self._closed = False

    @property
    def longest_s(self) -> float:
        """Of `prepare`: all its attempts, with the start of a process for each."""
        return STRIKES * (START_S + self._setup.limits.deadline_s + 2 * END_S)

    @property
    def pids(self) -> list[int]:
        with self._lock:
            return [process.pid for process in [*self._idle, *self._busy]]

    def prepare(self, data: bytes, image: ImageSpec) -> Prepared:
        """Raises ImageError; DataServiceError when no process could be started."""
        patches = self._decode(data, image)

        def write(out: NDArray[np.uint8]) -> None:
            out[...] = patches

        return write

    def _decode(self, data: bytes, image: ImageSpec) -> NDArray[np.uint8]:
        how = ""
        for _ in range(STRIKES):
            process = self._take()
            keep = False
            try:
                patches = process.decode(data, image)
            except ImageError:
                keep = True
                raise
            except OutOfMemory:
                allowed = self._setup.memory_bytes >> 20
                raise ImageError(f"decoding it takes more than {allowed} MiB of memory") from None
            except TimeoutError:
                limit_s = self._setup.limits.deadline_s
                raise ImageError(f"decode took longer than {limit_s:g} s") from None
            except Died as death:
                how = str(death)
                _LOG.warning("picture %s: its decoder process died (%s)", image.member, how)
            else:
                keep = True
                return patches
            finally:
                self._put_back(process, keep=keep)
        raise ImageError(f"the decoder process died ({how})")

    def _take(self) -> DecoderProcess:
        with self._lock:
            self._check_open()
            process = self._idle.pop() if self._idle else None
            if process is not None:
                self._busy.add(process)
                return process
        process = DecoderProcess(self._setup)
        with self._lock:
            if not self._closed:
                self._busy.add(process)
                return process
        process.close()
        self._check_open()
        raise AssertionError

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the isolated decoder is closed")

    def _put_back(self, process: DecoderProcess, *, keep: bool) -> None:
        with self._lock:
            self._busy.discard(process)
            if keep and not self._closed:
                self._idle.append(process)
                return
        process.close()

    def close_idle(self, after_s: float) -> None:
        """Ends the processes that have had nothing to do for so long."""
        limit = time.monotonic() - after_s
        with self._lock:
            old = [process for process in self._idle if process.idle_since <= limit]
            self._idle = [process for process in self._idle if process.idle_since > limit]
        for process in old:
            process.close()

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closed = True
            processes = [*self._idle, *self._busy]
            self._idle.clear()
        for process in processes:
            with suppress(OSError):
                process.close()
