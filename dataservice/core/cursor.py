"""The resume state: what was delivered, the same on every rank, a few kilobytes of JSON types.

Invariants: a cursor names the next pack of every lane, so any later step follows from it alone;
nothing in it depends on worker count, node count or timing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """Where a step starts. A plan has one stream of packs, a segregated one two: text, vision."""

    step: int
    phase: int
    """In which the last step was taken; the next one is in a later phase when it has ended."""
    next_pack: tuple[int, ...]
    """Per stream: how many of its packs come before the step."""
    lanes: tuple[tuple[int, int], ...]
    """Per lane, one stream's lanes after the other's: (window, offset in it) of its next pack."""
    next_lane: tuple[int, ...]
    """Per stream: its lane, counted from its first, that gives its next pack (or the next one after
    it that has not ended)."""

    @property
    def num_packs(self) -> int:
        """Packs before the step, the global number of its first pack."""
        return sum(self.next_pack)
