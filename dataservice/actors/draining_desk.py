"""Takes workers, nodes or the whole service out of service without losing anything.

Invariants: who drains takes nothing new; a drained node stages no lane and keeps no worker until it
is taken back or joins Ray anew, also after a coordinator restart, because the keeper of the fleet
remembers it; the whole service, once it drains, hands out no more steps and is not taken back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from dataservice.actors.fleet_view import FleetNews
from dataservice.actors.session import Session
from dataservice.actors.shared import Shared
from dataservice.actors.staging_desk import StagingDesk
from dataservice.actors.work_desk import WorkDesk
from dataservice.errors import ConfigError
from dataservice.wire.draining import Drain, Drained

_LOG = logging.getLogger(__name__)

NAMED = 8
"""Ranks, workers or nodes that a sentence names at most."""


class DrainingDesk:
    def __init__(
        self, shared: Shared, work: WorkDesk, staging: StagingDesk, wind_down: Callable[[], None]
    ) -> None:
        """`wind_down`: has no more steps handed out."""
        self._shared = shared
        self._work = work
        self._staging = staging
        self._wind_down = wind_down
        self.turn_away: Callable[[], Awaitable[None]] | None = None
        """Turns health to NOT_SERVING."""
        self._turning: asyncio.Future[None] | None = None
        self._hosts: dict[str, str] = {}
        """Of the data nodes, by id, as the keeper of the fleet knows them."""
        self._heard_of = False
        """Whether the keeper has told of them."""

    def keeper_says(self, news: FleetNews) -> None:
        self._hosts = news.nodes
        drained = self._shared.drained_nodes
        if not self._heard_of:
            self._heard_of = True
            for node in set(news.drained) - drained:
                self._drain_node(node)
            if news.winding_down:
                self._drain_service()
        drained.intersection_update(news.nodes)  # one that joins Ray anew has another id

    def status(self) -> dict[str, Any]:
        return {
            "winding_down": self._shared.winding_down,
            "drained_nodes": sorted(self._shared.drained_nodes),
        }

    async def drain(self, request: Drain) -> Drained:
        """Begins, or goes on with, what is asked for; ConfigError for who is not there."""
        _ = self._shared.plan
        if request.worker and request.node:
            raise ConfigError(
                f"worker {request.worker} and node {request.node}: name one of the two"
            )
        if request.undo and not request.node:
            raise ConfigError("undo without a node: only a node's draining can be taken back")
        if request.worker:
            return self._worker(request)
        if request.node:
            return self._node(request)
        self._drain_service()
        return self._service()

    # ---- a worker --------------------------------------------------------------------------------

    def _worker(self, request: Drain) -> Drained:
        workers = self._shared.registry.workers
        if request.worker not in workers:
            if request.again:
                return Drained(done=True, words=f"worker {request.worker} has left")
            raise ConfigError(
                f"there is no worker {request.worker}; there are {_named(sorted(workers))}"
            )
        self._drain_workers([request.worker], now=request.now)
        packs = self._packs([request.worker])
        words = f"worker {request.worker} is to leave; packs still to be fetched from it: {packs}"
        return Drained(done=False, workers=(request.worker,), packs=packs, words=words)

    def _drain_workers(self, workers: list[str], *, now: bool) -> None:
        seats = self._shared.registry.workers
        self._work.drain(tuple(w for w in workers if not seats[w].draining))
        for worker_id in workers if now or not self._is_read() else ():
            if self._packs([worker_id]):
                self._work.drain_now(worker_id)

    def _packs(self, workers: list[str]) -> int:
        seats = self._shared.registry.workers
        return sum(len(self._work.outstanding(seats[w])) for w in workers)

    def _is_read(self) -> bool:
        """Whether anybody is there who may fetch packs."""
        session, silent = self._shared.session, self._silent
        return session is not None and any(
            not rank.closed and rank.heard > silent for rank in session.ranks
        )

    @property
    def _silent(self) -> float:
        """Monotonic time; who was last heard before it is taken for gone."""
        return time.monotonic() - self._shared.config.serving.open_timeout_s

    # ---- a node ----------------------------------------------------------------------------------

    def _node(self, request: Drain) -> Drained:
        found = self._found(request.node)
        if not found and request.again:
            return Drained(done=True, words=f"node {request.node} has left")
        if len(found) != 1:
            hosts = self._all_hosts()
            known = [f"{node} ({host})" for node, host in sorted(hosts.items())]
            of_how_many = "is the name of several nodes" if found else "is no data node"
            raise ConfigError(
                f"node {request.node} {of_how_many}; give the host or the id of one of "
                f"{_named(known)}"
            )
        (node,) = found
        if request.undo:
            return self._take_back(node)
        self._drain_node(node, now=request.now)
        left = self._workers_on(node)
        lanes = sum(name == node for name in self._shared.lane_nodes)
        packs = self._packs(left)
        words = f"node {request.node} is drained: no worker and no lane is on it"
        if left or lanes:
            words = (
                f"node {request.node}: workers still to leave: {len(left)}, packs still to be "
                f"fetched from them: {packs}, lanes that it stages: {lanes}"
            )
        return Drained(
            done=not left and not lanes, workers=tuple(left), packs=packs, lanes=lanes, words=words
        )

    def _found(self, name: str) -> list[str]:
        """Ids of the nodes that it may be the name of."""
        hosts = self._all_hosts()
        if name in hosts:
            return [name]
        by_host = [node for node, host in hosts.items() if host == name]
        return by_host or [node for node in hosts if node.startswith(name)]

    def _all_hosts(self) -> dict[str, str]:
        """Of every node, by id; a host of "" is not known."""
        registry = self._shared.registry
        hosts = {seat.hello.node: "" for seat in registry.workers.values()}
        hosts |= {node: seat.hello.host for node, seat in registry.stagers.items()}
        return hosts | self._hosts

    def _drain_node(self, node: str, *, now: bool = False) -> None:
        if node not in self._shared.drained_nodes:
            _LOG.info("node %s is drained: its lanes move, its workers leave", node)
            self._shared.drained_nodes.add(node)
            self._staging.map_lanes()
            self._shared.on_scale()
        self._drain_workers(self._workers_on(node), now=now)

    def _workers_on(self, node: str) -> list[str]:
        workers = self._shared.registry.workers
        return sorted(w for w, seat in workers.items() if seat.hello.node == node)

    def _take_back(self, node: str) -> Drained:
        if node not in self._shared.drained_nodes:
            return Drained(done=True, words=f"node {node} was not drained")
        _LOG.info("node %s is taken back", node)
        self._shared.drained_nodes.discard(node)
        self._staging.map_lanes()
        self._shared.on_scale()
        return Drained(
            done=True, words=f"node {node} is taken back: it is given lanes and workers again"
        )

    # ---- the service -----------------------------------------------------------------------------

    def _drain_service(self) -> None:
        if self._shared.winding_down:
            return
        _LOG.info("the service drains: no more steps are handed out")
        self._wind_down()
        if self.turn_away is not None:
            self._turning = asyncio.ensure_future(_run(self.turn_away))

    def _service(self) -> Drained:
        session = self._shared.session
        reading = [] if session is None or session.failure is not None else self._reading(session)
        if not reading:
            words = "the service is drained: every rank has what it was told of; it can be stopped"
            return Drained(done=True, words=words)
        assert session is not None
        last = max(session.ranks[rank].given for rank in reading) - 1
        words = (
            f"the service hands out no more steps; those up to step {last} are still read by "
            f"{len(reading)} of {session.grid.dp_size} ranks: {_named([*map(str, reading)])}"
        )
        packs = self._packs(list(self._shared.registry.workers))
        return Drained(done=False, packs=packs, words=words)

    def _reading(self, session: Session) -> list[int]:
        """Ranks that have yet to read steps that they know of, and are alive."""
        return [
            number
            for number, rank in enumerate(session.ranks)
            if not rank.closed and rank.done < (rank.given, 0) and rank.heard > self._silent
        ]


async def _run(what: Callable[[], Awaitable[None]]) -> None:
    await what()


def _named(names: list[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
