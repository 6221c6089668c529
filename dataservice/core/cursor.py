"""The resume state: what was delivered, the same on every rank, a few kilobytes of JSON types.

Invariants: a cursor names the next pack of every lane, so any later step follows from it alone;
nothing in it depends on worker count, node count or timing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """Where a step starts."""

    step: int
    next_pack: int
    """Global number g of the step's first pack."""
    lanes: tuple[tuple[int, int], ...]
    """Per lane: (window, offset in it) of its next pack."""
    next_lane: int
    """The lane that gives pack `next_pack` (or the next one after it that has not ended)."""
