"""How much of their time the ranks of a session wait for workers.

Invariants: a rank's share is of the time between its own reports, whenever they come; the first
report of a rank only starts its clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

LEAST_S = 1.0
"""Reports that span less say nothing yet."""


@dataclass(slots=True)
class _Rank:
    heard: float
    """Monotonic time of the last report."""
    spanned_s: float = 0.0
    waited_s: float = 0.0


class Waits:
    """In the coordinator's event loop."""

    def __init__(self) -> None:
        self.session = 0
        """Generation."""
        self._ranks: dict[tuple[int, int], _Rank] = {}
        """By (rank, peer)."""
        self._share = 0.0

    def note(self, session: int, dp_rank: int, peer: int, waited_s: float) -> None:
        """A report: `waited_s` seconds since the last one."""
        now = time.monotonic()
        if session != self.session:
            self.session, self._share = session, 0.0
            self._ranks.clear()
        rank = self._ranks.get((dp_rank, peer))
        if rank is None:
            self._ranks[dp_rank, peer] = _Rank(heard=now)
            return
        rank.spanned_s += now - rank.heard
        rank.waited_s += waited_s
        rank.heard = now

    def share(self) -> float:
        """Of the rank that waited longest since the last call, 0..1; as before while no rank has
        reported."""
        shares: list[float] = []
        for rank in self._ranks.values():
            if rank.spanned_s >= LEAST_S:
                shares.append(min(1.0, rank.waited_s / rank.spanned_s))
                rank.spanned_s = rank.waited_s = 0.0
        if shares:
            self._share = max(shares)
        return self._share
