"""`PackStream`: the iterator of micro-batches that a trainer reads.

Invariants: a step's cells come in order, each once; `state_dict` tells what was yielded, never
what was prefetched; a wait ends with a batch, the end of the data, or an error that says who
waited for what; `close` joins the one thread and closes every connection, however often called.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from dataservice.errors import ConfigError, DataServiceError, ResumeRefused, WireError
from dataservice.rpc.client import checked_endpoint
from dataservice.rpc.security import ClientSecurity
from dataservice.wire.messages import OpenSession, ResumeState, SessionOpened, StepCells
from dataservice.wire.schema import decode, decode_plain, encode, encode_plain
from dataservice.wire.states import sealed
from trainer_client.agreement import (
    SharedRunId,
    check_alignment,
    check_first_packs,
    shared_run_id,
)
from trainer_client.batch import MicroBatch
from trainer_client.buffers import BufferPool
from trainer_client.cells import after, make_batch
from trainer_client.depth import MOST, first_depth
from trainer_client.device import DeviceCopier
from trainer_client.layout import ParallelLayout
from trainer_client.metrics import Counts, MetricsFile, StreamStats, served_metrics
from trainer_client.patience import PASSING, Closed, Patience, late_error
from trainer_client.prefetch import Bounds, Prefetcher
from trainer_client.session import POLL_S, Session

STATE_VERSION = 3
CLOSED = "the PackStream was closed"


class PackStream(IterableDataset[MicroBatch]):
    """Micro-batches of one data-parallel rank, prefetched in a thread of its own.

    Every rank of the job opens one; tensor, pipeline and context parallel peers get the same packs,
    which one of them fetches for all on its host.
    For one consuming thread, and any that call `get`. Opened by the first batch, `open()` or
    `get()`, whichever comes first; `load_state_dict` must come before that.

        endpoint        coordinator, "host:port"
        layout          where this process stands in the job; the stream refuses one that is not
                        to read (`layout.reads`), and a service whose documents are not aligned as
                        the layout needs it (`layout.alignment`)
        run_id          the same on all ranks and new at every start of the trainer. Default:
                        `shared_run_id(layout)`, drawn by global rank 0 where torch.distributed is
                        initialised; then every rank of the default group must construct its stream
        device          "cpu", "cuda" or "cuda:N": where the tensors are when a batch is yielded
        normalize       a floating-point dtype: `pixel_values` are what `normalize(batch, dtype)`
                        gives, bit by bit, made on the device while earlier batches compute
        prefetch_packs, prefetch_bytes
                        bounds on packs asked for and not yet yielded. The packs of the micro-batch
                        that comes next are always fetched, or with 0 packs once it is asked for.
                        Default: adaptive, from 8 packs and 256 MiB; doubled where the trainer
                        waited after the bound had held requests back, up to 256 packs and 4 GiB;
                        never more than 1/16 of the free memory (at least 16 MiB)
        device_bytes    bound on batches copied to the device and not yet yielded; that of the next
                        one is always copied
        metrics_file    path of a text file in Prometheus' format (for a node exporter's textfile
                        collector), another for each process; renewed at the end of a step, at most
                        every 5 s, and by `close`
        metrics_port    of a server of the same text at /metrics, another for each process, 0 for
                        any free one (`metrics_address`); it has no TLS and asks for no token, so
                        it is at metrics_host = "127.0.0.1" unless told otherwise
        timeout_s       how long the trainer may wait for one batch, or for all ranks to open
        digests         adds the SHA-256 of every pack to `batch.meta`
        local           packs of workers on this host come through shared memory where it can be
                        had; False: over gRPC, as from other hosts
        security        certificates and token that this end shows. Default: those that the
                        environment names (`ClientSecurity.from_environment`)
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
        normalize: torch.dtype | None = None,
        prefetch_packs: int | None = None,
        prefetch_bytes: int | None = None,
        device_bytes: int = 256 << 20,
        metrics_file: str | os.PathLike[str] | None = None,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
        timeout_s: float = 300.0,
        host: str | None = None,
        digests: bool = False,
        local: bool = True,
        security: ClientSecurity | None = None,
    ) -> None:
        super().__init__()
        at_least = {
            "micro_steps": (micro_steps, 1),
            "packs_per_cell": (packs_per_cell, 1),
            "prefetch_packs": (prefetch_packs, 0),
            "prefetch_bytes": (prefetch_bytes, 1),
            "device_bytes": (device_bytes, 1),
        }
        for name, (value, least) in at_least.items():
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}, must be at least {least}")
        self._copier = DeviceCopier(device, normalize_to=normalize)
        self._bounds = Bounds(
            packs=prefetch_packs, size_bytes=prefetch_bytes, device_bytes=device_bytes
        )
        self._buffers = BufferPool(
            max_bytes=MOST.size_bytes if prefetch_bytes is None else prefetch_bytes,
            pinned=self._copier.device.type == "cuda",
            device=self._copier.device,
        )
        self._timeout_s = timeout_s
        self._digests, self._local = digests, local
        self._security = ClientSecurity.from_environment() if security is None else security
        self._endpoint = checked_endpoint(endpoint)
        self._layout = layout
        self._run_id = shared_run_id(layout) if run_id is None else run_id
        self._request = OpenSession(
            job=job,
            run_id=str(self._run_id),
            dp_rank=layout.dp_rank,
            dp_size=layout.dp_size,
            micro_steps=micro_steps,
            packs_per_cell=packs_per_cell,
            state=None,
            host=socket.gethostname() if host is None else host,
            wait_s=0.0,
            peer=layout.peer,
            peers=len(layout.readers),
            pid=os.getpid(),
        )
        labels = {"job": job, "dp_rank": layout.dp_rank, "peer": layout.peer}
        self._metrics = None if metrics_file is None else MetricsFile(metrics_file, labels)
        self._state: ResumeState | None = None
        self._session: Session | None = None
        self._prefetcher: Prefetcher | None = None
        self._closer: weakref.finalize[Any, Any] | None = None
        self._is_open = self._closed = False
        self._opening = threading.RLock()
        """Of several threads that open it, one does; `close` does not wait for it."""
        self._counts = Counts()
        self._metrics_server = (
            None
            if metrics_port is None
            else served_metrics(self, labels, host=metrics_host, port=metrics_port)
        )

    # ---- life -----------------------------------------------------------------------------------

    def open(self) -> SessionOpened:
        """Wait until all ranks are there and start to prefetch; what the job's packs look like.

        Raises ResumeRefused when the loaded state cannot be continued exactly, DeadlineExceeded
        naming the missing ranks, ServiceUnavailable when nobody answers.
        """
        session = self._opened()
        if self._prefetcher is None:
            with self._opening:
                if self._prefetcher is None:
                    prefetcher = Prefetcher(
                        session, copier=self._copier, bounds=self._bounds, digests=self._digests
                    )
                    self._close_at_exit(session, prefetcher)
                    self._prefetcher = prefetcher
        return session.opened

    @property
    def info(self) -> SessionOpened:
        """What `open()` returned."""
        if self._session is None:
            raise DataServiceError("the PackStream is not open yet; call open() first")
        return self._session.opened

    def close(self) -> None:
        """End the thread and the connections, and tell the coordinator. Idempotent.

        A forked child closes nothing of its parent's.
        """
        if self._session is not None and not self._session.is_here:
            return  # a forked child has nothing to close, and its locks may be held for ever
        if self._metrics_server is not None:
            self._metrics_server.close()
        if not self._closed and self._counts.batches:
            self._write_metrics(ended=True)
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
        if not self._is_open:
            with self._opening:
                if not self._is_open:
                    self._open_session()
        if self._closed:
            raise DataServiceError(CLOSED)
        assert self._session is not None
        return self._session

    def _open_session(self) -> None:
        if self._closed:
            raise DataServiceError(CLOSED)
        if get_worker_info() is not None:
            raise ConfigError(
                "a PackStream prefetches by itself and cannot be split among DataLoader "
                "workers; use num_workers=0, or iterate over the stream itself"
            )
        session = Session(
            self._endpoint,
            self._request,
            local=self._local,
            allocate=self._buffers.take,
            security=self._security,
        )
        self._session = session
        self._close_at_exit(session, None)
        try:
            session.open(self._timeout_s)
            self._check_place(session)
        except BaseException as error:
            _shut_down(session, None, self._copier, os.getpid())
            self._session = None
            if isinstance(error, Closed):
                raise DataServiceError(CLOSED) from None
            raise
        self._is_open = True

    def _check_place(self, session: Session) -> None:
        """That this rank gets packs of its own, in the form that it needs."""
        layout, opened = self._layout, session.opened
        check_alignment(layout, opened)
        if layout.world_size == 1 or not isinstance(self._run_id, SharedRunId):
            return
        patience = Patience(session.stop, timeout_s=self._timeout_s)
        cells = self._cells(session, opened.first_step, patience)
        check_first_packs(layout, self._run_id, opened, cells, timeout_s=self._timeout_s)

    def _close_at_exit(self, session: Session, prefetcher: Prefetcher | None) -> None:
        """Have the interpreter's exit close what nobody closed, or at once where `close` has been
        called meanwhile."""
        before = self._closer
        self._closer = weakref.finalize(
            self, _shut_down, session, prefetcher, self._copier, os.getpid()
        )
        if before is not None:
            before.detach()
        if self._closed:
            self._closer()

    # ---- batches --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[MicroBatch]:
        """The stream itself: a second loop goes on where the first one stopped."""
        return self

    def __next__(self) -> MicroBatch:
        self.open()
        assert self._prefetcher is not None
        taken = self._prefetcher.take(self._timeout_s)
        if taken is None:
            raise StopIteration
        batch = self._copier.finish(taken.copy)
        self._note_waiting(batch)
        self._state = self._behind(taken.cells, batch.micro_step)
        return batch

    def _note_waiting(self, batch: MicroBatch) -> None:
        ends_step = batch.is_last_micro_step
        batch.meta["step_waited_s"] = self._counts.note(batch.meta["waited_s"], ends_step=ends_step)
        if ends_step:
            self._write_metrics()

    def _write_metrics(self, *, ended: bool = False) -> None:
        if self._metrics is not None and (ended or self._metrics.is_due()):
            self._metrics.write(self.stats())

    def get(self, step: int, micro_step: int) -> MicroBatch:
        """One micro-batch by its address; the iterator and the state stay where they are."""
        if not 0 <= micro_step < self._request.micro_steps:
            raise ConfigError(
                f"micro_step is {micro_step}, must be in 0..{self._request.micro_steps - 1}"
            )
        session = self._opened()
        patience = Patience(session.stop, timeout_s=self._timeout_s)
        try:
            cells = self._cells(session, step, patience)
            if cells is None:
                raise ConfigError(f"step is {step}, but the data ends before it")
            known = {step: cells}
            packs = [
                session.fetch_pack(known, step, micro_step, number, patience)
                for number in range(len(known[step].cells[micro_step]))
            ]
        except Closed:
            raise DataServiceError(CLOSED) from None
        batch = make_batch(session, known[step], micro_step, packs, digests=self._digests)
        batch.meta["waited_s"] = batch.meta["step_waited_s"] = patience.waited_s
        session.add_waited(patience.waited_s)
        return self._copier.move(batch)

    def _cells(self, session: Session, step: int, patience: Patience) -> StepCells | None:
        """None when the data ends before."""
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
                    return None
                held_back_by = f"; step {step} is held back: {steps.blocked_by}"
            if patience.over:
                rank, waited_s = self._request.dp_rank, patience.waited_s
                text = f"rank {rank} waited {waited_s:.3g} s for step {step}{held_back_by}"
                raise late_error(text, session.problem)
            patience.pause(attempt)

    def stats(self) -> StreamStats:
        prefetcher, session = self._prefetcher, self._session
        depth = (
            prefetcher.depth
            if prefetcher
            else first_depth(self._bounds.packs, self._bounds.size_bytes)
        )
        return StreamStats(
            batches=self._counts.batches,
            waited_s=self._counts.waited_s,
            waits=tuple(self._counts.waits),
            steps=self._counts.steps,
            step_waited_s=self._counts.step_waited_s,
            received_packs=prefetcher.received_packs if prefetcher else 0,
            received_bytes=prefetcher.received_bytes if prefetcher else 0,
            ready_batches=prefetcher.ready_batches if prefetcher else 0,
            held_packs=prefetcher.held_packs if prefetcher else 0,
            held_bytes=prefetcher.held_bytes if prefetcher else 0,
            peak_held_packs=prefetcher.peak_packs if prefetcher else 0,
            peak_held_bytes=prefetcher.peak_bytes if prefetcher else 0,
            device_bytes=prefetcher.device_bytes if prefetcher else 0,
            peak_device_bytes=prefetcher.peak_device_bytes if prefetcher else 0,
            prefetch_packs=depth.packs,
            prefetch_bytes=depth.size_bytes,
            retries=session.retries if session else 0,
            local_packs=session.local_packs if session else 0,
            relayed_packs=session.relayed_packs if session else 0,
        )

    @property
    def metrics_address(self) -> str:
        """ "host:port" of its metrics; "" without `metrics_port`."""
        return "" if self._metrics_server is None else self._metrics_server.address

    # ---- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the trainer is, in JSON types, the same on every rank at the same place.

        A few kilobytes. Before the first batch: the state that was loaded, or {} for the
        beginning. Taken inside a step it can be continued with the same grid only.
        """
        if self._state is None:
            return {}
        is_loaded = self._state is self._request.state
        saved = self._state if is_loaded else sealed(self._state)
        state: dict[str, Any] = decode_plain(encode(saved), what="state")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start where `state` says; before the stream is opened. {} is the beginning.

        Raises ResumeRefused for what `state_dict` cannot have given.
        """
        if self._session is not None:
            raise DataServiceError(
                "the PackStream is open already; load the state before the first batch, or make "
                "a new stream"
            )
        loaded = _state_of(state)
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


def _shut_down(
    session: Session, prefetcher: Prefetcher | None, copier: DeviceCopier, pid: int
) -> None:
    if os.getpid() != pid:
        return
    session.interrupt()
    if prefetcher is not None:
        prefetcher.join()
    copier.settle()
    session.say_goodbye()


def _state_of(state: dict[str, Any]) -> ResumeState | None:
    if not isinstance(state, dict):
        raise ResumeRefused(
            f"the state is {type(state).__name__}, should be the dict that state_dict() gave; "
            "{} is the beginning of the data"
        )
    if not state:
        return None
    if state.get("version") != STATE_VERSION:
        raise ResumeRefused(
            f"the state has version {state.get('version')!r}, this client reads version "
            f"{STATE_VERSION}; use the version of the client that wrote it"
        )
    try:
        return decode(ResumeState, encode_plain(state, what="state"))
    except WireError as error:
        raise ResumeRefused(
            f"the state is damaged or was changed: {error}; load another checkpoint, or start "
            "without one"
        ) from None
