"""What the coordinator answers over HTTP: the status page with its API, and metrics.

Invariants: nothing here changes anything; every answer is made from what the event loop holds; the
page's status is kept for KEEP_S and its step until the next, so that many who look cost no more
than one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import orjson

from dataservice.actors.coordinator import Coordinator
from dataservice.actors.coordinator_metrics import metrics_routes
from dataservice.actors.step_grid import current_step, step_grid
from dataservice.config.settings import ServingSettings
from dataservice.errors import ConfigError
from dataservice.obs.status_page import page_routes
from dataservice.obs.web import Answer, Handler, WebServer, start_web
from dataservice.wire.messages import GetStatus

_LOG = logging.getLogger(__name__)

KEEP_S = 0.5


def routes(coordinator: Coordinator) -> dict[str, Handler]:
    """Path -> handler."""

    return {
        "/api/status": _status(coordinator),
        "/api/step": _step(coordinator),
        **metrics_routes(coordinator),
        **page_routes(),
    }


def _status(coordinator: Coordinator) -> Handler:
    kept, until = Answer(b""), 0.0

    async def status(_query: Mapping[str, str]) -> Answer:
        nonlocal kept, until
        if time.monotonic() >= until:
            kept = Answer((await coordinator.get_status(GetStatus())).status.encode())
            until = time.monotonic() + KEEP_S
        return kept

    return status


def _step(coordinator: Coordinator) -> Handler:
    none = Answer(b'{"step": null}')
    kept: tuple[tuple[int, int], Answer] = ((0, -1), none)

    async def step(_query: Mapping[str, str]) -> Answer:
        nonlocal kept
        shared = coordinator.shared
        session, active = shared.session, current_step(shared.session)
        if session is None or active is None:
            return none
        which = (session.generation, active.step)  # placed once, and never again
        if which != kept[0]:
            grid = step_grid(active, shared.config.plan.balance.sync_domain)
            kept = which, Answer(orjson.dumps(grid))
        return kept[1]

    return step


async def start_coordinator_web(
    coordinator: Coordinator, serving: ServingSettings, *, port: int, again: int | None
) -> WebServer | None:
    """`port`: where the coordinator's calls are answered; `again`: where this server was before the
    coordinator was started again. Raises ConfigError for a port in use, unless it is `auto`."""
    if serving.http_port is None:
        return None
    wanted = serving.http_port
    if wanted == "auto":
        wanted = port + 1 if serving.port and port < 65535 else 0
    if again is not None:
        wanted = again
    handlers, security = routes(coordinator), serving.security
    try:
        server = await start_web(handlers, host=serving.host, port=wanted, security=security)
    except ConfigError as error:
        if serving.http_port != "auto" or not wanted:
            raise
        _LOG.warning("%s: another is taken", error)
        server = await start_web(handlers, host=serving.host, port=0, security=security)
    coordinator.shared.http_port = server.port
    return server
