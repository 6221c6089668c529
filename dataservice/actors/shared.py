"""What the coordinator's desks share; lives in one event loop and changes only there."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from dataservice.actors.holes import HoleLedger
from dataservice.actors.plan_messages import PlanInfo
from dataservice.actors.planner_link import PlannerLink
from dataservice.actors.policies import built_by
from dataservice.actors.quarantine import QUARANTINE, Quarantine
from dataservice.actors.registry import Registry
from dataservice.actors.session import Session
from dataservice.actors.state_log import StateLog
from dataservice.actors.steps import ActiveStep
from dataservice.actors.waiting import Changes
from dataservice.actors.waits import Waits
from dataservice.config import Config, config_to_json
from dataservice.errors import (
    DataServiceError,
    DeadlineExceeded,
    JobHeld,
    ServiceUnavailable,
    SessionFenced,
    StorageError,
)

_LOG = logging.getLogger(__name__)

MAX_WAIT_S = 20.0
"""No call is held longer; the caller asks again."""
STAGER_LEASES = 5
"""A stager may be silent for this many worker leases, so that its restart moves no lanes."""


class Shared:
    def __init__(self, config: Config, planner: PlannerLink, log: StateLog) -> None:
        self.config = config
        self.config_json = config_to_json(config)
        self.planner = planner
        self.log = log
        self.changes = Changes()
        lease_s = config.serving.lease_s
        self.registry = Registry(lease_s=lease_s, stager_lease_s=STAGER_LEASES * lease_s)
        self.holes = HoleLedger(
            max_share=config.errors.max_hole_share,
            max_in_a_row=config.errors.max_holes_in_a_row,
        )
        self.quarantine = Quarantine(Path(config.state_dir) / QUARANTINE, self.holes)
        self.waits = Waits()
        self.counters: Counter[str] = Counter()
        self.sample_counts: dict[str, Counter[str]] = {}
        """Source -> reason of core.tables.REASONS -> samples that were not packed as they are, of
        the windows planned since this start."""
        self.info: PlanInfo | None = None
        self.session: Session | None = None
        self.decoder = ""
        """Fingerprint that all workers share; "" until the first one has joined."""
        self.lane_nodes: tuple[str, ...] = ()
        """Data node of each lane; empty while there is none."""
        self.drained_nodes: set[str] = set()
        """They stage no lane, and workers that come up there leave again."""
        self.planning_waits = ""
        """What the step that is being planned waits for, in words; "" while it does not."""
        self.workers_without_room = 0
        """That Ray has found no node for."""
        self.winding_down = False
        """True: no more steps are planned or handed out, because the service is being stopped."""
        self.on_scale: Callable[[], None] = lambda: None
        """Called when the set of workers or stagers should be looked at."""
        self.superseded: JobHeld | None = None
        """Set once another coordinator owns `state_dir`: nothing is handed out any more."""

    @property
    def no_worker(self) -> str:
        """Why nothing is built while no worker is alive."""
        if not self.workers_without_room:
            return "no worker is alive"
        workers = self.config.workers
        return (
            f"no worker is alive: Ray has no room for {self.workers_without_room} of them; each "
            f"wants a node with resource {workers.resource} and {workers.num_cpus:g} free CPUs "
            "(workers.num_cpus)"
        )

    @property
    def built_by(self) -> str:
        """What a session's packs are built by; "" while `decoder` is."""
        return built_by(self.decoder, self.config.errors.bad_image) if self.decoder else ""

    @property
    def plan(self) -> PlanInfo:
        if self.info is None:
            raise ServiceUnavailable("the coordinator is still opening its index")
        self.check_ownership()
        return self.info

    def check_ownership(self) -> None:
        """Raises ServiceUnavailable, so that clients look for the coordinator that owns the job."""
        if self.superseded is None and self.log.ownership is not None:
            try:
                self.log.ownership.check_if_old()
            except JobHeld as error:
                self.supersede(error)
        if self.superseded is not None:
            raise ServiceUnavailable(str(self.superseded))

    def supersede(self, error: JobHeld) -> None:
        if self.superseded is None:
            _LOG.error("%s", error)
            self.superseded = error
            self.changes.notify()
            self.on_scale()

    def check_open(self) -> None:
        """Raises ServiceUnavailable once the service is being stopped."""
        if self.winding_down:
            raise ServiceUnavailable(
                "the service is being stopped and hands out no more steps; it goes on from here "
                "when it is served again with the same state_dir"
            )

    def current(self, generation: int) -> Session:
        """The open session, if it is the caller's; raises what the caller must be told if not."""
        _ = self.plan  # a coordinator that is still opening has not restored its session yet
        session = self.session
        if session is None or session.generation != generation:
            newer = "none is open" if session is None else f"run {session.run_id} reads it now"
            raise SessionFenced(
                f"session {generation} of job {self.config.job} is over: {newer}; stop this trainer"
            )
        if session.failure is not None:
            raise session.failure
        return session

    def fail(self, session: Session, error: DataServiceError) -> None:
        if isinstance(error, JobHeld):
            self.supersede(error)  # the session is well, at another coordinator
            return
        _LOG.error("session %d failed: %s", session.generation, error)
        if isinstance(error, ServiceUnavailable | DeadlineExceeded | StorageError):
            error = DataServiceError(str(error))  # those say "try again", and this is final
        session.failure = error
        self.changes.notify()

    def find(self, session: Session, pack_id: str) -> tuple[ActiveStep, int] | None:
        """The step and number of a pack, while its step is handed out."""
        for active in session.steps.values():
            i = active.find(pack_id)
            if i is not None:
                return active, i
        return None
