"""Memory that packs are received into, used again and again instead of allocated for each.

Invariants: memory comes back by itself when the last view of it is gone (array, tensor, memoryview,
in whatever thread), never before; the pool holds at most `max_bytes`, lent and idle together, and
what does not fit is ordinary memory of its own; a size larger than all idle buffers replaces the
smallest of them, so the pool has no more buffers than were lent at once.

It pays where malloc gives memory back each time, above 32 MiB (0.05 instead of 0.12 s to fill a
GB), and where memory is page-locked, which takes longer than to fill it.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_LOG = logging.getLogger(__name__)

SMALL_BYTES = 256 << 10
"""Below, the allocator's own reuse is as good, and a large buffer would be lent for little."""
_GRAIN_BYTES = 2 << 20


class _Buffer:
    """Memory of its own, given back to the system with the last reference; pinned if asked for and
    possible."""

    def __init__(self, size_bytes: int, device: torch.device | None) -> None:
        self.size_bytes = size_bytes
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without
        self.array = np.frombuffer(memory, np.uint8)
        self._unpin = None if device is None else _pin(self.array, device)

    @property
    def pinned(self) -> bool:
        return self._unpin is not None

    def __del__(self) -> None:
        unpin = getattr(self, "_unpin", None)
        if unpin is not None:
            unpin(self.array.ctypes.data)


class _Loan:
    """What every view of lent memory has as its base: its end is the end of the last view."""

    def __init__(self, buffer: _Buffer, size_bytes: int, back: deque[_Buffer]) -> None:
        self._buffer, self._back = buffer, back
        address = buffer.array.ctypes.data
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        # In any thread and at any moment, also while that thread holds the pool's lock.
        self._back.append(self._buffer)


class BufferPool:
    """Safe across threads. A pool that is dropped leaves lent memory to those that hold it."""

    def __init__(
        self, *, max_bytes: int, pinned: bool = False, device: torch.device | None = None
    ) -> None:
        """`max_bytes`: see above; 0 is a pool that lends ordinary memory only.

        `pinned`: page-locked for copies to `device` (default: the current CUDA device), where torch
        sees CUDA; ordinary elsewhere, and where the system refuses, which is logged once.
        """
        self.max_bytes = max_bytes
        self._device: torch.device | None = None
        if pinned and torch.cuda.is_available():
            self._device = device or torch.device("cuda", torch.cuda.current_device())
        self._lock = threading.Lock()
        self._idle: list[_Buffer] = []
        self._back: deque[_Buffer] = deque()
        self._buffers: weakref.WeakSet[_Buffer] = weakref.WeakSet()
        self.made = 0
        """Buffers made so far; a stream of like packs stops making any."""

    @property
    def pinned(self) -> bool:
        """Whether what is lent is page-locked where it is the pool's."""
        return self._device is not None

    @property
    def held_bytes(self) -> int:
        """Lent and idle."""
        with self._lock:
            return self._held()

    def take(self, size_bytes: int) -> NDArray[np.uint8]:
        """`size_bytes` of writable memory, uint8, its content arbitrary."""
        if size_bytes < SMALL_BYTES:
            return np.empty(size_bytes, np.uint8)
        with self._lock:
            buffer = self._fitting(size_bytes) or self._new(size_bytes)
        if buffer is None:
            return np.empty(size_bytes, np.uint8)
        lent: NDArray[np.uint8] = np.asarray(_Loan(buffer, size_bytes, self._back))
        return lent

    def trim(self) -> None:
        """Gives the idle memory back to the system."""
        with self._lock:
            self._collect()
            self._idle.clear()

    def _held(self) -> int:
        return sum(buffer.size_bytes for buffer in self._buffers)

    def _collect(self) -> None:
        while self._back:
            self._idle.append(self._back.popleft())

    def _fitting(self, size_bytes: int) -> _Buffer | None:
        """The smallest idle one that is large enough."""
        self._collect()
        fitting = [i for i, one in enumerate(self._idle) if one.size_bytes >= size_bytes]
        if not fitting:
            return None
        return self._idle.pop(min(fitting, key=lambda i: self._idle[i].size_bytes))

    def _new(self, size_bytes: int) -> _Buffer | None:
        """In the place of an idle one, all of which are too small; None where none may be made."""
        capacity = _roomy(size_bytes)
        self._idle.sort(key=lambda one: one.size_bytes, reverse=True)
        if self._idle:
            self._idle.pop()
        while self._idle and self._held() + capacity > self.max_bytes:
            self._idle.pop()
        if self._held() + capacity > self.max_bytes:
            return None
        buffer = _Buffer(capacity, self._device)
        self.made += 1
        self._buffers.add(buffer)
        if self._device is not None and not buffer.pinned:
            self._device = None
        return buffer


def _roomy(size_bytes: int) -> int:
    """Of a buffer for `size_bytes`: most larger packs need no other."""
    return -(-(size_bytes + size_bytes // 8) // _GRAIN_BYTES) * _GRAIN_BYTES


def _pin(array: NDArray[Any], device: torch.device) -> Callable[[int], Any] | None:
    """What undoes it, given the address; None where CUDA refuses."""
    cudart = torch.cuda.cudart()
    with torch.cuda.device(device):  # a new thread would use device 0
        error = int(cudart.cudaHostRegister(array.ctypes.data, array.nbytes, 0))
    if error == 0:
        undo: Callable[[int], Any] = cudart.cudaHostUnregister
        return undo
    _LOG.warning(
        "%.0f MiB cannot be page-locked (CUDA error %d): packs are received into ordinary "
        "memory, and copies to %s are slower; is `ulimit -l` too small?",
        array.nbytes / 2**20,
        error,
        device,
    )
    return None
