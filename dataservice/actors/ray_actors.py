"""The three actors as Ray runs them: thin shells around Coordinator, Worker and Stager."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path
from typing import Any

import ray

from dataservice.actors import worker_memory
from dataservice.actors.coordinator import Coordinator
from dataservice.actors.planner_link import PlannerProcess
from dataservice.actors.stager import Stager
from dataservice.actors.state_log import JOURNAL, StateLog
from dataservice.actors.worker import Worker
from dataservice.config import Config, config_from_json
from dataservice.rpc.server import RunningServer, start_server
from dataservice.wire.messages import GetStatus, ScaleWorkers

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def _log_to_stderr(level: str = "WARNING") -> None:
    logging.basicConfig(level="WARNING", format=LOG_FORMAT)
    logging.getLogger("dataservice").setLevel(os.environ.get("DATASERVICE_LOG", level))


def advertised_host(host: str) -> str | None:
    """What others connect to, when the server listens on every address."""
    return ray.util.get_node_ip_address() if host in ("0.0.0.0", "[::]") else None  # noqa: S104


class CoordinatorActor:
    """An asyncio actor: the coordinator, its server and the fleet keeper share its event loop."""

    def __init__(self, config_json: str) -> None:
        _log_to_stderr("INFO")
        self._config: Config = config_from_json(config_json)
        self._coordinator: Coordinator | None = None
        self._server: RunningServer | None = None
        self._fleet: Any = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Returns the endpoint once control calls are answered."""
        from dataservice.actors.ray_fleet import RayFleet

        config = self._config
        state = Path(config.state_dir)
        state.mkdir(parents=True, exist_ok=True)
        log = StateLog(str(state / JOURNAL))
        self._coordinator = Coordinator(config, PlannerProcess(), log)
        serving = config.serving
        self._server = await start_server(
            coordinator=self._coordinator,
            bind=f"{serving.host}:{serving.port}",
            insecure=serving.insecure,
        )
        host = advertised_host(serving.host) or self._server.host
        endpoint = f"{host}:{self._server.port}"
        await self._coordinator.start()
        self._fleet = RayFleet(self._coordinator, config, endpoint)
        self._keeper = asyncio.ensure_future(self._fleet.keep())
        return endpoint

    async def status(self) -> str:
        assert self._coordinator is not None
        return (await self._coordinator.get_status(GetStatus())).status

    async def scale(self, workers: int) -> int:
        """Returns the target before."""
        assert self._coordinator is not None
        return (await self._coordinator.scale(ScaleWorkers(workers=workers))).before

    async def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._fleet is not None:
            await self._fleet.stop()
        if self._server is not None:
            await self._server.stop(1.0)
        if self._coordinator is not None:
            await self._coordinator.stop()


class WorkerActor:
    """In a process of its own, which ends past `memory_bytes`."""

    def __init__(
        self,
        *,
        coordinator: str,
        worker_id: str,
        node: str,
        bind: str,
        insecure: bool,
        memory_bytes: int | None,
    ) -> None:
        _log_to_stderr()
        worker_memory.install(memory_bytes)
        host = bind.rpartition(":")[0]
        self._worker = Worker(
            coordinator=coordinator,
            worker_id=worker_id,
            node=node,
            bind=bind,
            advertise=advertised_host(host),
            insecure=insecure,
        )

    def run(self) -> None:
        asyncio.run(self._worker.run())

    def stop(self) -> None:
        self._worker.stop()

    def pid(self) -> int:
        return os.getpid()

    def threads(self) -> list[str]:
        """Names of the live threads, for leak checks."""
        return [thread.name for thread in threading.enumerate()]


class StagerActor:
    def __init__(self, *, coordinator: str, node: str, host: str, config_json: str) -> None:
        _log_to_stderr()
        self._stager = Stager(
            coordinator=coordinator, node=node, host=host, config_json=config_json
        )

    def run(self) -> None:
        asyncio.run(self._stager.run())

    def stop(self) -> None:
        self._stager.stop()
