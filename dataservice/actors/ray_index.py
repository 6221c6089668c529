"""Builds the index by Ray tasks, on the nodes that hold or reach the data.

Invariants: the same tasks and results as in processes of one machine; the index folder is shared by
all nodes; at most a few tasks more than the cluster runs at a time are handed to Ray; when the
build is given up they are cancelled, what is done is on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from dataservice.actors.ray_local import joined_ray
from dataservice.errors import StorageError
from dataservice.storage.index_executor import (
    IndexExecutor,
    ProgressFile,
    States,
    failed,
    last_result,
)
from dataservice.storage.index_tasks import (
    BuildContext,
    Done,
    Failed,
    Result,
    Task,
    TaskRunner,
)

_TICK_S = 0.5
_TASKS_A_CPU = 2
_NODE_SHARE = 1e-3
"""Of a data node's resource, which only says where a task may run."""


@contextmanager
def ray_executor(address: str | None, *, resource: str) -> Iterator[IndexExecutor]:
    """Tasks on the nodes with `resource` of the cluster at `address`; None starts a local one."""
    with joined_ray(address, resource=resource) as ray:
        yield OnRay(ray, resource=resource)


class OnRay:
    def __init__(self, ray: Any, *, resource: str) -> None:
        self._ray = ray
        self._run_task = ray.remote(num_cpus=1, resources={resource: _NODE_SHARE}, max_retries=2)(
            _run_task
        )

    def run(self, context: BuildContext, tasks: Sequence[Task]) -> States:
        ray = self._ray
        waiting = enumerate(tasks)
        running: dict[Any, int] = {}
        most = _TASKS_A_CPU * max(int(ray.cluster_resources().get("CPU", 1)), 1)
        shared = ray.put(context)
        try:
            with ProgressFile(context.scratch_dir) as progress:
                while True:
                    for number, task in islice(waiting, most - len(running)):
                        running[self._run_task.remote(shared, number, task)] = number
                    if not running:
                        return
                    done, _ = ray.wait(list(running), timeout=_TICK_S)
                    for reference in done:
                        number = running.pop(reference)
                        yield self._outcome(reference, number, tasks[number])
                    yield from progress.read(running.values())
        finally:
            for reference in running:
                ray.cancel(reference)

    def _outcome(self, reference: Any, number: int, task: Task) -> Done | Failed:
        exceptions = self._ray.exceptions
        try:
            return Done(number=number, result=self._ray.get(reference))
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, StorageError | FileNotFoundError):
                return failed(number, task, error.cause)
            raise error.cause from None
        except exceptions.RayError as error:
            lost = StorageError(
                f"the Ray task that read {task.file.url} was lost ({type(error).__name__})"
            )
            lost.__cause__ = error
            return Failed(number=number, error=lost)


_RUNNERS: dict[str, tuple[TaskRunner, ProgressFile]] = {}
"""By scratch folder: that of the build that this worker process last did a task of."""


def _run_task(context: BuildContext, number: int, task: Task) -> Result:
    if context.scratch_dir not in _RUNNERS:
        for runner, progress in _RUNNERS.values():
            runner.close()
            progress.close()
        _RUNNERS.clear()
        opened = TaskRunner(context), ProgressFile(context.scratch_dir)
        _RUNNERS[context.scratch_dir] = opened
    runner, progress = _RUNNERS[context.scratch_dir]
    return last_result(runner, progress, number, task)
