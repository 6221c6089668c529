"""The one owned thread that fetches ahead of the trainer, and the bounded buffer between them.

Invariants: a pack is requested only when it fits in both bounds (packs, bytes), except those of
the micro-batch that the trainer needs next; the bounds count packs asked for and not yet taken,
so the micro-batch in the trainer's hands comes on top; copies to the device start in the order of
need as soon as a batch is there, within the bound on device bytes, except that of the next one;
whatever ends the thread is raised in `take`, every time, until the data has been fetched to its
end; the coordinator hears of progress at least every REPORT_S seconds, of many ranks more rarely.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from dataservice.core.spreading import ask_at, report_s
from dataservice.errors import DataServiceError
from dataservice.rpc.local_client import Pack
from dataservice.wire.messages import StepCells
from trainer_client.batch import MicroBatch, VisionInfo
from trainer_client.cells import after, make_batch
from trainer_client.depth import WAITED_S, Seen, adapted, first_depth
from trainer_client.device import Copy, DeviceCopier
from trainer_client.free_memory import free_bytes
from trainer_client.patience import PASSING, Closed, Patience, Reminder, late_error
from trainer_client.session import POLL_S, Session

LOG = logging.getLogger(__name__)

SLICE_S = 0.25
"""Longest sleep before a waiting thread looks around again."""
REPORT_S = 5.0
MEMORY_S = 1.0
"""Between two looks at the free memory, which take a tenth of a millisecond."""
RETRY_ATTEMPT = 4
"""Pause after an unanswered GetSteps as if it were this attempt: up to 0.8 s."""
MOST_STEPS_AHEAD = 64
JOIN_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """None: adaptive, see `depth`."""

    packs: int | None = None
    """0: nothing is requested before the trainer waits for it."""
    size_bytes: int | None = None
    device_bytes: int = 256 << 20
    """Of batches copied to the device and not yet taken."""


@dataclass(kw_only=True, slots=True)
class Ready:
    """A micro-batch in the buffer. `size_bytes` is what it counts for in the byte bound."""

    batch: MicroBatch
    """On the host."""
    cells: StepCells
    num_packs: int
    size_bytes: int
    device_bytes: int
    copy: Copy | None = None
    """Once it is started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    copy: Copy
    cells: StepCells


class Prefetcher:
    """Owns the thread. `take` is for one consumer at a time."""

    def __init__(
        self, session: Session, *, copier: DeviceCopier, bounds: Bounds, digests: bool
    ) -> None:
        self._session = session
        self._copier = copier
        self._bounds = bounds
        self._digests = digests
        opened, request = session.opened, session.request
        self._packs_a_step = request.micro_steps * request.packs_per_cell
        self._pixel_growth = copier.host_growth(VisionInfo.of(opened))
        # owned by the thread
        self._known: dict[int, StepCells] = {}
        self._step, self._micro_step = opened.first_step, opened.first_micro_step
        self._asked_at = -1
        self._ask_at = ask_at(request.dp_rank, request.micro_steps)
        self._report_s = report_s(request.dp_size, REPORT_S)
        self._held_back = -1
        self._end_step = -1
        self._reported_at = time.monotonic()
        self._fetching_since: float | None = None
        """While a pack is being fetched."""
        self._fetched_s = 0.0
        self._looked_at = -MEMORY_S
        # guarded by _changed
        self._changed = threading.Condition()
        self._ready: deque[Ready] = deque()
        self._wanted = self._delivered = False
        self._ended = False
        self._error: BaseException | None = None
        self.depth = first_depth(bounds.packs, bounds.size_bytes)
        self._free_bytes = 0
        self._lacked_packs = self._lacked_bytes = False
        self.held_packs = self.held_bytes = self.device_bytes = 0
        self.peak_packs = self.peak_bytes = self.peak_device_bytes = 0
        self.received_packs = self.received_bytes = 0
        name = f"pack-stream-{request.dp_rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # ---- the trainer's side ---------------------------------------------------------------------

    def take(self, timeout_s: float) -> Taken | None:
        """The next micro-batch, its `meta["waited_s"]` filled in; None at the end of the data."""
        started, reminder = time.monotonic(), Reminder()
        with self._changed:
            told = started, self._fetching_s(started)
            while not self._ready or self._error is not None:
                if self._error is not None:
                    raise self._error
                if self._session.stop.is_set():
                    raise DataServiceError("the PackStream was closed")
                if self._ended:
                    return None
                left_s = started + timeout_s - time.monotonic()
                if left_s <= 0:
                    raise self._late(timeout_s)
                reminder.remind(
                    f"rank {self._session.request.dp_rank}", self._session.trouble(), timeout_s
                )
                if not self._wanted:
                    self._wanted = True
                    self._changed.notify_all()
                self._changed.wait(min(left_s, SLICE_S))
                told = self._add_waited(told)
            self._wanted = False
            ready = self._ready.popleft()
            assert ready.copy is not None  # the first one's is started when it becomes the first
            self.held_packs -= ready.num_packs
            self.held_bytes -= ready.size_bytes
            self.device_bytes -= ready.device_bytes
            self._start_copies()
            waited_s = self._add_waited(told)[0] - started
            ready.batch.meta["waited_s"] = waited_s
            self._delivered = True
            self._session.delivered = after(ready.cells, ready.batch.micro_step)
            if waited_s >= WAITED_S:
                self._adapt(waited=True)
            self._changed.notify_all()
        return Taken(copy=ready.copy, cells=ready.cells)

    @property
    def ready_batches(self) -> int:
        return len(self._ready)

    def _add_waited(self, told: tuple[float, float]) -> tuple[float, float]:
        """What the trainer waited since the time `told`, for the next report, which need not wait
        for the batch; times and seconds spent fetching, up to then and up to now."""
        now = time.monotonic()
        fetched_s = self._fetching_s(now)
        # what the first batch takes says nothing of the workers
        for_workers_s = fetched_s - told[1] if self._delivered else 0.0
        self._session.add_waited(now - told[0], for_workers_s)
        return now, fetched_s

    def _fetching_s(self, now: float) -> float:
        """In which the thread fetched packs from workers, up to `now`."""
        since, fetched_s = self._fetching_since, self._fetched_s
        return fetched_s + (now - since if since is not None else 0.0)

    def _late(self, timeout_s: float) -> DataServiceError:
        session, at = self._session, self._session.delivered
        text = (
            f"rank {session.request.dp_rank} waited {timeout_s:.3g} s for step {at.step} "
            f"micro-step {at.micro_step}; {session.doing}"
        )
        return late_error(text, session.problem)

    def join(self) -> None:
        """Wait for the thread; the session must have been interrupted."""
        with self._changed:
            self._changed.notify_all()
        if self._thread is threading.current_thread():
            return
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            raise DataServiceError(f"the prefetch thread did not end within {JOIN_S:.0f} s")

    # ---- both sides, with _changed held ---------------------------------------------------------

    def _start_copies(self) -> None:
        """Of the batches that fit on the device, in the order of need; the next one always."""
        for place, ready in enumerate(self._ready):
            if ready.copy is not None:
                continue
            held = self.device_bytes + ready.device_bytes
            if place and held > self._bounds.device_bytes:
                return
            try:
                ready.copy = self._copier.start(ready.batch)
            except BaseException as error:  # also of the trainer's thread: no batch is skipped
                self._error = error
                raise
            self.device_bytes = held
            self.peak_device_bytes = max(self.peak_device_bytes, held)

    def _adapt(self, *, waited: bool) -> None:
        fixed = self._bounds
        if fixed.packs is not None and fixed.size_bytes is not None:
            return
        before = self.depth
        self.depth = adapted(
            before,
            Seen(
                waited=waited,
                lacked_packs=self._lacked_packs,
                lacked_bytes=self._lacked_bytes,
                held_bytes=self.held_bytes,
                free_bytes=self._free_bytes,
            ),
            fixed_packs=fixed.packs is not None,
            fixed_bytes=fixed.size_bytes is not None,
        )
        if waited and self.depth != before:
            self._lacked_packs = self._lacked_bytes = False

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._step != self._end_step:
                if self._wants_steps():
                    self._ask_for_steps()
                else:
                    self._fetch_cell()
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            self._report_the_rest()
        except Closed:
            return
        except BaseException as error:  # raised again in take(), whatever it is
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _report_the_rest(self) -> None:
        """Every batch is here, so what the coordinator says does not concern the trainer: a newer
        run may have begun."""
        try:
            with self._changed:
                while self._ready:
                    self._idle()
            self._session.report()
        except DataServiceError as error:
            LOG.info("the last progress of %s was not reported: %s", self._thread.name, error)

    @property
    def _look_ahead(self) -> int:
        """Steps whose places are asked for."""
        return min(MOST_STEPS_AHEAD, max(2, 1 + -(-self.depth.packs // self._packs_a_step)))

    def _wants_steps(self) -> bool:
        ahead = len(self._known)
        if ahead == 0:
            return True
        if self._step + ahead == self._end_step or self._asked_at == self._step:
            return False
        return ahead < self._look_ahead and self._micro_step >= self._ask_at

    def _ask_for_steps(self) -> None:
        session, ahead = self._session, len(self._known)
        first = self._step + ahead
        # A long poll keeps what it says of the trainer's place: none while the trainer moves on,
        # and none before the first answer has told who holds the step back.
        patient = ahead == 0 and not self._ready and self._held_back == first
        self._asked_at, self._reported_at = self._step, time.monotonic()
        if self._held_back != first:
            session.doing = f"{session.endpoint} is to hand out step {first}"
        try:
            steps = session.get_steps(
                first, max(1, self._look_ahead - ahead), wait_s=POLL_S if patient else 0.0
            )
        except PASSING:
            if ahead == 0:
                Patience(session.stop).pause(RETRY_ATTEMPT)
            return
        for cells in steps.steps:
            self._known[cells.step] = cells
        self._end_step = steps.end_step
        if self._known or first == self._end_step:
            return
        self._held_back = first
        blocked_by = steps.blocked_by or "the coordinator gives no reason"
        session.doing = f"step {first} is held back: {blocked_by}"
        with self._changed:
            if self._ready:
                self._idle()

    def _fetch_cell(self) -> None:
        cells, packs, held = self._known[self._step], [], 0
        patience = Patience(self._session.stop)
        for number, place in enumerate(cells.cells[self._micro_step]):
            planned = place.size_bytes * self._pixel_growth
            self._wait_for_room(planned)
            packs.append(self._fetch(number, patience))
            arrays, _ = packs[-1]
            received = sum(array.nbytes for array in arrays.values())
            size_bytes = received + arrays["pixel_values"].nbytes * (self._pixel_growth - 1)
            held += size_bytes
            self._hold(0, size_bytes - planned)
            self.received_packs += 1
            self.received_bytes += received
        batch = self._copier.stage(
            make_batch(self._session, cells, self._micro_step, packs, digests=self._digests)
        )
        position = after(cells, self._micro_step)
        if position.step != self._step:
            del self._known[self._step]
        self._step, self._micro_step = position.step, position.micro_step
        with self._changed:
            self._ready.append(
                Ready(
                    batch=batch,
                    cells=cells,
                    num_packs=len(packs),
                    size_bytes=held,
                    device_bytes=self._copier.device_bytes(batch),
                )
            )
            self._start_copies()
            self._changed.notify_all()

    def _fetch(self, number: int, patience: Patience) -> Pack:
        if time.monotonic() - self._reported_at >= self._report_s:
            self._report()
        began = time.monotonic()
        with self._changed:
            self._fetching_since = began
        try:
            return self._session.fetch_pack(
                self._known, self._step, self._micro_step, number, patience
            )
        finally:
            with self._changed:
                self._fetching_since = None
                self._fetched_s += time.monotonic() - began

    def _report(self) -> None:
        self._reported_at = time.monotonic()
        self._session.report()

    def _wait_for_room(self, size_bytes: int) -> None:
        self._look_at_memory()
        with self._changed:
            while not self._is_needed_next() and not self._has_room(size_bytes):
                self._idle()
            self._hold(1, size_bytes)

    def _look_at_memory(self) -> None:
        now = time.monotonic()
        if self._bounds.size_bytes is not None or now - self._looked_at < MEMORY_S:
            return
        self._looked_at, free = now, free_bytes()
        with self._changed:
            self._free_bytes = free
            self._adapt(waited=False)

    def _is_needed_next(self) -> bool:
        return not self._ready and (self._bounds.packs != 0 or self._wanted)

    def _has_room(self, size_bytes: int) -> bool:
        lacks_packs = self.held_packs + 1 > self.depth.packs
        lacks_bytes = self.held_bytes + size_bytes > self.depth.size_bytes
        self._lacked_packs |= lacks_packs
        self._lacked_bytes |= lacks_bytes
        return not lacks_packs and not lacks_bytes

    def _hold(self, packs: int, size_bytes: int) -> None:
        with self._changed:
            self.held_packs += packs
            self.held_bytes += size_bytes
            self.peak_packs = max(self.peak_packs, self.held_packs)
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _idle(self) -> None:
        """Sleep a slice, or until the trainer takes something; `_changed` is held by the caller."""
        self._changed.wait(SLICE_S)
        if self._session.stop.is_set():
            raise Closed
        if time.monotonic() - self._reported_at >= self._report_s:
            self._changed.release()
            try:
                self._report()
            finally:
                self._changed.acquire()
