"""Threads whose tasks have a deadline, counted from when a task starts, not from when it queues.

Invariants: a task is `commit(compute())`; tasks start by priority, those of equal priority in the
order in which they were submitted; a task past its deadline is given up: its waiter gets
DeadlineExceeded, its thread is replaced at once (a thread that hangs in C cannot be stopped, it
ends when the call returns; `stuck` counts those), and its `commit` never runs. `commit` runs whole
or not at all, so what it writes does not change behind a waiter. `commit` must be short: a deadline
does not interrupt it.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import threading
import time
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from dataservice.errors import DeadlineExceeded

S = TypeVar("S")
T = TypeVar("T")

TOOK_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Bounds by which `DeadlinePool.took` counts."""
_IDLE_CHECK_S = 0.25
"""A waiter looks again at least this often."""


def _finished(*_: object) -> Any:
    raise AssertionError("the task has run")


def _forget_locals(error: BaseException) -> None:
    """Frees what the functions that `error` left had in hand: their frames are kept with it, and
    one of them holds the job that holds the error, so that a whole pack would wait for the garbage
    collector. The traceback can still be printed."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__


class Job(Generic[T]):
    """One task in a pool; `DeadlinePool.result` waits for it."""

    def __init__(
        self, compute: Callable[[], Any], commit: Callable[[Any], T], deadline_s: float
    ) -> None:
        self.deadline_s = deadline_s
        self.compute: Callable[[], Any] = compute
        self.commit: Callable[[Any], T] = commit
        self._commit_lock = threading.Lock()
        self._committed = False
        self._abandoned = False
        self._started = -1.0
        self._thread: threading.Thread | None = None
        self._done = False
        self._ended: threading.Condition | None = None
        """Made by who waits, so that an end wakes nobody else."""
        self._value: T | None = None
        self._error: BaseException | None = None


class DeadlinePool:
    """Owned by whoever calls `close`; its threads are daemons, so a hung one cannot block exit."""

    def __init__(self, num_threads: int, *, name: str) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads: {num_threads} is not a positive number")
        self.num_threads = num_threads
        self.name = name
        self.abandoned = 0
        """Tasks given up since the start."""
        self.stuck = 0
        """Of those, how many still hold a thread."""
        self.completed = 0
        self.busy_s = 0.0
        """Seconds spent in completed tasks, over all threads."""
        self.took = [0] * (len(TOOK_S) + 1)
        """Completed tasks by how long they took: up to each bound of TOOK_S and not the one before,
        and longer."""
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: list[tuple[tuple[int, ...], int, Job[Any]]] = []
        """A heap by (priority, number); jobs taken back stay in it, done, until their turn."""
        self._numbers = itertools.count()
        self._running: set[Job[Any]] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        with self._lock:
            for _ in range(num_threads):
                self._add_thread()

    def submit(
        self,
        compute: Callable[[], S],
        *,
        commit: Callable[[S], T],
        deadline_s: float,
        priority: tuple[int, ...] = (),
    ) -> Job[T]:
        """Never blocks. The lowest priority starts first, such as a pack's place in the order."""
        job = Job(compute, commit, deadline_s)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the {self.name} pool is closed")
            heapq.heappush(self._queue, (priority, next(self._numbers), job))
            self._work.notify()
        return job

    def result(self, job: Job[T]) -> T:
        """What `commit` gave, or the exception of the task; DeadlineExceeded if it was given up.

        To be called once for a job.
        """
        with self._lock:
            while not job._done:
                next_check_s = self._give_up_overdue()
                if not job._done:
                    job._ended = job._ended or threading.Condition(self._lock)
                    job._ended.wait(next_check_s)
        if job._error is not None:
            error, job._error = job._error, RuntimeError("the task's error was raised before")
            try:
                raise error
            finally:
                del error  # it holds this frame, and so all that the callers have in hand
        return job._value  # type: ignore[return-value]

    def cancel(self, jobs: Iterable[Job[Any]]) -> None:
        """Takes jobs that have not started out of the queue; the others go on."""
        with self._lock:
            for job in jobs:
                if job._started < 0 and not job._done:
                    self._finish(job, RuntimeError("cancelled"))

    def close(self, timeout_s: float = 5.0) -> None:
        """Fails what is queued and joins the threads, as far as they end within `timeout_s`."""
        with self._lock:
            self._closed = True
            for _, _, job in self._queue:
                if not job._done:
                    self._finish(job, RuntimeError(f"the {self.name} pool closed"))
            self._queue.clear()
            self._work.notify_all()
            threads = list(self._threads)
        end = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def __enter__(self) -> DeadlinePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add_thread(self) -> None:
        number = len(self._threads) + self.abandoned
        thread = threading.Thread(target=self._run, name=f"{self.name}-{number}", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._queue:
                    if self._closed:
                        return
                    self._work.wait()
                _, _, job = heapq.heappop(self._queue)
                if job._done:
                    continue
                job._started = time.monotonic()
                job._thread = threading.current_thread()
                self._running.add(job)
            error = self._execute(job)
            if error is not None:
                _forget_locals(error)
            with self._lock:
                if job._abandoned:
                    self.stuck -= 1
                    return
                self._running.discard(job)
                self.completed += 1
                took_s = time.monotonic() - job._started
                self.busy_s += took_s
                self.took[bisect_left(TOOK_S, took_s)] += 1
                self._finish(job, error)
            del job, error  # a thread that waits for its next task holds nothing of its last

    @staticmethod
    def _execute(job: Job[Any]) -> BaseException | None:
        compute, commit = job.compute, job.commit
        try:
            value = compute()
            with job._commit_lock:
                if not job._abandoned:
                    job._value = commit(value)
                    job._committed = True
        except BaseException as error:
            return error
        return None

    def _finish(self, job: Job[Any], error: BaseException | None) -> None:
        job._error = error
        job._done = True
        job.compute = job.commit = _finished  # frees what they hold
        if job._ended is not None:
            job._ended.notify_all()

    def _give_up_overdue(self) -> float:
        """Seconds until the next running task is overdue. Call with the lock held."""
        now = time.monotonic()
        next_check_s = _IDLE_CHECK_S
        for job in list(self._running):
            left_s = job._started + job.deadline_s - now
            if left_s > 0:
                next_check_s = min(next_check_s, left_s)
                continue
            # A commit in progress is a short copy: let it end, and count the task as in time.
            if not job._commit_lock.acquire(blocking=False):
                next_check_s = min(next_check_s, 0.001)
                continue
            try:
                if not job._committed:
                    self._give_up(job)
            finally:
                job._commit_lock.release()
        return next_check_s

    def _give_up(self, job: Job[Any]) -> None:
        job._abandoned = True
        self._running.discard(job)
        self.abandoned += 1
        self.stuck += 1
        self._finish(job, DeadlineExceeded(f"took longer than {job.deadline_s:g} s"))
        if job._thread is not None:
            self._threads.discard(job._thread)
        if not self._closed:
            self._add_thread()


class BuildPools:
    """The threads that build packs, shared by all builds: some read pictures, some decode them,
    some read and tokenise records. A text is in no queue behind a picture."""

    def __init__(
        self, *, decode_threads: int, read_threads: int = 8, text_threads: int = 8
    ) -> None:
        self.reads = DeadlinePool(read_threads, name="read")
        self.decodes = DeadlinePool(decode_threads, name="decode")
        self.texts = DeadlinePool(text_threads, name="text")

    def beside(self, decode_threads: int, *, name: str) -> BuildPools:
        """The same threads, with decode threads of their own."""
        other = copy.copy(self)
        other.decodes = DeadlinePool(decode_threads, name=name)
        return other

    def close(self, timeout_s: float = 5.0) -> None:
        """Idempotent."""
        for pool in (self.reads, self.decodes, self.texts):
            pool.close(timeout_s)

    def __enter__(self) -> BuildPools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
