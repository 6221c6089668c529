"""Sessions at the coordinator: ranks gather, are handed steps as cells, and tell of their progress.

Invariants: all ranks of a run open the same session, and a newer run fences the one before; what is
handed out is what was planned, however often it is asked for.
"""

from __future__ import annotations

import logging
import time

from dataservice.actors.gathering import Gathering
from dataservice.actors.planning_ahead import STEPS, PlanningAhead
from dataservice.actors.policies import check_policy, decoder_and_policy
from dataservice.actors.resuming import check_excluded, check_state
from dataservice.actors.session import Session
from dataservice.actors.shared import MAX_WAIT_S, Shared
from dataservice.actors.work_desk import WorkDesk
from dataservice.core.plan.check import kind_grids
from dataservice.core.settings import Grid
from dataservice.errors import (
    ConfigError,
    DataServiceError,
    ResumeRefused,
    SessionFenced,
)
from dataservice.wire.messages import (
    GetSteps,
    Ok,
    OpenSession,
    Progress,
    SessionOpened,
    StepCells,
    Steps,
)

_LOG = logging.getLogger(__name__)

PROGRESS = "every rank has moved on"
"""Topic of changes."""


class SessionDesk:
    def __init__(self, shared: Shared, work: WorkDesk) -> None:
        self._shared = shared
        self._work = work
        self._gathering: Gathering | None = None
        """The newest run, while its ranks arrive; it fences one that was still arriving."""
        self._planning = PlanningAhead(shared, work.dealer)

    async def stop(self) -> None:
        await self._planning.stop()

    def restore(self) -> None:
        """Goes on with the session that the journal holds, so that its trainers need no restart."""
        saved = self._shared.log.session
        if saved is None:
            return
        session = Session(
            generation=saved.generation,
            run_id=saved.run_id,
            grid=saved.grid,
            state=saved.state,
            hosts=saved.hosts,
            first=saved.first,
            cursor=saved.cursor,
        )
        self._shared.decoder, policy = decoder_and_policy(saved.built_by)
        self._shared.session = session
        try:
            check_policy(
                saved=policy,
                now=self._shared.config.errors.bad_image,
                what=f"run {saved.run_id}",
            )
            check_excluded(
                saved=saved.excluded,
                exclude=self._shared.config.exclude,
                last_step=saved.planned_until - 1,
                what=f"run {saved.run_id}",
                elsewhere="restart the trainers from a checkpoint of an earlier step",
            )
        except ResumeRefused as error:
            self._shared.fail(session, error)
            return
        self._planning.start(session)
        _LOG.info("session %d: run %s goes on", saved.generation, saved.run_id)

    async def open_session(self, request: OpenSession) -> SessionOpened:
        plan = self._shared.plan
        self._shared.check_open()
        if request.job != self._shared.config.job:
            raise ConfigError(
                f"job = {request.job!r}: this service runs job {self._shared.config.job!r}; "
                "connect to the service of your job or change `job`"
            )
        if self._shared.session is not None and request.run_id == self._shared.session.run_id:
            return self._rejoin(self._shared.session, request)
        if request.run_id in self._shared.log.fenced_runs:
            raise self._fenced(request)
        gathering = self._gathering
        if gathering is None or gathering.run_id != request.run_id:
            gathering = Gathering(request)
            self._check_layout(gathering.grid)
            if self._gathering is not None:
                self._shared.log.fence([self._gathering.run_id])
            self._gathering = gathering
            if not self._shared.registry.workers:
                self._shared.decoder = ""  # a new run need not decode as the last one did
            self._shared.changes.notify()
        until = time.monotonic() + min(request.wait_s, MAX_WAIT_S)
        if request.state is not None and not await self._decoder_known(until):
            return self._not_ready(gathering)
        if request.state is not None and gathering.refused is None:
            try:
                check_state(
                    request.state,
                    grid=gathering.grid,
                    job=self._shared.config.job,
                    plan=plan,
                    built_by=self._shared.built_by,
                    exclude=self._shared.config.exclude,
                )
            except DataServiceError as error:
                gathering.refused = error
        try:
            gathering.join(request)
        except DataServiceError:
            self._shared.changes.notify()  # the others are refused, too
            raise
        if gathering.complete(self._patience_s) and await self._decoder_known(until):
            if self._gathering is gathering:
                self._open(gathering)
                self._shared.changes.notify()
        while self._shared.session is None or self._shared.session.run_id != request.run_id:
            if gathering.refused is not None:
                raise gathering.refused
            if not await self._shared.changes.wait(until):
                return self._not_ready(gathering)
            self._shared.check_open()
            if request.run_id in self._shared.log.fenced_runs:
                raise self._fenced(request)
        return self._opened(self._shared.session, request)

    @property
    def _patience_s(self) -> float:
        return self._shared.config.serving.open_timeout_s

    def _not_ready(self, gathering: Gathering) -> SessionOpened:
        waiting_for = gathering.in_words(self._patience_s)
        if not waiting_for and not self._shared.decoder:
            waiting_for = self._shared.no_worker
        return SessionOpened(
            ready=False,
            missing_ranks=gathering.missing(self._patience_s),
            waiting_for=waiting_for,
        )

    def _check_layout(self, grid: Grid) -> None:
        """What must divide the DP size, and the micro-steps that the plan can be divided into."""
        for name, value in (
            ("ranks_per_node", self._shared.config.ranks_per_node),
            ("balance.sync_domain", self._shared.config.plan.balance.sync_domain),
        ):
            if value and grid.dp_size % value:
                raise ConfigError(
                    f"dp_size = {grid.dp_size} is no multiple of {name} = {value}: "
                    "change either of them"
                )
        kind_grids(self._shared.config.plan, grid)

    @staticmethod
    def _fenced(request: OpenSession) -> SessionFenced:
        return SessionFenced(
            f"run {request.run_id} is over: a newer run of job {request.job} has started"
        )

    async def _decoder_known(self, until: float) -> bool:
        while not self._shared.decoder:
            if not await self._shared.changes.wait(until):
                return False
        return True

    def _rejoin(self, session: Session, request: OpenSession) -> SessionOpened:
        same = Gathering(request)
        sizes = (same.grid, same.peers)
        if sizes != (session.grid, session.peers) or request.state != session.state:
            raise ConfigError(
                f"rank {request.dp_rank} joins run {session.run_id} late with other sizes or "
                "another state: give every rank the same, or start all ranks with a new run_id"
            )
        return self._opened(session, request)

    def _open(self, gathering: Gathering) -> None:
        state = gathering.state
        cursor = state.cursor if state is not None else self._shared.plan.start
        micro_step = state.micro_step if state is not None else 0
        generation = self._shared.log.open_session(
            gathering.run_id,
            gathering.grid,
            state,
            gathering.hosts,
            cursor,
            self._shared.built_by,
        )
        session = Session(
            generation=generation,
            run_id=gathering.run_id,
            grid=gathering.grid,
            state=state,
            hosts=gathering.hosts,
            first=(cursor.step, micro_step),
            cursor=cursor,
        )
        self._shared.session = session
        self._gathering = None
        self._work.forget_failures()
        self._shared.counters["sessions"] += 1
        self._planning.start(session)
        _LOG.info(
            "session %d: run %s, %s, from step %d micro-step %d",
            generation,
            session.run_id,
            session.grid,
            cursor.step,
            micro_step,
        )

    def _opened(self, session: Session, request: OpenSession) -> SessionOpened:
        plan, vision = self._shared.plan, self._shared.config.plan.vision
        tiles = vision.mode == "tiles"
        return SessionOpened(
            ready=True,
            session=session.generation,
            plan_digest=plan.digest,
            first_step=session.first_step,
            first_micro_step=session.first_micro_step,
            pack_length=plan.pack_length,
            align=self._shared.config.plan.align,
            patch=vision.patch,
            merge=vision.merge,
            temporal_patch=vision.temporal_patch,
            tile=vision.tile if tiles else 0,
            thumbnail=vision.thumbnail if tiles else False,
            tile_tokens=vision.tile_tokens if tiles else 0,
            mean=vision.mean,
            std=vision.std,
            decoder=self._shared.built_by,
            vocab_size=plan.vocab_size,
            pad_token=plan.pad_token,
            image_token=plan.image_token,
            host_peers=session.host_peers(request.dp_rank, request.host) or (request.peer,),
        )

    async def get_steps(self, request: GetSteps) -> Steps:
        session = self._shared.current(request.session)
        if request.first_step < session.held_step:
            raise ConfigError(
                f"step {request.first_step} is over: every rank has been given all steps before "
                f"{session.done_step}; to repeat it, start a new run from a checkpoint before it"
            )
        self._note_progress(session, request)
        rank = session.ranks[request.dp_rank]
        rank.given = max(rank.given, request.first_step)
        self._work.complain(request.failed)
        until = time.monotonic() + min(request.wait_s, MAX_WAIT_S)
        while True:
            self._shared.check_open()
            found = self._cells(session, request)
            ended = 0 <= session.end_step <= request.first_step
            if found or ended:
                rank.given = max(rank.given, request.first_step + len(found))
                return Steps(steps=tuple(found), end_step=session.end_step)
            if not await self._shared.changes.wait(until, STEPS):
                why = self._blocked_by(session, request.first_step)
                return Steps(steps=(), end_step=session.end_step, blocked_by=why)
            session = self._shared.current(request.session)

    def _cells(self, session: Session, request: GetSteps) -> list[StepCells]:
        endpoint_of = self._shared.registry.endpoint_of
        found: list[StepCells] = []
        for step in range(request.first_step, request.first_step + request.count):
            active = session.steps.get(step)
            cells = active.cells_of(request.dp_rank, endpoint_of) if active is not None else None
            if cells is None:
                break
            found.append(cells)
        return found

    def _blocked_by(self, session: Session, step: int) -> str:
        if not self._shared.registry.workers:
            return self._shared.no_worker
        if step >= session.done_step + self._shared.config.serving.plan_ahead_steps:
            return (
                f"step {step} is beyond the window of serving.plan_ahead_steps = "
                f"{self._shared.config.serving.plan_ahead_steps}: {session.slowest()}"
            )
        if step not in session.steps:
            return self._shared.planning_waits or f"step {step} is being planned"
        return f"no live worker for a pack of step {step}"

    async def report_progress(self, request: Progress) -> Ok:
        session = self._shared.current(request.session)
        self._note_progress(session, request, closing=request.closing)
        return Ok()

    def _note_progress(
        self, session: Session, request: GetSteps | Progress, *, closing: bool = False
    ) -> None:
        self._shared.waits.note(
            session.generation, request.dp_rank, request.peer, request.waited_workers_s
        )
        done = (request.done_step, request.done_micro_step)
        if session.progress(request.dp_rank, request.peer, done, request.waited_s, closing=closing):
            oldest = session.steps.get(session.done_step)
            if oldest is not None:
                self._shared.log.done(oldest.cursor)
            self._shared.changes.notify(PROGRESS)
