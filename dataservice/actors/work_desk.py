"""Work at the coordinator: which worker builds which pack, its leases, failures and holes.

Invariants: a hole is journalled before it is answered, and the first report of it wins; where holes
are not allowed none is recorded or given, and the first report fails the session; a worker whose
lease ended, or that wants to end, loses its packs to the others, and clients learn the new endpoint
when they ask; what a worker that ended without a word had not finished is built isolated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

from dataservice.actors.counting_desk import CountingDesk
from dataservice.actors.holes import Hole
from dataservice.actors.policies import decoder_and_policy, failure_of
from dataservice.actors.registry import Entry, WorkerSeat
from dataservice.actors.session import Session
from dataservice.actors.shared import Shared
from dataservice.actors.steps import ActiveStep
from dataservice.core.dispatch import choose_worker
from dataservice.errors import (
    ConfigError,
    DataServiceError,
    HoleBudgetExceeded,
    ResumeRefused,
    ServiceUnavailable,
    StaleIndexError,
)
from dataservice.wire.messages import (
    Assignment,
    GetAssignment,
    HolesDecided,
    Ok,
    PackFailed,
    PullWork,
    RegisterWorker,
    ReportHoles,
    Work,
    WorkerRegistered,
)

_LOG = logging.getLogger(__name__)

MAX_WORK_BYTES = 4 << 20
"""Specs in one answer to a worker."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
"""Before a failed pack is tried again, on another worker where there is one; doubled each time."""
STORAGE_HOLE_ATTEMPTS = 7
"""After this many failed builds, half a minute at least, a storage error becomes a hole."""
PACK_ATTEMPTS = 10
"""After this many failed builds, two minutes at least, the session fails."""
CALLS_TO_LOSE = 5
"""A worker that clients report this often while it serves nobody loses its lease."""


class WorkDesk:
    def __init__(self, shared: Shared, counting: CountingDesk) -> None:
        self._shared = shared
        self._counting = counting
        self._attempts: Counter[tuple[int, str]] = Counter()
        """Failed builds by (session, pack)."""
        self._avoid: dict[tuple[int, str], frozenset[str]] = {}
        """Workers on which a pack failed."""
        self._complaints: Counter[str] = Counter()
        self._policy = shared.config.errors.bad_image

    def forget_failures(self) -> None:
        self._attempts.clear()
        self._avoid.clear()

    def expire(self) -> None:
        registry = self._shared.registry
        for worker_id in registry.expired_workers():
            self._lose_worker(worker_id, f"silent for {registry.lease_s:g} s")

    def ended(self, worker_id: str, how: str) -> None:
        """Its process is known to have ended: nobody waits for the end of its lease."""
        if worker_id in self._shared.registry.workers:
            self._lose_worker(worker_id, how)

    def drain(self, worker_ids: tuple[str, ...]) -> None:
        if not worker_ids:
            return
        for worker_id in worker_ids:
            if worker_id in self._shared.registry.workers:
                self._shared.registry.workers[worker_id].draining = True
        self._shared.changes.notify()

    def assign(self, session: Session, active: ActiveStep, packs: list[int]) -> None:
        usable = self._shared.registry.usable_workers()
        on_node: dict[str, list[str]] = {}
        for worker_id in usable:
            node = self._shared.registry.workers[worker_id].hello.node
            on_node.setdefault(node, []).append(worker_id)
        for i in packs:
            micro_step, dp_rank = int(active.micro_step[i]), int(active.dp_rank[i])
            lane = int(active.lane[i])
            node = self._shared.lane_nodes[lane] if lane >= 0 and self._shared.lane_nodes else ""
            worker = choose_worker(
                dp_rank,
                micro_step,
                dp_size=session.grid.dp_size,
                home_workers=on_node.get(node, []),
                all_workers=usable,
                avoid=self._avoid.get(
                    (session.generation, active.planned.pack_ids[i]), frozenset()
                ),
            )
            active.worker[i] = worker
            done = session.is_done(active.step, micro_step, dp_rank)
            if worker is not None and lane >= 0 and not done:
                self._shared.registry.give(worker, session.generation, active.step, i)

    def complain(self, endpoints: tuple[str, ...]) -> None:
        """A worker that lives for us but not for its clients is as good as lost."""
        for endpoint in endpoints:
            for worker_id, seat in list(self._shared.registry.workers.items()):
                if seat.hello.endpoint == endpoint:
                    self._complaints[worker_id] += 1
                    if self._complaints[worker_id] >= CALLS_TO_LOSE:
                        self._lose_worker(worker_id, "clients cannot reach it")

    async def register_worker(self, request: RegisterWorker) -> WorkerRegistered:
        _ = self._shared.plan
        self._check_decoder(request)
        self._shared.decoder = request.decoder
        if request.worker_id in self._shared.registry.workers:
            self._lose_worker(request.worker_id, "it registered anew")
        seat = self._shared.registry.seat_worker(request)
        _LOG.info("worker %s joined on %s at %s", request.worker_id, request.node, request.endpoint)
        self._assign_orphans()
        self._shared.changes.notify()
        return WorkerRegistered(
            lease=seat.lease, lease_s=self._shared.registry.lease_s, config=self._shared.config_json
        )

    def _check_decoder(self, request: RegisterWorker) -> None:
        """Every worker decodes as the others do, and as the session's packs were decoded so far."""
        known, session = self._shared.decoder, self._shared.session
        decodes = f"worker {request.worker_id} decodes with {request.decoder}"
        others = [w for w in self._shared.registry.workers if w != request.worker_id]
        if known not in ("", request.decoder) and others:
            raise ConfigError(
                f"{decodes}, the others with {known}: install the same image libraries on every "
                "node"
            )
        saved = self._shared.log.session
        if session is None or saved is None:
            return
        before, _ = decoder_and_policy(saved.built_by)
        if request.decoder == before:
            return
        error = ResumeRefused(
            f"{decodes}, run {session.run_id} began with {before}: install the same image "
            "libraries as then, or start a new run without a state"
        )
        if known:
            raise error
        self._shared.fail(session, error)  # a newer run is about to open

    def _assign_orphans(self) -> None:
        session = self._shared.session
        if session is None:
            return
        for step in sorted(session.steps):
            active = session.steps[step]
            orphans = [i for i in active.order.tolist() if active.worker[i] is None]
            if orphans:
                self.assign(session, active, orphans)

    def _lose_worker(self, worker_id: str, why: str) -> None:
        seat = self._shared.registry.workers.pop(worker_id)
        self._complaints.pop(worker_id, None)
        left = self._outstanding(seat)
        suspects = left if seat.stats is not None else []  # one that never asked has no pack
        if not (seat.draining and not left):
            self._shared.counters["workers_lost"] += 1
            _LOG.warning(
                "worker %s is gone (%s); %d packs go to others, which decode the pictures of %d of "
                "them in processes of their own",
                worker_id,
                why,
                len(left),
                len(suspects),
            )
        self._suspect(suspects)
        self._move_packs(worker_id, left)

    def _retire(self, seat: WorkerSeat, why: str) -> None:
        """It has reported its holes and can end; what nobody has fetched from it is built anew."""
        seat.draining = True
        left = self._outstanding(seat)
        self._shared.counters["workers_retired"] += 1
        worker_id = seat.hello.worker_id
        _LOG.warning("worker %s retires (%s); %d packs go to others", worker_id, why, len(left))
        self._move_packs(worker_id, left)

    def _suspect(self, packs: list[Entry]) -> None:
        """One of them may have ended the worker."""
        session = self._shared.session
        for entry in packs:
            if session is not None and entry.step in session.steps:
                session.steps[entry.step].suspects.add(entry.pack)
                self._shared.counters["packs_suspected"] += 1

    def _move_packs(self, worker_id: str, left: list[Entry]) -> None:
        """`left`: those of them that nobody has been given yet."""
        session = self._shared.session
        if session is not None:
            for step in sorted(session.steps):
                active = session.steps[step]
                mine = [i for i in active.order.tolist() if active.worker[i] == worker_id]
                for i in mine:
                    active.worker[i] = None
                self.assign(session, active, mine)
        self._shared.counters["packs_rebuilt"] += len(left)
        self._shared.changes.notify()
        self._shared.on_scale()

    def _outstanding(self, seat: WorkerSeat) -> list[Entry]:
        """What the worker was given and nobody has been given by it, as far as is known."""
        session = self._shared.session
        if session is None:
            return []
        kept: list[Entry] = []
        for entry in seat.queue:
            active = session.steps.get(entry.step)
            if entry.session != session.generation or active is None:
                continue
            i = entry.pack
            if active.worker[i] == seat.hello.worker_id and not session.is_done(
                entry.step, int(active.micro_step[i]), int(active.dp_rank[i])
            ):
                kept.append(entry)
        return kept

    async def pull_work(self, request: PullWork) -> Work:
        seat = self._shared.registry.worker(request.worker_id, request.lease)
        if seat.stats is not None and request.served_packs > seat.stats.served_packs:
            self._complaints.pop(request.worker_id, None)
        retires = request.retiring and not (seat.stats is not None and seat.stats.retiring)
        seat.stats = request
        if retires:
            self._retire(seat, request.retiring)
        self._counting.held(seat, request)
        until = time.monotonic() + min(request.wait_s, self._shared.registry.lease_s / 3)
        while True:
            session = self._shared.session
            generation = session.generation if session is not None else 0
            held_step = session.held_step if session is not None else 0
            work = self._work_for(seat, request.after_sequence, session)
            count = self._counting.give(seat)
            drained = seat.draining and not self._outstanding(seat)
            if work or count or drained or generation != request.session:
                break
            # a step that is over is no news: what it held can be let go with the next answer
            if not await self._shared.changes.wait(until):
                break
            self._shared.registry.worker(request.worker_id, request.lease)
        stager = self._shared.registry.stagers.get(seat.hello.node)
        return Work(
            session=generation,
            assignments=tuple(work),
            held_step=held_step,
            cache_dir=stager.hello.cache_dir if stager is not None else "",
            drain=drained,
            count=tuple(count),
        )

    def _work_for(
        self, seat: WorkerSeat, after_sequence: int, session: Session | None
    ) -> list[Assignment]:
        if session is None:
            seat.queue.clear()
            return []
        while seat.queue and (
            seat.queue[0].session != session.generation or seat.queue[0].step < session.held_step
        ):
            seat.queue.popleft()
        work: list[Assignment] = []
        size = 0
        for entry in seat.entries_after(after_sequence, session.generation):
            active = session.steps.get(entry.step)
            if active is None or active.worker[entry.pack] != seat.hello.worker_id:
                continue
            work.append(self._assignment(session, active, entry.pack, entry.sequence))
            size += len(work[-1].spec)
            if size > MAX_WORK_BYTES:
                break
        return work

    def _assignment(
        self, session: Session, active: ActiveStep, i: int, sequence: int
    ) -> Assignment:
        pack_id, spec = active.planned.pack_ids[i], active.planned.specs[i]
        holes: dict[str, str] = {}
        if len(self._shared.holes) and self._policy != "fail":
            holes = self._shared.holes.of_samples(active.sample_keys(i))
        return Assignment(
            sequence=sequence,
            pack_id=pack_id,
            step=active.step,
            micro_step=int(active.micro_step[i]),
            dp_rank=int(active.dp_rank[i]),
            spec=spec,
            holes=holes,
            storage_holes=self._attempts[session.generation, pack_id] >= STORAGE_HOLE_ATTEMPTS,
            isolated=i in active.suspects,
            takers=session.takers(int(active.dp_rank[i])),
        )

    async def get_assignment(self, request: GetAssignment) -> Assignment:
        seat = self._shared.registry.worker(request.worker_id, request.lease)
        if seat.stats is not None and seat.stats.retiring:
            raise ServiceUnavailable(
                f"worker {request.worker_id} retires; pack {request.pack_id} is built elsewhere"
            )
        session = self._shared.current(request.session)
        found = self._shared.find(session, request.pack_id)
        if found is None:
            raise ServiceUnavailable(
                f"pack {request.pack_id} belongs to no step that is handed out now "
                f"({session.done_step} to {session.next_step - 1}); ask for the step again"
            )
        return self._assignment(session, *found, sequence=0)

    async def report_holes(self, request: ReportHoles) -> HolesDecided:
        self._shared.registry.worker(request.worker_id, request.lease)
        session = self._shared.session
        found = self._shared.find(session, request.pack_id) if session is not None else None
        if session is None or found is None:
            raise ServiceUnavailable(f"pack {request.pack_id} is needed by nobody any more")
        active, i = found
        if self._policy == "fail":
            for key, reason in request.holes.items():
                error = failure_of(self._hole(active, i, key, reason))
                self._shared.fail(session, error)
                raise error
        for key, reason in self._shared.holes.missing(request.holes).items():
            hole = self._hole(active, i, key, reason)
            self._shared.log.hole(hole)
            self._shared.holes.add(hole)
            self._shared.quarantine.add(hole)
            self._shared.counters["holes"] += 1
            _LOG.warning("hole: %s", hole)
        try:
            self._shared.holes.check_budget(active.number(i))
        except HoleBudgetExceeded as error:
            self._shared.fail(session, error)
            raise
        return HolesDecided(holes=self._shared.holes.of_samples(active.sample_keys(i)))

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

    async def report_pack_failed(self, request: PackFailed) -> Ok:
        self._shared.registry.worker(request.worker_id, request.lease)
        session = self._shared.current(request.session)
        found = self._shared.find(session, request.pack_id)
        if found is None:
            return Ok()
        key = (session.generation, request.pack_id)
        self._attempts[key] += 1
        self._shared.counters["packs_failed"] += 1
        _LOG.warning("pack %s failed on %s: %s", request.pack_id, request.worker_id, request.reason)
        if request.fatal or self._attempts[key] >= PACK_ATTEMPTS:
            kind = StaleIndexError if request.fatal else DataServiceError
            reason = f"pack {request.pack_id} cannot be built: {request.reason}"
            self._shared.fail(session, kind(reason))
            return Ok()
        self._avoid[key] = self._avoid.get(key, frozenset()) | {request.worker_id}
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._attempts[key] - 1))
        asyncio.get_running_loop().call_later(pause_s, self._try_again, session, request.pack_id)
        return Ok()

    def _try_again(self, session: Session, pack_id: str) -> None:
        found = self._shared.find(session, pack_id)
        if found is not None and session is self._shared.session:
            active, i = found
            self.assign(session, active, [i])
            self._shared.changes.notify()
