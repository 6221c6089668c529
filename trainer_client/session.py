"""One rank's session with the service: open it, learn cells, fetch packs, report progress.

Invariants: every call has a timeout, and a loop of calls ends with its `Patience`; a pack is
handed on only when it is whole, checked and the one asked for; a cell's packs never change, only
where they are fetched from; used after a fork, it refuses. Safe across threads.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dataservice.errors import DataServiceError, PackMoved, WireError
from dataservice.rpc.client import CoordinatorClient
from dataservice.rpc.local_client import Pack
from dataservice.rpc.security import ClientSecurity
from dataservice.wire.layout import Allocate, fresh
from dataservice.wire.messages import (
    GetSteps,
    OpenSession,
    PackPlace,
    Progress,
    SessionOpened,
    StepCells,
    Steps,
    StreamPack,
)
from trainer_client.batch import VisionInfo, check_pack
from trainer_client.fetching import WorkerLink
from trainer_client.patience import PASSING, Closed, Patience, Reminder, late_error
from trainer_client.relay import Relay, relay_of
from trainer_client.watching import Fetch, FetchWatch

LOG = logging.getLogger(__name__)

POLL_S = 10.0
"""Longest long poll; the answer of a call may take GRACE_S longer."""
GRACE_S = 5.0
BUILD_WAIT_S = 10.0
"""How long a worker may take to build a pack before the client asks where it is now."""
SLOWEST_BYTES_S = 2 << 20
"""A link slower than this is treated as a worker that does not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivered:
    """Everything before (step, micro_step) was yielded to the trainer."""

    step: int
    micro_step: int


class Session:
    """Calls of one rank. `request.wait_s` is filled in; its state says where to start."""

    def __init__(
        self,
        endpoint: str,
        request: OpenSession,
        *,
        local: bool = True,
        allocate: Allocate = fresh,
        security: ClientSecurity | None = None,
    ) -> None:
        """With `local`, packs of workers on this host come through shared memory; they all land in
        memory of `allocate`; `security` as rpc.client.CoordinatorClient has it."""
        self.endpoint = endpoint
        self.request = request
        self.stop = threading.Event()
        self.doing = ""
        """What a person who waits should know, in words."""
        self.problem: DataServiceError | None = None
        """The last call's, if it may pass."""
        self.retries = 0
        """Calls of coordinator and workers that failed and were, or will be, made again."""
        self.local_packs = 0
        """Fetched through shared memory."""
        self.relayed_packs = 0
        """That a peer on this host had fetched."""
        self.delivered = Delivered(step=0, micro_step=0)
        self._opened: SessionOpened | None = None
        self._local, self._allocate = local, allocate
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a collected stream is closed in whatever thread
        self._unreported_s = (0.0, 0.0)
        """That the trainer waited, in all and for workers."""
        self._security = security
        self._coordinator = CoordinatorClient(endpoint, security)
        self._workers: dict[str, WorkerLink] = {}
        self._relay: Relay | None = None
        self._watch = FetchWatch(
            self.stop,
            name=f"pack-watch-{request.dp_rank}",
            is_moved=self._is_moved,
            give_up=lambda fetch: self._drop_worker(fetch.endpoint),
        )

    @property
    def opened(self) -> SessionOpened:
        if self._opened is None:
            raise DataServiceError("the session is not open")
        return self._opened

    def trouble(self) -> str:
        """What is waited for, and the last failure that may pass."""
        return f"{self.doing}; {self.problem}" if self.problem is not None else self.doing

    @property
    def is_here(self) -> bool:
        """Whether this process made it, rather than its parent."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        if not self.is_here:
            raise DataServiceError(
                f"this PackStream was opened by process {self._pid} and is used in process "
                f"{os.getpid()} after a fork; open one stream in the process that trains (for a "
                "DataLoader: num_workers=0, the stream prefetches by itself)"
            )

    # ---- coordinator ----------------------------------------------------------------------------

    def open(self, timeout_s: float) -> SessionOpened:
        """Ask until all ranks are there. DeadlineExceeded names the ranks that are missing."""
        patience, attempt = Patience(self.stop, timeout_s=timeout_s), 0
        reminder, who = Reminder(), f"rank {self.request.dp_rank}"
        while True:
            wait_s = patience.left_s(POLL_S)
            try:
                opened = self._call(replace(self.request, wait_s=wait_s), wait_s + GRACE_S)
            except PASSING as error:
                if patience.over:
                    raise self._late(patience, f"{self.endpoint} to answer", error) from error
                reminder.remind(who, f"{self.endpoint} does not answer: {error}", timeout_s)
                attempt += 1
                patience.pause(attempt)
                continue
            if opened.ready:
                break
            missing = ", ".join(str(r) for r in opened.missing_ranks)
            self.doing = opened.waiting_for or "all ranks have come"
            if missing:
                self.doing = self._absent(missing, opened.waiting_for)
            if patience.over:
                raise self._late(patience, f"the session to open: {self.doing}")
            reminder.remind(who, self.doing, timeout_s)
            patience.pause(0)
        self._opened = opened
        if self._local:
            self._relay = relay_of(opened, self.request)
            if self.stop.is_set() and self._relay is not None:
                self._relay.close()  # interrupted meanwhile
        self.delivered = Delivered(step=opened.first_step, micro_step=opened.first_micro_step)
        return opened

    def _absent(self, ranks: str, in_words: str) -> str:
        request = self.request
        job, run = f'job "{request.job}" has {request.dp_size} ranks', f'run id "{request.run_id}"'
        if request.peers > 1 and in_words:
            return f"{job} of {request.peers} peers, and these have not come with {run}: {in_words}"
        more = f" ({in_words})" if in_words else ""
        return f"{job}, and ranks {ranks} have not come with {run}{more}"

    def get_steps(
        self, first_step: int, count: int, *, wait_s: float, failed: tuple[str, ...] = ()
    ) -> Steps:
        """One GetSteps, which also reports progress and the seconds that the trainer waited."""
        return self._steps(self._call, first_step, count, wait_s=wait_s, failed=failed)

    def _steps(
        self,
        call: Callable[[GetSteps, float], Steps],
        first_step: int,
        count: int,
        *,
        wait_s: float,
        failed: tuple[str, ...] = (),
    ) -> Steps:
        delivered, waited = self._take_report()
        question = GetSteps(
            session=self.opened.session,
            dp_rank=self.request.dp_rank,
            first_step=first_step,
            count=count,
            done_step=delivered.step,
            done_micro_step=delivered.micro_step,
            wait_s=wait_s,
            peer=self.request.peer,
            waited_s=waited[0],
            waited_workers_s=waited[1],
            failed=failed,
        )
        try:
            return call(question, wait_s + GRACE_S)
        except Exception:
            self.add_waited(*waited)
            raise

    def report(self, *, closing: bool = False, timeout_s: float = GRACE_S) -> None:
        """Progress when nothing else is asked for. A coordinator that is away is no error."""
        delivered, waited = self._take_report()
        progress = Progress(
            session=self.opened.session,
            dp_rank=self.request.dp_rank,
            done_step=delivered.step,
            done_micro_step=delivered.micro_step,
            waited_s=waited[0],
            waited_workers_s=waited[1],
            closing=closing,
            peer=self.request.peer,
        )
        try:
            self._call(progress, timeout_s)
        except PASSING as error:
            self.add_waited(*waited)
            LOG.info("progress of rank %d not reported: %s", self.request.dp_rank, error)

    def add_waited(self, seconds: float, for_workers_s: float = 0.0) -> None:
        """`for_workers_s`: of them, while a pack was being fetched from a worker."""
        with self._lock:
            before_s, before_workers_s = self._unreported_s
            self._unreported_s = before_s + seconds, before_workers_s + for_workers_s

    def _take_report(self) -> tuple[Delivered, tuple[float, float]]:
        with self._lock:
            waited, self._unreported_s = self._unreported_s, (0.0, 0.0)
            return self.delivered, waited

    def _call(self, message: Any, timeout_s: float) -> Any:
        self.check_process()
        try:
            answer = self._coordinator.call(message, timeout_s=timeout_s)
        except Exception as error:
            if self.stop.is_set():
                raise Closed from error
            if isinstance(error, PASSING):
                self.problem = error
                self.retries += 1
            raise
        self.problem = None
        return answer

    # ---- workers --------------------------------------------------------------------------------

    def fetch_pack(
        self,
        known: dict[int, StepCells],
        step: int,
        micro_step: int,
        number: int,
        patience: Patience,
    ) -> Pack:
        """Pack `number` of a cell. `known` holds the step's cells and gets newer ones on a retry.

        An endpoint that fails is reported and its packs are looked up again; bytes that are wrong
        a second time are an error.
        """
        attempt, wrong = 0, False
        problem: DataServiceError
        while True:
            place = known[step].cells[micro_step][number]
            self.doing = f"pack {place.pack_id} is to come from the worker at {place.endpoint}"
            try:
                fetch = Fetch(
                    step=step, micro_step=micro_step, number=number, endpoint=place.endpoint
                )
                with self._watch.over(fetch):
                    pack = self._stream(place, known[step].settings.pack_length, patience)
                self.problem = None
                return pack
            except WireError as error:
                if wrong:
                    raise
                wrong, problem = True, error
            except PASSING as error:
                problem = error
            attempt += 1
            self.retries += 1
            level = logging.INFO if isinstance(problem, PackMoved) else logging.WARNING
            LOG.log(level, "pack %s from %s: %s", place.pack_id, place.endpoint, problem)
            if patience.over:
                raise self._late(patience, f"pack {place.pack_id}", problem) from problem
            if attempt > 1:
                patience.pause(attempt)
            self._look_up_again(known, step, place.endpoint, problem, patience)
            self.problem = problem

    def _look_up_again(
        self,
        known: dict[int, StepCells],
        step: int,
        endpoint: str,
        problem: DataServiceError,
        patience: Patience,
    ) -> None:
        self._drop_worker(endpoint)
        try:
            steps = self.get_steps(
                step,
                max(known) - step + 1,
                wait_s=patience.left_s(1.0),
                failed=() if problem.answered else (endpoint,),  # one that is slow is no lost one
            )
        except PASSING as error:
            LOG.info("coordinator %s: %s", self.endpoint, error)
            return
        for cells in steps.steps:
            old = known.get(cells.step)
            if old is not None and _pack_ids(old) != _pack_ids(cells):
                raise DataServiceError(
                    f"step {cells.step} was handed out twice with different packs for rank "
                    f"{self.request.dp_rank}; restart the service, then resume from a checkpoint"
                )
            if old is not None:
                known[cells.step] = cells

    def _stream(self, place: PackPlace, pack_length: int, patience: Patience) -> Pack:
        self.check_process()
        request = StreamPack(
            session=self.opened.session,
            pack_id=place.pack_id,
            dp_rank=self.request.dp_rank,
            wait_s=patience.left_s(BUILD_WAIT_S),
            peer=self.request.peer,
        )
        relay = self._relay if place.number >= 0 else None  # every worker has padding packs
        if relay is not None:
            handed_on = self._handed_on(relay, request, pack_length)
            if handed_on is not None:
                return handed_on
            request = replace(request, wait_s=patience.left_s(BUILD_WAIT_S))
        timeout_s = request.wait_s + GRACE_S + place.size_bytes / SLOWEST_BYTES_S
        pack, local = self._fetch(place.endpoint, request, timeout_s)
        self._check(pack, place.pack_id, pack_length)
        if relay is not None:
            relay.put(place.pack_id, pack)
        with self._lock:
            self.local_packs += local
        return pack

    def _handed_on(self, relay: Relay, request: StreamPack, pack_length: int) -> Pack | None:
        """By a peer on this host; None: fetch it, whatever became of it there."""
        pack = relay.take(request, allocate=self._allocate)
        if pack is None:
            return None
        try:
            self._check(pack, request.pack_id, pack_length)
        except WireError as error:
            LOG.warning("pack %s from a peer on this host: %s", request.pack_id, error)
            return None
        with self._lock:
            self.relayed_packs += 1
        return pack

    def _check(self, pack: Pack, pack_id: str, pack_length: int) -> None:
        arrays, meta = pack
        if meta.get("pack_id") != pack_id:
            raise WireError(f"asked for pack {pack_id}, got pack {meta.get('pack_id')}")
        vision = VisionInfo.of(self.opened)
        check_pack(arrays, meta, pack_length=pack_length, vision=vision, align=self.opened.align)

    def _fetch(self, endpoint: str, request: StreamPack, timeout_s: float) -> tuple[Pack, bool]:
        """From a worker; whether through shared memory."""
        try:
            return self._worker(endpoint).fetch(
                request, timeout_s=timeout_s, allocate=self._allocate
            )
        except Exception as error:
            if self.stop.is_set():
                raise Closed from error
            raise

    def _worker(self, endpoint: str) -> WorkerLink:
        with self._lock:
            if self.stop.is_set():
                raise Closed
            if endpoint not in self._workers:
                self._workers[endpoint] = WorkerLink(
                    endpoint, local=self._local, security=self._security
                )
            return self._workers[endpoint]

    def _is_moved(self, fetch: Fetch) -> bool:
        """Whether the coordinator names another worker for the pack by now."""
        steps = self._steps(self._coordinator.call, fetch.step, 1, wait_s=0.0)
        return any(
            cells.cells[fetch.micro_step][fetch.number].endpoint != fetch.endpoint
            for cells in steps.steps
        )

    def _drop_worker(self, endpoint: str) -> None:
        with self._lock:
            client = self._workers.pop(endpoint, None)
        if client is not None:
            client.close()

    def _late(
        self, patience: Patience, what: str, problem: DataServiceError | None = None
    ) -> DataServiceError:
        rank, waited_s = self.request.dp_rank, patience.waited_s
        return late_error(f"rank {rank} waited {waited_s:.3g} s for {what}", problem)

    # ---- the end --------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """End every call in flight; what waits in this session raises Closed."""
        self.stop.set()
        self._coordinator.close()
        if self._relay is not None:
            self._relay.close()
        with self._lock:
            clients, self._workers = list(self._workers.values()), {}
        for client in clients:
            client.close()

    def say_goodbye(self, timeout_s: float = 2.0) -> None:
        """The last progress report, over a connection of its own; after `interrupt`."""
        self._watch.join()
        if self._opened is None:
            return
        self._coordinator = CoordinatorClient(self.endpoint, self._security)
        try:
            self.report(closing=True, timeout_s=timeout_s)
        except (Closed, DataServiceError) as error:
            LOG.info("rank %d left without a goodbye: %s", self.request.dp_rank, error)
        finally:
            self._coordinator.close()


def _pack_ids(cells: StepCells) -> list[list[str]]:
    return [[place.pack_id for place in cell] for cell in cells.cells]
