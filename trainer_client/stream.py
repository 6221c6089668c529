"""`PackStream`: the iterator of micro-batches that a trainer reads.

Invariants: a step's cells come in order, each once; `state_dict` tells what was yielded, never
what was prefetched; a wait ends with a batch, the end of the data, or an error that says who
waited for what; `close` joins the one thread and closes every connection, however often called.
"""

from __future__ import annotations

import os
import socket
import uuid
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from dataservice.errors import ConfigError, DataServiceError, ResumeRefused
from dataservice.rpc.client import checked_endpoint
from dataservice.wire.messages import OpenSession, ResumeState, SessionOpened, StepCells
from dataservice.wire.schema import decode, decode_plain, encode, encode_plain
from trainer_client.batch import MicroBatch
from trainer_client.buffers import BufferPool
from trainer_client.device import DeviceCopier
from trainer_client.layout import ParallelLayout
from trainer_client.prefetch import Prefetcher, after, make_batch
from trainer_client.session import PASSING, POLL_S, Closed, Patience, Session, late_error

STATE_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamStats:
    """Counters since the stream was opened. Held packs were asked for and not yet yielded."""

    batches: int
    waited_s: float
    """Seconds that the trainer waited for them."""
    received_packs: int
    received_bytes: int
    held_packs: int
    held_bytes: int
    peak_held_packs: int
    peak_held_bytes: int
    retries: int
    local_packs: int
    """That came through shared memory, from workers on this host; those of `get` too."""


class PackStream(IterableDataset[MicroBatch]):
    """Micro-batches of one data-parallel rank, prefetched in a thread of its own.

    Every rank of the job opens one; tensor, pipeline and context parallel peers get the same packs.
    For one consuming thread. Opened by the first batch, `open()` or `get()`, whichever comes first;
    `load_state_dict` must come before that.

        endpoint        coordinator, "host:port"
        layout          where this process stands in the job
        run_id          the same on all ranks and new at every start of the trainer. Default: drawn
                        by global rank 0 where torch.distributed is initialised, then every rank
                        of the default group must construct its stream
        device          "cpu", "cuda" or "cuda:N": where the tensors are when a batch is yielded
        prefetch_packs, prefetch_bytes
                        bounds on packs asked for and not yet yielded. The packs of the micro-batch
                        that comes next are always fetched
        timeout_s       how long the trainer may wait for one batch, or for all ranks to open
        digests         adds the SHA-256 of every pack to `batch.meta`
        local           packs of workers on this host come through shared memory where it can be
                        had; False: over gRPC, as from other hosts
    """

    def __init__(
        self,
        endpoint: str,
        *,
        job: str,
        layout: ParallelLayout,
        micro_steps: int,
        packs_per_cell: int = 1,
        device: str | torch.device = "cpu",
        run_id: str | None = None,
        prefetch_packs: int = 8,
        prefetch_bytes: int = 512 << 20,
        timeout_s: float = 300.0,
        host: str | None = None,
        digests: bool = False,
        local: bool = True,
    ) -> None:
        super().__init__()
        sizes = {
            "micro_steps": micro_steps,
            "packs_per_cell": packs_per_cell,
            "prefetch_packs": prefetch_packs,
            "prefetch_bytes": prefetch_bytes,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1")
        self._copier = DeviceCopier(device)
        self._bounds = (prefetch_packs, prefetch_bytes)
        self._buffers = BufferPool(
            max_bytes=prefetch_bytes,
            pinned=self._copier.device.type == "cuda",
            device=self._copier.device,
        )
        self._timeout_s = timeout_s
        self._digests, self._local = digests, local
        self._endpoint = checked_endpoint(endpoint)
        self._request = OpenSession(
            job=job,
            run_id=_shared_run_id(layout) if run_id is None else run_id,
            dp_rank=layout.dp_rank,
            dp_size=layout.dp_size,
            micro_steps=micro_steps,
            packs_per_cell=packs_per_cell,
            state=None,
            host=socket.gethostname() if host is None else host,
            wait_s=0.0,
        )
        self._state: ResumeState | None = None
        self._session: Session | None = None
        self._prefetcher: Prefetcher | None = None
        self._closer: weakref.finalize[Any, Any] | None = None
        self._closed = False
        self._num_batches, self._waited_s = 0, 0.0

    # ---- life -----------------------------------------------------------------------------------

    def open(self) -> SessionOpened:
        """Wait until all ranks are there and start to prefetch; what the job's packs look like.

        Raises ResumeRefused when the loaded state cannot be continued exactly, DeadlineExceeded
        naming the missing ranks, ServiceUnavailable when nobody answers.
        """
        session = self._opened()
        if self._prefetcher is None:
            max_packs, max_bytes = self._bounds
            self._prefetcher = Prefetcher(
                session,
                copier=self._copier,
                max_packs=max_packs,
                max_bytes=max_bytes,
                digests=self._digests,
            )
            self._close_at_exit(session, self._prefetcher)
        return session.opened

    @property
    def info(self) -> SessionOpened:
        """What `open()` returned."""
        if self._session is None:
            raise DataServiceError("the PackStream is not open yet; call open() first")
        return self._session.opened

    def close(self) -> None:
        """End the thread and the connections, and tell the coordinator. Idempotent."""
        self._closed = True
        if self._closer is not None:
            self._closer()
        self._buffers.trim()

    def __enter__(self) -> PackStream:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _opened(self) -> Session:
        if self._session is not None:
            self._session.check_process()
        if self._closed:
            raise DataServiceError("the PackStream is closed")
        if self._session is None:
            if get_worker_info() is not None:
                raise ConfigError(
                    "a PackStream prefetches by itself and cannot be split among DataLoader "
                    "workers; use num_workers=0, or iterate over the stream itself"
                )
            session = Session(
                self._endpoint, self._request, local=self._local, allocate=self._buffers.take
            )
            self._session = session
            self._close_at_exit(session, None)
            try:
                session.open(self._timeout_s)
            except BaseException as error:
                _shut_down(session, None, os.getpid())
                self._session = None
                if isinstance(error, Closed):
                    raise DataServiceError("the PackStream was closed") from None
                raise
        return self._session

    def _close_at_exit(self, session: Session, prefetcher: Prefetcher | None) -> None:
        """Have the interpreter's exit close what nobody closed."""
        if self._closer is not None:
            self._closer.detach()
        self._closer = weakref.finalize(self, _shut_down, session, prefetcher, os.getpid())

    # ---- batches --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[MicroBatch]:
        """The stream itself: a second loop goes on where the first one stopped."""
        return self

    def __next__(self) -> MicroBatch:
        self.open()
        assert self._prefetcher is not None
        ready = self._prefetcher.take(self._timeout_s)
        if ready is None:
            raise StopIteration
        batch = self._copier.move(ready.batch)
        self._num_batches += 1
        self._waited_s += batch.meta["waited_s"]
        self._state = self._behind(ready.cells, batch.micro_step)
        return batch

    def get(self, step: int, micro_step: int) -> MicroBatch:
        """One micro-batch by its address; the iterator and the state stay where they are."""
        if not 0 <= micro_step < self._request.micro_steps:
            raise ConfigError(
                f"micro_step is {micro_step}, must be in 0..{self._request.micro_steps - 1}"
            )
        session = self._opened()
        patience = Patience(session.stop, timeout_s=self._timeout_s)
        try:
            known = {step: self._cells(session, step, patience)}
            packs = [
                session.fetch_pack(known, step, micro_step, number, patience)
                for number in range(len(known[step].cells[micro_step]))
            ]
        except Closed:
            raise DataServiceError("the PackStream was closed") from None
        batch = make_batch(session, known[step], micro_step, packs, digests=self._digests)
        batch.meta["waited_s"] = patience.waited_s
        session.add_waited(patience.waited_s)
        return self._copier.move(self._copier.stage(batch))

    def _cells(self, session: Session, step: int, patience: Patience) -> StepCells:
        attempt, held_back_by = 0, ""
        while True:
            try:
                steps = session.get_steps(step, 1, wait_s=patience.left_s(POLL_S))
            except PASSING:
                attempt += 1
            else:
                if steps.steps and steps.steps[0].step == step:
                    return steps.steps[0]
                if 0 <= steps.end_step <= step:
                    raise ConfigError(f"step is {step}, but the data ends before {steps.end_step}")
                held_back_by = f"; step {step} is held back: {steps.blocked_by}"
            if patience.over:
                rank, waited_s = self._request.dp_rank, patience.waited_s
                text = f"rank {rank} waited {waited_s:.3g} s for step {step}{held_back_by}"
                raise late_error(text, session.problem)
            patience.pause(attempt)

    def stats(self) -> StreamStats:
        prefetcher, session = self._prefetcher, self._session
        return StreamStats(
            batches=self._num_batches,
            waited_s=self._waited_s,
            received_packs=prefetcher.received_packs if prefetcher else 0,
            received_bytes=prefetcher.received_bytes if prefetcher else 0,
            held_packs=prefetcher.held_packs if prefetcher else 0,
            held_bytes=prefetcher.held_bytes if prefetcher else 0,
            peak_held_packs=prefetcher.peak_packs if prefetcher else 0,
            peak_held_bytes=prefetcher.peak_bytes if prefetcher else 0,
            retries=session.retries if session else 0,
            local_packs=session.local_packs if session else 0,
        )

    # ---- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the trainer is, in JSON types, the same on every rank at the same place.

        A few kilobytes. Before the first batch: the state that was loaded, or {} for the
        beginning. Taken inside a step it can be continued with the same grid only.
        """
        if self._state is None:
            return {}
        state: dict[str, Any] = decode_plain(encode(self._state), what="state")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start where `state` says; before the stream is opened. {} is the beginning."""
        if self._session is not None:
            raise DataServiceError(
                "the PackStream is open already; load the state before the first batch, or make "
                "a new stream"
            )
        if state and state.get("version") != STATE_VERSION:
            raise ResumeRefused(
                f"the state has version {state.get('version')!r}, this client reads version "
                f"{STATE_VERSION}; use the version of the client that wrote it"
            )
        loaded = decode(ResumeState, encode_plain(state, what="state")) if state else None
        self._state = loaded
        self._request = replace(self._request, state=loaded)

    def _behind(self, cells: StepCells, micro_step: int) -> ResumeState:
        request, opened, position = self._request, self.info, after(cells, micro_step)
        return ResumeState(
            version=STATE_VERSION,
            job=request.job,
            plan_digest=opened.plan_digest,
            decoder=opened.decoder,
            cursor=cells.cursor if position.step == cells.step else cells.next_cursor,
            micro_step=position.micro_step,
            dp_size=request.dp_size,
            micro_steps=request.micro_steps,
            packs_per_cell=request.packs_per_cell,
        )


def _shut_down(session: Session, prefetcher: Prefetcher | None, pid: int) -> None:
    if os.getpid() != pid:
        return
    session.interrupt()
    if prefetcher is not None:
        prefetcher.join()
    session.say_goodbye()


def _shared_run_id(layout: ParallelLayout) -> str:
    if dist.is_available() and dist.is_initialized():
        on_gpu = dist.get_backend() == "nccl"
        drawn = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8)
        shared = drawn.to("cuda") if on_gpu else drawn
        dist.broadcast(shared, src=0)
        return bytes(shared.cpu().tolist()).hex()
    if layout.world_size == 1:
        return uuid.uuid4().hex
    raise ConfigError(
        f"run_id is not given, the layout has {layout.world_size} ranks and torch.distributed is "
        "not initialised: initialise it first, or pass the same new run_id on every rank at every "
        "start"
    )
