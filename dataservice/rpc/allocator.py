"""What the C allocator of a process that moves packs has to know.

Invariants: nothing but a threshold changes, the one that any freed block of that size changes; on
an allocator other than glibc's it is a call without effect.
"""

from __future__ import annotations

LARGEST_BYTES = (32 << 20) - (64 << 10)
"""The largest block after which glibc raises its thresholds."""


def keep_freed_blocks() -> None:
    """Has freed blocks of a few megabytes used again instead of given back to the system.

    glibc gives a block back that is larger than the largest it has seen freed so far, and with it
    the heap's end beyond twice that. Messages of gRPC are such blocks, several times each: filling
    fresh pages for them was half of a client's CPU time (0.79 against 0.40 s a GB).
    """
    block = bytearray(LARGEST_BYTES)  # zeroed by the kernel, if anybody touched it
    del block
