"""The one owned thread that fetches ahead of the trainer, and the bounded buffer between them.

Invariants: a pack is requested only when it fits in both bounds (packs, bytes), except those of
the micro-batch that the trainer needs next; the bounds count packs asked for and not yet taken,
so the micro-batch in the trainer's hands comes on top; whatever ends the thread is raised in
`take`, every time; the coordinator hears of progress at least every REPORT_S seconds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from dataservice.errors import DataServiceError
from dataservice.rpc.local_client import Pack
from dataservice.wire.codec import pack_digest
from dataservice.wire.messages import StepCells, StepSettings
from trainer_client.batch import MicroBatch, VisionInfo, build_micro_batch
from trainer_client.device import DeviceCopier
from trainer_client.session import (
    PASSING,
    POLL_S,
    Closed,
    Delivered,
    Patience,
    Reminder,
    Session,
    late_error,
)

SLICE_S = 0.25
"""Longest sleep before a waiting thread looks around again."""
REPORT_S = 5.0
RETRY_ATTEMPT = 4
"""Pause after an unanswered GetSteps as if it were this attempt: up to 0.8 s."""
MOST_STEPS_AHEAD = 64
JOIN_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A micro-batch in the buffer. `size_bytes` is what it counts for in the byte bound."""

    batch: MicroBatch
    cells: StepCells
    num_packs: int
    size_bytes: int


def after(cells: StepCells, micro_step: int) -> Delivered:
    """The position behind a micro-step."""
    if micro_step + 1 < len(cells.cells):
        return Delivered(step=cells.step, micro_step=micro_step + 1)
    return Delivered(step=cells.step + 1, micro_step=0)


def make_batch(
    session: Session, cells: StepCells, micro_step: int, packs: list[Pack], *, digests: bool
) -> MicroBatch:
    """The micro-batch of one cell on the CPU, its meta complete but for `waited_s`."""
    places = cells.cells[micro_step]
    meta: dict[str, Any] = {
        "step": cells.step,
        "micro_step": micro_step,
        "dp_rank": session.request.dp_rank,
        "plan_digest": session.opened.plan_digest,
        "pack_ids": [place.pack_id for place in places],
        "pack_numbers": [place.number for place in places],
        "loss_tokens": cells.loss_tokens,
        "num_images": cells.num_images[micro_step],
        "ranks_without_images": cells.ranks_without_images[micro_step],
        **_settings(session, cells.settings),
        "num_packs": len(places),
        "next_step": (
            None
            if cells.next_step is None
            else _settings(session, cells.next_step)
            | {"num_packs": list(cells.next_step.num_packs)}
        ),
        "waited_s": 0.0,
    }
    if digests:
        meta["digests"] = [pack_digest(arrays) for arrays, _ in packs]
    return build_micro_batch(
        packs,
        meta=meta,
        is_last_micro_step=micro_step + 1 == len(cells.cells),
        vision=VisionInfo.of(session.opened),
    )


def _settings(session: Session, settings: StepSettings) -> dict[str, Any]:
    """As `meta` has them; what limits a picture is max_tiles where pictures are tiles."""
    limit = (
        {"max_tiles": settings.max_tiles}
        if session.opened.tile
        else {"max_pixels": settings.max_pixels}
    )
    return {"pack_length": settings.pack_length, **limit}


class Prefetcher:
    """Owns the thread. `take` is for one consumer at a time."""

    def __init__(
        self,
        session: Session,
        *,
        copier: DeviceCopier,
        max_packs: int,
        max_bytes: int,
        digests: bool,
    ) -> None:
        self._session = session
        self._copier = copier
        self._max_packs, self._max_bytes = max_packs, max_bytes
        self._digests = digests
        opened, request = session.opened, session.request
        packs_a_step = request.micro_steps * request.packs_per_cell
        self._look_ahead = min(MOST_STEPS_AHEAD, max(2, 1 + -(-max_packs // packs_a_step)))
        # owned by the thread
        self._known: dict[int, StepCells] = {}
        self._step, self._micro_step = opened.first_step, opened.first_micro_step
        self._asked_at = -1
        self._held_back = -1
        self._end_step = -1
        self._reported_at = time.monotonic()
        # guarded by _changed
        self._changed = threading.Condition()
        self._ready: deque[Ready] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self.held_packs = self.held_bytes = 0
        self.peak_packs = self.peak_bytes = 0
        self.received_packs = self.received_bytes = 0
        name = f"pack-stream-{request.dp_rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # ---- the trainer's side ---------------------------------------------------------------------

    def take(self, timeout_s: float) -> Ready | None:
        """The next micro-batch, its `meta["waited_s"]` filled in; None at the end of the data."""
        started, reminder = time.monotonic(), Reminder()
        with self._changed:
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
                self._changed.wait(min(left_s, SLICE_S))
            ready = self._ready.popleft()
            waited_s = time.monotonic() - started
            ready.batch.meta["waited_s"] = waited_s
            self._session.add_waited(waited_s)
            self._session.delivered = after(ready.cells, ready.batch.micro_step)
            self.held_packs -= ready.num_packs
            self.held_bytes -= ready.size_bytes
            self._changed.notify_all()
        return ready

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
                while self._ready:
                    self._idle()
            self._session.report()
        except Closed:
            return
        except BaseException as error:  # raised again in take(), whatever it is
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _wants_steps(self) -> bool:
        ahead = len(self._known)
        if ahead == 0:
            return True
        if self._step + ahead == self._end_step or self._asked_at == self._step:
            return False
        return ahead < self._look_ahead

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
                first, self._look_ahead - ahead, wait_s=POLL_S if patient else 0.0
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
            self._wait_for_room(place.size_bytes)
            packs.append(
                self._session.fetch_pack(
                    self._known, self._step, self._micro_step, number, patience
                )
            )
            size_bytes = sum(array.nbytes for array in packs[-1][0].values())
            held += size_bytes
            self._hold(0, size_bytes - place.size_bytes)
            self.received_packs += 1
            self.received_bytes += size_bytes
        batch = make_batch(self._session, cells, self._micro_step, packs, digests=self._digests)
        ready = Ready(
            batch=self._copier.stage(batch), cells=cells, num_packs=len(packs), size_bytes=held
        )
        position = after(cells, self._micro_step)
        if position.step != self._step:
            del self._known[self._step]
        self._step, self._micro_step = position.step, position.micro_step
        with self._changed:
            self._ready.append(ready)
            self._changed.notify_all()

    def _wait_for_room(self, size_bytes: int) -> None:
        with self._changed:
            while self._ready and (
                self.held_packs + 1 > self._max_packs
                or self.held_bytes + size_bytes > self._max_bytes
            ):
                self._idle()
            self._hold(1, size_bytes)

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
        if time.monotonic() - self._reported_at >= REPORT_S:
            self._reported_at = time.monotonic()
            self._changed.release()
            try:
                self._session.report()
            finally:
                self._changed.acquire()
