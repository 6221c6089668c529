"""The threads of a worker that build its packs.

Invariants: a hole is decided by the coordinator before the pack that has it may be served; a pack
that may end the worker is begun only once the coordinator knows; whoever waits for a pack whose
build fails is told, and so is the coordinator, if it can be.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from dataservice.actors.build_queue import Job
from dataservice.actors.worker_tools import WorkerTools, encoded
from dataservice.errors import StaleIndexError, StorageError, StorageTimeout
from dataservice.obs.logs import bound
from dataservice.wire.encoded import EncodedPack
from dataservice.wire.messages import GetAssignment, PackFailed, ReportHoles

_LOG = logging.getLogger(__name__)


def builders(decode_threads: int) -> list[tuple[str, bool]]:
    """Name, and whether it builds text-only packs alone, of each builder thread.

    A pack often has one picture, so there are as many as decode threads, and one that waits for
    storage, checks and frames meanwhile; text-only packs have one more that no picture holds up.
    """
    return [*((f"builder-{i}", False) for i in range(decode_threads + 1)), ("builder-text", True)]


class Builders:
    def __init__(
        self,
        tools: WorkerTools,
        ask: Callable[[object], Any],
        seat: Callable[[], tuple[str, int]],
    ) -> None:
        """`ask` the coordinator, from any thread; `seat`: id and lease of the worker, as they are
        now. The threads end when the queue of `tools` is closed; the caller starts and joins
        them."""
        self.built = 0
        """Packs; this and the other figures may miss one where two threads count together."""
        self.images = 0
        """In them."""
        self.decoded_bytes = 0
        """Of their pixels."""
        self.stalls = 0
        """Builds that ended because a read did not end in time."""
        self._tools, self._ask, self._seat = tools, ask, seat
        self.threads = [
            threading.Thread(target=self._run, args=(text_only,), name=name)
            for name, text_only in builders(tools.decode_threads)
        ]

    def _run(self, text_only: bool) -> None:
        while (job := self._tools.queue.take(text_only=text_only)) is not None:
            step, micro_step, dp_rank = job.need
            with bound(step=step, micro_step=micro_step, dp_rank=dp_rank, pack=job.pack_id):
                self._build_one(job)  # whose pack is not held here until the next one

    def _build_one(self, job: Job) -> None:
        try:
            pack = self._build(job)
        except Exception as error:
            if not self._tools.closed:
                self._failed(job, error)
            return
        self.built += 1
        self.images += sum(item.kept_images for item in job.spec.items)
        self.decoded_bytes += job.spec.num_patches * self._tools.patch_bytes
        self._tools.queue.finish(job, pack)

    def _build(self, job: Job) -> EncodedPack:
        holes = job.holes
        if job.alone:
            worker_id, lease = self._seat()
            begun = self._ask(
                GetAssignment(
                    worker_id=worker_id,
                    lease=lease,
                    session=job.session,
                    pack_id=job.pack_id,
                    begins=True,
                )
            )
            holes = {**holes, **begun.holes}
        while True:
            built = self._tools.build(job, holes)
            if not built.new_holes:
                return encoded(built)
            # decided by the coordinator before anybody may see the pack: the first report wins
            worker_id, lease = self._seat()
            decided = self._ask(
                ReportHoles(
                    worker_id=worker_id, lease=lease, pack_id=job.pack_id, holes=built.new_holes
                )
            )
            holes = {**holes, **decided.holes}

    def _failed(self, job: Job, error: Exception) -> None:
        if isinstance(error, StorageTimeout):
            self.stalls += 1
        if isinstance(error, StorageError | StaleIndexError):
            _LOG.warning("pack %s: %s", job.pack_id, error)
        else:
            _LOG.exception("pack %s", job.pack_id)
        reason = f"{type(error).__name__}: {error}"
        worker_id, lease = self._seat()
        self._tools.queue.fail(job, StorageError(f"worker {worker_id}: {reason}"))
        try:
            self._ask(
                PackFailed(
                    worker_id=worker_id,
                    lease=lease,
                    session=job.session,
                    pack_id=job.pack_id,
                    reason=reason,
                    fatal=isinstance(error, StaleIndexError),
                )
            )
        except Exception as unheard:
            _LOG.warning(
                "the coordinator did not hear that pack %s failed: %s", job.pack_id, unheard
            )
