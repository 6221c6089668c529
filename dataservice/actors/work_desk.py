"""Work at the coordinator: which worker builds which pack, its leases and failures.

Invariants: a worker whose lease ended, or that wants to end, loses its packs to the others, and
clients learn the new endpoint when they ask; what a worker that ended without a word may have been
building is built isolated, and a pack that ends workers again and again is condemned.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Collection, Mapping

from dataservice.actors.counting_desk import CountingDesk
from dataservice.actors.dealing import Dealer
from dataservice.actors.hole_desk import HoleDesk
from dataservice.actors.policies import decoder_and_policy
from dataservice.actors.registry import Entry, WorkerSeat
from dataservice.actors.session import Session
from dataservice.actors.shared import Shared
from dataservice.actors.sharing import Sharing
from dataservice.actors.steps import ActiveStep
from dataservice.core.spreading import poll_s
from dataservice.core.suspicion import Suspicion, after_loss
from dataservice.errors import (
    ConfigError,
    DataServiceError,
    PackMoved,
    ResumeRefused,
    ServiceUnavailable,
    StaleIndexError,
)
from dataservice.wire.messages import (
    Assignment,
    GetAssignment,
    Ok,
    PackFailed,
    PullWork,
    RegisterWorker,
    Work,
    WorkerRegistered,
)

_LOG = logging.getLogger(__name__)

MAX_WORK_BYTES = 128 << 10
"""Specs in one answer to a worker, some eighty: a millisecond's work."""
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
    def __init__(self, shared: Shared, counting: CountingDesk, holes: HoleDesk) -> None:
        self._shared = shared
        self._holes = holes
        self._counting = counting
        self.dealer = Dealer(shared)
        self._sharing = Sharing(shared)
        self._attempts: Counter[tuple[int, str]] = Counter()
        """Failed builds by (session, pack)."""
        self._complaints: Counter[str] = Counter()

    def forget_failures(self) -> None:
        self._attempts.clear()
        self.dealer.forget_failures()

    def expire(self) -> None:
        workers = self._shared.registry.workers
        expired = self._shared.registry.expired_workers()
        self._lose_workers({w: f"silent for {workers[w].lease_s:g} s" for w in expired})

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
                self._sharing.leaves(worker_id)
        self._shared.changes.notify()

    def drain_now(self, worker_id: str) -> None:
        """What it has built and nobody has fetched, others build anew."""
        self._retire(self._shared.registry.workers[worker_id], "it is to leave now")

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
        seat.draining = request.node in self._shared.drained_nodes
        _LOG.info("worker %s joined on %s at %s", request.worker_id, request.node, request.endpoint)
        if self._shared.session is not None:
            self.dealer.deal_orphans(self._shared.session)
        self._sharing.joined(request.node)
        self._shared.changes.notify()
        return WorkerRegistered(
            lease=seat.lease, lease_s=seat.lease_s, config=self._shared.config_json
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

    def _lose_worker(self, worker_id: str, why: str) -> None:
        self._lose_workers({worker_id: why})

    def _lose_workers(self, gone: Mapping[str, str]) -> None:
        """By id, and why; together, because each look at all packs takes milliseconds."""
        if not gone:
            return
        moved = 0
        for worker_id, why in gone.items():
            seat = self._shared.registry.workers.pop(worker_id)
            self._complaints.pop(worker_id, None)
            self._sharing.forget(worker_id)
            left = self.outstanding(seat)
            moved += len(left)
            if seat.draining and not left:
                _LOG.info("worker %s has left", worker_id)
                continue
            self._shared.counters["workers_lost"] += 1
            suspects = self._suspect(seat, left)
            _LOG.warning(
                "worker %s is gone (%s); %d packs go to others, which decode the pictures of %d of "
                "them in processes of their own",
                worker_id,
                why,
                len(left),
                suspects,
            )
        self._move_packs(gone.keys(), moved)

    def _retire(self, seat: WorkerSeat, why: str) -> None:
        """It can end, having reported its holes; what nobody has fetched from it is built anew."""
        seat.draining = True
        left = self.outstanding(seat)
        self._shared.counters["workers_retired"] += 1
        worker_id = seat.hello.worker_id
        _LOG.info("worker %s retires (%s); %d packs go to others", worker_id, why, len(left))
        self._move_packs({worker_id}, len(left))

    def _suspect(self, seat: WorkerSeat, left: list[Entry]) -> int:
        """One of them may have ended the worker. How many are suspects now."""
        session, stats = self._shared.session, seat.stats
        if session is None or stats is None:
            return 0  # one that never asked has no pack
        reach = frozenset(stats.reach)
        found = 0
        for entry in left:
            active = session.steps[entry.step]
            pack_id = active.planned.pack_ids[entry.pack]
            before = active.suspicions.get(entry.pack, Suspicion())
            unheard_of = entry.sequence > stats.after_sequence  # given since it told its reach
            now = after_loss(
                before,
                in_reach=pack_id in reach or unheard_of,
                under_build=pack_id == seat.builds_alone,
            )
            active.suspicions[entry.pack] = now
            found += now.isolated
            self._shared.counters["packs_suspected"] += now.isolated and not before.isolated
            if now.condemned and now.ends > before.ends:
                self._holes.condemn(session, active, entry.pack, now.ends)
        return found

    def _move_packs(self, workers: Collection[str], left: int) -> None:
        """`left`: how many of them nobody has been given yet."""
        if self._shared.session is not None:
            self.dealer.deal_anew(self._shared.session, workers)
        self._shared.counters["packs_rebuilt"] += left
        self._shared.changes.notify()
        self._shared.on_scale()

    def outstanding(self, seat: WorkerSeat) -> list[Entry]:
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
        if seat.builds_alone not in request.reach:
            seat.builds_alone = ""
        if retires:
            self._retire(seat, request.retiring)
        self._sharing.returned(seat, request)
        self._counting.held(seat, request)
        longest = min(request.wait_s, seat.lease_s / 2)
        until = time.monotonic() + poll_s(longest, random.random())
        while True:
            session = self._shared.session
            generation = session.generation if session is not None else 0
            held_step = session.held_step if session is not None else 0
            work = self._work_for(seat, request.after_sequence, session)
            count = self._counting.give(seat)
            drained = seat.draining and not self.outstanding(seat)
            changed = generation != request.session or self._sharing.is_asked(request.worker_id)
            if work or count or drained or changed:
                break
            # a step that is over is no news: what it held can be let go with the next answer
            if not await self._shared.changes.wait(until, seat.hello.worker_id):
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
            give_back=self._sharing.ask(request.worker_id),
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
        suspicion = active.suspicions.get(i, Suspicion())
        return Assignment(
            sequence=sequence,
            pack_id=pack_id,
            step=active.step,
            micro_step=int(active.micro_step[i]),
            dp_rank=int(active.dp_rank[i]),
            spec=spec,
            holes=self._holes.known(active, i),
            storage_holes=self._attempts[session.generation, pack_id] >= STORAGE_HOLE_ATTEMPTS,
            isolated=suspicion.isolated,
            alone=suspicion.alone,
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
        if request.begins:
            seat.builds_alone = request.pack_id
        else:
            self._check_place(request, *found)
        return self._assignment(session, *found, sequence=0)

    def _check_place(self, request: GetAssignment, active: ActiveStep, i: int) -> None:
        taker = active.worker[i]
        if taker != request.worker_id and taker in self._shared.registry.workers:
            raise PackMoved(
                f"worker {taker} builds pack {request.pack_id} now, no longer {request.worker_id}"
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
        self.dealer.avoid(session, request.pack_id, request.worker_id)
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._attempts[key] - 1))
        asyncio.get_running_loop().call_later(pause_s, self._try_again, session, request.pack_id)
        return Ok()

    def _try_again(self, session: Session, pack_id: str) -> None:
        found = self._shared.find(session, pack_id)
        if found is not None and session is self._shared.session:
            active, i = found
            self.dealer.deal(session, active, [i])
            self._shared.changes.notify()
