"""How fast the service goes: what its counters gained over the last seconds.

Invariants: a counter that begins anew, of a worker that joined again or a new session, is no gain
and no loss; rates cover WINDOW_S at most, and less after a start.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from dataservice.actors.registry import Registry, WorkerSeat
from dataservice.actors.session import Session

TICK_S = 1.0
WINDOW_S = 10.0

_COUNTERS = ("served_packs", "images", "decoded_bytes", "busy_s")


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    """Monotonic."""
    totals: tuple[float, ...]
    """Steps, then _COUNTERS without the last, of all that was seen to be gained so far."""
    workers: dict[int, tuple[float, ...]]
    """Lease -> _COUNTERS."""


class Rates:
    """In the coordinator's event loop; `tick` is called every TICK_S."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=round(WINDOW_S / TICK_S) + 1)
        self._session = (0, 0)
        """(generation, done step) at the last tick."""

    def tick(self, session: Session | None, registry: Registry) -> None:
        now = (0, 0) if session is None else (session.generation, session.done_step)
        before, self._session = self._session, now
        workers = {
            seat.lease: tuple(float(getattr(seat.stats, name)) for name in _COUNTERS)
            for seat in registry.workers.values()
            if seat.stats is not None
        }
        steps = float(max(0, now[1] - before[1])) if now[0] == before[0] else 0.0
        gained = [steps, 0.0, 0.0, 0.0]
        last = self._samples[-1] if self._samples else None
        for lease, figures in workers.items():
            earlier = last.workers.get(lease) if last is not None else None
            if earlier is not None:
                for i, (value, old) in enumerate(zip(figures[:-1], earlier[:-1], strict=True), 1):
                    gained[i] += max(0.0, value - old)
        totals = tuple(
            one + more
            for one, more in zip(last.totals if last else (0.0,) * 4, gained, strict=True)
        )
        self._samples.append(_Sample(time.monotonic(), totals, workers))

    def as_json(self, registry: Registry) -> dict[str, float | None]:
        staged = sum(s.stats.bytes_per_s for s in registry.stagers.values() if s.stats is not None)
        gained, seconds = self._gained()
        steps, packs, images, decoded = (value / seconds for value in gained)
        return {
            "steps_per_s": round(steps, 4),
            "packs_per_s": round(packs, 2),
            "images_per_s": round(images, 2),
            "decoded_bytes_per_s": round(decoded),
            "staged_bytes_per_s": round(staged),
        }

    def _gained(self) -> tuple[tuple[float, ...], float]:
        if len(self._samples) < 2:
            return (0.0,) * 4, 1.0
        first, last = self._samples[0], self._samples[-1]
        return (
            tuple(b - a for a, b in zip(first.totals, last.totals, strict=True)),
            max(last.at - first.at, 1e-3),
        )

    def of_worker(self, seat: WorkerSeat) -> tuple[float, float]:
        """(images a second, busy share of its decode threads 0..1) while it was seen lately."""
        if len(self._samples) < 2 or seat.stats is None:
            return 0.0, 0.0
        last = self._samples[-1]
        first = next(one for one in self._samples if seat.lease in one.workers or one is last)
        seconds = last.at - first.at
        if seconds <= 0 or seat.lease not in last.workers:
            return 0.0, 0.0
        old, new = first.workers[seat.lease], last.workers[seat.lease]
        busy = (new[3] - old[3]) / (seconds * max(1, seat.stats.decode_threads))
        return max(0.0, new[1] - old[1]) / seconds, min(1.0, max(0.0, busy))
