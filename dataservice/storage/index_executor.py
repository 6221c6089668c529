"""Who does the tasks of building an index: this process, or several of this machine.

Invariants: what was started is ended and joined when the iteration ends, also by an error or when
it is given up, which stops running tasks within a batch of records; at most a few tasks more than
there are processes are under way; a file that cannot be read fails its task alone, any other error
ends the run; what was finished before is on disk.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
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
    Failed,
    Result,
    Running,
    State,
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
_SHOWN_FILES = 8
_SLOT = struct.Struct("<3Q")
"""The first one of a progress file has the mark below."""
_GIVEN_UP = b"x"


States = Generator[State, None, None]


class IndexExecutor(Protocol):
    """Runs tasks side by side where it can."""

    def run(self, context: BuildContext, tasks: Sequence[Task]) -> States:
        """A Done or Failed for each task, in any order; Running in between. Close it."""


class InThisProcess:
    """One task after the other."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store

    def run(self, context: BuildContext, tasks: Sequence[Task]) -> States:
        runner = TaskRunner(context, self._store)
        try:
            for number, task in enumerate(tasks):
                try:
                    yield from runner.run(number, task)
                except (StorageError, FileNotFoundError) as error:
                    yield failed(number, task, error)
        finally:
            runner.close()


class InProcesses:
    """Each task in one of `processes` new processes of this machine."""

    def __init__(self, processes: int) -> None:
        self._processes = processes

    def run(self, context: BuildContext, tasks: Sequence[Task]) -> States:
        if not tasks:
            return
        pool = ProcessPoolExecutor(
            min(self._processes, len(tasks)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(context,),
        )
        running: dict[Future[Result], int] = {}
        try:
            yield from self._run(pool, context, tasks, running)
        except BrokenProcessPool as error:
            files = [tasks[number].file.url for number in running.values()]
            raise StorageError(
                "a process that builds the index was ended by a signal or for want of memory, "
                f"while it read one of {', '.join(files[:_SHOWN_FILES])}; run again, with fewer "
                "processes: it goes on where it was"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)

    def _run(
        self,
        pool: ProcessPoolExecutor,
        context: BuildContext,
        tasks: Sequence[Task],
        running: dict[Future[Result], int],
    ) -> States:
        waiting = enumerate(tasks)
        with ProgressFile(context.scratch_dir) as progress:
            while True:
                room = _WAITING_TASKS * self._processes - len(running)
                for number, task in islice(waiting, max(room, 0)):
                    running[pool.submit(_run_task, number, task)] = number
                if not running:
                    return
                done, _ = wait(running, timeout=_TICK_S, return_when=FIRST_COMPLETED)
                for future in done:
                    yield _outcome(future, running[future], tasks[running[future]])
                    del running[future]
                yield from progress.read(running.values())


class AsItFits:
    """In this process what is small, in one process a core what is not."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store

    def run(self, context: BuildContext, tasks: Sequence[Task]) -> States:
        cores = len(os.sched_getaffinity(0))
        small = sum(_read_bytes(task) for task in tasks) < _FOR_PROCESSES_BYTES
        executor: IndexExecutor = InProcesses(cores)
        if small or min(cores, len(tasks)) < 2:
            executor = InThisProcess(self._store)
        yield from executor.run(context, tasks)


class ProgressFile:
    """How far running tasks are, and whether they are wanted yet, told by a file in a folder that
    their processes share. The owner of the tasks has it as a context: leaving that by an error
    gives them up."""

    def __init__(self, folder: str) -> None:
        path = os.path.join(folder, "progress")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, state: Running) -> None:
        """Raises StorageError once the tasks are given up."""
        data = _SLOT.pack(state.done_bytes, state.num_samples, state.num_rejected)
        os.pwrite(self._fd, data, _place_of(state.number))
        if os.pread(self._fd, 1, 0) == _GIVEN_UP:
            raise StorageError("the build that this is a task of was given up")

    def read(self, numbers: Iterable[int]) -> Iterator[Running]:
        for number in numbers:
            data = os.pread(self._fd, _SLOT.size, _place_of(number))
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

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is not None:
            os.pwrite(self._fd, _GIVEN_UP, 0)
        self.close()


def _place_of(number: int) -> int:
    return _SLOT.size * (number + 1)


def _read_bytes(task: Task) -> int:
    size = task.file.stat.size_bytes
    return size // _ARCHIVE_SHARE if isinstance(task, ArchiveTask) else size


def failed(number: int, task: Task, error: StorageError | FileNotFoundError) -> Failed:
    if isinstance(error, FileNotFoundError):
        error = StorageError(f"{task.file.url} was read, when a file was gone: {error}")
    return Failed(number=number, error=error)


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


def helper_starts() -> None:
    """To be called first in a process that helps another: it ends with that one, whatever ends it,
    and not before."""
    # Ctrl-C goes to all processes of a terminal; the first of them ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True, name="end-with-parent").start()


def _start(context: BuildContext) -> None:
    helper_starts()
    _OF_PROCESS.append((TaskRunner(context), ProgressFile(context.scratch_dir)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _run_task(number: int, task: Task) -> Result:
    runner, progress = _OF_PROCESS[0]
    return last_result(runner, progress, number, task)


def _outcome(future: Future[Result], number: int, task: Task) -> Done | Failed:
    """Raises BrokenProcessPool, and what the task raised but for files that cannot be read."""
    try:
        return Done(number=number, result=future.result())
    except (StorageError, FileNotFoundError) as error:
        return failed(number, task, error)
