"""Starts the service on Ray and stops it again, as a library and in the foreground.

Invariants: what `start_service` started, `Service.stop` ends: actors, planning process, and Ray
itself when it was ours; SIGINT and SIGTERM stop the foreground service in order.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dataservice.actors.ray_local import joined_ray
from dataservice.config import Config
from dataservice.config.folders import check_service_folders
from dataservice.errors import ServiceUnavailable

if TYPE_CHECKING:
    from dataservice.actors.supervisor import Supervisor

CALL_TIMEOUT_S = 30.0


class Service:
    """A running service; made by `running_service`. Its methods raise what ended the service, and
    ServiceUnavailable while its coordinator is being started again."""

    def __init__(self, supervisor: Supervisor, endpoint: str) -> None:
        self._supervisor = supervisor
        self.endpoint = endpoint

    @property
    def coordinator_restarts(self) -> int:
        return self._supervisor.restarts

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self._call("status"))
        return status

    def scale(self, workers: int) -> int:
        """0: as many as trainers need. Returns the number of workers that was wanted before."""
        before: int = self._call("scale", workers)
        return before

    def _call(self, method: str, *arguments: Any) -> Any:
        self._supervisor.check()
        return self._supervisor.coordinator.call(method, *arguments, timeout_s=CALL_TIMEOUT_S)


@contextmanager
def running_service(config: Config, *, address: str | None = None) -> Iterator[Service]:
    """Serves `config` (whose index must be up to date) until the block ends.

    `address`: of a running Ray cluster whose data nodes carry `workers.resource`; None starts a
    local Ray of our own. The coordinator runs on this machine's node, and is started again there
    when it ends.

    Raises ConfigError for a folder that cannot be written to.
    """
    check_service_folders(config, is_data_node=address is None)
    workers = config.workers
    cpus = max(2, round(workers.max * workers.num_cpus) + 1)
    with joined_ray(address, resource=workers.resource, num_cpus=cpus):
        from dataservice.actors.supervisor import Supervisor

        supervisor = Supervisor(config, own_ray=address is None)
        try:
            yield Service(supervisor, supervisor.start())
        finally:
            supervisor.stop()


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
            try:
                line.show(service.status())
            except ServiceUnavailable as error:
                line.note(str(error))
