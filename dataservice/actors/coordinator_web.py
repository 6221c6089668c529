"""What the coordinator answers over HTTP: the status page with its API, and metrics.

Invariants: nothing here changes anything; every answer is made from what the event loop holds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from dataservice.actors.coordinator import Coordinator
from dataservice.actors.coordinator_metrics import metrics_routes
from dataservice.config.settings import ServingSettings
from dataservice.errors import ConfigError
from dataservice.obs.web import Answer, Handler, WebServer, start_web
from dataservice.wire.messages import GetStatus

_LOG = logging.getLogger(__name__)


def routes(coordinator: Coordinator) -> dict[str, Handler]:
    """Path -> handler."""

    async def status(_query: Mapping[str, str]) -> Answer:
        return Answer((await coordinator.get_status(GetStatus())).status.encode())

    return {"/api/status": status, **metrics_routes(coordinator)}


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
        return await start_web(handlers, host=serving.host, port=wanted, security=security)
    except ConfigError as error:
        if serving.http_port != "auto" or not wanted:
            raise
        _LOG.warning("%s: another is taken", error)
    return await start_web(handlers, host=serving.host, port=0, security=security)
