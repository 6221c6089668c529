"""Runs a blocking call in a thread of ours and stops waiting for it at a deadline.

Invariants: `run` returns within its timeout whatever the call does; a call that does not come back
keeps its thread until it does (it cannot be killed), is counted in `stuck`, and a fresh thread
takes its place; above `max_stuck` of them new calls fail at once; `close` ends every wait. After a
fork the child starts with no threads. A call costs about 20 us more than without (one hand-over
each way).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from dataservice.errors import StorageTimeout
from dataservice.storage.forks import renew_in_children

T = TypeVar("T")

_QUEUED, _RUNNING, _DONE, _ABANDONED = range(4)


class _Job:
    __slots__ = ("call", "done", "error", "result", "state")

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.done = threading.Lock()
        self.done.acquire()
        self.state = _QUEUED
        self.result: Any = None
        self.error: BaseException | None = None


class ReaderPool:
    """At most `threads` calls at a time, plus those that are stuck."""

    def __init__(self, *, threads: int = 16, max_stuck: int = 64) -> None:
        self._threads = threads
        self._max_stuck = max_stuck
        self.after_fork()
        renew_in_children(self)

    def after_fork(self) -> None:
        """Without jobs and threads; those of the parent are not here."""
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._owned: set[threading.Thread] = set()
        self._waited_for: set[_Job] = set()
        self._alive = 0  # threads that take jobs
        self._stuck = 0
        self._closed = False

    @property
    def stuck(self) -> int:
        """Calls past their deadline that still hold a thread."""
        return self._stuck

    def run(self, call: Callable[[], T], *, timeout_s: float, what: str) -> T:
        """The result of `call`, or what it raised; StorageTimeout naming `what` at the deadline, or
        when the pool is closed meanwhile."""
        job = _Job(call)
        with self._lock:
            if self._closed:
                raise RuntimeError("the reader pool is closed")
            if self._stuck >= self._max_stuck:
                raise StorageTimeout(f"{what}: not started, {self._stuck} reads are stuck")
            self._waited_for.add(job)
            if len(self._waited_for) > self._alive and self._alive < self._threads:
                self._start_thread()
        self._jobs.put(job)
        if not job.done.acquire(timeout=max(timeout_s, 0.0)) and self._give_up(job):
            raise StorageTimeout(f"{what}: no answer within {timeout_s:.3g} s")
        if job.state == _ABANDONED:
            raise StorageTimeout(f"{what}: the store was closed meanwhile")
        if job.error is not None:
            raise job.error
        result: T = job.result
        return result

    def close(self, *, timeout_s: float = 2.0) -> None:
        """End the threads; those that are stuck are left behind as daemons."""
        with self._lock:
            self._closed = True
            for job in list(self._waited_for):
                self._abandon(job)
                job.done.release()
            owned = list(self._owned)
        for _ in owned:
            self._jobs.put(None)
        ends = time.monotonic() + timeout_s
        for thread in owned:
            thread.join(max(ends - time.monotonic(), 0.0) if not self._stuck else 0.1)

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name="storage-reader", daemon=True)
        self._alive += 1
        self._owned.add(thread)
        thread.start()

    def _give_up(self, job: _Job) -> bool:
        """False when the job ended meanwhile."""
        with self._lock:
            if job not in self._waited_for:
                return False
            self._abandon(job)
            if len(self._waited_for) > self._alive and not self._closed:
                self._start_thread()
            return True

    def _abandon(self, job: _Job) -> None:
        if job.state == _RUNNING:
            self._stuck += 1
            self._alive -= 1
        self._waited_for.discard(job)
        job.state = _ABANDONED

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                if job.state == _ABANDONED:
                    continue
                job.state = _RUNNING
            try:
                job.result = job.call()
            except BaseException as error:
                job.error = error
            with self._lock:
                if job.state == _ABANDONED:
                    self._stuck -= 1
                    break
                job.state = _DONE
                self._waited_for.discard(job)
            job.done.release()
            del job
        with self._lock:
            self._owned.discard(threading.current_thread())
