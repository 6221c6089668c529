"""Holes at the coordinator: of samples that cannot be had, and of packs that end their workers.

Invariants: a hole is journalled before it is answered, and the first report of it wins; where holes
are not allowed none is recorded or given, and the first report fails the session; samples that are
left out on purpose are holes that nobody reports, whatever is done about others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from dataservice.actors.holes import Hole
from dataservice.actors.policies import failure_of
from dataservice.actors.session import Session
from dataservice.actors.shared import Shared
from dataservice.actors.steps import ActiveStep
from dataservice.errors import DataError, DataServiceError, HoleBudgetExceeded, ServiceUnavailable
from dataservice.obs.logs import bound
from dataservice.wire.messages import HolesDecided, ReportHoles

_LOG = logging.getLogger(__name__)


class HoleDesk:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._policy = shared.config.errors.bad_image

    async def report_holes(self, request: ReportHoles) -> HolesDecided:
        self._shared.registry.worker(request.worker_id, request.lease)
        session = self._shared.session
        found = self._shared.find(session, request.pack_id) if session is not None else None
        if session is None or found is None:
            raise ServiceUnavailable(f"pack {request.pack_id} is needed by nobody any more")
        active, i = found
        with bound(step=active.step, dp_rank=int(active.dp_rank[i]), pack=request.pack_id):
            self._decide(session, active, i, request.holes)
        known = self._shared.holes.of_samples(active.sample_keys(i))
        return HolesDecided(holes=known | active.excluded(i))

    def known(self, active: ActiveStep, i: int) -> dict[str, str]:
        """Key to reason, of the samples of pack i."""
        excluded = active.excluded(i)
        holes = self._shared.holes
        if self._policy == "fail" or not holes.may_be_of(active.sample_marks(i)):
            return excluded
        return self._shared.holes.of_samples(active.sample_keys(i)) | excluded

    def condemn(self, session: Session, active: ActiveStep, i: int, ends: int) -> None:
        """Pack i ended so many workers, though its pictures were decoded elsewhere: all of its
        samples become holes. One that ends workers even so fails the session."""
        pack_id = active.planned.pack_ids[i]
        keys = active.hole_keys(i)
        self._shared.counters["packs_condemned"] += 1
        self._shared.events.note(
            "pack condemned",
            f"pack {pack_id} ended {ends} workers; its samples become holes",
            level="error",
        )
        if self._policy != "fail" and not self._shared.holes.missing(dict.fromkeys(keys, "")):
            samples = ", ".join(active.sample_keys(i))
            self._shared.fail(
                session,
                DataServiceError(
                    f"pack {pack_id} ended {ends} workers that built it, the last of them without "
                    f"any of its samples ({samples}): see the workers' logs"
                ),
            )
            return
        reason = f"{ends} workers ended while they built pack {pack_id}, which it is in"
        try:
            self._decide(session, active, i, dict.fromkeys(keys, reason))
        except (DataError, HoleBudgetExceeded) as error:
            _LOG.error("pack %s: %s", pack_id, error)  # the session has failed with it

    def _decide(
        self, session: Session, active: ActiveStep, i: int, holes: Mapping[str, str]
    ) -> None:
        """Raises what the session fails with, if it does."""
        if self._policy == "fail":
            for key, reason in holes.items():
                error = failure_of(self._hole(active, i, key, reason))
                self._shared.fail(session, error)
                raise error
        for key, reason in self._shared.holes.missing(holes).items():
            hole = self._hole(active, i, key, reason)
            self._shared.log.hole(hole)
            self._shared.holes.add(hole)
            self._shared.quarantine.add(hole)
            self._shared.counters["holes"] += 1
            _LOG.warning("hole: %s", hole)
            self._shared.events.note("hole", f"hole: {hole}", level="warning")
        try:
            self._shared.holes.check_budget(active.number(i))
        except HoleBudgetExceeded as error:
            self._shared.fail(session, error)
            raise

    def _hole(self, active: ActiveStep, i: int, key: str, reason: str) -> Hole:
        member, archive = active.place_of(i, key)
        return Hole(
            key=key,
            reason=reason,
            pack_number=active.number(i),
            policy=self._policy,
            member=member,
            archive=archive,
        )
