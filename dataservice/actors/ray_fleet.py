"""The workers' and stagers' actors: started, replaced, drained and stopped.

Invariants: what to start or drain is decided by core.fleet; whether somebody is alive is decided
by the coordinator's leases; Ray only starts, kills and reports ends, which the coordinator is told.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataservice.actors.fleet_view import FleetNews, FleetView
from dataservice.actors.ray_actors import StagerActor, WorkerActor
from dataservice.actors.shared import STAGER_LEASES
from dataservice.actors.worker_memory import ENVIRONMENT
from dataservice.config import Config, config_to_json
from dataservice.core.fleet import plan_fleet

_LOG = logging.getLogger(__name__)

STOP_S = 10.0
"""Actors that are asked to end have so long before they are killed."""
START_GRACE_S = 60.0
"""A new actor may take this long to register before it is replaced."""
SILENT_LEASES = 5
"""An actor that is silent for so many leases is killed and replaced."""
STILL_LEASES = SILENT_LEASES - 1
"""An actor whose event loop stands still for so long says where, and ends before that."""
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


Tell = Callable[[FleetNews], FleetView]
"""Asks the coordinator; raises CoordinatorEnded."""


class RayFleet:
    """Used by one thread, its supervisor's."""

    def __init__(self, config: Config, endpoint: str, *, own_ray: bool) -> None:
        """`own_ray`: its processes have got what `ray_environment` sets from this one."""
        self._config = config
        # asking Ray to set it costs seconds where a node has just come up
        self._environment = {} if own_ray else {"runtime_env": {"env_vars": ENVIRONMENT}}
        self._config_json = config_to_json(config)
        self._endpoint = endpoint
        self._workers: dict[str, _Actor] = {}
        self._stagers: dict[str, _Actor] = {}

    def keep(self, tell: Tell) -> None:
        """Looks at nodes, actors and what the coordinator knows; starts, drains and kills."""
        nodes = _data_nodes(self._config.workers.resource)
        ended = self._drop_ended()
        view = tell(FleetNews(ended=ended, drain=()))
        lease_s = self._config.serving.lease_s
        self._drop_silent(self._workers, set(view.workers), lease_s)
        self._drop_silent(self._stagers, set(view.stagers), STAGER_LEASES * lease_s)
        suspect = {n for n, a in self._stagers.items() if a.registered and n not in view.stagers}
        change = plan_fleet(
            nodes=[n for n in sorted(nodes) if n not in suspect],
            stagers=list(self._stagers),
            workers={
                w: actor.node for w, actor in self._workers.items() if not view.workers.get(w)
            },
            target=view.target_workers,
        )
        if self._config.staging.cache_dir is not None:
            for node in change.start_stagers:
                self._start_stager(nodes[node])
        for node in change.start_workers:
            self._start_worker(nodes[node])
        if change.drain_workers:
            tell(FleetNews(ended={}, drain=change.drain_workers))

    def wait_for_news(self, changed: Any, timeout_s: float) -> None:
        """Until an actor ends, the coordinator says `changed`, or the time is over."""
        ends = [actor.running for actor in self._all()]
        ray.wait([changed, *ends], num_returns=1, timeout=timeout_s)

    def expect_anew(self) -> None:
        """The coordinator is a new one, with which everybody has yet to register."""
        now = time.monotonic()
        for actor in self._all():
            actor.seen, actor.registered = now, False

    def stop(self) -> None:
        for actor in self._all():
            actor.handle.stop.remote()
        ends = [actor.running for actor in self._all()]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=STOP_S)
        for actor in self._all():
            ray.kill(actor.handle)

    def _all(self) -> list[_Actor]:
        return [*self._workers.values(), *self._stagers.values()]

    def _drop_ended(self) -> dict[str, str]:
        """The workers that have ended, and how."""
        ended: dict[str, str] = {}
        for group in (self._workers, self._stagers):
            running = {actor.running: name for name, actor in group.items()}
            if not running:
                continue
            done, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
            for reference in done:
                name = running[reference]
                actor = group.pop(name)
                how = "it came to its end"
                try:
                    ray.get(reference, timeout=0)
                except ray.exceptions.RayError as error:
                    how = str(error).strip().splitlines()[0]
                    _LOG.warning("%s ended: %s", name, how)
                ray.kill(actor.handle)
                if group is self._workers:
                    ended[name] = how
        return ended

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
            **self._environment,
        )
        handle = remote.remote(
            coordinator=self._endpoint,
            worker_id=worker_id,
            node=node.node_id,
            bind=f"{serving.host}:0",
            insecure=serving.insecure,
            memory_bytes=self._config.workers.memory_bytes,
            still_s=STILL_LEASES * serving.lease_s,
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
            still_s=STILL_LEASES * STAGER_LEASES * self._config.serving.lease_s,
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
