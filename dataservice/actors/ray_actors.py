"""The three actors as Ray runs them: thin shells around Coordinator, Worker and Stager."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import ray

from dataservice.actors import worker_memory
from dataservice.actors.coordinator import Coordinator
from dataservice.actors.coordinator_metrics import coordinator_sheet
from dataservice.actors.coordinator_web import start_coordinator_web
from dataservice.actors.fleet_view import FleetNews, FleetView
from dataservice.actors.planner_link import PlannerProcess
from dataservice.actors.quiet_gc import keep_gc_quiet
from dataservice.actors.ray_metrics import keep_mirrored
from dataservice.actors.stager import Stager
from dataservice.actors.state_log import open_state
from dataservice.actors.watchdog import keep_beating, watched
from dataservice.actors.worker import Worker
from dataservice.config import Config, config_from_json
from dataservice.obs.logs import Logs
from dataservice.obs.metrics import Sheet
from dataservice.obs.web import WebServer
from dataservice.rpc.security import ServerSecurity
from dataservice.rpc.server import RunningServer, start_server
from dataservice.wire.messages import GetStatus, ScaleWorkers

COORDINATOR_STILL_S = 20.0
"""Its event loop may stand still for so long; then it says where and ends, to be started again."""


def advertised_host(host: str) -> str | None:
    """What others connect to, when the server listens on every address."""
    return ray.util.get_node_ip_address() if host in ("0.0.0.0", "[::]") else None  # noqa: S104


class CoordinatorActor:
    """An asyncio actor: the coordinator and its server share its event loop."""

    def __init__(self, config_json: str, logs: Logs) -> None:
        logs.install("INFO", role="coordinator")
        self._config: Config = config_from_json(config_json)
        self._coordinator: Coordinator | None = None
        self._server: RunningServer | None = None
        self._web: WebServer | None = None
        self._beating: asyncio.Future[None] | None = None
        self._mirrored: asyncio.Future[None] | None = None

    async def start(self, port: int | None, http_port: int | None) -> tuple[str, int | None]:
        """Returns the endpoint once control calls are answered, and the port of the status page;
        `port` and `http_port` are those of before, in place of the config's."""
        config = self._config
        self._beating = asyncio.ensure_future(keep_beating(COORDINATOR_STILL_S))
        log = await asyncio.to_thread(open_state, config)
        self._coordinator = Coordinator(config, PlannerProcess(), log)
        serving = config.serving
        self._server = await start_server(
            coordinator=self._coordinator,
            bind=f"{serving.host}:{serving.port if port is None else port}",
            security=serving.security,
        )
        self._coordinator.draining.turn_away = self._server.turn_away
        host = advertised_host(serving.host) or self._server.host
        endpoint = f"{host}:{self._server.port}"
        if log.ownership is not None:
            log.ownership.endpoint = endpoint
        self._web = await start_coordinator_web(
            self._coordinator, serving, port=self._server.port, again=http_port
        )
        await self._coordinator.start()
        self._mirrored = asyncio.ensure_future(keep_mirrored(self._sheet))
        keep_gc_quiet()
        return endpoint, None if self._web is None else self._web.port

    def _sheet(self) -> Sheet:
        return coordinator_sheet(self.coordinator.status())

    @property
    def coordinator(self) -> Coordinator:
        assert self._coordinator is not None
        return self._coordinator

    async def status(self) -> str:
        return (await self.coordinator.get_status(GetStatus())).status

    async def scale(self, workers: int) -> int:
        """Returns the target before."""
        return (await self.coordinator.scale(ScaleWorkers(workers=workers))).before

    async def fleet(self, news: FleetNews) -> FleetView:
        return self.coordinator.fleet(news)

    async def fleet_changed(self) -> None:
        await self.coordinator.fleet_changed()

    async def pid(self) -> int:
        return os.getpid()

    async def wind_down(self) -> None:
        """Turns health to NOT_SERVING; no more steps are handed out."""
        if self._server is not None:
            await self._server.turn_away()
        self.coordinator.wind_down()

    async def stop(self) -> None:
        if self._web is not None:
            await self._web.stop()
        if self._server is not None:
            await self._server.stop(1.0)
        if self._coordinator is not None:
            await self._coordinator.stop()
        for kept in (self._beating, self._mirrored):
            if kept is not None:
                kept.cancel()


class WorkerActor:
    """In a process of its own, which ends past `memory_bytes`. `node`: "" for whichever it comes up
    on."""

    def __init__(
        self,
        *,
        coordinator: str,
        worker_id: str,
        node: str,
        bind: str,
        metrics: bool,
        logs: Logs,
        security: ServerSecurity,
        memory_bytes: int | None,
        still_s: float,
    ) -> None:
        """`metrics`: whether it answers /metrics; `still_s`: its event loop may stand still for so
        long."""
        logs.install(role="worker", id=worker_id)
        worker_memory.install(memory_bytes)
        self._still_s = still_s
        host = bind.rpartition(":")[0]
        self._node = node or ray.get_runtime_context().get_node_id()
        self._worker = Worker(
            coordinator=coordinator,
            worker_id=worker_id,
            node=self._node,
            bind=bind,
            advertise=advertised_host(host),
            metrics=metrics,
            security=security,
        )
        # in place of Ray's own, which drops everything
        signal.signal(signal.SIGTERM, lambda *_: self._worker.stop())

    def run(self) -> None:
        asyncio.run(watched(_mirrored(self._worker), still_s=self._still_s))

    def stop(self) -> None:
        self._worker.stop()

    def pid(self) -> int:
        return os.getpid()

    def node(self) -> str:
        """That it came up on."""
        return self._node

    def threads(self) -> list[str]:
        """Names of the live threads, for leak checks."""
        return [thread.name for thread in threading.enumerate()]


HOST = "DATASERVICE_HOST"
"""Environment of a data node: the name that trainers have for its host, where Ray's is another, as
that of a pod is."""


async def _mirrored(worker: Worker) -> None:
    """Not a method: an actor with a coroutine would be Ray's to run, in a thread of its own."""
    mirrored = asyncio.ensure_future(keep_mirrored(worker.sheet))
    try:
        await worker.run()
    finally:
        mirrored.cancel()


class StagerActor:
    def __init__(
        self,
        *,
        coordinator: str,
        node: str,
        host: str,
        config_json: str,
        logs: Logs,
        still_s: float,
    ) -> None:
        logs.install(role="stager", id=node)
        self._still_s = still_s
        self._stager = Stager(
            coordinator=coordinator,
            node=node,
            host=os.environ.get(HOST) or host,
            config_json=config_json,
            advertise=advertised_host(config_from_json(config_json).serving.host),
        )

    def run(self) -> None:
        asyncio.run(watched(self._stager.run(), still_s=self._still_s))

    def stop(self) -> None:
        self._stager.stop()
