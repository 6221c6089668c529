"""The Ray actors, and the keeper that starts, replaces and drains them; all Ray calls stand here
and in ray_local and launch.

Invariants: what to start or drain is decided by core.fleet; whether somebody is alive is decided
by the coordinator's leases; Ray only starts, kills and reports ends.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataservice.actors.coordinator import Coordinator
from dataservice.actors.ray_actors import StagerActor, WorkerActor
from dataservice.actors.worker_memory import ENVIRONMENT
from dataservice.config import Config, config_to_json
from dataservice.core.fleet import plan_fleet

_LOG = logging.getLogger(__name__)

KEEP_S = 1.0
START_GRACE_S = 60.0
"""A new actor may take this long to register before it is replaced."""
SILENT_LEASES = 5
"""An actor that is silent for so many leases is killed and replaced."""
SHARE = 0.001
"""Of the data node resource that an actor claims: it marks the node, it does not ration it."""


@dataclass(slots=True)
class _Actor:
    node: str
    handle: Any
    running: Any
    """Object reference of its `run()`: done when the actor has ended."""
    seen: float
    """Monotonic time when it was started or last known to the coordinator."""
    registered: bool = False


@dataclass(frozen=True, slots=True)
class _Node:
    node_id: str
    host: str
    """Host name, matched with the trainers'."""


class RayFleet:
    """Lives in the coordinator's actor and event loop."""

    def __init__(self, coordinator: Coordinator, config: Config, endpoint: str) -> None:
        self._coordinator = coordinator
        self._config = config
        self._config_json = config_to_json(config)
        self._endpoint = endpoint
        self._workers: dict[str, _Actor] = {}
        self._stagers: dict[str, _Actor] = {}
        self._wake = asyncio.Event()
        coordinator.shared.on_scale = self._wake.set

    async def keep(self) -> None:
        while True:
            try:
                await self._keep_once()
            except Exception:
                _LOG.exception("the set of workers could not be looked after; trying again")
            self._wake.clear()
            try:
                async with asyncio.timeout(KEEP_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def stop(self) -> None:
        for actor in [*self._workers.values(), *self._stagers.values()]:
            actor.handle.stop.remote()
        ends = [a.running for a in [*self._workers.values(), *self._stagers.values()]]
        if ends:
            await asyncio.to_thread(ray.wait, ends, num_returns=len(ends), timeout=10.0)
        for actor in [*self._workers.values(), *self._stagers.values()]:
            ray.kill(actor.handle)

    async def _keep_once(self) -> None:
        nodes = await asyncio.to_thread(_data_nodes, self._config.workers.resource)
        await self._drop_ended()
        registry = self._coordinator.shared.registry
        self._drop_silent(self._workers, set(registry.workers), registry.lease_s)
        self._drop_silent(self._stagers, set(registry.stagers), registry.stager_lease_s)
        suspect = {
            n for n, a in self._stagers.items() if a.registered and n not in registry.stagers
        }
        usable = [n for n in sorted(nodes) if n not in suspect]
        workers = {
            w: actor.node
            for w, actor in self._workers.items()
            if not (w in registry.workers and registry.workers[w].draining)
        }
        change = plan_fleet(
            nodes=usable,
            stagers=list(self._stagers),
            workers=workers,
            target=self._coordinator.target_workers,
        )
        if self._config.staging.cache_dir is not None:
            for node in change.start_stagers:
                self._start_stager(nodes[node])
        for node in change.start_workers:
            self._start_worker(nodes[node])
        if change.drain_workers:
            self._coordinator.work.drain(change.drain_workers)

    async def _drop_ended(self) -> None:
        for group in (self._workers, self._stagers):
            ends = {actor.running: name for name, actor in group.items()}
            if not ends:
                continue
            done, _ = await asyncio.to_thread(
                ray.wait, list(ends), num_returns=len(ends), timeout=0
            )
            for reference in done:
                name = ends[reference]
                actor = group.pop(name)
                try:
                    await reference
                except ray.exceptions.RayError as error:
                    _LOG.warning("%s ended: %s", name, str(error).splitlines()[0])
                ray.kill(actor.handle)

    def _drop_silent(self, group: dict[str, _Actor], known: set[str], lease_s: float) -> None:
        now = time.monotonic()
        for name, actor in list(group.items()):
            if name in known:
                actor.seen, actor.registered = now, True
                continue
            grace = SILENT_LEASES * lease_s if actor.registered else START_GRACE_S
            if now - actor.seen > grace:
                _LOG.warning("%s is silent: it is killed and replaced", name)
                ray.kill(actor.handle)
                del group[name]

    def _start_worker(self, node: _Node) -> None:
        worker_id = f"worker-{secrets.token_hex(4)}"
        serving = self._config.serving
        remote = self._remote(
            WorkerActor,
            node,
            num_cpus=self._config.workers.num_cpus,
            runtime_env={"env_vars": ENVIRONMENT},
        )
        handle = remote.remote(
            coordinator=self._endpoint,
            worker_id=worker_id,
            node=node.node_id,
            bind=f"{serving.host}:0",
            insecure=serving.insecure,
            memory_bytes=self._config.workers.memory_bytes,
        )
        self._workers[worker_id] = _Actor(
            node.node_id, handle, handle.run.remote(), time.monotonic()
        )

    def _start_stager(self, node: _Node) -> None:
        handle = self._remote(StagerActor, node, num_cpus=0).remote(
            coordinator=self._endpoint,
            node=node.node_id,
            host=node.host,
            config_json=self._config_json,
        )
        self._stagers[node.node_id] = _Actor(
            node.node_id, handle, handle.run.remote(), time.monotonic()
        )

    def _remote(self, actor: type, node: _Node, *, num_cpus: float, **more: Any) -> Any:
        options: dict[str, Any] = {
            "num_cpus": num_cpus,
            "max_concurrency": 2,
            "resources": {self._config.workers.resource: SHARE},
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            **more,
        }
        return ray.remote(**options)(actor)


def _data_nodes(resource: str) -> dict[str, _Node]:
    return {
        node["NodeID"]: _Node(node["NodeID"], node["NodeManagerHostname"])
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get(resource, 0) > 0
    }
