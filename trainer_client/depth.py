"""How deep to prefetch, decided from what was seen: no clock, no I/O, no thread.

Invariants: a bound grows only after the trainer waited although that bound, since it last grew, had
held a request back; a deeper buffer would not have helped otherwise; bytes stay below a share of
the memory that is free, at least LEAST_BYTES; what was given as a number stays that number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MIB = 1 << 20
LEAST_BYTES = 16 * MIB
MEMORY_SHARE = 16
"""Prefetched packs may take 1/16 of the memory that would be free without them. Where N ranks of a
host do so, each sees what the others took: N / (N + 15) in all, a third for eight of them."""
WAITED_S = 0.001
"""A shorter wait is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Depth:
    """Most packs, and most bytes of them, that are asked for and not yet yielded."""

    packs: int
    size_bytes: int


START = Depth(packs=8, size_bytes=256 * MIB)
MOST = Depth(packs=256, size_bytes=4096 * MIB)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Since a bound last grew."""

    waited: bool
    """The trainer has, for its last batch."""
    lacked_packs: bool
    """A request had to wait because of the bound on packs."""
    lacked_bytes: bool
    """Or because of that on bytes."""
    held_bytes: int
    free_bytes: int
    """That this process may still allocate."""


def first_depth(packs: int | None, size_bytes: int | None) -> Depth:
    """With the numbers given, where there are any."""
    return Depth(
        packs=START.packs if packs is None else packs,
        size_bytes=START.size_bytes if size_bytes is None else size_bytes,
    )


def adapted(depth: Depth, seen: Seen, *, fixed_packs: bool, fixed_bytes: bool) -> Depth:
    """The depth from now on."""
    if not fixed_packs and seen.waited and seen.lacked_packs:
        depth = replace(depth, packs=max(depth.packs, min(2 * depth.packs, MOST.packs)))
    if fixed_bytes:
        return depth
    size_bytes = depth.size_bytes
    if seen.waited and seen.lacked_bytes:
        size_bytes = min(2 * size_bytes, MOST.size_bytes)
    room = (seen.free_bytes + seen.held_bytes) // MEMORY_SHARE
    return replace(depth, size_bytes=min(size_bytes, max(room, LEAST_BYTES)))
