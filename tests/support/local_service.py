"""The whole service without Ray: coordinator, stagers and workers in threads of this process,
each with an event loop of its own; the planner is its real process."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from dataservice.actors.coordinator import Coordinator
from dataservice.actors.planner_link import PlannerProcess
from dataservice.actors.stager import Stager
from dataservice.actors.state_log import StateLog
from dataservice.actors.worker import Worker
from dataservice.config import Config, config_to_json
from dataservice.rpc.server import RunningServer, start_server
from dataservice.wire.messages import GetStatus

T = TypeVar("T")


class LoopThread:
    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def start(self, work: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class _Runner:
    """A worker or stager in a thread."""

    def __init__(self, name: str, make: Any) -> None:
        self._thread = LoopThread(name)
        self.actor = make()
        self._running = self._thread.start(self.actor.run())

    def stop(self) -> None:
        self.actor.stop()
        self._running.result(60)
        self._thread.close()

    def cut(self) -> None:
        """Ends it without a word, as a kill would."""
        self._running.cancel()
        self._thread.run(asyncio.sleep(0.05))
        self._thread.close()
        if isinstance(self.actor, Worker) and self.actor._tools is not None:
            self.actor._tools.close()  # a kill leaves no threads either


class LocalService:
    def __init__(
        self, config: Config, *, workers: int = 1, nodes: tuple[str, ...] = ("n0",)
    ) -> None:
        self.config = config
        self._nodes = nodes
        self._numbers = itertools.count()
        """Of workers: one that comes after another was cut has a name of its own."""
        self.workers: dict[str, _Runner] = {}
        self.stagers: dict[str, _Runner] = {}
        self.coordinator: Coordinator
        self.endpoint = ""
        self._port = 0
        self.start_coordinator()
        if config.staging.cache_dir is not None:
            for node in nodes:
                self.add_stager(node)
        for number in range(workers):
            self.add_worker(nodes[number % len(nodes)])

    def start_coordinator(self) -> None:
        self._loop = LoopThread("coordinator")

        async def start() -> tuple[Coordinator, RunningServer]:
            Path(self.config.state_dir).mkdir(parents=True, exist_ok=True)
            log = StateLog(str(Path(self.config.state_dir) / "coordinator.journal"))
            coordinator = Coordinator(self.config, PlannerProcess(), log)
            bind = f"127.0.0.1:{self._port or self.config.serving.port}"
            try:
                server = await start_server(coordinator=coordinator, bind=bind)
            except BaseException:
                await coordinator.stop()
                raise
            try:
                await coordinator.start()
            except BaseException:
                await server.stop(0)
                await coordinator.stop()
                raise
            return coordinator, server

        try:
            self.coordinator, self._server = self._loop.run(start())
        except BaseException:
            self._loop.close()
            raise
        self._port = self._server.port
        self.endpoint = self._server.endpoint

    def stop_coordinator(self) -> None:
        self._loop.run(self._server.stop(0))
        self._loop.run(self.coordinator.stop())
        self._loop.close()

    def add_worker(self, node: str = "n0") -> str:
        worker_id = f"w{next(self._numbers)}-{node}"
        self.workers[worker_id] = _Runner(
            worker_id, lambda: Worker(coordinator=self.endpoint, worker_id=worker_id, node=node)
        )
        return worker_id

    def add_stager(self, node: str) -> None:
        self.stagers[node] = _Runner(
            f"stager-{node}",
            lambda: Stager(
                coordinator=self.endpoint,
                node=node,
                host=node,
                config_json=config_to_json(self.config),
            ),
        )

    def cut_worker(self, worker_id: str) -> None:
        self.workers.pop(worker_id).cut()

    def status(self) -> dict[str, Any]:
        answer = self._loop.run(self.coordinator.get_status(GetStatus()))
        status: dict[str, Any] = json.loads(answer.status)
        return status

    def close(self) -> None:
        for runner in [*self.workers.values(), *self.stagers.values()]:
            runner.stop()
        self.stop_coordinator()

    def __enter__(self) -> LocalService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
