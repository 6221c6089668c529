"""One job's hold on a node's cache directory: looks at what is needed, copies it, drops the rest.

Invariants: the directory holds at most the smallest budget of the jobs that share it, copies in
progress included, and no more than its disk has room for; a shard is copied once at a time on a
node, whatever the number of jobs and threads; what a live job needs now is dropped only where that
alone is over the budget; nothing waits for a copy that has no room or does not come; a directory
that cannot be used for now, or is another one suddenly, is reported and tried again.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dataservice.errors import StaleIndexError, StorageError
from dataservice.storage.objects import ObjectStore, Store, staged_name
from dataservice.storage.staging.copying import copy_into
from dataservice.storage.staging.figures import Figures, Rate
from dataservice.storage.staging.folder import CacheFolder, Found
from dataservice.storage.staging.jobs import JobFile, Others
from dataservice.storage.staging.locks import FileLock
from dataservice.storage.staging.needs import Decision, Need, decide
from dataservice.storage.staging.ranges import RANGE_BYTES, CopyStopped, Ranges
from dataservice.storage.staging.throttle import Throttle
from dataservice.storage.staging.troubles import Troubles, part_of_pause

_LOCK_NAME = ".lock"
_LOCK_TIMEOUT_S = 30.0
_LOOK_AGAIN_S = 0.5
"""After which the directory is looked at again when there was nothing to do."""
_WEDGED_S = 2.0
"""A copy of which nothing has come for so long does not keep others from starting."""
_COPIES_THAT_READ = 3
"""Of which each may have all its ranges under way: two that hang do not stop the others."""

_EXPECTED = (StorageError, StaleIndexError, OSError, CopyStopped)


@dataclass(slots=True)
class _Copy:
    """A copy that has its file and its room on the disk."""

    name: str
    need: Need
    fd: int
    unasked: int
    """Ranges that have not been asked for yet."""
    moved: float
    """When something of it came."""

    @property
    def size_bytes(self) -> int:
        return self.need.shard.content_bytes


class StagingArea:
    """`step` does the work, in any number of threads; the other calls are for any thread, too."""

    def __init__(
        self,
        cache_dir: str,
        *,
        budget_bytes: int,
        store: ObjectStore | None = None,
        deadline_s: float = 60.0,
        streams: int = 8,
        max_bytes_per_s: float | None = None,
        folder: CacheFolder | None = None,
        clock: Callable[[], float] = time.monotonic,
        part_of_pause: Callable[[], float] = part_of_pause,
        start_after_s: float = 0.0,
    ) -> None:
        """`streams` ranges of a shard are read at once, by several `step`s together about twice
        as many; `deadline_s` is of one range, `max_bytes_per_s` of all jobs on the node;
        `part_of_pause` says how much of a pause after a failure is kept; nothing is copied before
        `start_after_s`."""
        self.cache_dir = cache_dir
        self.budget_bytes = budget_bytes
        self.streams = streams
        self._clock = clock
        self._stop = threading.Event()
        self._folder = folder or CacheFolder(cache_dir)
        self._troubles = Troubles(cache_dir, clock, part_of_pause)
        self._rate = Rate(clock)
        threads = _COPIES_THAT_READ * streams
        self._own_store: Store | None = None
        if store is None:
            store = self._own_store = Store(threads=threads)
        self._throttle = (
            Throttle(cache_dir, max_bytes_per_s=max_bytes_per_s) if max_bytes_per_s else None
        )
        self._ranges = Ranges(
            store,
            threads=threads,
            deadline_s=deadline_s,
            stopped=self._stop,
            throttle=self._throttle,
            on_stall=self._troubles.stalled,
        )
        self._directory = FileLock(os.path.join(cache_dir, _LOCK_NAME))
        self._job = JobFile(cache_dir)
        self._found = Found({}, {})
        self._state = threading.Lock()  # taken before the directory's
        self._idle = threading.Condition()
        self._alone = False
        self._needs: tuple[Need, ...] = ()
        self._published: tuple[Need, ...] | None = None
        self.starts_at = self._look_at = clock() + start_after_s
        self._begun: deque[_Copy] = deque()
        self._active: dict[str, _Copy] = {}
        self._missing: dict[str, int] = {}
        self._read_through: dict[str, int] = {}
        self._copied_bytes = self._copied_shards = self._evictions = 0
        self._closed = False
        self._patiently(self._enter)

    # ---- what is told to it, and what it tells ---------------------------------------------------

    def update(self, needs: Sequence[Need]) -> None:
        """Replace the list of needs; the next `step` goes by it."""
        self._needs = tuple(needs)
        self._news()

    def figures(self) -> Figures:
        copies, arriving = self._found.copies.copy(), self._found.arriving.copy()
        missing, read_through = self._missing.copy(), self._read_through.copy()
        return Figures(
            cached_bytes=sum(copies.values()) + sum(arriving.values()),
            cached_shards=len(copies),
            copied_bytes=self._copied_bytes,
            copied_shards=self._copied_shards,
            bytes_per_s=self._rate.bytes_per_s(),
            missing_bytes=sum(missing.values()),
            missing_shards=len(missing),
            read_through_bytes=sum(read_through.values()),
            read_through_shards=len(read_through),
            evictions=self._evictions,
            errors=self._troubles.errors,
            stalls=self._troubles.stalls,
            disk_full=self._troubles.disk_full,
            last_error=self._troubles.last_error,
        )

    @property
    def inflight(self) -> int:
        """Copies in progress."""
        return len(self._begun) + len(self._active)

    def settled(self, attempts: int) -> bool:
        """Whether all needs are copied, have no room, or failed so many times in a row, or the
        directory did."""
        if self._begun or self._active:
            return False
        if self._troubles.failures() >= attempts:
            return True
        if self._published is not self._needs:
            return False
        return all(self._troubles.failures(name) >= attempts for name in self._missing.copy())

    def wait(self, timeout_s: float) -> None:
        """Until there may be something to do, at most so long."""
        with self._idle:
            if not self._stop.is_set():
                self._idle.wait(timeout_s)

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Make copies in progress give up soon."""
        self._stop.set()
        self._news()

    def close(self) -> None:
        """Leave the directory, its copies stay; after the end of every `step`."""
        self.stop()
        if self._closed:
            return
        self._closed = True
        with self._state, contextlib.suppress(OSError, StorageError):
            with self._directory.held(_LOCK_TIMEOUT_S):
                self._leave()
        self._leave()
        self._directory.close()
        self._ranges.close()
        if self._throttle is not None:
            self._throttle.close()
        if self._own_store is not None:
            self._own_store.close()

    def _leave(self) -> None:
        while self._begun:
            copy = self._begun.popleft()
            self._folder.give_up(copy.name, copy.fd)
        self._job.close()

    def __enter__(self) -> StagingArea:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- looking ---------------------------------------------------------------------------------

    def step(self) -> bool:
        """Make a copy, or drop some; False when there is nothing to do for now."""
        if self._stop.is_set():
            return False
        with self._state:
            if self._unasked() >= self.streams:
                return False
            changed = False
            if not self._begun and self._clock() >= self._look_at:
                changed = self._patiently(self._look)
            if not self._begun:
                return changed
            copy = self._begun.popleft()
            copy.moved = self._clock()
            self._active[copy.name] = copy
        self._make(copy)
        return True

    def _unasked(self) -> int:
        """Ranges that copies in progress will ask for, before another one may start."""
        wedged = self._clock() - _WEDGED_S
        active = tuple(self._active.values())
        return sum(copy.unasked for copy in active if copy.moved > wedged)

    def _patiently(self, look: Callable[[], bool]) -> bool:
        """False where the directory cannot be used for now."""
        try:
            changed = look()
        except (OSError, StorageError) as error:
            self._look_at = self._clock() + self._troubles.directory_failed(error)
            self._published = None
            self._missing = {
                staged_name(need.shard): need.shard.content_bytes
                for need in self._needs
                if need.copy and staged_name(need.shard) not in self._found.copies
            }
            return False
        self._troubles.went_well()
        return changed

    def _enter(self) -> bool:
        with self._directory.held(_LOCK_TIMEOUT_S):
            self._job.enter()
            self._found = self._folder.scan()
        return True

    def _look(self) -> bool:
        """Decide by the directory as it is, make room and begin copies; False when nothing was
        done."""
        needs, evictions = self._needs, self._evictions
        self._look_at = self._clock() + _LOOK_AGAIN_S
        with self._directory.held(_LOCK_TIMEOUT_S):
            if self._job.enter():
                self._published = None
            others = self._job.others()
            if self._published is not needs or not self._alone or others.num_jobs:
                self._found = self._folder.scan()  # a reader removes a copy that is damaged
                self._drop_damaged(needs, others)
            self._alone = not others.num_jobs
            if self._published is not needs:
                self._tell(needs)
            budget, room = self._room(others)
            present = self._found.copies | self._found.arriving
            decision = decide(
                needs, present, room, others=others.uses, arriving=self._found.arriving
            )
            self._begin(decision, room)
        self._account(needs, decision, budget, room)
        self._published = needs
        return bool(self._begun) or self._evictions > evictions

    def _drop_damaged(self, needs: Sequence[Need], others: Others) -> None:
        """Copies of another size than what they are of, which nobody reads."""
        copies = self._found.copies
        for need in needs:
            name, size = staged_name(need.shard), need.shard.content_bytes
            found, use = copies.get(name, size), others.uses.get(name)
            if found == size or (use is not None and found == use.size_bytes):
                continue
            self._folder.evict(name)
            del copies[name]
            self._troubles.damaged(need, found)

    def _tell(self, needs: Sequence[Need]) -> None:
        try:
            self._job.publish(self.budget_bytes, needs)
        except OSError as error:
            self._troubles.untold(error)

    def _room(self, others: Others) -> tuple[int, int]:
        """The directory's budget, and how much of it the disk has room for."""
        budget = self.budget_bytes
        if others.budget_bytes is not None and others.budget_bytes != budget:
            budget = min(budget, others.budget_bytes)
            self._troubles.two_budgets(self.budget_bytes, others.budget_bytes)
        room = min(budget, self._held_bytes() + self._folder.free_bytes())
        found_full = self._troubles.room()
        return budget, room if found_full is None else min(room, found_full)

    def _held_bytes(self) -> int:
        found = self._found
        return sum(tuple(found.copies.values())) + sum(tuple(found.arriving.values()))

    def _begin(self, decision: Decision, room: int) -> None:
        """Copies to make next, as many as keep all streams busy."""
        held = self._held_bytes()
        evict = deque(decision.evict)
        ranges = 0
        for need in decision.copy:
            name, size = staged_name(need.shard), need.shard.content_bytes
            if self._troubles.paused(name) or name in self._active:
                continue
            while held + size > room and evict:
                held -= self._evict(evict.popleft())
            if held + size > room:
                return
            if not self._reserve(name, need, held):
                if self._troubles.room() is not None:
                    return
                continue
            held += size
            ranges += max(1, -(-need.shard.size_bytes // RANGE_BYTES))
            if ranges >= self.streams:
                return
        while held > room and evict:
            held -= self._evict(evict.popleft())

    def _reserve(self, name: str, need: Need, held_bytes: int) -> bool:
        size = need.shard.content_bytes
        try:
            fd = self._folder.begin(name, size)
        except OSError as error:
            self._troubles.failed(name, need, error, held_bytes)
            self._look_at = self._clock()
            return False
        if fd is not None:
            self._found.arriving[name] = size
            unasked = -(-need.shard.size_bytes // RANGE_BYTES)
            self._begun.append(_Copy(name, need, fd, unasked, self._clock()))
        return True

    def _evict(self, name: str) -> int:
        """The bytes that are free now."""
        self._folder.evict(name)
        self._evictions += 1
        return self._found.copies.pop(name)

    def _account(self, needs: Sequence[Need], decision: Decision, budget: int, room: int) -> None:
        """What is to come and what has no room, for the figures and the log."""
        coming = {staged_name(need.shard): need.shard.content_bytes for need in decision.copy}
        arriving = self._found.arriving
        for need in needs:
            if need.copy and (name := staged_name(need.shard)) in arriving:
                coming[name] = need.shard.content_bytes
        self._missing = coming
        without = (*decision.too_large, *decision.no_room)
        through = {staged_name(need.shard): need.shard.content_bytes for need in without}
        self._read_through = through
        for need in decision.too_large:
            self._troubles.too_large(need, room, of_budget=room == budget)
        if room == budget or not without:
            self._troubles.disk_has_room()
        else:
            self._troubles.disk_has_no_room(room, budget, tuple(through.values()))

    # ---- copying ---------------------------------------------------------------------------------

    def _make(self, copy: _Copy) -> None:
        error: Exception | None = None
        try:
            copy_into(
                copy.fd,
                copy.need,
                self._ranges,
                window=self.streams,
                on_range=lambda size, unasked: self._came(copy, size, unasked),
            )
        except Exception as failure:
            error = failure
        self._end(copy, error)
        if error is not None and not isinstance(error, _EXPECTED):
            raise error

    def _end(self, copy: _Copy, error: Exception | None) -> None:
        with self._state:
            del self._active[copy.name]
            error = error or self._publish(copy)
            if error is not None:
                self._folder.give_up(copy.name, copy.fd)
            self._found.arriving.pop(copy.name, None)
            if error is None:
                self._found.copies[copy.name] = copy.size_bytes
                self._missing.pop(copy.name, None)
                self._copied_bytes += copy.size_bytes
                self._copied_shards += 1
        if error is None:
            self._troubles.went_well(copy.name)
            self._folder.sync()
        elif not isinstance(error, CopyStopped):
            self._troubles.failed(copy.name, copy.need, error, self._held_bytes())
        self._news()

    def _publish(self, copy: _Copy) -> Exception | None:
        """What keeps it from having its name."""
        try:
            with self._directory.held(_LOCK_TIMEOUT_S):
                self._folder.publish(copy.name, copy.fd)
        except (OSError, StorageError) as error:
            return error
        return None

    def _came(self, copy: _Copy, size_bytes: int, unasked: int) -> None:
        self._rate.add(size_bytes)
        copy.unasked, copy.moved = unasked, self._clock()
        if self._unasked() < self.streams:
            with self._idle:
                self._idle.notify()

    def _news(self) -> None:
        self._look_at = max(self.starts_at, self._clock())
        with self._idle:
            self._idle.notify_all()
