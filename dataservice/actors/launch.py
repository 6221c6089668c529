"""Starts the service on Ray and stops it again, as a library and in the foreground.

Invariants: what `start_service` started, `Service.stop` ends: actors, planning process, and Ray
itself when it was ours; SIGINT and SIGTERM stop the foreground service in order.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dataservice.actors.ray_local import joined_ray
from dataservice.config import Config, config_to_json
from dataservice.config.folders import check_service_folders
from dataservice.core.fleet import workers_at_start
from dataservice.errors import DeadlineExceeded

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0


class Service:
    """A running service; made by `running_service`."""

    def __init__(self, ray: Any, coordinator: Any, endpoint: str) -> None:
        self._ray = ray
        self._coordinator = coordinator
        self.endpoint = endpoint

    def status(self) -> dict[str, Any]:
        answer = self._ray.get(self._coordinator.status.remote(), timeout=STOP_TIMEOUT_S)
        status: dict[str, Any] = json.loads(answer)
        return status

    def scale(self, workers: int) -> int:
        """Returns the number of workers that was wanted before."""
        before: int = self._ray.get(self._coordinator.scale.remote(workers), timeout=STOP_TIMEOUT_S)
        return before

    def stop(self) -> None:
        try:
            self._ray.get(self._coordinator.stop.remote(), timeout=STOP_TIMEOUT_S)
        finally:
            self._ray.kill(self._coordinator)


@contextmanager
def running_service(config: Config, *, address: str | None = None) -> Iterator[Service]:
    """Serves `config` (whose index must be up to date) until the block ends.

    `address`: of a running Ray cluster whose data nodes carry `workers.resource`; None starts a
    local Ray of our own. The coordinator runs on this machine's node.

    Raises ConfigError for a folder that cannot be written to.
    """
    check_service_folders(config, is_data_node=address is None)
    workers = config.workers
    cpus = max(2, round(workers.max * workers.num_cpus) + 1)
    with joined_ray(address, resource=workers.resource, num_cpus=cpus) as ray:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from dataservice.actors.ray_actors import CoordinatorActor

        config = sized(config, ray, local=address is None)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        remote = ray.remote(num_cpus=0, scheduling_strategy=here)(CoordinatorActor)
        coordinator = remote.remote(config_to_json(config))
        try:
            endpoint = ray.get(coordinator.start.remote(), timeout=START_TIMEOUT_S)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineExceeded(
                f"the coordinator did not start within {START_TIMEOUT_S:g} s"
            ) from error
        service = Service(ray, coordinator, endpoint)
        try:
            yield service
        finally:
            service.stop()


def sized(config: Config, ray: Any, *, local: bool) -> Config:
    """With a number of workers. A Ray of our own does not count cores: it is told what to allow."""
    workers = config.workers
    if workers.count is not None:
        return config
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    cores = [int(found.get("CPU", 0)) for found in nodes if found.get(workers.resource, 0) > 0]
    if local:
        cores = [len(os.sched_getaffinity(0))]
    count = workers_at_start(cores, least=workers.min, most=workers.max)
    return dataclasses.replace(config, workers=dataclasses.replace(workers, count=count))


def serve_foreground(config: Config, *, address: str | None = None) -> None:
    """Serves until SIGINT or SIGTERM, with a live status line."""
    from dataservice.actors.status_line import StatusLine

    stopping = threading.Event()

    def stop(*_: object) -> None:
        if not stopping.is_set():
            stopping.set()
            if not serving:
                raise SystemExit("stopped before the service was up")

    def listen() -> None:
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, stop)

    serving = False
    listen()
    with running_service(config, address=address) as service, StatusLine(service.endpoint) as line:
        serving = True
        listen()  # ray.init has put its own handlers in place
        while not stopping.wait(1.0):
            line.show(service.status())
