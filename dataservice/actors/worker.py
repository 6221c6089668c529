"""A worker: builds the packs it is given, in the order of need, and serves them to clients, over
gRPC or, on its own host, through shared memory.

Invariants: it owns nothing that another worker could not build again; ready bytes are bounded;
a worker whose lease ended registers anew and starts from nothing; one with too many threads that
hang in pictures says so, hands its packs over and ends, and no such thread keeps it from ending.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dataservice.actors.build_queue import Job
from dataservice.actors.building import Builders
from dataservice.actors.member import CALL_TIMEOUT_S, PULL_WAIT_S, RETRY_S, Member
from dataservice.actors.pack_specs import spec_of
from dataservice.actors.waiting import Changes
from dataservice.actors.worker_memory import resident_bytes
from dataservice.actors.worker_tools import IDLE_S, WorkerTools
from dataservice.config import config_from_json
from dataservice.core.packspec import TOKEN_BYTES
from dataservice.errors import (
    DataServiceError,
    DeadlineExceeded,
    LeaseLost,
    ServiceUnavailable,
    SessionFenced,
)
from dataservice.pipeline.images import check_decoders, decoder_fingerprint
from dataservice.rpc.local_server import LocalServer, start_local_server
from dataservice.rpc.security import ClientSecurity, ServerSecurity
from dataservice.rpc.server import PLAIN, start_server
from dataservice.wire.encoded import EncodedPack
from dataservice.wire.messages import (
    Assignment,
    GetAssignment,
    PullWork,
    RegisterWorker,
    StreamPack,
    Work,
    WorkerRegistered,
)

if TYPE_CHECKING:
    from dataservice.actors.member_metrics import MemberMetrics
    from dataservice.obs.metrics import Sheet

_LOG = logging.getLogger(__name__)

STOP_S = 5.0
"""That clients have to fetch what they are waiting for when the worker ends."""
GOODBYE_S = 2.0
MOST_IN_REACH = 64
"""Packs that a worker names as those that it may be building."""


class Worker:
    """Implements rpc.server.DataService and rpc.local_server.PackSource; `run()` serves until
    drained, stopped or orphaned."""

    def __init__(
        self,
        *,
        coordinator: str,
        worker_id: str,
        node: str,
        bind: str = "127.0.0.1:0",
        advertise: str | None = None,
        metrics: bool = True,
        security: ServerSecurity = PLAIN,
    ) -> None:
        check_decoders()
        self.worker_id = worker_id
        self.node = node
        self._bind = bind
        self._advertise = advertise
        self._wants_metrics = metrics
        self._metrics: MemberMetrics | None = None
        self._started_s = time.time()
        self._security = security
        self._member = Member(
            coordinator,
            security=ClientSecurity.of_member(security),
            hello=self._hello,
            joined=self._joined,
            stopping=lambda: self._stopping,
        )
        self._endpoint = ""
        self._changes = Changes()
        self._decoder = decoder_fingerprint()
        self._lease = 0
        self._lease_s = 2.0
        self._sequence = 0
        self._built_before = 0
        self._served_packs = 0
        self._served_bytes = 0
        self._sending_bytes = 0
        self._stopping = False
        self._retiring = ""
        self._returned: list[str] = []
        """Packs given back, until the coordinator has answered to it."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._local: LocalServer | None = None
        self._tools: WorkerTools | None = None
        self._builders: Builders | None = None
        self._threads: list[threading.Thread] = []
        """Those of the builders, and one that counts."""

    # ---- life --------------------------------------------------------------------------------

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await start_server(data=self, bind=self._bind, security=self._security)
        self._endpoint = f"{self._advertise or server.host}:{server.port}"
        self._local = start_local_server(self, self._endpoint)
        if self._wants_metrics:
            self._metrics = await self._start_metrics(server.host)
        try:
            async with aclosing(self._member.answers(self._pull_request)) as answers:
                async for work in answers:
                    self._take(work)
                    if work.drain:
                        break
                    if not self._retiring and not all(t.is_alive() for t in self._threads):
                        _LOG.error("a thread of this worker has ended: it ends as well")
                        break
            await self._say_goodbye()
        finally:
            stops = [server.stop(STOP_S)]
            if self._local is not None:
                stops.append(self._local.stop(STOP_S))
            await asyncio.gather(*stops)
            await self._member.close()
            if self._metrics is not None:
                await self._metrics.stop()
            if self._tools is not None:
                self._tools.close()
            for thread in self._threads:
                await asyncio.to_thread(thread.join, 10.0)

    async def _start_metrics(self, host: str) -> MemberMetrics:
        from dataservice.actors.member_metrics import start_metrics

        return await start_metrics(
            self.sheet, host=host, advertise=self._advertise, security=self._security
        )

    def sheet(self) -> Sheet:
        """Its metrics as they are now."""
        from dataservice.actors.member_metrics import worker_sheet

        return worker_sheet(
            self._tools,
            self._builders,
            started_s=self._started_s,
            served_packs=self._served_packs,
            served_bytes=self._served_bytes,
            sending_bytes=self._sending_bytes,
        )

    async def _say_goodbye(self) -> None:
        """Has its packs go to others at once, rather than when its lease ends; what clients are
        waiting for here, they still get."""
        if self._tools is None:
            return
        why = self._retiring or "it was asked to end"
        goodbye = replace(self._pull_request(), retiring=why, wait_s=0.0)
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._member.call(goodbye)
        except (DataServiceError, TimeoutError) as error:
            _LOG.info("worker %s left without a goodbye: %s", self.worker_id, error)

    def stop(self) -> None:
        """May be called from any thread."""
        self._stopping = True
        self._wake()

    def _hello(self) -> RegisterWorker:
        return RegisterWorker(
            worker_id=self.worker_id,
            node=self.node,
            endpoint=self._endpoint,
            decoder=self._decoder,
            metrics="" if self._metrics is None else self._metrics.address,
        )

    def _joined(self, seat: WorkerRegistered) -> None:
        self._lease, self._lease_s, self._sequence = seat.lease, seat.lease_s, 0
        if self._tools is not None:
            self._tools.queue.start_session(0)
            self._returned.clear()
            return
        self._tools = WorkerTools(config_from_json(seat.config), self._wake, self._ask, self._seat)
        self._builders = Builders(self._tools, self._ask, self._seat)
        self._threads = [*self._builders.threads]
        if self._tools.counting is not None:
            counting = threading.Thread(target=self._tools.counting.run, name="counting")
            self._threads.append(counting)
        for thread in self._threads:
            thread.start()

    def _pull_request(self) -> PullWork:
        tools, builders = self.tools, self.builders
        ready_bytes, ready_packs, queued = tools.queue.figures()
        return PullWork(
            worker_id=self.worker_id,
            lease=self._lease,
            session=tools.queue.session,
            after_sequence=self._sequence,
            wait_s=min(PULL_WAIT_S, self._lease_s / 2),
            ready_bytes=ready_bytes,
            ready_packs=ready_packs,
            queued_packs=queued,
            built_packs=builders.built,
            served_packs=self._served_packs,
            served_bytes=self._served_bytes,
            decode_s=tools.decode_s,
            read_origin_bytes=tools.reader.origin_bytes,
            read_staged_bytes=tools.reader.staged_bytes,
            images=builders.images,
            decoded_bytes=builders.decoded_bytes,
            storage_stalls=builders.stalls,
            storage_retries=tools.reader.retries,
            stuck_reads=tools.reader.stuck_reads,
            stuck_decodes=tools.stuck_decodes,
            memory_bytes=resident_bytes(),
            retiring=self._retire_if_stuck(tools, builders),
            counting=() if tools.counting is None else tools.counting.held(),
            reach=self._reach(tools, builders),
            busy_s=tools.queue.busy_s(),
            decode_threads=tools.decode_threads,
            returned=tuple(self._returned),
        )

    def _reach(self, tools: WorkerTools, builders: Builders) -> tuple[str, ...]:
        """What it may be building until the coordinator hears of it again, as fast as of late."""
        built, self._built_before = builders.built - self._built_before, builders.built
        return tools.queue.reach(min(MOST_IN_REACH, len(builders.threads) + 2 * built))

    def _retire_if_stuck(self, tools: WorkerTools, builders: Builders) -> str:
        """Why this worker wants to end; "" while it does not.

        Nothing but the end of the process gives a thread back that hangs in a decoder. The packs
        that are being built come first: their holes are what keeps the next worker from hanging.
        """
        most, stuck = tools.config.workers.max_stuck_threads, tools.stuck_decodes
        if not self._retiring and stuck >= most:
            self._retiring = (
                f"{stuck} of its threads hang in pictures; workers.max_stuck_threads is {most}"
            )
            _LOG.warning("worker %s builds no more packs: %s", self.worker_id, self._retiring)
            tools.queue.close()
        building = any(thread.is_alive() for thread in builders.threads)
        return "" if building else self._retiring

    def _take(self, work: Work) -> None:
        queue = self.tools.queue
        self.tools.isolated.close_idle(IDLE_S)
        if self._local is not None:
            self._local.close_idle(IDLE_S)
        if work.session != queue.session:
            queue.start_session(work.session)
            self._sequence = 0
            self._changes.notify()
        self._returned = queue.give_back(work.give_back)  # those of the question are moved now
        self.tools.reader.cache_dir = work.cache_dir or None
        queue.forget_before(work.held_step)
        queue.add(*(self._job(work.session, assignment) for assignment in work.assignments))
        self._sequence = max([self._sequence, *(a.sequence for a in work.assignments)])
        if self.tools.counting is not None:
            self.tools.counting.add(work.count)

    def _job(self, session: int, assignment: Assignment) -> Job:
        spec = spec_of(assignment.spec)
        return Job(
            session=session,
            pack_id=assignment.pack_id,
            need=(assignment.step, assignment.micro_step, assignment.dp_rank),
            spec=spec,
            holes=assignment.holes,
            storage_holes=assignment.storage_holes,
            isolated=assignment.isolated,
            alone=assignment.alone,
            takers=assignment.takers,
            size_bytes=TOKEN_BYTES * spec.pack_length + self.tools.patch_bytes * spec.num_patches,
        )

    @property
    def tools(self) -> WorkerTools:
        if self._tools is None:
            raise self._not_joined()
        return self._tools

    @property
    def builders(self) -> Builders:
        if self._builders is None:
            raise self._not_joined()
        return self._builders

    def _not_joined(self) -> ServiceUnavailable:
        return ServiceUnavailable(f"worker {self.worker_id} has not joined the service yet")

    def _wake(self) -> None:
        """From any thread: wakes everybody who waits in the event loop."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changes.notify)

    def _seat(self) -> tuple[str, int]:
        return self.worker_id, self._lease

    def _ask(self, request: object) -> Any:
        """From a thread other than the event loop's."""
        assert self._loop is not None
        answer: Future[Any] = asyncio.run_coroutine_threadsafe(
            self._member.call(request), self._loop
        )
        return answer.result(CALL_TIMEOUT_S + 1)

    # ---- serving -----------------------------------------------------------------------------

    async def stream_pack(self, request: StreamPack) -> AsyncIterator[bytes]:
        pack = await self.whole_pack(request)
        sent = await asyncio.to_thread(pack.compressed) if pack.shrinks else pack
        self._sending_bytes += sent.size_bytes
        try:
            for frame in sent.frames():
                yield frame
                del frame
        finally:
            self._sending_bytes -= sent.size_bytes
        self.taken(request, pack)

    async def whole_pack(self, request: StreamPack) -> EncodedPack:
        """Once it is built; raises what its build, or the wait for it, ended with."""
        tools = self.tools
        if (padding := tools.padding_pack(request.pack_id)) is not None:
            return padding
        until = time.monotonic() + request.wait_s
        tools.queue.want(request.pack_id)
        try:
            while (pack := tools.queue.pack_of(request.pack_id)) is None:
                await self._know(request, until)
                if not await self._changes.wait(min(until, time.monotonic() + 1.0)):
                    if time.monotonic() >= until:
                        raise DeadlineExceeded(
                            f"rank {request.dp_rank} waited {request.wait_s:g} s for worker "
                            f"{self.worker_id} to build pack {request.pack_id}"
                        )
        finally:
            tools.queue.unwant(request.pack_id)
        return pack

    def taken(self, request: StreamPack, pack: EncodedPack) -> None:
        """A client has been given all of it."""
        if self.tools.padding_pack(request.pack_id) is not None:
            return
        self._served_packs += 1
        self._served_bytes += pack.size_bytes
        self.tools.queue.served(request.pack_id, request.peer)

    async def _know(self, request: StreamPack, until: float) -> None:
        """A pack that was not given to this worker (yet) is fetched from the coordinator."""
        while self.tools.queue.session < request.session:
            await self._changes.wait(min(until, time.monotonic() + RETRY_S))
            if time.monotonic() >= until:
                raise ServiceUnavailable(
                    f"worker {self.worker_id} has not heard of session {request.session}"
                )
        self._check_session(request)
        if self.tools.queue.knows(request.pack_id):
            return
        try:
            assignment = await self._member.call(
                GetAssignment(
                    worker_id=self.worker_id,
                    lease=self._lease,
                    session=request.session,
                    pack_id=request.pack_id,
                )
            )
        except LeaseLost as error:
            raise ServiceUnavailable(f"worker {self.worker_id} joins anew: {error}") from error
        self.tools.queue.add(self._job(request.session, assignment))

    def _check_session(self, request: StreamPack) -> None:
        session = self.tools.queue.session
        if session > request.session:
            raise SessionFenced(
                f"session {request.session} is over, this worker builds for session {session}"
            )
