"""How much of their time the ranks of a session wait, and how much of it for workers.

Invariants: a rank's share is of the time between its own reports, whenever they come; the first
report of a rank only starts its clock; of each peer at most LATELY_S / GAP_S reports are kept.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

LEAST_S = 1.0
"""Reports that span less say nothing yet."""
LATELY_S = 30.0
GAP_S = 1.0
"""Reports that are closer are kept as one."""


@dataclass(slots=True)
class _Rank:
    heard: float
    """Monotonic time of the last report."""
    spanned_s: float = 0.0
    waited_s: float = 0.0
    recent: deque[tuple[float, float, float]] = field(default_factory=deque)
    """(when, seconds waited for anything, and for workers, until then), rising; the first is the
    last one of before LATELY_S ago, where there is one."""

    def keep(self, now: float, waited_s: float, waited_workers_s: float) -> None:
        _, waited, for_workers = self.recent[-1] if self.recent else (0.0, 0.0, 0.0)
        if len(self.recent) > 1 and now - self.recent[-2][0] < GAP_S:
            self.recent.pop()
        self.recent.append((now, waited + waited_s, for_workers + waited_workers_s))
        while len(self.recent) > 2 and self.recent[1][0] < now - LATELY_S:
            self.recent.popleft()

    def lately(self) -> tuple[float, float]:
        """Shares of the time waited, for anything and for workers."""
        if len(self.recent) < 2:
            return 0.0, 0.0
        (began, waited, for_workers), (ended, *until) = self.recent[0], self.recent[-1]
        seconds = max(ended - began, LEAST_S)
        return min(1.0, (until[0] - waited) / seconds), min(1.0, (until[1] - for_workers) / seconds)


class Waits:
    """In the coordinator's event loop."""

    def __init__(self) -> None:
        self.session = 0
        """Generation."""
        self._ranks: dict[tuple[int, int], _Rank] = {}
        """By (rank, peer)."""
        self._share = 0.0

    def note(
        self, session: int, dp_rank: int, peer: int, waited_s: float, *, in_all_s: float = 0.0
    ) -> None:
        """A report: `waited_s` seconds for workers since the last one, of `in_all_s`."""
        now = time.monotonic()
        if session != self.session:
            self.session, self._share = session, 0.0
            self._ranks.clear()
        rank = self._ranks.get((dp_rank, peer))
        if rank is None:
            rank = self._ranks[dp_rank, peer] = _Rank(heard=now)
            rank.keep(now, 0.0, 0.0)
            return
        rank.keep(now, in_all_s, waited_s)
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

    def lately(self, session: int, dp_size: int) -> tuple[list[float], list[float]]:
        """By rank, of the last LATELY_S, 0..1: shares of the time waited, for anything and for
        workers; of the peer that waited longest, for the others wait with it."""
        in_all, for_workers = [0.0] * dp_size, [0.0] * dp_size
        if session == self.session:
            for (dp_rank, _), rank in self._ranks.items():
                one, other = rank.lately()
                in_all[dp_rank] = max(in_all[dp_rank], one)
                for_workers[dp_rank] = max(for_workers[dp_rank], other)
        return in_all, for_workers
