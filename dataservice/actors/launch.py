"""Starts the service on Ray and stops it again, as a library and in the foreground.

Invariants: what `start_service` started, `Service.stop` ends: actors, planning process, and Ray
itself when it was ours; SIGINT and SIGTERM stop the foreground service in order.
"""

from __future__ import annotations

import faulthandler
import json
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dataservice.actors.ray_local import joined_ray
from dataservice.config import Config
from dataservice.config.folders import check_service_folders
from dataservice.errors import ServiceUnavailable

if TYPE_CHECKING:
    from dataservice.actors.supervisor import Supervisor

CALL_TIMEOUT_S = 30.0
STOP_S = 60.0
"""In which a foreground service stops; then it says where it is stuck and ends."""


class Service:
    """A running service; made by `running_service`. Its methods raise what ended the service, and
    ServiceUnavailable while its coordinator is being started again."""

    def __init__(self, supervisor: Supervisor, endpoint: str) -> None:
        self._supervisor = supervisor
        self.endpoint = endpoint

    @property
    def page_url(self) -> str:
        """Of the status page; "" without one."""
        return self._supervisor.coordinator.page_url

    @property
    def coordinator_restarts(self) -> int:
        return self._supervisor.restarts

    def check(self) -> None:
        """Raises what ended the service."""
        self._supervisor.check()

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
def running_service(
    config: Config, *, address: str | None = None, given_up: Callable[[], bool] = lambda: False
) -> Iterator[Service]:
    """Serves `config` (whose index must be up to date) until the block ends.

    `address`: of a running Ray cluster whose data nodes carry `workers.resource`; None starts a
    local Ray of our own. The coordinator runs on this machine's node, and is started again there
    when it ends. `given_up` is asked while it starts, for the first time when Ray is up.

    Raises ConfigError for a folder that cannot be written to, ServiceUnavailable once `given_up`.
    """
    check_service_folders(config, is_data_node=address is None)
    workers = config.workers
    cpus = max(2, round(workers.max * workers.num_cpus) + 1)
    with joined_ray(address, resource=workers.resource, num_cpus=cpus):
        from dataservice.actors.supervisor import Supervisor

        supervisor = Supervisor(config, own_ray=address is None)
        try:
            yield Service(supervisor, supervisor.start(given_up))
        finally:
            supervisor.stop()


def serve_foreground(config: Config, *, address: str | None = None) -> None:
    """Serves until SIGINT or SIGTERM, with a live status line; raises what ended the service."""
    up = False
    with _Signals() as signals:
        try:
            with running_service(config, address=address, given_up=signals.heard) as service:
                up = True
                try:
                    _watch(service, signals)
                finally:
                    _end_within(STOP_S)
        except (SystemExit, ServiceUnavailable):
            if up or not signals.heard():
                raise
            raise SystemExit("stopped before the service was up") from None
        finally:
            faulthandler.cancel_dump_traceback_later()


class _Signals:
    """SIGINT and SIGTERM: none is lost, although Ray puts a handler of its own in place while it
    starts, and what that or ours raises may be swallowed where a destructor runs."""

    def __init__(self) -> None:
        self._told, self._teller = socket.socketpair()
        self._teller.setblocking(False)
        self._ray_is_up = False

    def __enter__(self) -> _Signals:
        signal.set_wakeup_fd(self._teller.fileno(), warn_on_full_buffer=False)
        self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        self._told.close()
        self._teller.close()

    def heard(self, timeout_s: float = 0.0) -> bool:
        """Once one has come; waits for it for so long."""
        self._ray_is_up = True
        self._listen()
        return bool(select.select([self._told], [], [], timeout_s)[0])

    def _listen(self) -> None:
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, self._stop)

    def _stop(self, *_: object) -> None:
        _end_within(STOP_S)
        if not self._ray_is_up:
            sys.exit()


def _watch(service: Service, signals: _Signals) -> None:
    from dataservice.actors.status_line import StatusLine

    with StatusLine(service.endpoint, service.page_url) as line:
        while not signals.heard(1.0):
            service.check()
            try:
                line.show(service.status())
            except ServiceUnavailable as error:
                line.note(str(error))


def _end_within(timeout_s: float) -> None:
    """Ray's own ways to stop wait without end for a process that is stopped; its guard does the
    rest."""
    faulthandler.dump_traceback_later(timeout_s, exit=True)
