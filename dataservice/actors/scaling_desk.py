"""How many workers the coordinator wants: a number set by hand, or what core.autoscale decides.

Invariants: a number set by hand holds until it is released; a coordinator that was started again
goes on with the number and the hand that the keeper of the fleet remembers; where nobody keeps the
fleet nothing is decided.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dataservice.actors.fleet_view import FleetNews
from dataservice.actors.registry import WorkerSeat
from dataservice.actors.shared import Shared
from dataservice.core.autoscale import Decision, Limits, Period, State, decide
from dataservice.errors import ConfigError
from dataservice.wire.messages import PullWork, Scaled, ScaleWorkers

_LOG = logging.getLogger(__name__)

PERIOD_S = 6.0
"""Between decisions; trainers that wait report more often."""


class ScalingDesk:
    def __init__(self, shared: Shared, changed: Callable[[], None]) -> None:
        """`changed` is called when the fleet should be looked at."""
        self._shared = shared
        self._changed = changed
        workers = shared.config.workers
        self._settings = workers
        self.by_hand = workers.count is not None
        self._decision = Decision(
            state=State(target=workers.count or workers.min),
            reason=f"workers.count is {workers.count}" if self.by_hand else "the service starts",
        )
        self._room: int | None = None
        """Workers that the data nodes' cores take; None while nobody keeps the fleet."""
        self._since = time.monotonic()
        self._session = 0
        self._stats: dict[str, PullWork] = {}
        """Of each worker, at the last decision."""
        self._period: Period | None = None

    @property
    def target(self) -> int:
        return self._decision.target

    def keeper_says(self, news: FleetNews) -> None:
        first, self._room = self._room is None, news.room
        if not first:
            return
        if news.target is not None:
            self.by_hand = news.by_hand
            reason = "as before the coordinator was started again"
            self._decide(Decision(state=State(target=news.target, settling=True), reason=reason))
        elif not self.by_hand:
            target = max(self._settings.min, min(self._settings.max, news.room))
            reason = f"{target} for the data nodes' cores, to begin with"
            self._decide(Decision(state=State(target=target), reason=reason))

    async def keep(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self.look()

    def look(self) -> None:
        """Once a period."""
        period = self._seen()
        if self.by_hand or self._room is None or not self._settings.autoscale:
            return
        state = self._decision.state
        session = self._shared.session
        generation = 0 if session is None else session.generation
        if generation != self._session:  # whose buffers are empty
            self._session, state = generation, replace(state, settling=True, waiting=False)
        self._decide(decide(state, period, self._limits()))

    def _limits(self) -> Limits:
        least, most, room = self._settings.min, self._settings.max, self._room or 0
        if self._settings.autoscale == "cores" and room < most:
            return Limits(
                least=least, most=max(least, room), why_most="the number of the data nodes' cores"
            )
        return Limits(least=least, most=most)

    def _seen(self) -> Period:
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        seats = self._shared.registry.workers
        before = self._stats
        self._stats = {w: seat.stats for w, seat in seats.items() if seat.stats is not None}
        usable = [seat for seat in seats.values() if not seat.draining]
        served = sum(
            stats.served_packs - before[w].served_packs
            for w, stats in self._stats.items()
            if w in before
        )
        busy = [
            min(1.0, (stats.busy_s - before[w].busy_s) / (seconds * max(1, stats.decode_threads)))
            for w, stats in self._stats.items()
            if w in before and not seats[w].draining
        ]
        room = max(1, len(usable)) * self._settings.ready_bytes
        self._period = Period(
            seconds=seconds,
            waited_share=self._shared.waits.share(),
            packs_per_s=max(0, served) / seconds,
            busy_share=sum(busy) / len(busy) if busy else 1.0,
            queued_packs=_total(usable, "queued_packs"),
            ready_packs=_total(usable, "ready_packs"),
            ready_share=min(1.0, _total(usable, "ready_bytes") / room),
            alive=len(usable),
            draining=len(seats) - len(usable),
        )
        return self._period

    def _decide(self, decision: Decision) -> None:
        before, self._decision = self._decision, decision
        if decision.target != before.target:
            self._shared.counters["workers_scaled"] += 1
            _LOG.info("workers: %d to %d: %s", before.target, decision.target, decision.reason)
            self._shared.events.note(
                "scaled",
                f"workers wanted: {decision.target} instead of {before.target} ({decision.reason})",
            )
            self._changed()

    async def scale(self, request: ScaleWorkers) -> Scaled:
        settings, before = self._settings, self.target
        if request.workers == 0:
            if not settings.autoscale:
                raise ConfigError(
                    "workers.autoscale is false: give a number of workers, or set it to cores or "
                    "nodes in the config"
                )
            self.by_hand = False
            state = State(target=before, settling=True)
            self._decide(Decision(state=state, reason="no longer set by hand"))
        elif settings.min <= request.workers <= settings.max:
            self.by_hand = True
            self._decide(Decision(state=State(target=request.workers), reason="set by hand"))
        else:
            raise ConfigError(
                f"workers = {request.workers}: workers.min = {settings.min} and "
                f"workers.max = {settings.max} bound it; change them in the config"
            )
        self._changed()
        return Scaled(before=before, target=self.target, reason=self._decision.reason)

    def status(self) -> dict[str, Any]:
        period = self._period
        return {
            "target_workers": self.target,
            "scaling": {
                "by_hand": self.by_hand,
                "reason": self._decision.reason,
                "waited_share": 0.0 if period is None else round(period.waited_share, 4),
                "busy_share": 0.0 if period is None else round(period.busy_share, 4),
                "packs_per_s": 0.0 if period is None else round(period.packs_per_s, 2),
                "ready_share": 0.0 if period is None else round(period.ready_share, 4),
            },
        }


def _total(seats: list[WorkerSeat], figure: str) -> int:
    return sum(getattr(seat.stats, figure) for seat in seats if seat.stats is not None)
