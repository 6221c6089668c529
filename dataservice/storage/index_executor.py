"""Who does the tasks of building an index: this process, or several of this machine.

Invariants: what was started is ended and joined when the iteration ends, also by an error or when
it is given up; at most a few tasks more than there are processes are under way; one task that
fails ends the run, what others finished before is on disk.
"""

from __future__ import annotations

import multiprocessing
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import connection
from typing import Protocol

from dataservice.errors import StorageError
from dataservice.storage.index_tasks import (
    ArchiveTask,
    BuildContext,
    Done,
    Result,
    Running,
    Task,
    TaskRunner,
)
from dataservice.storage.objects import Store

_TICK_S = 0.25
_FOR_PROCESSES_BYTES = 64 * 1024 * 1024
"""To read; below it starting processes takes longer than they save."""
_ARCHIVE_SHARE = 100
"""Of an archive about a hundredth is read for its directory."""
_WAITING_TASKS = 2
"""Beyond those that run, a process."""
_SLOT = struct.Struct("<3Q")


class IndexExecutor(Protocol):
    """Runs tasks side by side where it can."""

    def run(self, context: BuildContext, tasks: Sequence[Task]) -> Iterator[Running | Done]:
        """A Done for each task, in any order; Running in between. Raises what a task raises."""


class InThisProcess:
    """One task after the other."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store

    def run(self, context: BuildContext, tasks: Sequence[Task]) -> Iterator[Running | Done]:
        runner = TaskRunner(context, self._store)
        try:
            for number, task in enumerate(tasks):
                yield from runner.run(number, task)
        finally:
            runner.close()


class InProcesses:
    """Each task in one of `processes` new processes of this machine."""

    def __init__(self, processes: int) -> None:
        self._processes = processes

    def run(self, context: BuildContext, tasks: Sequence[Task]) -> Iterator[Running | Done]:
        if not tasks:
            return
        pool = ProcessPoolExecutor(
            min(self._processes, len(tasks)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(context,),
        )
        try:
            yield from self._run(pool, context, tasks)
        finally:
            pool.shutdown(cancel_futures=True)

    def _run(
        self, pool: ProcessPoolExecutor, context: BuildContext, tasks: Sequence[Task]
    ) -> Iterator[Running | Done]:
        waiting = enumerate(tasks)
        running: dict[Future[Result], int] = {}
        with ProgressFile(context.scratch_dir) as progress:
            while True:
                room = _WAITING_TASKS * self._processes - len(running)
                for number, task in islice(waiting, max(room, 0)):
                    running[pool.submit(_run_task, number, task)] = number
                if not running:
                    return
                done, _ = wait(running, timeout=_TICK_S, return_when=FIRST_COMPLETED)
                for future in done:
                    number = running.pop(future)
                    yield Done(number=number, result=_result(future, tasks[number]))
                yield from progress.read(running.values())


class AsItFits:
    """In this process what is small, in one process a core what is not."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store

    def run(self, context: BuildContext, tasks: Sequence[Task]) -> Iterator[Running | Done]:
        cores = len(os.sched_getaffinity(0))
        small = sum(_read_bytes(task) for task in tasks) < _FOR_PROCESSES_BYTES
        executor: IndexExecutor = InProcesses(cores)
        if small or min(cores, len(tasks)) < 2:
            executor = InThisProcess(self._store)
        yield from executor.run(context, tasks)


class ProgressFile:
    """How far running tasks are, told by a file in a folder that their processes share."""

    def __init__(self, folder: str) -> None:
        path = os.path.join(folder, "progress")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, state: Running) -> None:
        data = _SLOT.pack(state.done_bytes, state.num_samples, state.num_rejected)
        os.pwrite(self._fd, data, state.number * _SLOT.size)

    def read(self, numbers: Iterable[int]) -> Iterator[Running]:
        for number in numbers:
            data = os.pread(self._fd, _SLOT.size, number * _SLOT.size)
            if len(data) == _SLOT.size:
                done_bytes, num_samples, num_rejected = _SLOT.unpack(data)
                yield Running(
                    number=number,
                    done_bytes=done_bytes,
                    num_samples=num_samples,
                    num_rejected=num_rejected,
                )

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> ProgressFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _read_bytes(task: Task) -> int:
    size = task.file.stat.size_bytes
    return size // _ARCHIVE_SHARE if isinstance(task, ArchiveTask) else size


def last_result(runner: TaskRunner, progress: ProgressFile, number: int, task: Task) -> Result:
    """Does a task in a process of its own; how far it is goes to the progress file."""
    result: Result = None
    for state in runner.run(number, task):
        if isinstance(state, Done):
            result = state.result
        else:
            progress.write(state)
    return result


_OF_PROCESS: list[tuple[TaskRunner, ProgressFile]] = []
"""The runner of a process of the pool; it ends with the process."""


def _start(context: BuildContext) -> None:
    threading.Thread(target=_end_with_parent, daemon=True, name="index-parent").start()
    _OF_PROCESS.append((TaskRunner(context), ProgressFile(context.scratch_dir)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _run_task(number: int, task: Task) -> Result:
    runner, progress = _OF_PROCESS[0]
    return last_result(runner, progress, number, task)


def _result(future: Future[Result], task: Task) -> Result:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise StorageError(
            f"a process that builds the index ended while {task.file.url} was read, by a signal "
            "or for want of memory; run again, with fewer processes: it goes on where it was"
        ) from error
