"""The whole service without Ray: coordinator, stagers and workers in threads of this process,
each with an event loop of its own; the planner is its real process."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from dataservice.actors.coordinator import Coordinator
from dataservice.actors.coordinator_web import start_coordinator_web
from dataservice.actors.planner_link import PlannerProcess
from dataservice.actors.stager import Stager
from dataservice.actors.state_log import open_state
from dataservice.actors.worker import Worker
from dataservice.config import Config, config_to_json
from dataservice.obs.web import WebServer
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
        if self.actor._metrics is not None:
            self._thread.run(self.actor._metrics.stop())
        if isinstance(self.actor, Worker) and self.actor._local is not None:
            self._thread.run(self.actor._local.stop(0.0))  # a kill leaves no socket either
        self._thread.close()
        if isinstance(self.actor, Worker) and self.actor._tools is not None:
            self.actor._tools.close()  # a kill leaves no threads either


class LocalService:
    def __init__(
        self,
        config: Config,
        *,
        workers: int = 1,
        nodes: tuple[str, ...] = ("n0",),
        web: bool = False,
    ) -> None:
        """`web`: with the coordinator's status page, at `page_url`."""
        self.config = config
        self.page_url = ""
        self._with_web = web
        self._web: WebServer | None = None
        self._nodes = nodes
        self._numbers = itertools.count()
        """Of workers: one that comes after another was cut has a name of its own."""
        self.workers: dict[str, _Runner] = {}
        self.stagers: dict[str, _Runner] = {}
        self.coordinator: Coordinator
        self.endpoint = ""
        self._port = 0
        self.start_coordinator()
        try:
            if config.staging.cache_dir is not None:
                for node in nodes:
                    self.add_stager(node)
            for number in range(workers):
                self.add_worker(nodes[number % len(nodes)])
        except BaseException:
            self.close()
            raise

    def start_coordinator(self) -> None:
        self._loop = LoopThread("coordinator")

        async def start() -> tuple[Coordinator, RunningServer, WebServer | None]:
            coordinator = Coordinator(self.config, PlannerProcess(), open_state(self.config))
            bind = f"127.0.0.1:{self._port or self.config.serving.port}"
            try:
                server = await start_server(
                    coordinator=coordinator, bind=bind, security=self.config.serving.security
                )
            except BaseException:
                await coordinator.stop()
                raise
            web: WebServer | None = None
            try:
                if self._with_web:
                    again = None if self._web is None else self._web.port
                    serving = self.config.serving
                    web = await start_coordinator_web(
                        coordinator, serving, port=server.port, again=again
                    )
                await coordinator.start()
            except BaseException:
                if web is not None:
                    await web.stop()
                await server.stop(0)
                await coordinator.stop()
                raise
            return coordinator, server, web

        try:
            self.coordinator, self._server, self._web = self._loop.run(start())
        except BaseException:
            self._loop.close()
            raise
        self._port = self._server.port
        self.endpoint = self._server.endpoint
        self.page_url = "" if self._web is None else self._web.url

    def stop_coordinator(self) -> None:
        if self._web is not None:
            self._loop.run(self._web.stop())
        self._loop.run(self._server.stop(0))
        del self._server  # gRPC's thread ends with the last of its servers
        self._loop.run(self.coordinator.stop())
        self._loop.close()

    def add_worker(self, node: str = "n0") -> str:
        worker_id = f"w{next(self._numbers)}-{node}"
        self.workers[worker_id] = _Runner(
            worker_id,
            lambda: Worker(
                coordinator=self.endpoint,
                worker_id=worker_id,
                node=node,
                security=self.config.serving.security,
            ),
        )
        return worker_id

    def add_stager(self, node: str) -> None:
        """With a cache directory of its own, below the configured one."""
        staging = self.config.staging
        assert staging.cache_dir is not None
        own = dataclasses.replace(staging, cache_dir=str(Path(staging.cache_dir) / node))
        config_json = config_to_json(dataclasses.replace(self.config, staging=own))
        self.stagers[node] = _Runner(
            f"stager-{node}",
            lambda: Stager(
                coordinator=self.endpoint, node=node, host=node, config_json=config_json
            ),
        )

    def remove_stager(self, node: str) -> None:
        """It says no good-bye: for the coordinator a node that is lost."""
        self.stagers.pop(node).stop()

    def cut_worker(self, worker_id: str) -> None:
        self.workers.pop(worker_id).cut()

    def status(self) -> dict[str, Any]:
        answer = self._loop.run(self.coordinator.get_status(GetStatus()))
        status: dict[str, Any] = json.loads(answer.status)
        return status

    def stager_when(
        self, condition: Callable[[dict[str, Any]], object], node: str = "n0", timeout_s: float = 30
    ) -> dict[str, Any]:
        """The figures of a node's stager in `status`, once they meet the condition."""
        until = time.monotonic() + timeout_s
        while True:
            stagers = {s["node"]: s for s in self.status()["stagers"]}
            if node in stagers and condition(stagers[node]):
                figures: dict[str, Any] = stagers[node]
                return figures
            assert time.monotonic() < until, f"stager of {node}: {stagers}"
            time.sleep(0.05)

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self.stop_coordinator)
            for runner in [*self.stagers.values(), *self.workers.values()]:
                stack.callback(runner.stop)

    def __enter__(self) -> LocalService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
