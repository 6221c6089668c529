"""The workers' and stagers' actors: started, replaced, drained and stopped.

Invariants: what to start or drain is decided by core.fleet; whether somebody is alive is decided
by the coordinator's leases; Ray only starts, kills and reports ends, which the coordinator is told.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataservice.actors.fleet_view import FleetNews, FleetView
from dataservice.actors.ray_actors import StagerActor, WorkerActor
from dataservice.actors.ray_nodes import DataNode, data_nodes, workers_of_nodes
from dataservice.actors.shared import STAGER_LEASES
from dataservice.actors.worker_memory import ENVIRONMENT
from dataservice.config import Config, config_to_json
from dataservice.core.fleet import NOWHERE, plan_fleet
from dataservice.errors import DataServiceError

_LOG = logging.getLogger(__name__)

STOP_S = 10.0
"""Actors that are asked to end have so long before they are killed."""
START_GRACE_S = 60.0
"""A new actor may take this long to register before it is replaced."""
FULL_S = 300.0
"""No more workers are started on a node for so long after one did not come up there."""
SILENT_LEASES = 5
"""An actor that is silent for so many leases is killed and replaced."""
STILL_LEASES = SILENT_LEASES - 1
"""An actor whose event loop stands still for so long says where, and ends before that."""
ROOM_S = 10.0
"""A new worker for which Ray has found no node by then has no room."""
SHARE = 0.001
"""Of the data node resource that an actor claims: it marks the node, it does not ration it."""


@dataclass(slots=True)
class _Actor:
    node: str
    """NOWHERE until Ray has found a node for it."""
    handle: Any
    running: Any
    """Object reference of its `run()`: done when the actor has ended."""
    seen: float
    """Monotonic time when it was started or last known to the coordinator."""
    came_up: bool = False
    """Whether some coordinator has known it."""
    registered: bool = False
    """With this one."""
    came: Any = None
    """Object reference of the node that it came up on, while that is not known."""
    avoids: tuple[str, ...] = ()
    """Nodes that Ray may not start it on."""


Tell = Callable[[FleetNews], FleetView]
"""Asks the coordinator; raises CoordinatorEnded."""


def _told(error: ray.exceptions.RayError) -> str:
    """An error of ours by its own text; Ray's begins with where it was raised."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, DataServiceError):
        return f"{type(cause).__name__}: {cause}"
    return str(error).strip().splitlines()[0]


class RayFleet:
    """Used by one thread, its supervisor's."""

    def __init__(self, config: Config, endpoint: str, *, own_ray: bool) -> None:
        self._config = config
        # a Ray of our own has it from this process; asking costs seconds where a node just came up
        self._environment = {} if own_ray else {"runtime_env": {"env_vars": ENVIRONMENT}}
        self._config_json = config_to_json(config)
        self._endpoint = endpoint
        self._own_cores = len(os.sched_getaffinity(0)) if own_ray else None
        self._last: FleetView | None = None
        self._full_until: dict[str, float] = {}
        """Monotonic, by node on which a worker did not come up."""
        self._workers: dict[str, _Actor] = {}
        self._stagers: dict[str, _Actor] = {}

    def keep(self, tell: Tell) -> None:
        """Looks at nodes, actors and what the coordinator knows; starts, drains and kills."""
        nodes = data_nodes(
            ray.nodes(),
            resource=self._config.workers.resource,
            num_cpus=self._config.workers.num_cpus,
            own_cores=self._own_cores,
        )
        view = self._last = tell(self._news(nodes, ended=self._drop_ended()))
        usable = {n: node for n, node in nodes.items() if n not in view.drained}
        self._find_placed()
        lease_s = self._config.serving.lease_s
        self._drop_silent(self._workers, set(view.workers), lease_s)
        self._drop_silent(self._stagers, set(view.stagers), STAGER_LEASES * lease_s)
        self._leave_nodes(view)
        suspect = {n for n, a in self._stagers.items() if a.registered and n not in view.stagers}
        change = plan_fleet(
            nodes={n: self._room(usable[n]) for n in sorted(usable) if n not in suspect},
            stagers=list(self._stagers),
            workers={
                w: actor.node for w, actor in self._workers.items() if not view.workers.get(w)
            },
            target=view.target_workers,
            wait_for_nodes=not usable and self._config.workers.autoscale == "nodes",
            starting=any(
                w not in view.workers and actor.node != NOWHERE
                for w, actor in self._workers.items()
            ),
        )
        if self._config.staging.cache_dir is not None:
            for node in change.start_stagers:
                self._start_stager(nodes[node])
        for node in change.start_workers:
            self._start_worker(nodes[node] if node != NOWHERE else None)
        for worker_id in change.drain_workers:
            if worker_id not in view.workers:  # it has nothing to serve yet
                ray.kill(self._workers.pop(worker_id).handle)
        if drain := tuple(w for w in change.drain_workers if w in view.workers):
            tell(self._news(nodes, drain=drain))

    def _news(
        self,
        nodes: dict[str, DataNode],
        *,
        ended: dict[str, str] | None = None,
        drain: tuple[str, ...] = (),
    ) -> FleetNews:
        last = self._last
        drained = () if last is None else last.drained
        return FleetNews(
            ended=ended or {},
            drain=drain,
            room=workers_of_nodes(node for n, node in nodes.items() if n not in drained),
            without_room=sum(
                actor.came is not None and time.monotonic() - actor.seen > ROOM_S
                for actor in self._workers.values()
            ),
            target=None if last is None else last.target_workers,
            by_hand=last is not None and last.by_hand,
            drained=drained,
            winding_down=last is not None and last.winding_down,
            nodes={n: node.host for n, node in nodes.items()},
        )

    def _leave_nodes(self, view: FleetView) -> None:
        """Ends what has nothing to serve on drained nodes: workers that are only coming up, and
        the stager once the workers have left, which read its copies; and workers that wait for a
        node with other ones in mind."""
        for worker_id, actor in list(self._workers.items()):
            waits_for_others = actor.came is not None and actor.avoids != view.drained
            if not actor.came_up and (actor.node in view.drained or waits_for_others):
                ray.kill(self._workers.pop(worker_id).handle)
        busy = {actor.node for actor in self._workers.values()}
        for node, actor in self._stagers.items():
            if node in view.drained and node not in busy:
                actor.handle.stop.remote()

    def _room(self, node: DataNode) -> int:
        """No more than there are where others have taken the CPUs."""
        if time.monotonic() < self._full_until.get(node.node_id, 0.0):
            return sum(actor.node == node.node_id for actor in self._workers.values())
        return node.room

    def _find_placed(self) -> None:
        """Where Ray has started the workers that could go anywhere."""
        waiting = {a.came: a for a in self._workers.values() if a.came is not None}
        if not waiting:
            return
        done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        for reference in done:
            actor = waiting[reference]
            actor.came = None
            try:
                actor.node, actor.seen = ray.get(reference, timeout=0), time.monotonic()
            except ray.exceptions.RayError as error:
                _LOG.warning("a worker did not start: %s", str(error).strip().splitlines()[0])

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
        up = [actor for actor in self._all() if actor.came is None]
        for actor in up:
            actor.handle.stop.remote()
        ends = [actor.running for actor in up]
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
                    how = _told(error)
                    _LOG.warning("%s ended: %s", name, how)
                ray.kill(actor.handle)
                if group is self._workers:
                    ended[name] = how
        return ended

    def _drop_silent(self, group: dict[str, _Actor], known: set[str], lease_s: float) -> None:
        now = time.monotonic()
        for name, actor in list(group.items()):
            if name in known:
                actor.seen, actor.came_up, actor.registered = now, True, True
                continue
            if actor.came is not None:
                continue  # Ray has no node for it yet
            grace = SILENT_LEASES * lease_s if actor.registered else START_GRACE_S
            if now - actor.seen > grace:
                _LOG.warning("%s is silent: it is killed and replaced", name)
                if not actor.came_up:
                    self._full_until[actor.node] = now + FULL_S
                ray.kill(actor.handle)
                del group[name]

    def _start_worker(self, node: DataNode | None) -> None:
        """None: wherever Ray has room, or its autoscaler makes it."""
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
            node="" if node is None else node.node_id,
            bind=f"{serving.host}:0",
            security=serving.security,
            memory_bytes=self._config.workers.memory_bytes,
            still_s=STILL_LEASES * serving.lease_s,
        )
        came = handle.node.remote() if node is None else None
        where = NOWHERE if node is None else node.node_id
        self._workers[worker_id] = _Actor(
            where,
            handle,
            handle.run.remote(),
            time.monotonic(),
            came=came,
            avoids=() if self._last is None else self._last.drained,
        )

    def _start_stager(self, node: DataNode) -> None:
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

    def _remote(self, actor: type, node: DataNode | None, *, num_cpus: float, **more: Any) -> Any:
        options: dict[str, Any] = {
            "num_cpus": num_cpus,
            "max_concurrency": 2,
            "resources": {self._config.workers.resource: SHARE},
            **more,
        }
        drained = () if self._last is None else self._last.drained
        if node is not None:
            here = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            options["scheduling_strategy"] = here
        elif drained:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(drained)})"}
        return ray.remote(**options)(actor)
