"""Who is alive: workers and stagers with their leases, and what each worker was given to build.

Invariants: a lease number is given once; a call with an older one is refused; whoever is silent for
longer than its lease is gone, whether its process still runs or not.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from dataservice.core.spreading import lease_of
from dataservice.errors import LeaseLost
from dataservice.wire.messages import PullWork, RegisterWorker
from dataservice.wire.staging import PullStaging, RegisterStager


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A pack that a worker was given; there are a hundred thousand, and the garbage collector need
    not look at them."""

    sequence: int
    session: int
    step: int
    pack: int
    """Number of the pack in its step."""


@dataclass(slots=True)
class WorkerSeat:
    hello: RegisterWorker
    lease: int
    heard: float
    lease_s: float
    """As the worker was told."""
    queue: deque[Entry] = field(default_factory=deque)
    stats: PullWork | None = None
    draining: bool = False
    builds_alone: str = ""
    """Id of the pack that it builds alone, since it said so; "" while there is none."""

    def entries_after(self, sequence: int, session: int) -> list[Entry]:
        """In their order; costs no more than they are, for sequence numbers rise."""
        new = list(takewhile(lambda entry: entry.sequence > sequence, reversed(self.queue)))
        return [entry for entry in reversed(new) if entry.session == session]


@dataclass(slots=True)
class StagerSeat:
    hello: RegisterStager
    lease: int
    heard: float
    stats: PullStaging | None = None


class Registry:
    def __init__(self, *, lease_s: float, stager_lease_s: float) -> None:
        self.lease_s = lease_s
        """The least; those of many workers are longer."""
        self.expected_workers = 0
        self.stager_lease_s = stager_lease_s
        self.workers: dict[str, WorkerSeat] = {}
        self.stagers: dict[str, StagerSeat] = {}
        self._leases = itertools.count(secrets.randbits(48))
        self._sequences = itertools.count(1)

    def seat_worker(self, hello: RegisterWorker) -> WorkerSeat:
        count = max(self.expected_workers, len(self.workers) + 1)
        seat = WorkerSeat(
            hello=hello,
            lease=next(self._leases),
            heard=time.monotonic(),
            lease_s=lease_of(count, self.lease_s),
        )
        self.workers[hello.worker_id] = seat
        return seat

    def seat_stager(self, hello: RegisterStager) -> StagerSeat:
        seat = StagerSeat(hello=hello, lease=next(self._leases), heard=time.monotonic())
        self.stagers[hello.node] = seat
        return seat

    def worker(self, worker_id: str, lease: int) -> WorkerSeat:
        """Renews the lease; LeaseLost tells the worker to register anew."""
        seat = self.workers.get(worker_id)
        if seat is None or seat.lease != lease:
            raise LeaseLost(f"worker {worker_id} has no lease {lease}; it must register anew")
        seat.heard = time.monotonic()
        return seat

    def stager(self, node: str, lease: int) -> StagerSeat:
        seat = self.stagers.get(node)
        if seat is None or seat.lease != lease:
            raise LeaseLost(f"stager of {node} has no lease {lease}; it must register anew")
        seat.heard = time.monotonic()
        return seat

    def give(self, worker_id: str, session: int, step: int, pack: int) -> None:
        entry = Entry(next(self._sequences), session, step, pack)
        self.workers[worker_id].queue.append(entry)

    def expired_workers(self) -> list[str]:
        now = time.monotonic()
        return [w for w, seat in self.workers.items() if seat.heard < now - seat.lease_s]

    def expired_stagers(self) -> list[str]:
        limit = time.monotonic() - self.stager_lease_s
        return [n for n, seat in self.stagers.items() if seat.heard < limit]

    def forgive(self, seconds: float) -> None:
        """Lengthens every lease once: it was not its holder that was silent."""
        for worker in self.workers.values():
            worker.heard += seconds
        for stager in self.stagers.values():
            stager.heard += seconds

    def usable_workers(self) -> list[str]:
        """Sorted ids of those that take new packs."""
        return sorted(w for w, seat in self.workers.items() if not seat.draining)

    def endpoint_of(self, worker_id: str | None) -> str | None:
        """None of a worker that is not alive."""
        seat = self.workers.get(worker_id) if worker_id is not None else None
        return seat.hello.endpoint if seat is not None else None
